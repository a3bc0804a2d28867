"""Runs the writer of a background save: a thread, or a process of its own, that handles the messages of one ``AsyncSaver``.

    writer = WRITERS["process"](target, policy, staging, timeout)
    writer.send(("save", staged, on_write))     # or ("commit", outcome), ("recommit", outcome), ("poll",), ("finish", seconds);
                                                # a thread calls ``on_write(0)`` once that is written; None for a process
    writer.receive(timeout)                     # ("outcome", outcome), ("event", event), ("lease_lost", error), ("done", step)
    writer.close()                              # no message follows

Every message is answered with ("done", step) at last.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from mindresume import runtime
from mindresume.errors import LeaseHeldError, SaveError
from mindresume.saving.committer import sync_saver
from mindresume.saving.retention import Policy
from mindresume.saving.shard_writer import Outcome, SaveTarget, is_committed
from mindresume.saving.staging import Staging

_PARENT_CHECK = 1.0             # seconds between two checks of a writer process that its training is alive
_JOB_MARK, _WRITER_MARK = "MSRUN_LAUNCHER_JOB", "MSRUN_LAUNCHER_WRITER"     # environment variables of scripts/msrun_launcher.sh
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(target: SaveTarget, policy: Policy | None, staging: Staging, receive: Callable[[], Any],
          send: Callable[[Any], None]) -> None:
    """Handles the messages of a training, one after the other, until ``receive()`` returns None.

    Args:
        policy: of retention, on rank 0, which commits and prunes; None on other ranks.
        staging: the buffer in which the arrays of a save lie.
    """
    saver = sync_saver(target, policy, lambda event: send(("event", event)))
    saver.begin()                         # also after a writer that died: what it had written can be complete
    while (message := receive()) is not None:
        kind, *values = message
        step, outcome = None, None
        try:
            if kind == "save":
                staged, on_write = values
                step = staged.save.step
                try:
                    outcome = saver.write(staging.unpack(staged))
                finally:
                    if on_write is not None:
                        on_write(0)
                send(("outcome", outcome))
                saver.commit(outcome)
            elif kind == "commit":
                outcome = values[0]
                step = outcome.step
                saver.commit(outcome)
            elif kind == "recommit":
                if not is_committed(target, values[0].step):
                    saver.commit(values[0])
            elif kind == "poll":
                saver.poll()
            elif kind == "finish":
                saver.finish(values[0])
        except LeaseHeldError as error:
            send(("lease_lost", error))
        except Exception as error:      # any error goes to the training; the writer handles the next message
            text = f"step {step}: the writer failed: {type(error).__name__}: {error}"
            send(("outcome", Outcome(step or 0, outcome is not None and outcome.saved, SaveError(text))))
        send(("done", step))


class Writer(Protocol):
    """A running writer, as the training sees it."""

    def send(self, message: Any) -> None:
        """Sends a message. Raises OSError if the writer is gone."""

    def receive(self, timeout: float) -> Any:
        """Returns the next message; None if there is none within ``timeout`` seconds."""

    def alive(self) -> bool:
        """Returns whether the writer runs."""

    def close(self) -> None:
        """Tells the writer that no message follows."""

    def join(self) -> None:
        """Waits for the end of a writer that has sent its last message."""

    def end(self) -> str:
        """Returns how the writer died, for people."""


class WriterThread:
    """Runs the writer in a thread of the training."""

    def __init__(self, target: SaveTarget, policy: Policy | None, staging: Staging, timeout: float):
        self._inbox: runtime.SimpleQueue = runtime.SimpleQueue()
        self._outbox: runtime.SimpleQueue = runtime.SimpleQueue()
        self._thread = runtime.Thread(target=self._run, name="mindresume-writer", daemon=True, args=(target, policy, staging))
        self._thread.start()

    def _run(self, target: SaveTarget, policy: Policy | None, staging: Staging) -> None:
        try:
            serve(target, policy, staging, self._inbox.get, self._outbox.put)
        finally:
            self._outbox.put(("end", None))         # wakes the receiver

    def send(self, message: Any) -> None:
        self._inbox.put(message)

    def receive(self, timeout: float) -> Any:
        try:
            return self._outbox.get(timeout=timeout) if timeout else self._outbox.get_nowait()
        except runtime.Empty:
            return None

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._inbox.put(None)

    def join(self) -> None:
        self._thread.join(1.0)

    def end(self) -> str:
        return "an error ended it"


class WriterProcess:
    """Runs ``python -m mindresume.saving.background_writer CONNECTION MEMORY PARENT``: two file descriptors and a process id.

    A new interpreter, because a fork of a process with a device and threads is not safe; without the user's main module, which
    multiprocessing's spawn would import again.

    The process has a session of its own and ignores signals that ask it to end, from its first moment on: launchers and platforms
    send those to all processes that they find, and a save in progress is to be finished. It ends when the training does
    (``_main``).
    """

    def __init__(self, target: SaveTarget, policy: Policy | None, staging: Staging, timeout: float):
        self._connection, theirs = Pipe()
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path}
        if _JOB_MARK in environment:                # the launcher ends processes with this mark, and waits for the other one
            environment[_WRITER_MARK] = environment.pop(_JOB_MARK)
        # The mask of this thread alone; the new process inherits it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mindresume.saving.background_writer",
                 *map(str, (theirs.fileno(), staging.fd, os.getpid()))],
                pass_fds=(theirs.fileno(), staging.fd), env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
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


WRITERS: dict[str, Callable[[SaveTarget, Policy | None, Staging, float], Writer]] = {
    "thread": WriterThread, "process": runtime.asks_machine(WriterProcess)}


def _main() -> None:
    """Runs the writer process. When the training closes the connection or is gone, the writer finishes the save in progress and
    ends. After the death of the training it waits for other ranks no longer than a living training would."""
    connection, memory, training = Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])

    def is_orphaned() -> bool:          # the connection alone does not tell: children of the training can hold it open
        return os.getppid() != training

    def receive() -> Any:
        try:
            while not connection.poll(_PARENT_CHECK):
                if is_orphaned():
                    return None
            return connection.recv()
        except (EOFError, OSError):
            return None

    def send(message: Any) -> None:
        try:
            connection.send(message)
        except OSError:                 # the training is gone; the save is finished all the same
            return

    def exit_after_training(timeout: float) -> None:
        while not is_orphaned():
            runtime.sleep(_PARENT_CHECK)
        runtime.sleep(timeout)
        os._exit(1)
    first = receive()
    if first is not None:
        target, policy, timeout = first
        runtime.Thread(target=exit_after_training, args=(timeout,), daemon=True).start()
        serve(target, policy, Staging(fd=memory), receive, send)


if __name__ == "__main__":
    _main()
