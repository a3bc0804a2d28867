"""Shows what a checkpoint or a strategy holds: every tensor in its global shape, how it is cut, and
which rank stores what.

found = mindresume.inspect("output/checkpoint", tensors="layers.0.*")
[(tensor.name, tensor.shape, tensor.cut) for tensor in found.tensors]
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

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
from mindresume.formats.strategy import Strategy, read_strategy
from mindresume.formatting import ranks_count
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.storage import parallel
from mindresume.storage.posix import PosixStorage

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
