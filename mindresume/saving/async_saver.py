"""Saves in the background: the training thread copies the arrays, a thread or a process of this
rank writes and commits.

    training   pack into the staging buffer ─▶ next step      poll at every step ─▶ outcomes, errors
        included
    writer     unpack ─▶ SyncSaver: write_shard ─▶ record ─▶ rank 0: commit, meta.json, prune
        one save in progress

A save that is due while another is in progress waits (``wait``), or is skipped on all ranks
(``skip``; the caller exchanges ``busy``). If a writer dies, its save fails and the next save gets a
new writer. What cannot be staged is written in the training thread. A "process" shares nothing with
the training but the buffer: it writes while the training holds Python's interpreter lock, and
finishes its save if the training dies.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from mindresume import runtime
from mindresume.errors import LeaseHeldError, SaveError
from mindresume.events import Emit, SaveNotStaged, WriterDied, ignore
from mindresume.saving.background_writer import WRITERS, Watcher, Writer
from mindresume.saving.committer import SyncSaver
from mindresume.saving.retention import Policy
from mindresume.saving.shard_writer import Outcome, Save, SaveTarget
from mindresume.saving.staging import StagingLimits, staging_buffer

_GRACE = 5.0  # seconds added to a timeout that the writer keeps by itself
_POLL = 0.05  # seconds between two checks of a writer


class AsyncSaver:
    """Saves in a background thread or process. Its methods are those of ``SyncSaver``.

    Args:
        policy: of retention, on rank 0; None on other ranks.
        kind: "thread" or "process".
        limits: of staging memory.
        timeout: seconds for which a save waits for the previous one.
        watcher: is told the step that a thread begins to write, and by that thread when it has
            ended, because the training's can wait in a collective for a rank that has died. Is told
            nothing of a process.
    """

    def __init__(
        self,
        target: SaveTarget,
        policy: Policy | None,
        kind: str = "thread",
        limits: StagingLimits | None = None,
        timeout: float = 600.0,
        emit: Emit = ignore,
        watcher: Watcher | None = None,
    ):
        self.target = target
        self.policy = policy
        self.kind = kind
        self.timeout = timeout
        self.emit = emit
        self.limits = limits or StagingLimits()
        self.watcher = watcher if kind == "thread" else None
        self._staging = staging_buffer(shared=kind == "process")
        self._writer: Writer | None = None
        # the step that the writer has; whether its outcome was received, and it is being committed
        self._in_flight: int | None = None
        self._has_outcome = False
        self._polling = False
        self._outcomes: list[Outcome] = []
        self._lease_error: LeaseHeldError | None = None
        self._last_saved: Outcome | None = None  # perhaps not committed
        # the same, after the death of the writer that was to commit it
        self._uncommitted: Outcome | None = None

    # ---- the training's side ---------------------------------------------------------------------

    def save(self, save: Save) -> None:
        # an older step is not committed behind this one
        busy, self._uncommitted = self.busy(), None
        if busy and not self._wait_until_idle(self.timeout):
            error = SaveError(
                f"step {save.step} was not saved on rank {self.target.rank}: step "
                f"{self._in_flight} is still being written after {self.timeout:.0f} s"
            )
            self._outcomes.append(Outcome(save.step, False, error))
            return
        reason = self.limits.why_not(self._staging.needed(save), self._staging.size)
        if reason is None:
            try:
                staged = self._staging.pack(save)
            except (OSError, MemoryError) as error:
                reason = f"no staging memory: {error}"
        if reason is None:
            if self.watcher is not None:
                self.watcher.writing(save.step)
            self._in_flight, self._has_outcome = save.step, False
            self._send(("save", staged, self.watcher))
        else:
            self.emit(SaveNotStaged(save.step, reason))
            outcome = SyncSaver(self.target, None, self.emit).write(save)
            self._outcomes.append(outcome)
            self._in_flight, self._has_outcome = save.step, True
            self._send(("commit", outcome))

    def busy(self) -> bool:
        self._receive(0.0)
        return self._in_flight is not None

    def poll(self) -> list[Outcome]:
        self._receive(0.0)
        if self.policy is not None and self._in_flight is None and not self._polling:
            self._request_commit()
        return self._take_outcomes()

    def _request_commit(self) -> None:
        """Asks the writer to commit what is saved already. A writer that replaces a dead one is
        sent the newest save of that one."""
        uncommitted, self._uncommitted = self._uncommitted, None
        if uncommitted is not None or self._writer is not None:
            self._polling = True
            self._send(("poll",) if uncommitted is None else ("recommit", uncommitted))

    def wait(self, timeout: float) -> list[Outcome]:
        self._wait_until_idle(timeout)
        return self._take_outcomes()

    def finish(self, timeout: float, record_timeout: float | None = None) -> list[Outcome]:
        record_timeout = timeout if record_timeout is None else record_timeout
        if not self._wait_until_idle(timeout):
            step = self._in_flight
            error = SaveError(
                f"step {step} is still being written on rank {self.target.rank} after "
                f"{timeout:.0f} s; it is left "
                f"to the {self.kind} that writes it and may not become complete"
            )
            self._outcomes.append(Outcome(step, False, error))
        else:
            self._receive(0.0)  # it may have died since the last check
            if self._uncommitted is not None:
                self._request_commit()
        if self._in_flight is None and self._writer is not None:
            self._send(("finish", record_timeout))
            self._last_saved = None  # no step follows, so its end is not a death
            with suppress(OSError):  # it has just died: there is nothing to wait for
                if self._writer is not None:
                    self._writer.close()
            until = runtime.monotonic() + record_timeout + _GRACE
            while self._writer is not None and self._writer.alive() and runtime.monotonic() < until:
                self._receive(_POLL)
            self._receive(0.0)
        self._writer = None
        self._staging.close()
        return self._take_outcomes()

    def _take_outcomes(self) -> list[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        if self._lease_error is not None:
            raise self._lease_error
        return outcomes

    # ---- the writer's side -----------------------------------------------------------------------

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            if self._writer is None or not self._writer.alive():
                self._writer = WRITERS[self.kind](
                    self.target, self.policy, self._staging, self.timeout
                )
            self._writer.send(message)
        except (OSError, RuntimeError) as error:
            # it has just died, or no thread or process can be started
            self._handle_writer_death(f"it could not be reached: {error}")

    def _wait_until_idle(self, timeout: float) -> bool:
        until = runtime.monotonic() + timeout
        while self._in_flight is not None and runtime.monotonic() < until:
            self._receive(_POLL)
        return self._in_flight is None

    def _receive(self, timeout: float) -> None:
        """Receives the messages of the writer; waits ``timeout`` seconds for the first one if there
        is none."""
        while self._writer is not None:
            # asked before the last receive, so that its last message is not missed
            gone = not self._writer.alive()
            message = self._writer.receive(timeout)
            if message is None:
                if gone:
                    self._handle_writer_death(self._writer.end())
                return
            timeout = 0.0
            kind, *values = message
            if kind == "end":
                self._writer.join()
            elif kind == "event":
                self.emit(values[0])
            elif kind == "outcome":
                self._outcomes.append(values[0])
                self._has_outcome |= self._in_flight == values[0].step
                self._last_saved = values[0] if values[0].saved else self._last_saved
            elif kind == "lease_lost":
                self._lease_error = values[0]
            elif kind == "done":
                self._polling = False
                self._in_flight = None if values[0] is not None else self._in_flight

    def _handle_writer_death(self, reason: str) -> None:
        self._writer, self._polling = None, False
        if self.watcher is not None:
            self.watcher.writing(0)
        # once: not again if the next writer dies too
        if self.policy is not None and self._last_saved is not None:
            self._uncommitted, self._last_saved = self._last_saved, None
            self.emit(WriterDied(self.kind, reason, self._uncommitted.step))
        if self._in_flight is not None:
            lost, self._in_flight = self._in_flight, None
            if not self._has_outcome:  # else it died after it had sent the outcome
                self._outcomes.append(
                    Outcome(
                        lost,
                        False,
                        SaveError(
                            f"step {lost} may not be saved on rank {self.target.rank}: the "
                            f"{self.kind} that wrote it died "
                            f"({reason}). It counts if its record is there"
                        ),
                    )
                )
