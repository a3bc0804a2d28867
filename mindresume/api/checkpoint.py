"""Reads one saved step: its state, its tensors in global shape, and the bytes of any region of
them; opens the checkpoint that a caller names, by a path or as a ``Checkpoint`` of a catalog; and
describes tensors without reading them: dtype, shape, layout, and which ranks store which part.

with mindresume.open("output/checkpoint")[500] as checkpoint:  # held until the end of the block
    checkpoint.state.epoch, checkpoint.tensors["embedding.weight"].shape
    checkpoint.read("embedding.weight", region=(slice(0, 8), slice(None)))
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from mindresume.api.results import CheckpointInfo, Problem, Result, info_of, problem_of
from mindresume.errors import ConfigError, CorruptFileError, UnreadableFileError
from mindresume.formats import CheckpointDir, Refusal
from mindresume.formats.rank_folders import parse_name
from mindresume.formats.scan import ROOT, kind_of, locate
from mindresume.formats.strategy import Strategy
from mindresume.model.layout import Region, TensorLayout, held, shape_of, whole
from mindresume.model.training_state import TrainingState
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.open_checkpoint import (
    OpenCheckpoint,
    ReadHold,
    open_candidate,
    open_checkpoint,
    open_consolidated,
    state_of,
)
from mindresume.resume.candidates import CheckpointStatus
from mindresume.resume.verifier import Verifier
from mindresume.storage import Storage, parallel
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files.header import DTYPES
from mindresume.typed import json_value

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Checkpoint:
    """Gives access to one saved step of a catalog. ``Catalog`` returns it; only its listing is read
    until more is needed.

    A job that saves into the same folder removes old checkpoints. So a checkpoint is *held*: a
    small file in the folder of records, as the command line and a loading job write it, keeps it
    from being removed. The hold begins when its tensors are first needed, or with a ``with`` block;
    it ends with ``release()``, with the block, or when Python deletes this object. If nothing can
    be written, or after ``mindresume.open(..., hold=False)``, it is read without a hold; in the
    first case ``notes`` says so.
    """

    def __init__(
        self,
        directory: CheckpointDir,
        status: CheckpointStatus,
        strategy: str | None,
        hold: bool,
        consolidated_path: str,
    ):
        self._directory = directory
        self._status, self._candidate = status, status.candidate
        self._consolidated_path = consolidated_path
        self._strategy = strategy
        self._holds = hold
        self._notes: tuple[str, ...] = ()
        self._hold = ReadHold()
        weakref.finalize(self, self._hold.close)

    def __repr__(self) -> str:
        state = self._status.state
        return f"<mindresume.Checkpoint step {self.step} in {self._directory.root}, {state}>"

    @cached_property
    def info(self) -> CheckpointInfo:
        """The listing: step, ranks, files, size, problems. Sizes are those of its first use."""
        return info_of(self._directory, self._status)

    def to_json(self) -> dict[str, Any]:
        """Returns the listing, as ``CheckpointInfo.to_json``."""
        return self.info.to_json()

    @property
    def step(self) -> int | None:
        """The absolute optimizer step; None for weights without a step."""
        return self._candidate.step

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed or ignored when its tensors were opened, as sentences."""
        return (*self._hold.notes, *self._notes)

    @cached_property
    def state(self) -> TrainingState | None:
        """The training state: step, steps per epoch, samples consumed, loss scale, position in the
        data, metrics. None for weights alone.

        It comes from the records of mindresume, or from the counters in the files of mindformers
        (MindSpore's ``step_num``, ``epoch_num``, ``global_step``, ``loss_scale``,
        ``global_batch_size``; ``common.json`` in Checkpoint 2.0).

        Raises:
            CorruptFileError: The file with the counters is missing or damaged.
            MindResumeError: As for ``tensors``, for consolidated weights.
        """
        if self._candidate.state is not None:
            return self._candidate.state
        if self._consolidated_path or self._candidate.first is None:
            return self.source().state
        verifier = Verifier(self._directory, self._candidate, full=False)
        proof = verifier.verify(min(self._candidate.files))
        if isinstance(proof, Refusal):
            kind = UnreadableFileError if proof.is_unreadable else CorruptFileError
            raise kind(self._directory.path(proof.file or ""), str(proof))
        return state_of(proof.scalars, parse_name(os.path.basename(self._candidate.first.path)))

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """{name: TensorInfo} of every tensor, including the optimizer state and the counters;
        shapes are global, in elements.

        Headers and records of all ranks are read and checked, contents are not.

        Raises:
            MissingCheckpointError: It was removed meanwhile.
            NoUsableCheckpointError: Its save never completed, or its records contradict each other.
            CorruptFileError: A file is missing, truncated, or differs from its record.
            StrategyError: The layouts are unknown: mindformers wrote it on several ranks, and there
                is no folder ``strategy`` beside it. Give ``strategy`` to ``mindresume.open``.
            LoadError: A part of a tensor is in no file.
        """
        return tensors_of(self.source().weights)

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> NDArray[Any]:
        """Reads a tensor, or a region of it, from the files that hold its parts; reads no other
        bytes.

        Args:
            name: Name of the tensor, one of ``tensors``.
            region: A slice of each dimension, in elements of the global shape, with step 1; omitted
                last dimensions are whole. None: the whole tensor.

        Returns:
            An array with the shape of the region, in the dtype of the file; bfloat16 is
            ``ml_dtypes.bfloat16``. A piece that lies
                entirely in the region is compared with its recorded checksum.

        Raises:
            KeyError: There is no such tensor.
            ValueError: ``region`` has too many dimensions, or a step.
            CorruptFileError: A byte differs from what was written, or a file is truncated.
            MindResumeError: As for ``tensors``.
        """
        from mindresume.reshard.region_load import read_regions

        weights = self.source().weights
        if name not in weights.tensors:
            raise KeyError(
                f"{weights.name}, step {self.step}: there is no tensor {name!r}; "
                f"Checkpoint.tensors has the names of all {len(weights.tensors)}"
            )
        wanted = region_of(weights.tensors[name].shape, region)
        return read_regions(weights, {name: wanted})[name]

    # ---- the hold --------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keeps jobs and ``prune`` from removing it until ``release()``. Does nothing if it is held
        already, or if no job removes it (mindformers wrote it, or it is consolidated weights).

        Raises:
            MissingCheckpointError: It was removed already.
        """
        if self._holds and not self.is_held:
            self._hold.take(self._directory, self._candidate)

    @property
    def is_held(self) -> bool:
        """Whether this object holds it now."""
        return self._hold.is_taken

    def release(self) -> None:
        """Ends the hold, so that jobs and ``prune`` may remove it. The next read holds it again."""
        self._hold.close()

    def __enter__(self) -> Checkpoint:
        self.hold()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    # ---- for the other modules of this package ---------------------------------------------------

    def source(self) -> OpenCheckpoint:
        """Returns it as an OpenCheckpoint, opened once, and held."""
        self.hold()
        return self._source

    @cached_property
    def _source(self) -> OpenCheckpoint:
        if self._consolidated_path:
            source = open_consolidated(self._directory.storage, self._consolidated_path)
        else:
            source = open_candidate(self._directory, self._candidate, self._strategy)
        self._notes = source.notes
        return source


def region_of(shape: tuple[int, ...], region: tuple[slice, ...] | None) -> Region:
    """Returns ``region`` of a tensor of ``shape`` as (start, stop) of each dimension. Raises
    ValueError if it is invalid."""
    if region is None:
        return whole(shape)
    parts = region if isinstance(region, tuple) else (region,)
    if len(parts) > len(shape) or any(not isinstance(part, slice) for part in parts):
        raise ValueError(
            f"region {region!r} of a tensor of shape {shape}: expected a tuple of at most "
            f"{len(shape)} slices"
        )
    found = []
    for size, part in zip(shape, (*parts, *[slice(None)] * (len(shape) - len(parts))), strict=True):
        start, stop, step = part.indices(size)
        if step != 1:
            raise ValueError(
                f"region {region!r}: {part} has a step; expected slices of neighbouring elements"
            )
        found.append((start, max(start, stop)))
    return tuple(found)


# ---- a checkpoint that a caller names: by a path, or as a ``Checkpoint`` of a catalog ------------

CheckpointLike: TypeAlias = "str | os.PathLike[str] | Checkpoint"


@contextmanager
def opened(
    subject: CheckpointLike,
    step: int | None = None,
    strategy: str | os.PathLike[str] | None = None,
    hold: bool = True,
) -> Iterator[OpenCheckpoint]:
    """Opens a checkpoint, and holds it until the end of the block.

    Args:
        subject: A path as for ``mindresume.open``, or a Checkpoint, which has its step and
            strategy.
        step: The step; None: the newest that can be opened.
        strategy: Strategy file or folder with which mindformers saved.
        hold: False: it is not held, and nothing is written.

    Raises:
        ConfigError: ``step`` or ``strategy`` is given beside a Checkpoint.
        FileNotFoundError: The path does not exist.
        MindResumeError: As for ``Checkpoint.tensors``.
    """
    if isinstance(subject, Checkpoint):
        if step is not None or strategy is not None:
            raise ConfigError(
                f"{subject!r} has a step and a strategy; leave out the arguments step and strategy"
            )
        yield subject.source()
        return
    storage, path = PosixStorage(), existing(subject)
    path, given = locate(storage, path), None if strategy is None else os.fspath(strategy)
    with closing(ReadHold()) as held:
        source = open_checkpoint(storage, path, step, given, held if hold else None)
        yield replace(source, notes=(*source.notes, *held.notes))


def refused_of(source: OpenCheckpoint) -> tuple[Problem, ...]:
    """Returns the newer checkpoints that could not be used."""
    return tuple(problem_of(source.folder or "", refusal) for refusal in source.refused)


def existing(path: str | os.PathLike[str]) -> str:
    """Returns ``path`` as text. Raises FileNotFoundError if it does not exist."""
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist")
    return path


def is_strategy(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` is a strategy, or a folder of strategies. Weight files may end in
    .ckpt too, but their first byte differs."""
    status = storage.status(path)
    names = [path]
    if status is not None and status.is_folder:
        names = sorted(storage.list(path))
        if kind_of(storage, path) == ROOT or any(name.endswith(".safetensors") for name in names):
            return False
        names = [os.path.join(path, name) for name in names if not name.startswith(".")]
    for name in sorted(names, key=lambda name: name.endswith(".json")):
        if name.endswith(".ckpt"):
            with storage.open(name) as file:
                first = file.read(1)
            return (
                first in (b"\x08", b"\x12")
                or first != b"\n"
                and "strategy" in os.path.basename(name)
            )
        if name.endswith(".json"):
            return True
    return False


def check_part(part: tuple[int, int]) -> None:
    """Raises ConfigError unless ``part`` is the number, from 1, of one of so many parts."""
    number, count = part
    if not 1 <= number <= count:
        raise ConfigError(
            f"part is {number} of {count}; expected a number from 1 on, and at least as many parts"
        )


# ---- tensors, without their contents -------------------------------------------------------------


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
