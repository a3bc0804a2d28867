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

The writer handles the messages of its ``AsyncSaver``, and answers each with ("done", step) at last:

    writer = WRITERS["process"](target, policy, staging, timeout)
    # or ("commit", outcome), ("recommit", outcome), ("poll",), ("finish", seconds);
    writer.send(("save", staged, watcher))
    # ``watcher``: a thread calls ``watcher.writing(0)`` once that is written; None for a process
    # ("outcome", outcome), ("event", event), ("lease_lost", error), ("done", step)
    writer.receive(timeout)
    writer.close()                              # no message follows
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from mindresume import runtime
from mindresume.coordination.liveness import start_apart
from mindresume.errors import LeaseHeldError, SaveError
from mindresume.events import Emit, SaveNotStaged, WriterDied, ignore
from mindresume.saving.committer import SyncSaver
from mindresume.saving.retention import Policy
from mindresume.saving.shard_writer import Outcome, Save, SaveTarget, is_committed
from mindresume.saving.staging import Staging, StagingLimits, staging_buffer

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


# ---- the writer ----------------------------------------------------------------------------------


# seconds between two checks of a writer process that its training is alive
_PARENT_CHECK = 1.0
# environment variables of scripts/msrun_launcher.sh
_JOB_MARK, _WRITER_MARK = "MSRUN_LAUNCHER_JOB", "MSRUN_LAUNCHER_WRITER"


class Watcher(Protocol):
    """Who watches a process, and is to know what a thread of it writes in the background."""

    def writing(self, step: int) -> None:
        """Notes the step that a thread begins to write; 0: it has ended. Called by any thread."""


class Training(Protocol):
    """The training, as its writer sees it."""

    def receive(self) -> Any:
        """Waits for the next message, and returns it; None: no message follows, or the training is
        gone."""

    def send(self, message: Any) -> None:
        """Sends a message. Does nothing if the training is gone: the save is finished all the
        same."""


def serve(target: SaveTarget, policy: Policy | None, staging: Staging, training: Training) -> None:
    """Handles the messages of ``training``, one after the other, until no message follows.

    Args:
        policy: of retention, on rank 0, which commits and prunes; None on other ranks.
        staging: the buffer in which the arrays of a save lie.
    """
    saver = SyncSaver(target, policy, lambda event: training.send(("event", event)))
    # also after a writer that died: what it had written can be complete
    saver.begin()
    while (message := training.receive()) is not None:
        kind, *values = message
        step, outcome, saved = None, None, None  # ``saved``: what is to be committed
        try:
            if kind == "save":
                staged, watcher = values
                step = staged.save.step
                try:
                    outcome = saver.write(staging.unpack(staged))
                finally:
                    if watcher is not None:
                        watcher.writing(0)
                training.send(("outcome", outcome))
                saved = outcome
            elif kind == "commit":
                outcome = saved = values[0]
                step = outcome.step
            elif kind == "recommit":
                saved = values[0] if not is_committed(target, values[0].step) else None
            elif kind == "poll":
                saver.poll()
            elif kind == "finish":
                saver.finish(values[0])
            if saver.committer is not None and saved is not None and saved.saved:
                saver.committer.poll(saved.step)
        except LeaseHeldError as error:
            training.send(("lease_lost", error))
        except Exception as error:
            # any error goes to the training; the writer handles the next message
            text = f"step {step}: the writer failed: {type(error).__name__}: {error}"
            training.send(
                (
                    "outcome",
                    Outcome(step or 0, outcome is not None and outcome.saved, SaveError(text)),
                )
            )
        training.send(("done", step))


class _Queues:
    """The training, for a writer in one of its threads."""

    def __init__(self) -> None:
        self.inbox: runtime.SimpleQueue = runtime.SimpleQueue()
        self.outbox: runtime.SimpleQueue = runtime.SimpleQueue()

    def receive(self) -> Any:
        return self.inbox.get()

    def send(self, message: Any) -> None:
        self.outbox.put(message)


class WriterThread:
    """Runs the writer in a thread of the training."""

    def __init__(self, target: SaveTarget, policy: Policy | None, staging: Staging, timeout: float):
        self._queues = _Queues()
        self._thread = runtime.Thread(
            target=self._run, name="mindresume-writer", daemon=True, args=(target, policy, staging)
        )
        self._thread.start()

    def _run(self, target: SaveTarget, policy: Policy | None, staging: Staging) -> None:
        try:
            serve(target, policy, staging, self._queues)
        finally:
            self._queues.send(("end", None))  # wakes the receiver

    def send(self, message: Any) -> None:
        """Sends a message. Raises OSError if the writer is gone."""
        self._queues.inbox.put(message)

    def receive(self, timeout: float) -> Any:
        """Returns the next message; None if there is none within ``timeout`` seconds."""
        try:
            return (
                self._queues.outbox.get(timeout=timeout)
                if timeout
                else self._queues.outbox.get_nowait()
            )
        except runtime.Empty:
            return None

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Tells the writer that no message follows."""
        self.send(None)

    def join(self) -> None:
        """Waits for the end of a writer that has sent its last message."""
        self._thread.join(1.0)

    def end(self) -> str:
        """Returns how the writer died, for people."""
        return "an error ended it"


class WriterProcess:
    """Runs ``python -m mindresume.saving.async_saver CONNECTION MEMORY PARENT``: two file
    descriptors and a process id. Its methods are those of ``WriterThread``.

    A new interpreter, because a fork of a process with a device and threads is not safe; without
    the user's main module, which multiprocessing's spawn would import again.

    The process has a session of its own and ignores signals that ask it to end, from its first
    moment on: launchers and platforms send those to all processes that they find, and a save in
    progress is to be finished. It ends when the training does (``_main``).
    """

    def __init__(self, target: SaveTarget, policy: Policy | None, staging: Staging, timeout: float):
        self._connection, theirs = Pipe()
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path}
        # the launcher ends processes with this mark, and waits for the other one
        if _JOB_MARK in environment:
            environment[_WRITER_MARK] = environment.pop(_JOB_MARK)
        try:
            self._process = start_apart(
                [
                    sys.executable,
                    "-m",
                    "mindresume.saving.async_saver",
                    *map(str, (theirs.fileno(), staging.fd, os.getpid())),
                ],
                pass_fds=(theirs.fileno(), staging.fd),
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        self.send((target, policy, timeout))

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def receive(self, timeout: float) -> Any:
        try:
            return self._connection.recv() if self._connection.poll(timeout) else None
        except (EOFError, OSError):
            return None

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self.send(None)

    def join(self) -> None:
        self._process.wait()

    def end(self) -> str:
        self._connection.close()
        return f"exit status {self._process.wait()}"


Writer = WriterThread | WriterProcess
WRITERS: dict[str, Callable[[SaveTarget, Policy | None, Staging, float], Writer]] = {
    "thread": WriterThread,
    "process": runtime.asks_machine(WriterProcess),
}


class _Parent:
    """The training, for a writer in a process of its own."""

    def __init__(self, connection: Connection, pid: int):
        self._connection, self._pid = connection, pid

    # the connection alone does not tell: children of the training can hold it open
    def _is_gone(self) -> bool:
        return os.getppid() != self._pid

    def receive(self) -> Any:
        try:
            while not self._connection.poll(_PARENT_CHECK):
                if self._is_gone():
                    return None
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def send(self, message: Any) -> None:
        with suppress(OSError):
            self._connection.send(message)

    def exit_after(self, timeout: float) -> None:
        """Ends this process ``timeout`` seconds after the training."""
        while not self._is_gone():
            runtime.sleep(_PARENT_CHECK)
        runtime.sleep(timeout)
        os._exit(1)


def _main() -> None:
    """Runs the writer process. When the training closes the connection or is gone, the writer
    finishes the save in progress and ends. After the death of the training it waits for other ranks
    no longer than a living training would."""
    training, memory = _Parent(Connection(int(sys.argv[1])), int(sys.argv[3])), int(sys.argv[2])
    first = training.receive()
    if first is not None:
        target, policy, timeout = first
        runtime.Thread(target=training.exit_after, args=(timeout,), daemon=True).start()
        serve(target, policy, Staging(fd=memory), training)


if __name__ == "__main__":
    _main()
