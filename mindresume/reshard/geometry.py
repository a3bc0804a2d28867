"""Computes regions of a tensor. A region is a (start, stop) for each dimension, in elements; () for
a 0-d tensor.

Results that depend only on layout and shape are cached: a model has thousands of tensors, but only
a dozen layouts and shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mindresume.model.layout import Region, TensorLayout, holders, row_major


def whole(shape: Sequence[int]) -> Region:
    """Returns the region of a whole tensor."""
    return tuple((0, size) for size in shape)


def shape_of(region: Region) -> tuple[int, ...]:
    """Returns the size of a region by dimension."""
    return tuple(stop - start for start, stop in region)


def elements(region: Region) -> int:
    """Returns the number of elements of a region."""
    return math.prod(stop - start for start, stop in region)


def overlap(one: Region, other: Region) -> Region | None:
    """Returns the common region, or None if there is no common element."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def within(inner: Region, outer: Region) -> Region:
    """Returns ``inner`` relative to the first element of ``outer``."""
    return tuple(
        (start - base, stop - base) for (start, stop), (base, _) in zip(inner, outer, strict=True)
    )


def view(array: np.ndarray, region: Region) -> np.ndarray:
    """Returns a region of an array as a view; for a 0-d array the whole."""
    return array[(*(slice(start, stop) for start, stop in region), ...)]


class Cut(NamedTuple):
    """Describes the ``part`` of a wanted region that lies in one slice. ``stored``: the region of
    the slice; ``holders``: local ranks that hold it, ascending. Both regions are in elements of the
    whole tensor."""

    stored: Region
    holders: Sequence[int]
    part: Region


@lru_cache(maxsize=1 << 16)
def cuts(layout: TensorLayout | None, shape: tuple[int, ...], region: Region) -> tuple[Cut, ...]:
    """Returns one cut for each slice that overlaps ``region`` of a tensor of global ``shape``; none
    for an empty region. ``layout`` None: one slice, held by local rank 0."""
    if layout is None:
        return (Cut(whole(shape), (0,), region),) if elements(region) else ()
    lengths = layout.local_shape(shape)
    if not elements(region):
        return ()
    counts, ranks = layout.counts(shape), holders(layout, shape)
    ranges = [
        range(start // length, -(-stop // length))
        for (start, stop), length in zip(region, lengths, strict=True)
    ]
    found = []
    for choice in itertools.product(*ranges):
        stored = tuple(
            (i * length, (i + 1) * length) for i, length in zip(choice, lengths, strict=True)
        )
        part = overlap(stored, region) if stored else ()
        if part is not None:
            found.append(Cut(stored, ranks[row_major(choice, counts)], part))
    return tuple(found)


def runs(part: Region, shape: Sequence[int]) -> tuple[int, Iterator[int]]:
    """Splits a region of a C-ordered array of ``shape`` into contiguous runs of equal length.
    Returns (elements of each run, first positions of the runs, ascending)."""
    split = len(shape)
    while split and (part[split - 1] == (0, shape[split - 1])):
        # the region covers the whole of the dimensions from here on
        split -= 1
    leading = max(split - 1, 0)
    tail = math.prod(shape[split:])
    length = tail * (part[leading][1] - part[leading][0]) if split else tail
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = part[leading][0] * strides[leading] if split else 0
    if not leading:
        return length, iter((first,))
    return length, (
        first + sum(i * stride for i, stride in zip(choice, strides[:leading], strict=True))
        for choice in itertools.product(*(range(start, stop) for start, stop in part[:leading]))
    )


def offset(part: Region, shape: Sequence[int]) -> int:
    """Returns the position of the first element of a region in a C-ordered array of ``shape``."""
    position = 0
    for (start, _), size in zip(part, shape, strict=True):
        position = position * size + start
    return position


def chunks(region: Region, most: int) -> Iterator[Region]:
    """Yields chunks of a region with at most ``most`` elements each (at least one), in the order of
    its elements. In every layout, the part of a slice that lies in a chunk of the whole tensor is
    contiguous in that slice, and the part in the next chunk follows it."""
    shape = shape_of(region)
    if not math.prod(shape):
        return
    if not shape:
        yield ()
        return
    dim, row = 0, math.prod(shape[1:])
    while dim + 1 < len(shape) and row > most:
        dim += 1
        row //= shape[dim]
    (low, high), step = region[dim], max(most // row, 1)
    for choice in itertools.product(*(range(*edges) for edges in region[:dim])):
        leading = tuple((i, i + 1) for i in choice)
        for start in range(low, high, step):
            yield (*leading, (start, min(start + step, high)), *region[dim + 1 :])
