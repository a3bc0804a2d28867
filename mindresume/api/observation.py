"""Looks at a folder of checkpoints while a job saves there: what ``Catalog.list`` lists, the job's heartbeats, free space.

``observe`` reads names, records and sizes, takes no lock and writes nothing, so that a job never waits for it.
"""
from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from mindresume.api.catalog import Catalog
from mindresume.api.results import INCOMPLETE, CheckpointInfo, DirectoryUser, Listing, Result
from mindresume.coordination.lease import SAVING, LeaseHolder, lease_path
from mindresume.errors import MindResumeError
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER, attempt_name, record_rank
from mindresume.storage.interface import UNKNOWN_SPACE
from mindresume.storage.posix import PosixStorage


@dataclass(frozen=True)
class SaveInProgress(Result):
    """Describes a save that a running job has begun and not committed.

    Attributes:
        step: The step that is being saved.
        run_id: The run that saves it.
        world_size: Number of ranks that save it; 0 while it is unknown.
        recorded_ranks: Ranks that have written all of their files, ascending.
    """
    step: int
    run_id: str
    world_size: int
    recorded_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Heartbeat(Result):
    """Describes the last heartbeat of a job that saves.

    Attributes:
        run_id: The run of the job.
        count: Number of heartbeats so far.
        step: The step that the training had reached; 0 if it is unknown.
        every: Seconds between two heartbeats; 0: none.
        written_at: Seconds since 1970, by the clock of the file system.
    """
    run_id: str
    count: int
    step: int
    every: float
    written_at: float


@dataclass(frozen=True)
class Observation(Result):
    """Holds what one look at a folder found.

    Attributes:
        listing: What ``Catalog.list`` returned.
        saves: Saves that a running job has begun and not committed.
        heartbeats: The last heartbeat of each job that saves there.
        free_bytes: Bytes that can still be written there; None if the file system does not report it.
    """
    listing: Listing
    saves: tuple[SaveInProgress, ...] = ()
    heartbeats: tuple[Heartbeat, ...] = ()
    free_bytes: int | None = None


def observe(path: str | os.PathLike[str], world_size: int | None = None) -> Observation | None:
    """Looks at a folder once; returns None if it does not exist. The arguments are those of ``mindresume.open``.

    Raises:
        MindResumeError, OSError: As ``Catalog.list``.
    """
    storage, path = PosixStorage(), os.fspath(path)
    if storage.status(path) is None:
        return None
    listing = Catalog(storage, path, world_size).list()
    jobs = [user for user in listing.in_use_by if user.holder.purpose == SAVING and user.alive is not False]
    running = {user.holder.run for user in jobs}
    saves = tuple(_save(CheckpointDir(storage, listing.root), row, row.step, row.run_id) for row in listing
                  if row.state == INCOMPLETE and row.step is not None and row.run_id is not None and row.run_id in running)
    beats = tuple(beat for beat in (_heartbeat(CheckpointDir(storage, listing.root), user) for user in jobs) if beat is not None)
    free = storage.free_space(listing.root)
    return Observation(listing, saves, beats, None if free == UNKNOWN_SPACE else free)


def _save(directory: CheckpointDir, row: CheckpointInfo, step: int, run: str) -> SaveInProgress:
    """Returns which ranks have recorded what they wrote, by the names in the folder of records."""
    name = attempt_name(step, run)
    names: list[str] = []
    with suppress(OSError):                     # it is being committed or removed
        names = directory.storage.list(directory.path(row.iteration_dir or "", FOLDER, name))
    ranks = {rank for rank in map(record_rank, names) if rank is not None}
    return SaveInProgress(step, run, row.world_size, tuple(sorted(ranks)))


def _heartbeat(directory: CheckpointDir, user: DirectoryUser) -> Heartbeat | None:
    """Returns the last heartbeat with the time of its file; None if the job ends at this moment, or beats between two looks at
    that time."""
    path = lease_path(directory.root, user.holder.run)
    with suppress(OSError, MindResumeError):
        before = directory.storage.status(path)
        holder = LeaseHolder.read(directory.storage, path)
        after = directory.storage.status(path)
        if before is not None and after is not None and before.mtime == after.mtime:
            return Heartbeat(holder.run, holder.beat, holder.step, holder.every, after.mtime)
    return None
