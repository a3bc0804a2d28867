"""Verifies the files of one rank of a candidate: every byte has the recorded checksum.

Files of mindformers have no checksums: their headers and counters are checked. Each rank of a job verifies the files that it will
load. ``eligible`` checks the files of all ranks, by their sizes alone.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import BinaryIO

import numpy as np

from mindresume.errors import CorruptFileError, RecordError
from mindresume.formats import OURS, Candidate, Refusal
from mindresume.formats.checkpoint_dir import CheckpointDir
from mindresume.formats.rank_folder_naming import LABEL, parse_label
from mindresume.formats.records import details_of
from mindresume.formats.strategy import Strategy
from mindresume.formats.weight_files import header_of, scalars_of
from mindresume.model.manifest import (
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
from mindresume.resume.choice import ShardSource, VerifiedShard
from mindresume.resume.eligible import wrong_size
from mindresume.resume.metadata_verifier import MetadataVerifier
from mindresume.resume.replicas import details_by_strategy, differing_replica, replica_files, replica_sources
from mindresume.storage.interface import Storage
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import Header, TensorEntry
from mindresume.tensor_files.checksum import damaged_tensors, file_checksum, tensor_checksum
from mindresume.tensor_files.whole_file import read_whole

OnBytesRead = Callable[[int], None]       # bytes read since the last call


def verify_rank(directory: CheckpointDir, candidate: Candidate, rank: int, progress: OnBytesRead | None = None,
                full: bool = True, strategy: Strategy | None = None, metadata: MetadataVerifier | None = None,
                keep: ReadCache | None = None) -> VerifiedShard | Refusal:
    """Reads and verifies everything that ``rank`` will load from this candidate.

    Args:
        progress: receives the bytes that are read.
        full: False: only the record, the headers and the sizes are verified.
        strategy: of the job that saved, where mindformers wrote no files for some ranks.
        metadata: verifier of the metadata of this candidate, shared by all ranks that this process verifies.
        keep: keeps the verified tensors of a checkpoint with records, as far as its budget allows, for a load that takes them.
    Returns:
        The verified files, or why the candidate cannot be used.
    """
    files = candidate.files.get(rank)
    if not files and rank in candidate.missing_ranks:
        return _verify_missing_rank(directory, candidate, rank, progress if full else None, strategy)
    if not files:
        return candidate.refuse(f"no file of rank {rank}", rank=rank)
    file = files[0]
    try:
        if candidate.origin == OURS and candidate.records_dir:
            return _verify_recorded(directory, candidate, rank, progress, full, keep)
        headers = [header_of(directory, file) for file in files]
        if candidate.iteration_dir:                                  # the scan has read its counters from common.json
            for file, header in zip(files, headers, strict=True):
                label = parse_label(header)
                if label is not None and label[1] != candidate.step:
                    return candidate.refuse(f"rank {rank} holds a file of run {label[0]}, step {label[1]}: files of two saves "
                                            f"are mixed", file.path, rank)
            metadata = metadata or MetadataVerifier(directory, candidate)
            problem = metadata.mismatch(rank, dict(zip(files, headers, strict=True)))
            return problem or VerifiedShard(rank, tuple(map(ShardSource, files)), candidate.state)
        header = headers[0]
        scalars = scalars_of(directory, file, header)
        difference = differing_replica(directory, candidate, rank, strategy, progress) if full and strategy else ""
        if difference:
            return candidate.refuse(difference, file.path, rank)
    except CorruptFileError as error:
        path = next((file.path for file in files if error.path.endswith(os.path.basename(file.path))), file.path)
        return candidate.refuse(f"rank {rank}: {error.reason}", path, rank, [error.tensor] if error.tensor else (), error)
    except (RecordError, OSError) as error:
        return candidate.refuse(f"rank {rank}: {error}", file.path, rank, error=error)
    written = parse_label(header)
    recorded = attempts(directory.storage.list(directory.path(FOLDER))) if written and os.path.dirname(file.path) else ()
    if written and any(run == written[0] for _, _, run in recorded):
        # The scan read the label of one file only. A run that writes records never completed a save without them.
        return candidate.refuse(f"rank {rank} holds a file of run {written[0]}, step {written[1]}, which has no record: the save "
                                f"never completed", file.path, rank)
    if scalars.get("step_num") != candidate.step:
        return candidate.refuse(f"rank {rank} holds step {scalars.get('step_num')}, rank {next(iter(candidate.files))} "
                                f"holds step {candidate.step}", file.path, rank)
    return VerifiedShard(rank, (ShardSource(file),), scalars=scalars)


def find_damaged_files(directory: CheckpointDir, candidate: Candidate, rank: int, progress: OnBytesRead | None = None
                       ) -> list[Refusal]:
    """Returns a refusal for each damaged file of one rank of a checkpoint with records: ``verify_rank`` ends at the first one. If
    the record itself is damaged, its file is the only one. A missing file is not damaged if replicas hold all of it."""
    try:
        checked = _checked_record(directory.storage, candidate, rank)
    except (RecordError, OSError) as error:
        return [candidate.refuse(f"the record of rank {rank} cannot be used: {error}",
                                 _record_path(directory.root, candidate, rank), rank,
                                 error=error)]
    if isinstance(checked, Refusal):
        return [replace(checked, file=_record_path(directory.root, candidate, rank))]
    found = []
    for index, file in enumerate(candidate.files[rank]):
        recorded = {name: row for name, row in checked[1].tensors.items() if row.file == index}
        try:
            result = _verify_file(directory, candidate, rank, file, recorded, progress, True)
        except CorruptFileError as error:
            wrong = [error.tensor] if error.tensor else ()
            result = candidate.refuse(f"rank {rank}: {error.reason}", file.path, rank, wrong, error)
        except OSError as error:
            result = candidate.refuse(f"rank {rank}: {error}", file.path, rank, error=error)
        found += [result] if isinstance(result, Refusal) else []
    return found


def _record_path(root: str, candidate: Candidate, rank: int) -> str:
    return os.path.relpath(os.path.join(candidate.records_dir or "", record_name(rank)), root)


def _verify_recorded(directory: CheckpointDir, candidate: Candidate, rank: int, progress: OnBytesRead | None,
                     full: bool, keep: ReadCache | None) -> VerifiedShard | Refusal:
    """Verifies a rank of a checkpoint with records: the record against the manifest, the files against the record."""
    checked = _checked_record(directory.storage, candidate, rank)
    if isinstance(checked, Refusal):
        return checked
    record, details = checked
    sources: list[ShardSource] = []
    for index, file in enumerate(candidate.files[rank]):
        recorded = {name: row for name, row in details.tensors.items() if row.file == index}
        found = _verify_file(directory, candidate, rank, file, recorded, progress, full, keep)
        if isinstance(found, Refusal):
            return found
        sources += found
    return VerifiedShard(rank, tuple(sources), record.state, details)


def _checked_record(storage: Storage, candidate: Candidate, rank: int) -> tuple[Record, Details] | Refusal:
    """Returns a record and its details, or why it is not the one that was committed. Raises RecordError or OSError if it cannot
    be read."""
    record, details, checksum = _read_record(storage, candidate, rank)
    files = candidate.files[rank]
    if (record.run, record.step, record.rank, record.world_size) != (candidate.run, candidate.step, rank, candidate.world_size):
        return candidate.refuse(f"the record of rank {rank} is of run {record.run}, step {record.step}, rank {record.rank} of "
                                f"{record.world_size}", rank=rank)
    if tuple(file.below(candidate.iteration_dir) for file in record.files) != files:
        return candidate.refuse(f"the record of rank {rank} names {record.files[0].path}, its manifest another file, size or "
                                f"checksum", files[0].path, rank)
    if candidate.records and candidate.records[sorted(candidate.files).index(rank)] != checksum:
        return candidate.refuse(f"the record of rank {rank} is not the one that was committed", rank=rank)
    return record, details


def _verify_missing_rank(directory: CheckpointDir, candidate: Candidate, rank: int, progress: OnBytesRead | None,
                         strategy: Strategy | None) -> VerifiedShard | Refusal:
    """Verifies the replicas, on other ranks, of the tensors of a rank that was lost before its job saved for the last time. Its
    random state is lost."""
    try:
        details = details_by_strategy(directory, candidate, strategy) if strategy else cache(
            lambda other: details_of(directory.storage, candidate.records_dir or "", other))
        found = replica_sources(rank, candidate.files, candidate.world_size, details)
        if isinstance(found, str):
            return candidate.refuse(f"rank {rank} wrote nothing, and {found}", rank=rank)
        names: dict[FileRecord, list[str]] = {}
        for name, (other, row) in found.items():
            names.setdefault(candidate.files[other][row.file], []).append(name)
        sources = tuple(ShardSource(file, tuple(held)) for file, held in names.items())
        recorded = {name: row for name, (_, row) in found.items()}
        verified = _verify_replicas(directory, candidate, rank, recorded, sources, progress)
        scalars = {} if candidate.state else scalars_of(directory, sources[0].file, header_of(directory, sources[0].file))
    except CorruptFileError as error:
        return candidate.refuse(f"rank {rank} wrote nothing, and the file that replaces its own is damaged: {error.reason}",
                                rank=rank)
    except (RecordError, OSError) as error:
        return candidate.refuse(f"rank {rank} wrote nothing, and {error}", rank=rank)
    return verified if isinstance(verified, Refusal) else VerifiedShard(
        rank, verified, candidate.state, Details(recorded) if candidate.records_dir else None, scalars)


def _verify_file(directory: CheckpointDir, candidate: Candidate, rank: int, file: FileRecord,
                 recorded: Mapping[str, TensorRecord], progress: OnBytesRead | None, full: bool, keep: ReadCache | None = None
                ) -> tuple[ShardSource, ...] | Refusal:
    """Verifies one file of a rank; if it is missing, the replicas of all its tensors on other ranks."""
    path = directory.path(file.path)
    status = directory.storage.status(path)
    if status is None:
        found = replica_files(directory, candidate, rank)
        if isinstance(found, Refusal):
            return found
        sources = tuple(ShardSource(source.file, names) for source in found
                        if (names := tuple(name for name in source.names or () if name in recorded)))
        return _verify_replicas(directory, candidate, rank, recorded, sources, progress)
    if status.size != file.size:
        return wrong_size(candidate, rank, file, status.size)
    header = header_of(directory, file)                  # its errors are more specific than a wrong checksum
    problem = _mismatch(candidate, recorded, header)
    if problem:
        return candidate.refuse(f"the file of rank {rank} {problem}", file.path, rank)
    if not full:
        return (ShardSource(file),)
    with directory.storage.open(path) as opened:
        checksum, tensors = _read(opened, header, progress, keep)
        if checksum == file.checksum:
            if keep is not None and tensors:
                keep.keep_parts(path, tensors, header.size)
            return (ShardSource(file),)
        del tensors
        wrong = damaged_tensors(opened, path, {name: row.checksum for name, row in recorded.items()})
    damaged = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "") if wrong else \
        "no tensor, but the header or its padding"
    return candidate.refuse(f"the file of rank {rank} is not what was written; damaged: {damaged} (checksum {checksum}, "
                            f"recorded {file.checksum})", file.path, rank, wrong)


def _read(opened: BinaryIO, header: Header, progress: OnBytesRead | None, keep: ReadCache | None
          ) -> tuple[str, dict[TensorEntry, np.ndarray]]:
    """Returns the checksum of a file, and its tensors if there is room for them in ``keep``."""
    if keep is not None and header.size <= keep.left:
        with suppress(MemoryError):
            tensors, checksum = read_whole(opened, header, progress)
            return checksum, tensors
    return file_checksum(opened, progress)[0], {}


def _mismatch(candidate: Candidate, tensors: Mapping[str, TensorRecord], header: Header) -> str:
    """Returns how the header of a file differs from the record; empty if it does not."""
    if parse_label(header) != (candidate.run, candidate.step):
        return f"is not of run {candidate.run}, step {candidate.step}: its label is {header.metadata.get(LABEL)!r}"[:300]
    recorded = {name: (row.dtype, row.shape) for name, row in tensors.items()}
    found = {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}
    for name in recorded.keys() | found.keys():
        if recorded.get(name) != found.get(name):
            return f"holds {name} as {found.get(name)}, recorded {recorded.get(name)}"[:300]
    return ""


def _read_record(storage: Storage, candidate: Candidate, rank: int) -> tuple[Record, Details, str]:
    """Returns a record, its details and the checksum of its head. Raises RecordError or OSError if it cannot be read."""
    with storage.open(os.path.join(candidate.records_dir or "", record_name(rank))) as file:
        _, checksum = read_record(file)
        file.seek(0)
        return *read_details(file), checksum


def _verify_replicas(directory: CheckpointDir, candidate: Candidate, rank: int, recorded: Mapping[str, TensorRecord],
                     sources: tuple[ShardSource, ...], progress: OnBytesRead | None) -> tuple[ShardSource, ...] | Refusal:
    """Verifies the checksums of the named tensors in ``sources``. Returns ``sources``, or why one cannot be used."""
    for source in sources:
        header = header_of(directory, source.file)
        with directory.storage.open(directory.path(source.file.path)) as opened:
            for name in source.names or ():
                expected = recorded[name].checksum          # empty where none was recorded
                if name not in header.tensors or expected and tensor_checksum(opened, header.tensors[name]) != expected:
                    return candidate.refuse(f"the file of rank {rank} is missing, and its replica of {name} is damaged",
                                            source.file.path, rank, [name])
                if progress:
                    progress(header.tensors[name].nbytes)
    return sources
