"""Tells when this process was started, and when its imports were done: the first phases of a restart."""
from __future__ import annotations

import os
import time

from mindresume.coordination.process_identity import start_ticks

_imported: list[float] = []


def process_started() -> float | None:
    """Returns when the kernel started this process, in seconds since 1970, to about a hundredth of a second; None where it does
    not tell."""
    ticks = start_ticks(os.getpid())
    try:
        with open("/proc/uptime") as file:
            up = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    if ticks is None:
        return None
    return time.time() - max(up - ticks / os.sysconf("SC_CLK_TCK"), 0.0)


def mark_imported() -> None:
    """Notes that MindSpore and mindformers are imported. Only the first call counts."""
    if not _imported:
        _imported.append(time.time())


def imported() -> float | None:
    """Returns when the imports were done, in seconds since 1970; None: not yet."""
    return _imported[0] if _imported else None
