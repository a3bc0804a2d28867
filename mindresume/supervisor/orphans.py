"""Ends what a supervisor has left behind that was killed itself: its processes, and its folder of heartbeats.

A supervisor cannot prevent that it is killed. The kernel then sends SIGTERM to the command that it had started, so the launcher
ends the job. What is still there when the same command is supervised again is found by a mark in its environment.
"""
from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from mindresume import runtime
from mindresume.coordination.process_identity import is_running, process_namespace, start_ticks
from mindresume.supervisor.job_end import EndTimes
from mindresume.supervisor.process_table import Process, all_processes, ancestors, environment_of, read_process, send

MARK = "MINDRESUME_SUPERVISOR"          # environment of every process of a job: which supervisor, and key of the job
JOB_MARK, WRITER_MARK = "MSRUN_LAUNCHER_JOB", "MSRUN_LAUNCHER_WRITER"      # see scripts/msrun_launcher.sh and background_writer
_MEMORY, _PREFIX = "/dev/shm", "mindresume-supervisor"
_POLL = 0.05
_ATTEMPTS = 5                           # to make a folder and lock it; a file system without locks gets one without


def job_key(command: Sequence[str]) -> str:
    """Returns a key of a command in the current folder: the same job has it again."""
    return hashlib.sha256("\0".join([os.getcwd(), *command]).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def marks(command: Sequence[str]) -> dict[str, str]:
    """Returns the variables for the environment of the command."""
    me = f"{os.getpid()}.{start_ticks(os.getpid())}"
    return {MARK: f"{me}.{process_namespace()}.{job_key(command)}", JOB_MARK: me}


def find_orphans(command: Sequence[str]) -> list[Process]:
    """Returns the processes of this command whose supervisor is gone. A host sees the processes of its containers, but their
    supervisors have other numbers there, so that those are never orphans of the host."""
    suffix, found, table = f".{process_namespace()}.{job_key(command)}", [], all_processes()
    mine = {os.getpid(), *ancestors([os.getpid()], table, 0)}          # started by what that supervisor had started
    for process in table.values():
        if process.pid in mine:
            continue
        mark = environment_of(process.pid).get(MARK, "")
        pid, _, ticks = mark.removesuffix(suffix).partition(".")
        if mark.endswith(suffix) and pid.isdigit() and ticks.isdigit() and is_running(int(pid), int(ticks)) is False:
            found.append(process)
    return found


def end_orphans(orphans: Sequence[Process], times: EndTimes, signals: Sequence[int]) -> tuple[int, ...]:
    """Ends processes: SIGTERM, and SIGKILL after ``times.grace`` seconds; one that writes a checkpoint may finish. At the first
    of ``signals`` that this process gets, SIGKILL to all. Returns those that do not end."""
    began, asked = runtime.monotonic(), set()
    writers = {process.pid for process in orphans if WRITER_MARK in environment_of(process.pid)}
    while left := [process for process in orphans if _is_there(process)]:
        spent = runtime.monotonic() - began
        for process in left:
            patience = times.save if process.pid in writers else times.grace
            if process.pid not in asked and process.pid not in writers:
                send(process.pid, signal.SIGTERM)
                asked.add(process.pid)
            if spent >= patience or signals:
                send(process.pid, signal.SIGKILL)
        if spent > max(times.grace, times.save) + times.stuck:
            break
        runtime.sleep(_POLL)
    return tuple(process.pid for process in left)


def _is_there(process: Process) -> bool:
    seen = read_process(process.pid)
    return seen is not None and seen.ticks == process.ticks and not seen.has_ended


def make_folder() -> str:
    """Makes the folder of this supervisor, in memory if possible, and removes those of supervisors that are gone. Raises
    OSError.

    A supervisor locks its folder until it ends: containers can share the memory, and then the number of a process does not tell
    whether it runs.
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
        else:                                   # another supervisor has removed it before it was locked
            os.close(lock)
    return tempfile.mkdtemp(prefix=prefix, dir=base)


_locks: list[int] = []          # descriptors of this process's folders, open until it ends


def _locked(folder: str) -> int | None:
    """Returns a descriptor that locks ``folder``; None if another process has locked it, or it cannot be opened."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        return handle
    return None
