"""Finds files of other ranks that hold the tensors of a missing file: replicas of data parallelism."""
from __future__ import annotations

import os
from collections.abc import Mapping

from mindresume.errors import RecordError
from mindresume.formats import Candidate, Refusal
from mindresume.formats.records import details_of
from mindresume.model.record_details import TensorRecord
from mindresume.resume.verified_shard import ShardSource
from mindresume.storage.atomic_publish import error_text
from mindresume.storage.interface import Storage


def replica_files(storage: Storage, root: str, candidate: Candidate, rank: int) -> tuple[ShardSource, ...] | Refusal:
    """Returns files of other ranks that hold the tensors of the missing files of ``rank``; a Refusal if no other rank has one of
    them. A replica is recorded with the same name, dtype, shape and checksum."""
    missing = candidate.files[rank][0]
    try:
        present = {index for index, file in enumerate(candidate.files[rank]) if storage.status(os.path.join(root, file.path))}
        missing = next(file for index, file in enumerate(candidate.files[rank]) if index not in present)
        wanted = {name: row for name, row in details_of(storage, candidate.records_dir or "", rank).tensors.items()
                  if row.file not in present}
        sources = []
        for other in likely_holders(wanted, rank, candidate):
            if not wanted:
                break
            theirs = details_of(storage, candidate.records_dir or "", other).tensors
            for index, file in enumerate(candidate.files[other]):
                names = tuple(name for name, row in wanted.items() if name in theirs and theirs[name].file == index and
                              (theirs[name].dtype, theirs[name].shape, theirs[name].checksum) ==
                              (row.dtype, row.shape, row.checksum))
                if names and storage.status(os.path.join(root, file.path)) is not None:
                    sources.append(ShardSource(file, names))
                    wanted = {name: row for name, row in wanted.items() if name not in names}
    except (RecordError, OSError) as error:
        return candidate.refuse(f"the file of rank {rank} is missing, and {error_text(error)}", missing.path, rank, error=error)
    if wanted:
        return candidate.refuse(f"the file of rank {rank} is missing, and {len(wanted)} of its tensors are on no other "
                                f"rank, for example {next(iter(wanted))}", missing.path, rank)
    return tuple(sources)


def likely_holders(tensors: Mapping[str, TensorRecord], rank: int, candidate: Candidate) -> list[int]:
    """Returns all other ranks that have files. Ranks that hold the same slices, by the layout of one sharded tensor, come first:
    reading a record takes some milliseconds, and there may be thousands of ranks."""
    others = [other for other in candidate.files if other != rank]
    for row in tensors.values():
        if row.layout is not None and row.global_shape is not None:
            first = rank - rank % row.layout.stage_size
            slices = row.layout.slices(rank - first, row.global_shape)
            likely = {first + holder for holder in row.layout.holders(slices, row.global_shape)}
            return sorted(others, key=lambda other: other not in likely)
    return others
