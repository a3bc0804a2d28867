"""Views an iteration folder: layouts and files by ``metadata.json``, or by the records where that
is damaged or still missing.

weights = view_of_iteration(storage, root, candidate)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import xxhash

from mindresume.errors import CorruptFileError, LoadError, StrategyError
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.iterations import METADATA
from mindresume.formats.metadata import (
    TensorMetadata,
    load_metadata,
    load_metadata_bytes,
    metadata_from_records,
    read_metadata,
)
from mindresume.formats.weight_files import header_of
from mindresume.formatting import listed
from mindresume.model.layout import is_scalar
from mindresume.model.training_state import is_transient
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor


def view_of_iteration(
    directory: CheckpointDir, candidate: Candidate, split: bool = False
) -> CheckpointView:
    """Views an iteration folder.

    Args:
        split: the layouts must tell the optimizer shard from tensor parallelism, if records do:
            ``metadata.json`` does not.
    Raises:
        CorruptFileError: ``metadata.json`` is damaged, or a file that it names is missing and no
            other holds the slice.
        StrategyError: it does not name some tensors, except counters; not if there is one rank.
    """
    folder = directory.path(candidate.iteration_dir)
    files = {
        rank: tuple(directory.path(file.path) for file in files)
        for rank, files in candidate.files.items()
    }
    weights = CheckpointView(directory.storage, folder, {}, files, candidate=candidate)
    named, weights.split = _described(directory, weights, split)
    tensors, where = {}, {}
    for name, row in named.items():
        where[name] = {
            copy.rank: os.path.join(folder, copy.file)
            for copies in row.stored.values()
            for copy in copies
        }
        first, others = min(where[name]), set[int]()
        if row.layout:
            first, size = row.first, row.layout.stage_size
            others = {rank - rank % size for rank in where[name]} - {first}
        tensors[name] = Tensor(
            name, row.dtype, row.shape, row.layout, first, other_stages=tuple(sorted(others))
        )
    for name, rank, path, tensor in _unnamed_tensors(directory, weights, named):
        tensors[name], where[name] = tensor, {rank: path}
    weights.tensors, weights.places = tensors, where
    size = max(
        (tensor.first + tensor.layout.stage_size for tensor in tensors.values() if tensor.layout),
        default=1,
    )
    weights.world_size = candidate.world_size if candidate.records_dir else size
    return weights


def _described(
    directory: CheckpointDir, weights: CheckpointView, split: bool
) -> tuple[Mapping[str, TensorMetadata], bool]:
    """Returns ({tensor: description}, whether optimizer shards stand apart) from the records, which
    hold the facts of ``metadata.json`` and more. After redundancy removal the records of all ranks
    would be needed, so unless they must be split that file is read instead, if it has the recorded
    checksum. hyper_parallel, which cuts the parameters of the PyNative trainer (only that one has
    counters of a trainer), gives one layout: its shards over data parallelism may lie in any
    dimension."""
    candidate, folder = weights.candidate, weights.name
    if candidate.records_dir is None:
        return load_metadata(directory.storage, folder) if METADATA in directory.storage.list(
            folder
        ) else {}, False
    if candidate.world_size == 1:
        return {}, True
    written = next(
        (file for file in candidate.metadata_files if os.path.basename(file.path) == METADATA), None
    )
    if candidate.deduplicated and not split and written is not None:
        with suppress(CorruptFileError):  # the records decide then
            data = load_metadata_bytes(directory.storage, folder)
            if xxhash.xxh3_128_hexdigest(data) == written.checksum:
                return read_metadata(data, os.path.join(folder, METADATA)), False
    files = [
        [os.path.basename(file.path) for file in candidate.files.get(rank, ())]
        for rank in range(candidate.world_size)
    ]
    rows = metadata_from_records(files, candidate.deduplicated, weights)
    return {row.name: row for row in rows}, not (candidate.state and candidate.state.trainer)


def _unnamed_tensors(
    directory: CheckpointDir, weights: CheckpointView, named: Mapping[str, TensorMetadata]
) -> list[tuple[str, int, str, Tensor]]:
    """Returns (name, rank, path, tensor) for tensors of the first rank that the metadata does not
    name: mindformers leaves out the counters of the optimizer, which the strategy does not name."""
    candidate = weights.candidate
    if not candidate.files:
        return []
    rank, found, lost = min(candidate.files), [], []
    for file in candidate.files[rank]:
        path = directory.path(file.path)
        if directory.storage.status(path) is None and named:
            continue
        header = weights.headers[path] = header_of(directory, file)
        for name, entry in header.tensors.items():
            if name in named or is_transient(name) and candidate.world_size > 1:
                continue
            if entry.dtype == "str":
                raise LoadError(
                    f"{path}: {name} is a text, not a tensor; it can be part of no other layout"
                )
            if candidate.world_size > 1 and not is_scalar(entry.shape):
                lost.append(f"{name} {entry.shape}")
            found.append((name, rank, path, Tensor(name, entry.dtype, entry.shape, None, rank)))
    if lost:
        raise StrategyError(
            f"{weights.name}: {len(lost)} tensors have no layout: {listed(lost, 5)}; "
            f"{METADATA} does not name them, so how they are cut is unknown"
        )
    return found
