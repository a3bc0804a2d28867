"""Keeps files that were read completely in memory, so that verifying and loading a checkpoint read
the shared disk only once.

    storage = ReadCache(PosixStorage(), budget)
    file_checksum(storage.open(path))       # reads the disk
    read_tensor(storage.open(path), entry)  # reads memory: the same bytes that were checksummed
    storage.freeze()                        # from now on nothing is added
    storage.clear()

A file is kept if one handle read it from the first byte to the last, and the byte budget and the
limit of open files allow it. It lies in an anonymous file of the kernel (``memfd_create``): any
code that reads files can read it, and its memory counts as memory of this process.

A caller that has read the parts of a file into arrays can keep these instead (``keep_parts``); a
load takes each of them once (``take_part``), without a copy.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from mindresume import runtime
from mindresume.storage import Storage


class ReadCache:
    """Adds a cache of whole files to a ``Storage``; every operation except ``open`` is that of
    ``inner``. Threads may share it.

    Args:
        inner: the storage to read from.
        budget: bytes that may be kept.
    Attributes:
        max_files: files that may be kept: each needs an open handle, of which this process may have
            four times as many.
    """

    def __init__(self, inner: Storage, budget: int):
        self.inner, self.budget = inner, budget
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.max_files = sys.maxsize if limit == resource.RLIM_INFINITY else limit // 4
        self._handles = 0
        self._lock = runtime.Lock()
        # bytes, including files that are still being read
        self._reserved = 0
        self._kept: dict[str, tuple[int, int]] = {}  # path: (handle, size)
        self._parts: dict[str, dict[Hashable, Any]] = {}  # by path
        self._size_of_parts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def size(self) -> int:
        """Returns the number of bytes in kept files."""
        with self._lock:
            return sum(size for _, size in self._kept.values())

    def keeps(self, path: str) -> bool:
        """Returns whether the file or its parts are kept, so that reading it costs no access to the
        disk."""
        with self._lock:
            return path in self._kept or path in self._parts

    @property
    def left(self) -> int:
        """Returns the number of bytes that can still be kept."""
        with self._lock:
            return self.budget - self._reserved

    def keep_parts(self, path: str, parts: Mapping[Hashable, Any], size: int) -> None:
        """Keeps what was read of a file. ``size``: of all parts, in bytes; the caller has compared
        it with ``left``."""
        with self._lock:
            self._reserved += size
            self._size_of_parts += size
            self._parts.setdefault(path, {}).update(parts)

    def take_part(self, path: str, key: Hashable) -> Any | None:
        """Returns a kept part and forgets it: the caller may change it. None if it is not kept (any
        more)."""
        with self._lock:
            return self._parts.get(path, {}).pop(key, None)

    def open(self, path: str) -> BinaryIO:
        with self._lock:
            if path in self._kept:
                # at a position of its own
                return open(f"/proc/self/fd/{self._kept[path][0]}", "rb")  # noqa: SIM115
        file = self.inner.open(path)
        # has what readers call
        return _RecordingFile(self, path, file)  # type: ignore[return-value]

    def freeze(self) -> None:
        """Adds no more files and keeps those it has. A caller that loads files reads each for the
        last time."""
        with self._lock:
            self.budget = 0

    def clear(self) -> None:
        """Releases the memory and drops all kept files and parts. Truncates files before closing
        them: a process that was forked meanwhile, such as a data set worker, has them open too and
        would keep the memory."""
        with self._lock:
            kept, self._kept = self._kept, {}
            self._parts.clear()
            self._reserved -= sum(size for _, size in kept.values()) + self._size_of_parts
            self._size_of_parts = 0
            self._handles -= len(kept)
        for handle, _ in kept.values():
            with suppress(OSError):
                os.ftruncate(handle, 0)
            os.close(handle)

    def reserve(self, size: int) -> int | None:
        """Reserves ``size`` bytes and returns the handle of an anonymous file for them. Returns
        None if the budget or the limit of files does not allow it, or the kernel cannot create the
        file."""
        with self._lock:
            if not 0 < size <= self.budget - self._reserved or self._handles >= self.max_files:
                return None
            self._reserved += size
            self._handles += 1
        try:
            return os.memfd_create("mindresume-kept", os.MFD_CLOEXEC)
        except (OSError, AttributeError):  # no memfd_create here
            self.release(None, size)
            return None

    def release(self, handle: int | None, size: int) -> None:
        """Releases a reservation and closes its handle."""
        with self._lock:
            self._reserved -= size
            self._handles -= 1
        if handle is not None:
            os.close(handle)

    def add(self, path: str, handle: int, size: int) -> None:
        """Keeps a file that was read completely; releases it if another thread kept the same file
        first."""
        with self._lock:
            if path not in self._kept:
                self._kept[path] = handle, size
                return
        self.release(handle, size)


def uncached(storage: Storage) -> Storage:
    """Returns the storage without its cache, for files that may have changed by the next read."""
    return storage.inner if isinstance(storage, ReadCache) else storage


class WrappedFile:
    """Passes everything on to a file, except what a subclass has itself."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._file, name)

    def __enter__(self) -> WrappedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _RecordingFile(WrappedFile):
    """Reads a file and copies its bytes into the cache, as long as they are read without a gap from
    the start. What other methods than ``read`` and ``readinto`` read, also through the file handle,
    is not copied, so the file is not kept."""

    def __init__(self, files: ReadCache, path: str, file: BinaryIO):
        super().__init__(file)
        self._files, self._path = files, path
        self._size, self._recorded = os.fstat(file.fileno()).st_size, 0
        self._copy: int | None = None
        self._recording = True
        self.name = path

    def read(self, count: int = -1) -> bytes:
        start = self._file.tell()
        data = self._file.read(count)
        self._record(start, data)
        return data

    def readinto(self, buffer: bytearray | memoryview) -> int:
        start = self._file.tell()
        count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]  # BinaryIO lacks it
        self._record(start, memoryview(buffer).cast("B")[:count])
        return count

    def _record(self, start: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if not self._recording or not len(view) or start > self._recorded:
            return
        if self._copy is None:
            self._copy = self._files.reserve(self._size)
            if self._copy is None:
                self._recording = False
                return
        try:
            while len(view):
                done = os.pwrite(self._copy, view, start)
                start, view = start + done, view[done:]
        except OSError:
            # no memory: the file will be read from disk again
            self._discard()
            return
        self._recorded = max(self._recorded, start)

    def _discard(self) -> None:
        copy = self._copy
        self._copy = None
        self._recording = False
        if copy is not None:
            self._files.release(copy, self._size)

    def close(self) -> None:
        if self._file.closed:
            return
        self._file.close()
        if self._copy is not None and self._recorded == self._size:
            copy, self._copy = self._copy, None
            self._files.add(self._path, copy, self._size)
        else:
            self._discard()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()
