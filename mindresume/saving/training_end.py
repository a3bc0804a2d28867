"""Ends the saves of a training on all ranks together: saves the last step, commits, uploads, and releases the directory.

    ending = TrainingEnd(group, outcomes, commit_timeout)
    ending.save_last(request, saver, manager)   # the last step, if it is not saved yet
    ending.commit(saver)                        # waits (with a deadline) until all ranks are committed
    ending.upload(uploader)
    ending.release(session)
    ending.raise_errors()                       # the first error of all of this, on all ranks

If one rank raised early, the other ranks would wait for it in their next collective. So each part keeps its errors, and
they are raised when all parts are done.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mindresume.coordination.collectives import (
    Group,
    SingleProcess,
    Watchdog,
    always_advancing,
    gather_results,
    run_until_all_done,
)
from mindresume.errors import RemoteError, SaveError
from mindresume.formatting import listed
from mindresume.saving.save_outcomes import SaveOutcomes
from mindresume.saving.save_request import SaveRequest, SupportsSave
from mindresume.saving.save_session import SaveSession
from mindresume.saving.sync_saver import Outcome, Saver
from mindresume.saving.uploader import Uploader


class TrainingEnd:
    """Ends the saves of one training. All ranks of ``group`` call the same methods in the same order.

    Args:
        outcomes: of the saves of this rank.
        timeout: seconds for which a part of the end may wait, as ``commit_timeout``.
    """

    def __init__(self, group: Group, outcomes: SaveOutcomes, timeout: float):
        self.group, self.outcomes, self.timeout = group, outcomes, timeout
        self._errors: list[Exception] = []

    def save_last(self, request: SaveRequest, saver: Saver, manager: SupportsSave) -> None:
        """Saves the last step through ``manager`` on all ranks that have not saved it.

        Collecting parameters can be a collective, so ranks that have saved it take part and write nothing. If one rank ends with
        an error, no rank begins and all raise SaveError: the next collective would wait for that rank. An error of this save is
        kept until a collective has sent it to the others.
        """
        number, saved = request.step, self.outcomes.saved

        def written() -> list[bool]:
            try:
                self.outcomes.handle(saver.wait(self.timeout))
            except SaveError as error:
                self._errors.append(error)
            return [number in saved, bool(self._errors)]
        rows = gather_results(self.group, written, Watchdog(f"writing what was begun before step {number}", always_advancing))
        if self._errors:
            raise self._errors[0]
        failing = [rank for rank, (_, fails) in enumerate(rows) if fails]
        if failing:
            raise SaveError(f"the training ends at step {number}, because rank {listed(failing)} ends with an error of a save, "
                            f"which the log of that rank tells. What all ranks have written counts; start the same command again")
        if all(is_saved for is_saved, _ in rows):
            return
        self._keep_error(request.collect if number in saved else lambda: request.save(manager, True))

    def commit(self, saver: Saver) -> None:
        """Waits until the last save of all ranks is committed, and handles the outcomes."""
        outcomes: list[Outcome] = []
        self._run_on_all_ranks("committing the last step", lambda: outcomes.extend(saver.finish(self.timeout)))
        for outcome in outcomes:
            self._keep_error(partial(self.outcomes.handle, [outcome]))

    def upload(self, uploader: Uploader) -> None:
        """Waits until the last uploads of all ranks are done, and handles their errors."""
        errors: list[RemoteError] = []
        self._run_on_all_ranks("uploading the last step", lambda: errors.extend(uploader.finish(self.timeout)))
        for error in errors:
            self._keep_error(partial(self.outcomes.handle_upload_errors, [error]))

    def release(self, session: SaveSession) -> None:
        """Releases the directory."""
        self._run_on_all_ranks("releasing the directory", session.release)

    def raise_errors(self) -> None:
        """Raises the first error of the end, on all ranks: in a later collective a rank without an error would wait for one that
        has ended with one."""
        failing: list[int] = []
        self._keep_error(lambda: failing.extend(
            rank for rank, (_, fails) in enumerate(gather_results(self.group, lambda: [True, bool(self._errors)])) if fails))
        if self._errors:
            raise self._errors[0]
        if failing:
            raise SaveError(f"the training ends with an error, because rank {listed(failing)} does: its log names it")

    def _keep_error(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:          # any error: the other parts of the end come first
            self._errors.append(error)

    def _run_on_all_ranks(self, what: str, work: Callable[[], None]) -> None:
        """Runs ``work`` on all ranks until all are done, with short collectives meanwhile: rank 0 may commit and upload for
        minutes. Keeps errors. A collective that fails because a rank is lost is the last one."""
        stall_timeout = max(Watchdog.stall_timeout, 3 * self.timeout)
        try:
            run_until_all_done(self.group, lambda: self._keep_error(work), Watchdog(what, stall_timeout=stall_timeout))
        except Exception as error:          # of the collective: errors of the work are kept already
            self._errors.append(error)
            self.group = SingleProcess(self.group.rank)
