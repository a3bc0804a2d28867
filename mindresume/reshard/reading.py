"""Bytes of tensors from many files at once: a region of a tensor into memory, by any thread.

    files = OpenFiles(storage)
    gather(weights, files, "embedding.weight", region, out, staging)        # out: array of the region's shape

Only what is asked for is read. Ranges that are contiguous in a file come in one call; strided ones run by run.
"""
from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import BinaryIO, NamedTuple

import numpy as np

from mindresume.errors import DamagedFileError, LoadError
from mindresume.files import TensorEntry
from mindresume.files.model import DTYPES
from mindresume.reshard.geometry import Region, elements, offset, runs, shape_of, view, within
from mindresume.reshard.weights import Place, Weights
from mindresume.store.storage import Storage

MOST_OPEN = 256             # files at once: a checkpoint may have thousands, a process may often open 1,024
SHORT_RUN = 256             # bytes: runs so short cost more as calls than the bytes in between that are read in vain, ...
MOST_SPAN = 4               # ... unless these are more than so many times the bytes that are needed
SHORT_ROW = 64 << 10        # bytes: the same within matrices that are taken apart, where short runs come by the thousand
WOVEN = 2 * MOST_SPAN + 3   # most memory for a part of these, as a multiple of it: with what is read in vain, then without, in
                            # twice the bytes an element, and then converted
_CASTS = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")}

Seen = Callable[[str, Place, int, memoryview], None]


class Woven(NamedTuple):
    """Like a ``Cut``, of weights whose tensors are put together from others: a part of a wanted region that lies in one piece of
    the tensor ``source``, of ``dtype``. Of that ``piece``, counted from its first element, it is ``local`` (indices of each
    dimension; only those of the first may have gaps), with the two dimensions exchanged if ``transposed``; of the region it is
    ``target``. Its values are converted (``cast``) if the wanted tensor has another dtype."""
    piece: Region
    holders: Sequence[int]
    source: str
    dtype: str
    local: tuple[range, ...]
    target: tuple[slice, ...]
    transposed: bool = False


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
    contiguous range of it, in memory that stays as it is until the next ``gather`` with the same ``out`` and ``staging``; nothing
    is shown of ``Woven`` parts."""
    used = 0
    for cut in weights.tensors[name].cuts(region):
        place = weights.place(name, cut)
        if isinstance(cut, Woven):
            _weave(files, place, cut, out, weights.tensors[name].dtype)
            continue
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


def _spanned(files: OpenFiles, place: Place, local: Region, shape: tuple[int, ...], dtype: np.dtype, step: int = 1
             ) -> np.ndarray:
    """A region of short runs, of its rows every ``step``-th, cut out of the whole range from its first to its last element."""
    raw = np.empty(_span(local, shape) * dtype.itemsize, np.uint8)
    read_range(files, place.path, place.entry, offset(local, shape) * dtype.itemsize, memoryview(raw))
    rows, *others = np.cumprod([dtype.itemsize, *reversed(shape[1:])])[::-1]
    count, *sizes = shape_of(local)
    found = np.lib.stride_tricks.as_strided(raw.view(dtype), (-(-count // step), *sizes), (rows * step, *others),
                                            writeable=False)
    return np.ascontiguousarray(found).reshape(-1).view(np.uint8)


def _weave(files: OpenFiles, place: Place, cut: Woven, out: np.ndarray, dtype: str) -> None:
    """Fills ``cut.target`` of ``out``, which has the bits of ``dtype``. Takes ``WOVEN`` times the memory of ``out`` at most."""
    stored, shape = plain(cut.dtype), shape_of(cut.piece)
    sizes = tuple(map(len, cut.local))
    step = cut.local[0].step
    local = tuple((indices[0], indices[-1] + 1) for indices in cut.local)
    count = int(np.prod(sizes)) * stored.itemsize
    if step == 1:
        length, starts = runs(local, shape)
    else:
        rows = [runs(((i, i + 1), *local[1:]), shape) for i in cut.local[0]]
        length, starts = rows[0][0], chain.from_iterable(row[1] for row in rows)
    length *= stored.itemsize
    if length < min(SHORT_ROW, count) and _span(local, shape) * stored.itemsize <= MOST_SPAN * count:
        flat = _spanned(files, place, local, shape, stored, step)
    else:
        flat = np.empty(count, np.uint8)
        done = memoryview(flat)
        for start in starts:
            read_range(files, place.path, place.entry, start * stored.itemsize, done[:length])
            done = done[length:]
    found = flat.view(stored).reshape(sizes)
    if cut.dtype != dtype:
        found = cast(found.view(DTYPES[cut.dtype]), dtype).view(plain(dtype))
    out[cut.target] = found.T if cut.transposed else found


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Values in another dtype: bfloat16 and float16 to float32, which is exact, and float32 to bfloat16, to the nearest, ties to
    even. The same array if it has that dtype. LoadError for anything else."""
    if array.dtype.name == dtype:
        return array
    if not castable(array.dtype.name, dtype):
        raise LoadError(f"{array.dtype.name} is not converted to {dtype}; what can be is "
                        + ", ".join(f"{a} to {b}" for a, b in sorted(_CASTS)))
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(DTYPES[dtype])


def castable(stored: str, wanted: str) -> bool:
    """Whether ``cast`` does it."""
    return stored == wanted or (stored, wanted) in _CASTS


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
