"""Reads the checkpoints of a directory, as ``mindresume ls`` does, and the leases on it."""
from __future__ import annotations

from dataclasses import dataclass

from mindresume.coordination.lease import SAVING, is_alive, known_lease_holders
from mindresume.reshard.strategy_store import strategy_lookup
from mindresume.resume.candidates import COMPLETE, list_checkpoints, size_of
from mindresume.storage.interface import Storage


@dataclass(frozen=True)
class StoredCheckpoint:
    """Describes a saved step. Its fields have the names of ``mindresume ls --json``.

    ``state``: as of ``mindresume.resume.candidates.CheckpointStatus``. ``reason``: why a resume refuses it; or what is missing or
    damaged in it and not needed. ``run_id`` None: mindformers wrote it. ``saved_at``: seconds since 1970.
    """
    step: int | None
    epoch: int | None
    run_id: str | None
    world_size: int
    size_bytes: int
    format: str
    iteration_dir: str | None
    committed: bool
    saved_at: float | None
    state: str
    reason: str = ""


@dataclass(frozen=True)
class CheckpointState:
    """Holds the checkpoints of ``root``. ``leases``: {run id: whether its process runs, None: it is on another machine}."""
    root: str
    exists: bool
    checkpoints: tuple[StoredCheckpoint, ...]
    notes: tuple[str, ...]
    leases: dict[str, bool | None]

    @property
    def newest(self) -> StoredCheckpoint | None:
        """The checkpoint that a resume would take, as far as is known without reading it."""
        return next((row for row in self.checkpoints if row.state == COMPLETE), None)


def read_checkpoint_state(storage: Storage, root: str) -> CheckpointState:
    """Returns the checkpoints, newest first, in the order in which a resume tries them."""
    found, seen = list_checkpoints(storage, root, strategy_lookup(storage))
    rows = [StoredCheckpoint(saved.step, saved.epoch, saved.run, saved.world_size, size_of(storage, found.root, saved),
                             saved.format, saved.iteration_dir or None, saved.committed, saved.saved_at, row.state,
                             row.problem.reason if row.problem else "; ".join(row.warnings))
            for row in seen for saved in [row.candidate]]
    leases = {holder.run: is_alive(holder) for holder in known_lease_holders(storage, found.root) if holder.purpose == SAVING}
    return CheckpointState(found.root, found.exists, tuple(rows), found.notes, leases)
