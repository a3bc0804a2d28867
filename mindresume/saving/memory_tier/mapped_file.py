"""A file of the tier in memory, mapped for as long as the training runs.

Writing through the mapping is a plain copy in memory; ``pwrite`` into the same pages takes about three times as long. A page that
does not exist yet takes ten times as long, so a file is used again for later saves.
"""
from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np

from mindresume import runtime


class MappedFile:
    """A new file of ``size`` bytes, all of whose pages exist.

    All memory is reserved before it is mapped: a write to a page that a full tmpfs cannot provide would kill the process
    (SIGBUS) instead of raising an error. ``path``: where it lies now; a rename does not concern the mapping.
    Raises OSError (ENOSPC: the tmpfs is full) and leaves nothing then.
    """

    def __init__(self, path: str, size: int):
        self.path, self.size = path, 0
        self._mapped, self._memory = 0, np.empty(0, np.uint8)
        self._handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            self.resize(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)      # maps room for a longer header
            self.resize(size)
        except BaseException:
            self.close()
            with suppress(OSError):
                os.remove(path)
            raise

    def resize(self, size: int) -> None:
        """Sets the size of the file: headers of successive saves differ by a few bytes. Raises OSError; the size is then as
        before."""
        if size > self.size:
            os.posix_fallocate(self._handle, self.size, size - self.size)
        elif size < self.size:
            os.ftruncate(self._handle, size)
        self.size = size
        if size > self._mapped:
            self._map(size)

    @property
    def data(self) -> np.ndarray:
        """Returns the bytes of the file, as the memory that they lie in."""
        return self._memory[:self.size]

    def close(self) -> None:
        """Releases the mapping, once no array uses it any more. The file stays."""
        self._memory, self._mapped = np.empty(0, np.uint8), 0
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)

    def _map(self, size: int) -> None:
        memory = mmap.mmap(self._handle, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        with suppress(OSError, AttributeError):         # a forked worker of the data set needs no page tables for it
            memory.madvise(mmap.MADV_DONTFORK)
        self._memory, self._mapped = np.frombuffer(memory, np.uint8), size


@runtime.asks_machine
def mapped_file(path: str, size: int) -> MappedFile:
    """Returns a new file. Raises OSError."""
    return MappedFile(path, size)
