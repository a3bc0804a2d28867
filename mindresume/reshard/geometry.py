"""Regions of a tensor, as pure arithmetic. A region is ((start, stop), ...) per dimension, in elements; () of a 0-d tensor.

What depends only on the kind of a tensor (layout and shape) is remembered: a model has thousands of tensors and a dozen kinds.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mindresume.layout import TensorLayout

Region = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Region:
    return tuple((0, size) for size in shape)


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def elements(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)


def overlap(one: Region, other: Region) -> Region | None:
    """None if they have no element in common."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def within(inner: Region, outer: Region) -> Region:
    """``inner`` as counted from the first element of ``outer``."""
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(inner, outer, strict=True))


def slices_of(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)


def view(array: np.ndarray, region: Region) -> np.ndarray:
    """That part of an array, without a copy; of a 0-d array itself."""
    return array[(*slices_of(region), ...)]


@lru_cache(maxsize=1 << 16)
def held(layout: TensorLayout, rank: int, shape: tuple[int, ...]) -> Region:
    """What local ``rank`` holds of a tensor of global ``shape``. ValueError as for ``TensorLayout.slices``."""
    return tuple((part.start, part.stop) for part in layout.slices(rank, shape))


class Cut(NamedTuple):
    """A part of a wanted region that lies in one piece. ``piece``: what its ``holders`` (local ranks, ascending) hold; ``part``:
    what is wanted of it. Both in elements of the whole tensor."""
    piece: Region
    holders: Sequence[int]
    part: Region


@lru_cache(maxsize=1 << 16)
def cuts(layout: TensorLayout | None, shape: tuple[int, ...], region: Region) -> tuple[Cut, ...]:
    """The pieces that cover ``region`` of a tensor of global ``shape``, each once; empty for an empty region. ``layout`` None:
    one piece, held by local rank 0. The cost grows with the number of these pieces, not with that of the ranks."""
    if layout is None:
        return (Cut(whole(shape), (0,), region),) if elements(region) else ()
    lengths = layout.local_shape(shape)
    if not elements(region):
        return ()
    ranges = [range(start // length, -(-stop // length)) for (start, stop), length in zip(region, lengths, strict=True)]
    found = []
    for choice in itertools.product(*ranges):
        piece = tuple((i * length, (i + 1) * length) for i, length in zip(choice, lengths, strict=True))
        part = overlap(piece, region) if piece else ()
        if part is not None:
            found.append(Cut(piece, tuple(layout.holders(slices_of(piece), shape)), part))
    return tuple(found)


def runs(part: Region, shape: Sequence[int]) -> tuple[int, Iterator[int]]:
    """A region of a C-ordered array of ``shape`` as contiguous runs: elements of each, and where each begins, ascending."""
    split = len(shape)
    while split and (part[split - 1] == (0, shape[split - 1])):
        split -= 1                                          # dimensions from here on are covered whole
    leading = max(split - 1, 0)
    tail = math.prod(shape[split:])
    length = tail * (part[leading][1] - part[leading][0]) if split else tail
    strides = [math.prod(shape[dim + 1:]) for dim in range(len(shape))]
    first = part[leading][0] * strides[leading] if split else 0
    if not leading:
        return length, iter((first,))
    return length, (first + sum(i * stride for i, stride in zip(choice, strides[:leading], strict=True))
                    for choice in itertools.product(*(range(start, stop) for start, stop in part[:leading])))


def offset(part: Region, shape: Sequence[int]) -> int:
    """Position of the first element of a region in a C-ordered array of ``shape``."""
    position = 0
    for (start, _), size in zip(part, shape, strict=True):
        position = position * size + start
    return position


def blocks(shape: Sequence[int], most: int) -> Iterator[Region]:
    """A tensor in blocks of at most ``most`` elements (at least one), in the order of its elements. What a piece of the tensor
    has of a block is contiguous in that piece, and what it has of the next block follows: so it is in every layout."""
    if not math.prod(shape):
        return
    dim, row = 0, math.prod(shape[1:])
    while dim + 1 < len(shape) and row > most:
        dim += 1
        row //= shape[dim]
    step = max(most // row, 1)
    for choice in itertools.product(*(range(size) for size in shape[:dim])):
        leading = tuple((i, i + 1) for i in choice)
        if not shape:
            yield ()
            return
        for start in range(0, shape[dim], step):
            yield (*leading, (start, min(start + step, shape[dim])), *whole(shape[dim + 1:]))
