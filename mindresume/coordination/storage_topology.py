"""Finds which ranks share storage, where nodes share no disk.

    groups = find_shared_groups(storage, root, group)       # every rank, at the start: a probe file of each node; who sees it
    groups = find_shared_groups(storage, root, group)       # every rank, at the start: a probe file a node, and who sees it

Each group commits what its own ranks recorded; ``mindresume.coordination.common_checkpoint`` records which checkpoint all groups
have.
"""
from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mindresume.coordination.collectives import Group, decide, report
from mindresume.coordination.lease import Lease, holder_of_this_process, lease_holders, next_run
from mindresume.errors import LeaseHeldError
from mindresume.model.manifest import FOLDER, PROBE, is_probe, run_name, run_sequence
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
from mindresume.storage.mounts import is_local
from mindresume.storage.stale_files import remove_stale

PATIENCE = 65                   # looks, one a second: Linux believes a listing for at most 60 seconds (nfs(5), acdirmax)
LOOKS = 5                       # the same, of local disks


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


def find_shared_groups(storage: Storage, root: str, group: Group, sleep: Callable[[float], None] = time.sleep,
                       local: Callable[[str], bool] = is_local) -> SharedGroups:
    """Finds the groups of a job whose ranks all can write to ``root``. On each machine one rank writes a probe file; ranks that
    see the file of another, or whose file is seen by it, share storage with it. Two groups in one directory would both commit
    there, so all ranks look again, together, until they are one group or no listing can be so old (``PATIENCE``); nobody waits so
    long for local disks. Leaves nothing behind, and removes what jobs that died here left long ago. Raises CollectiveError on all
    ranks if one of them cannot look or write there."""
    if group.size == 1:
        return single_group(1)
    holder, path = holder_of_this_process(""), os.path.realpath(root)
    seats = [tuple(row) for row in report(group, lambda: [holder.host, holder.machine, path, local(path)])]
    first: dict[tuple[Any, ...], int] = {}
    for rank, seat in enumerate(seats):
        first.setdefault(seat, rank)
    shown = sorted(first.values())
    tag, folder = decide(group, lambda: secrets.token_hex(4)), os.path.join(root, FOLDER)
    shows, probe = group.rank in shown, os.path.join(folder, f"{PROBE}{tag}-{group.rank}")

    def show() -> None:
        if shows:
            storage.make_folder(folder)
            publish(storage, probe, [b""], tag)

    def clear() -> None:
        if shows:
            storage.remove(probe)

    def clear_stale() -> None:
        if shows and leaders[group.rank] == group.rank:
            others = [name for name in storage.list(folder) if is_probe(name) and not name.startswith(f"{PROBE}{tag}")]
            remove_stale(storage, [os.path.join(folder, name) for name in others], probe)

    def tidy() -> None:
        if shows:                                   # somebody else's folder, that is only read
            with suppress(OSError):                 # not empty. A listing may still show what others have removed: not asked
                storage.remove(folder)
    try:
        report(group, show)
        for look in range(LOOKS if all(seat[-1] for seat in seats) else PATIENCE):
            if look:
                sleep(1.0)
            rows = report(group, lambda: _encode(_seen(storage, folder, tag, shown)))
            leaders = _leaders([_decode(row) for row in rows], shown)
            if not any(leaders):
                break
    except BaseException:                           # also ^C while it waits
        with suppress(OSError):
            clear()
            tidy()
        raise
    with suppress(OSError):
        clear_stale()
    report(group, clear)
    report(group, tidy)                             # nobody goes on while the folder may still go away
    return SharedGroups(leaders)


def _seen(storage: Storage, folder: str, tag: str, shown: Sequence[int]) -> list[bool]:
    """Returns, for each of the ranks ``shown``, whether its file is seen here. A listing may be a minute old; a name that this
    host has never looked up is looked up on the server."""
    names, listed = [f"{PROBE}{tag}-{rank}" for rank in shown], set(storage.list(folder))
    return [name in listed or storage.status(os.path.join(folder, name)) is not None for name in names]


def _encode(seen: Sequence[bool]) -> str:
    """Encodes a row as short as possible: each of thousands of ranks sends it to all others."""
    return f"{int(''.join('1' if one else '0' for one in seen), 2):x}"


def _decode(text: str) -> int:
    return int(text, 16)


def _leaders(rows: Sequence[int], shown: Sequence[int]) -> tuple[int, ...]:
    """Returns, by rank, the first rank that shares storage with it, directly or through others. ``rows``: by rank, a bit for each
    of ``shown``, the last one the lowest."""
    leader = list(range(len(rows)))

    def top(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = rank = leader[leader[rank]]
        return rank

    def join(one: int, two: int) -> None:
        one, two = sorted((top(one), top(two)))
        leader[two] = one
    for row in set(rows):                           # a few kinds of thousands of rows
        seen = [rank for index, rank in enumerate(reversed(shown)) if row >> index & 1]
        for rank in [rank for rank, other in enumerate(rows) if other == row and seen] + seen:
            join(rank, seen[0])
    return tuple(map(top, range(len(rows))))


def check_not_shared(lease: Lease) -> None:
    """Raises LeaseHeldError if two leaders have acquired one and the same directory for one run. Called after all leaders have
    acquired theirs."""
    me, storage, root = lease.holder, lease.storage, lease.root
    for other in lease_holders(storage, root):
        if other.run == me.run and (other.host, other.machine, other.pid) != (me.host, me.machine, me.pid):
            raise LeaseHeldError(f"{root} was taken for a folder that each node has for itself, because the nodes did not see "
                                   f"each other's files there, and now host {other.host} and host {me.host} find each other in "
                                   f"it. The file system shows new files too late: start the job again")


def next_common_run(storage: Storage, root: str, group: Group) -> str:
    """Returns the name of a run later than every one that left a trace in the directory of any rank; the same on all ranks."""
    numbers = report(group, lambda: run_sequence(next_run(storage.list(os.path.join(root, FOLDER)))))
    return decide(group, lambda: run_name(max(numbers), secrets.token_hex(4)))
