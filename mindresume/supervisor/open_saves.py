"""Decides from heartbeats which ranks of a job that is ended may finish a save: those whose save can still become complete.

A save is complete once *every* rank has published its record; nobody commits for a rank that has not. So a rank that dies before
it has written a step takes that step, and every later one, with it: the others do not finish them. Whether rank 0 has committed
does not matter: the next start commits what is complete.

Two savers need no time here. A process that writes for a rank (``async_save: process``) outlives it and is a member of the job of
its own. A save of the tier in memory is not waited for: its checksums take less than ``--kill-after`` unless it is very large,
and if it is lost, the next start takes the slot before, which all ranks have whole; with a save at every step some rank is nearly
always at it, and each failure would wait.
"""
from __future__ import annotations

from collections.abc import Iterable

from mindresume.coordination.rank_heartbeat import ENDING, NONE, SAVING, Heartbeat
from mindresume.supervisor.restart_policy import DIED, PEER, STOPPED


def open_saves(beat: Heartbeat) -> list[int]:
    """Returns the steps that the threads of a rank are writing, oldest first."""
    in_training_thread = beat.phase in (SAVING, ENDING) and beat.begun > beat.written
    return sorted({beat.writing, beat.begun if in_training_thread else 0} - {0, NONE})


def first_lost_step(dead: Iterable[Heartbeat]) -> int | None:
    """Returns the first step that can never be complete, because one of the ranks ``dead`` has not written it; None: none."""
    return min((step for beat in dead for step in open_saves(beat)), default=None)


def may_finish(beat: Heartbeat, lost: int | None, kind: str) -> bool:
    """Returns whether a rank is to be waited for.

    Args:
        lost: as ``first_lost_step``.
        kind: of the end of the start. The training thread of a job that hangs is not waited for: it can be the one that hangs.
    """
    if beat.writing and (lost is None or beat.writing < lost):
        return True
    if kind not in (DIED, PEER, STOPPED):
        return False
    return beat.phase in (SAVING, ENDING) and (lost is None or beat.begun < lost)
