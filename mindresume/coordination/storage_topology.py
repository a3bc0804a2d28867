"""Finds which ranks share storage, where nodes share no disk.

    groups = find_shared_groups(storage, root, group)       # every rank, at the start: a probe file of each node; who sees it

Each group commits what its own ranks recorded; ``mindresume.coordination.common_checkpoint`` records which checkpoint all groups
have.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import Group, gather_results, run_on_rank0
from mindresume.coordination.lease import Lease, holder_of_this_process, lease_holders, next_run
from mindresume.coordination.process_identity import mount_namespace
from mindresume.errors import LeaseHeldError
from mindresume.model.manifest import FOLDER, PROBE, is_probe, run_name, run_sequence
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
from mindresume.storage.mounts import is_local
from mindresume.storage.stale_files import remove_stale

PATIENCE = 65                   # checks, one a second: Linux caches the listing of a folder for at most 60 s (nfs(5), acdirmax)
LOOKS = 5                       # the same, for local disks


@dataclass(frozen=True)
class SharedGroups:
    """Groups of ranks that share storage. ``leaders``: by rank, the first rank of those that see the same directory."""
    leaders: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        return len(set(self.leaders)) > 1

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that see the directory of ``rank``."""
        return tuple(other for other, leader in enumerate(self.leaders) if leader == self.leaders[rank])

    def of_leaders(self, rows: Sequence[Any]) -> list[Any]:
        """Returns those of the rows of all ranks that are of the first rank of a group."""
        return [rows[leader] for leader in sorted(set(self.leaders))]

    def is_leader(self, rank: int) -> bool:
        return self.leaders[rank] == rank


def single_group(size: int) -> SharedGroups:
    return SharedGroups((0,) * size)


def find_shared_groups(storage: Storage, root: str, group: Group, sleep: Callable[[float], None] = runtime.sleep,
                       local: Callable[[str], bool] = is_local) -> SharedGroups:
    """Finds the groups of ranks that share ``root``. In each container one rank writes a probe file; ranks that see the file of
    another rank, or whose file it sees, share storage with it.

    Two groups in one directory would both commit there, so all ranks check repeatedly until they are one group or no listing can
    be so old (``PATIENCE``; local disks need less). Leaves nothing behind, and removes old probe files of dead jobs. Raises
    CollectiveError on all ranks if one of them cannot list or write there.
    """
    if group.size == 1:
        return single_group(1)
    holder, path = holder_of_this_process(""), os.path.realpath(root)
    container = f"{holder.machine}/{mount_namespace()}"
    mounts = [tuple(row) for row in gather_results(group, lambda: [holder.host, container, path, local(path)])]
    first: dict[tuple[Any, ...], int] = {}
    for rank, mount in enumerate(mounts):
        first.setdefault(mount, rank)
    probers = sorted(first.values())
    tag, folder = run_on_rank0(group, lambda: runtime.token_hex(4)), os.path.join(root, FOLDER)
    is_prober, probe = group.rank in probers, os.path.join(folder, f"{PROBE}{tag}-{group.rank}")

    def write_probe() -> None:
        if is_prober:
            storage.make_folder(folder)
            publish(storage, probe, [b""], tag)

    def remove_probe() -> None:
        if is_prober:
            storage.remove(probe)

    def remove_stale_probes() -> None:
        if is_prober and leaders[group.rank] == group.rank:
            others = [name for name in storage.list(folder) if is_probe(name) and not name.startswith(f"{PROBE}{tag}")]
            remove_stale(storage, [os.path.join(folder, name) for name in others], probe)

    def remove_empty_folder() -> None:
        if is_prober:                               # the other ranks only read the folder
            with suppress(OSError):                 # not empty; a listing may be old, so it is not asked
                storage.remove(folder)
    try:
        gather_results(group, write_probe)
        for attempt in range(LOOKS if all(mount[-1] for mount in mounts) else PATIENCE):
            if attempt:
                sleep(1.0)
            rows = gather_results(group, lambda: _encode(_visible_probes(storage, folder, tag, probers)))
            leaders = _leaders([_decode(row) for row in rows], probers)
            if not any(leaders):
                break
    except BaseException:                           # also KeyboardInterrupt
        with suppress(OSError):
            remove_probe()
            remove_empty_folder()
        raise
    with suppress(OSError):
        remove_stale_probes()
    gather_results(group, remove_probe)
    gather_results(group, remove_empty_folder)      # no rank goes on while the folder may be removed
    return SharedGroups(leaders)


def _visible_probes(storage: Storage, folder: str, tag: str, probers: Sequence[int]) -> list[bool]:
    """Returns, for each of the ranks ``probers``, whether its file is visible here. A listing may be a minute old; a name that
    this host has never looked up is looked up on the server."""
    names, listed = [f"{PROBE}{tag}-{rank}" for rank in probers], set(storage.list(folder))
    return [name in listed or storage.status(os.path.join(folder, name)) is not None for name in names]


def _encode(visible: Sequence[bool]) -> str:
    """Encodes a row in few bytes: each of thousands of ranks sends it to all others."""
    return f"{int(''.join('1' if one else '0' for one in visible), 2):x}"


def _decode(text: str) -> int:
    return int(text, 16)


def _leaders(rows: Sequence[int], probers: Sequence[int]) -> tuple[int, ...]:
    """Returns, by rank, the first rank that shares storage with it, directly or through others. ``rows``: by rank, a bit for each
    of ``probers``, the last one the lowest."""
    leader = list(range(len(rows)))

    def top(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = rank = leader[leader[rank]]
        return rank

    def join(one: int, two: int) -> None:
        one, two = sorted((top(one), top(two)))
        leader[two] = one
    for row in set(rows):                           # a few kinds of thousands of rows
        visible = [rank for index, rank in enumerate(reversed(probers)) if row >> index & 1]
        for rank in [rank for rank, other in enumerate(rows) if other == row and visible] + visible:
            join(rank, visible[0])
    return tuple(map(top, range(len(rows))))


def check_not_shared(lease: Lease) -> None:
    """Raises LeaseHeldError if two leaders have acquired the same directory for one run. Called after all leaders have
    acquired theirs."""
    me, storage, root = lease.holder, lease.storage, lease.root
    for other in lease_holders(storage, root):
        if other.run == me.run and (other.host, other.machine, other.pid) != (me.host, me.machine, me.pid):
            raise LeaseHeldError(f"{root} counted as a separate folder on each node, because the nodes did not see each "
                                   f"other's files there, but host {other.host} and host {me.host} now find each other's "
                                   f"lease in it. The file system shows new files too late: start the job again")


def next_common_run(storage: Storage, root: str, group: Group) -> str:
    """Returns the name of a run later than every run in the directory of any rank; the same on all ranks."""
    numbers = gather_results(group, lambda: run_sequence(next_run(storage.list(os.path.join(root, FOLDER)))))
    return run_on_rank0(group, lambda: run_name(max(numbers), runtime.token_hex(4)))
