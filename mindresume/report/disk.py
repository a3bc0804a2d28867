"""The checkpoints of a folder as ``mindresume ls`` sees them, and who claims the folder."""
from __future__ import annotations

import os
from dataclasses import dataclass

from mindresume.formats import MINDFORMERS
from mindresume.resume.prove import quick
from mindresume.resume.select import candidates_for
from mindresume.store.claim import SAVING, claims, lives
from mindresume.store.storage import Storage

COMPLETE, INCOMPLETE, REFUSED = "complete", "incomplete", "refused"


@dataclass(frozen=True)
class Checkpoint:
    """``state``: COMPLETE, INCOMPLETE (the save never completed, nothing is lost with it), REFUSED (``reason``). Names, records
    and sizes were checked, contents were not. ``run`` None: written by mindformers alone."""
    step: int | None
    epoch: int | None
    run: str | None
    ranks: int
    size: int
    format: str
    committed: bool
    saved_at: float | None
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Disk:
    """``exists``: there is such a folder. ``claimed``: {run: does its process live, None: it is on another machine}."""
    root: str
    exists: bool
    checkpoints: tuple[Checkpoint, ...]
    notes: tuple[str, ...]
    claimed: dict[str, bool | None]

    @property
    def newest(self) -> Checkpoint | None:
        """What a resume would take, as far as is known without reading it."""
        return next((row for row in self.checkpoints if row.state == COMPLETE), None)


def look(storage: Storage, root: str) -> Disk:
    """Checkpoints newest first, in the order in which a resume tries them."""
    found, _ = candidates_for(storage, root)
    rows = []
    for candidate in found.candidates:
        problem = quick(storage, found.root, candidate, found.expected_ranks if candidate.origin == MINDFORMERS else None)
        sizes = [storage.status(os.path.join(found.root, file.path)) for file in candidate.every_file]
        state = COMPLETE if problem is None else REFUSED if candidate.existed else INCOMPLETE
        rows.append(Checkpoint(
            candidate.step, candidate.epoch, candidate.run, candidate.world_size, sum(status.size for status in sizes if status),
            "iteration" if candidate.base else candidate.format, candidate.committed, candidate.saved_at, state,
            problem.reason if problem else ""))
    claimed = {owner.run: lives(owner) for owner in claims(storage, found.root) if owner.purpose == SAVING}
    return Disk(found.root, found.exists, tuple(rows), found.notes, claimed)
