"""Tells when this process was started, and when its imports were done: the first phases of a restart."""
from __future__ import annotations

import os

from mindresume import runtime
from mindresume.coordination.process_identity import start_ticks, start_time

_imported: list[float] = []


def process_started() -> float | None:
    """Returns when the kernel started this process, in seconds since 1970, to about a hundredth of a second; None where it does
    not tell."""
    return start_time(start_ticks(os.getpid()) or 0)


def mark_imported() -> None:
    """Notes that MindSpore and mindformers are imported. Only the first call counts."""
    if not _imported:
        _imported.append(runtime.time())


def imported() -> float | None:
    """Returns when the imports were done, in seconds since 1970; None: not yet."""
    return _imported[0] if _imported else None
