"""Defines the moments of the start of a run attempt, which end the phases of a recovery (``recoveries``)."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Holds when each phase of a recovery ended, in seconds since 1970; None: nothing recorded it.

    Attributes:
        noticed: somebody (a supervisor) noticed the failure.
        ended: the last process of the failed attempt was gone.
        started: the process of rank 0 was started.
        imported: its imports were done.
        joined: its job was joined, and the training began.
        selected: all ranks had selected and verified the checkpoint.
        loading: the network was built, and the load began.
        loaded: the tensors were loaded.
        compiled: the first step was compiled.
        stepped: the first step was done.
    """
    noticed: float | None = None
    ended: float | None = None
    started: float | None = None
    imported: float | None = None
    joined: float | None = None
    selected: float | None = None
    loading: float | None = None
    loaded: float | None = None
    compiled: float | None = None
    stepped: float | None = None
