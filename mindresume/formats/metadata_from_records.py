"""Derives the content of ``metadata.json`` from the records of a checkpoint: how each tensor is sharded, and which files hold
which slices.

    tensors = metadata_from_records(files, deduplicated, details_of)   # files of all ranks; details_of(rank) reads details
    missing_slices(files, deduplicated, details_of)                    # if ranks are missing: a slice that no other rank holds
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from mindresume.errors import RecordError
from mindresume.formats.metadata import StoredSlice, TensorMetadata
from mindresume.model.layout import TensorLayout, is_scalar, ordinals
from mindresume.model.manifest import Details, TensorRecord


def metadata_from_records(files: Sequence[Sequence[str]], deduplicated: bool, details_of: Callable[[int], Details]
                          ) -> list[TensorMetadata]:
    """Describes every tensor that has a layout. The others are counters, which mindformers does not list either.

    All ranks of a stage hold the same tensors, so the details of one rank are read; those of all ranks if replicas were
    deduplicated. A tensor of several stages (a shared embedding) takes the layout of the first one.

    Args:
        files: names of the files of each rank; a rank without files wrote nothing.
        deduplicated: some rank wrote only its share.
        details_of: reads the details of a rank's record.

    Raises:
        RecordError: The stages differ in size, or no rank of a stage wrote anything.
    """
    anchor = next((rank for rank, names in enumerate(files) if names), 0)
    known = details_of(anchor)
    size = stage_size(known.tensors.values(), len(files))
    found: dict[str, TensorMetadata] = {}
    for first in range(0, len(files), size):
        ranks = [rank for rank in range(first, first + size) if files[rank]]
        if not ranks:
            raise RecordError(f"ranks {first} to {first + size - 1}, a whole pipeline stage, wrote nothing")
        rows = {rank: known.tensors if rank == anchor else details_of(rank).tensors
                for rank in (ranks if deduplicated else ranks[:1])}
        for name in dict.fromkeys(name for table in rows.values() for name in table):
            writers = [rank for rank, table in rows.items() if name in table]
            row = rows[writers[0]][name]
            if row.layout is None or row.global_shape is None:
                continue
            if name in found:
                found[name] = _shared(found[name], files, rows, name, row, writers if deduplicated else ranks, first)
                continue
            if row.layout.stage_size != size:
                raise RecordError(f"{name} is sharded over {row.layout.stage_size} ranks, other tensors over {size}")
            found[name] = TensorMetadata(name, row.dtype, row.global_shape, row.layout, first,
                                    _stored(files, rows, name, row, writers if deduplicated else ranks, first))
    return list(found.values())


def missing_slices(files: Sequence[Sequence[str]], deduplicated: bool, details_of: Callable[[int], Details]) -> str:
    """Returns a phrase for the data that a checkpoint of only some ranks lacks; empty if they wrote every slice of every
    tensor. A tensor with more than one element needs a layout: else the data of the other ranks is unknown. Arguments as for
    ``metadata_from_records``."""
    try:
        rows = metadata_from_records(files, deduplicated, details_of)
    except RecordError as error:
        return str(error)
    for row in rows:
        for number in range(max(ordinals(row.layout, row.shape)) + 1):
            if number not in row.stored:
                ranks = _groups(row.layout, row.shape, row.first)[number]
                return f"a part of {row.name} was held by rank {', '.join(map(str, ranks))} alone"
    there = next(rank for rank, names in enumerate(files) if names)
    named = {row.name for row in rows}
    return next((f"{name} {row.shape} has no layout" for name, row in details_of(there).tensors.items()
                 if name not in named and not is_scalar(row.shape)), "")


def _shared(known: TensorMetadata, files: Sequence[Sequence[str]], rows: Mapping[int, Mapping[str, TensorRecord]], name: str,
            row: TensorRecord, writers: Iterable[int], first: int) -> TensorMetadata:
    """Adds the copies of another stage, if it shards the tensor alike."""
    if (row.layout, row.global_shape, row.dtype) != (known.layout, known.shape, known.dtype):
        return known
    more = _stored(files, rows, name, row, writers, first)
    return replace(known, stored={number: (*copies, *more.get(number, ())) for number, copies in known.stored.items()})


def stage_size(rows: Iterable[TensorRecord], world_size: int) -> int:
    """Returns the number of ranks in a stage. Raises RecordError if it does not divide ``world_size``."""
    size = next((row.layout.stage_size for row in rows if row.layout), world_size)
    if world_size % size:
        raise RecordError(f"tensors are sharded over {size} ranks, which does not divide {world_size} ranks")
    return size


def _stored(files: Sequence[Sequence[str]], rows: Mapping[int, Mapping[str, TensorRecord]], name: str, row: TensorRecord,
            writers: Iterable[int], first: int) -> dict[int, tuple[StoredSlice, ...]]:
    """Returns the stored slices of one tensor of a stage, by ordinal."""
    held = ordinals(row.layout, row.global_shape)
    groups = _groups(row.layout, row.global_shape, first)
    found: dict[int, tuple[StoredSlice, ...]] = {}
    for rank in writers:
        file = files[rank][rows[rank][name].file if rank in rows else row.file]
        number = held[rank - first]
        before = found.get(number, ())
        found[number] = (*before, StoredSlice(file, rank, () if before else groups[number]))     # readers need the group once
    return found


@lru_cache(maxsize=1 << 12)
def _groups(layout: TensorLayout, shape: tuple[int, ...], first: int) -> dict[int, tuple[int, ...]]:
    """Returns {slice: ranks that hold it}."""
    found: dict[int, list[int]] = {}
    for local, number in enumerate(ordinals(layout, shape)):
        found.setdefault(number, []).append(first + local)
    return {number: tuple(ranks) for number, ranks in found.items()}
