"""Reads a storage at a bounded rate, from the device where the kernel allows it.

    storage = ThrottledReads(PosixStorage(), 50e6)
    Verifier(storage, root, candidate).verify(rank)     # any code that reads: 50 MB/s
    storage.cached  # bytes of ``read`` that the cache of the kernel may have answered

Before a file is read the kernel is asked to drop it from its cache (posix_fadvise), and each piece
again after it was read: the bytes come from the device, and the cache stays with the training. What
a cache behind the kernel answers (of an NFS server, of a RAID controller or the device) cannot be
known, and pages that a process has mapped or locked stay.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import Any, BinaryIO

from mindresume import runtime
from mindresume.storage.interface import Status, Storage
from mindresume.storage.read_cache import WrappedFile

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
