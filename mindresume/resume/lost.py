"""What a resume lost: the steps that a job which died had done behind the checkpoint that is taken.

A job that dies leaves its claim on the folder, with the step it had reached at its last sign of life; and the folders of the
saves it had begun. So the number is a lower bound: what it did after both, nobody wrote down.
"""
from __future__ import annotations

import os
from dataclasses import dataclass

from mindresume.formats import Candidate
from mindresume.manifest import FOLDER, attempts
from mindresume.store.claim import SAVING, claims, lives
from mindresume.store.storage import Storage


@dataclass(frozen=True)
class LostWork:
    """``steps``: at least so many, by the count of the job that died. ``since``: seconds since 1970 when the checkpoint was
    saved, None: not known."""
    steps: int
    since: float | None

    def seconds(self, now: float) -> float | None:
        return None if self.since is None else max(now - self.since, 0.0)


def find_lost_work(storage: Storage, root: str, chosen: Candidate) -> LostWork | None:
    """None if the last job that saved below ``root`` ended by itself, lives, or was none of ours. OSError."""
    dead = [owner for owner in claims(storage, root) if owner.purpose == SAVING and lives(owner) is not True]
    if not dead:
        return None
    last = max(dead, key=lambda owner: owner.order)
    begun = [step for _, step, run in attempts(storage.list(os.path.join(root, FOLDER))) if run == last.run]
    reached = max([last.step, *begun])
    return LostWork(max(reached - (chosen.step or 0), 0), chosen.saved_at)
