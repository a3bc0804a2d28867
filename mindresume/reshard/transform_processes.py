"""Starts and monitors the processes of the reference engine (``mindresume.mindformers.transform_worker``). This process does not
import mindspore."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mindresume import runtime
from mindresume.errors import EngineError

COMMAND = (sys.executable, "-m", "mindresume.mindformers.transform_worker")
PAUSE = 0.05                # seconds between two polls of the processes
LAST_LINES = 6              # lines of a process's output in an error
LAST_BYTES = 1 << 16        # end of the output in which they are searched


def run(jobs: Sequence[Sequence[str]], work: str, timeout: float, command: Sequence[str] = COMMAND) -> None:
    """Starts one process for each list of jobs and waits for all. Their output goes to log files in ``work``. EngineError if one
    fails, or after ``timeout`` seconds. When this returns or raises, no process and no descendant of one is left."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *map(os.path.abspath, filter(None, sys.path))])
    environment = {"GLOG_v": "3", **os.environ, "PYTHONPATH": path}
    deadline = runtime.monotonic() + timeout
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number, files in enumerate(jobs):
            with open(_log(work, number), "wb") as out:         # MindSpore leaves folders in its working directory
                running[number] = subprocess.Popen([*command, *files], stdin=subprocess.PIPE, stdout=out, stderr=out,
                                                   env=environment, cwd=work, start_new_session=True)
        while running:
            for number, process in list(running.items()):
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    _end(running.pop(number))
                    _check_status(process.returncode, number, len(jobs), work)
            if running and runtime.monotonic() > deadline:
                late = next(iter(running))
                raise failure(f"process {late + 1} of {len(jobs)} was not done after {timeout:.0f} s and was ended", work, late)
            if running:
                runtime.sleep(PAUSE)
    finally:
        for process in running.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its process group. It was not reaped, so its number cannot belong to another process."""
    os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()
    process.wait()


def _check_status(status: int, number: int, count: int, work: str) -> None:
    """Raises EngineError unless a process ended with status 0."""
    if not status:
        return
    how = f"ended with status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
    raise failure(f"process {number + 1} of {count} {how}", work, number)


def failure(what: str, work: str, number: int = 0) -> EngineError:
    """Returns an error with the last lines of output of process ``number``."""
    try:
        with open(_log(work, number), "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LAST_BYTES, 0))
            said = file.read(LAST_BYTES).decode(errors="replace")
    except FileNotFoundError:
        said = ""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()][-LAST_LINES:]
    return EngineError(f"MindSpore's transform failed: {what}. Use --engine direct, which does without it. Its last lines:\n"
                       + ("\n".join(f"  {line[-400:]}" for line in lines) or "  none"))


def _log(work: str, number: int) -> str:
    return os.path.join(work, f"worker{number}.log")
