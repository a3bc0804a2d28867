"""Defines the training state: what a resume needs besides the tensors and the random state, and the
arithmetic of steps and epochs.

Everywhere, ``step`` is the absolute optimizer step since the training began, across all resumes.
Names and counters of files depend on it alone, so a resume in the middle of an epoch can neither
restart nor reuse them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from mindresume.typed import MAX_COUNT, Count, Limits, Number, decode, is_number

MAX_TEXT = 4096  # characters: a path
Scalar = str | bool | int | float | None
Positive = Annotated[int, Limits(1, MAX_COUNT)]
GlobalStep = Annotated[int, Limits(-1, MAX_COUNT)]  # FusedAdamW counts from -1
IGNORE_KEY = "ignore_data_skip"
SKIP_KEY = "data_skip_steps"


@dataclass(frozen=True)
class DataRequest:
    """The configuration's request for the data of a resume.

    Attributes:
        ignore: start at the beginning of the data set (``ignore_data_skip``).
        skip: number of steps to skip (``data_skip_steps``); None: not set. mindformers treats 0 as
            not set, too.
    """

    ignore: bool = False
    skip: int | None = None

    def __str__(self) -> str:
        return (
            f"{IGNORE_KEY}: True"
            if self.ignore
            else f"{SKIP_KEY}: {self.skip}"
            if self.skip
            else ""
        )


@dataclass(frozen=True)
class DataPosition:
    """A position in a data set. It counts passes and samples, not steps, and therefore stays valid
    when the global batch size changes, and when the data set was replaced during the training: step
    counts then say nothing about the data.

    Attributes:
        passes: completed passes over the data set.
        samples: samples read in the current pass.
        first_epoch: epochs of the training that were completed before the first pass over this data
            set; 0 for the first data set.
        declared: how the configuration declared that this data set starts at first_epoch; empty if
            it did not.
        identity: fingerprint of the data set (resume/dataset_fingerprint.py); empty if unknown.
    """

    passes: Count
    samples: Count
    first_epoch: int = 0
    declared: str = ""
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)

    def steps(self, size: int, batch: int) -> int:
        """Returns the number of whole steps from the beginning of the data set. ``size``: steps in
        a pass; ``batch``: samples in a step."""
        return self.passes * size + min(self.samples // batch, size)

    def after(self, steps: int, size: int, batch: int) -> DataPosition:
        """Returns the position ``steps`` steps later, in a run with ``size`` steps in a pass and
        ``batch`` samples in a step."""
        passes, within = divmod(self.steps(size, batch) + steps, size)
        return replace(self, passes=passes, samples=within * batch)


def is_scalar(value: Any) -> bool:
    """Returns whether ``value`` is what ``TrainingState.trainer`` may hold: a ``Scalar``, a text of
    up to MAX_TEXT characters."""
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return value is None or isinstance(value, bool) or is_number(value)


Trainer = Mapping[
    str, Annotated[Any, Limits(accepts=is_scalar, what="a number, a text, true, false or null")]
]


@dataclass(frozen=True)
class TrainingState:
    """State of the training after ``step`` steps.

    Attributes:
        step: absolute optimizer step.
        steps_per_epoch: MindSpore's ``batch_num``: steps in one pass over the data; in sink mode
            the sink size (an "epoch" is then one sink).
        global_step: the optimizer's own counter; may lag behind ``step`` after skipped overflow
            steps. FusedAdamW counts from -1.
        global_batch_size: samples per step over all ranks.
        loss_scale: None if loss scaling is off.
        sink_size: steps in a sink; None without sink mode.
        dataset_size: steps in one pass over the data, in both modes; None if unknown.
        metrics: finite values measured at the save, by name: the loss of the step, and what the
            user reported.
        health: 0 healthy, 1 not (``ckpt_status`` of mindformers' health monitor), None unknown.
        consumed: samples that the training has read, over all data sets and resumes; None if
            unknown.
        data: position in the data set; None if unknown.
        arrangement: how the network orders the elements within its tensors, see
            ``mindformers/adapter.py``. Empty if unknown.
        trainer: what else the trainer counts, by name; see
            ``mindformers/pynative/training_run.py``.
    """

    step: Count
    steps_per_epoch: Positive
    global_step: GlobalStep
    global_batch_size: Positive | None = None
    loss_scale: Number | None = None
    sink_size: Positive | None = None
    dataset_size: Positive | None = None
    metrics: Mapping[str, Number] = field(default_factory=dict, hash=False)
    health: Count | None = None
    consumed: Count | None = None
    data: DataPosition | None = None
    arrangement: Mapping[str, bool] = field(default_factory=dict, hash=False)
    trainer: Trainer = field(default_factory=dict, hash=False)

    @property
    def epoch(self) -> int:
        """Returns the current epoch, from 1; 0 before the first step. In sink mode the number of
        completed sinks (document 003: total steps / sink size)."""
        return (self.step - 1) // self.steps_per_epoch + 1 if self.step else 0

    @property
    def step_in_epoch(self) -> int:
        """Returns the step within the epoch, from 1, 0 before the first step; in sink mode always
        the sink size."""
        return (self.step - 1) % self.steps_per_epoch + 1 if self.step else 0

    def to_json(self) -> dict[str, Any]:
        value = {
            **vars(self),
            "metrics": dict(self.metrics),
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "data": self.data and {**vars(self.data), "identity": dict(self.data.identity)},
        }
        for name in ("arrangement", "trainer"):  # left out if empty
            rows = dict(value.pop(name))
            value.update({name: rows} if rows else {})
        return value

    @classmethod
    def from_json(cls, value: Any) -> TrainingState:
        """Reads the result of ``to_json``; ignores unknown fields. Raises RecordError if a required
        field is missing or a value is impossible."""
        return decode(cls, value, "training state")


def crosses_multiple(before: int, now: int, interval: int) -> bool:
    """Returns whether a multiple of ``interval`` lies in (before, now]. The saving grid is
    absolute, also after a resume.

    In sink mode, steps advance by the sink size; the first step at or after a multiple saves.
    """
    return now // interval > before // interval


# Parameters that exist only within a step or a request: they are not saved, and may be missing
# (mindformers core/callback/callback.py, CheckpointMonitor.filter_list).
TRANSIENT = (
    "accu_grads",
    "fi_parameter",
    "zeros_k_pe",
    "zeros_k_nope",
    "zeros_value_states",
    "_cache",
    "_device_local_norm",
    "_device_local_loss",
    "expert_load",
    "max_logits_val",
)


def is_transient(name: str) -> bool:
    """Returns whether a parameter is not part of the saved state."""
    return any(part in name for part in TRANSIENT)


# A network of mindformers 1.8.0 has the state of each dropout as parameters; later releases have it
# as constants of the graph. Both follow from the seed when the network is built (mindformers
# parallel_core/training_graph/transformer/dropout.py).
DROPOUT_STATE = ("dropout.seed", "dropout.offset")
# Parameters through which a step only hands numbers to the log. Which exist depends on the release
# (indexer_loss: since 1.9.0) and on print_separate_loss (mindformers wrapper/wrapper.py,
# parameter_register).
LOGGED = frozenset(
    ("lm_loss", "aux_loss", "mtp_loss", "indexer_loss", "current_default_lr", "current_grouped_lr")
)


def may_be_absent(name: str) -> bool:
    """Returns whether a parameter may keep its initial value if the checkpoint lacks it; else it is
    loaded."""
    return is_transient(name) or name in LOGGED or name.endswith(DROPOUT_STATE)
