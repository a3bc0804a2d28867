"""Identifies a process of this machine: its number alone can belong to another process later.

    holder = (os.getpid(), start_ticks(os.getpid()))
    start_ticks(holder[0]) == holder[1]                 # the same process still runs
"""
from __future__ import annotations

import os
import time

_STATE, _START = 0, 19          # fields of /proc/PID/stat after the name of the program (proc(5): 3 and 22)


def stat_fields(pid: int) -> list[bytes] | None:
    """Returns the fields of /proc/PID/stat after the name of the program; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """Returns when a process was started, in clock ticks since boot; None if it does not exist or has ended (a zombie)."""
    fields = stat_fields(pid)
    return None if not fields or fields[_STATE] in (b"Z", b"X") else int(fields[_START])


def start_time(ticks: int) -> float | None:
    """Returns in seconds since 1970 what ``ticks`` says in clock ticks since boot, to about a hundredth of a second; None if
    ``ticks`` is 0, not known, or the kernel does not tell."""
    try:
        with open("/proc/uptime") as file:
            up = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - max(up - ticks / os.sysconf("SC_CLK_TCK"), 0.0) if ticks else None


def process_namespace() -> int:
    """Returns the namespace in which the numbers of processes hold that this process sees; 0: not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
