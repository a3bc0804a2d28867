"""Bytes of tensors from many files at once: a region of a tensor into memory, by any thread.

    files = OpenFiles(storage)
    gather(weights, files, "embedding.weight", region, out, staging)        # out: array of the region's shape

Only what is asked for is read. Ranges that are contiguous in a file come in one call; strided ones run by run.
"""
from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np

from mindresume.errors import DamagedFileError
from mindresume.files import TensorEntry
from mindresume.files.model import DTYPES
from mindresume.reshard.geometry import Region, elements, offset, runs, shape_of, view, within
from mindresume.reshard.weights import Place, Weights
from mindresume.store.storage import Storage

MOST_OPEN = 256             # files at once: a checkpoint may have thousands, a process may often open 1,024
SHORT_RUN = 256             # bytes: runs so short cost more as calls than the bytes in between that are read in vain, ...
MOST_SPAN = 4               # ... unless these are more than so many times the bytes that are needed

Seen = Callable[[str, Place, int, memoryview], None]


class OpenFiles:
    """Files kept open while they are in use, for reading at positions. ``bytes_read`` counts all there was."""

    def __init__(self, storage: Storage, most: int = MOST_OPEN):
        self.storage, self.most, self.bytes_read = storage, most, 0
        self._open: OrderedDict[str, list] = OrderedDict()          # path: [file, number of users]
        self._lock = threading.Lock()

    def read(self, path: str, position: int, out: memoryview) -> None:
        """Fills ``out``. DamagedFileError if the file ends before."""
        with self._lease(path) as file:
            handle, count = file.fileno(), len(out)
            while out:
                found = os.preadv(handle, [out], position)
                if not found:
                    raise DamagedFileError(path, f"the file ends at byte {position}, needed are {len(out)} bytes from there: cut "
                                                 f"short since its header was read")
                position, out = position + found, out[found:]
        with self._lock:
            self.bytes_read += count

    @contextmanager
    def _lease(self, path: str) -> Iterator[BinaryIO]:
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                self._close_idle()
                entry = self._open[path] = [self.storage.open(path), 0]
            entry[1] += 1
            self._open.move_to_end(path)
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def _close_idle(self) -> None:
        for path in list(self._open):
            if len(self._open) < self.most:
                return
            if not self._open[path][1]:
                self._open.pop(path)[0].close()

    def close(self) -> None:
        with self._lock:
            for file, _ in self._open.values():
                file.close()
            self._open.clear()


def plain(dtype: str) -> np.dtype:
    """An integer type of the same width: what is copied is bits, whatever they mean."""
    return np.dtype(f"u{DTYPES[dtype].itemsize}")


def gather(weights: Weights, files: OpenFiles, name: str, region: Region, out: np.ndarray, staging: np.ndarray,
           seen: Seen | None = None) -> None:
    """Reads ``region`` of a tensor into ``out``, of its shape and of ``plain`` dtype. ``staging``: bytes, at least as many as
    ``out`` has. ``seen(tensor, place, first byte of the piece, bytes)`` is shown what was read of a piece if that is one
    contiguous range of it, in memory that stays as it is until the next ``gather`` with the same ``out`` and ``staging``."""
    used = 0
    for cut in weights.tensors[name].cuts(region):
        place = weights.place(name, cut)
        part = view(out, within(cut.part, region))
        local, shape = within(cut.part, cut.piece), shape_of(cut.piece)
        direct = part.flags.c_contiguous
        count = elements(cut.part) * out.itemsize
        flat = part.reshape(-1).view(np.uint8) if direct else staging[used:used + count]
        used += 0 if direct else count
        length, starts = runs(local, shape)
        length *= out.itemsize
        if length == count:
            start = next(starts) * out.itemsize
            read_range(files, place.path, place.entry, start, memoryview(flat))
            if seen:
                seen(name, place, start, memoryview(flat))
        elif length < SHORT_RUN and _span(local, shape) * out.itemsize <= MOST_SPAN * count:
            flat[:] = _spanned(files, place, local, shape, out.dtype)
        else:
            done = memoryview(flat)
            for start in starts:
                read_range(files, place.path, place.entry, start * out.itemsize, done[:length])
                done = done[length:]
        if not direct:
            part[...] = flat.view(out.dtype).reshape(part.shape)


def _span(local: Region, shape: tuple[int, ...]) -> int:
    """Elements from the first to the last one of a region."""
    return offset(tuple((stop - 1, stop) for _, stop in local), shape) + 1 - offset(local, shape)


def _spanned(files: OpenFiles, place: Place, local: Region, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A region of short runs, cut out of the whole range from its first to its last element."""
    raw = np.empty(_span(local, shape) * dtype.itemsize, np.uint8)
    read_range(files, place.path, place.entry, offset(local, shape) * dtype.itemsize, memoryview(raw))
    strides = np.cumprod([dtype.itemsize, *reversed(shape[1:])])[::-1]
    found = np.lib.stride_tricks.as_strided(raw.view(dtype), shape_of(local), tuple(strides), writeable=False)
    return np.ascontiguousarray(found).reshape(-1).view(np.uint8)


def read_range(files: OpenFiles, path: str, entry: TensorEntry, start: int, out: memoryview) -> None:
    """Bytes of a tensor from its byte ``start`` on, wherever they lie in the file."""
    for position, count in entry.ranges:
        part = min(count - start, len(out))
        if part > 0:
            files.read(path, position + start, out[:part])
            start, out = start + part, out[part:]
        if not out:
            return
        start -= count
    raise DamagedFileError(path, f"{len(out)} bytes beyond the end of a tensor were asked for")
