"""Views one saved step as tensors in global shape: rank folders, or an iteration folder.

rank folders      layouts by the records, or by the strategy of the job that saved
iteration folder  layouts and files by ``metadata.json``, or by the records where that is
                  damaged or still missing
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

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
from mindresume.formats.records import RecordFolder
from mindresume.formats.strategy import Strategy
from mindresume.formats.weight_files import header_of
from mindresume.formatting import counted, listed, ranks_count
from mindresume.model.layout import TensorLayout, held, is_scalar
from mindresume.model.training_state import is_transient, may_be_absent
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor, missing_parameters
from mindresume.storage import parallel
from mindresume.tensor_files.header import DTYPES


def view_of_rank_folders(
    directory: CheckpointDir, candidate: Candidate, strategy: Strategy | None = None
) -> CheckpointView:
    """Views rank folders. Reads one header (and record) per stage; more only after redundancy
    removal.

    Args:
        strategy: required for checkpoints that mindformers wrote on several ranks. If records hold
            the layouts, it must agree.
    Raises:
        StrategyError: names the tensors whose layout is unknown or does not fit.
        LoadError: all files of a pipeline stage are missing, or the only file with some tensor is.
    """
    where, world_size = f"{directory.root}, step {candidate.step}", candidate.world_size
    if strategy is not None and strategy.world_size != world_size:
        raise StrategyError(
            f"{strategy.source}: a strategy of {ranks_count(strategy.world_size)} "
            f"({counted(len(strategy.stages), 'stage')} of {strategy.stage_size}), the checkpoint "
            f"{where}, is of {world_size}"
        )
    files = {
        rank: (directory.path(of_rank[0].path),)
        for rank, of_rank in candidate.files.items()
        if of_rank
    }
    found: dict[str, Tensor] = {}
    weights = CheckpointView(
        directory.storage, directory.root, found, files, candidate=candidate, world_size=world_size
    )
    size = strategy.stage_size if strategy else _stage_size(weights)
    stages = [range(first, first + size) for first in range(0, world_size, size)]
    held_by = [
        _held(weights, where, ranks, strategy.stages[stage] if strategy else ())
        for stage, ranks in enumerate(stages)
    ]
    if strategy:
        strategy = strategy.fit_dimensions(
            {name: len(shape) for stage in held_by for name, (_, _, shape) in stage.items()}
        )
    lost: list[str] = []
    for stage, ranks in enumerate(stages):
        given = strategy.stages[stage] if strategy else {}
        for name, (rank, dtype, shape) in held_by[stage].items():
            known, row = found.get(name), weights.recorded(rank, name)
            layout = (
                (row.layout if row else None)
                or given.get(name)
                or (known.layout if known else None)
            )
            if (
                layout is None
                and world_size > 1
                and not is_scalar(shape)
                and not _same_by_records(weights, name, (*([known.first] if known else []), *ranks))
            ):
                lost.append(f"{name} {shape}")
                continue
            try:
                full = shape if layout is None else layout.global_shape(shape)
            except ValueError as error:
                raise StrategyError(f"{name}: {error}") from error
            if layout is not None and given.get(name) not in (None, layout):
                _check_same_cut(name, full, layout, given[name], ranks)
            if known is None:
                found[name] = Tensor(name, dtype, full, layout, ranks[0], size)
                continue
            # shared by several stages, or a counter
            if (known.dtype, known.shape, known.layout) != (dtype, full, layout) and not is_scalar(
                full
            ):
                raise StrategyError(
                    f"{directory.root}: the pipeline stage of rank {known.first} holds {name} as "
                    f"{known.dtype} of whole shape {known.shape}, cut as {known.layout}, that of "
                    f"rank {ranks[0]} "
                    f"as {dtype} of {full}, cut as {layout}; expected the same on both"
                )
            found[name] = replace(known, other_stages=(*known.other_stages, ranks[0]))
        _check_lost(weights, where, ranks, given)
    if lost:
        source = (
            strategy.source
            if strategy
            else "the checkpoint records no layout for them, and no strategy is given "
            "(src_strategy_path_or_dir, --from)"
        )
        raise StrategyError(
            f"{where}: {len(lost)} tensors have no layout: {listed(lost, 5)}; {source}"
        )
    return weights


def _stage_size(weights: CheckpointView) -> int:
    """Returns the number of ranks of a stage, by the records; of the job, if no record has a
    layout."""
    for rank in weights.files:
        details = weights.details(rank)
        sizes = (
            {row.layout.stage_size for row in details.tensors.values() if row.layout}
            if details
            else set()
        )
        if sizes:
            size = sizes.pop()
            if sizes or weights.world_size % size:
                raise StrategyError(
                    f"{weights.name}: the record of rank {rank} has layouts of stages of {size} "
                    f"ranks{' and other sizes' if sizes else ''}, the job had {weights.world_size}"
                )
            return size
    return weights.world_size


def _held(
    weights: CheckpointView, where: str, stage: range, named: Collection[str]
) -> dict[str, tuple[int, str, tuple[int, ...]]]:
    """Returns {tensor: (rank, dtype, local shape)} of a stage. All its ranks hold the same names,
    unless redundancy was removed. A safetensors file says so; for a ckpt file it is assumed if a
    tensor of the strategy (``named``) is missing."""
    paths = {rank: weights.files[rank][0] for rank in stage if rank in weights.files}
    one = next((rank for rank, path in paths.items() if weights.header(path) is not None), None)
    if one is None:
        raise LoadError(
            f"{where}: the files of all ranks from {stage[0]} to {stage[-1]}, a whole pipeline "
            "stage, are missing"
        )
    headers = {one: weights.header(paths[one])}
    if headers[one].metadata.get("remove_redundancy") == "True" or any(
        name not in headers[one].tensors and not may_be_absent(name) for name in named
    ):
        headers = dict(
            zip(paths, parallel(weights.storage, weights.header, paths.values()), strict=True)
        )
    found: dict[str, tuple[int, str, tuple[int, ...]]] = {}
    for rank, header in headers.items():
        for name, entry in header.tensors.items() if header else ():
            if entry.dtype not in DTYPES:
                raise LoadError(
                    f"{paths[rank]}: {name} is a text, not a tensor; it can be part of no other "
                    "layout"
                )
            found.setdefault(name, (rank, entry.dtype, entry.shape))
    return found


def _same_by_records(weights: CheckpointView, name: str, ranks: Iterable[int]) -> bool:
    """Returns whether the recorded checksums of a tensor without a layout agree on ``ranks`` (data
    parallel)."""
    rows = [weights.recorded(rank, name) for rank in ranks]
    return (
        rows[0] is not None
        and len({(row.dtype, row.shape, row.checksum) if row else None for row in rows}) == 1
    )


def _check_same_cut(
    name: str, full: tuple[int, ...], known: TensorLayout, given: TensorLayout, ranks: Sequence[int]
) -> None:
    """Raises StrategyError unless the layout of the strategy (``given``) cuts a tensor as that of
    the record (``known``)."""
    for local, rank in enumerate(ranks):
        try:
            same = held(known, local, full) == held(given, local, full)
        except ValueError:
            same = False
        if not same:
            raise StrategyError(
                f"{name}: the strategy that is given cuts it as {given}, the record of the "
                f"checkpoint as {known}; rank {rank} would hold another part of {full}. Leave "
                "src_strategy_path_or_dir (--from) away: these records know their layouts"
            )


def _check_lost(
    weights: CheckpointView, where: str, ranks: Iterable[int], named: Collection[str]
) -> None:
    """Raises LoadError if the records or the strategy (``named``) name a tensor of this stage that
    only missing files held. Files whose headers were not read are not missed."""
    paths = {rank: weights.files.get(rank, (None,))[0] for rank in ranks}
    if not all(path is None or path in weights.headers for path in paths.values()):
        return
    for rank, path in paths.items():
        if path is None or weights.headers[path] is None:
            details = weights.details(rank)
            lost = (
                [name for name in details.tensors if name not in weights.tensors]
                if details
                else missing_parameters(named, weights.tensors)
            )
            if lost:
                raise LoadError(
                    f"{where}: the file of rank {rank} is missing, and with it {len(lost)} tensors "
                    f"that no other rank has, for example {lost[0]}"
                )


# ---- iteration folders --------------------------------------------------------------------------


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


def view_of_own_part(directory: CheckpointDir, candidate: Candidate, rank: int) -> CheckpointView:
    """Views what one rank saved, by its record alone: the files of ranks on other nodes are not
    seen here. Tensors whose layout is unknown are left out. Raises the errors of
    ``RecordFolder.read``."""
    paths = tuple(directory.path(file.path) for file in candidate.files[rank])
    tensors: dict[str, Tensor] = {}
    places: dict[str, dict[int, str]] = {}
    weights = CheckpointView(
        directory.storage,
        directory.path(candidate.iteration_dir),
        tensors,
        {rank: paths},
        places,
        candidate=candidate,
        world_size=candidate.world_size,
        split=not (candidate.state and candidate.state.trainer),
    )
    details = RecordFolder(directory.storage, candidate.records_dir or "", weights.records)
    for name, row in details.read(rank)[1].tensors.items():
        if row.layout is not None:
            first = rank - rank % row.layout.stage_size
            tensor = Tensor(name, row.dtype, row.global_shape or (), row.layout, first)
        elif is_scalar(row.shape):
            tensor = Tensor(name, row.dtype, row.shape, first=rank)
        else:
            continue
        tensors[name], places[name] = tensor, {rank: paths[row.file]}
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
    rank = min(candidate.files)
    found = []
    lost = []
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
