"""Reads the process table of Linux: the descendants of a process, their roles and exit statuses.

The supervisor is a *subreaper*: when a process of the job dies, its children become children of the supervisor. So every process
that a job starts stays a descendant, whatever sessions and groups it makes, and none escapes.
"""
from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mindresume.coordination.process_identity import stat_fields

PROC = Path("/proc")
_SET_PDEATHSIG, _SET_SUBREAPER = 1, 36          # of prctl
RANK, SCHEDULER, WRITER, OTHER = "rank", "scheduler", "writer", "other"
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """Describes a process.

    Attributes:
        pid: its number.
        parent: number of its parent.
        session: number of its session.
        state: letter of the kernel, such as R, S, D (waits in the kernel), T (stopped), Z (ended, not reaped).
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
        return self.state in "ZX"


def read_process(pid: int) -> Process | None:
    """Returns a process, or None if there is none with this number."""
    fields = stat_fields(pid) or ()
    try:
        return Process(pid, int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]), int(fields[49]))
    except (ValueError, IndexError):
        return None


def all_processes() -> dict[int, Process]:
    """Returns {number: process} of this host. Raises OSError if that cannot be read now."""
    found = (read_process(int(name)) for name in os.listdir(PROC) if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(root: int, table: dict[int, Process]) -> dict[int, Process]:
    """Returns the descendants of ``root`` in ``table``, parents before their children."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    coming = list(children.get(root, ()))
    while coming:
        process = coming.pop()
        if process.pid not in found:
            found[process.pid] = process
            coming += children.get(process.pid, ())
    return found


def ancestors(pids: Iterable[int], table: dict[int, Process], root: int) -> set[int]:
    """Returns the processes between ``root`` and ``pids``, without both."""
    found: set[int] = set()
    for pid in pids:
        above = table[pid].parent if pid in table else root
        while above in table and above != root and above not in found:
            found.add(above)
            above = table[above].parent
    return found - set(pids)


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment with which a process was started; empty if it has ended or belongs to another user."""
    try:
        data = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


def exit_status(process: Process) -> int | None:
    """Returns the exit status of a process that has ended, reaping it if it is a child of this process: as
    ``subprocess.Popen.returncode``, negative for a signal. None: it has not ended, or its parent has reaped it."""
    if process.parent == os.getpid():
        with suppress(ChildProcessError):
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if pid else None
    seen = read_process(process.pid)
    if seen is None or seen.ticks != process.ticks or not seen.has_ended:
        return None
    return os.waitstatus_to_exitcode(seen.wait_status)


def shell_status(status: int) -> int:
    """Returns an exit status as shells have it: 128 + N for signal N."""
    return 128 - status if status < 0 else status


def send(pid: int, number: int) -> None:
    """Sends a signal; does nothing if the process is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def become_subreaper() -> bool:
    """Makes this process the parent of descendants whose parent dies. Returns False if the system cannot."""
    return _LIBC.prctl(_SET_SUBREAPER, 1, 0, 0, 0) == 0


def end_with_parent(parent: int) -> None:
    """Makes this process receive SIGTERM when its parent dies; for a child, between fork and exec."""
    _LIBC.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:                  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def log_of(pid: int, others: Iterable[int] = ()) -> str:
    """Returns the file to which a process prints; empty if there is none. If it prints into a pipe, the file of the process among
    ``others`` that reads this pipe, such as tee."""
    target = _link(pid, 1)
    if target.startswith("pipe:"):
        reader = next((other for other in others if other != pid and _link(other, 0) == target), None)
        names: list[str] = []
        with suppress(OSError):
            names = sorted(os.listdir(PROC / str(reader) / "fd"), key=len)          # of no process, if there is no reader
        targets = (_link(reader, int(name)) for name in names if int(name) > 2)
        target = next((target for target in targets if _is_file(target)), "")
    return target if _is_file(target) else ""


def _link(pid: int, descriptor: int) -> str:
    try:
        return os.readlink(PROC / str(pid) / "fd" / str(descriptor))
    except OSError:
        return ""


def _is_file(path: str) -> bool:
    """Returns whether an open file is one on a disk, by its name alone: its disk can hang."""
    return path.startswith("/") and not path.startswith(("/dev/", "/proc/"))
