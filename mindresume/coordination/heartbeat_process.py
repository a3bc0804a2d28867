"""Sends the heartbeats of a lease from a small process of its own.

    process = HeartbeatProcess.start(path, encoded, every, tag)     # None: it cannot be started
    process.reached(500);  process.is_alive();  process.end(seconds)

MindSpore holds the interpreter lock while it compiles a graph, for minutes with a large one. A
thread is silent in that time, and another host would take the job for dead. So the process is a new
interpreter, which waits for nothing of the training. It imports neither numpy nor a framework (13
MB). It lives and beats for its parent alone:

* It ends when its parent is not its parent any more, which it checks each second and right before
  each heartbeat.
* It sends nothing while its parent is stopped (SIGSTOP, a debugger) or has SIGKILL pending: as a
  thread of the parent would.
* It ignores the signals that ask to end, which launchers send to all processes of a job: its parent
  may still save.
"""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from mindresume import runtime
from mindresume.coordination.liveness import can_go_on
from mindresume.model.manifest import encode_head, read_head
from mindresume.storage.operations import publish
from mindresume.storage.posix import PosixStorage

_CHECK = 1.0  # seconds between two looks at the parent
_END = b"end"
# environment; the marks by which launchers find the ranks of a job are left out
_KEPT = ("PATH", "LD_LIBRARY_PATH")
_PROGRAM = (
    "import sys; sys.path += sys.argv[1:3]; from mindresume.coordination import heartbeat_process; "
    "heartbeat_process.main(*sys.argv[3:])"
)


def start_apart(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, which ignores from its first moment on the signals
    that launchers and platforms send to all processes that they find. ``how``: as for ``Popen``."""
    # The mask of this thread alone; the new process inherits it.
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    )
    try:
        return subprocess.Popen(command, start_new_session=True, **how)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class HeartbeatProcess:
    """A running process. Use ``start``."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process

    @classmethod
    def start(cls, path: str, encoded: bytes, every: float, tag: str) -> HeartbeatProcess | None:
        """Starts the process. Returns None if that is not possible: no interpreter, the limit of
        processes, no memory.

        Args:
            path: of the lease.
            encoded: its content; the counter ``beat`` goes on from there.
            every: seconds between two heartbeats.
            tag: part of the temporary names.
        """
        folders = [
            str(Path(__file__).resolve().parents[2]),
            str(Path(xxhash.__file__).resolve().parents[1]),
        ]
        try:
            process = start_apart(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _PROGRAM,
                    *folders,
                    path,
                    encoded.hex(),
                    repr(every),
                    tag,
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                cwd="/",
                bufsize=0,
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        os.set_blocking(process.stdin.fileno(), False)  # it may hang in its file system
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def reached(self, step: int) -> None:
        """Sets the step that the next heartbeats have."""
        self._tell(b"%d" % step)

    def _tell(self, line: bytes) -> None:
        with suppress(OSError, ValueError):
            os.write(self._process.stdin.fileno(), line + b"\n")

    def end(self, seconds: float) -> bool:
        """Ends the process. Returns whether it is gone; False if it hangs in the file system for
        longer than ``seconds``."""
        self._tell(_END)
        for last in (False, True):
            try:
                self._process.wait(_CHECK if last else seconds)
                break
            except subprocess.TimeoutExpired:
                if last:
                    return False
                self._process.kill()
        with suppress(OSError):
            self._process.stdin.close()
        return True


def main(path: str, encoded: str, every: str, tag: str, parent: str) -> None:
    """Runs the process. Arguments: as of ``start``, and the number of the parent."""
    head, _ = read_head(io.BytesIO(bytes.fromhex(encoded)), "claim")
    storage = PosixStorage()
    due = runtime.monotonic() + float(every)
    poll = select.poll()
    heard = b""
    poll.register(0, select.POLLIN)
    while True:
        if poll.poll(max(0.0, min(_CHECK, due - runtime.monotonic())) * 1000):
            found = os.read(0, 1 << 16)
            *lines, heard = (heard + found).split(b"\n")
            if not found or _END in lines:
                return
            head["step"] = int(lines[-1]) if lines else head["step"]
        if os.getppid() != int(parent):
            return
        if runtime.monotonic() >= due:
            if not can_go_on(int(parent)):
                runtime.sleep(_CHECK)
                continue
            due = runtime.monotonic() + float(every)
            head["beat"] += 1
            with suppress(OSError):  # the next heartbeat tries again
                publish(storage, path, [encode_head(head)], tag)
