"""Shows what a checkpoint or a strategy holds: every tensor in its global shape, how it is cut, and
which rank stores what; and compares two checkpoints tensor by tensor, bit by bit, in any layouts
and formats.

found = mindresume.inspect("output/checkpoint", tensors="layers.0.*")
[(tensor.name, tensor.shape, tensor.cut) for tensor in found.tensors]

found = mindresume.compare("output/checkpoint", "merged")
found.equal, [difference.name for difference in found.differences]
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mindresume.api.checkpoint import (
    Checkpoint,
    CheckpointLike,
    TensorInfo,
    TensorSlice,
    existing,
    is_strategy,
    opened,
    refused_of,
    slices_of,
    tensors_of,
    tensors_of_strategy,
)
from mindresume.api.results import Problem, Result
from mindresume.errors import ConfigError
from mindresume.events import SILENT, Progress
from mindresume.formats.strategy import Strategy, read_strategy
from mindresume.formatting import ranks_count
from mindresume.model.layout import chunks, elements, shape_of, whole
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor, check_replicas
from mindresume.reshard.conversion_plan import with_counters
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.reshard.range_reader import TILE, OpenFiles, bits_dtype, gather
from mindresume.reshard.region_load import WORKERS
from mindresume.storage import parallel
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files.header import DTYPES

CHECKPOINT = "checkpoint"
CONSOLIDATED = "consolidated weights"
STRATEGY = "strategy"


@dataclass(frozen=True)
class DtypeTotal(Result):
    """Holds the number of tensors of a dtype, and their bytes, each tensor counted once."""

    tensors: int
    size_bytes: int


@dataclass(frozen=True)
class InspectedJob(Result):
    """Describes which job saved a checkpoint, or is meant by a strategy.

    Attributes:
        path: Its path.
        kind: "checkpoint", "consolidated weights" or "strategy".
        source: Path, step and number of ranks, as a phrase.
        origin: "mindresume" or "mindformers"; None for consolidated weights and strategies.
        run_id: The run that saved it; None unless mindresume did.
        step: None for weights without a step, and for strategies.
        format: "safetensors" or "ckpt"; None for strategies.
        world_size: Number of ranks of the job; None for consolidated weights.
        stages: Number of pipeline stages; None if no tensor has a layout.
        stage_size: Ranks of a stage; None if no tensor has a layout.
    """

    path: str
    kind: str
    source: str
    origin: str | None = None
    run_id: str | None = None
    step: int | None = None
    format: str | None = None
    world_size: int | None = None
    stages: int | None = None
    stage_size: int | None = None


@dataclass(frozen=True)
class Inspection(InspectedJob):
    """Describes what a checkpoint or a strategy holds: the job with its attributes, and the
    tensors.

    Attributes:
        tensor_count: Number of all its tensors.
        dtypes: {dtype: number of its tensors, and their bytes}; empty for strategies.
        size_bytes: Bytes of all its tensors, each counted once; None for strategies.
        bytes_on_disk: Bytes of its weight files; None for strategies.
        files: Number of its weight files; None for strategies.
        notes: What was assumed or ignored, as sentences.
        refused: Newer checkpoints that could not be used.
        tensors: The tensors that match the pattern; all without one.
        rank: The rank that was asked for.
        slices: Which ranks store which slice of these tensors; None unless a pattern or a rank was
            given.
    """

    tensor_count: int = 0
    dtypes: Mapping[str, DtypeTotal] = field(default_factory=dict)
    size_bytes: int | None = None
    bytes_on_disk: int | None = None
    files: int | None = None
    notes: tuple[str, ...] = ()
    refused: tuple[Problem, ...] = ()
    tensors: tuple[TensorInfo, ...] = ()
    rank: int | None = None
    slices: tuple[TensorSlice, ...] | None = None


def inspect(
    subject: CheckpointLike,
    *,
    step: int | None = None,
    strategy: str | os.PathLike[str] | None = None,
    tensors: str | None = None,
    rank: int | None = None,
) -> Inspection:
    """Returns what a checkpoint or a strategy holds. It reads only headers and records, and holds
    nothing.

    Args:
        subject: Path of a checkpoint, or of a strategy file or folder; or a Checkpoint of a
            catalog.
        step: The step of a checkpoint; None: the newest that can be opened.
        strategy: Strategy file or folder with which the checkpoint was saved, if mindformers wrote
            it on several ranks.
        tensors: Only tensors whose names match this pattern (as of ``fnmatch``), and which ranks
            store which slice of them.
        rank: Only what this rank stores: its slice of each tensor.

    Returns:
        An Inspection.

    Raises:
        ConfigError: No tensor matches, there is no such rank, or an argument does not apply to a
            strategy.
        MindResumeError: As for ``Checkpoint.tensors``.
    """
    if not isinstance(subject, Checkpoint) and is_strategy(
        PosixStorage(), path := existing(subject)
    ):
        if strategy is not None or step is not None:
            raise ConfigError(
                f"{path} is a strategy; the arguments strategy and step apply to checkpoints only"
            )
        given = read_strategy(path)
        rows = tuple(tensors_of_strategy(given))
        found = Inspection(
            given.source,
            STRATEGY,
            given.source,
            world_size=given.world_size,
            stages=len(given.stages),
            stage_size=given.stage_size,
            tensor_count=len(rows),
            tensors=rows,
        )
        return _asked(found, given, tensors, rank)
    with opened(subject, step, strategy, hold=False) as source:
        return _asked(_of_checkpoint(source), source.weights, tensors, rank)


def _of_checkpoint(source: OpenCheckpoint) -> Inspection:
    """Returns the inspection of all tensors of a checkpoint."""
    weights = source.weights
    candidate = source.candidate
    storage = source.weights.storage
    rows = tuple(tensors_of(weights).values())
    stage_sizes = {row.layout.stage_size for row in rows if row.layout}
    stage_size = stage_sizes.pop() if len(stage_sizes) == 1 else None
    paths = (
        [*weights.headers]
        if candidate is None
        else [path for files in weights.files.values() for path in files]
    )
    on_disk = [
        status.size for status in parallel(storage, storage.status, paths) if status is not None
    ]
    counts, total = Counter(row.dtype for row in rows), Counter[str]()
    for row in rows:
        total[row.dtype or ""] += row.size_bytes or 0
    return Inspection(
        weights.name,
        CHECKPOINT if candidate else CONSOLIDATED,
        source.what,
        candidate.origin if candidate else None,
        candidate.run if candidate else None,
        candidate.step if candidate else source.state.step if source.state else None,
        candidate.format if candidate else weights.format if weights.headers else None,
        weights.world_size if candidate else None,
        weights.world_size // stage_size if stage_size else None,
        stage_size,
        len(rows),
        {dtype: DtypeTotal(count, total[dtype]) for dtype, count in counts.most_common() if dtype},
        total.total(),
        sum(on_disk),
        len(on_disk),
        source.notes,
        refused_of(source),
        rows,
    )


def _asked(
    found: Inspection, owner: CheckpointView | Strategy, pattern: str | None, rank: int | None
) -> Inspection:
    """Returns ``found`` with the tensors and slices that were asked for."""
    world_size = owner.world_size
    rows = tuple(row for row in found.tensors if pattern is None or fnmatchcase(row.name, pattern))
    if not rows:
        raise ConfigError(
            f"{found.path}: none of its {found.tensor_count} tensors matches {pattern!r}"
        )
    if rank is None and pattern is None:
        return found
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(
            f"{found.path}: there is no rank {rank}; it has {ranks_count(world_size)}"
        )
    if rank is not None and rows[0].file is not None:
        raise ConfigError(
            f"{found.path} holds consolidated weights, which belong to no rank; leave out the rank"
        )
    ranks = range(world_size) if rank is None else range(rank, rank + 1)
    return replace(
        found,
        tensors=rows,
        rank=rank,
        slices=tuple(part for row in rows for part in slices_of(owner, row, ranks)),
    )


# ---- the comparison of two checkpoints -----------------------------------------------------------


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
