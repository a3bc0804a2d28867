"""Describes tensors without reading their contents: dtype, shape, layout, and which ranks store
which part."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindresume.api.results import Result
from mindresume.formats.strategy import Strategy
from mindresume.model.layout import Region, TensorLayout, held, shape_of, whole
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.storage.operations import parallel
from mindresume.tensor_files.header import DTYPES
from mindresume.typed import json_value

ELEMENTS, PIECES = "elements", "pieces"


@dataclass(frozen=True)
class TensorInfo(Result):
    """Describes one tensor of a checkpoint, or of a strategy.

    ``to_json()`` has these fields and ``cut`` (the layout in words), ``local_shape`` and
    ``size_bytes``.

    Attributes:
        name: MindSpore's name of the parameter.
        dtype: Such as "bfloat16"; None in a strategy.
        shape: Global shape in elements; None in a strategy.
        layout: How the ranks of a pipeline stage cut it; None: each has all of it.
        stages: Pipeline stages that hold it, from 0; empty: all of them, or consolidated weights.
        copies: Number of ranks of a stage that hold each element.
        file: Name of its file in consolidated weights; None otherwise.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    layout: TensorLayout | None
    stages: tuple[int, ...]
    copies: int
    file: str | None = None

    @property
    def local_shape(self) -> tuple[int, ...] | None:
        """Shape in elements of the part of one rank; None in a strategy."""
        return (
            self.shape
            if self.shape is None or self.layout is None
            else self.layout.local_shape(self.shape)
        )

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the whole tensor, counted once; None in a strategy."""
        return (
            None
            if self.shape is None or self.dtype is None
            else math.prod(self.shape) * DTYPES[self.dtype].itemsize
        )

    @property
    def cut(self) -> str:
        """The layout in words: "dim 0 / 2 over axis 0 of [2, 2]; optimizer shard 2", or "not
        cut"."""
        return cut_text(self.layout)

    def to_json(self) -> dict[str, Any]:
        return {
            **super().to_json(),
            "cut": self.cut,
            "local_shape": json_value(self.local_shape),
            "size_bytes": self.size_bytes,
        }


@dataclass(frozen=True)
class TensorSlice(Result):
    """Describes a part of a tensor, and the ranks whose files store it.

    Attributes:
        name: Name of the tensor.
        region: (start, stop) of each dimension, in ``unit``; None: the file of these ranks holds
            another shape than the layout says.
        of: The whole shape, in ``unit``.
        ranks: Ranks whose files store it; empty for consolidated weights.
        missing_ranks: Ranks that hold it by the layout, but whose files lack it: a redundant copy
            that was not written, or a lost file.
        unit: "elements"; "pieces" in a strategy, which has no shapes: the number of pieces of a
            dimension.
    """

    name: str
    region: Region | None
    of: tuple[int, ...]
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...] = ()
    unit: str = ELEMENTS

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.region == whole(self.of)


def cut_text(layout: TensorLayout | None) -> str:
    """Returns a layout in words, as ``TensorInfo.cut``."""
    if layout is None:
        return "not cut"
    matrix, words = layout.device_matrix, []
    for dim, axes in enumerate(layout.axes):
        axes = tuple(axis for axis in axes if matrix[len(matrix) - 1 - axis] > 1)
        if axes:
            lengths = " x ".join(str(matrix[len(matrix) - 1 - axis]) for axis in axes)
            words.append(
                f"dim {dim} / {lengths} over {'axis' if len(axes) == 1 else 'axes'} "
                f"{', '.join(map(str, axes))}"
            )
    shards = f"optimizer shard {layout.optimizer_slices}" if layout.optimizer_slices > 1 else ""
    if not words:
        return f"{shards} of {list(matrix)}" if shards else "not cut"
    return f"{', '.join(words)} of {list(matrix)}" + (f"; {shards}" if shards else "")


def tensors_of(weights: CheckpointView) -> dict[str, TensorInfo]:
    """Returns every tensor of ``weights`` by name, in their order."""
    infos = {}
    for name, tensor in weights.tensors.items():
        infos[name] = TensorInfo(
            name,
            tensor.dtype,
            tensor.shape,
            tensor.layout,
            tensor.stages,
            tensor.layout.copies if tensor.layout else weights.world_size,
            os.path.basename(weights.places[name][0]) if weights.is_consolidated else None,
        )
    return infos


def tensors_of_strategy(strategy: Strategy) -> list[TensorInfo]:
    """Returns every parameter of ``strategy``; a parameter that stages cut differently has a row
    for each layout."""
    stages: dict[tuple[str, TensorLayout], list[int]] = {}
    for number, stage in enumerate(strategy.stages):
        for item in stage.items():
            stages.setdefault(item, []).append(number)
    return [
        TensorInfo(name, None, None, layout, tuple(numbers), layout.copies)
        for (name, layout), numbers in stages.items()
    ]


def slices_of(
    owner: CheckpointView | Strategy, tensor: TensorInfo, ranks: Sequence[int]
) -> list[TensorSlice]:
    """Returns which slice of ``tensor`` each of ``ranks`` stores by the headers of its files, or
    holds by a strategy."""
    layout = tensor.layout
    if tensor.file is not None:
        return [TensorSlice(tensor.name, whole(tensor.shape or ()), tensor.shape or (), ())]
    weights = None if isinstance(owner, Strategy) else owner
    # a strategy knows no shapes: it counts pieces
    shape = (
        tensor.shape
        if tensor.shape is not None
        else layout.counts((0,) * len(layout.tensor_map))
        if layout
        else ()
    )
    headers = (
        [None] * len(ranks)
        if weights is None
        else parallel(weights.storage, weights.entries, ranks)
    )
    # ranks that store it, ranks that lack it
    holders: dict[Region | None, tuple[list[int], list[int]]] = {}
    for rank, header in zip(ranks, headers, strict=True):
        region, entry = whole(shape), header.get(tensor.name) if header else None
        is_holder = False
        if layout is not None:
            region = held(layout, rank % layout.stage_size, shape)
            is_holder = rank // layout.stage_size in tensor.stages
        if entry is not None:
            holders.setdefault(region if shape_of(region) == entry.shape else None, ([], []))[
                0
            ].append(rank)
        elif is_holder:
            holders.setdefault(region, ([], []))[0 if weights is None else 1].append(rank)
    return sorted(
        (
            TensorSlice(
                tensor.name,
                region,
                shape,
                tuple(there),
                tuple(missing),
                ELEMENTS if weights else PIECES,
            )
            for region, (there, missing) in holders.items()
        ),
        key=_by_region,
    )


def _by_region(row: TensorSlice) -> tuple[bool, Region]:
    return row.region is None, row.region or ()
