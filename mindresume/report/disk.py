"""The checkpoints of a folder as ``mindresume ls`` sees them, and who claims the folder."""
from __future__ import annotations

from dataclasses import dataclass

from mindresume.reshard.strategies import strategies
from mindresume.resume.survey import COMPLETE, list_checkpoints, size_of
from mindresume.store.claim import SAVING, lives, users_of
from mindresume.store.storage import Storage


@dataclass(frozen=True)
class Checkpoint:
    """``state``: as of ``mindresume.resume.survey.Seen``. ``reason``: why a resume passes it over, or what
    is missing or damaged and not needed. ``run`` None: written by mindformers alone."""
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
    found, seen = list_checkpoints(storage, root, strategies(storage))
    rows = [Checkpoint(saved.step, saved.epoch, saved.run, saved.world_size, size_of(storage, found.root, saved), row.kind,
                       saved.committed, saved.saved_at, row.state, row.problem.reason if row.problem else "; ".join(row.remarks))
            for row in seen for saved in [row.candidate]]
    claimed = {owner.run: lives(owner) for owner in users_of(storage, found.root) if owner.purpose == SAVING}
    return Disk(found.root, found.exists, tuple(rows), found.notes, claimed)
