"""Keeps files in memory that were read whole, so that a checkpoint is read once from a shared disk: to be verified and to be
loaded.

    storage = ReadCache(PosixStorage(), budget)
    file_checksum(storage.open(path))       # reads the disk
    read_tensor(storage.open(path), entry)  # reads memory: the very bytes of which the checksum is
    storage.enough()                        # nothing else is kept
    storage.clear()

A file is kept if one handle read it from the first byte to the last, and the budget and the number of open files allow it. It
lies in an anonymous file of the kernel (``memfd_create``), so that everything that reads files reads it too, and its memory
counts as that of the process.
"""
from __future__ import annotations

import os
import resource
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, BinaryIO

from mindresume.storage.interface import Storage


class ReadCache:
    """A ``Storage``: ``open`` as described above, everything else is that of ``inner``. ``budget`` in bytes. ``most``: number of
    files, each of which takes a handle of the process. Threads may share it."""

    def __init__(self, inner: Storage, budget: int, most: int | None = None):
        self.inner, self.budget = inner, budget
        self.most = _a_quarter() if most is None else most
        self._handles = 0
        self._lock = threading.Lock()
        self._taken = 0                             # bytes, of files that are being read too
        self._kept: dict[str, tuple[int, int]] = {}             # path: (handle, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def size(self) -> int:
        """Returns the bytes of the files that are kept."""
        with self._lock:
            return sum(size for _, size in self._kept.values())

    def open(self, path: str) -> BinaryIO:
        with self._lock:
            if path in self._kept:
                return open(f"/proc/self/fd/{self._kept[path][0]}", "rb")       # noqa: SIM115  at a position of its own
        file = self.inner.open(path)
        return _Recorded(self, path, file)          # type: ignore[return-value]

    def enough(self) -> None:
        """Keeps what there is, and adds nothing: a caller that loads a file reads it for the last time."""
        with self._lock:
            self.budget = 0

    def clear(self) -> None:
        """Gives the memory back; no kept file is read any more. The files are truncated before they are closed: a process that
        was forked meanwhile, such as a worker of a data set, has them open too, and would keep the memory."""
        with self._lock:
            kept, self._kept = self._kept, {}
            self._taken -= sum(size for _, size in kept.values())
            self._handles -= len(kept)
        for handle, _ in kept.values():
            with suppress(OSError):
                os.ftruncate(handle, 0)
            os.close(handle)

    def take(self, size: int) -> int | None:
        """Returns the handle of an anonymous file for ``size`` bytes; None if that is too much or one too many, or it cannot be
        made."""
        with self._lock:
            if not 0 < size <= self.budget - self._taken or self._handles >= self.most:
                return None
            self._taken += size
            self._handles += 1
        try:
            return os.memfd_create("mindresume-kept", os.MFD_CLOEXEC)
        except (OSError, AttributeError):           # another kernel
            self.give_back(None, size)
            return None

    def give_back(self, handle: int | None, size: int) -> None:
        with self._lock:
            self._taken -= size
            self._handles -= 1
        if handle is not None:
            os.close(handle)

    def keep(self, path: str, handle: int, size: int) -> None:
        with self._lock:
            if path not in self._kept:
                self._kept[path] = handle, size
                return
        self.give_back(handle, size)                # another thread was faster


def _a_quarter() -> int:
    """Returns a quarter of the number of files that this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit // 4


def uncached(storage: Storage) -> Storage:
    """Returns the storage without its cache: for everything that may be another file the next time it is read."""
    return storage.inner if isinstance(storage, ReadCache) else storage


class _Recorded:
    """A file of which everything that is read is copied to memory, as long as nothing is left out before it."""

    def __init__(self, files: ReadCache, path: str, file: BinaryIO):
        self._files, self._path, self._file = files, path, file
        self._size, self._filled = os.fstat(file.fileno()).st_size, 0
        self._copy: int | None = None
        self._wanted = True
        self.name = path

    def read(self, count: int = -1) -> bytes:
        start = self._file.tell()
        data = self._file.read(count)
        self._note(start, data)
        return data

    def readinto(self, buffer: bytearray | memoryview) -> int:
        start = self._file.tell()
        count = self._file.readinto(buffer)         # type: ignore[attr-defined]
        self._note(start, memoryview(buffer).cast("B")[:count])
        return count

    def _note(self, start: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if not self._wanted or not len(view) or start > self._filled:
            return
        if self._copy is None:
            self._copy = self._files.take(self._size)
            if self._copy is None:
                self._wanted = False
                return
        try:
            while len(view):
                done = os.pwrite(self._copy, view, start)
                start, view = start + done, view[done:]
        except OSError:                             # no memory: then it is read again
            self._drop()
            return
        self._filled = max(self._filled, start)

    def _drop(self) -> None:
        copy, self._copy, self._wanted = self._copy, None, False
        if copy is not None:
            self._files.give_back(copy, self._size)

    def __getattr__(self, name: str) -> Any:
        """Returns other ways to read. They are not copied; such a file is not kept."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._file, name)

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(position, whence)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        """Returns the handle. Reads through it are not seen, so such a file is not kept."""
        return self._file.fileno()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        if self._file.closed:
            return
        self._file.close()
        if self._copy is not None and self._filled == self._size:
            copy, self._copy = self._copy, None
            self._files.keep(self._path, copy, self._size)
        else:
            self._drop()

    def __enter__(self) -> _Recorded:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()
