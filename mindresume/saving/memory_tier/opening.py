"""Opens the tier in memory of a training, on all ranks together, and removes those of dead jobs,
which would fill the memory of a node for ever.

A tier of another checkpoint directory stays as long as it may be the newest of its training. It is
removed if its owner is dead and its directory is gone or belongs to another training now, or has a
newer save on disk; or if nothing was saved into it for ``keep_days`` and its owner is not known to
be alive. The path of a directory means something in its own container only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from mindresume import runtime
from mindresume.coordination.channel import Listener, listen
from mindresume.coordination.collectives import Group, gather_results
from mindresume.coordination.storage_topology import PATIENCE, SharedGroups
from mindresume.errors import CollectiveError
from mindresume.events import Emit, Notice, PartnerCopyFailed, TierRefused, ignore
from mindresume.formats import CheckpointDir
from mindresume.formats.records import find_attempts, scan_records
from mindresume.formats.scan import scan
from mindresume.formatting import counted, ranks_count
from mindresume.model.manifest import FOLDER, run_sequence
from mindresume.saving.crash_loop import key_of
from mindresume.saving.memory_tier.directory import (
    MARK,
    OWNER,
    PARTNER,
    DiskNote,
    TierMark,
    TierOwner,
    find_tier,
    identity_of,
    make_mark,
    make_tier,
    memory_identity,
    owner_of,
    read_mark,
    this_process,
    tier_path,
)
from mindresume.saving.memory_tier.partner import Keeper, Partner, Ring
from mindresume.saving.memory_tier.tier import MemoryTier
from mindresume.saving.save_session import Resumed, SaveSession
from mindresume.settings import MemoryTierSettings, Settings
from mindresume.storage import Storage, call_within, publish_json, remove_tree, temporary_name

_PATIENCE = 20.0  # seconds for the removal of left-over tiers
_REMOVED = "removed-"  # prefix of the name of a tier that is being removed


def open_tier(
    session: SaveSession,
    group: Group,
    settings: Settings,
    emit: Emit,
    share: int,
    resumed: Resumed | None = None,
) -> MemoryTier | None:
    """Returns the tier of a training. Returns None if it is off, or not possible on some rank: then
    a TierRefused says why, and the training goes on without.

    Args:
        share: bytes of host memory for this rank.
        resumed: what the training has loaded, from this tier or from elsewhere.
    """
    storage = session.target.storage
    root = session.target.root
    every_steps = settings.memory_tier.every_steps
    if not every_steps:
        return None
    node = _Node(session, group, settings.memory_tier)
    try:
        found = gather_results(group, node.has_tier)
        node.keep = node.keeps_mark(found)
        node.mark = TierMark(
            *gather_results(group, node.make_mark)[session.shared_groups.leaders[group.rank]]
        )
        # a node that reads the identity of the directory before would not know its own tier
        for look in range(PATIENCE):
            if look:
                runtime.sleep(1.0)
            seen = gather_results(group, node.sees_mark)
            if all(seen):
                break
        else:
            raise CollectiveError(
                f"rank {seen.index(False)} does not see {session.target.path(FOLDER, MARK)} after "
                f"{PATIENCE} s"
            )
        tier = tier_path(node.mark)
        rows = gather_results(group, node.make_tier)
        nodes = groups_of([row[0] for row in rows])
        ranks = nodes.ranks(group.rank)
        node.processes = [rows[rank][1:] for rank in ranks] if nodes.is_leader(group.rank) else []
        if settings.memory_tier.partner:
            node.ring = Ring(nodes, settings.memory_tier.partner_offset)
            node.keeper = Keeper(CheckpointDir(storage, tier + PARTNER), keeps_last=True)
        endpoints = gather_results(group, node.publish_owner)
    except CollectiveError as error:
        emit(TierRefused(None, str(error)))
        return None
    # In the background: the disk of another training, which may hang for ever, is asked whether it
    # has a newer save.
    if (
        nodes.is_leader(group.rank)
        and call_within(
            _PATIENCE, None, remove_leftovers, storage, tier, settings.memory_tier.keep_days, emit
        )
        is None
    ):
        emit(
            Notice(
                f"{os.path.dirname(tier)}: whether tiers of earlier jobs can be removed was not "
                f"found out in {_PATIENCE:.0f} s: perhaps the disk of one of them hangs"
            )
        )
    chosen, origin = (resumed.chosen, resumed.root) if resumed is not None else (None, "")
    on_disk = (
        key_of(chosen)
        if chosen is not None and os.path.realpath(origin) == os.path.realpath(root)
        else ""
    )
    emit(
        Notice(
            f"memory of this node, {tier}, also receives a save every "
            f"{counted(every_steps, 'step')}: {ranks_count(len(ranks))}, for a restart on the same "
            "nodes"
        )
    )
    target = replace(session.target, root=tier, local_ranks=ranks if nodes.is_split else ())
    return MemoryTier(
        target,
        group,
        settings,
        emit,
        share,
        chosen if origin == tier else None,
        on_disk,
        node.partner(endpoints, emit),
    )


@dataclass
class _Node:
    """What one rank does for the tier of its node, between exchanges with the others. ``keep``: a
    node has a tier with the mark of the directory, so that mark stays. ``mark``: of all ranks.
    ``processes``: of this node, if this rank is its first. ``ring``: of partner copies, if they are
    wanted. ``keeper``, ``listener``: of this node, for those that come."""

    session: SaveSession
    group: Group
    settings: MemoryTierSettings
    keep: bool = False
    mark: TierMark | None = None
    processes: Sequence[list[int]] = ()
    ring: Ring | None = None
    keeper: Keeper | None = None
    listener: Listener | None = None

    def has_tier(self) -> bool:
        return bool(find_tier(self.session.target)[0])

    def keeps_mark(self, found: Sequence[bool]) -> bool:
        """Returns whether a node that shares the directory has a tier of it. ``found``: by rank."""
        return any(found[rank] for rank in self.session.shared_groups.ranks(self.group.rank))

    def make_mark(self) -> list[str] | None:
        """Makes the mark, on the first rank of those that share the directory."""
        if not self.session.is_leader:
            return None
        mark = make_mark(
            self.session.target,
            os.path.abspath(self.settings.dir),
            self.session.target.run,
            self.keep,
        )
        return [mark.token, mark.dir]

    def sees_mark(self) -> bool:
        """Returns whether this host sees the mark, which another one may just have made. If not, it
        is made to look into the folder again: an NFS client that did not find a file goes on to say
        so for up to a minute, or until it changes the folder itself. A later run finds by its name
        whose the file is, if this process dies meanwhile."""
        directory = self.session.target
        if read_mark(directory) != self.mark:
            path = temporary_name(
                directory.path(FOLDER, f"{MARK}-{self.group.rank}"), directory.run
            )
            directory.storage.write(path, [b"anew"])
            directory.storage.remove(path)
            directory.storage.list(directory.path(FOLDER))
        return read_mark(directory) == self.mark

    def make_tier(self) -> list[Any]:
        tier = tier_path(self.mark)
        make_tier(tier)
        return [memory_identity(tier), *this_process()]

    def publish_owner(self) -> Any:
        """Names the processes of this node in the owner file, on its first rank. Returns where that
        rank receives partner copies, or why it cannot."""
        target, tier = self.session.target, tier_path(self.mark)
        if not self.processes:
            return None
        owner = owner_of(target, self.mark, target.run, self.processes)
        publish_json(target.storage, os.path.join(tier, OWNER), asdict(owner), target.run)
        if self.ring is None or self.ring.is_alone:
            return None
        try:
            kept = self.keeper.tier
            make_tier(kept.root)
            publish_json(target.storage, kept.path(OWNER), asdict(owner), target.run)
            self.listener = listen(self.keeper.serve, self.settings.partner_port)
        except (OSError, RuntimeError) as error:
            return str(error)
        return self.listener.endpoint

    def partner(self, endpoints: Sequence[Any], emit: Emit) -> Partner | None:
        """Returns the partner copies of this rank; None: there are none. ``endpoints``: by rank, of
        ``publish_owner``."""
        problem = ""
        if self.ring is None:
            return None
        if self.ring.is_alone:
            problem = (
                f"{counted(len(set(self.ring.nodes.leaders)), 'node')} and partner_offset "
                f"{self.ring.offset}: each node would keep its own saves"
            )
        for rank, row in enumerate(endpoints):
            if isinstance(row, str):
                problem = f"rank {rank} cannot listen: {row}"
        if problem:
            emit(PartnerCopyFailed(None, problem))
            if self.listener is not None:
                self.listener.close()
            return None
        return Partner(self.ring, self.group.rank, self.keeper, endpoints, self.listener)


def groups_of(identities: list[str]) -> SharedGroups:
    """Returns which ranks see the same tier. ``identities``: ``memory_identity`` of each rank."""
    return SharedGroups(tuple(map(identities.index, identities)))


def newest_run(directory: CheckpointDir, group: Group) -> str:
    """Returns the latest run that saved into the tier of ``root`` on any node; empty if there is
    none. A collective. A run that saved into memory alone has left no number on disk, and the next
    run must have a larger one."""
    runs = gather_results(group, lambda: _newest_run_here(directory))
    return max(filter(None, runs), key=run_sequence, default="")


def _newest_run_here(directory: CheckpointDir) -> str:
    # a tier that cannot be read is not used by any start
    with suppress(OSError):
        runs = []
        for tier in filter(None, (find_tier(directory, suffix)[0] for suffix in ("", PARTNER))):
            runs += [row.run for row in find_attempts(CheckpointDir(directory.storage, tier))]
            note = DiskNote.read(directory.storage, tier)
            runs += [note.run] if note is not None else []
        return max(runs, key=run_sequence, default="")
    return ""


# ---- tiers of dead jobs --------------------------------------------------------------------------


def remove_leftovers(
    storage: Storage, tier: str, keep_days: float, emit: Emit = ignore
) -> list[str]:
    """Removes what dead jobs left beside ``tier``. Returns their folders. Raises no error: the next
    start tries again.

    Times are those of the tmpfs: the owner file of ``tier`` was written just now.
    """
    parent, removed = os.path.dirname(tier), []
    try:
        names, now = storage.list(parent), storage.status(os.path.join(tier, OWNER))
    except OSError:
        return []
    for path in (os.path.join(parent, name) for name in names if name != os.path.basename(tier)):
        try:
            reason = (
                "its removal was interrupted"
                if os.path.basename(path).startswith(_REMOVED)
                else _why_removable(storage, path, now.mtime if now else 0.0, keep_days * 86400)
            )
            if reason:
                # so that no job opens it from here on
                aside = os.path.join(parent, f"{_REMOVED}{runtime.token_hex(4)}")
                storage.rename(path, aside)
                remove_tree(storage, aside)
                removed.append(path)
                emit(Notice(f"removed {path}, left in memory by an earlier job: {reason}"))
        except OSError:
            continue
    return removed


def _why_removable(storage: Storage, path: str, now: float, keep: float) -> str:
    """Returns why a tier can be removed; empty if it must stay."""
    owner = TierOwner.read(storage, path)
    # No file in memory is older than the kernel's boot, whatever a clock that was set says.
    age = min(now - max(_times(storage, path), default=now), runtime.monotonic())
    old = f"nothing was saved into it for {age / 86400:.1f} days" if age > keep else ""
    # a job that is starting has made the folder, and not the file yet
    if owner is None:
        return old
    alive = owner.is_alive
    if alive:
        return ""
    if alive is None or not owner.sees_directory:  # in another container: its age alone can tell
        return old
    if owner.directory_is_gone:
        return f"{owner.directory} does not exist any more"
    directory = CheckpointDir(storage, owner.directory)
    mark, (identity, _) = read_mark(directory), identity_of(directory)
    if mark is not None and identity and (mark.token, identity) != (owner.token, owner.identity):
        return f"{owner.directory} belongs to another training now"
    with suppress(OSError):
        mine = [candidate.order[:2] for candidate in scan_records(CheckpointDir(storage, path))[0]]
        disk = [
            candidate.order[:2]
            for candidate in scan(directory).candidates
            if candidate.committed and candidate.problem is None
        ]
        if disk and max(disk) > max(mine, default=(0, 0)):
            return f"{owner.directory} has a newer save"
    return old


def _times(storage: Storage, path: str) -> Iterator[float]:
    """Yields the times of the last changes of what lies directly in a tier, and of the folders in
    it."""
    status = storage.status(path)
    if status is None:
        return
    yield status.mtime
    for name in storage.list(path):
        inner = storage.status(os.path.join(path, name))
        if inner is not None:
            yield inner.mtime
