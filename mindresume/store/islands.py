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
from mindresume.manifest import FOLDER, run_name, run_sequence
from mindresume.store.claim import next_run, owner_of_this_process
from mindresume.store.storage import Storage, publish

_PROBE = "probe-"


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


def find(storage: Storage, root: str, group: Group, tries: int = 5, pause: float = 1.0,
         sleep: Callable[[float], None] = time.sleep) -> Islands:
    """Of a job whose ranks all can write to ``root``. On each machine one rank shows a file; who sees that of rank 0 is with it.
    Looks again for some seconds, because entries of a shared folder can arrive late. Leaves nothing behind. AgreementError on all
    ranks if one of them cannot write there."""
    if group.size == 1:
        return together(1)
    owner = owner_of_this_process("")
    seats = report(group, lambda: [owner.host, owner.machine, os.path.realpath(root)])
    shows = seats.index(seats[group.rank]) == group.rank
    tag, folder = decide(group, lambda: secrets.token_hex(4)), os.path.join(root, FOLDER)
    probe = os.path.join(folder, f"{_PROBE}{tag}-{group.rank}")

    def show() -> None:
        if shows:
            storage.make_folder(folder)
            publish(storage, probe, [b""], tag)

    def see() -> int:
        for _ in range(tries):
            seen = _probes(storage, folder, tag)
            if 0 in seen:
                break
            sleep(pause)
        return min(seen, default=group.rank)

    def clear() -> None:
        if shows:
            storage.remove(probe)
    report(group, show)
    leaders = report(group, see)
    report(group, clear)
    if shows and not storage.list(folder):          # somebody else's folder, that is only read
        with suppress(OSError):
            storage.remove(folder)
    return Islands(tuple(leaders))


def next_common_run(storage: Storage, root: str, group: Group) -> str:
    """The name of a run later than every one that left a trace in the folder of any rank; the same on all ranks."""
    numbers = report(group, lambda: run_sequence(next_run(storage.list(os.path.join(root, FOLDER)))))
    return decide(group, lambda: run_name(max(numbers), secrets.token_hex(4)))


def _probes(storage: Storage, folder: str, tag: str) -> list[int]:
    prefix = f"{_PROBE}{tag}-"
    return [int(name[len(prefix):]) for name in storage.list(folder) if name.startswith(prefix) and name[len(prefix):].isdigit()]
