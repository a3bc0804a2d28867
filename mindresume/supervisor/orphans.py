"""Ends what a supervisor has left behind that was killed itself: its processes, and its folder of heartbeats.

A supervisor cannot prevent that it is killed. The kernel then sends SIGTERM to the command that it had started, so the launcher
ends the job. What is still there when the same command is supervised again is found by a mark in its environment.
"""
from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence

from mindresume.coordination.process_identity import start_ticks
from mindresume.supervisor.job_end import EndTimes
from mindresume.supervisor.process_table import Process, all_processes, environment_of, read_process, send

MARK = "MINDRESUME_SUPERVISOR"          # environment of every process of a job: which supervisor, and key of the job
JOB_MARK, WRITER_MARK = "MSRUN_LAUNCHER_JOB", "MSRUN_LAUNCHER_WRITER"      # see scripts/msrun_launcher.sh and background_writer
_MEMORY, _PREFIX = "/dev/shm", "mindresume-supervisor"
_POLL = 0.05


def job_key(command: Sequence[str]) -> str:
    """Returns a key of a command in the current folder: the same job has it again."""
    return hashlib.sha256("\0".join([os.getcwd(), *command]).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def marks(command: Sequence[str]) -> dict[str, str]:
    """Returns the variables for the environment of the command."""
    me = _identity()
    return {MARK: f"{me}.{job_key(command)}", JOB_MARK: me}


def find_orphans(command: Sequence[str]) -> list[Process]:
    """Returns the processes of this command whose supervisor is gone."""
    key, found = job_key(command), []
    for process in all_processes().values():
        pid, _, rest = environment_of(process.pid).get(MARK, "").partition(".")
        ticks, _, its_key = rest.partition(".")
        if its_key == key and pid.isdigit() and ticks.isdigit() and start_ticks(int(pid)) != int(ticks):
            found.append(process)
    return found


def end_orphans(orphans: Sequence[Process], times: EndTimes, at_once: Callable[[], bool]) -> tuple[int, ...]:
    """Ends processes: SIGTERM, and SIGKILL after ``times.grace`` seconds; one that writes a checkpoint may finish. Returns those
    that do not end."""
    began, asked = time.monotonic(), set()
    writers = {process.pid for process in orphans if WRITER_MARK in environment_of(process.pid)}
    while left := [process for process in orphans if _is_there(process)]:
        spent = time.monotonic() - began
        for process in left:
            patience = times.save if process.pid in writers else times.grace
            if process.pid not in asked and process.pid not in writers:
                send(process.pid, signal.SIGTERM)
                asked.add(process.pid)
            if spent >= patience or at_once():
                send(process.pid, signal.SIGKILL)
        if spent > max(times.grace, times.save) + times.stuck:
            break
        time.sleep(_POLL)
    return tuple(process.pid for process in left)


def _is_there(process: Process) -> bool:
    seen = read_process(process.pid)
    return seen is not None and seen.ticks == process.ticks and not seen.has_ended


def make_folder() -> str:
    """Makes the folder of this supervisor, in memory if possible, and removes those of supervisors that are gone. Raises
    OSError."""
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
    mine = f"{_PREFIX}-{os.getuid()}-"
    for name in os.listdir(base):
        pid, _, ticks = name.removeprefix(mine).partition(".")
        if name.startswith(mine) and pid.isdigit() and ticks.isdigit() and start_ticks(int(pid)) != int(ticks):
            shutil.rmtree(os.path.join(base, name), ignore_errors=True)
    folder = os.path.join(base, mine + _identity())
    os.mkdir(folder, 0o700)
    return folder


def _identity() -> str:
    return f"{os.getpid()}.{start_ticks(os.getpid())}"
