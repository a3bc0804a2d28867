"""Repairs damaged files of a checkpoint: byte for byte what was committed, from copies that are
proven by their checksums.

    reason = Repair(directory, candidate, tag, bucket).repair(refusal)  # "": repaired; else why not

    own header and intact tensors + damaged tensors from replicas ─┐
    the header as it was written + all tensors from replicas ──────┼─▶ new file ─▶ checksum =
        recorded one? ─▶ rename
    the object in the bucket ──────────────────────────────────────┘

A repaired checkpoint is the committed one: the same files, records and manifest, so that readers,
retention and lineage see no new one. The damaged file is never written: the new one has another
name until all of it is on the disk, was read back, and has the checksum that the record holds. Then
a rename replaces the damaged one at once. Whoever has the damaged one open keeps it. If the process
dies before the rename, the temporary file is removed by the next job.

A replica is a tensor of another rank with the same name, dtype, shape and recorded checksum: data
parallelism, or a tensor that two pipeline stages hold.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import BinaryIO

from xxhash import xxh3_128

from mindresume.errors import CorruptFileError, RecordError, RemoteError
from mindresume.formats import Candidate, CheckpointDir, Refusal
from mindresume.formats.records import RecordFolder
from mindresume.formats.weight_files import header_of, is_as_recorded
from mindresume.model.manifest import (
    FileRecord,
    TensorRecord,
    read_details,
    record_name,
    record_rank,
)
from mindresume.resume.replicas import copies_elsewhere
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.storage import Storage, error_text, publish, temporary_name
from mindresume.tensor_files import (
    CHUNK,
    TensorEntry,
    TensorSpec,
    plan_file,
    tensor_checksum,
)

MAX_HEADERS = 8  # headers of other ranks that are tried for one that is lost


# What a new file is made of: bytes, or (path, first byte, count) of another file. None: to its end.
_Piece = bytes | tuple[str, int, int | None]


class _NoCopyError(Exception):
    """There is no intact copy of a part of a file."""


@dataclass(frozen=True)
class _Source:
    """Says where the bytes of a tensor are. ``checksum``: the recorded one."""

    path: str
    entry: TensorEntry
    checksum: str

    def pieces(self, first: int, count: int) -> Iterator[_Piece]:
        """Yields where ``count`` bytes of the tensor lie, from its byte ``first``."""
        passed = 0
        for start, length in self.entry.ranges:
            begin, end = max(first, passed), min(first + count, passed + length)
            if begin < end:
                yield self.path, start + begin - passed, end - begin
            passed += length


@dataclass(frozen=True)
class Repair:
    """Repairs files of one checkpoint.

    Args:
        tag: part of the names of temporary files; of no other process.
        bucket: the object store to which the checkpoint was uploaded.
    """

    directory: CheckpointDir
    candidate: Candidate
    tag: str
    bucket: RemoteCheckpoints | None = None

    def repair(self, damage: Refusal) -> str:
        """Repairs the file that ``damage`` names. Returns an empty text if it is now as it was
        committed; else a sentence that says why not, and nothing has changed."""
        path, rank = damage.file or "", damage.rank if damage.rank is not None else -1
        try:
            if record_rank(os.path.basename(path)) is not None:
                reason = self._from_bucket_record(rank)
                return f"{path} cannot be repaired: {reason}" if reason else ""
            index, file = next(
                (
                    (index, file)
                    for index, file in enumerate(self.candidate.files.get(rank, ()))
                    if file.path == path
                ),
                (0, None),
            )
            if file is None:
                return f"{path} is no file of weights; only those and records are repaired"
            reason = self._from_copies(rank, index, file)
            if reason and self.bucket is not None:
                try:
                    reason = (
                        ""
                        if self.put(file, None)
                        else f"{reason}; {self.bucket.url} holds other bytes"
                    )
                except RemoteError as error:
                    reason = f"{reason}; {error}"
        except (CorruptFileError, RecordError, OSError) as error:
            reason = error_text(error)
        return f"{path} cannot be repaired: {reason}" if reason else ""

    def _from_copies(self, rank: int, index: int, file: FileRecord) -> str:
        """Makes the file again of intact copies on this disk. Returns why not; empty if it is in
        its place."""
        details = RecordFolder(self.directory.storage, self.candidate.records_dir or "").details(
            rank
        )
        recorded = {name: row for name, row in details.tensors.items() if row.file == index}
        try:
            sources = self._intact_sources(rank, file, recorded)
        except _NoCopyError as error:
            return str(error)
        made = any(
            self.put(file, pieces)
            for pieces in self._versions(rank, index, file, recorded, sources)
        )
        return "" if made else "its header cannot be made again"

    def _intact_sources(
        self, rank: int, file: FileRecord, recorded: Mapping[str, TensorRecord]
    ) -> dict[str, _Source]:
        """Returns an intact copy of each tensor: in the file itself, else on another rank. Raises
        _NoCopyError if one has none."""
        sources: dict[str, _Source] = {}
        # its header is lost, or the file is missing
        with suppress(CorruptFileError):
            sources = self._intact_in(file, recorded)
        wanted = {name: row for name, row in recorded.items() if name not in sources}
        for other, copies in copies_elsewhere(
            self.directory, self.candidate, rank, wanted, is_repair=True
        ):
            with suppress(CorruptFileError, OSError):  # this copy is damaged, too
                intact = self._intact_in(other, copies)
                sources |= intact
                for name in intact:
                    del wanted[name]
        if wanted:
            raise _NoCopyError(
                f"no other rank holds an intact copy of {next(iter(wanted))}"
                + (f" and {len(wanted) - 1} more tensors" if len(wanted) > 1 else "")
            )
        return sources

    def _intact_in(
        self, file: FileRecord, recorded: Mapping[str, TensorRecord]
    ) -> dict[str, _Source]:
        """Returns those of the tensors whose bytes in ``file`` have the recorded checksum. Raises
        CorruptFileError."""
        header = header_of(self.directory, file)
        path = self.directory.path(file.path)
        intact = {}
        with self.directory.storage.open(path) as opened:
            for name, row in recorded.items():
                entry = header.tensors.get(name)
                if entry is not None and (entry.dtype, entry.shape) == (row.dtype, row.shape):
                    with suppress(CorruptFileError):
                        if is_recorded(tensor_checksum(opened, entry), row):
                            intact[name] = _Source(path, entry, row.checksum)
        return intact

    def _versions(
        self,
        rank: int,
        index: int,
        file: FileRecord,
        recorded: Mapping[str, TensorRecord],
        sources: Mapping[str, _Source],
    ) -> Iterator[Iterator[_Piece]]:
        """Yields the ways to make the file again, each as its pieces: with its own header as it
        lies there, then with the metadata of the files of other ranks. The recorded checksum tells
        which one is right."""
        with suppress(CorruptFileError):
            entries = header_of(self.directory, file).tensors
            if {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
                name: (row.dtype, row.shape) for name, row in recorded.items()
            }:
                yield _own_pieces(self.directory.path(file.path), entries, sources)
        specs = {
            name: TensorSpec(row.dtype, row.shape, sources[name].entry.nbytes)
            for name, row in recorded.items()
        }
        tried: list[dict[str, str]] = []
        for other in [number for number in self.candidate.files if number != rank][:MAX_HEADERS]:
            with suppress(CorruptFileError, IndexError):
                metadata = dict(
                    header_of(self.directory, self.candidate.files[other][index]).metadata
                )
                if metadata not in tried:
                    tried.append(metadata)
                    plan = plan_file(file.format, specs, metadata)
                    if plan.size == file.size:
                        yield (
                            piece
                            for part in plan.parts
                            for piece in (
                                [part.data]
                                if part.name is None
                                else sources[part.name].pieces(part.start, part.count)
                            )
                        )

    def put(self, file: FileRecord, pieces: Iterable[_Piece] | None) -> bool:
        """Writes a new file of ``pieces`` (None: downloads it from the bucket), and puts it in the
        place of ``file`` if its bytes, read back, are those that were recorded. Returns False, and
        changes nothing, if they are not. It has the owner and the rights of the damaged file, which
        jobs must still be able to read and remove after a repair by root; if that is missing, those
        of its folder. Raises OSError, RemoteError."""
        storage, path = self.directory.storage, self.directory.path(file.path)
        temporary = temporary_name(path, self.tag)
        try:
            storage.make_folder(os.path.dirname(path))
            if pieces is not None:
                whole = xxh3_128()
                storage.write(temporary, _hashed(_bytes_of(storage, pieces), whole), file.size or 0)
                # of the wrong header: it need not be read back
                if not is_recorded(whole.hexdigest(), file):
                    return False
            else:
                self.bucket.download(
                    self.candidate.name,
                    os.path.relpath(file.path, self.candidate.iteration_dir or "."),
                    temporary,
                )
            if not is_as_recorded(storage, temporary, file):
                return False
            storage.copy_owner(
                path if storage.status(path) is not None else os.path.dirname(path), temporary
            )
            storage.rename(temporary, path)
            storage.sync(os.path.dirname(path))
            return True
        finally:
            with suppress(OSError):  # it is gone after the rename
                storage.remove(temporary)

    def _from_bucket_record(self, rank: int) -> str:
        """Replaces a damaged record by the one in the bucket, if it is the one that was committed;
        no other rank has a copy. Returns why not; empty if it is in its place."""
        storage = self.directory.storage
        candidate = self.candidate
        folder = self.candidate.records_dir or ""
        if self.bucket is None:
            return "a record has no copy outside of the bucket"
        try:
            data = self.bucket.record(candidate.name, rank)
        except RemoteError as error:
            return str(error)
        record, _ = read_details(io.BytesIO(data))
        if record.checksum != candidate.records[sorted(candidate.files).index(rank)]:
            return f"{self.bucket.url} holds another record"
        publish(storage, os.path.join(folder, record_name(rank)), [data], self.tag)
        storage.copy_owner(folder, os.path.join(folder, record_name(rank)))
        return ""


# ---- bytes ---------------------------------------------------------------------------------------


def is_recorded(checksum: str, recorded: TensorRecord | FileRecord) -> bool:
    """Returns whether bytes with this checksum are those of a tensor or a file that was
    recorded."""
    return checksum == recorded.checksum


def _hashed(pieces: Iterator[bytes], whole: xxh3_128) -> Iterator[bytes]:
    for piece in pieces:
        whole.update(piece)
        yield piece


def _own_pieces(
    path: str, entries: Mapping[str, TensorEntry], sources: Mapping[str, _Source]
) -> Iterator[_Piece]:
    """Yields the pieces of the file at ``path``, with those of each tensor from its source."""
    at, passed = 0, dict.fromkeys(entries, 0)
    for start, count, name in sorted(
        (*place, name) for name, entry in entries.items() for place in entry.ranges
    ):
        yield path, at, start - at
        yield from sources[name].pieces(passed[name], count)
        passed[name] += count
        at = start + count
    yield path, at, None


def _bytes_of(storage: Storage, pieces: Iterable[_Piece]) -> Iterator[bytes]:
    """Yields the bytes of ``pieces``."""
    opened: dict[str, BinaryIO] = {}
    with ExitStack() as stack:
        for piece in pieces:
            if isinstance(piece, bytes):
                yield piece
                continue
            path, start, count = piece
            if path not in opened:
                opened[path] = stack.enter_context(storage.open(path))
            while count is None or count > 0:
                opened[path].seek(start)
                data = opened[path].read(CHUNK if count is None else min(CHUNK, count))
                if not data:
                    break
                yield data
                start += len(data)
                count = None if count is None else count - len(data)
