"""Proof that a candidate can be used: cheap for all ranks at once, complete for the files of one rank.

``quick``: every rank's file is there with the recorded size. One process does it for the whole job.
``prove``: every byte of one rank's file has the recorded checksum (mindformers' files have none: then header and counters).
Each rank proves what it is going to read.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindresume.errors import DamagedFileError, RecordError
from mindresume.files import Header
from mindresume.files.checksum import damaged_tensors, file_checksum, tensor_checksum
from mindresume.formats import MINDFORMERS, OURS, Candidate, Refusal
from mindresume.formats.names import LABEL, parse_label
from mindresume.formats.rank_folders import header_of, listed, scalars_of, sizes
from mindresume.manifest import (
    FOLDER,
    Details,
    FileRecord,
    Record,
    TensorRecord,
    attempts,
    read_details,
    read_record,
    record_name,
)
from mindresume.state import TrainingState
from mindresume.store.storage import Storage

Progress = Callable[[int], None]          # bytes read since the last call


@dataclass(frozen=True)
class Source:
    """Tensors to read from one file; ``names`` None: all of it."""
    file: FileRecord
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ProvenShard:
    """What one rank reads. ``details`` holds checksums and random state; None for files without records."""
    rank: int
    sources: tuple[Source, ...]
    state: TrainingState | None = None
    details: Details | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)


def quick(storage: Storage, root: str, candidate: Candidate, world_size: int | None,
          files: bool = True) -> Refusal | None:
    """None if the files of all ranks seem to be there. ``world_size``: of the job that would resume, None: any. ``files``
    False: the files are not looked at, because each rank proves its own anyway."""
    if candidate.problem is not None:
        return candidate.problem
    if candidate.origin == MINDFORMERS:
        problem = _ranks_of_foreign(candidate, world_size)
    elif world_size is not None and candidate.world_size != world_size:
        problem = candidate.refuse(f"saved by {candidate.world_size} ranks, this job has {world_size}; to change the "
                                   f"number of ranks set auto_trans_ckpt: True")
    else:
        problem = None
    if problem is not None or not files:
        return problem
    try:
        found = sizes(storage, root, candidate.files.values())
    except OSError as error:
        return candidate.refuse(f"its files cannot be looked at: {error}")
    for (rank, file), size in zip(candidate.files.items(), found, strict=True):
        if size is None and candidate.attempt:
            elsewhere = replicas(storage, root, candidate, rank)
            if isinstance(elsewhere, Refusal):
                return elsewhere
            continue
        if size is None:
            return candidate.refuse(f"the file of rank {rank} is missing", file.path, rank)
        if size == 0 or file.size not in (None, size):
            return _wrong_size(candidate, rank, file, size)
    return None


def _wrong_size(candidate: Candidate, rank: int, file: FileRecord, size: int) -> Refusal:
    return candidate.refuse(f"the file of rank {rank} is empty (0 bytes)" if size == 0 else
                            f"the file of rank {rank} has {size} bytes, {file.size} were written", file.path, rank)


def _ranks_of_foreign(candidate: Candidate, world_size: int | None) -> Refusal | None:
    if world_size is None:
        return None
    missing = [rank for rank in range(world_size) if rank not in candidate.files]
    if missing:
        name = next(iter(candidate.files.values())).path
        return candidate.refuse(f"no file of rank {listed(missing)} for this step of this run (others have {name})",
                                rank=missing[0])
    more = [rank for rank in candidate.files if rank >= world_size]
    if more:
        return candidate.refuse(f"saved by at least {max(more) + 1} ranks, this job has {world_size}; to change the number "
                                f"of ranks set auto_trans_ckpt: True", candidate.files[more[0]].path, more[0])
    return None


def prove(storage: Storage, root: str, candidate: Candidate, rank: int, progress: Progress | None = None,
          full: bool = True) -> ProvenShard | Refusal:
    """Reads everything that ``rank`` is going to load from this candidate, and checks it. ``full`` False: only the record,
    the header and the sizes."""
    file = candidate.files.get(rank)
    if file is None:
        return candidate.refuse(f"no file of rank {rank}", rank=rank)
    try:
        if candidate.origin == OURS and candidate.attempt:
            return _prove_recorded(storage, root, candidate, rank, progress, full)
        header = header_of(storage, root, file)
        scalars = scalars_of(storage, root, file, header)
    except DamagedFileError as error:
        return candidate.refuse(f"rank {rank}: {error.reason}", file.path, rank)
    except (RecordError, OSError) as error:
        return candidate.refuse(f"rank {rank}: {error}", file.path, rank)
    written = parse_label(header)
    recorded = attempts(storage.list(os.path.join(root, FOLDER))) if written and os.path.dirname(file.path) else ()
    if written and any(run == written[0] for _, _, run in recorded):
        # The scan asked one file of the group whose it is; where that run has records, a save without any never completed.
        return candidate.refuse(f"rank {rank} holds a file of run {written[0]}, step {written[1]}, of which there is no "
                                f"record: the save never completed", file.path, rank)
    if scalars.get("step_num") != candidate.step:
        return candidate.refuse(f"rank {rank} holds step {scalars.get('step_num')}, rank {next(iter(candidate.files))} "
                                f"holds step {candidate.step}", file.path, rank)
    return ProvenShard(rank, (Source(file),), scalars=scalars)


def _prove_recorded(storage: Storage, root: str, candidate: Candidate, rank: int, progress: Progress | None,
                    full: bool) -> ProvenShard | Refusal:
    record, details, checksum = record_of(storage, candidate, rank)
    if (record.run, record.step, record.rank, record.world_size) != (candidate.run, candidate.step, rank, candidate.world_size):
        return candidate.refuse(f"the record of rank {rank} is of run {record.run}, step {record.step}, rank {record.rank} of "
                                f"{record.world_size}", rank=rank)
    if record.file != candidate.files[rank]:
        return candidate.refuse(f"the record of rank {rank} names {record.file.path}, its manifest another file, size or "
                                f"checksum", candidate.files[rank].path, rank)
    if candidate.records and candidate.records[rank] != checksum:
        return candidate.refuse(f"the record of rank {rank} is not the one that was committed", rank=rank)
    path = os.path.join(root, record.file.path)
    status = storage.status(path)
    if status is None:
        found = replicas(storage, root, candidate, rank)
        if isinstance(found, Refusal):
            return found
        return _prove_replicas(storage, root, candidate, rank, record, details, found, progress)
    if status.size != record.file.size:
        return _wrong_size(candidate, rank, record.file, status.size)
    header = header_of(storage, root, record.file)           # its errors are more telling than "another checksum"
    problem = _unlike(record, details, header)
    verdict = candidate.refuse(f"the file of rank {rank} {problem}", record.file.path, rank) if problem else \
        ProvenShard(rank, (Source(record.file),), record.state, details)
    if not full:
        return verdict
    with storage.open(path) as opened:
        checksum, _ = file_checksum(opened, progress)
        if checksum == record.file.checksum:
            return verdict
        wrong = damaged_tensors(opened, path, {name: row.checksum for name, row in details.tensors.items()})
    damaged = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "") if wrong else \
        "no tensor, but the header or its padding"
    return candidate.refuse(f"the file of rank {rank} is not what was written; damaged: {damaged} (checksum {checksum}, "
                            f"recorded {record.file.checksum})", record.file.path, rank)


def _unlike(record: Record, details: Details, header: Header) -> str:
    """How a file with the right checksum is still not the one that the record describes; empty if it is."""
    if parse_label(header) != (record.run, record.step):
        return f"is not of run {record.run}, step {record.step}: its label is {header.metadata.get(LABEL)!r}"[:300]
    recorded = {name: (row.dtype, row.shape) for name, row in details.tensors.items()}
    found = {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}
    for name in recorded.keys() | found.keys():
        if recorded.get(name) != found.get(name):
            return f"holds another {name} than was recorded: {found.get(name)}, recorded {recorded.get(name)}"[:300]
    return ""


def record_of(storage: Storage, candidate: Candidate, rank: int) -> tuple[Record, Details, str]:
    """A record, its details and the checksum of its head. RecordError or OSError if it cannot be read."""
    with storage.open(os.path.join(candidate.attempt or "", record_name(rank))) as file:
        _, checksum = read_record(file)
        file.seek(0)
        return *read_details(file), checksum


def replicas(storage: Storage, root: str, candidate: Candidate, rank: int) -> tuple[Source, ...] | Refusal:
    """Where else the tensors of a rank whose file is missing lie, byte for byte: in files of other ranks whose records
    hold a tensor of the same name, dtype, shape and checksum. A Refusal if a single one is nowhere."""
    lost = candidate.files[rank]
    try:
        wanted = dict(record_of(storage, candidate, rank)[1].tensors)
        sources = []
        for other in _likely_holders(wanted, rank, candidate.world_size):
            file = candidate.files[other]
            if not wanted:
                break
            if storage.status(os.path.join(root, file.path)) is None:
                continue
            theirs = record_of(storage, candidate, other)[1].tensors
            names = tuple(name for name, row in wanted.items() if name in theirs and
                          (theirs[name].dtype, theirs[name].shape, theirs[name].checksum) ==
                          (row.dtype, row.shape, row.checksum))
            if names:
                sources.append(Source(file, names))
                wanted = {name: row for name, row in wanted.items() if name not in names}
    except (RecordError, OSError) as error:
        return candidate.refuse(f"the file of rank {rank} is missing, and {error}", lost.path, rank)
    if wanted:
        return candidate.refuse(f"the file of rank {rank} is missing, and {len(wanted)} of its tensors are on no other "
                                f"rank, for example {next(iter(wanted))}", lost.path, rank)
    return tuple(sources)


def _likely_holders(tensors: Mapping[str, TensorRecord], rank: int, world_size: int) -> list[int]:
    """All other ranks, those first that hold the same slices by the layout of one cut tensor: reading a record of thousands of
    tensors takes some milliseconds, and among thousands of ranks the first one asked should be the right one."""
    others = [other for other in range(world_size) if other != rank]
    for row in tensors.values():
        if row.layout is not None and row.global_shape is not None:
            first = rank - rank % row.layout.stage_size
            slices = row.layout.slices(rank - first, row.global_shape)
            likely = {first + holder for holder in row.layout.holders(slices, row.global_shape)}
            return sorted(others, key=lambda other: other not in likely)
    return others


def _prove_replicas(storage: Storage, root: str, candidate: Candidate, rank: int, record: Record, details: Details,
                    sources: tuple[Source, ...], progress: Progress | None) -> ProvenShard | Refusal:
    for source in sources:
        header = header_of(storage, root, source.file)
        with storage.open(os.path.join(root, source.file.path)) as opened:
            for name in source.names or ():
                if name not in header.tensors or \
                        tensor_checksum(opened, header.tensors[name]) != details.tensors[name].checksum:
                    return candidate.refuse(f"the file of rank {rank} is missing, and its replica of {name} is damaged",
                                            source.file.path, rank)
                if progress:
                    progress(header.tensors[name].nbytes)
    return ProvenShard(rank, sources, record.state, details)


def read_size(candidate: Candidate, ranks: Iterator[int] | list[int]) -> int:
    """Bytes that ``prove`` of these ranks will read, for a progress bar."""
    return sum(candidate.files[rank].size or 0 for rank in ranks if rank in candidate.files)
