"""Estimates the lost work of a resume: the steps that a dead job had completed after the loaded checkpoint.

A job that dies leaves its lease in the folder, with the step of its last heartbeat, and the folders of the saves that it began.
Nothing records later steps, so the number is a lower bound.
"""
from __future__ import annotations

import os
from dataclasses import dataclass

from mindresume.coordination.lease import SAVING, is_alive, lease_holders
from mindresume.formats import Candidate
from mindresume.model.manifest import FOLDER, attempts
from mindresume.storage.interface import Storage


@dataclass(frozen=True)
class LostWork:
    """Describes lost work. ``steps``: lower bound, in steps of the dead job. ``since``: when the loaded checkpoint was saved, in
    seconds since 1970; None: unknown."""
    steps: int
    since: float | None

    def seconds(self, now: float) -> float | None:
        """Returns the seconds from the save until ``now``; None if the time of the save is unknown."""
        return None if self.since is None else max(now - self.since, 0.0)


def find_lost_work(storage: Storage, root: str, chosen: Candidate) -> LostWork | None:
    """Returns the work that the last job that saved below ``root`` did after ``chosen``. None if that job ended normally, is
    alive, or did not use mindresume. Raises OSError."""
    dead = [holder for holder in lease_holders(storage, root) if holder.purpose == SAVING and is_alive(holder) is not True]
    if not dead:
        return None
    last = max(dead, key=lambda holder: holder.order)
    begun = [step for _, step, run in attempts(storage.list(os.path.join(root, FOLDER))) if run == last.run]
    reached = max([last.step, *begun])
    return LostWork(max(reached - (chosen.step or 0), 0), chosen.saved_at)
