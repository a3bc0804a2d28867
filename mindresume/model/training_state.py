"""Where a training stands: everything a resume needs beside the tensors, and the arithmetic of steps and epochs.

``step`` is everywhere the absolute optimizer step since the training began, over all resumes. Names and counters of files
follow from it alone, so a resume in the middle of an epoch cannot restart or reuse them.
"""
from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from mindresume.errors import RecordError
from mindresume.model.data_position import DataPosition

MAX_COUNT = 2**63 - 1       # of steps, samples, bytes: what a file system, MindSpore and a message can hold
_COUNTS = (("step", 0), ("steps_per_epoch", 1), ("global_step", 0))                     # needed, and their least value
_OPTIONAL_COUNTS = (("global_batch_size", 1), ("sink_size", 1), ("dataset_size", 1), ("health", 0),
                    ("consumed", 0))                                                    # or null


@dataclass(frozen=True)
class TrainingState:
    """State of the training after ``step`` steps.

    ``steps_per_epoch``: MindSpore's ``batch_num``: steps of one pass over the data, in sink mode the sink size (an "epoch"
    is then one sink). ``dataset_size``: steps of one pass over the data in both modes, None if not known.
    ``global_step``: the optimizer's own counter (it may lag behind ``step`` after skipped overflow steps).
    ``global_batch_size``: samples per step over all ranks. ``loss_scale`` None: not used.
    ``metrics``: (name, finite number) of what was measured when it was saved: the loss of the step, what the user reported.
    ``health``: 0 healthy, 1 not (``ckpt_status`` of mindformers' health monitor), None not known.
    ``consumed``: samples that the training has seen, over all data sets and resumes, None not known. ``data``: where it stands in
    its data set, None not known.
    """
    step: int
    steps_per_epoch: int
    global_step: int
    global_batch_size: int | None = None
    loss_scale: float | None = None
    sink_size: int | None = None
    dataset_size: int | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    health: int | None = None
    consumed: int | None = None
    data: DataPosition | None = None

    @property
    def epoch(self) -> int:
        """Counts from 1; in sink mode the number of sinks done (document 003: total steps / sink size)."""
        return epoch_of(self.step, self.steps_per_epoch)

    @property
    def step_in_epoch(self) -> int:
        """Counts from 1; in sink mode always the sink size."""
        return step_in_epoch(self.step, self.steps_per_epoch)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "metrics": dict(self.metrics), "epoch": self.epoch, "step_in_epoch": self.step_in_epoch,
                "data": self.data and self.data.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> TrainingState:
        """Fields it does not know are ignored; RecordError if one it needs is missing, or one cannot be."""
        if not isinstance(value, dict):
            raise RecordError(f"training state: expected an object, found {type(value).__name__}")
        known = {field.name: value[field.name] for field in fields(cls) if field.name in value}
        given = tuple(row for row in _OPTIONAL_COUNTS if known.get(row[0]) is not None)
        for name, least in _COUNTS + given:
            if not is_count(known.get(name), least):
                raise RecordError(f"training state: {name} is {known.get(name)!r}"[:200] + f", expected a whole number from "
                                  f"{least} to {MAX_COUNT}")
        if known.get("loss_scale") is not None and not is_number(known["loss_scale"]):
            raise RecordError(f"training state: loss_scale is {known['loss_scale']!r}"[:200] + ", expected a finite number")
        data = known.get("data")
        return cls(**{**known, "metrics": _metrics(known.get("metrics", {})),
                      "data": None if data is None else DataPosition.from_json(data)})


def _metrics(value: Any) -> tuple[tuple[str, float], ...]:
    """Of a JSON object {name: finite number}; RecordError for anything else."""
    if not isinstance(value, dict):
        raise RecordError(f"training state: metrics is {value!r}"[:200] + ", expected an object of numbers")
    for name, number in value.items():
        if not is_number(number):
            raise RecordError(f"training state: metric {name} is {number!r}"[:200] + ", expected a finite number")
    return tuple((name, float(number)) for name, number in value.items())


def is_count(value: Any, least: int = 0, most: int = MAX_COUNT) -> bool:
    """Whether a value of JSON is a whole number (true and 2.0 are none) from ``least`` to ``most``."""
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number (true is none) that a float can hold: not NaN, not infinite, no 400 digits."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


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


# Parameters that live only within a step or a request: never saved, and missing ones are no error
# (mindformers core/callback/callback.py, CheckpointMonitor.filter_list).
TRANSIENT = ("accu_grads", "fi_parameter", "zeros_k_pe", "zeros_k_nope", "zeros_value_states", "_cache",
             "_device_local_norm", "_device_local_loss", "expert_load", "max_logits_val")


def is_transient(name: str) -> bool:
    return any(part in name for part in TRANSIENT)
