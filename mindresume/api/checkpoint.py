"""Reads one saved step: its state, its tensors in global shape, and the bytes of any region of
them; opens the checkpoint that a caller names, by a path or as a ``Checkpoint`` of a catalog.

with mindresume.open("output/checkpoint")[500] as checkpoint:  # held until the end of the block
    checkpoint.state.epoch, checkpoint.tensors["embedding.weight"].shape
    checkpoint.read("embedding.weight", region=(slice(0, 8), slice(None)))
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from mindresume.api.results import CheckpointInfo, Problem, info_of, problem_of
from mindresume.api.tensors import TensorInfo, tensors_of
from mindresume.errors import ConfigError, CorruptFileError, UnreadableFileError
from mindresume.formats import CheckpointDir, Refusal
from mindresume.formats.rank_folders import parse_name
from mindresume.formats.scan import ROOT, kind_of, locate
from mindresume.model.layout import Region, whole
from mindresume.model.training_state import TrainingState
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
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
