"""Reads a storage at a bounded rate, from the device where the kernel allows it, and stops at any moment.

    storage = ThrottledReads(PosixStorage(), TokenBucket(50e6), stopped=stop.is_set)
    Verifier(storage, root, candidate).verify(rank)     # any code that reads: 50 MB/s, and ReadStoppedError once ``stop`` is set
    storage.cached                                      # bytes of ``read`` that the cache of the kernel may have answered

Before a file is read the kernel is asked to drop it from its cache (posix_fadvise), and each piece again after it was read: the
bytes come from the device, and the cache stays with the training. What a cache behind the kernel answers (of an NFS server, of a
RAID controller or the device) cannot be known, and pages that a process has mapped or locked stay.
"""
from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from mindresume import runtime
from mindresume.storage.interface import Status, Storage
from mindresume.storage.read_cache import WrappedFile

PIECE = 1 << 20                 # bytes of one read, so that the rate is even and a stop takes effect soon
BURST = 0.25                    # seconds of the rate that an idle bucket collects
SAMPLES = 16                    # pages of a file that are probed in the cache


class ReadStoppedError(Exception):
    """The reading was stopped. No OSError, which would be taken for damage of the file."""


class TokenBucket:
    """Limits a rate: ``take`` waits until its bytes may be read.

    Args:
        rate: bytes a second; 0 or infinite: no limit.
        clock: seconds, monotonic.
        wait: waits so many seconds; it may return earlier, if the reading is stopped.
    """

    def __init__(self, rate: float = 0.0, clock: Callable[[], float] = runtime.monotonic,
                 wait: Callable[[float], object] = runtime.sleep):
        self.rate, self._clock, self._wait = rate if rate > 0 else math.inf, clock, wait
        self._tokens, self._at = self.rate * BURST, clock()

    def take(self, count: int) -> None:
        """Takes ``count`` tokens. More than a burst is taken at once, and then waited for."""
        if self.rate == math.inf:
            return
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._at) * self.rate, self.rate * BURST) - count
        self._at = now
        if self._tokens < 0:
            self._wait(-self._tokens / self.rate)


class ThrottledReads:
    """Adds a limit of the rate to a ``Storage``; other operations than reading are those of ``inner``.

    Args:
        stopped: returns whether the reading is to end; then a read raises ReadStoppedError.
    Attributes:
        absent: paths that did not exist when they were looked for.
    """

    def __init__(self, inner: Storage, bucket: TokenBucket | None = None, stopped: Callable[[], bool] = bool):
        self.inner, self.bucket, self.stopped = inner, bucket or TokenBucket(), stopped
        self.cached = self.read = 0
        self.absent: set[str] = set()

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
        return _ThrottledFile(self, file)               # type: ignore[return-value]  # has what readers call


class _ThrottledFile(WrappedFile):
    """A file whose reads are limited."""

    def __init__(self, owner: ThrottledReads, file: BinaryIO):
        super().__init__(file)
        self._owner = owner
        self._handle: int | None = None
        with suppress(OSError, AttributeError, ValueError):     # a file in memory has no handle
            self._handle = file.fileno()
        self._drop(0, 0)
        self._cached = _share_in_cache(self._handle)        # of what is read: a file can be opened several times

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[:PIECE]
        self._admit(len(view))
        start = self._file.tell()
        found: int = self._file.readinto(view) or 0             # type: ignore[attr-defined]  # BinaryIO lacks it
        self._count(found)
        self._drop(start, found)
        return found

    def read(self, count: int = -1) -> bytes:
        if 0 <= count <= PIECE:
            self._admit(count)
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

    def _admit(self, count: int) -> None:
        if not self._owner.stopped():
            self._owner.bucket.take(count)
        if self._owner.stopped():
            raise ReadStoppedError

    def _drop(self, start: int, count: int) -> None:
        if self._handle is not None:
            with suppress(OSError, AttributeError):             # a file system without caches, or without posix_fadvise
                os.posix_fadvise(self._handle, start, count, os.POSIX_FADV_DONTNEED)


def _share_in_cache(handle: int | None) -> float:
    """Returns an estimate of the share of a file that the kernel still has in its cache, by some of its pages; 0 where it does
    not tell (RWF_NOWAIT)."""
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
