"""Tells who is alive: a process of this machine, or a member of a shared folder; and sends the
heartbeats of this process.

    holder = (os.getpid(), start_ticks(os.getpid()))
    is_running(*holder)                         # True, False, or None: that cannot be found out

A process is its number and its start, because its number alone can belong to another one later.

    watch = Watch(clock)
    seen = watch.see("run 3", number)           # each time that the file was read
    clock() - seen.since                        # seconds of silence

A member of a shared folder has a small file with a number, and is alive while the number grows:
leases (``lease``) and the states of supervisors (``supervisor.rendezvous``) are such files. Clocks
of hosts are never compared: a number is as old as the time since this process first saw it. The
caches of a network file system can show it late.

    process = HeartbeatProcess.start(path, encoded, every, tag)     # None: it cannot be started
    process.reached(500);  process.is_alive();  process.end(seconds)

MindSpore holds the interpreter lock while it compiles a graph, for minutes with a large one. A
thread is silent in that time, and another host would take the job for dead. So the heartbeats of a
lease come from a new interpreter, which waits for nothing of the training. It imports neither numpy
nor a framework (13 MB). It lives and beats for its parent alone:

* It ends when its parent is not its parent any more, which it checks each second and right before
  each heartbeat.
* It sends nothing while its parent is stopped (SIGSTOP, a debugger) or has SIGKILL pending: as a
  thread of the parent would.
* It ignores the signals that ask to end, which launchers send to all processes of a job: its parent
  may still save.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mindresume import runtime
from mindresume.model.manifest import encode_head, read_head
from mindresume.storage import publish
from mindresume.storage.posix import PosixStorage

_STOPPED = "Tt"  # by a signal, by a debugger
_ENDED = "ZX"  # states of a process that runs no code any more


@dataclass(frozen=True)
class Process:
    """Describes a process.

    Attributes:
        pid: its number.
        parent: number of its parent.
        session: number of its session.
        state: letter of the kernel, such as R, S, D (waits in the kernel), T (stopped), Z (ended,
            not reaped).
        ticks: when it was started, in clock ticks since boot; with ``pid`` unique.
        wait_status: as of ``os.wait``, of a process that has ended; else 0.
    """

    pid: int
    parent: int
    session: int
    state: str
    ticks: int
    wait_status: int = 0

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


def read_process(pid: int) -> Process | None:
    """Returns a process, or None if there is none with this number."""
    with suppress(OSError):
        return _read_process(pid)
    return None


def _read_process(pid: int) -> Process:
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # after the name of the program (proc(5))
    try:
        parent, session, ticks, wait_status = (int(fields[index]) for index in (1, 3, 19, 49))
    except (ValueError, IndexError) as error:
        raise OSError(errno.EIO, str(error), file.name) from error
    return Process(pid, parent, session, fields[0].decode(), ticks, wait_status)


def start_ticks(pid: int) -> int:
    """Returns when a process was started, in clock ticks since boot; 0 if it does not exist or has
    ended (a zombie)."""
    with suppress(OSError):
        process = _read_process(pid)
        return 0 if process.state in _ENDED else process.ticks
    return 0


def is_running(pid: int, ticks: int) -> bool | None:
    """Returns whether the process ``pid`` that was started at ``ticks`` still runs. None: unknown,
    which never means dead.

    | what is seen | answer |
    |---|---|
    | its entry in /proc, with the same start | True |
    | an entry with another start, or of a process that has ended (a zombie) | False |
    | the kernel has no process of this number (ESRCH of kill(2)) | False |
    | an entry of a process with SIGKILL pending: a call in the kernel may never end | None |
    | no entry, but a process (hidepid hides those of other users) | None |
    | an entry that cannot be read (EMFILE, EACCES) | None |
    | a process of this number, while ``ticks`` is 0, not known | None |
    """
    if not ticks:
        return _without_entry(pid)
    try:
        process = _read_process(pid)
        if process.has_ended or process.ticks != ticks:
            return False
        return None if _is_being_killed(pid) else True
    except ProcessLookupError:  # it ended while it was read
        return False
    except OSError:
        return _without_entry(pid)


def _without_entry(pid: int) -> bool | None:
    """Returns whether a process that /proc does not show runs: False, or unknown."""
    if pid <= 0:  # not a process, but a group of them
        return None
    try:
        os.kill(pid, 0)  # asks, and sends nothing
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return None


def can_go_on(pid: int) -> bool:
    """Returns whether a process runs its program: False if it is stopped, has ended, or SIGKILL is
    pending for it. True if that cannot be found out."""
    process = read_process(pid)
    with suppress(OSError):
        return process is None or (
            process.state not in _ENDED + _STOPPED and not _is_being_killed(pid)
        )
    return True


def _is_being_killed(pid: int) -> bool:
    """Returns whether SIGKILL is pending for a process, as /proc/PID/status says."""
    with open(f"/proc/{pid}/status", "rb") as file:
        pending = (
            int(line.split()[1], 16) for line in file if line.startswith((b"SigPnd:", b"ShdPnd:"))
        )
        return any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)


def start_time(ticks: int) -> float | None:
    """Returns in seconds since 1970 what ``ticks`` says in clock ticks since boot, to about a
    hundredth of a second; None if ``ticks`` is 0, not known, or the kernel does not tell."""
    try:
        with open("/proc/uptime") as file:
            up = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return runtime.time() - max(up - ticks / os.sysconf("SC_CLK_TCK"), 0.0) if ticks else None


def namespace(kind: str) -> int:
    """Returns the namespace of this process in which numbers of processes hold ("pid"), or paths
    ("mnt"); 0: not known."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def machine() -> str:
    """Returns the identity of this machine, in which numbers of processes hold; empty if it cannot
    be read."""
    boot, processes = boot_id(), namespace("pid")
    return f"{boot}/{processes}" if boot and processes else ""


def host_identity() -> str:
    """Returns a text that is the same for all processes of one host, or of one container of it, and
    for no other: the boot of the kernel and the host name. Several nodes can have one host name."""
    return f"{boot_id()} {runtime.gethostname()}"


def boot_id() -> str:
    """Returns the identity of this boot of the kernel; empty if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


# ---- members of a shared folder ------------------------------------------------------------------

# seconds between two readings of a clock; of a longer gap no more count
_GAP = 10.0


@dataclass(frozen=True)
class Sighting:
    """Holds what was last seen of a member. Times are of the clock of the watch.

    Attributes:
        number: the newest; None: its file cannot be read.
        first: when the member was first seen.
        since: when this number was first seen.
        advances: how often the number was seen to change.
        content: of the file with this number.
    """

    number: int | None
    first: float
    since: float
    advances: int = 0
    content: Any = None


class Watch:
    """Remembers the numbers of members. ``clock``: monotonic; an ``AwakeClock`` where the watcher
    can be suspended."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.members: dict[Hashable, Sighting] = {}

    def see(self, member: Hashable, number: int | None, content: Any = None) -> Sighting:
        """Notes the number of a member. Returns what is known of it, with the ``content`` of its
        newest file."""
        before, now = self.members.get(member), self.clock()
        if before is not None and before.number == number:
            return before
        seen = (
            Sighting(number, now, now, 0, content)
            if before is None
            else Sighting(number, before.first, now, before.advances + 1, content)
        )
        self.members = {**self.members, member: seen}  # others iterate over it
        return seen


class AwakeClock:
    """A monotonic clock that stands still while this process is suspended (SIGSTOP, Slurm's
    suspend, a paused container or machine): nobody could make progress then, or be heard of. It is
    read several times a second, and a gap between two readings shows that nobody could."""

    def __init__(self) -> None:
        self._last = runtime.monotonic()
        self._lock = runtime.Lock()
        self._gaps: list[tuple[float, float]] = []  # (end, seconds that do not count)

    def __call__(self) -> float:
        with self._lock:
            now = runtime.monotonic()
            # a slow disk counts a little, so that no watch is endless
            if now - self._last > _GAP:
                self._gaps.append((now, now - self._last - _GAP))
            self._last = now
        return self.at(now)

    def at(self, moment: float) -> float:
        """Returns the reading at a moment of the monotonic clock."""
        return moment - sum(seconds for end, seconds in self._gaps if end <= moment)


# ---- the heartbeats of this process, from one of its own -----------------------------------------


_CHECK = 1.0  # seconds between two looks at the parent
_END = b"end"
# environment; the marks by which launchers find the ranks of a job are left out
_KEPT = ("PATH", "LD_LIBRARY_PATH")
_PROGRAM = (
    "import sys; sys.path += sys.argv[1:3]; from mindresume.coordination import liveness; "
    "liveness.beat(*sys.argv[3:])"
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


def beat(path: str, encoded: str, every: str, tag: str, parent: str) -> None:
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
