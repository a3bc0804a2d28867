"""Scrubs a folder of checkpoints: reads every byte that is kept at a bounded rate, tells by file
and tensor what is damaged, and repairs what has an intact copy.

    scrubber = Scrubber(directory, ScrubOptions(rate=50e6, repairs=True))
    for found in scrubber.scrub(list_checkpoints): ...  # one CheckpointScrub for each step

    read lock ("scrubbing") ─▶ records and files of all ranks against their checksums ─▶ a damaged
        file: read it once more
    ─▶ repair (``repair``) ─▶ scrub.json beside the records (``formats.weight_files``) ─▶ release

The lock keeps retention from removing what is being read, and keeps a second scrub of the folder
out: one at a time, on whatever node. Checkpoints without checksums (mindformers alone) and saves
that are not complete are left out: nothing can be compared, or a running job is writing them. A
checkpoint that is gone when its turn comes, or after its reading, is no damage.

``ThrottledReads`` reads from the device where the kernel allows it. Before a file is read the
kernel is asked to drop it from its cache (posix_fadvise), and each piece again after it was read:
the bytes come from the device, and the cache stays with the training. What a cache behind the
kernel answers (of an NFS server, of a RAID controller or the device) cannot be known, and pages
that a process has mapped or locked stay.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mindresume import runtime
from mindresume.coordination.lease import (
    BEAT,
    SCRUBBING,
    Lease,
    LeaseHolder,
    acquire_read_lock,
    is_alive,
    is_job_lease,
    lease_holders,
    lease_path,
)
from mindresume.coordination.lease_acquisition import half_written
from mindresume.formats import Candidate, CheckpointDir, Refusal
from mindresume.formats.weight_files import can_be_scrubbed, publish_result, read_result
from mindresume.maintenance.repair import Repair
from mindresume.resume.candidates import CheckpointStatus, damaged_metadata_files
from mindresume.resume.verifier import Verifier, ignore_bytes
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.storage import Status, Storage, leads_through_a_link
from mindresume.storage.read_cache import WrappedFile

INTACT = "intact"
REPAIRED = "repaired"
DAMAGED = "damaged"
REMOVED = "removed"
SKIPPED = "skipped"
UNREADABLE = "unreadable"
# heartbeats without which the scrub of another machine counts as dead
WATCHED = 3


@dataclass(frozen=True)
class ScrubOptions:
    """Says how to scrub.

    Attributes:
        rate: bytes a second; 0: no limit.
        repairs: damaged files are replaced by intact copies.
        bucket: the object store to which checkpoints were uploaded.
        older_than: seconds; a checkpoint that was saved, or read by a scrub, since then is left
            out. 0: every one is read.
    """

    rate: float = 0.0
    repairs: bool = False
    bucket: RemoteCheckpoints | None = None
    older_than: float = 0.0


@dataclass(frozen=True)
class CheckpointScrub:
    """Holds the result for one checkpoint.

    Attributes:
        state: INTACT, REPAIRED (all damage was), DAMAGED (some is left), UNREADABLE (no damage is
            known, and some files cannot be read), REMOVED (by a job, meanwhile) or SKIPPED.
        reason: why it was skipped; empty otherwise.
        damaged: what is left, by file and tensor; or what cannot be read.
        repaired: what was damaged or missing, and is as it was committed again.
        notes: sentences on defects that do not prevent its use, and on repairs that failed.
        bytes_read: read for it.
        cached_bytes: an estimate of what the kernel answered from its cache, where it tells.
    """

    candidate: Candidate
    state: str
    reason: str = ""
    damaged: tuple[Refusal, ...] = ()
    repaired: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    bytes_read: int = 0
    cached_bytes: int = 0


@dataclass
class Scrubber:
    """Scrubs the checkpoints of one folder, one after the other.

    Args:
        progress: receives the bytes that are read.
    """

    directory: CheckpointDir
    options: ScrubOptions = ScrubOptions()
    progress: Callable[[int], None] = ignore_bytes
    _outwaited: set[str] = field(default_factory=set, init=False)

    def scrub(self, rows: Iterable[CheckpointStatus]) -> Iterator[CheckpointScrub]:
        """Yields a result for each of ``rows`` in the order of the last scrub of each, those
        without one first.

        Raises:
            OSError: a lock or a result cannot be written.
        """
        for row in sorted(rows, key=lambda row: self._read_at(row.candidate)):
            yield self._scrub(row.candidate)

    def due(self, candidate: Candidate) -> str:
        """Returns why the checkpoint is not scrubbed now; empty if it is."""
        if candidate.records_dir is None:
            return "mindformers wrote no checksums"
        if not can_be_scrubbed(candidate):
            return "it is not complete"
        if leads_through_a_link(self.directory.storage, self.directory.root, candidate.records_dir):
            return (
                "its folder of records is, or is in, a symbolic link: what a scrub writes "
                "would go elsewhere"
            )
        if (
            self.options.older_than
            and self._known_at(candidate) > runtime.time() - self.options.older_than
        ):
            return "it was saved, or read by a scrub, recently"
        return ""

    def _known_at(self, candidate: Candidate) -> float:
        """Returns when all of it was known to be right: when a scrub has read it, else when it was
        saved. 0: the last scrub found damage."""
        found, saved = read_result(self.directory.storage, candidate), candidate.saved_at or 0.0
        if found is not None and found.damaged:
            return 0.0
        return max(self._read_at(candidate), saved if saved <= runtime.time() else 0.0)

    def _read_at(self, candidate: Candidate) -> float:
        """Returns when a scrub has read all of it; 0: never, or in the future: the clock was set
        back."""
        found = read_result(self.directory.storage, candidate)
        return found.read_at if found is not None and found.read_at <= runtime.time() else 0.0

    def _scrub(self, candidate: Candidate) -> CheckpointScrub:
        reason = self.due(candidate)
        if reason:
            return CheckpointScrub(candidate, SKIPPED, reason)
        lock = acquire_read_lock(
            self.directory,
            candidate.name,
            candidate.commit_dir,
            purpose=SCRUBBING,
            outwaited=self._outwaited,
        )
        if lock is None:
            return CheckpointScrub(candidate, REMOVED)
        try:
            other = self.other_scrub(lock)
            if other is not None:
                return CheckpointScrub(
                    candidate,
                    SKIPPED,
                    f"process {other.pid} on host {other.host} is scrubbing this folder",
                )
            self._remove_temporary_files(candidate)
            return self._read(candidate, lock)
        finally:
            lock.release()

    def _remove_temporary_files(self, candidate: Candidate) -> None:
        """Removes what repairs left that were killed, files as large as a shard: those without a
        lease."""
        storage = self.directory.storage
        folders = {os.path.dirname(self.directory.path(file.path)) for file in candidate.all_files}
        for folder in sorted({*folders, candidate.records_dir or ""}):
            # on a full or read-only disk the reading goes on
            with suppress(OSError):
                for name, run in half_written(storage.list(folder)):
                    if (
                        not is_job_lease(run)
                        and storage.status(lease_path(self.directory, run)) is None
                    ):
                        storage.remove(os.path.join(folder, name))

    def _read(self, candidate: Candidate, lock: Lease) -> CheckpointScrub:
        storage = ThrottledReads(self.directory.storage, self.options.rate)
        throttled = CheckpointDir(storage, self.directory.root)
        verifier = Verifier(throttled, candidate, self.progress)
        seen = [row for rank in candidate.files for row in verifier.damaged_files(rank)]
        # A second reading tells rot from an error on the way, such as a bad cable or memory: only
        # rot is recorded. What a person replaces after it has another status than before it, and is
        # not refused.
        before = {row.file: self._status(row.file) for row in seen if row.file is not None}
        damage = [
            row
            for rank in dict.fromkeys(row.rank for row in seen)
            for row in self._lasting_damage(verifier, rank, before)
        ]
        again = {row.file for row in damage}
        absent = [
            path
            for path in again
            if path is not None and self.directory.path(path) in storage.absent
        ]
        if absent and self._is_removed(candidate):
            return CheckpointScrub(candidate, REMOVED, bytes_read=storage.read)
        if any(self._status(path) is not None for path in absent):
            # A removal renames the folder of records, sees the lock, and renames it back: nothing
            # is damaged.
            return CheckpointScrub(
                candidate,
                SKIPPED,
                "it was moved or replaced while it was read",
                bytes_read=storage.read,
            )
        notes = [
            f"{row.file} was not as written when it was read first, and is in a second reading: "
            f"{row.reason}"
            for row in seen
            if row.file not in again
        ]
        missing = self._missing(candidate, again)
        repaired: list[Refusal] = []
        repair = Repair(throttled, candidate, lock.run, self.options.bucket)
        for row in (*damage, *missing) if self.options.repairs else ():
            problem = repair.repair(row)
            repaired += [] if problem else [row]
            notes += [problem] if problem else []
        left = [row for row in damage if row not in repaired]
        notes += [row.reason for row in missing if row not in repaired]
        notes += [row.reason for row in damaged_metadata_files(throttled, candidate)]
        if self._is_removed(candidate):  # removed by hand: locks do not prevent that
            return CheckpointScrub(candidate, REMOVED, bytes_read=storage.read)
        found = rotten(left)
        if found or not left:
            publish_result(
                self.directory.storage, candidate, found, before, runtime.time(), lock.run
            )
        state = DAMAGED if found else UNREADABLE if left else REPAIRED if repaired else INTACT
        return CheckpointScrub(
            candidate,
            state,
            "",
            tuple(left),
            tuple(repaired),
            tuple(notes),
            storage.read,
            storage.cached,
        )

    def _lasting_damage(
        self, verifier: Verifier, rank: int, before: dict[str, Status | None]
    ) -> list[Refusal]:
        """Reads the files of a rank again. Returns what is not as written in two of two readings;
        if the second one finds more than the first, in two of three. ``before``: status of the
        files that the first one found; others are added."""
        seen, second = set(before), verifier.damaged_files(rank)
        files = {row.file for row in second if row.file is not None}
        if files <= seen:
            return second
        before.update({path: self._status(path) for path in files - seen})
        third = verifier.damaged_files(rank)
        last = {row.file for row in third}
        return [
            *(row for row in third if row.file in files | seen),
            *(row for row in second if row.file in seen - last),
        ]

    def _is_removed(self, candidate: Candidate) -> bool:
        return self.directory.storage.status(candidate.commit_dir) is None

    def _status(self, path: str) -> Status | None:
        return self.directory.storage.status(self.directory.path(path))

    def _missing(self, candidate: Candidate, damaged: Collection[str | None]) -> list[Refusal]:
        """Returns a refusal for each missing file whose tensors are all in replicas: a resume uses
        those."""
        return [
            candidate.refuse(
                f"{file.path} is missing; other ranks hold every tensor of it", file.path, rank
            )
            for rank, files in candidate.files.items()
            for file in files
            if file.path not in damaged and self._status(file.path) is None
        ]

    def other_scrub(self, own: Lease) -> LeaseHolder | None:
        """Returns who else scrubs this folder; None if nobody does, and then this process is the
        one that does.

        Of two that begin at the same moment the one with the smaller name goes on; one that has
        sent a heartbeat goes on in any case. If both go on nevertheless, bytes are read twice, and
        no more: temporary files have the name of their lease. The lease of a process that is gone
        is removed; on another machine it is watched for some heartbeats.
        """
        found = self._others(own)
        gone = [holder for holder in found if is_alive(holder) is False]
        remote = {holder.run: holder.beat for holder in found if is_alive(holder) is None}
        if remote:
            runtime.sleep(WATCHED * max(holder.every or BEAT for holder in found))
            found = self._others(own)
            gone += [holder for holder in found if remote.get(holder.run) == holder.beat]
        for holder in gone:
            with suppress(OSError):
                self.directory.storage.remove(lease_path(self.directory, holder.run))
        runs = {holder.run for holder in gone}
        for holder in found:
            if holder.run not in runs and (holder.beat > 0 or holder.run < own.run):
                return holder
        own.beat()
        return None

    def _others(self, own: Lease) -> list[LeaseHolder]:
        return [
            holder
            for holder in lease_holders(self.directory)
            if holder.purpose == SCRUBBING and holder.run != own.run
        ]


def rotten(damage: Iterable[Refusal]) -> list[Refusal]:
    """Returns the damage that is recorded. An error of reading is none: it may pass until the next
    scrub or start."""
    return [row for row in damage if not row.is_unreadable]


# ---- reads at a bounded rate ---------------------------------------------------------------------


PIECE = 1 << 20  # bytes of one read, so that the rate is even
BURST = 0.25  # seconds of the rate that may be read at once after a pause
SAMPLES = 16  # pages of a file that are probed in the cache


class ThrottledReads:
    """Adds a limit of the rate to a ``Storage``; other operations than reading are those of
    ``inner``.

    Args:
        rate: bytes a second; 0 or infinite: no limit.
    Attributes:
        absent: paths that did not exist when they were looked for.
    """

    def __init__(self, inner: Storage, rate: float = 0.0):
        self.inner, self.rate = inner, rate if rate > 0 else math.inf
        # bytes that may be read at once; when that was counted
        self._allowed, self._at = self.rate * BURST, runtime.monotonic()
        self.cached = self.read = 0
        self.absent: set[str] = set()

    def admit(self, count: int) -> None:
        """Waits until ``count`` bytes may be read. More than a burst is read at once, and then
        waited for."""
        if self.rate == math.inf:
            return
        now = runtime.monotonic()
        self._allowed = min(self._allowed + (now - self._at) * self.rate, self.rate * BURST) - count
        self._at = now
        if self._allowed < 0:
            runtime.sleep(-self._allowed / self.rate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def status(self, path: str) -> Status | None:
        found = self.inner.status(path)
        if found is None:
            self.absent.add(path)
        return found

    def open(self, path: str) -> BinaryIO:
        try:
            file = self.inner.open(path)
        except FileNotFoundError:
            self.absent.add(path)
            raise
        return _ThrottledFile(self, file)  # type: ignore[return-value]  # has what readers call


class _ThrottledFile(WrappedFile):
    """A file whose reads are limited."""

    def __init__(self, owner: ThrottledReads, file: BinaryIO):
        super().__init__(file)
        self._owner = owner
        self._handle: int | None = None
        with suppress(OSError, AttributeError, ValueError):  # a file in memory has no handle
            self._handle = file.fileno()
        self._drop(0, 0)
        # of what is read: a file can be opened several times
        self._cached = _share_in_cache(self._handle)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[:PIECE]
        self._owner.admit(len(view))
        start = self._file.tell()
        # BinaryIO lacks it
        found: int = self._file.readinto(view) or 0  # type: ignore[attr-defined]
        self._count(found)
        self._drop(start, found)
        return found

    def read(self, count: int = -1) -> bytes:
        if 0 <= count <= PIECE:
            self._owner.admit(count)
            found = self._file.read(count)
            self._count(len(found))
            return found
        pieces = []
        while count:
            piece = self.read(PIECE if count < 0 else min(count, PIECE))
            if not piece:
                break
            pieces.append(piece)
            count -= len(piece) if count > 0 else 0
        return b"".join(pieces)

    def _count(self, count: int) -> None:
        self._owner.read += count
        self._owner.cached += round(count * self._cached)

    def _drop(self, start: int, count: int) -> None:
        if self._handle is not None:
            # a file system without caches, or without posix_fadvise
            with suppress(OSError, AttributeError):
                os.posix_fadvise(self._handle, start, count, os.POSIX_FADV_DONTNEED)


def _share_in_cache(handle: int | None) -> float:
    """Returns an estimate of the share of a file that the kernel still has in its cache, by some of
    its pages; 0 where it does not tell (RWF_NOWAIT)."""
    flag = getattr(os, "RWF_NOWAIT", None)
    if handle is None or flag is None:
        return 0.0
    try:
        size = os.fstat(handle).st_size
        offsets = sorted({size * number // SAMPLES for number in range(SAMPLES)}) if size else []
        there = sum(_is_cached(handle, offset, flag) for offset in offsets)
    except OSError:
        return 0.0
    return there / len(offsets) if offsets else 0.0


def _is_cached(handle: int, offset: int, flag: int) -> bool:
    try:
        return bool(os.preadv(handle, [bytearray(1)], offset, flag))
    except BlockingIOError:
        return False
