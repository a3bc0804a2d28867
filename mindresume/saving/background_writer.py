"""Runs the writer of a background save: a thread, or a process of its own, that handles the
messages of one ``AsyncSaver``.

    writer = WRITERS["process"](target, policy, staging, timeout)
    # or ("commit", outcome), ("recommit", outcome), ("poll",), ("finish", seconds);
    writer.send(("save", staged, watcher))
    # ``watcher``: a thread calls ``watcher.writing(0)`` once that is written; None for a process
    # ("outcome", outcome), ("event", event), ("lease_lost", error), ("done", step)
    writer.receive(timeout)
    writer.close()                              # no message follows

Every message is answered with ("done", step) at last.
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
from mindresume.coordination.heartbeat_process import start_apart
from mindresume.errors import LeaseHeldError, SaveError
from mindresume.saving.committer import SyncSaver
from mindresume.saving.retention import Policy
from mindresume.saving.shard_writer import Outcome, SaveTarget, is_committed
from mindresume.saving.staging import Staging

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
    """Runs ``python -m mindresume.saving.background_writer CONNECTION MEMORY PARENT``: two file
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
                    "mindresume.saving.background_writer",
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
