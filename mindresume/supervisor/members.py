"""Tracks the processes of one start of a job: which exist, which of them are ranks, which have
ended and with what status.

    members = Members(command_pid)
    members.refresh(heartbeats)                 # reads the process table
    # the kernel wakes this process in the moment in which one of them ends
    for ended in members.wait(0.2): ...

The supervisor is a *subreaper*: when a process of the job dies, its children become children of the
supervisor. So every process that a job starts stays a descendant, whatever sessions and groups it
makes, and none escapes.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mindresume import runtime
from mindresume.coordination.liveness import Process, read_process
from mindresume.coordination.rank_heartbeat import Heartbeat

PROC = Path("/proc")
_SET_PDEATHSIG, _SET_SUBREAPER = 1, 36  # of prctl
RANK = "rank"
SCHEDULER = "scheduler"
WRITER = "writer"
OTHER = "other"
_LIBC = ctypes.CDLL(None, use_errno=True)


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
    """Returns the environment with which a process was started; empty if it has ended or belongs to
    another user."""
    try:
        data = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


def exit_status(process: Process) -> int | None:
    """Returns the exit status of a process that has ended, reaping it if it is a child of this
    process: as ``subprocess.Popen.returncode``, negative for a signal. None: it has not ended, or
    its parent has reaped it."""
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
    """Makes this process the parent of descendants whose parent dies. Returns False if the system
    cannot."""
    return _LIBC.prctl(_SET_SUBREAPER, 1, 0, 0, 0) == 0


def end_with_parent(parent: int) -> None:
    """Makes this process receive SIGTERM when its parent dies; for a child, between fork and
    exec."""
    _LIBC.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def log_of(pid: int, others: Iterable[int] = ()) -> str:
    """Returns the file to which a process prints; empty if there is none. If it prints into a pipe,
    the file of the process among ``others`` that reads this pipe, such as tee."""
    target = _link(pid, 1)
    if target.startswith("pipe:"):
        reader = next(
            (other for other in others if other != pid and _link(other, 0) == target), None
        )
        names: list[str] = []
        with suppress(OSError):
            # of no process, if there is no reader
            names = sorted(os.listdir(PROC / str(reader) / "fd"), key=len)
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


# ---- members -------------------------------------------------------------------------------------

# least and greatest number of seconds between two readings of the process table
_SCAN_SECONDS = 0.2, 0.5
# the same while no process is young: ends are noticed without it
_SETTLED_SCAN_SECONDS = 2.0
_SCAN_SHARE = 0.05  # of a core may be spent with reading it, within these bounds
# seconds after which the role of a process does not change by an exec any more
_SETTLED = 10.0
# environment of a process that writes checkpoints (saving.async_saver)
WRITER_MARK = "MSRUN_LAUNCHER_WRITER"


@dataclass(frozen=True)
class Member:
    """Describes a process of the job. ``rank``: None if it is not known. ``seen``: since when,
    ``time.monotonic``; of a rank by its heartbeat alone: since the first one. ``log``: the file
    that it prints to; empty: none."""

    process: Process
    role: str = OTHER
    rank: int | None = None
    seen: float = 0.0
    log: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True)
class Ended:
    """Describes a process that has ended. ``status``: as ``subprocess.Popen.returncode``; None: its
    parent has reaped it before this process could read it."""

    member: Member
    status: int | None


class Members:
    """Tracks the descendants of this process. ``ignored``: numbers of descendants that belong to no
    job, or were left behind by an earlier start."""

    def __init__(self, ignored: Collection[int] = ()):
        self.root, self.ignored = os.getpid(), frozenset(ignored)
        self._members: dict[int, Member] = {}
        self._ended: set[tuple[int, int]] = set()  # (number, start) of those that have ended
        # of ranks that have ended and were never seen
        self._missed: list[Heartbeat] = []
        # {pid: descriptor that is readable once the process has ended}; not all
        self._handles: dict[int, int] = {}
        self._poll = select.poll()
        self._next_scan = 0.0
        self._table: dict[int, Process] = {}
        # files to which ranks and the scheduler print, also those that have ended
        self.logs: set[str] = set()

    def ignore(self, pid: int) -> None:
        """Leaves a process out from now on."""
        self.ignored |= {pid}
        self._forget(pid)

    # ---- which -----------------------------------------------------------------------------------

    def alive(self, *roles: str) -> list[Member]:
        """Returns the members that have not ended, or those with one of ``roles``."""
        return [member for member in self._members.values() if not roles or member.role in roles]

    def above(self, pids: Iterable[int]) -> set[int]:
        """Returns the members that have started ``pids``, directly or not."""
        return ancestors(pids, self._table, self.root) & self._members.keys()

    def below(self, pid: int) -> set[int]:
        """Returns the members that ``pid`` has started, directly or not."""
        return descendants(pid, self._table).keys() & self._members.keys()

    def refresh(self, heartbeats: Iterable[Heartbeat] = (), now: bool = True) -> None:
        """Reads the process table; without ``now`` only if the last reading is long enough ago."""
        began, spent = runtime.monotonic(), runtime.process_time()
        if not now and began < self._next_scan:
            return
        try:
            self._table = all_processes()
        except OSError:
            # the limit of open files: it is read again, and ends are noticed meanwhile
            self._next_scan = began + _SCAN_SECONDS[1]
            return
        ranks = {(heartbeat.pid, heartbeat.ticks): heartbeat for heartbeat in heartbeats}
        for process in descendants(self.root, self._table).values():
            if process.pid in self.ignored:
                continue
            # a zombie; its parent is stopped, or has died
            if (process.pid, process.ticks) in self._ended:
                exit_status(process)
                continue
            member = self._members.get(process.pid)
            if member is None or member.process.ticks != process.ticks:
                if not self._enter(process):
                    continue
                member = Member(process, seen=began)
            is_young = member.role != RANK and began - member.seen < _SETTLED
            member = (
                self._classified(replace(member, process=process))
                if is_young
                else replace(member, process=process)
            )
            heartbeat = ranks.get((process.pid, process.ticks))
            # the first one can come late; its log is looked for from then on
            if heartbeat is not None:
                member = replace(
                    member,
                    role=RANK,
                    rank=heartbeat.rank if heartbeat.rank >= 0 else member.rank,
                    seen=member.seen if member.role == RANK else began,
                )
            self._members[process.pid] = member
        # now that all are known: one can read what another prints
        for pid, member in self._members.items():
            if (
                member.role in (RANK, SCHEDULER)
                and not member.log
                and began - member.seen < _SETTLED
            ):
                self._members[pid] = member = replace(member, log=log_of(pid, self._members))
                self.logs |= {member.log} - {""}
        self._missed += [
            heartbeat
            for key, heartbeat in ranks.items()
            if key not in self._ended
            and (key[0] not in self._table or self._table[key[0]].ticks != key[1])
        ]
        least, most = _SCAN_SECONDS
        pause = min(most, max(least, (runtime.process_time() - spent) / _SCAN_SHARE))
        if self._members and all(
            began - member.seen >= _SETTLED for member in self._members.values()
        ):
            pause = _SETTLED_SCAN_SECONDS
        self._next_scan = runtime.monotonic() + pause

    def _enter(self, process: Process) -> bool:
        """Begins to track a process. Returns False if it has ended already, and another one can
        have its number."""
        handle = None
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        except OSError:
            # a kernel before 5.3, a sandbox, too many open files: ``wait`` looks at the process
            # table
            pass
        seen = read_process(process.pid)
        if seen is None or seen.ticks != process.ticks:
            if handle is not None:
                os.close(handle)
            return False
        self._forget(process.pid)
        if handle is not None:
            self._handles[process.pid] = handle
            self._poll.register(handle, select.POLLIN)
        return True

    def _classified(self, member: Member) -> Member:
        """Returns the member with the role that its environment shows. Between fork and exec a
        process has that of its parent."""
        environment = environment_of(member.pid)
        if not environment:  # it ends, or is another user's
            return member
        if WRITER_MARK in environment:
            return replace(member, role=WRITER, rank=None)
        if environment.get("MS_ROLE") == "MS_SCHED":
            return replace(member, role=SCHEDULER, rank=None)
        is_leader = member.pid == member.process.session
        if (
            environment.get("MS_ROLE") == "MS_WORKER"
            and is_leader
            and not any(self._members[pid].role == RANK for pid in self.above([member.pid]))
        ):
            number = environment.get("RANK_ID", "")
            return replace(member, role=RANK, rank=int(number) if number.isdigit() else None)
        return replace(member, role=OTHER, rank=None)

    def log_file(self, member: Member) -> str:
        """Returns the log of a rank. One that ended before it was first seen has a log beside those
        of other ranks, if theirs are named by rank, as msrun's are."""
        if member.log or member.rank is None:
            return member.log
        for other in self._members.values():
            folder, name = os.path.split(other.log)
            path = os.path.join(
                folder, re.sub(rf"(?<!\d){other.rank}(?!\d)", str(member.rank), name)
            )
            if other.log and other.rank is not None and path != other.log and os.path.isfile(path):
                self.logs.add(path)
                return path
        return ""

    def _forget(self, pid: int) -> None:
        self._members.pop(pid, None)
        handle = self._handles.pop(pid, None)
        if handle is not None:
            self._poll.unregister(handle)
            os.close(handle)

    # ---- ends ------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> list[Ended]:
        """Returns the members that have ended, in order of their numbers; waits up to ``seconds``
        for one."""
        ready = {
            handle
            for handle, _ in self._poll.poll(0 if self._missed else max(0, int(seconds * 1000)))
        }
        found = []
        missed, self._missed = self._missed, []
        for heartbeat in missed:
            key = (heartbeat.pid, heartbeat.ticks)
            if key not in self._ended and heartbeat.pid not in self._members:
                self._ended.add(key)
                process = Process(heartbeat.pid, 0, 0, "X", heartbeat.ticks)
                found.append(
                    Ended(
                        Member(process, RANK, heartbeat.rank if heartbeat.rank >= 0 else None), None
                    )
                )
        ended = {pid for pid, handle in self._handles.items() if handle in ready}
        ended |= {
            pid
            for pid, member in self._members.items()
            if pid not in self._handles and _has_ended(member.process)
        }
        for pid in sorted(ended):
            member = self._members[pid]
            # its parent can be another one than at the last reading of the table
            seen = read_process(pid)
            same = seen is not None and seen.ticks == member.process.ticks
            found.append(Ended(member, exit_status(seen) if same else None))
            self._ended.add((pid, member.process.ticks))
            self._forget(pid)
        return found

    def close(self) -> None:
        """Stops tracking."""
        for pid in list(self._members):
            self._forget(pid)


def _has_ended(process: Process) -> bool:
    """Returns whether a process has ended. One whose row cannot be read, for want of a descriptor,
    has not."""
    seen = read_process(process.pid)
    if seen is None:
        return not os.path.exists(f"/proc/{process.pid}")
    return seen.ticks != process.ticks or seen.has_ended
