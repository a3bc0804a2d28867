"""Defines how a parameter is sharded over the ranks of a pipeline stage, as in MindSpore's strategy
files.

    layout = TensorLayout((2, 2), (0, -1))          # dp 2 x tp 2, rows sharded over tp
    held(layout, rank=1, shape=(8, 4))              # ((4, 8), (0, 4))
    ordinals(layout, (8, 4))                        # (0, 1, 0, 1)
    holders(layout, (8, 4))[1]                      # (1, 3)

Ranks are local: they count from 0 within the stage. Shapes are global, in elements. MindSpore is
not imported.

The device matrix ``[D_(n-1) .. D_1, D_0]`` numbers the ranks row-major; axes are counted from the
right, as in MindSpore.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

# ranks of a job; a larger number in a file is damage, and would make loops over ranks endless
MAX_RANKS = 100_000
MAX_AXES = 32  # axes of a device matrix, and dimensions of a tensor (numpy's limit)

Shape = tuple[int, ...]  # of a tensor, in elements
# (start, stop) for each dimension of a tensor, in elements; () for a 0-d tensor
Region = tuple[tuple[int, int], ...]


def is_scalar(shape: Sequence[int]) -> bool:
    """Returns whether a tensor has at most one element. Without a layout it then is a counter of
    the training, equal on all ranks."""
    return math.prod(shape) <= 1


def same_shape(stored: Sequence[int], wanted: Sequence[int]) -> bool:
    """Returns whether a stored tensor fits a parameter. For one element, the number of dimensions
    does not matter: () fits (1,)."""
    return tuple(stored) == tuple(wanted) or math.prod(stored) == math.prod(wanted) == 1


@dataclass(frozen=True)
class TensorLayout:
    """The sharding of one parameter.

    Attributes:
        device_matrix: the ranks of the stage, major axis first.
        tensor_map: for each tensor dimension the device axis that shards it, counted from the
            right; -1: not sharded; a tuple:
            several axes, major first. A tensor without dimensions is never sharded.
        optimizer_shards: number of shards of dimension 0 after the sharding above; 0: none, -1: as
            many as there are replicas.

        axes: for each tensor dimension the device axes that shard it, major first; () if it is not
            sharded.
        unused_axes: device axes longer than 1 that shard no dimension, major first: the replicas
            lie along them.
        stage_size: number of ranks in the stage.
        replicas: number of ranks that hold the same data before the optimizer shards.
        optimizer_slices: ``optimizer_shards`` with 0 and -1 resolved; 1: dimension 0 is not sharded
            further.

    Raises:
        ValueError: An axis does not exist or is used twice, or the optimizer shards do not divide
            the replicas.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[int | tuple[int, ...], ...]
    optimizer_shards: int = 0
    axes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    unused_axes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    stage_size: int = field(init=False, repr=False, compare=False)
    replicas: int = field(init=False, repr=False, compare=False)
    optimizer_slices: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        matrix = tuple(map(int, self.device_matrix))
        cuts = tuple(
            cut if isinstance(cut, int) else tuple(map(int, cut)) for cut in self.tensor_map
        )
        axes = tuple(
            tuple(axis for axis in (cut if isinstance(cut, tuple) else (cut,)) if axis != -1)
            for cut in cuts
        )
        vars(self).update(
            device_matrix=matrix, tensor_map=cuts, axes=axes, stage_size=math.prod(matrix)
        )
        if not matrix or min(matrix) < 1:
            raise ValueError(
                f"device_matrix must have at least one axis, each of length >= 1: {self}"
            )
        used = list(itertools.chain(*axes))
        if len(set(used)) < len(used) or any(not 0 <= axis < len(matrix) for axis in used):
            raise ValueError(
                f"tensor_map uses an axis twice, or one that device_matrix does not have: {self}"
            )
        unused = tuple(
            axis
            for axis in reversed(range(len(matrix)))
            if axis not in used and matrix[-1 - axis] > 1
        )
        replicas = math.prod(matrix[-1 - axis] for axis in unused)
        slices = (
            1
            if not cuts
            else replicas
            if self.optimizer_shards == -1
            else max(self.optimizer_shards, 1)
        )
        vars(self).update(unused_axes=unused, replicas=replicas, optimizer_slices=slices)
        if self.optimizer_shards < -1 or replicas % slices:
            raise ValueError(
                f"{self.optimizer_shards} optimizer shards do not divide {replicas} replicas: "
                f"{self}"
            )

    def normalized(self) -> TensorLayout:
        """Returns the canonical form of this layout: a tuple in ``tensor_map`` has at least two
        axes, and a layout without optimizer shards has ``optimizer_shards`` 0."""
        shards = self.optimizer_shards if self.optimizer_slices > 1 else 0
        if shards == self.optimizer_shards and all(isinstance(cut, int) for cut in self.tensor_map):
            return self
        cuts = [axes if len(axes) > 1 else axes[0] if axes else -1 for axes in self.axes]
        return TensorLayout(self.device_matrix, tuple(cuts), shards)

    @property
    def copies(self) -> int:
        """Returns the number of ranks that hold each element."""
        return self.replicas // self.optimizer_slices

    @property
    def optimizer_stride(self) -> int:
        """Returns the distance in ranks within the optimizer group (``opt_weight_shard_step``); 0
        without optimizer shards."""
        if self.optimizer_slices == 1:
            return 0
        return math.prod(self.device_matrix[len(self.device_matrix) - self.unused_axes[-1] :])

    def counts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of slices of each dimension. Raises ValueError if a dimension of
        ``shape`` is not divisible."""
        if len(shape) != len(self.tensor_map):
            raise ValueError(
                f"shape {tuple(shape)} has {len(shape)} dimensions, tensor_map has "
                f"{len(self.tensor_map)}: {self}"
            )
        counts = [math.prod(self.device_matrix[-1 - axis] for axis in axes) for axes in self.axes]
        if counts:
            counts[0] *= self.optimizer_slices
        for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
            if size < 0 or size % count:
                raise ValueError(
                    f"dimension {dim} of shape {tuple(shape)} has {size} elements and does not "
                    f"divide into {count} equal pieces: {self}"
                )
        return tuple(counts)

    def local_shape(self, shape: Sequence[int]) -> Shape:
        """Returns the shape of the part that each rank holds. Raises ValueError like ``counts``."""
        return tuple(size // count for size, count in zip(shape, self.counts(shape), strict=True))

    def global_shape(self, held: Sequence[int]) -> Shape:
        """Returns the shape of the whole tensor if each rank holds a part of shape ``held``. Raises
        ValueError for another number of dimensions."""
        return tuple(
            size * count for size, count in zip(held, self.counts([0] * len(held)), strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that ``from_json`` reads."""
        return {
            "device_matrix": list(self.device_matrix),
            "optimizer_shards": self.optimizer_shards,
            "tensor_map": [list(m) if isinstance(m, tuple) else m for m in self.tensor_map],
        }

    @classmethod
    def from_json(cls, value: Any) -> TensorLayout:
        """Reads the result of ``to_json``; ignores unknown keys. Raises ValueError for anything
        else, and for more than MAX_RANKS ranks or MAX_AXES axes."""
        try:
            matrix = value["device_matrix"]
            cuts = value["tensor_map"]
            shards = value["optimizer_shards"]
            numbers = [
                *matrix,
                shards,
                *itertools.chain(*(m if isinstance(m, list) else [m] for m in cuts)),
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a tensor layout: {value!r}"[:400]) from error
        if (
            not isinstance(matrix, list)
            or not isinstance(cuts, list)
            or not all(type(number) is int for number in numbers)
        ):
            raise ValueError(
                f"not a tensor layout; expected two lists of integers and an integer: {value!r}"[
                    :400
                ]
            )
        # Checks the sizes before computing with them, and each number before the product of all.
        if (
            max(len(matrix), len(cuts)) > MAX_AXES
            or max(map(abs, numbers)) > MAX_RANKS
            or math.prod(matrix) > MAX_RANKS
        ):
            raise ValueError(
                f"not a tensor layout; expected at most {MAX_AXES} axes and {MAX_RANKS} ranks: "
                f"{value!r}"[:400]
            )
        return cls(
            tuple(matrix), tuple(tuple(m) if isinstance(m, list) else m for m in cuts), shards
        )


@lru_cache(maxsize=1 << 16)  # a model has thousands of tensors, but few layouts and shapes
def held(layout: TensorLayout, rank: int, shape: Shape) -> Region:
    """Returns the slice of a tensor of global ``shape`` that local ``rank`` holds. Raises
    ValueError if the rank or the shape does not fit."""
    if not 0 <= rank < layout.stage_size:
        raise ValueError(
            f"rank {rank} is not one of the {layout.stage_size} ranks of a stage: {layout}"
        )
    number = _numbers(layout, shape, rank)  # not of all ranks: there may be thousands
    region = []
    for length, count in zip(
        reversed(layout.local_shape(shape)), reversed(layout.counts(shape)), strict=True
    ):
        number, index = divmod(number, count)
        region.append((index * length, (index + 1) * length))
    return tuple(reversed(region))


# ---- slices by number ----------------------------------------------------------------------------

# mindformers numbers the slices of a tensor in ``metadata.json`` of Checkpoint 2.0: the *ordinal*
# of a slice is its row-major position among the slices of all dimensions (mindformers
# checkpoint/sharded_tensor.py, _get_global_offset_and_replica_id_from_layout). There, the optimizer
# shard is part of the layout: see ``fold_optimizer_shards``.


@lru_cache(maxsize=1 << 12)  # a model has thousands of tensors, but few layouts
def ordinals(layout: TensorLayout, shape: Shape) -> tuple[int, ...]:
    """Returns the ordinal of each local rank's slice. Raises ValueError if the shape is not
    divisible."""
    import numpy as np  # here: the help of a command imports this module

    ranks = np.arange(layout.stage_size)
    return tuple((_numbers(layout, shape, ranks) + 0 * ranks).tolist())


def _numbers(layout: TensorLayout, shape: Shape, ranks: Any) -> Any:
    """Returns the ordinal of the slice of one rank, or of each in an array."""
    counts, matrix = layout.counts(shape), layout.device_matrix

    def index(axes: Iterable[int]) -> Any:
        return row_major(
            [ranks // math.prod(matrix[len(matrix) - axis :]) % matrix[-1 - axis] for axis in axes],
            [matrix[-1 - axis] for axis in axes],
        )

    indices = [index(axes) for axes in layout.axes]
    if indices:
        indices[0] = (
            indices[0] * layout.optimizer_slices
            + index(layout.unused_axes) % layout.optimizer_slices
        )
    return row_major(indices, counts)


@lru_cache(maxsize=1 << 12)
def holders(layout: TensorLayout, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Returns the local ranks that hold each slice, ascending, by ordinal. Raises ValueError like
    ``ordinals``."""
    found: list[list[int]] = [[] for _ in range(math.prod(layout.counts(shape)))]
    for rank, number in enumerate(ordinals(layout, shape)):
        found[number].append(rank)
    return tuple(map(tuple, found))


def row_major(indices: Iterable[Any], counts: Iterable[int]) -> Any:
    """Returns the position of ``indices`` among all, the last one varying fastest."""
    found = 0
    for index, count in zip(indices, counts, strict=True):
        found = found * count + index
    return found


def fold_optimizer_shards(layout: TensorLayout) -> TensorLayout:
    """Returns a layout with the same slices but without optimizer shards: their axes then shard
    dimension 0 too, and the axis where they begin is split if necessary (mindspore
    parallel/strategy.py:_NetStrategyInfo._layout_process). Raises ValueError for a shard that no
    axes can express."""
    if not layout.optimizer_shards or not layout.tensor_map:
        return TensorLayout(layout.device_matrix, layout.tensor_map).normalized()
    used = set(itertools.chain(*layout.axes))
    # left: copies not yet found on the axes, major first
    matrix = []
    shard = []
    left = layout.copies
    split = len(layout.device_matrix)  # no axis is split yet
    for axis, size in zip(
        reversed(range(len(layout.device_matrix))), layout.device_matrix, strict=True
    ):
        if axis in used or left % size == 0 and left > 1:
            matrix.append(size)
            left //= 1 if axis in used else size
        elif size % left:
            raise ValueError(
                f"{layout.optimizer_slices} optimizer shards end within an axis that they do not "
                f"divide: {layout}"
            )
        else:
            matrix += [left, size // left] if left > 1 else [size]
            split, left = axis if left > 1 else split, 1
            shard.append(axis)
    cuts = [[axis + (axis > split) for axis in axes] for axes in layout.axes]
    cuts[0] += shard
    return TensorLayout(tuple(matrix), tuple(map(tuple, cuts))).normalized()


class Slices:
    """Holds values derived from a layout and a shape, shared by all parameters with both."""

    def __init__(self, layout: TensorLayout | None, shape: Shape):
        self.layout = layout
        self.lengths = shape if layout is None else layout.local_shape(shape)
        self.counts = (1,) * len(shape) if layout is None else layout.counts(shape)
        self.slices = math.prod(self.counts)
        self.ordinals = () if layout is None else ordinals(layout, shape)

    def rank_with_other_slice(self, ordinal: int, first: int, ranks: Iterable[int]) -> int | None:
        """Returns one of ``ranks`` that belongs to this stage and holds another slice than
        ``ordinal``; None if there is none. ``first``: the first rank of the stage."""
        held, size = self.ordinals, len(self.ordinals)
        return next(
            (rank for rank in ranks if 0 <= rank - first < size and held[rank - first] != ordinal),
            None,
        )


# ---- who writes which replica --------------------------------------------------------------------

Layouts = Mapping[str, tuple[TensorLayout, Shape]]  # {tensor: (layout, global shape)}
Held = tuple[TensorLayout | None, Shape, int]


def shares(tensors: Mapping[str, Held], ranks: int) -> list[frozenset[str]]:
    """Returns, for each local rank of a pipeline stage of ``ranks`` ranks, the names that it
    writes; possibly none. Every rank computes the same result, without communication, whatever
    the order of the tensors.

    Pieces with the fewest holders are assigned first, then the largest, then by name, each to the
    holder with the fewest bytes so far: slices with many holders balance the loads.

    Args:
        tensors: {name: (layout, global shape, bytes of one element)}; layout None: replicated on
            all ranks.
    Raises:
        ValueError: a layout is of another number of ranks, or a shape does not divide.
    """
    if ranks < 1:
        raise ValueError(f"a stage of {ranks} ranks")
    everyone = (tuple(range(ranks)),)
    rows = []
    for name, (layout, shape, itemsize) in tensors.items():
        if layout is not None and layout.stage_size != ranks:
            raise ValueError(
                f"tensor {name}: its layout is of {layout.stage_size} ranks, the stage has "
                f"{ranks}: {layout}"
            )
        slices = everyone if layout is None else holders(layout, shape)
        size = math.prod(layout.local_shape(shape) if layout else shape) * itemsize
        rows += [(len(held), -size, name, number, held) for number, held in enumerate(slices)]
    rows.sort(key=itemgetter(0, 1, 2, 3))
    loads = [0] * ranks
    found: list[set[str]] = [set() for _ in range(ranks)]
    for _, size, name, _, held in rows:
        rank = min(held, key=loads.__getitem__)  # the first of equal ones
        loads[rank] -= size
        found[rank].add(name)
    return list(map(frozenset, found))
