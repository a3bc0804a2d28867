"""Verifies candidates: the files of all ranks quickly, the files of one rank completely.

``check_files``: the file of every rank is there and has the recorded size. One process checks the whole checkpoint.
``verify_rank``: every byte of the files of one rank has the recorded checksum. Files of mindformers have no checksums: their
headers and counters are checked. Each rank verifies what it is going to read.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mindresume.errors import CorruptFileError, RecordError
from mindresume.formats import MINDFORMERS, OURS, Candidate, Refusal
from mindresume.formats.rank_folder_naming import LABEL, parse_label
from mindresume.formats.scalar_state import scalars_of
from mindresume.formats.strategy import Strategy
from mindresume.formats.weight_files import file_sizes, header_of
from mindresume.formatting import listed
from mindresume.model.file_record import FileRecord
from mindresume.model.manifest import FOLDER, Record, attempts, read_details, read_record, record_name
from mindresume.model.record_details import Details, TensorRecord
from mindresume.model.training_state import TrainingState
from mindresume.resume.iteration_checks import IterationMetadata, needs_metadata
from mindresume.resume.missing_ranks import details_by_strategy, differing_replica, replica_sources
from mindresume.storage.atomic_publish import error_text
from mindresume.storage.interface import Storage
from mindresume.tensor_files import Header
from mindresume.tensor_files.checksum import damaged_tensors, file_checksum, tensor_checksum

OnBytesRead = Callable[[int], None]       # bytes read since the last call


@dataclass(frozen=True)
class ShardSource:
    """Tensors to read from one file. ``names`` None: all of them."""
    file: FileRecord
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class VerifiedShard:
    """What one rank of the checkpoint reads.

    Args:
        sources: its own files, or where those are missing replicas of their tensors on other ranks.
        state: None for files without records.
        details: checksums and random state; None for files without records.
        scalars: counters that were read from files without records.
    """
    rank: int
    sources: tuple[ShardSource, ...]
    state: TrainingState | None = None
    details: Details | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def missing_files(self, candidate: Candidate) -> list[tuple[int, str]]:
        """Returns (rank, path) of each of its files that is missing and is replaced by replicas."""
        there = {source.file.path for source in self.sources}
        return [(self.rank, file.path) for file in candidate.files.get(self.rank, ()) if file.path not in there]


def check_files(storage: Storage, root: str, candidate: Candidate, world_size: int | None,
                files: bool = True) -> Refusal | None:
    """Returns None if the files of all ranks seem to be there and their layouts are known; else why not.

    Args:
        world_size: ranks of the job that would resume. None: any number.
        files: False: sizes are not checked, because each rank verifies its own files anyway.
    """
    if candidate.problem is not None:
        return candidate.problem
    if candidate.origin == MINDFORMERS:
        problem = _wrong_ranks(candidate, world_size)
    elif candidate.local_ranks:
        problem = _wrong_files(storage, root, candidate) if files else None
        return problem or candidate.refuse(
            f"only the files of rank {listed(candidate.local_ranks)} of {candidate.world_size} are here: nodes that share no "
            f"disk saved it. A job on these nodes takes the newest step that all of them have; for any other job bring their "
            f"folders together")
    elif world_size is not None and candidate.world_size != world_size and not candidate.iteration_dir:
        problem = candidate.refuse(f"saved by {candidate.world_size} ranks, this job has {world_size}; to change the "
                                   f"number of ranks set auto_trans_ckpt: True")
    else:
        problem = None
    if problem is None and needs_metadata(candidate):
        problem = IterationMetadata(storage, root, candidate).problem()
    if problem is not None or not files:
        return problem
    return _wrong_files(storage, root, candidate)


def _wrong_files(storage: Storage, root: str, candidate: Candidate) -> Refusal | None:
    """Returns a refusal for the first file that is missing without replicas, or has another size."""
    try:
        found = file_sizes(storage, root, candidate.all_files)
    except OSError as error:
        return candidate.refuse(f"its files cannot be checked: {error}")
    rows = [(rank, file) for rank, files in candidate.files.items() for file in files]
    for (rank, file), size in zip(rows, found, strict=True):
        if size is None and candidate.records_dir:
            elsewhere = replica_files(storage, root, candidate, rank)
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


def _wrong_ranks(candidate: Candidate, world_size: int | None) -> Refusal | None:
    if world_size is None or candidate.iteration_dir:
        return None
    missing = [rank for rank in range(world_size) if rank not in candidate.files and rank not in candidate.missing_ranks]
    if missing:
        name = candidate.first.path
        return candidate.refuse(f"no file of rank {listed(missing)} for this step of this run (others have {name}); without "
                                f"strategy files of that job it is not known whether these hold everything",
                                rank=missing[0])
    more = [rank for rank in candidate.files if rank >= world_size]
    if more:
        return candidate.refuse(f"saved by at least {max(more) + 1} ranks, this job has {world_size}; to change the number "
                                f"of ranks set auto_trans_ckpt: True", candidate.files[more[0]][0].path, more[0])
    return None


def verify_rank(storage: Storage, root: str, candidate: Candidate, rank: int, progress: OnBytesRead | None = None,
                full: bool = True, strategy: Strategy | None = None, layouts: IterationMetadata | None = None
                ) -> VerifiedShard | Refusal:
    """Reads everything that ``rank`` is going to load from this candidate, and verifies it.

    Args:
        progress: receives the bytes that are read.
        full: False: only the record, the headers and the sizes.
        strategy: of the job that saved, where mindformers wrote no files for some ranks.
        layouts: metadata of this candidate, if several ranks are verified; it is read once.
    """
    files = candidate.files.get(rank)
    if not files and rank in candidate.missing_ranks:
        return _verify_missing_rank(storage, root, candidate, rank, progress if full else None, strategy)
    if not files:
        return candidate.refuse(f"no file of rank {rank}", rank=rank)
    file = files[0]
    try:
        if candidate.origin == OURS and candidate.records_dir:
            return _verify_recorded(storage, root, candidate, rank, progress, full)
        headers = [header_of(storage, root, file) for file in files]
        if candidate.iteration_dir:                                  # the scan has read its counters from common.json
            for file, header in zip(files, headers, strict=True):
                label = parse_label(header)
                if label is not None and label[1] != candidate.step:
                    return candidate.refuse(f"rank {rank} holds a file of run {label[0]}, step {label[1]}: files of two saves "
                                            f"are mixed", file.path, rank)
            metadata = layouts or IterationMetadata(storage, root, candidate)
            problem = metadata.mismatch(rank, dict(zip(files, headers, strict=True)))
            return problem or VerifiedShard(rank, tuple(map(ShardSource, files)), candidate.state)
        header = headers[0]
        scalars = scalars_of(storage, root, file, header)
        unlike = differing_replica(storage, root, candidate, rank, strategy, progress) if full and strategy else ""
        if unlike:
            return candidate.refuse(unlike, file.path, rank)
    except CorruptFileError as error:
        path = next((file.path for file in files if error.path.endswith(os.path.basename(file.path))), file.path)
        return candidate.refuse(f"rank {rank}: {error.reason}", path, rank, [error.tensor] if error.tensor else ())
    except (RecordError, OSError) as error:
        return candidate.refuse(f"rank {rank}: {error}", file.path, rank)
    written = parse_label(header)
    recorded = attempts(storage.list(os.path.join(root, FOLDER))) if written and os.path.dirname(file.path) else ()
    if written and any(run == written[0] for _, _, run in recorded):
        # The scan read the label of one file only. A run that writes records never completed a save that has none.
        return candidate.refuse(f"rank {rank} holds a file of run {written[0]}, step {written[1]}, of which there is no "
                                f"record: the save never completed", file.path, rank)
    if scalars.get("step_num") != candidate.step:
        return candidate.refuse(f"rank {rank} holds step {scalars.get('step_num')}, rank {next(iter(candidate.files))} "
                                f"holds step {candidate.step}", file.path, rank)
    return VerifiedShard(rank, (ShardSource(file),), scalars=scalars)


def _verify_recorded(storage: Storage, root: str, candidate: Candidate, rank: int, progress: OnBytesRead | None,
                     full: bool) -> VerifiedShard | Refusal:
    record, details, checksum = record_of(storage, candidate, rank)
    files = candidate.files[rank]
    if (record.run, record.step, record.rank, record.world_size) != (candidate.run, candidate.step, rank, candidate.world_size):
        return candidate.refuse(f"the record of rank {rank} is of run {record.run}, step {record.step}, rank {record.rank} of "
                                f"{record.world_size}", rank=rank)
    if tuple(file.below(candidate.iteration_dir) for file in record.files) != files:
        return candidate.refuse(f"the record of rank {rank} names {record.files[0].path}, its manifest another file, size or "
                                f"checksum", files[0].path, rank)
    if candidate.records and candidate.records[sorted(candidate.files).index(rank)] != checksum:
        return candidate.refuse(f"the record of rank {rank} is not the one that was committed", rank=rank)
    sources: list[ShardSource] = []
    for index, file in enumerate(files):
        recorded = {name: row for name, row in details.tensors.items() if row.file == index}
        found = _verify_file(storage, root, candidate, rank, file, recorded, progress, full)
        if isinstance(found, Refusal):
            return found
        sources += found
    return VerifiedShard(rank, tuple(sources), record.state, details)


def _verify_missing_rank(storage: Storage, root: str, candidate: Candidate, rank: int, progress: OnBytesRead | None,
                         strategy: Strategy | None) -> VerifiedShard | Refusal:
    """Verifies what a rank reads that was lost before its job saved for the last time: replicas of its tensors on other ranks.
    Its random state is lost."""
    try:
        details_of = details_by_strategy(storage, root, candidate, strategy) if strategy else cache(
            lambda other: record_of(storage, candidate, other)[1])
        found = replica_sources(rank, candidate.files, candidate.world_size, details_of)
        if isinstance(found, str):
            return candidate.refuse(f"rank {rank} wrote nothing, and {found}", rank=rank)
        names: dict[FileRecord, list[str]] = {}
        for name, (other, row) in found.items():
            names.setdefault(candidate.files[other][row.file], []).append(name)
        sources = tuple(ShardSource(file, tuple(held)) for file, held in names.items())
        recorded = {name: row for name, (_, row) in found.items()}
        verified = _verify_replicas(storage, root, candidate, rank, recorded, sources, progress)
        scalars = {} if candidate.state else scalars_of(storage, root, sources[0].file, header_of(storage, root, sources[0].file))
    except CorruptFileError as error:
        return candidate.refuse(f"rank {rank} wrote nothing, and the file that stands in for its own: {error.reason}", rank=rank)
    except (RecordError, OSError) as error:
        return candidate.refuse(f"rank {rank} wrote nothing, and {error}", rank=rank)
    return verified if isinstance(verified, Refusal) else VerifiedShard(
        rank, verified, candidate.state, Details(recorded) if candidate.records_dir else None, scalars)


def _verify_file(storage: Storage, root: str, candidate: Candidate, rank: int, file: FileRecord,
                 recorded: Mapping[str, TensorRecord], progress: OnBytesRead | None, full: bool
                ) -> tuple[ShardSource, ...] | Refusal:
    """Verifies one file of a rank; if it is missing, replicas of all its tensors on other ranks."""
    path = os.path.join(root, file.path)
    status = storage.status(path)
    if status is None:
        found = replica_files(storage, root, candidate, rank)
        if isinstance(found, Refusal):
            return found
        sources = tuple(ShardSource(source.file, names) for source in found
                        if (names := tuple(name for name in source.names or () if name in recorded)))
        return _verify_replicas(storage, root, candidate, rank, recorded, sources, progress)
    if status.size != file.size:
        return _wrong_size(candidate, rank, file, status.size)
    header = header_of(storage, root, file)                  # its errors are more specific than "another checksum"
    problem = _unlike(candidate, recorded, header)
    if problem:
        return candidate.refuse(f"the file of rank {rank} {problem}", file.path, rank)
    if not full:
        return (ShardSource(file),)
    with storage.open(path) as opened:
        checksum, _ = file_checksum(opened, progress)
        if checksum == file.checksum:
            return (ShardSource(file),)
        wrong = damaged_tensors(opened, path, {name: row.checksum for name, row in recorded.items()})
    damaged = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "") if wrong else \
        "no tensor, but the header or its padding"
    return candidate.refuse(f"the file of rank {rank} is not what was written; damaged: {damaged} (checksum {checksum}, "
                            f"recorded {file.checksum})", file.path, rank, wrong)


def _unlike(candidate: Candidate, tensors: Mapping[str, TensorRecord], header: Header) -> str:
    """Returns how a file with the right checksum differs from the one that the record describes; empty if it does not."""
    if parse_label(header) != (candidate.run, candidate.step):
        return f"is not of run {candidate.run}, step {candidate.step}: its label is {header.metadata.get(LABEL)!r}"[:300]
    recorded = {name: (row.dtype, row.shape) for name, row in tensors.items()}
    found = {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}
    for name in recorded.keys() | found.keys():
        if recorded.get(name) != found.get(name):
            return f"holds another {name} than was recorded: {found.get(name)}, recorded {recorded.get(name)}"[:300]
    return ""


def record_of(storage: Storage, candidate: Candidate, rank: int) -> tuple[Record, Details, str]:
    """Returns a record, its details and the checksum of its head. Raises RecordError or OSError if it cannot be read."""
    with storage.open(os.path.join(candidate.records_dir or "", record_name(rank))) as file:
        _, checksum = read_record(file)
        file.seek(0)
        return *read_details(file), checksum


def replica_files(storage: Storage, root: str, candidate: Candidate, rank: int) -> tuple[ShardSource, ...] | Refusal:
    """Returns files of other ranks that hold the tensors of the missing files of ``rank``, by records with the same name, dtype,
    shape and checksum; a Refusal if one tensor is on no other rank."""
    lost = candidate.files[rank][0]
    try:
        there = {index for index, file in enumerate(candidate.files[rank]) if storage.status(os.path.join(root, file.path))}
        lost = next(file for index, file in enumerate(candidate.files[rank]) if index not in there)
        wanted = {name: row for name, row in record_of(storage, candidate, rank)[1].tensors.items() if row.file not in there}
        sources = []
        for other in _likely_holders(wanted, rank, candidate):
            if not wanted:
                break
            theirs = record_of(storage, candidate, other)[1].tensors
            for index, file in enumerate(candidate.files[other]):
                names = tuple(name for name, row in wanted.items() if name in theirs and theirs[name].file == index and
                              (theirs[name].dtype, theirs[name].shape, theirs[name].checksum) ==
                              (row.dtype, row.shape, row.checksum))
                if names and storage.status(os.path.join(root, file.path)) is not None:
                    sources.append(ShardSource(file, names))
                    wanted = {name: row for name, row in wanted.items() if name not in names}
    except (RecordError, OSError) as error:
        return candidate.refuse(f"the file of rank {rank} is missing, and {error_text(error)}", lost.path, rank)
    if wanted:
        return candidate.refuse(f"the file of rank {rank} is missing, and {len(wanted)} of its tensors are on no other "
                                f"rank, for example {next(iter(wanted))}", lost.path, rank)
    return tuple(sources)


def _likely_holders(tensors: Mapping[str, TensorRecord], rank: int, candidate: Candidate) -> list[int]:
    """Returns all other ranks that have files, those first that hold the same slices by the layout of one sharded tensor. To
    read a record takes some milliseconds, and there may be thousands of ranks."""
    others = [other for other in candidate.files if other != rank]
    for row in tensors.values():
        if row.layout is not None and row.global_shape is not None:
            first = rank - rank % row.layout.stage_size
            slices = row.layout.slices(rank - first, row.global_shape)
            likely = {first + holder for holder in row.layout.holders(slices, row.global_shape)}
            return sorted(others, key=lambda other: other not in likely)
    return others


def _verify_replicas(storage: Storage, root: str, candidate: Candidate, rank: int, recorded: Mapping[str, TensorRecord],
                     sources: tuple[ShardSource, ...], progress: OnBytesRead | None) -> tuple[ShardSource, ...] | Refusal:
    for source in sources:
        header = header_of(storage, root, source.file)
        with storage.open(os.path.join(root, source.file.path)) as opened:
            for name in source.names or ():
                known = recorded[name].checksum             # empty where none was recorded
                if name not in header.tensors or known and tensor_checksum(opened, header.tensors[name]) != known:
                    return candidate.refuse(f"the file of rank {rank} is missing, and its replica of {name} is damaged",
                                            source.file.path, rank, [name])
                if progress:
                    progress(header.tensors[name].nbytes)
    return sources


def read_size(candidate: Candidate, ranks: Iterator[int] | list[int]) -> int:
    """Returns the bytes that ``verify_rank`` will read for these ranks."""
    return sum(file.size or 0 for rank in ranks for file in candidate.files.get(rank, ()))
