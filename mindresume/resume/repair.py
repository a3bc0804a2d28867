"""Repairs damaged files of a checkpoint: byte for byte what was committed, from copies that are proven by their checksums.

    outcome = repair(storage, root, candidate, refusal, tag, bucket)        # "": repaired; else why not

    own header and intact tensors + damaged tensors from replicas ─┐
    the header as it was written + all tensors from replicas ──────┼─▶ new file ─▶ checksum = recorded one? ─▶ rename
    the object in the bucket ──────────────────────────────────────┘

A repaired checkpoint is the committed one: the same files, records and manifest, so that readers, retention and lineage see no
new one. The damaged file is never written: the new one has another name until all of it is on the disk, was read back, and has
the checksum that the record holds. Then a rename replaces the damaged one at once. Whoever has the damaged one open keeps it. If
the process dies before the rename, the temporary file is removed by the next job.

A replica is a tensor of another rank with the same name, dtype, shape and recorded checksum: data parallelism, or a tensor that
two pipeline stages hold.
"""
from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from xxhash import xxh3_128

from mindresume.errors import CorruptFileError, RecordError, RemoteError
from mindresume.formats import Candidate, Refusal
from mindresume.formats.checkpoint_dir import CheckpointDir
from mindresume.formats.records import details_of
from mindresume.formats.weight_files import header_of, is_as_recorded
from mindresume.model.manifest import FileRecord, TensorRecord, read_details, read_record, record_name, record_rank
from mindresume.resume.replicas import likely_holders
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.storage.atomic_publish import error_text, publish, temporary_name
from mindresume.storage.interface import Storage
from mindresume.tensor_files import CHUNK, FilePlan, TensorEntry, TensorSpec, plan_file
from mindresume.tensor_files.checksum import tensor_checksum

_Pieces = Callable[[], Iterator[bytes]]
MAX_HEADERS = 8                 # headers of other ranks that are tried for one that is lost


class _NoCopyError(Exception):
    """There is no intact copy of a part of a file."""


@dataclass(frozen=True)
class _Source:
    """Says where the bytes of a tensor are. ``checksum``: the recorded one."""
    path: str
    entry: TensorEntry
    checksum: str


def repair(directory: CheckpointDir, candidate: Candidate, damage: Refusal, tag: str, bucket: RemoteCheckpoints | None = None
           ) -> str:
    """Repairs the file that ``damage`` names.

    Args:
        tag: part of the name of the temporary file; of no other process.
        bucket: the object store to which the checkpoint was uploaded.
    Returns:
        Empty if the file is now as it was committed; else a sentence that says why not, and nothing has changed.
    """
    path, rank = damage.file or "", damage.rank if damage.rank is not None else -1
    try:
        if record_rank(os.path.basename(path)) is not None:
            return _repair_record(directory, candidate, rank, tag, bucket)
        index, file = next(((index, file) for index, file in enumerate(candidate.files.get(rank, ())) if file.path == path),
                           (0, None))
        if file is None:
            return f"{path} is no file of weights; only those and records are repaired"
        return _repair_weights(directory, candidate, rank, index, file, tag, bucket)
    except (CorruptFileError, RecordError, OSError) as error:
        return f"{path} cannot be repaired: {error_text(error)}"


# ---- weights ---------------------------------------------------------------------------------------------------------

def _repair_weights(directory: CheckpointDir, candidate: Candidate, rank: int, index: int, file: FileRecord, tag: str,
                    bucket: RemoteCheckpoints | None) -> str:
    reasons = []
    recorded = {name: row for name, row in details_of(directory.storage, candidate.records_dir or "", rank).tensors.items()
                if row.file == index}
    try:
        sources = _intact_sources(directory, candidate, rank, file, recorded)
        for pieces in _versions(directory, candidate, rank, index, file, recorded, sources):
            if _replace(directory, file, pieces, tag):
                return ""
        reasons.append("its header cannot be made again")
    except _NoCopyError as error:
        reasons.append(str(error))
    if bucket is not None:
        reason = _from_bucket(directory, candidate, file, tag, bucket)
        if not reason:
            return ""
        reasons.append(reason)
    return f"{file.path} cannot be repaired: {'; '.join(reasons)}"


def _intact_sources(directory: CheckpointDir, candidate: Candidate, rank: int, file: FileRecord,
                    recorded: Mapping[str, TensorRecord]) -> dict[str, _Source]:
    """Returns an intact copy of each tensor: in the file itself, else on another rank. Raises _NoCopyError if one has none."""
    found: dict[str, _Source] = {}
    with suppress(CorruptFileError):                        # its header is lost, or the file is missing
        found = _intact_in(directory, file, recorded)
    wanted = {name: row for name, row in recorded.items() if name not in found}
    for other in likely_holders(wanted, rank, candidate):
        if not wanted:
            break
        with suppress(RecordError, OSError):                # its record is damaged, too
            theirs = details_of(directory.storage, candidate.records_dir or "", other).tensors
            for index, copy in enumerate(candidate.files[other]):
                same = {name: row for name, row in wanted.items() if name in theirs and theirs[name].file == index and
                        (theirs[name].dtype, theirs[name].shape, theirs[name].checksum) == (row.dtype, row.shape, row.checksum)}
                with suppress(CorruptFileError):
                    found |= _intact_in(directory, copy, same) if same else {}
            wanted = {name: row for name, row in wanted.items() if name not in found}
    if wanted:
        raise _NoCopyError(f"no other rank holds an intact copy of {next(iter(wanted))}"
                           + (f" and {len(wanted) - 1} more tensors" if len(wanted) > 1 else ""))
    return found


def _intact_in(directory: CheckpointDir, file: FileRecord, recorded: Mapping[str, TensorRecord]) -> dict[str, _Source]:
    """Returns those of the tensors whose bytes in ``file`` have the recorded checksum. Raises CorruptFileError."""
    header, path, found = header_of(directory, file), directory.path(file.path), {}
    with directory.storage.open(path) as opened:
        for name, row in recorded.items():
            entry = header.tensors.get(name)
            if entry is not None and (entry.dtype, entry.shape) == (row.dtype, row.shape):
                with suppress(CorruptFileError):
                    if tensor_checksum(opened, entry) == row.checksum:
                        found[name] = _Source(path, entry, row.checksum)
    return found


def _versions(directory: CheckpointDir, candidate: Candidate, rank: int, index: int, file: FileRecord,
              recorded: Mapping[str, TensorRecord], sources: Mapping[str, _Source]) -> Iterator[_Pieces]:
    """Yields the ways to make the file again, each as a function that yields its bytes: with its own header as it lies there,
    then with the metadata of the files of other ranks. The recorded checksum tells which one is right."""
    with suppress(CorruptFileError):
        entries = header_of(directory, file).tensors
        if {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
                name: (row.dtype, row.shape) for name, row in recorded.items()}:
            yield lambda: _with_own_header(directory.storage, directory.path(file.path), entries, sources)
    specs = {name: TensorSpec(row.dtype, row.shape, sources[name].entry.nbytes) for name, row in recorded.items()}
    tried: list[dict[str, str]] = []
    for other in [number for number in candidate.files if number != rank][:MAX_HEADERS]:
        with suppress(CorruptFileError, IndexError):
            metadata = dict(header_of(directory, candidate.files[other][index]).metadata)
            if metadata not in tried:
                tried.append(metadata)
                plan = plan_file(file.format, specs, metadata)
                if plan.size == file.size:
                    yield lambda plan=plan: _by_plan(directory.storage, plan, sources)


def _with_own_header(storage: Storage, path: str, entries: Mapping[str, TensorEntry], sources: Mapping[str, _Source]
                     ) -> Iterator[bytes]:
    """Yields the bytes of a file, with those of each tensor from its source."""
    ranges = sorted((start, count, name, number) for name, entry in entries.items()
                    for number, (start, count) in enumerate(entry.ranges))
    before: dict[str, list[int]] = {name: list(np.cumsum([0, *(count for _, count in entry.ranges)]))
                                    for name, entry in entries.items()}
    with _Files(storage) as files:
        own, at = files.open(path), 0
        for start, count, name, number in ranges:
            yield from _bytes_at(own, at, start - at)
            yield from files.part(sources[name], int(before[name][number]), count)
            at = start + count
        yield from _bytes_at(own, at, None)


def _by_plan(storage: Storage, plan: FilePlan, sources: Mapping[str, _Source]) -> Iterator[bytes]:
    """Yields the bytes of a new file."""
    with _Files(storage) as files:
        for part in plan.parts:
            if part.name is None:
                yield part.data
            else:
                yield from files.part(sources[part.name], part.start, part.count)


class _Files(ExitStack):
    """Keeps the files open from which tensors are copied."""

    def __init__(self, storage: Storage):
        super().__init__()
        self._storage, self._opened = storage, {}

    def open(self, path: str) -> BinaryIO:
        if path not in self._opened:
            self._opened[path] = self.enter_context(self._storage.open(path))
        return self._opened[path]

    def part(self, source: _Source, first: int, count: int) -> Iterator[bytes]:
        """Yields ``count`` bytes of a tensor from its byte ``first``."""
        file, passed = self.open(source.path), 0
        for start, length in source.entry.ranges:
            begin, end = max(first, passed), min(first + count, passed + length)
            if begin < end:
                yield from _bytes_at(file, start + begin - passed, end - begin)
            passed += length


def _bytes_at(file: BinaryIO, start: int, count: int | None) -> Iterator[bytes]:
    """Yields bytes of a file from ``start``; ``count`` None: to its end."""
    while count is None or count > 0:
        file.seek(start)
        found = file.read(CHUNK if count is None else min(CHUNK, count))
        if not found:
            return
        yield found
        start += len(found)
        count = None if count is None else count - len(found)


def _replace(directory: CheckpointDir, file: FileRecord, pieces: _Pieces, tag: str) -> bool:
    """Writes a new file of ``pieces`` and puts it in the place of ``file``. Returns False, and changes nothing, if it has not the
    recorded checksum. Raises OSError."""
    whole, size = xxh3_128(), 0

    def hashed() -> Iterator[bytes]:
        nonlocal size
        for piece in pieces():
            whole.update(piece)
            size += len(piece)
            yield piece
    path = directory.path(file.path)
    temporary = temporary_name(path, tag)
    try:
        directory.storage.make_folder(os.path.dirname(path))
        directory.storage.write(temporary, hashed(), file.size or 0)
        if (whole.hexdigest(), size) != (file.checksum, file.size) or not is_as_recorded(directory.storage, temporary, file):
            return False
        _put(directory.storage, temporary, path)
        return True
    finally:
        with suppress(OSError):                             # it is gone after the rename
            directory.storage.remove(temporary)


def _put(storage: Storage, temporary: str, path: str) -> None:
    """Puts a new file in the place of ``path``, with the owner and the rights of that file, which jobs must still be able to
    read and remove after a repair by root. If it is missing, with those of its folder. Raises OSError."""
    storage.copy_owner(path if storage.status(path) is not None else os.path.dirname(path), temporary)
    storage.rename(temporary, path)
    storage.sync(os.path.dirname(path))


def _from_bucket(directory: CheckpointDir, candidate: Candidate, file: FileRecord, tag: str, bucket: RemoteCheckpoints) -> str:
    """Downloads the file. Returns why it could not be used; empty if it is in its place."""
    path = directory.path(file.path)
    temporary = temporary_name(path, tag)
    try:
        directory.storage.make_folder(os.path.dirname(path))
        bucket.download(candidate.name, os.path.relpath(file.path, candidate.iteration_dir or "."), temporary)
        if not is_as_recorded(directory.storage, temporary, file):
            return f"{bucket.url} holds other bytes"
        _put(directory.storage, temporary, path)
        return ""
    except RemoteError as error:
        return str(error)
    finally:
        with suppress(OSError):
            directory.storage.remove(temporary)


# ---- records ---------------------------------------------------------------------------------------------------------

def _repair_record(directory: CheckpointDir, candidate: Candidate, rank: int, tag: str,
                   bucket: RemoteCheckpoints | None) -> str:
    """Replaces a damaged record by the one in the bucket, if it is the one that was committed. No other rank has a copy."""
    path = os.path.join(candidate.records_dir or "", record_name(rank))
    if bucket is None:
        return f"{os.path.relpath(path, directory.root)} cannot be repaired: a record has no copy outside of the bucket"
    try:
        data = bucket.record(candidate.name, rank)
    except RemoteError as error:
        return f"{os.path.relpath(path, directory.root)} cannot be repaired: {error}"
    _, checksum = read_record(io.BytesIO(data))
    read_details(io.BytesIO(data))
    if checksum != candidate.records[sorted(candidate.files).index(rank)]:
        return f"{os.path.relpath(path, directory.root)} cannot be repaired: {bucket.url} holds another record"
    publish(directory.storage, path, [data], tag)
    directory.storage.copy_owner(candidate.records_dir or "", path)
    return ""
