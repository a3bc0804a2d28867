"""Where a training stands: everything a resume needs beside the tensors, and the arithmetic of steps and epochs.

``step`` is everywhere the absolute optimizer step since the training began, over all resumes. Names and counters of files
follow from it alone, so a resume in the middle of an epoch cannot restart or reuse them.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from mindresume.errors import RecordError


@dataclass(frozen=True)
class TrainingState:
    """State of the training after ``step`` steps.

    ``steps_per_epoch``: MindSpore's ``batch_num``: steps of one pass over the data, in sink mode the sink size (an "epoch"
    is then one sink). ``dataset_size``: steps of one pass over the data in both modes, None if not known.
    ``global_step``: the optimizer's own counter (it may lag behind ``step`` after skipped overflow steps).
    ``global_batch_size``: samples per step over all ranks. ``loss_scale`` None: not used.
    """
    step: int
    steps_per_epoch: int
    global_step: int
    global_batch_size: int | None = None
    loss_scale: float | None = None
    sink_size: int | None = None
    dataset_size: int | None = None

    @property
    def epoch(self) -> int:
        """Counts from 1; in sink mode the number of sinks done (document 003: total steps / sink size)."""
        return epoch_of(self.step, self.steps_per_epoch)

    @property
    def step_in_epoch(self) -> int:
        """Counts from 1; in sink mode always the sink size."""
        return step_in_epoch(self.step, self.steps_per_epoch)

    @property
    def samples(self) -> int | None:
        """Samples consumed by the whole job; None if the global batch size is not known."""
        return None if self.global_batch_size is None else self.step * self.global_batch_size

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "epoch": self.epoch, "step_in_epoch": self.step_in_epoch}

    @classmethod
    def from_json(cls, value: Any) -> TrainingState:
        """Fields it does not know are ignored; RecordError if one it needs is missing."""
        if not isinstance(value, dict):
            raise RecordError(f"training state: expected an object, found {type(value).__name__}")
        known = {field.name: value[field.name] for field in fields(cls) if field.name in value}
        for name, least in (("step", 0), ("steps_per_epoch", 1), ("global_step", 0)):
            if not isinstance(known.get(name), int) or known[name] < least:
                raise RecordError(f"training state: {name} is {known.get(name)!r}, expected a count of at least {least}")
        return cls(**known)


def epoch_of(step: int, steps_per_epoch: int) -> int:
    """Epoch that contains absolute ``step`` (both count from 1); 0 before the first step."""
    return (step - 1) // steps_per_epoch + 1 if step else 0


def step_in_epoch(step: int, steps_per_epoch: int) -> int:
    """Number of absolute ``step`` within its epoch, from 1; 0 before the first step."""
    return (step - 1) % steps_per_epoch + 1 if step else 0


def crosses_multiple(before: int, now: int, interval: int) -> bool:
    """Whether a multiple of ``interval`` lies in (before, now]: the saving grid is absolute, also after a resume.

    In sink mode steps arrive in jumps; the first arrival at or behind a multiple is the one that saves.
    """
    return now // interval > before // interval
