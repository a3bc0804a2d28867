"""Numbers the slices of a tensor as mindformers does in ``metadata.json`` of Checkpoint 2.0.

The *ordinal* of a slice is its row-major position among the pieces of all dimensions (mindformers checkpoint/sharded_tensor.py,
_get_global_offset_and_replica_id_from_layout). There, the optimizer shard is part of the layout: see ``fold_optimizer_shards``.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mindresume.model.layout import TensorLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=1 << 12)         # a model has thousands of tensors, but few layouts
def ordinals(layout: TensorLayout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ordinal of each local rank's slice. Raises ValueError if the shape is not divisible."""
    pieces, matrix = layout.pieces(shape), layout.device_matrix
    ranks = np.arange(layout.stage_size)

    def index(axes: Iterable[int]) -> NDArray[np.int64] | int:
        found: NDArray[np.int64] | int = _row_major(
            [ranks // math.prod(matrix[len(matrix) - axis:]) % matrix[-1 - axis] for axis in axes],
            [matrix[-1 - axis] for axis in axes])
        return found
    indices = [index(axes) for axes in layout.axes()]
    if indices:
        indices[0] = indices[0] * layout.optimizer_pieces + index(layout.unused_axes()) % layout.optimizer_pieces
    return tuple((_row_major(indices, pieces) + 0 * ranks).tolist())


def ordinal(layout: TensorLayout | None, shape: Sequence[int], region: Sequence[slice]) -> int:
    """Returns the ordinal of the slice that equals ``region``. Raises ValueError if there is none, or several in an empty
    tensor."""
    pieces, lengths = _pieces(layout, shape)
    if math.prod(shape) == 0 and math.prod(pieces) > 1:
        raise ValueError(f"shape {tuple(shape)} is empty: its {math.prod(pieces)} slices cannot be distinguished")
    found: int = _row_major(((part.start or 0) // max(length, 1) for part, length in zip(region, lengths, strict=True)), pieces)
    if not 0 <= found < math.prod(pieces) or region_of(layout, shape, found) != tuple(region):
        raise ValueError(f"{tuple(region)} is not a slice of shape {tuple(shape)} with {pieces} pieces")
    return found


def region_of(layout: TensorLayout | None, shape: Sequence[int], ordinal: int) -> tuple[slice, ...]:
    """Returns the part of the global tensor that slice ``ordinal`` covers. Raises ValueError if there is no such slice."""
    pieces, lengths = _pieces(layout, shape)
    if not 0 <= ordinal < math.prod(pieces):
        raise ValueError(f"slice {ordinal} of shape {tuple(shape)} with {pieces} pieces: expected 0 to {math.prod(pieces) - 1}")
    region = []
    for count, length in zip(reversed(pieces), reversed(lengths), strict=True):
        ordinal, index = divmod(ordinal, count)
        region.append(slice(index * length, (index + 1) * length))
    return tuple(reversed(region))


def _pieces(layout: TensorLayout | None, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns number and size of the pieces in each dimension."""
    return ((1,) * len(shape), tuple(shape)) if layout is None else (layout.pieces(shape), layout.local_shape(shape))


def _row_major(indices: Iterable[Any], counts: Iterable[int]) -> Any:
    found = 0
    for index, count in zip(indices, counts, strict=True):
        found = found * count + index
    return found


def fold_optimizer_shards(layout: TensorLayout) -> TensorLayout:
    """Returns a layout with the same slices but without optimizer shards: their axes then shard dimension 0 too, and the axis
    where they begin is split if necessary (mindspore parallel/strategy.py:_NetStrategyInfo._layout_process). Raises ValueError
    for a shard that no axes can express."""
    if not layout.optimizer_shards or not layout.tensor_map:
        return TensorLayout(layout.device_matrix, layout.tensor_map).normalized()
    used = set(itertools.chain(*layout.axes()))
    matrix, shard, left = [], [], layout.copies             # left: copies not yet found on the axes, major first
    split = len(layout.device_matrix)                       # no axis is split yet
    for axis, size in zip(reversed(range(len(layout.device_matrix))), layout.device_matrix, strict=True):
        if axis in used or left % size == 0 and left > 1:
            matrix.append(size)
            left //= 1 if axis in used else size
        elif size % left:
            raise ValueError(f"{layout.optimizer_pieces} optimizer shards end within an axis that they do not divide: {layout}")
        else:
            matrix += [left, size // left] if left > 1 else [size]
            split, left = axis if left > 1 else split, 1
            shard.append(axis)
    cuts = [[axis + (axis > split) for axis in axes] for axes in layout.axes()]
    cuts[0] += shard
    return TensorLayout(tuple(matrix), tuple(map(tuple, cuts))).normalized()


class Slices:
    """Holds values derived from a layout and a shape, shared by all parameters with both."""

    def __init__(self, layout: TensorLayout | None, shape: tuple[int, ...]):
        self.layout = layout
        self.counts, self.lengths = _pieces(layout, shape)
        self.slices = math.prod(self.counts)
        self.ordinals = () if layout is None else ordinals(layout, shape)

    def rank_with_other_slice(self, ordinal: int, first: int, ranks: Iterable[int]) -> int | None:
        """Returns one of ``ranks`` that belongs to this stage and holds another slice than ``ordinal``; None if there is none.
        ``first``: the first rank of the stage."""
        held, size = self.ordinals, len(self.ordinals)
        return next((rank for rank in ranks if 0 <= rank - first < size and held[rank - first] != ordinal), None)
