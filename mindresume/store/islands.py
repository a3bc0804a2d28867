"""Nodes that share no disk: which ranks see one folder, and which checkpoint all of them have.

    islands = find(storage, root, group)        # every rank, at the start: a file of each node, and who sees it
    islands.ranks(group.rank)                   # those that see the same folder; the first of them commits and prunes there

Each island commits what its own ranks recorded; what all have is told by ``mindresume.store.common``.
"""
from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mindresume.agree import Group, decide, report
from mindresume.errors import FolderInUseError
from mindresume.manifest import FOLDER, PROBE, is_probe, run_name, run_sequence
from mindresume.store.claim import Claim, claims, next_run, owner_of_this_process
from mindresume.store.shared import is_local
from mindresume.store.stale import remove_stale
from mindresume.store.storage import Storage, publish

PATIENCE = 65                   # looks, one a second: Linux believes a listing for at most 60 seconds (nfs(5), acdirmax)
LOOKS = 5                       # the same, of local disks


@dataclass(frozen=True)
class Islands:
    """``leaders``: by rank, the first rank of those that see the same folder."""
    leaders: tuple[int, ...]

    @property
    def apart(self) -> bool:
        return len(set(self.leaders)) > 1

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Those that see the folder of ``rank``."""
        return tuple(other for other, leader in enumerate(self.leaders) if leader == self.leaders[rank])

    def of_leaders(self, rows: Sequence[Any]) -> list[Any]:
        """Those of the rows of all ranks that are of the first rank of an island."""
        return [rows[leader] for leader in sorted(set(self.leaders))]

    def leads(self, rank: int) -> bool:
        return self.leaders[rank] == rank


def together(size: int) -> Islands:
    return Islands((0,) * size)


def find(storage: Storage, root: str, group: Group, sleep: Callable[[float], None] = time.sleep,
         local: Callable[[str], bool] = is_local) -> Islands:
    """Of a job whose ranks all can write to ``root``. On each machine one rank shows a file; who sees the file of another, or is
    seen by it, shares the folder with it. Two islands in one folder would both commit there, so all ranks look again, together,
    until they are one or any listing is too old to be believed (``PATIENCE``); nobody waits so long for local disks. Leaves
    nothing behind, and removes what jobs that died here left long ago. AgreementError on all ranks if one of them cannot look or
    write there."""
    if group.size == 1:
        return together(1)
    owner, path = owner_of_this_process(""), os.path.realpath(root)
    seats = [tuple(row) for row in report(group, lambda: [owner.host, owner.machine, path, local(path)])]
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
    return Islands(leaders)


def _seen(storage: Storage, folder: str, tag: str, shown: Sequence[int]) -> list[bool]:
    """For each of the ranks ``shown`` whether its file is seen here. A listing may be a minute old; a name that nobody here has
    ever asked for is looked up where the folder really lies."""
    names, listed = [f"{PROBE}{tag}-{rank}" for rank in shown], set(storage.list(folder))
    return [name in listed or storage.status(os.path.join(folder, name)) is not None for name in names]


def _encode(seen: Sequence[bool]) -> str:
    """As short as may be: each of thousands of ranks tells it to all others."""
    return f"{int(''.join('1' if one else '0' for one in seen), 2):x}"


def _decode(text: str) -> int:
    return int(text, 16)


def _leaders(rows: Sequence[int], shown: Sequence[int]) -> tuple[int, ...]:
    """By rank, the first rank that shares a folder with it, directly or through others. ``rows``: by rank, a bit for each of
    ``shown``, the last one the lowest."""
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


def check_alone(claim: Claim) -> None:
    """After all leaders have claimed their folders for one run: FolderInUseError if two of them have claimed one and the same."""
    me, storage, root = claim.owner, claim.storage, claim.root
    for other in claims(storage, root):
        if other.run == me.run and (other.host, other.machine, other.pid) != (me.host, me.machine, me.pid):
            raise FolderInUseError(f"{root} was taken for a folder that each node has for itself, because the nodes did not see "
                                   f"each other's files there, and now host {other.host} and host {me.host} find each other in "
                                   f"it. The file system shows new files too late: start the job again")


def next_common_run(storage: Storage, root: str, group: Group) -> str:
    """The name of a run later than every one that left a trace in the folder of any rank; the same on all ranks."""
    numbers = report(group, lambda: run_sequence(next_run(storage.list(os.path.join(root, FOLDER)))))
    return decide(group, lambda: run_name(max(numbers), secrets.token_hex(4)))
