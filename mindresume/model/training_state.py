"""Defines the training state: what a resume needs besides the tensors and the random state, and the arithmetic of steps and
epochs.

Everywhere, ``step`` is the absolute optimizer step since the training began, across all resumes. Names and counters of files
depend on it alone, so a resume in the middle of an epoch can neither restart nor reuse them.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeGuard

from mindresume.errors import RecordError
from mindresume.model.data_position import DataPosition
from mindresume.typed import MAX_COUNT

MAX_TEXT = 4096             # characters: a path
Scalar = str | bool | int | float | None
_COUNTS = (("step", 0), ("steps_per_epoch", 1), ("global_step", -1))                    # required fields and their minimum
_OPTIONAL_COUNTS = (("global_batch_size", 1), ("sink_size", 1), ("dataset_size", 1), ("health", 0),
                    ("consumed", 0))                                                    # null is allowed


@dataclass(frozen=True)
class TrainingState:
    """State of the training after ``step`` steps.

    Attributes:
        step: absolute optimizer step.
        steps_per_epoch: MindSpore's ``batch_num``: steps in one pass over the data; in sink mode the sink size (an "epoch" is
            then one sink).
        global_step: the optimizer's own counter; may lag behind ``step`` after skipped overflow steps. FusedAdamW counts from -1.
        global_batch_size: samples per step over all ranks.
        loss_scale: None if loss scaling is off.
        sink_size: steps in a sink; None without sink mode.
        dataset_size: steps in one pass over the data, in both modes; None if unknown.
        metrics: (name, finite value) pairs measured at the save: the loss of the step, and what the user reported.
        health: 0 healthy, 1 not (``ckpt_status`` of mindformers' health monitor), None unknown.
        consumed: samples that the training has read, over all data sets and resumes; None if unknown.
        data: position in the data set; None if unknown.
        arrangement: (key, value) pairs: how the network orders the elements within its tensors, see
            ``mindformers/adapter.py``. Empty if unknown.
        trainer: (name, value) pairs of what else the trainer counts, each a JSON scalar; see
            ``mindformers/pynative/trainer_state.py``.
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
    arrangement: tuple[tuple[str, bool], ...] = ()
    trainer: tuple[tuple[str, Scalar], ...] = ()

    @property
    def epoch(self) -> int:
        """Returns the current epoch, from 1; 0 before the first step. In sink mode the number of completed sinks (document 003:
        total steps / sink size)."""
        return (self.step - 1) // self.steps_per_epoch + 1 if self.step else 0

    @property
    def step_in_epoch(self) -> int:
        """Returns the step within the epoch, from 1, 0 before the first step; in sink mode always the sink size."""
        return (self.step - 1) % self.steps_per_epoch + 1 if self.step else 0

    def to_json(self) -> dict[str, Any]:
        value = {**asdict(self), "metrics": dict(self.metrics), "epoch": self.epoch, "step_in_epoch": self.step_in_epoch,
                 "data": self.data and self.data.to_json()}
        for name in ("arrangement", "trainer"):         # left out if empty
            rows = dict(value.pop(name))
            value.update({name: rows} if rows else {})
        return value

    @classmethod
    def from_json(cls, value: Any) -> TrainingState:
        """Reads the result of ``to_json``; ignores unknown fields. Raises RecordError if a required field is missing or a
        value is impossible."""
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
        for name, (is_valid, expected) in _OBJECTS.items():
            rows = known.get(name, {})
            if rows is None and name != "metrics":
                rows = {}
            if not isinstance(rows, dict) or not all(map(is_valid, rows.values())):
                raise RecordError(f"training state: {name} is {rows!r}"[:200] + f", expected an object of {expected}")
            known[name] = tuple((key, float(row) if name == "metrics" else row) for key, row in rows.items())
        data = known.get("data")
        return cls(**{**known, "data": None if data is None else DataPosition.from_json(data)})


def is_count(value: Any, least: int = 0, most: int = MAX_COUNT) -> TypeGuard[int]:
    """Returns whether a JSON value is an integer (not true, not 2.0) from ``least`` to ``most``."""
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> TypeGuard[int | float]:
    """Returns whether a JSON value is a number (not true) that a float can hold: neither NaN nor infinite, nor 400 digits
    long."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_scalar(value: Any) -> bool:
    """Returns whether ``value`` is what ``TrainingState.trainer`` may hold: None, a flag, a number or a short text."""
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return value is None or _is_flag(value) or is_number(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_OBJECTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "metrics": (is_number, "finite numbers"), "arrangement": (_is_flag, "true and false"),
    "trainer": (is_scalar, "numbers, texts, true, false and null")}     # pairs in memory, JSON objects in a file


def crosses_multiple(before: int, now: int, interval: int) -> bool:
    """Returns whether a multiple of ``interval`` lies in (before, now]. The saving grid is absolute, also after a resume.

    In sink mode, steps advance by the sink size; the first step at or after a multiple saves.
    """
    return now // interval > before // interval


# Parameters that exist only within a step or a request: they are not saved, and may be missing
# (mindformers core/callback/callback.py, CheckpointMonitor.filter_list).
TRANSIENT = ("accu_grads", "fi_parameter", "zeros_k_pe", "zeros_k_nope", "zeros_value_states", "_cache",
             "_device_local_norm", "_device_local_loss", "expert_load", "max_logits_val")


def is_transient(name: str) -> bool:
    """Returns whether a parameter is not part of the saved state."""
    return any(part in name for part in TRANSIENT)


# A network of mindformers 1.8.0 has the state of each dropout as parameters; later releases have it as constants of the graph.
# Both follow from the seed when the network is built (mindformers parallel_core/training_graph/transformer/dropout.py).
DROPOUT_STATE = ("dropout.seed", "dropout.offset")
# Parameters through which a step only hands numbers to the log. Which exist depends on the release (indexer_loss: since 1.9.0)
# and on print_separate_loss (mindformers wrapper/wrapper.py, parameter_register).
LOGGED = frozenset(("lm_loss", "aux_loss", "mtp_loss", "indexer_loss", "current_default_lr", "current_grouped_lr"))


def may_be_absent(name: str) -> bool:
    """Returns whether a parameter may keep its initial value if the checkpoint lacks it; else it is loaded."""
    return is_transient(name) or name in LOGGED or name.endswith(DROPOUT_STATE)
