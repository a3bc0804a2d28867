"""Writes the stacks of all ranks into files before a job that hangs is ended.

py-spy sees every thread of a process without its help, so it is preferred. Else the rank writes the stacks itself: it has
registered a signal handler in C (``mindformers.heartbeat``), which runs also while a thread holds the interpreter lock.
"""
from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from mindresume import runtime
from mindresume.coordination.process_identity import stat_fields
from mindresume.coordination.rank_heartbeat import STACKS, Heartbeat
from mindresume.supervisor.process_table import send

_TIMEOUT = 10.0                 # seconds for py-spy and one rank
_SETTLED = 0.3                  # seconds without growth after which a file of stacks is complete
_WAIT = 5.0                     # seconds for all ranks to write their stacks


def write_stacks(heartbeats: Sequence[Heartbeat], source: str, target: str) -> tuple[str, ...]:
    """Writes the stacks of the ranks into files.

    Args:
        heartbeats: of the ranks.
        source: folder with the heartbeats, in which a rank writes its stacks.
        target: prefix of the paths of the files; its folder exists.
    Returns:
        The paths of the files that have content.
    """
    tool, paths = shutil.which("py-spy"), []
    asked = []
    for heartbeat in heartbeats:
        path = f"{target}-rank_{heartbeat.rank}-{heartbeat.pid}.txt"
        if tool is not None and _dump(tool, heartbeat.pid, path):
            paths.append(path)
        elif heartbeat.signal:
            asked.append((heartbeat, os.path.join(source, f"process_{heartbeat.pid}{STACKS}"), path))
            send(heartbeat.pid, heartbeat.signal)
    _wait_until_written([written for _, written, _ in asked])
    for _, written, path in asked:
        with suppress(OSError):
            if os.path.getsize(written):
                shutil.copyfile(written, path)
                paths.append(path)
    return tuple(paths)


def without_stacks(heartbeats: Sequence[Heartbeat], paths: Sequence[str]) -> str:
    """Returns the ranks of which ``write_stacks`` has no file, each with the reason as far as it is known; empty: none."""
    states = {b"T": "it is stopped", b"t": "a debugger has stopped it", b"D": "it waits in the kernel"}
    found = []
    for heartbeat in heartbeats:
        if not any(path.endswith(f"-rank_{heartbeat.rank}-{heartbeat.pid}.txt") for path in paths):
            fields = stat_fields(heartbeat.pid)
            why = states.get(fields[0], "it did not answer, and py-spy is not installed or may not trace it") if fields else \
                "it cannot be looked at"
            found.append(f"rank {max(heartbeat.rank, 0)} (process {heartbeat.pid}): {why}")
    return "; ".join(found)


def _dump(tool: str, pid: int, path: str) -> bool:
    """Lets py-spy write the stacks of a process. Returns False if it cannot, for example without permission to trace."""
    try:
        with open(path, "wb") as file:
            done = subprocess.run([tool, "dump", "--pid", str(pid)], stdout=file, stderr=subprocess.DEVNULL, timeout=_TIMEOUT,
                                  check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _wait_until_written(paths: Sequence[str]) -> None:
    """Waits until all files have content and none has grown for a moment. A process in state D writes none."""
    until, sizes, since = runtime.monotonic() + _WAIT, [-1] * len(paths), runtime.monotonic()
    while paths and runtime.monotonic() < until:
        now = [os.path.getsize(path) if os.path.exists(path) else 0 for path in paths]
        if now != sizes:
            sizes, since = now, runtime.monotonic()
        elif all(sizes) and runtime.monotonic() - since >= _SETTLED:
            return
        runtime.sleep(0.05)
