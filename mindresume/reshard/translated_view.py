"""Views the tensors of a checkpoint under other names: each is composed of parts of stored tensors
by a rule.

    view = translated(inner, rules(model), {"output_layer.weight": "float32"})

Nothing is converted beforehand: a region of a new tensor leads to the byte ranges of its parts, and
only those are read.

fp8 weights have a scale for each block of rows and columns, as DeepSeek-V3 and Qwen3-FP8 store
them:

    # weights joined with their scales
    tensors = with_scales(weights.tensors, (128, 128), "config.json")
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mindresume.errors import LoadError
from mindresume.formats.huggingface import Block, Rule
from mindresume.formatting import counted, listed
from mindresume.model.layout import Cut, Region
from mindresume.reshard.checkpoint_view import CheckpointView, SliceLocation, Tensor
from mindresume.reshard.range_reader import ComposedCut, castable

FP8, SCALE = "float8_e4m3fn", "_scale_inv"  # X.weight has its scales in X.weight_scale_inv
# dtype of the values if none is wanted, as in DeepSeek's own conversion
SCALED = "bfloat16"
_SCALE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ScaledTensor(Tensor):
    """Describes an fp8 tensor whose elements are multiplied by those of ``scale``, one for each
    ``block``."""

    scale: Tensor | None = None
    block: tuple[int, int] = (1, 1)


def with_scales(
    tensors: Mapping[str, Tensor], block: tuple[int, int] | None, source: str
) -> dict[str, Tensor]:
    """Joins fp8 tensors with their scales, which are then no tensors of their own. Returns the
    tensors as they were if none of them is fp8 and none is a scale.

    Args:
        tensors: of a checkpoint, by name.
        block: rows and columns of one scale, as ``source`` says; None: it says nothing.
        source: the config.json.

    Raises:
        LoadError: names each fp8 tensor without scales, each scale without an fp8 tensor, and each
            scale of another shape or dtype.
    """
    found, problems = dict(tensors), []
    for name, tensor in tensors.items():
        if tensor.dtype != FP8:
            if (
                name.endswith(SCALE)
                and getattr(tensors.get(name.removesuffix(SCALE)), "dtype", None) != FP8
            ):
                problems.append(f"{name} is a scale, but {name.removesuffix(SCALE)} is not {FP8}")
            continue
        scale = found.pop(name + SCALE, None)
        if block is None:
            problems.append(
                f"{name} is {FP8}, but {source} has no quantization_config with weight_block_size"
            )
        elif scale is None:
            problems.append(f"{name} is {FP8}, and its scales {name + SCALE} are missing")
        elif len(tensor.shape) != 2 or scale.shape != (
            expected := scales_shape(tensor.shape, block)
        ):
            problems.append(
                f"{scale.name} is {scale.shape}, expected "
                f"{expected if len(tensor.shape) == 2 else 'a matrix'}: "
                f"{tensor.shape} in blocks of weight_block_size {list(block)} ({source})"
            )
        elif scale.dtype not in _SCALE_DTYPES:
            problems.append(f"{scale.name} is {scale.dtype}, expected {' or '.join(_SCALE_DTYPES)}")
        else:
            found[name] = ScaledTensor(**vars(tensor), scale=scale, block=block)
    if problems:
        raise LoadError(
            f"the fp8 weights of {source} cannot be read, {counted(len(problems), 'tensor')}: "
            f"{listed(problems, 5, '; ')}"
        )
    return found


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix."""
    return tuple(-(-size // each) for size, each in zip(shape, block, strict=True))


@dataclass(frozen=True)
class ComposedTensor(Tensor):
    """Describes a tensor that ``rule`` composes of ``parts``: tensors of another view, by name."""

    rule: Rule | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def identical_to(self) -> str | None:
        """Returns the name of the one tensor of the other view that has the same bytes, or None."""
        block = self.rule.blocks[0]
        part = self.parts[block.name]
        same = len(self.rule.blocks) == 1 and not block.transposed and block.part == block.other
        return (
            block.name if same and part.dtype == self.dtype and part.shape == self.shape else None
        )

    def cuts(self, region: Region) -> tuple[Any, ...]:
        """Returns the cuts of ``region``: of type ``Cut`` if ``identical_to`` is set, else
        ``ComposedCut``."""
        if self.identical_to is not None:
            return self.parts[self.identical_to].cuts(region)
        found = []
        for block in self._blocks_in(*region[0]):
            hit = _clip(block.part, region)
            if hit is None:
                continue
            part = self.parts[block.name]
            order = slice(None, None, -1 if block.transposed else 1)
            wanted = tuple(
                indices[start:stop]
                for indices, (start, stop) in zip(block.other, hit[order], strict=True)
            )
            for cut in part.cuts(tuple((indices[0], indices[-1] + 1) for indices in wanted)):
                inner = _clip(wanted, cut.part)
                if inner is None:
                    continue
                local = tuple(
                    range(indices[start] - low, indices[stop - 1] - low + 1, indices.step)
                    for indices, (start, stop), (low, _) in zip(
                        wanted, inner, cut.stored, strict=True
                    )
                )
                target = tuple(
                    slice(
                        indices[first + start] - low,
                        indices[first + stop - 1] - low + 1,
                        indices.step,
                    )
                    for indices, (first, _), (start, stop), (low, _) in zip(
                        block.part, hit, inner[order], region, strict=True
                    )
                )
                found.append(
                    _with_scale(
                        ComposedCut(
                            cut.stored,
                            cut.holders,
                            block.name,
                            part.dtype,
                            local,
                            target,
                            block.transposed,
                        ),
                        part,
                    )
                )
        return tuple(found)

    def chunks(self, region: Region, most: int) -> Iterator[Region]:
        """Yields one transposed block (the weights of one expert) after the other: parts of rows
        would each read a few columns of every stored row, so every row would be read many times. A
        large block is read in chunks of whole stored rows."""
        if not any(block.transposed for block in self.rule.blocks):
            yield from super().chunks(region, most)
            return
        (low, high), (left, right) = region
        rows, columns = (
            {
                edge
                for block in self.rule.blocks
                for edge in (block.part[i].start, block.part[i].stop)
            }
            for i in (0, 1)
        )
        for start, stop in _between(rows, low, high):
            width = max(most // (stop - start), 1)
            for first, last in _between(columns, left, right):
                for begin in range(first, last, width):
                    yield (start, stop), (begin, min(begin + width, last))

    def _blocks_in(self, low: int, high: int) -> Sequence[Block]:
        """Returns the blocks that may have rows from ``low`` to ``high``: a tensor of many experts
        has hundreds."""
        blocks, starts, stops = self._by_row
        return blocks[bisect_right(stops, low) : bisect_left(starts, high)]

    @cached_property
    def _by_row(self) -> tuple[list[Block], list[int], list[int]]:
        """Blocks by first row; their first rows; the largest end among each block and those before
        it."""
        blocks = sorted(self.rule.blocks, key=lambda block: block.part[0].start)
        return (
            blocks,
            [block.part[0].start for block in blocks],
            list(itertools.accumulate((block.part[0].stop for block in blocks), max)),
        )


def _between(edges: Iterable[int], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yields the intervals from ``low`` to ``high`` between the edges."""
    return itertools.pairwise(sorted({low, high, *(edge for edge in edges if low < edge < high)}))


def _clip(part: Sequence[range], region: Region) -> tuple[tuple[int, int], ...] | None:
    """Returns, for each dimension, which of the indices of ``part`` lie in ``region``: their
    (start, stop) positions in ``part``. Returns None if no element lies in ``region``."""
    found = []
    for indices, (low, high) in zip(part, region, strict=True):
        start = max(0, -((indices.start - low) // indices.step))
        stop = min(len(indices), -((indices.start - high) // indices.step))
        if start >= stop:
            return None
        found.append((start, stop))
    return tuple(found)


def _with_scale(cut: ComposedCut, part: Tensor) -> ComposedCut:
    """Adds the part of the scales that belongs to a part of an fp8 tensor."""
    if not isinstance(part, ScaledTensor):
        return cut
    blocks = tuple(
        ((low + indices[0]) // each, (low + indices[-1]) // each + 1)
        for indices, (low, _), each in zip(cut.local, cut.stored, part.block, strict=True)
    )
    (scale,) = part.scale.cuts(blocks)  # not cut: only consolidated weights are fp8
    local = tuple(range(*indices) for indices in blocks)
    target = tuple(slice(0, len(indices)) for indices in local)
    return cut._replace(
        scale=ComposedCut(
            scale.stored, scale.holders, part.scale.name, part.scale.dtype, local, target
        ),
        block=part.block,
    )


class TranslatedView(CheckpointView):
    """Views ``inner`` under other names. Reads compare recorded checksums only for tensors that
    keep their bytes (``identical_to``)."""

    def __init__(self, inner: CheckpointView, tensors: Mapping[str, ComposedTensor]):
        self.__dict__.update(inner.__dict__)
        self.inner = inner
        self.tensors = tensors
        self.arrangement = {}

    def locate(self, name: str, cut: Cut | ComposedCut) -> SliceLocation:
        """Returns where a slice lies. Raises the errors of ``CheckpointView.locate``, with names of
        tensors in ``inner``."""
        source = cut.source if isinstance(cut, ComposedCut) else self.tensors[name].identical_to
        return self.inner.locate(source, Cut(cut.stored, cut.holders, cut.stored))

    def composed_sources(self) -> list[str]:
        """Returns the tensors of ``inner`` that are read in parts: a read of a part cannot compare
        the checksum of the whole."""
        return list(
            dict.fromkeys(
                block.name
                for tensor in self.tensors.values()
                if tensor.identical_to is None
                for block in tensor.rule.blocks
            )
        )


def translated(
    inner: CheckpointView,
    known: Mapping[str, Rule],
    dtypes: Mapping[str, str],
    parts: Mapping[str, Tensor] | None = None,
) -> TranslatedView:
    """Views ``inner`` under the names of other tensors.

    Args:
        inner: has all tensors that the rules refer to, in the right shapes.
        known: {name of a new tensor: its rule}.
        dtypes: {name of a new tensor: its dtype}. A tensor without an entry keeps the stored dtype;
            fp8 becomes bfloat16.
        parts: the tensors of ``inner``, with fp8 weights joined with their scales
            (``with_scales``); None: there are none.
    Raises:
        LoadError: Some tensors cannot be converted; the message names them.
    """
    tensors, problems = {}, []
    for name, rule in known.items():
        own = {block.name: (parts or inner.tensors)[block.name] for block in rule.blocks}
        stored = {SCALED if isinstance(part, ScaledTensor) else part.dtype for part in own.values()}
        dtype = dtypes.get(name) or min(stored)
        bad = sorted(part.dtype for part in own.values() if not _becomes(part, dtype))
        if len(stored) > 1 and name not in dtypes:
            problems.append(f"{name} would have the dtypes {' and '.join(sorted(stored))}")
        elif bad:
            problems.append(f"{name} is {bad[0]}, expected {dtype}")
        tensors[name] = ComposedTensor(name, dtype, rule.shape, rule=rule, parts=own)
    if problems:
        raise LoadError(
            f"{inner.name}: {counted(len(problems), 'tensor')} cannot be converted: "
            f"{problems_text(problems)}. Possible: bfloat16 or float16 to float32, float32 to "
            "bfloat16, float8_e4m3fn with scales to both"
        )
    return TranslatedView(inner, tensors)


def _becomes(part: Tensor, dtype: str) -> bool:
    """Returns whether the values of a stored tensor can be converted. Scaled ones are computed in
    float32."""
    return castable("float32" if isinstance(part, ScaledTensor) else part.dtype, dtype)


def problems_text(names: Sequence[str]) -> str:
    """Returns the first names or sentences as one text, with the number of the others."""
    return listed(names, 5, "; " if any(" " in name for name in names) else ", ")
