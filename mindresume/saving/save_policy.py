"""Decides which steps of a training are saved to disk, and which failures end the training.

policy = SavePolicy(options, settings, group, emit)
if policy.is_due(20): ...           # the same on all ranks
# an event; the error of a failed save if it ends the training, as configured
fatal = policy.record(outcome)
"""

from __future__ import annotations

from dataclasses import dataclass

from mindresume import runtime
from mindresume.coordination.collectives import Group
from mindresume.errors import SaveError
from mindresume.events import Emit, SaveFailed, SaveWritten
from mindresume.model.training_state import crosses_multiple
from mindresume.saving.retention import KEEP_ALL, Policy
from mindresume.saving.shard_writer import Outcome
from mindresume.settings import Settings


@dataclass(frozen=True)
class SaveOptions:
    """Where and when a training saves.

    Attributes:
        root: the checkpoint directory.
        prefix: of the names of files.
        every_steps: saves fall on absolute multiples of it. Without it ``every_seconds`` counts;
            without both only the last step is saved.
        async_save: "thread" or "process" saves in the background; True is "thread".
        iterations: Checkpoint 2.0.
        shown: the directory as the log names it.
        samples_in_common: the readers of ``common.json`` know the key ``consumed_samples``.
        retention: which checkpoints stay.
        since: time (``time.monotonic``) from which ``every_seconds`` counts; None: now.
    """

    root: str
    prefix: str
    every_steps: int | None = None
    every_seconds: float | None = None
    async_save: bool | str = False
    iterations: bool = False
    shown: str = ""
    samples_in_common: bool = False
    retention: Policy = KEEP_ALL
    since: float | None = None


class SavePolicy:
    """Decides alike on all ranks of ``group`` which steps are due, and records the outcomes of this
    rank's saves. The settings ``on_save_error`` and ``max_failed_saves`` say which errors end the
    training.

    Attributes:
        saved: the steps that the saver got, without those that failed.
        failed_in_a_row: saves that failed since the last one that did not.
        skipped: steps that were due while another was being written.
        begun_at: the step after which the training began.
        last_step: the last step that is done; None: none yet.
        stalls: {step: seconds that its save stopped the training}, until its outcome.
    """

    def __init__(self, options: SaveOptions, settings: Settings, group: Group, emit: Emit):
        self.options = options
        self.settings = settings
        self.group = group
        self.emit = emit
        self.saved: set[int] = set()
        self.failed_in_a_row = self.skipped = 0
        self.begun_at = 0
        self.last_step: int | None = None
        self.stalls: dict[int, float] = {}
        self._asked_for = 0  # the step of the last ``is_due``
        self._last_timed_save = runtime.monotonic() if options.since is None else options.since

    def begin(self, step: int) -> None:
        """Sets the step after which the training begins."""
        self.begun_at = self._asked_for = step

    def is_due(self, step: int, force: bool = False) -> bool:
        """Returns whether ``step`` is to be saved; ``force``: unless it is saved already. Called
        once a step, which in sink mode arrive in jumps. With ``every_seconds`` it is a
        collective."""
        before, self._asked_for = (self._asked_for if self._asked_for < step else step - 1), step
        if step in self.saved or force:
            return step not in self.saved
        if self.options.every_steps and self.options.every_steps > 0:
            return crosses_multiple(before, step, self.options.every_steps)
        seconds = self.options.every_seconds
        if not seconds or seconds <= 0:
            return False
        due = runtime.monotonic() - self._last_timed_save > seconds
        if self.group.size > 1:  # clocks differ: rank 0 decides for all
            due = self.group.broadcast(b"1" if due else b"0") == b"1"
        if due:
            self._last_timed_save = runtime.monotonic()
        return due

    def record(self, outcome: Outcome) -> SaveError | None:
        """Records an outcome. Returns its error if that ends the training."""
        if outcome.saved:
            self.emit(
                SaveWritten(
                    outcome.step, outcome.size, outcome.seconds, self.stalls.pop(outcome.step, None)
                )
            )
        else:
            self.saved.discard(outcome.step)
        if outcome.error is None:
            self.failed_in_a_row = 0
            return None
        return outcome.error if self.record_failure(outcome.step, outcome.error) else None

    def record_failure(self, step: int | None, error: SaveError) -> bool:
        """Records a failure. Returns whether it ends the training. ``step``: None if unknown."""
        self.failed_in_a_row += 1
        self.emit(SaveFailed(step, str(error), self.failed_in_a_row, error.code))
        return (
            self.settings.on_save_error == "raise"
            or 0 < self.settings.max_failed_saves <= self.failed_in_a_row
        )
