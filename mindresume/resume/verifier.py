"""Verifies the files of one rank of a candidate: every byte has the recorded checksum.

Files of mindformers have no checksums: their headers and counters are checked. Each rank of a job
verifies the files that it will load. ``eligible`` checks the files of all ranks, by their sizes
alone.

Of an iteration folder without records ``metadata.json`` is verified, and the headers of all files
against it: nothing else is known about their contents.

    all ranks at once    metadata.json can be read, and a file exists for every slice that it names
    each rank            the headers of its files hold every slice that they should, in the dtype
                         and shape of the layout
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mindresume.errors import CorruptFileError, RecordError
from mindresume.formats import Candidate, CheckpointDir, Refusal
from mindresume.formats.iterations import METADATA
from mindresume.formats.metadata import TensorMetadata, load_metadata
from mindresume.formats.rank_folders import LABEL, parse_label
from mindresume.formats.records import RecordFolder
from mindresume.formats.strategy import Strategy
from mindresume.formats.weight_files import header_of, scalars_of
from mindresume.formatting import listed
from mindresume.model.layout import is_scalar
from mindresume.model.manifest import (
    FOLDER,
    Details,
    FileRecord,
    Record,
    TensorRecord,
    attempts,
    record_name,
)
from mindresume.model.training_state import TrainingState, is_transient
from mindresume.resume.replicas import (
    ShardSource,
    StrategyDetails,
    holder_of,
    replica_files,
    replica_sources,
)
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import (
    Header,
    TensorEntry,
    damaged_tensors,
    file_checksum,
    read_header,
    read_whole,
    tensor_checksum,
)

OnBytesRead = Callable[[int], None]  # bytes read since the last call


def ignore_bytes(count: int) -> None:
    pass


@dataclass(frozen=True)
class VerifiedShard:
    """The verified files of one rank of the checkpoint.

    Args:
        sources: its own files, or replicas of their tensors on other ranks where its own are
            missing.
        state: training state; None for files without records.
        details: checksums and random state; None for files without records.
        scalars: counters that were read from files without records.
    """

    rank: int
    sources: tuple[ShardSource, ...]
    state: TrainingState | None = None
    details: Details | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def missing_files(self, candidate: Candidate) -> list[tuple[int, str]]:
        """Returns (rank, path) of each of its files that is missing, and whose tensors are read
        from replicas."""
        there = {source.file.path for source in self.sources}
        return [
            (self.rank, file.path)
            for file in candidate.files.get(self.rank, ())
            if file.path not in there
        ]


@dataclass
class Verifier:
    """Verifies the files of a candidate, one rank after the other; several threads may use it.
    ``metadata.json`` is read once for all ranks.

    Args:
        progress: receives the bytes that are read.
        full: False: only the records, the headers and the sizes are verified.
        strategy: of the job that saved, where mindformers wrote no files for some ranks.
        keep: keeps the verified tensors of a checkpoint with records, as far as its budget allows,
            for a load that takes them.
        headers, records: what was read already of the files, by path and by rank.
    """

    directory: CheckpointDir
    candidate: Candidate
    progress: OnBytesRead = ignore_bytes
    full: bool = True
    strategy: Strategy | None = None
    keep: ReadCache | None = None
    headers: Mapping[str, Header | None] = field(default_factory=dict)
    records: Mapping[int, tuple[Record, Details]] = field(default_factory=dict)
    _stored: StoredSlices | Refusal | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.candidate.iteration_dir and not self.candidate.records_dir:
            self._stored = stored_slices(self.directory, self.candidate)

    def verify(self, rank: int) -> VerifiedShard | Refusal:
        """Reads and verifies everything that ``rank`` will load. Returns the verified files, or why
        the candidate cannot be used."""
        candidate, files = self.candidate, self.candidate.files.get(rank)
        if not files and rank in candidate.missing_ranks:
            return self._verify_missing_rank(rank)
        if not files:
            return candidate.refuse(f"no file of rank {rank}", rank=rank)
        try:
            if candidate.records_dir:
                return self._verify_recorded(rank)
            headers = {
                file: self.headers.get(self.directory.path(file.path))
                or header_of(self.directory, file)
                for file in files
            }
            if candidate.iteration_dir:
                return self._verify_iteration(rank, headers)
            scalars = scalars_of(self.directory, files[0], headers[files[0]])
            if (
                self.full
                and self.strategy is not None
                and (difference := self._differing_replica(rank, self.strategy))
            ):
                return candidate.refuse(difference, files[0].path, rank)
        except (CorruptFileError, RecordError, OSError) as error:
            named = getattr(error, "path", "")
            damaged = (file for file in files if named.endswith(os.path.basename(file.path)))
            return self._refuse(error, rank, next(damaged, files[0]))
        return self._compare_label(rank, files[0], parse_label(headers[files[0]]), scalars)

    def damaged_files(self, rank: int) -> list[Refusal]:
        """Returns a refusal for each damaged file of a rank of a checkpoint with records:
        ``verify`` ends at the first one. If the record itself is damaged, its file is the only one.
        A missing file is not damaged if replicas hold all of it."""
        candidate = self.candidate
        record_path = os.path.relpath(candidate.in_records(record_name(rank)), self.directory.root)
        try:
            checked = self._checked_record(rank)
        except (RecordError, OSError) as error:
            return [
                candidate.refuse(
                    f"the record of rank {rank} cannot be used: {error}",
                    record_path,
                    rank,
                    error=error,
                )
            ]
        if isinstance(checked, Refusal):
            return [replace(checked, file=record_path)]
        return [
            result for result in self._verify_files(rank, checked[1]) if isinstance(result, Refusal)
        ]

    # ---- without records -------------------------------------------------------------------------

    def _verify_iteration(
        self, rank: int, headers: Mapping[FileRecord, Header]
    ) -> VerifiedShard | Refusal:
        """Verifies a rank of an iteration folder, whose counters the scan has read from
        ``common.json``."""
        for file, header in headers.items():
            label = parse_label(header)
            if label is not None and label[1] != self.candidate.step:
                return self.candidate.refuse(
                    f"rank {rank} holds a file of run {label[0]}, step {label[1]}: files of two "
                    "saves are mixed",
                    file.path,
                    rank,
                )
        stored = self._stored
        if isinstance(stored, Refusal):
            return stored
        refusal = self._compare_slices(rank, headers, stored) or self._find_unnamed(
            rank, headers, stored
        )
        return refusal or VerifiedShard(
            rank, tuple(map(ShardSource, headers)), self.candidate.state
        )

    def _compare_slices(
        self, rank: int, headers: Mapping[FileRecord, Header], stored: StoredSlices
    ) -> Refusal | None:
        """Returns how the files of ``rank`` differ from the metadata; None if they do not.

        Raises:
            CorruptFileError: a file of another rank, which holds a copy, is damaged.
        """
        for file, header in headers.items():
            for row, number in stored.by_file.get(os.path.basename(file.path), ()):
                entry = header.tensors.get(row.name)
                if entry is None and not any(
                    self._holds(copy.file, row.name) for copy in row.stored[number]
                ):
                    return self.candidate.refuse(
                        f"rank {rank}: {row.name} is not in the file that {METADATA} names for it: "
                        f"the two are of different saves",
                        file.path,
                        rank,
                    )
                expected = row.layout.local_shape(row.shape) if row.layout else row.shape
                if entry is not None and (entry.dtype, entry.shape) != (row.dtype, expected):
                    return self.candidate.refuse(
                        f"rank {rank} holds {row.name} as {entry.dtype} of shape {entry.shape}, by "
                        f"{METADATA} it is {row.dtype} of shape {expected}",
                        file.path,
                        rank,
                    )
        return None

    def _holds(self, file: str, name: str) -> bool:
        """Returns whether a file of the iteration folder holds a tensor."""
        record = FileRecord(f"{self.candidate.iteration_dir}/{file}", "safetensors")
        if self.directory.storage.status(self.directory.path(record.path)) is None:
            return False
        return name in header_of(self.directory, record).tensors

    def _find_unnamed(
        self, rank: int, headers: Mapping[FileRecord, Header], stored: StoredSlices
    ) -> Refusal | None:
        """Returns a refusal if the metadata does not name some tensors, so their layouts are
        unknown. It never names counters."""
        if self.candidate.world_size == 1 or rank != min(self.candidate.files):
            return None
        for file, header in headers.items():
            unnamed = [
                name
                for name, entry in header.tensors.items()
                if name not in stored.rows and not is_transient(name) and not is_scalar(entry.shape)
            ]
            if unnamed:
                return self.candidate.refuse(
                    f"{METADATA} does not name {listed(unnamed, 5)}, so their layouts are unknown",
                    file.path,
                    rank,
                )
        return None

    def _compare_label(
        self,
        rank: int,
        file: FileRecord,
        written: tuple[str, int] | None,
        scalars: Mapping[str, Any],
    ) -> VerifiedShard | Refusal:
        """Verifies that a file in a rank folder, with this label and these counters, is of the same
        save as the others."""
        candidate = self.candidate
        recorded = (
            attempts(self.directory.storage.list(self.directory.path(FOLDER)))
            if written and "/" in file.path
            else ()
        )
        if written and any(run == written[0] for _, _, run in recorded):
            # The scan read the label of one file only. A run that writes records never completed a
            # save without them.
            return candidate.refuse(
                f"rank {rank} holds a file of run {written[0]}, step {written[1]}, which has no "
                "record: the save never completed",
                file.path,
                rank,
            )
        if scalars.get("step_num") != candidate.step:
            return candidate.refuse(
                f"rank {rank} holds step {scalars.get('step_num')}, rank "
                f"{next(iter(candidate.files))} holds step {candidate.step}",
                file.path,
                rank,
            )
        return VerifiedShard(rank, (ShardSource(file),), scalars=scalars)

    # ---- with records ----------------------------------------------------------------------------

    @cached_property
    def _record_checksums(self) -> Mapping[int, str]:
        """Returns the checksum of the record of each rank."""
        return dict(zip(sorted(self.candidate.files), self.candidate.records, strict=False))

    def _verify_recorded(self, rank: int) -> VerifiedShard | Refusal:
        """Verifies the record against the manifest, the files against the record."""
        checked = self._checked_record(rank)
        if isinstance(checked, Refusal):
            return checked
        record, details = checked
        sources: list[ShardSource] = []
        for verified in self._verify_files(rank, details):
            if isinstance(verified, Refusal):
                return verified
            sources += verified
        return VerifiedShard(rank, tuple(sources), record.state, details)

    def _verify_files(
        self, rank: int, details: Details
    ) -> Iterator[tuple[ShardSource, ...] | Refusal]:
        """Verifies the files of a rank, one after the other."""
        for index, file in enumerate(self.candidate.files[rank]):
            recorded = {name: row for name, row in details.tensors.items() if row.file == index}
            try:
                yield self._verify_file(rank, file, recorded)
            except (CorruptFileError, OSError) as error:
                yield self._refuse(error, rank, file)

    def _refuse(self, error: Exception, rank: int, file: FileRecord) -> Refusal:
        """Returns the refusal that follows from an error of reading a file of a rank."""
        reason = getattr(error, "reason", error)
        if isinstance(error, OSError):
            reason = f"cannot be read: {error}"
        tensor = getattr(error, "tensor", None)
        return self.candidate.refuse(
            f"rank {rank}: {reason}", file.path, rank, [tensor] if tensor else (), error
        )

    def _checked_record(self, rank: int) -> tuple[Record, Details] | Refusal:
        """Returns a record and its details, or why it is not the one that was committed. Raises
        RecordError or OSError if it cannot be read."""
        candidate, files = self.candidate, self.candidate.files[rank]
        folder = RecordFolder(self.directory.storage, candidate.records_dir or "")
        record, details = self.records.get(rank) or folder.read(rank)
        if (record.run, record.state.step, record.rank, record.world_size) != (
            candidate.run,
            candidate.step,
            rank,
            candidate.world_size,
        ):
            return candidate.refuse(
                f"the record of rank {rank} is of run {record.run}, step {record.state.step}, rank "
                f"{record.rank} of {record.world_size}",
                rank=rank,
            )
        if tuple(file.below(candidate.iteration_dir) for file in record.files) != files:
            return candidate.refuse(
                f"the record of rank {rank} names {record.files[0].path}, its manifest another "
                "file, size or checksum",
                files[0].path,
                rank,
            )
        if candidate.records and self._record_checksums[rank] != record.checksum:
            return candidate.refuse(
                f"the record of rank {rank} is not the one that was committed", rank=rank
            )
        return record, details

    def _verify_file(
        self, rank: int, file: FileRecord, recorded: Mapping[str, TensorRecord]
    ) -> tuple[ShardSource, ...] | Refusal:
        """Verifies one file of a rank; if it is missing, the replicas of all its tensors on other
        ranks."""
        candidate, path = self.candidate, self.directory.path(file.path)
        status = self.directory.storage.status(path)
        if status is None:
            replicas = replica_files(self.directory, candidate, rank)
            return (
                replicas
                if isinstance(replicas, Refusal)
                else self._verify_replicas(
                    rank,
                    recorded,
                    tuple(
                        ShardSource(source.file, names)
                        for source in replicas
                        if (names := tuple(name for name in source.names or () if name in recorded))
                    ),
                )
            )
        if status.size != file.size:
            return wrong_size(candidate, rank, file, status.size)
        known = self.headers.get(path)
        if known is not None and not self.full:
            return _mismatch(candidate, rank, file, recorded, known) or (ShardSource(file),)
        # before the open file takes a part of the room
        room = self.keep.left if self.keep is not None else 0
        with self.directory.storage.open(path) as opened:
            # its errors are more specific than a wrong checksum
            header = read_header(opened, path)
            if problem := _mismatch(candidate, rank, file, recorded, header):
                return problem
            if not self.full:
                return (ShardSource(file),)
            checksum = ""
            if self.keep is not None and header.size <= room:
                with suppress(MemoryError):
                    tensors, checksum = read_whole(opened, header, self.progress)
                    if checksum == file.checksum and tensors:
                        self.keep.keep_parts(path, tensors, header.size)
            checksum = checksum or file_checksum(opened, self.progress)[0]
            if checksum == file.checksum:
                return (ShardSource(file),)
            wrong = damaged_tensors(
                opened, path, {name: row.checksum for name, row in recorded.items()}
            )
        damaged = listed(wrong, 3) or "no tensor, but the header or its padding"
        return candidate.refuse(
            f"the file of rank {rank} is not what was written; damaged: {damaged} (checksum "
            f"{checksum}, recorded {file.checksum})",
            file.path,
            rank,
            wrong,
        )

    # ---- replicas --------------------------------------------------------------------------------

    def _verify_missing_rank(self, rank: int) -> VerifiedShard | Refusal:
        """Verifies the replicas, on other ranks, of the tensors of a rank that was lost before its
        job saved for the last time. Its random state is lost."""
        candidate, strategy = self.candidate, self.strategy
        try:
            records = (
                StrategyDetails(self.directory, candidate, strategy)
                if strategy
                else RecordFolder(self.directory.storage, candidate.records_dir or "", {})
            )
            held = replica_sources(rank, candidate.files, candidate.world_size, records)
            if isinstance(held, str):
                return candidate.refuse(f"rank {rank} wrote nothing, and {held}", rank=rank)
            names: dict[FileRecord, list[str]] = {}
            for name, (other, row) in held.items():
                names.setdefault(candidate.files[other][row.file], []).append(name)
            recorded = {name: row for name, (_, row) in held.items()}
            sources = tuple(ShardSource(file, tuple(listed)) for file, listed in names.items())
            verified, first = self._verify_replicas(rank, recorded, sources), sources[0].file
            scalars = (
                {}
                if candidate.state
                else scalars_of(self.directory, first, header_of(self.directory, first))
            )
        except CorruptFileError as error:
            return candidate.refuse(
                f"rank {rank} wrote nothing, and the file that replaces its own is damaged: "
                f"{error.reason}",
                rank=rank,
            )
        except (RecordError, OSError) as error:
            return candidate.refuse(f"rank {rank} wrote nothing, and {error}", rank=rank)
        return (
            verified
            if isinstance(verified, Refusal)
            else VerifiedShard(
                rank,
                verified,
                candidate.state,
                Details(recorded) if candidate.records_dir else None,
                scalars,
            )
        )

    def _differing_replica(self, rank: int, strategy: Strategy) -> str:
        """Returns a sentence about a tensor of ``rank`` that differs from its replica on another
        rank, although they are equal by ``strategy``: the strategy then belongs to another job.
        Empty if no tensor differs.

        Raises:
            CorruptFileError, StrategyError, OSError.
        """
        records = StrategyDetails(self.directory, self.candidate, strategy)
        first = rank - rank % strategy.stage_size
        mates = [
            other
            for other in sorted(self.candidate.files)
            if first <= other < first + strategy.stage_size
        ]
        for name, row in records.details(rank).tensors.items():
            other = holder_of(rank, name, row, mates, records)
            if other not in (None, rank) and (
                self._tensor_checksum(*records.entries[other][name])
                != self._tensor_checksum(*records.entries[rank][name])
            ):
                return (
                    f"{name} differs on rank {rank} and rank {other}, which hold copies of each "
                    f"other by {strategy.source}; is that the strategy of another job?"
                )
        return ""

    def _tensor_checksum(self, file: FileRecord, entry: TensorEntry) -> str:
        with self.directory.storage.open(self.directory.path(file.path)) as opened:
            checksum = tensor_checksum(opened, entry)
        self.progress(entry.nbytes)
        return checksum

    def _verify_replicas(
        self, rank: int, recorded: Mapping[str, TensorRecord], sources: tuple[ShardSource, ...]
    ) -> tuple[ShardSource, ...] | Refusal:
        """Verifies the checksums of the named tensors in ``sources``. Returns ``sources``, or why
        one cannot be used."""
        for source in sources:
            header = header_of(self.directory, source.file)
            with self.directory.storage.open(self.directory.path(source.file.path)) as opened:
                for name in source.names or ():
                    expected = recorded[name].checksum  # empty where none was recorded
                    if (
                        name not in header.tensors
                        or expected
                        and tensor_checksum(opened, header.tensors[name]) != expected
                    ):
                        return self.candidate.refuse(
                            f"the file of rank {rank} is missing, and its replica of {name} is "
                            "damaged",
                            source.file.path,
                            rank,
                            [name],
                        )
                    self.progress(header.tensors[name].nbytes)
        return sources


def wrong_size(candidate: Candidate, rank: int, file: FileRecord, size: int) -> Refusal:
    """Returns the refusal of a file that has ``size`` bytes instead of the recorded ones."""
    return candidate.refuse(
        f"the file of rank {rank} is empty (0 bytes)"
        if size == 0
        else f"the file of rank {rank} has {size} bytes, {file.size} were written",
        file.path,
        rank,
    )


def _mismatch(
    candidate: Candidate,
    rank: int,
    file: FileRecord,
    tensors: Mapping[str, TensorRecord],
    header: Header,
) -> Refusal | None:
    """Returns a refusal if the header of a file of ``rank`` differs from the record."""
    recorded = {name: (row.dtype, row.shape) for name, row in tensors.items()}
    found = {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}
    names = recorded.keys() | found.keys()
    differing = next((name for name in names if recorded.get(name) != found.get(name)), None)
    if parse_label(header) != (candidate.run, candidate.step):
        problem = (
            f"is not of run {candidate.run}, step {candidate.step}: its label is "
            f"{header.metadata.get(LABEL)!r}"
        )
    elif differing is not None:
        problem = f"holds {differing} as {found.get(differing)}, recorded {recorded.get(differing)}"
    else:
        return None
    return candidate.refuse(f"the file of rank {rank} {problem[:300]}", file.path, rank)


# ---- metadata.json -------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredSlices:
    """Which files hold which slices of an iteration folder, by ``metadata.json``.

    Args:
        rows: by tensor.
        by_file: {file name: [(tensor, number of the slice)]}.
    """

    rows: Mapping[str, TensorMetadata]
    by_file: Mapping[str, list[tuple[TensorMetadata, int]]]


def stored_slices(directory: CheckpointDir, candidate: Candidate) -> StoredSlices | Refusal:
    """Returns what ``metadata.json`` says, or why it cannot be used. Weight files are not
    opened."""
    path, storage = f"{candidate.iteration_dir}/{METADATA}", directory.storage
    try:
        if storage.status(directory.path(path)) is None:
            # optional for one rank; else the scan refuses it
            return StoredSlices({}, {})
        rows = load_metadata(storage, directory.path(candidate.iteration_dir))
    except CorruptFileError as error:
        return candidate.refuse(f"{METADATA}: {error.reason}", path, error=error)
    except OSError as error:
        return candidate.refuse(
            f"{METADATA}: it cannot be read: {error.strerror or error}", path, error=error
        )
    present = {os.path.basename(file.path) for file in candidate.all_files}
    by_file: dict[str, list[tuple[TensorMetadata, int]]] = {}
    for row in rows.values():
        for number, copies in row.stored.items():
            files = {copy.file for copy in copies}
            if present.isdisjoint(files):
                return candidate.refuse(
                    f"{METADATA} names {listed(sorted(files), 3)} for slice {number} of "
                    f"{row.name}, and no such file exists",
                    path,
                )
            for file in files:
                by_file.setdefault(file, []).append((row, number))
    return StoredSlices(rows, by_file)
