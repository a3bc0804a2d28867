"""Records the outcomes of this rank's saves: which steps are saved, how many saves failed in a row, and which error is raised."""
from __future__ import annotations

from collections.abc import Callable

from mindresume.errors import RemoteError, SaveError
from mindresume.events import Emit, SaveFailed, SaveWritten
from mindresume.saving.sync_saver import Outcome
from mindresume.settings import Settings


class SaveOutcomes:
    """Records the outcomes of saves, and emits one event for each. The settings ``on_save_error`` and ``max_failed_saves`` say
    which errors are raised.

    Args:
        on_outcome: called with each outcome before its event.

    Attributes:
        saved: the steps that the saver got, without those that failed.
        failed_in_a_row: saves that failed since the last one that did not.
    """

    def __init__(self, settings: Settings, emit: Emit, on_outcome: Callable[[Outcome], None] = lambda outcome: None):
        self.settings, self.emit = settings, emit
        self.saved: set[int] = set()
        self.failed_in_a_row = 0
        self._on_outcome = on_outcome
        self._stalls: dict[int, float] = {}                 # {step: seconds that it stopped the training}, until its outcome

    def set_stall(self, step: int, seconds: float) -> None:
        """Sets how long the save of ``step`` stopped the training, for its event."""
        self._stalls[step] = seconds

    def handle(self, outcomes: list[Outcome]) -> None:
        """Records outcomes. Raises SaveError as configured."""
        for outcome in outcomes:
            self.record(outcome)
            if outcome.error is not None:
                self.handle_failure(outcome.step, outcome.error)
            else:
                self.failed_in_a_row = 0

    def record(self, outcome: Outcome) -> None:
        """Records an outcome, but not its error."""
        self._on_outcome(outcome)
        if not outcome.saved:
            self.saved.discard(outcome.step)
            return
        self.emit(SaveWritten(outcome.step, outcome.size, outcome.seconds, self._stalls.pop(outcome.step, None)))

    def handle_failure(self, step: int, error: SaveError) -> None:
        """Records a failure. Raises it as configured."""
        self.record_failure(step, str(error))
        if self.settings.on_save_error == "raise" or 0 < self.settings.max_failed_saves <= self.failed_in_a_row:
            raise error

    def record_failure(self, step: int | None, reason: str) -> None:
        """Records a failure that is not raised. ``step``: None if unknown."""
        self.failed_in_a_row += 1
        self.emit(SaveFailed(step, reason, self.failed_in_a_row))

    def handle_upload_errors(self, errors: list[RemoteError]) -> None:
        """Raises the first error of uploads if ``on_save_error`` is ``raise``; the checkpoints on disk are good in any case."""
        if errors and self.settings.on_save_error == "raise":
            raise errors[0]
