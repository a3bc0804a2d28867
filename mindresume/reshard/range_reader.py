"""Reads regions of tensors from many files into memory, from any thread.

    files = OpenFiles(storage)
    # out: array of the region's shape
    gather(weights, files, "embedding.weight", region, out, staging)

Only the requested bytes are read: a contiguous range of a file with one call, a strided one run by
run.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128

from mindresume import runtime
from mindresume.errors import CorruptFileError, LoadError
from mindresume.model.layout import Region, elements, offset, runs, shape_of, within
from mindresume.reshard.checkpoint_view import CheckpointView, SliceLocation
from mindresume.storage import Storage
from mindresume.tensor_files import TensorEntry, read_into
from mindresume.tensor_files.header import DTYPES

# bytes: what was read is still in the cache when it is hashed and written
TILE = 4 << 20
# files at once: a checkpoint may have thousands, the limit of a process is often 1,024
MAX_OPEN = 256
# bytes: for shorter runs, reading the gaps between them too is cheaper than a call for each, ...
SHORT_RUN = 256
# ... while runs and gaps together are at most so many times the bytes of the runs
MOST_SPAN = 4
# bytes: as SHORT_RUN, within matrices of composed tensors, which have thousands of short runs
SHORT_ROW = 64 << 10
# Memory for a composed part, as a multiple of its size: with the gaps, then without, at twice the
# bytes an element, converted.
COMPOSED_MEMORY = 2 * MOST_SPAN + 3
_CASTS = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")}

# tensor, location, first byte in the slice, bytes
ReadRange = tuple[str, SliceLocation, int, memoryview]


class ComposedCut(NamedTuple):
    """Describes, like ``Cut``, a part of a wanted region, for tensors that are composed of others.
    The part lies in one slice of the tensor ``source``. Values are converted (``cast``) if the
    wanted tensor has another dtype.

    Args:
        dtype: dtype of ``source``.
        local: indices of the part by dimension, from the first element of the slice; only the first
            dimension may have gaps.
        target: slices of the part in the wanted region.
        transposed: the two dimensions are exchanged.
        scale: the part of the scales that belongs to an fp8 part; ``block``: rows and columns of
            one scale.
    """

    stored: Region
    holders: Sequence[int]
    source: str
    dtype: str
    local: tuple[range, ...]
    target: tuple[slice, ...]
    transposed: bool = False
    scale: ComposedCut | None = None
    block: tuple[int, int] = (1, 1)


@dataclass
class Traffic:
    """Counts bytes of tensors: read from the sources, compared with a recorded checksum, and
    written. Any thread calls ``progress`` with the bytes written since the last call."""

    read: int = 0
    verified: int = 0
    written: int = 0
    progress: Callable[[int], None] = lambda count: None


class OpenFiles:
    """Keeps files open for positioned reads, at most ``MAX_OPEN`` at once besides those in use;
    compares what is read with recorded checksums, and counts both in ``traffic``."""

    def __init__(self, storage: Storage, traffic: Traffic | None = None):
        self.storage, self.traffic = storage, traffic or Traffic()
        self._open: OrderedDict[str, list] = OrderedDict()  # path: [file, number of users]
        # (tensor, rank): (hash of the bytes that have passed, their number)
        self._passed: dict[tuple[str, int], tuple[Any, int]] = {}
        self._lock = runtime.Lock()

    def read(self, path: str, position: int, out: memoryview) -> None:
        """Fills ``out`` from byte ``position`` on. CorruptFileError if the file ends before."""
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                for idle in [other for other, (_, users) in self._open.items() if not users]:
                    if len(self._open) < MAX_OPEN:
                        break
                    self._open.pop(idle)[0].close()
                entry = self._open[path] = [self.storage.open(path), 0]
            entry[1] += 1
            self._open.move_to_end(path)
        try:
            read_into(entry[0].fileno(), position, out, path)
        finally:
            with self._lock:
                entry[1] -= 1
                self.traffic.read += len(out)

    def count(self, read: int = 0, verified: int = 0) -> None:
        """Counts bytes of these files that were read elsewhere, or compared."""
        with self._lock:
            self.traffic.read += read
            self.traffic.verified += verified

    def compare(self, name: str, place: SliceLocation, start: int, data: memoryview) -> None:
        """Hashes what was read of a slice. Raises CorruptFileError if all of it has passed in
        order, and differs from its recorded checksum; ignores other slices. The bytes of one slice
        pass in one thread at a time."""
        if place.checksum is None:
            return
        key = name, place.rank
        found, passed = self._passed.get(key) or (xxh3_128(), 0)
        if start != passed:
            return
        found.update(data)
        passed += len(data)
        self._passed[key] = found, passed
        if passed == place.entry.nbytes:
            del self._passed[key]
            if found.hexdigest() != place.checksum:
                raise CorruptFileError(
                    place.path,
                    f"{name} of rank {place.rank} is not what was written: checksum "
                    f"{found.hexdigest()}, recorded {place.checksum}",
                    tensor=name,
                )
            self.count(verified=passed)

    def close(self) -> None:
        with self._lock:
            for file, _ in self._open.values():
                file.close()
            self._open.clear()


def bits_dtype(dtype: str) -> np.dtype:
    """Returns the unsigned integer type of the same width: bits are copied, whatever they mean."""
    return np.dtype(f"u{DTYPES[dtype].itemsize}")


def view(array: np.ndarray, region: Region) -> np.ndarray:
    """Returns a region of an array as a view; for a 0-d array the whole."""
    return array[(*(slice(start, stop) for start, stop in region), ...)]


def gather(
    weights: CheckpointView,
    files: OpenFiles,
    name: str,
    region: Region,
    out: np.ndarray,
    staging: np.ndarray,
) -> list[ReadRange]:
    """Reads ``region`` of a tensor into ``out``. Returns each contiguous range of a slice that was
    read, not for ``ComposedCut``: their bytes are valid until the next ``gather`` with the same
    ``out`` and ``staging``.

    Args:
        out: array of the shape of the region and of its ``bits_dtype``.
        staging: a buffer of at least as many bytes as ``out``.
    """
    used, ranges = 0, []
    for cut in weights.tensors[name].cuts(region):
        place = weights.locate(name, cut)
        if isinstance(cut, ComposedCut):
            scales = None
            if cut.scale is not None:
                scales = np.empty(tuple(map(len, cut.scale.local)), np.uint32)
                _gather_composed(
                    files, weights.locate(name, cut.scale), cut.scale, scales, "float32"
                )
            _gather_composed(files, place, cut, out, weights.tensors[name].dtype, scales)
            continue
        part = view(out, within(cut.part, region))
        local, shape = within(cut.part, cut.stored), shape_of(cut.stored)
        direct = part.flags.c_contiguous
        count = elements(cut.part) * out.itemsize
        flat = part.reshape(-1).view(np.uint8) if direct else staging[used : used + count]
        used += 0 if direct else count
        if runs(local, shape)[0] == elements(cut.part):
            start = offset(local, shape) * out.itemsize
            read_range(files, place.path, place.entry, start, memoryview(flat))
            ranges.append((name, place, start, memoryview(flat)))
        else:
            _read_runs(files, place, [local], shape, flat, out.itemsize, SHORT_RUN)
        if not direct:
            part[...] = flat.view(out.dtype).reshape(part.shape)
    return ranges


def _read_runs(
    files: OpenFiles,
    place: SliceLocation,
    rows: Sequence[Region],
    shape: tuple[int, ...],
    out: np.ndarray,
    itemsize: int,
    short: int,
) -> None:
    """Fills ``out`` with the bytes of a region of a slice, in its order.

    Args:
        rows: the region, or its rows, at equal distances.
        shape: of the slice, whose elements have ``itemsize`` bytes.
        short: bytes of a run below which the gaps are read, too.
    """
    found = [runs(row, shape) for row in rows]
    length = found[0][0] * itemsize
    last = tuple((stop - 1, stop) for _, stop in rows[-1])
    first = offset(rows[0], shape)
    span = (offset(last, shape) + 1 - first) * itemsize
    if length < min(short, len(out)) and span <= MOST_SPAN * len(out):
        raw = np.empty(span, np.uint8)
        read_range(files, place.path, place.entry, first * itemsize, memoryview(raw))
        dtype = np.dtype(f"u{itemsize}")
        strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
        count, sizes = shape_of(rows[0])[0], shape_of(rows[0])[1:]
        if len(rows) > 1:
            count, strides[0] = len(rows), (offset(rows[1], shape) - first) * itemsize
        region = np.lib.stride_tricks.as_strided(
            raw.view(dtype), (count, *sizes), strides, writeable=False
        )
        np.copyto(out.view(dtype).reshape(region.shape), region)
        return
    left = memoryview(out)
    for start in chain.from_iterable(starts for _, starts in found):
        read_range(files, place.path, place.entry, start * itemsize, left[:length])
        left = left[length:]


def _gather_composed(
    files: OpenFiles,
    place: SliceLocation,
    cut: ComposedCut,
    out: np.ndarray,
    dtype: str,
    scales: np.ndarray | None = None,
) -> None:
    """Fills ``cut.target`` of ``out``, which has the bits of ``dtype``, in at most
    ``COMPOSED_MEMORY`` times its memory. ``scales``: the bits of those of an fp8 part."""
    stored, sizes = bits_dtype(cut.dtype), tuple(map(len, cut.local))
    first, *others = cut.local
    inner = tuple((indices[0], indices[-1] + 1) for indices in others)
    rows = [((first[0], first[-1] + 1), *inner)]
    if first.step > 1:
        rows = [((i, i + 1), *inner) for i in first]
    flat = np.empty(math.prod(sizes) * stored.itemsize, np.uint8)
    _read_runs(files, place, rows, shape_of(cut.stored), flat, stored.itemsize, SHORT_ROW)
    found = flat.view(stored).reshape(sizes)
    if scales is not None:
        rows, columns = (
            range(low + indices[0], low + indices[-1] + 1, indices.step)
            for indices, (low, _) in zip(cut.local, cut.stored, strict=True)
        )
        found = scale_blocks(
            found.view(DTYPES[cut.dtype]), scales.view(np.float32), rows, columns, cut.block
        )
        found = cast(found, dtype).view(bits_dtype(dtype))
    elif cut.dtype != dtype:
        found = cast(found.view(DTYPES[cut.dtype]), dtype).view(bits_dtype(dtype))
    out[cut.target] = found.T if cut.transposed else found


def scale_blocks(
    values: np.ndarray, scales: np.ndarray, rows: range, columns: range, block: tuple[int, int]
) -> np.ndarray:
    """Returns ``values`` in float32, each multiplied by the scale of its block: ``float32(weight) *
    weight_scale_inv[row // rows, column // columns]``, computed in float32; the name says
    "inverse", but it is the factor to multiply with.

    Args:
        values: fp8, a part of a matrix.
        scales: float32, of the blocks from that of the first row and column to that of the last
            ones.
        rows: the rows of ``values`` in the matrix.
        columns: its columns in the matrix.
        block: rows and columns of one scale.
    """
    out = values.astype(np.float32)
    row_blocks, column_blocks = (
        (np.asarray(indices) // each) - indices[0] // each
        for indices, each in zip((rows, columns), block, strict=True)
    )
    edges = [0, *(np.flatnonzero(np.diff(row_blocks)) + 1), len(rows)]
    for start, stop in zip(edges, edges[1:], strict=False):
        out[start:stop] *= scales[row_blocks[start]][column_blocks]
    return out


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Converts values to another dtype: bfloat16 and float16 to float32 (exact), float32 to
    bfloat16 (nearest, ties to even). Returns the same array if it has that dtype. LoadError for any
    other pair."""
    if array.dtype.name == dtype:
        return array
    if not castable(array.dtype.name, dtype):
        raise LoadError(
            f"{array.dtype.name} is not converted to {dtype}; what can be is "
            + ", ".join(f"{a} to {b}" for a, b in sorted(_CASTS))
        )
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(DTYPES[dtype])


def castable(stored: str, wanted: str) -> bool:
    """Returns whether ``cast`` converts between these dtypes."""
    return stored == wanted or (stored, wanted) in _CASTS


def read_range(
    files: OpenFiles, path: str, entry: TensorEntry, start: int, out: memoryview
) -> None:
    """Fills ``out`` with the bytes of a tensor from its byte ``start`` on, across its ranges in the
    file."""
    for position, count in entry.ranges:
        part = min(count - start, len(out))
        if part > 0:
            files.read(path, position + start, out[:part])
            start, out = start + part, out[part:]
        if not out:
            return
        start -= count
    raise CorruptFileError(path, f"{len(out)} bytes beyond the end of a tensor were asked for")
