"""Defines how a parameter is sharded over the ranks of a pipeline stage, as in MindSpore's strategy
files.

    layout = TensorLayout((2, 2), (0, -1))          # dp 2 x tp 2, rows sharded over tp
    held(layout, rank=1, shape=(8, 4))              # ((4, 8), (0, 4))
    ordinals(layout, (8, 4))                        # (0, 1, 0, 1)
    holders(layout, (8, 4))[1]                      # (1, 3)
    cuts(layout, (8, 4), ((3, 5), (0, 4)))          # the two slices that hold rows 3 and 4

Ranks are local: they count from 0 within the stage. Shapes are global, in elements. MindSpore is
not imported.

The device matrix ``[D_(n-1) .. D_1, D_0]`` numbers the ranks row-major; axes are counted from the
right, as in MindSpore.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

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
        tensor_map = tuple(
            cut if isinstance(cut, int) else tuple(map(int, cut)) for cut in self.tensor_map
        )
        axes = tuple(
            tuple(axis for axis in (cut if isinstance(cut, tuple) else (cut,)) if axis != -1)
            for cut in tensor_map
        )
        vars(self).update(
            device_matrix=matrix, tensor_map=tensor_map, axes=axes, stage_size=math.prod(matrix)
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
            if not tensor_map
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
        tensor_map = [axes if len(axes) > 1 else axes[0] if axes else -1 for axes in self.axes]
        return TensorLayout(self.device_matrix, tuple(tensor_map), shards)

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
            tensor_map = value["tensor_map"]
            shards = value["optimizer_shards"]
            numbers = [
                *matrix,
                shards,
                *itertools.chain(*(m if isinstance(m, list) else [m] for m in tensor_map)),
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a tensor layout: {value!r}"[:400]) from error
        if (
            not isinstance(matrix, list)
            or not isinstance(tensor_map, list)
            or not all(type(number) is int for number in numbers)
        ):
            raise ValueError(
                f"not a tensor layout; expected two lists of integers and an integer: {value!r}"[
                    :400
                ]
            )
        # Checks the sizes before computing with them, and each number before the product of all.
        if (
            max(len(matrix), len(tensor_map)) > MAX_AXES
            or max(map(abs, numbers)) > MAX_RANKS
            or math.prod(matrix) > MAX_RANKS
        ):
            raise ValueError(
                f"not a tensor layout; expected at most {MAX_AXES} axes and {MAX_RANKS} ranks: "
                f"{value!r}"[:400]
            )
        return cls(
            tuple(matrix), tuple(tuple(m) if isinstance(m, list) else m for m in tensor_map), shards
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


# ---- regions -------------------------------------------------------------------------------------


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


def holders_with(layout: TensorLayout, shape: Shape, local: int) -> tuple[int, ...]:
    """Returns the local ranks that hold the same slice as ``local``, which is one of them."""
    return holders(layout, shape)[ordinals(layout, shape)[local]]


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
    tensor_map = [[axis + (axis > split) for axis in axes] for axes in layout.axes]
    tensor_map[0] += shard
    return TensorLayout(tuple(matrix), tuple(map(tuple, tensor_map))).normalized()


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
