"""Compares two checkpoints tensor by tensor, bit by bit, in any layouts and formats.

found = mindresume.compare("output/checkpoint", "merged")
found.equal, [difference.name for difference in found.differences]
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mindresume.api.checkpoint import (
    Checkpoint,
    CheckpointLike,
    existing,
    is_strategy,
    opened,
    refused_of,
)
from mindresume.api.results import Problem, Result
from mindresume.errors import ConfigError
from mindresume.events import SILENT, Progress
from mindresume.model.layout import chunks, elements, shape_of, whole
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor, check_replicas
from mindresume.reshard.conversion_plan import with_counters
from mindresume.reshard.range_reader import TILE, OpenFiles, bits_dtype, gather
from mindresume.reshard.region_load import WORKERS
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files.header import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

ONLY_A = "only in A"
ONLY_B = "only in B"
SHAPE = "shape"
DTYPE = "dtype"
VALUES = "values"
PORTION = 1 << 16  # elements that are compared at once: their bits and values stay in the cache


@dataclass(frozen=True)
class TensorForm(Result):
    """Holds dtype and global shape, in elements, of a tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorDifference(Result):
    """Describes one tensor that differs in a bit. All but the first four fields are None unless
    ``kind`` is "values".

    Attributes:
        name: Name of the tensor.
        kind: "only in A", "only in B", "shape", "dtype" or "values".
        a: The tensor in A; None if A lacks it.
        b: The tensor in B; None if B lacks it.
        elements: Number of its elements.
        differing: Number of elements with different bits.
        bits_only: How many of these have equal values (0.0 and -0.0; two NaN).
        largest_absolute: Largest difference of two values, exact for integers; inf for a number
            against NaN.
        largest_relative: Largest difference relative to the larger one of both values.
        first_index: Index, in the global tensor, of the first element that differs.
        first_values: The values there, of A and of B.
    """

    name: str
    kind: str
    a: TensorForm | None
    b: TensorForm | None
    elements: int | None = None
    differing: int | None = None
    bits_only: int | None = None
    largest_absolute: float | None = None
    largest_relative: float | None = None
    first_index: tuple[int, ...] | None = None
    first_values: tuple[float, float] | None = None

    def within(self, tolerance: float | None) -> bool:
        """Returns whether no difference of values exceeds ``tolerance``. None: bits must be
        equal."""
        return (
            tolerance is not None
            and self.largest_absolute is not None
            and self.largest_absolute <= tolerance
        )


@dataclass(frozen=True)
class ComparedCheckpoint(Result):
    """Describes one side of a comparison.

    Attributes:
        source: Path, step and number of ranks.
        step: None for weights without a step.
        tensors: Number of its tensors.
        world_size: Number of ranks that saved it; None for consolidated weights.
        refused: Newer checkpoints of that folder that could not be used.
        notes: What was assumed or ignored, as sentences.
    """

    source: str
    step: int | None
    tensors: int
    world_size: int | None
    refused: tuple[Problem, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison(Result):
    """Describes what differs between two checkpoints.

    Attributes:
        a: The first one.
        b: The second one.
        equal: Whether both have the same tensors, bit for bit.
        within_tolerance: Whether all differences are within ``tolerance``.
        tolerance: As given.
        tensors: Number of examined tensors of both.
        compared: Number of tensors that both have in one dtype and shape, so that their values were
            compared.
        size_bytes: Bytes of these, of each side.
        differences: Every tensor that differs; first those without values to compare, then by size
            of the difference, largest first.
    """

    a: ComparedCheckpoint
    b: ComparedCheckpoint
    equal: bool
    within_tolerance: bool
    tolerance: float | None
    tensors: int
    compared: int
    size_bytes: int
    differences: tuple[TensorDifference, ...]


def compare(
    a: CheckpointLike,
    b: CheckpointLike,
    *,
    step_a: int | None = None,
    step_b: int | None = None,
    strategy_a: str | os.PathLike[str] | None = None,
    strategy_b: str | os.PathLike[str] | None = None,
    tensors: str | None = None,
    tolerance: float | None = None,
    progress: Progress = SILENT,
) -> Comparison:
    """Compares two checkpoints tensor by tensor, bit by bit, including counters.

    It reads every byte of both once; if several ranks store the same piece, that of one rank. It
    ignores recorded checksums (``Catalog.verify`` checks them). Both are held meanwhile.

    Args:
        a: Path of a checkpoint of any layout and format, or a Checkpoint of a catalog.
        b: The other one.
        step_a: The step of ``a``; None: the newest that can be opened.
        step_b: The same for ``b``.
        strategy_a: Strategy file or folder with which ``a`` was saved, if mindformers wrote it on
            several ranks.
        strategy_b: The same for ``b``.
        tensors: Only tensors whose names match this pattern (as of ``fnmatch``), such as
            "layers.0.*".
        tolerance: Accepted differences of values; 0: values must be equal, bits need not. None:
            bits must be equal.
        progress: Receives the numbers of bytes of each side to compare, and of bytes compared.

    Returns:
        A Comparison.

    Raises:
        ConfigError: A path is a strategy, or no tensor matches.
        MindResumeError: As for ``Checkpoint.tensors``.
    """
    for subject in (a, b):
        if not isinstance(subject, Checkpoint) and is_strategy(
            PosixStorage(), path := existing(subject)
        ):
            raise ConfigError(
                f"{path} is a strategy, which has no tensors to compare; `mindresume inspect` "
                "shows it"
            )
    with ExitStack() as stack:
        sources = (
            stack.enter_context(opened(a, step_a, strategy_a)),
            stack.enter_context(opened(b, step_b, strategy_b)),
        )
        if sources[0].is_iteration != sources[1].is_iteration:
            # counters are tensors in one, and in common.json of the other
            sources = with_counters(sources[0]), with_counters(sources[1])
        mine, other = (source.weights for source in sources)
        for weights in (mine, other):
            check_replicas(weights, read=True)
        names = [
            name
            for name in dict.fromkeys((*mine.tensors, *other.tensors))
            if tensors is None or fnmatchcase(name, tensors)
        ]
        if tensors is not None and not names:
            raise ConfigError(f"no tensor of {a} or {b} matches {tensors!r}")
        compared = [
            mine.tensors[name].nbytes for name in names if _kind((mine, other), name) == VALUES
        ]
        progress.expect(sum(compared))
        found = differences(mine, other, names, progress)
    first, second = (
        ComparedCheckpoint(
            source.what,
            source.state.step if source.state else None,
            len(source.weights.tensors),
            source.weights.world_size if source.candidate else None,
            refused_of(source),
            source.notes,
        )
        for source in sources
    )
    return Comparison(
        first,
        second,
        not found,
        all(row.within(tolerance) for row in found),
        tolerance,
        len(names),
        len(compared),
        sum(compared),
        tuple(found),
    )


def differences(
    a: CheckpointView,
    b: CheckpointView,
    names: Collection[str],
    progress: Progress,
) -> list[TensorDifference]:
    """Returns how these tensors differ, in the order of ``Comparison.differences``. Whole tensors
    are compared chunk by chunk, in bounded memory; a slice that several ranks hold is read from one
    of them.

    Args:
        progress: receives the numbers of bytes of each side that were compared.
    Raises:
        CorruptFileError, LoadError, OSError: a tensor cannot be read.
    """
    files = OpenFiles(a.storage), OpenFiles(b.storage)
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            rows = [*pool.map(partial(_difference, (a, b), files, progress), names)]
    finally:
        for opened in files:
            opened.close()
    return sorted(filter(None, rows), key=_order)


def _order(row: TensorDifference) -> tuple[bool, float, str]:
    return row.kind == VALUES, -(row.largest_absolute or 0), row.name


def _kind(sides: Sequence[CheckpointView], name: str) -> str:
    """Returns in what the tensor can differ: VALUES, which then have to be compared, or what
    differs already."""
    a, b = (weights.tensors.get(name) for weights in sides)
    if a is None or b is None:
        return ONLY_B if a is None else ONLY_A
    if a.shape != b.shape:
        return SHAPE
    return VALUES if a.dtype == b.dtype else DTYPE


def _difference(
    sides: Sequence[CheckpointView],
    files: Sequence[OpenFiles],
    progress: Progress,
    name: str,
) -> TensorDifference | None:
    """Returns the difference of one tensor, which is read if only values can differ; None if it is
    alike on both sides."""
    kind = _kind(sides, name)
    form_a, form_b = (_form(weights.tensors.get(name)) for weights in sides)
    if kind != VALUES:
        return TensorDifference(name, kind, form_a, form_b)
    shape, dtype = sides[0].tensors[name].shape, sides[0].tensors[name].dtype
    bits, numbers = bits_dtype(dtype), DTYPES["uint8" if dtype == "bool" else dtype]
    size = elements(whole(shape))
    most = max(TILE // bits.itemsize, 1)
    room = min(most, size)
    buffers, staging = np.empty((2, room), bits), np.empty(room * bits.itemsize, np.uint8)
    differing = bits_only = 0
    absolute, relative = 0 if numbers.kind in "iu" else 0.0, 0.0
    index: tuple[int, ...] = ()
    values: tuple[float, float] | None = None
    for chunk in chunks(whole(shape), most):
        both = buffers[:, : elements(chunk)]
        for weights, source, flat in zip(sides, files, both, strict=True):
            gather(weights, source, name, chunk, flat.reshape(shape_of(chunk)), staging)
        for start in range(0, elements(chunk), PORTION):
            a, b = both[:, start : start + PORTION]
            at = np.flatnonzero(a != b)
            if not at.size:
                continue
            a, b = a[at].view(numbers), b[at].view(numbers)
            if not differing:
                inner = np.unravel_index(start + int(at[0]), shape_of(chunk)) if chunk else ()
                index = tuple(low + int(i) for (low, _), i in zip(chunk, inner, strict=True))
                values = a[0].item(), b[0].item()
            distances, ratios = _distances(a, b)
            differing += at.size
            bits_only += int(np.count_nonzero(distances == 0))
            absolute = max(absolute, distances.max().item())
            relative = max(relative, ratios.max().item())
        progress.advance(elements(chunk) * bits.itemsize)
    if not differing:
        return None
    return TensorDifference(
        name, kind, form_a, form_b, size, differing, bits_only, absolute, relative, index, values
    )


def _form(tensor: Tensor | None) -> TensorForm | None:
    return TensorForm(tensor.dtype, tensor.shape) if tensor else None


def _distances(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns absolute differences, exact for integers (uint64), else in float64, and relative to
    the larger magnitude. Both are 0 for equal values and for two NaN, inf for a number and NaN, or
    a finite and an infinite one."""
    if a.dtype.kind in "iu":
        low, high = np.minimum(a, b), np.maximum(a, b)
        exact = high.astype(np.uint64) - low.astype(
            np.uint64
        )  # modulo 2**64, so right for signed numbers too
        scale = np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64)))
        return exact, np.divide(exact, scale, out=np.zeros_like(scale), where=exact != 0)
    with np.errstate(all="ignore"):  # inf - inf, NaN that signals
        x, y = a.astype(np.float64), b.astype(np.float64)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        absolute = np.abs(x - y)
        relative = absolute / np.maximum(np.abs(x), np.abs(y))
    for found in (absolute, relative):
        found[np.isnan(found)] = np.inf
        found[same] = 0
    return absolute, relative
