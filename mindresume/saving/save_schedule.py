"""Decides which steps are due to be saved: at absolute multiples of a number of steps, or after a number of seconds."""
from __future__ import annotations

from mindresume import runtime
from mindresume.coordination.collectives import Group
from mindresume.model.training_state import crosses_multiple
from mindresume.saving.save_request import SaveOptions


class SaveSchedule:
    """Decides alike on all ranks.

    Args:
        options: ``every_steps`` or ``every_seconds``.
        since: time (``time.monotonic``) from which ``every_seconds`` counts; None: now.
    """

    def __init__(self, options: SaveOptions, since: float | None = None):
        self.options = options
        self._last_step = 0
        self._last_timed_save = runtime.monotonic() if since is None else since

    def begin(self, step: int) -> None:
        """Sets the step after which the training begins."""
        self._last_step = step

    def advance(self, step: int) -> int:
        """Returns the step before ``step``. Called once a step: in sink mode steps arrive in jumps."""
        before, self._last_step = (self._last_step if self._last_step < step else step - 1), step
        return before

    def is_due(self, before: int, step: int, group: Group) -> bool:
        """Returns whether a save is due between the steps ``before`` and ``step``. With ``every_seconds`` it is a collective."""
        if self.options.every_steps and self.options.every_steps > 0:
            return crosses_multiple(before, step, self.options.every_steps)
        seconds = self.options.every_seconds
        if not seconds or seconds <= 0:
            return False
        due = runtime.monotonic() - self._last_timed_save > seconds
        if group.size > 1:                                  # clocks differ: rank 0 decides for all
            due = group.broadcast(b"1" if due else b"0") == b"1"
        if due:
            self._last_timed_save = runtime.monotonic()
        return due
