"""Opens the tier in memory of a training, on all ranks together."""
from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import Group, gather_results, run_on_all
from mindresume.coordination.lease import next_run, record_run_number
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.coordination.visibility import PATIENCE
from mindresume.errors import CollectiveError
from mindresume.events import Emit, Notice, TierRefused
from mindresume.formats import CheckpointDir
from mindresume.formats.records import find_attempts
from mindresume.formatting import counted, ranks_count
from mindresume.model.manifest import FOLDER, run_sequence
from mindresume.saving.crash_loop import key_of
from mindresume.saving.memory_tier.directory import (
    MARK,
    OWNER,
    TierMark,
    find_tier,
    make_mark,
    make_tier,
    memory_identity,
    owner_of,
    read_mark,
    this_process,
    tier_path,
)
from mindresume.saving.memory_tier.leftovers import remove_leftovers
from mindresume.saving.memory_tier.tier import MemoryTier
from mindresume.saving.save_session import Resumed, SaveSession
from mindresume.settings import MemoryTierSettings
from mindresume.storage.atomic_publish import publish_json, temporary_name
from mindresume.storage.interface import Storage
from mindresume.storage.operations import call_within

_PATIENCE = 20.0                # seconds for the removal of left-over tiers


def open_tier(session: SaveSession, group: Group, settings: MemoryTierSettings, emit: Emit, share: int, timeout: float,
              resumed: Resumed | None = None) -> MemoryTier | None:
    """Returns the tier of a training. Returns None if it is off, or not possible on some rank: then a TierRefused says why, and
    the training goes on without.

    Args:
        share: bytes of host memory for this rank.
        timeout: seconds that a step waits for the background work of the tier.
        resumed: what the training has loaded, from this tier or from elsewhere.
    """
    storage, root, run = session.target.storage, session.target.root, session.target.run
    if not settings.every_steps:
        return None
    try:
        found = gather_results(group, lambda: bool(find_tier(CheckpointDir(storage, root))[0]))
        keep = any(found[rank] for rank in session.shared_groups.ranks(group.rank))
        marks = gather_results(group, lambda: _mark(CheckpointDir(storage, root), settings, run, keep) if session.is_leader
                               else None)
        mark = TierMark(*marks[session.shared_groups.leaders[group.rank]])
        _wait_for_mark(CheckpointDir(storage, root), mark, run, group)
        tier = tier_path(mark)

        def make() -> list[Any]:
            make_tier(tier)
            return [memory_identity(tier), *this_process()]
        rows = gather_results(group, make)
        nodes = groups_of([row[0] for row in rows])
        if nodes.is_split and session.target.iterations:
            raise CollectiveError("Checkpoint 2.0 loads regions of all ranks, and this job has several nodes")
        ranks, is_leader = nodes.ranks(group.rank), nodes.is_leader(group.rank)
        if is_leader:
            def publish_owner() -> None:
                owner = owner_of(CheckpointDir(storage, root), mark, run, [rows[rank][1:] for rank in ranks])
                publish_json(storage, os.path.join(tier, OWNER), owner.to_json(), run)
            run_on_all(group, publish_owner)
            _remove_leftovers(storage, tier, settings.keep_days, emit)
        else:
            run_on_all(group, lambda: None)
    except CollectiveError as error:
        emit(TierRefused(None, str(error)))
        return None
    target = replace(session.target, root=tier, local_ranks=ranks if nodes.is_split else ())
    chosen, origin = (resumed.chosen, resumed.root) if resumed is not None else (None, "")
    loaded = chosen if origin == tier else None
    on_disk = key_of(chosen) if chosen is not None and os.path.realpath(origin) == os.path.realpath(root) else ""
    emit(Notice(f"memory of this node, {tier}, also receives a save every {counted(settings.every_steps, 'step')}: "
                f"{ranks_count(len(ranks))}, "
                f"for a restart on the same nodes"))
    return MemoryTier(target, group, settings, emit, share, loaded, is_leader, timeout, on_disk)


def _wait_for_mark(directory: CheckpointDir, mark: TierMark, run: str, group: Group) -> None:
    """Waits, on all ranks together, until each of them sees ``mark``, which another host may just have made: a node that reads
    the identity of the directory before would not know its own tier again. Raises CollectiveError after ``PATIENCE`` seconds."""
    def is_seen() -> bool:
        if read_mark(directory) != mark:
            _look_anew(directory, group.rank, run)
        return read_mark(directory) == mark
    for look in range(PATIENCE):
        if look:
            runtime.sleep(1.0)
        seen = gather_results(group, is_seen)
        if all(seen):
            return
    raise CollectiveError(f"rank {seen.index(False)} does not see {directory.path(FOLDER, MARK)} after {PATIENCE} s")


def _remove_leftovers(storage: Storage, tier: str, keep_days: float, emit: Emit) -> None:
    """Removes tiers of dead jobs in the background, and waits some seconds for it: the disk of another training, which may hang
    for ever, is asked whether it has a newer save."""
    if call_within(_PATIENCE, None, remove_leftovers, storage, tier, keep_days, emit) is None:
        emit(Notice(f"{os.path.dirname(tier)}: whether tiers of earlier jobs can be removed was not found out in "
                    f"{_PATIENCE:.0f} s: perhaps the disk of one of them hangs"))


def _mark(directory: CheckpointDir, settings: MemoryTierSettings, run: str, keep: bool) -> list[str]:
    mark = make_mark(directory, os.path.abspath(settings.dir), run, keep)
    return [mark.token, mark.dir]


def _look_anew(directory: CheckpointDir, rank: int, run: str) -> None:
    """Makes this host look into the folder again: an NFS client that did not find a file goes on to say so for up to a minute, or
    until it changes the folder itself. A later run finds by its name whose the file is, if this process dies meanwhile."""
    folder = directory.path(FOLDER)
    path = temporary_name(os.path.join(folder, f"{MARK}-{rank}"), run)
    directory.storage.write(path, [b"anew"])
    directory.storage.remove(path)
    directory.storage.list(folder)


def groups_of(identities: list[str]) -> SharedGroups:
    """Returns which ranks see the same tier. ``identities``: ``memory_identity`` of each rank."""
    return SharedGroups(tuple(map(identities.index, identities)))


def newest_run(directory: CheckpointDir, group: Group) -> str:
    """Returns the latest run that saved into the tier of ``root`` on any node; empty if there is none. A collective. A run that
    saved into memory alone has left no number on disk, and the next run must have a larger one."""
    def own() -> str:
        with suppress(OSError):                     # a tier that cannot be read is not used by any start
            tier = find_tier(directory)[0]
            return max((row.run for row in find_attempts(CheckpointDir(directory.storage, tier))), key=run_sequence,
                       default="") if tier else ""
        return ""
    return max(filter(None, gather_results(group, own)), key=run_sequence, default="")


def keep_number(directory: CheckpointDir, run: str) -> None:
    """Makes sure that the next run in ``root`` gets a larger number than ``run``. Raises OSError."""
    if run and run_sequence(run) >= run_sequence(next_run(directory.storage.list(directory.path(FOLDER)))):
        record_run_number(directory, run)
