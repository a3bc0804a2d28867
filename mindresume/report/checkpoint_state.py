"""Reads which checkpoints a directory holds, as ``mindresume ls`` does, and which run has its lease."""
from __future__ import annotations

from dataclasses import dataclass

from mindresume.coordination.lease import SAVING, is_alive, known_lease_holders
from mindresume.reshard.strategy_store import strategy_lookup
from mindresume.resume.listing import COMPLETE, list_checkpoints, size_of
from mindresume.storage.interface import Storage


@dataclass(frozen=True)
class StoredCheckpoint:
    """``state``: as of ``mindresume.resume.listing.CheckpointStatus``. ``reason``: why a resume does not take it, or what is
    missing or damaged and not needed. ``run`` None: mindformers wrote it. ``size``: bytes. ``saved_at``: seconds since 1970."""
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
class CheckpointState:
    """What there is at ``root``. ``leases``: {run id: does its process live, None: it is on another machine}."""
    root: str
    exists: bool
    checkpoints: tuple[StoredCheckpoint, ...]
    notes: tuple[str, ...]
    leases: dict[str, bool | None]

    @property
    def newest(self) -> StoredCheckpoint | None:
        """What a resume would take, as far as is known without reading it."""
        return next((row for row in self.checkpoints if row.state == COMPLETE), None)


def read_checkpoint_state(storage: Storage, root: str) -> CheckpointState:
    """Returns the checkpoints newest first, in the order in which a resume tries them."""
    found, seen = list_checkpoints(storage, root, strategy_lookup(storage))
    rows = [StoredCheckpoint(saved.step, saved.epoch, saved.run, saved.world_size, size_of(storage, found.root, saved), row.kind,
                             saved.committed, saved.saved_at, row.state,
                             row.problem.reason if row.problem else "; ".join(row.warnings))
            for row in seen for saved in [row.candidate]]
    leases = {holder.run: is_alive(holder) for holder in known_lease_holders(storage, found.root) if holder.purpose == SAVING}
    return CheckpointState(found.root, found.exists, tuple(rows), found.notes, leases)
