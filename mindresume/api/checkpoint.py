"""Reads one saved step: its state, its tensors in global shape, and the bytes of any region of
them.

with mindresume.open("output/checkpoint")[500] as checkpoint:  # held until the end of the block
    checkpoint.state.epoch, checkpoint.tensors["embedding.weight"].shape
    checkpoint.read("embedding.weight", region=(slice(0, 8), slice(None)))
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mindresume.api.results import CheckpointInfo
from mindresume.api.tensors import TensorInfo, tensors_of
from mindresume.coordination.lease import Lease
from mindresume.errors import CorruptFileError, MissingCheckpointError
from mindresume.events.emitter import texts_into
from mindresume.formats import Candidate, CheckpointDir, Refusal
from mindresume.formats.rank_folders import parse_name
from mindresume.model.training_state import TrainingState
from mindresume.reshard.geometry import Region, whole
from mindresume.reshard.open_checkpoint import (
    OpenCheckpoint,
    hold_candidate,
    open_candidate,
    open_consolidated,
    state_of,
)
from mindresume.resume.verifier import Verifier

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

    Attributes:
        info: The listing: step, ranks, files, size, problems.
    """

    def __init__(
        self,
        directory: CheckpointDir,
        info: CheckpointInfo,
        candidate: Candidate,
        strategy: str | None = None,
        hold: bool = True,
        consolidated_path: str = "",
    ):
        self.info, self._consolidated_path = info, consolidated_path
        self._directory, self._candidate, self._strategy, self._holds = (
            directory,
            candidate,
            strategy,
            hold,
        )
        self._notes: list[str] = []
        self._leases: list[Lease] = []
        self._finalizer = weakref.finalize(self, _release, self._leases)

    def __repr__(self) -> str:
        return (
            f"<mindresume.Checkpoint step {self.step} in {self._directory.root}, {self.info.state}>"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the listing, as ``CheckpointInfo.to_json``."""
        return self.info.to_json()

    @property
    def step(self) -> int | None:
        """The absolute optimizer step; None for weights without a step."""
        return self.info.step

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed or ignored when its tensors were opened, as sentences."""
        return tuple(self._notes)

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
            raise CorruptFileError(self._directory.path(proof.file or ""), str(proof))
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
                "Checkpoint.tensors has the names of "
                f"all {len(weights.tensors)}"
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
        if self._holds and not self._leases:
            lease = hold_candidate(self._directory, self._candidate, texts_into(self._notes))
            if lease is not None:
                self._leases.append(lease)

    @property
    def is_held(self) -> bool:
        """Whether this object holds it now."""
        return bool(self._leases)

    def release(self) -> None:
        """Ends the hold, so that jobs and ``prune`` may remove it. The next read holds it again."""
        _release(self._leases)

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
            try:
                source = open_candidate(self._directory, self._candidate, self._strategy)
            except Exception as error:
                directory, folder = self._directory, self._candidate.commit_dir
                if folder and directory.storage.status(folder) is None:
                    raise MissingCheckpointError(
                        f"step {self.step} of {directory.root} was removed before it was read"
                    ) from error
                raise
        self._notes += source.notes
        return source


def _release(leases: list[Lease]) -> None:
    while leases:
        leases.pop().release()


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
