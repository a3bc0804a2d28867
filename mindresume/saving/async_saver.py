"""Saves in the background: the training thread copies, a thread or a process of this rank writes and commits.

    training   pack into the staging buffer ─▶ goes on        poll at every step ─▶ outcomes, errors included
    writer     unpack ─▶ SaveJob: write_shard ─▶ record ─▶ rank 0: commit, meta.json, prune       one save in flight

A second save that is due waits for the first (``wait``), or is left out on all ranks (the caller agrees on that by ``busy``). A
writer that dies is an error of the save it had, and the next save gets a new one. What cannot be staged (memory) is written in
the training thread. "process": the writer shares nothing with the training but the buffer, so it goes on while the training holds
Python's lock, and it finishes its save if the training dies.
"""
from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from mindresume.coordination import host_memory
from mindresume.coordination.lease import ended
from mindresume.coordination.read_locks import ReadLocks
from mindresume.errors import LeaseHeldError, SaveError
from mindresume.events import Emit, SaveNotStaged, WriterDied, ignore
from mindresume.saving.committer import Committer
from mindresume.saving.retention import Policy
from mindresume.saving.shard_writer import SaveTarget, is_committed
from mindresume.saving.staging import Staging
from mindresume.saving.sync_saver import Outcome, Save, SaveJob

_LATE = 5.0                     # seconds that a writer which keeps a deadline may be late
_LOOK = 0.05                    # seconds between two looks at a writer that is waited for
_CHECK = 1.0                    # seconds between two looks of a writer process for its training
_JOB, _WRITER = "MSRUN_LAUNCHER_JOB", "MSRUN_LAUNCHER_WRITER"           # marks of scripts/msrun_launcher.sh
_DEAF = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Counts:
    """Counts the saves of one training. ``stopped``: seconds for which the training thread waited for saves, copies included."""
    saves: int = 0
    waited: int = 0
    foreground: int = 0
    stopped: float = 0.0


def save_job_for(place: SaveTarget, policy: Policy | None, emit: Emit = ignore) -> SaveJob:
    """Returns what saves to ``target``. ``policy``: of retention, on rank 0, which commits and removes; None on other ranks."""
    if policy is None:
        return SaveJob(place, None, emit)
    return SaveJob(place, Committer(place, policy, emit, read_locks=ReadLocks(place.storage, place.root),
                                    ended=lambda run: ended(place.storage, place.root)(run)), emit)


class AsyncSaver:
    """Saves in a background thread or process. Implements ``Saver``. ``kind``: "thread" or "process". ``budget``: bytes of
    staging memory, 0: as much as a save needs. ``share``: bytes that this rank may take of the memory that it shares with others;
    ``available()``: bytes that are left now. ``timeout``: seconds for which a save that is due waits for the previous one."""

    def __init__(self, place: SaveTarget, policy: Policy | None, kind: str = "thread", budget: int = 0, timeout: float = 600.0,
                 emit: Emit = ignore, share: int = host_memory.UNKNOWN,
                 available: Callable[[], int] = host_memory.left):
        self.place, self.policy, self.kind, self.budget, self.timeout, self.emit = place, policy, kind, budget, timeout, emit
        self.share = share
        self.counts = Counts()
        self._available = available
        self._staging = Staging(shared=kind == "process")
        self._writer: _Writer | None = None
        self._flight: int | None = None             # step that the writer has
        self._known: int | None = None              # the same step once its outcome is known and it is being committed
        self._polling = False
        self._outcomes: list[Outcome] = []
        self._lost: LeaseHeldError | None = None
        self._newest: Outcome | None = None         # of what is saved; perhaps not committed
        self._orphan: Outcome | None = None         # the same, after the death of the writer that was to commit it

    # ---- the training's side ---------------------------------------------------------------------------------------

    def save(self, save: Save) -> None:
        started = time.monotonic()
        self.counts.saves += 1
        busy, self._orphan = self.busy(), None              # an older step is not committed behind this one
        if busy:
            self.counts.waited += 1
            if not self._idle(self.timeout):
                error = SaveError(f"step {save.step} was not saved on rank {self.place.rank}: step {self._flight} is still being "
                                  f"written after {self.timeout:.0f} s")
                self._outcomes.append(Outcome(save.step, False, error))
                return
        self._known = None                                  # the step may be saved for the second time
        reason = self._cannot_stage(save)
        if reason is None:
            try:
                staged = self._staging.pack(save)
            except (OSError, MemoryError) as error:
                reason = f"no staging memory: {error}"
        if reason is None:
            self._send(("save", staged), save.step)
        else:
            self.counts.foreground += 1
            self.emit(SaveNotStaged(save.step, reason))
            outcome = SaveJob(self.place, None, self.emit).write(save)
            self._outcomes.append(outcome)
            self._known = save.step
            self._send(("commit", outcome), save.step)
        self.counts.stopped += time.monotonic() - started

    def busy(self) -> bool:
        self._collect(0.0)
        return self._flight is not None

    def poll(self) -> list[Outcome]:
        self._collect(0.0)
        if self.policy is not None and self._flight is None and not self._polling:
            self._ask()
        return self._taken()

    def _ask(self) -> None:
        """Asks the writer to commit what is saved already. A writer that replaces a dead one is sent the newest save of that
        one."""
        orphan, self._orphan = self._orphan, None
        if orphan is not None or self._writer is not None:
            self._polling = True
            self._send(("poll",) if orphan is None else ("again", orphan), None)

    def wait(self, deadline: float) -> list[Outcome]:
        self._idle(deadline)
        return self._taken()

    def finish(self, deadline: float, patience: float | None = None) -> list[Outcome]:
        patience = deadline if patience is None else patience
        if not self._idle(deadline):
            error = SaveError(f"step {self._flight} is still being written on rank {self.place.rank} after {deadline:.0f} s; it "
                              f"is left to the {self.kind} that writes it and may not become complete")
            self._outcomes.append(Outcome(self._flight or 0, False, error))
        else:
            self._collect(0.0)                      # it may have died since the last look
            if self._orphan is not None:
                self._ask()
        if self._flight is None and self._writer is not None:
            self._send(("finish", patience), None)
            self._newest = None                     # no step follows: its end is no death
            with suppress(OSError):                 # it died this very moment; then there is nothing to wait for
                if self._writer is not None:
                    self._writer.close()
            until = time.monotonic() + patience + _LATE
            while self._writer is not None and self._writer.alive() and time.monotonic() < until:
                self._collect(_LOOK)
            self._collect(0.0)
        self._writer = None
        self._staging.close()
        return self._taken()

    def _taken(self) -> list[Outcome]:
        found, self._outcomes = self._outcomes, []
        if self._lost is not None:
            raise self._lost
        return found

    def _cannot_stage(self, save: Save) -> str | None:
        """Returns why ``save`` cannot be staged, None if it can. A buffer that exists already is used in any case: it takes no
        more memory."""
        needed = self._staging.needed(save)
        if needed <= self._staging.size:
            return None
        more = needed - self._staging.size
        limits = [(needed, self.budget or host_memory.UNKNOWN, "the budget (mindresume.staging_gib) is"),
                  (needed, self.share, "the share of this rank in what the host, or its container, had left at the start is"),
                  (more, self._available(), f"{more / 2**20:.0f} MiB more than it has, and the host, or its container, has left")]
        return next((f"it needs {needed / 2**20:.0f} MiB of staging memory; {what} {limit / 2**20:.0f} MiB"
                     for wanted, limit, what in limits if wanted > limit), None)

    # ---- the writer's side -----------------------------------------------------------------------------------------

    def _send(self, message: tuple[Any, ...], step: int | None) -> None:
        self._flight = step if step is not None else self._flight
        try:
            if self._writer is None or not self._writer.alive():
                self._writer = _WRITERS[self.kind](self.place, self.policy, self._staging, self.timeout)
            self._writer.send(message)
        except (OSError, RuntimeError) as error:    # it died this very moment, or no thread or process can be had
            self._died(f"it could not be reached: {error}")

    def _idle(self, deadline: float) -> bool:
        until = time.monotonic() + deadline
        while self._flight is not None and time.monotonic() < until:
            self._collect(_LOOK)
        return self._flight is None

    def _collect(self, patience: float) -> None:
        """Receives the messages of the writer; waits ``patience`` seconds for the first one if there is none."""
        while self._writer is not None:
            gone = not self._writer.alive()         # asked before the last look, so that no last word is missed
            message = self._writer.receive(patience)
            if message is None:
                if gone:
                    self._died(self._writer.end())
                return
            patience = 0.0
            kind, *values = message
            if kind == "end":
                self._writer.join()
            elif kind == "event":
                self.emit(values[0])
            elif kind == "outcome":
                self._outcomes.append(values[0])
                self._known = values[0].step
                self._newest = values[0] if values[0].saved else self._newest
            elif kind == "lost":
                self._lost = values[0]
            elif kind == "done":
                self._polling = False
                self._flight = None if values[0] is not None else self._flight

    def _died(self, reason: str) -> None:
        self._writer, self._polling = None, False
        if self.policy is not None and self._newest is not None:            # once: what kills its successor too is left alone
            self._orphan, self._newest = self._newest, None
            self.emit(WriterDied(self.kind, reason, self._orphan.step))
        if self._flight is not None:
            step, self._flight = self._flight, None
            if step != self._known:                 # else it died when it had said what became of it
                self._outcomes.append(Outcome(step, False, SaveError(
                    f"step {step} may not be saved on rank {self.place.rank}: the {self.kind} that wrote it died ({reason}). It "
                    f"counts if its record is there")))


def serve(place: SaveTarget, policy: Policy | None, staging: Staging, receive: Callable[[], Any],
          send: Callable[[Any], None]) -> None:
    """Runs the writer: handles one message after the other until None. Answers each with outcomes and events, then ("done",
    step)."""
    work = save_job_for(place, policy, lambda event: send(("event", event)))
    work.begin()                        # also after the writer before this one died: what it had written can be complete
    while (message := receive()) is not None:
        kind, *values = message
        step, outcome = None, None
        try:
            if kind == "save":
                step = values[0].save.step
                outcome = work.write(staging.unpack(values[0]))
                send(("outcome", outcome))
                work.commit(outcome)
            elif kind == "commit":
                outcome = values[0]
                step = outcome.step
                work.commit(outcome)
            elif kind == "again":
                if not is_committed(place, values[0].step):
                    work.commit(values[0])
            elif kind == "poll":
                work.poll()
            elif kind == "finish":
                work.finish(values[0])
        except LeaseHeldError as error:
            send(("lost", error))
        except Exception as error:      # whatever it is, the training hears of it; the writer lives on
            text = f"step {step}: the writer failed: {type(error).__name__}: {error}"
            send(("outcome", Outcome(step or 0, outcome is not None and outcome.saved, SaveError(text))))
        send(("done", step))


class _Writer(Protocol):
    def send(self, message: Any) -> None: ...

    def receive(self, patience: float) -> Any:
        """Returns the next message, None if there is none."""

    def alive(self) -> bool: ...

    def close(self) -> None:
        """Tells the writer that no message will follow."""

    def join(self) -> None:
        """Waits for the end of a writer that said that it ends."""

    def end(self) -> str:
        """Returns how the writer died."""


class _Thread:
    def __init__(self, place: SaveTarget, policy: Policy | None, staging: Staging, timeout: float):
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mindresume-writer", daemon=True, args=(place, policy, staging))
        self._thread.start()

    def _run(self, place: SaveTarget, policy: Policy | None, staging: Staging) -> None:
        try:
            serve(place, policy, staging, self._inbox.get, self._outbox.put)
        finally:
            self._outbox.put(("end", None))         # wakes who waits for it

    def send(self, message: Any) -> None:
        self._inbox.put(message)

    def receive(self, patience: float) -> Any:
        try:
            return self._outbox.get(timeout=patience) if patience else self._outbox.get_nowait()
        except queue.Empty:
            return None

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._inbox.put(None)

    def join(self) -> None:
        self._thread.join(1.0)

    def end(self) -> str:
        return "an error ended it"


class _Process:
    """Runs ``python -m mindresume.saving.async_saver CONNECTION MEMORY PARENT``. The process is started anew, because a fork of a
    process with a device and its threads is not safe, and without the main module of the user, which a spawn of multiprocessing
    would import again.

    It has a session of its own and ignores signals that ask it to end, from its first moment on: launchers and platforms send
    those to all processes that they find, and a save that has begun is to be finished. It ends when the training does
    (``_main``).
    """

    def __init__(self, place: SaveTarget, policy: Policy | None, staging: Staging, timeout: float):
        self._connection, theirs = Pipe()
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path}
        if _JOB in environment:                     # the launcher ends what has this mark, and waits for what has the other
            environment[_WRITER] = environment.pop(_JOB)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF)        # of this thread alone; the new process inherits it
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mindresume.saving.async_saver", *map(str, (theirs.fileno(), staging.fd, os.getpid()))],
                pass_fds=(theirs.fileno(), staging.fd), env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.send((place, policy, timeout))

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def receive(self, patience: float) -> Any:
        try:
            return self._connection.recv() if self._connection.poll(patience) else None
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


_WRITERS: dict[str, Callable[[SaveTarget, Policy | None, Staging, float], _Writer]] = {"thread": _Thread, "process": _Process}


def _main() -> None:
    """Runs the writer process. When the training closes the connection or is gone, the writer finishes the save that it has, and
    ends. If the training is gone it waits for other ranks no longer than a living training would, and then ends with what it
    has."""
    connection, memory, training = Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])

    def gone() -> bool:                 # the connection alone does not tell: children of the training can hold it open
        return os.getppid() != training

    def receive() -> Any:
        try:
            while not connection.poll(_CHECK):
                if gone():
                    return None
            return connection.recv()
        except (EOFError, OSError):
            return None

    def send(message: Any) -> None:
        try:
            connection.send(message)
        except OSError:                 # the training is gone; the save is finished all the same
            return

    def bound(timeout: float) -> None:
        while not gone():
            time.sleep(_CHECK)
        time.sleep(timeout)
        os._exit(1)
    first = receive()
    if first is not None:
        place, policy, timeout = first
        threading.Thread(target=bound, args=(timeout,), daemon=True).start()
        serve(place, policy, Staging(fd=memory), receive, send)


if __name__ == "__main__":
    _main()
