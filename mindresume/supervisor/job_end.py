"""Ends every process of a job, with deadlines, also of one whose supervisor was killed itself.

    1. The processes that started the ranks (msrun, the launcher) are stopped: msrun would kill all
      ranks as soon as one ends.
    2. SIGTERM to the ranks and what they have started; SIGKILL ``kill_after`` seconds later, after
       a signal to the supervisor ``leave`` seconds. A rank that saves has ``save`` seconds before
       that, because SIGTERM ends a process at once that does not handle it.
    3. SIGTERM to the scheduler, which the ranks need until they end, and to all others; those of 1
       go on, so that scripts clean up. SIGKILL after ``_CLEANUP`` seconds.
    4. Processes that write checkpoints may finish: ``save`` seconds.

Without a known rank, 2 is for every process. All are gone when the kernel says so of each of them.
A process that does not end even after SIGKILL, because it waits in the kernel for a device or a
disk (state D), is left behind after ``stuck`` seconds and named.

Who may finish a save is decided from heartbeats: the ranks whose save can still become complete. A
save is complete once *every* rank has published its record; nobody commits for a rank that has not.
So a rank that dies before it has written a step takes that step, and every later one, with it: the
others do not finish them. Whether rank 0 has committed does not matter: the next start commits what
is complete.

Two savers need no time here. A process that writes for a rank (``async_save: process``) outlives it
and is a member of the job of its own. A save of the tier in memory is not waited for: its checksums
take less than ``--kill-after`` unless it is very large, and if it is lost, the next start takes the
slot before, which all ranks have whole; with a save at every step some rank is nearly always at it,
and each failure would wait.

A supervisor cannot prevent that it is killed. The kernel then sends SIGTERM to the command that it
had started, so the launcher ends the job. What is still there when the same command is supervised
again is found by a mark in its environment (*orphans*).
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from mindresume import runtime
from mindresume.coordination.liveness import is_running, namespace, start_ticks
from mindresume.coordination.rank_heartbeat import ENDING, NONE, SAVING, Heartbeat
from mindresume.storage import Hurry
from mindresume.supervisor.hang import JobSettings
from mindresume.supervisor.members import (
    OTHER,
    RANK,
    SCHEDULER,
    WRITER,
    WRITER_MARK,
    Member,
    Members,
    Process,
    all_processes,
    ancestors,
    environment_of,
    read_process,
    send,
)
from mindresume.supervisor.restart_policy import DIED, PEER, STOPPED, JobEnd

_CLEANUP = 1.0  # seconds for launchers and scripts after the ranks
_POLL = 0.05


class EndingJob(Protocol):
    """The job that is ended."""

    members: Members
    settings: JobSettings

    def refresh(self) -> None:
        """Reads the process table again. Called often."""

    def is_saving(self, member: Member, kind: str) -> bool:
        """Returns whether a rank writes a checkpoint that can still become complete."""


class Ending:
    """Ends all members of a job, for the reason ``why``; kills them at once in a hurry, such as
    after a second Ctrl-C."""

    def __init__(self, job: EndingJob, why: JobEnd, observer: Hurry):
        self.job = job
        self.why = why
        self.observer = observer
        self.members, self.settings = job.members, job.settings
        self.left: set[int] = set()
        self._asked: dict[int, float] = {}  # {process: when it received SIGTERM}
        self._killed: dict[int, float] = {}  # {process: when it received SIGKILL first}

    def run(self) -> tuple[int, ...]:
        """Returns the numbers of those left behind, once all others have ended."""
        self.job.refresh()
        ranks = [member.pid for member in self.members.alive(RANK)]
        launchers = self.members.above(ranks)
        for pid in launchers:
            send(pid, signal.SIGSTOP)

        grace = self.settings.leave if self.why.leave else self.settings.kill_after
        self._end((RANK, OTHER), grace, self.settings.save, below_ranks=bool(ranks))
        for pid in launchers:
            send(pid, signal.SIGTERM)
            send(pid, signal.SIGCONT)
        self._asked.update(dict.fromkeys(launchers, runtime.monotonic()))
        self._end((RANK, OTHER, SCHEDULER), _CLEANUP, _CLEANUP)
        self._end((WRITER,), grace, self.settings.save)
        self._end((), 0.0, 0.0)  # whatever came meanwhile
        return tuple(sorted(self.left))

    def _alive(self, roles: Sequence[str], below_ranks: bool) -> list[Member]:
        """Returns the members with one of ``roles``, of all roles without. ``below_ranks``: the
        ranks and what they started."""
        alive = [member for member in self.members.alive(*roles) if member.pid not in self.left]
        if not below_ranks:
            return alive
        ranks = [member.pid for member in alive if member.role == RANK]
        below = set(ranks).union(*map(self.members.below, ranks))
        return [member for member in alive if member.pid in below]

    def _end(
        self, roles: Sequence[str], grace: float, save: float, below_ranks: bool = False
    ) -> None:
        """Ends these members, until there are none."""
        began = runtime.monotonic()
        while left := self._alive(roles, below_ranks):
            now, saving = runtime.monotonic(), self._saving(left)
            for member in left:
                is_saving, is_late = member.pid in saving, now - began >= max(grace, save)
                # the ranks of a job that leaves save because of the signal; else it comes after
                may_ask = is_late or not is_saving or self.why.leave
                if may_ask and member.pid not in self._asked and member.role != WRITER:
                    self._asked[member.pid] = now
                    send(member.pid, signal.SIGTERM)
                # it can have been asked late, after its save
                if not is_saving:
                    is_late = now - max(began, self._asked.get(member.pid, began)) >= grace
                if is_late or self.observer.is_hurried():
                    send(member.pid, signal.SIGKILL)
                    if now - self._killed.setdefault(member.pid, now) > self.settings.stuck:
                        self.left.add(member.pid)
            self.members.wait(_POLL)
            self.job.refresh()

    def _saving(self, left: list[Member]) -> set[int]:
        """Returns the processes that may finish a save: writers, ranks, and what these ranks have
        started."""
        ranks = [
            member.pid
            for member in left
            if member.role == RANK and self.job.is_saving(member, self.why.kind)
        ]
        return {member.pid for member in left if member.role == WRITER}.union(
            ranks, *map(self.members.below, ranks)
        )


# ---- saves that may finish -----------------------------------------------------------------------


def open_saves(beat: Heartbeat) -> list[int]:
    """Returns the steps that the threads of a rank are writing, oldest first."""
    in_training_thread = beat.phase in (SAVING, ENDING) and beat.saves.begun > beat.saves.written
    return sorted({beat.saves.writing, beat.saves.begun if in_training_thread else 0} - {0, NONE})


def first_lost_step(dead: Iterable[Heartbeat]) -> int | None:
    """Returns the first step that can never be complete, because one of the ranks ``dead`` has not
    written it; None: none."""
    return min((step for beat in dead for step in open_saves(beat)), default=None)


def may_finish(beat: Heartbeat, lost: int | None, kind: str) -> bool:
    """Returns whether a rank is to be waited for.

    Args:
        lost: as ``first_lost_step``.
        kind: of the end of the start. The training thread of a job that hangs is not waited for: it
            can be the one that hangs.
    """
    if beat.saves.writing and (lost is None or beat.saves.writing < lost):
        return True
    if kind not in (DIED, PEER, STOPPED):
        return False
    return beat.phase in (SAVING, ENDING) and (lost is None or beat.saves.begun < lost)


# ---- orphans -------------------------------------------------------------------------------------

# environment of every process of a job: which supervisor, and key of the job
MARK = "MINDRESUME_SUPERVISOR"
JOB_MARK = "MSRUN_LAUNCHER_JOB"  # see scripts/msrun_launcher.sh
_MEMORY, _PREFIX = "/dev/shm", "mindresume-supervisor"
# to make a folder and lock it; a file system without locks gets one without
_ATTEMPTS = 5


def job_key(command: Sequence[str]) -> str:
    """Returns a key of a command in the current folder: the same job has it again."""
    return hashlib.sha256(
        "\0".join([os.getcwd(), *command]).encode("utf-8", "surrogateescape")
    ).hexdigest()[:16]


def marks(command: Sequence[str]) -> dict[str, str]:
    """Returns the variables for the environment of the command."""
    me = f"{os.getpid()}.{start_ticks(os.getpid())}"
    return {MARK: f"{me}.{namespace('pid')}.{job_key(command)}", JOB_MARK: me}


def find_orphans(command: Sequence[str]) -> list[Process]:
    """Returns the processes of this command whose supervisor is gone. A host sees the processes of
    its containers, but their supervisors have other numbers there, so that those are never orphans
    of the host."""
    suffix = f".{namespace('pid')}.{job_key(command)}"
    found = []
    table = all_processes()
    # started by what that supervisor had started
    mine = {os.getpid(), *ancestors([os.getpid()], table, 0)}
    for process in table.values():
        if process.pid in mine:
            continue
        mark = environment_of(process.pid).get(MARK, "")
        pid, _, ticks = mark.removesuffix(suffix).partition(".")
        if (
            mark.endswith(suffix)
            and pid.isdigit()
            and ticks.isdigit()
            and is_running(int(pid), int(ticks)) is False
        ):
            found.append(process)
    return found


def end_orphans(
    orphans: Sequence[Process], settings: JobSettings, signals: Sequence[int]
) -> tuple[int, ...]:
    """Ends processes: SIGTERM, and SIGKILL after ``settings.leave`` seconds; one that writes a
    checkpoint may finish until then. At the first of ``signals`` that this process gets, SIGKILL to
    all. Returns those that do not end."""
    began, asked = runtime.monotonic(), set()
    writers = {process.pid for process in orphans if WRITER_MARK in environment_of(process.pid)}
    while left := [process for process in orphans if _is_there(process)]:
        spent = runtime.monotonic() - began
        for process in left:
            if process.pid not in asked and process.pid not in writers:
                send(process.pid, signal.SIGTERM)
                asked.add(process.pid)
            if spent >= settings.leave or signals:
                send(process.pid, signal.SIGKILL)
        if spent > settings.leave + settings.stuck:
            break
        runtime.sleep(_POLL)
    return tuple(process.pid for process in left)


def _is_there(process: Process) -> bool:
    seen = read_process(process.pid)
    return seen is not None and seen.ticks == process.ticks and not seen.has_ended


def make_folder() -> str:
    """Makes the folder of this supervisor, in memory if possible, and removes those of supervisors
    that are gone. Raises OSError.

    A supervisor locks its folder until it ends: containers can share the memory, and then the
    number of a process does not tell whether it runs.
    """
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
    mine = f"{_PREFIX}-{os.getuid()}-"
    for name in os.listdir(base):
        folder = os.path.join(base, name)
        if name.startswith(mine) and (lock := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    prefix = f"{mine}{os.getpid()}."
    for _ in range(_ATTEMPTS):
        folder = tempfile.mkdtemp(prefix=prefix, dir=base)
        lock = _locked(folder)
        if lock is None:
            with suppress(OSError):
                os.rmdir(folder)
        elif os.path.isdir(folder):
            _locks.append(lock)
            return folder
        else:
            # another supervisor has removed it before it was locked
            os.close(lock)
    return tempfile.mkdtemp(prefix=prefix, dir=base)


def heartbeats_of(supervisor: int, start: int) -> str:
    """Returns the folder with the heartbeats of a start of the process ``supervisor`` on this host;
    empty if there is none."""
    found = [
        path
        for base in (_MEMORY, tempfile.gettempdir())
        for path in glob.glob(f"{base}/{_PREFIX}-*-{supervisor}.*/start_{start}")
    ]
    return found[0] if found else ""


_locks: list[int] = []  # descriptors of this process's folders, open until it ends


def _locked(folder: str) -> int | None:
    """Returns a descriptor that locks ``folder``; None if another process has locked it, or it
    cannot be opened."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        return handle
    return None
