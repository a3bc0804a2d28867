"""Compares two checkpoints tensor by tensor and bit by bit, in any layouts and formats.

    for difference in compare(a, b):                    # CheckpointView, as of open_checkpoint
        difference.name, difference.kind, difference.absolute

Whole tensors are compared chunk by chunk, in bounded memory. A slice that several ranks hold is
read from one of them. Recorded checksums are ignored: a damaged byte is a difference like any
other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np

from mindresume.reshard.checkpoint_view import CheckpointView, Tensor
from mindresume.reshard.direct_engine import TILE, Traffic
from mindresume.reshard.geometry import Region, chunks, elements, shape_of, whole
from mindresume.reshard.range_reader import OpenFiles, bits_dtype, gather
from mindresume.reshard.region_load import WORKERS
from mindresume.tensor_files.header import DTYPES

ONLY_A, ONLY_B, SHAPE, DTYPE, VALUES = "only in A", "only in B", "shape", "dtype", "values"
# elements that are compared at once: their bits and values stay in the cache
PORTION = 1 << 16

Number = int | float
Index = tuple[int, ...]


@dataclass
class Difference:
    """One tensor that differs in at least one bit. Only the kind VALUES compares values, portion by
    portion in the order of its elements.

    Args:
        a, b: the tensor on either side; None if it is missing there.
        count: elements whose bits differ.
        bits_only: elements whose bits differ and whose values are equal (0.0 and -0.0; two NaN).
        absolute: largest difference, exact for integers; inf between a number and NaN.
        relative: largest difference relative to the larger magnitude of the two.
        first: index of the first differing element in the whole tensor.
        values: the two values of that element.
    """

    name: str
    kind: str
    a: Tensor | None
    b: Tensor | None
    count: int = 0
    bits_only: int = 0
    absolute: Number = math.inf
    relative: float = math.inf
    first: Index = ()
    values: tuple[Number, Number] | None = None

    @property
    def order(self) -> tuple[bool, Number, str]:
        """Sorts first what has no values to compare, then the largest differences."""
        return self.kind == VALUES, -self.absolute, self.name

    def within(self, tolerance: float | None) -> bool:
        """Returns whether no two values differ by more than ``tolerance``; None: bits must be
        equal."""
        return tolerance is not None and self.kind == VALUES and self.absolute <= tolerance

    def add(self, chunk: Region, start: int, a: np.ndarray, b: np.ndarray) -> None:
        """Adds what differs in the bits of both sides, from element ``start`` of the chunk on."""
        at = np.flatnonzero(a != b)
        if not at.size:
            return
        dtype = _number_dtype(self.a)
        x, y = a[at].view(dtype), b[at].view(dtype)
        if not self.count:
            index = np.unravel_index(start + int(at[0]), shape_of(chunk)) if chunk else ()
            self.first = tuple(low + int(i) for (low, _), i in zip(chunk, index, strict=True))
            self.values = x[0].item(), y[0].item()
        absolute, relative = distances(x, y)
        self.count += at.size
        self.bits_only += int(np.count_nonzero(absolute == 0))
        self.absolute = max(self.absolute, absolute.max().item())
        self.relative = max(self.relative, relative.max().item())


def compare(
    a: CheckpointView,
    b: CheckpointView,
    names: Collection[str] | None = None,
    workers: int = WORKERS,
    tile: int = TILE,
    traffic: Traffic | None = None,
) -> list[Difference]:
    """Returns the differences, in the order of the tensors of ``a``, then the tensors that only
    ``b`` has.

    Args:
        names: compares only these tensors.
        tile: bytes of a buffer; a worker holds three of them, and the values of one ``PORTION``.
        traffic: its ``progress`` is called with the bytes compared, which add up to ``comparable``.
    Raises:
        CorruptFileError, LoadError, OSError: a tensor cannot be read.
    """
    files = OpenFiles(a.storage), OpenFiles(b.storage)
    compared = partial(_compared, (a, b), files, tile, traffic or Traffic())
    try:
        with ThreadPoolExecutor(workers) as pool:
            return [found for found in pool.map(compared, _names(a, b, names)) if found is not None]
    finally:
        for opened in files:
            opened.close()


def comparable(
    a: CheckpointView, b: CheckpointView, names: Collection[str] | None = None
) -> tuple[int, int]:
    """Returns how many tensors, and how many bytes of each side, ``compare`` compares by value."""
    sizes = [
        a.tensors[name].nbytes
        for name in _names(a, b, names)
        if _kind(a.tensors.get(name), b.tensors.get(name)) == VALUES
    ]
    return len(sizes), sum(sizes)


def _names(a: CheckpointView, b: CheckpointView, names: Collection[str] | None) -> list[str]:
    return [
        name for name in dict.fromkeys((*a.tensors, *b.tensors)) if names is None or name in names
    ]


def _kind(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None:
        return ONLY_B if a is None else ONLY_A
    if a.shape != b.shape:
        return SHAPE
    return VALUES if a.dtype == b.dtype else DTYPE


def _compared(
    sides: tuple[CheckpointView, CheckpointView],
    files: tuple[OpenFiles, OpenFiles],
    tile: int,
    traffic: Traffic,
    name: str,
) -> Difference | None:
    """Returns the difference of one tensor, which is read if only values can differ; None if it is
    alike on both sides."""
    a, b = (weights.tensors.get(name) for weights in sides)
    kind = _kind(a, b)
    if kind != VALUES:
        return Difference(name, kind, a, b)
    dtype = bits_dtype(a.dtype)
    most = max(tile // dtype.itemsize, 1)
    room = min(most, elements(whole(a.shape)))
    buffers, staging = np.empty((2, room), dtype), np.empty(room * dtype.itemsize, np.uint8)
    found = Difference(
        name, VALUES, a, b, absolute=0 if _number_dtype(a).kind in "iu" else 0.0, relative=0.0
    )
    for chunk in chunks(a.shape, most):
        bits = buffers[:, : elements(chunk)]
        for weights, opened, flat in zip(sides, files, bits, strict=True):
            gather(weights, opened, name, chunk, flat.reshape(shape_of(chunk)), staging)
        for start in range(0, elements(chunk), PORTION):
            found.add(chunk, start, *bits[:, start : start + PORTION])
        traffic.progress(elements(chunk) * dtype.itemsize)
    return found if found.count else None


def _number_dtype(tensor: Tensor) -> np.dtype:
    """Returns the dtype in which the values of a tensor are compared."""
    return DTYPES["uint8" if tensor.dtype == "bool" else tensor.dtype]


def distances(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns absolute differences, exact for integers (uint64), else in float64, and relative to
    the larger magnitude. Both are 0 for equal values and for two NaN, inf for a number and NaN, or
    a finite and an infinite one."""
    if a.dtype.kind in "iu":
        low, high = np.minimum(a, b), np.maximum(a, b)
        # modulo 2**64, so right for signed numbers too
        exact = high.astype(np.uint64) - low.astype(np.uint64)
        scale = np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64)))
        return exact, np.divide(exact, scale, out=np.zeros_like(scale), where=exact != 0)
    # inf - inf, NaN that signals
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        absolute = np.abs(x - y)
        relative = absolute / np.maximum(np.abs(x), np.abs(y))
    for found in (absolute, relative):
        found[np.isnan(found)] = np.inf
        found[same] = 0
    return absolute, relative


def by_size(differences: Iterable[Difference]) -> list[Difference]:
    """Sorts differences: first those without values to compare, then by size, the largest first."""
    return sorted(differences, key=attrgetter("order"))
