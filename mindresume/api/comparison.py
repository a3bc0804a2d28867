"""Compares two checkpoints tensor by tensor, bit by bit, in any layouts and formats.

found = mindresume.compare("output/checkpoint", "merged")
found.equal, [difference.name for difference in found.differences]
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mindresume.api.checkpoint import Checkpoint
from mindresume.api.results import Problem, Result
from mindresume.api.sources import CheckpointLike, existing, is_strategy, opened, refused_of
from mindresume.errors import ConfigError
from mindresume.events.progress import SILENT, Progress
from mindresume.reshard import compare as bits
from mindresume.reshard.checkpoint_view import Tensor
from mindresume.reshard.compare import DTYPE, ONLY_A, ONLY_B, SHAPE, VALUES
from mindresume.reshard.conversion_plan import with_counters
from mindresume.reshard.direct_engine import Traffic
from mindresume.reshard.geometry import elements, whole
from mindresume.reshard.tensor_checks import check_replicas
from mindresume.storage.posix import PosixStorage

__all__ = [
    "DTYPE",
    "ONLY_A",
    "ONLY_B",
    "SHAPE",
    "VALUES",
    "ComparedCheckpoint",
    "Comparison",
    "TensorDifference",
    "TensorForm",
    "compare",
]


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
        # counters are tensors in one, and in common.json of the other
        if sources[0].is_iteration != sources[1].is_iteration:
            sources = with_counters(sources[0]), with_counters(sources[1])
        mine, other = (source.weights for source in sources)
        for weights in (mine, other):
            check_replicas(weights, read=True)
        names = {
            name
            for name in (*mine.tensors, *other.tensors)
            if tensors is None or fnmatchcase(name, tensors)
        }
        if tensors is not None and not names:
            raise ConfigError(f"no tensor of {a} or {b} matches {tensors!r}")
        compared, size = bits.comparable(mine, other, names)
        progress.expect(size)
        differences = bits.compare(mine, other, names, traffic=Traffic(progress=progress.advance))
        found = tuple(map(_difference, bits.by_size(differences)))
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
        compared,
        size,
        found,
    )


def _difference(found: bits.Difference) -> TensorDifference:
    row = TensorDifference(found.name, found.kind, _form(found.a), _form(found.b))
    if found.kind != VALUES or found.a is None:
        return row
    return TensorDifference(
        found.name,
        found.kind,
        row.a,
        row.b,
        elements(whole(found.a.shape)),
        found.count,
        found.bits_only,
        found.absolute,
        found.relative,
        found.first,
        found.values,
    )


def _form(tensor: Tensor | None) -> TensorForm | None:
    return TensorForm(tensor.dtype, tensor.shape) if tensor else None
