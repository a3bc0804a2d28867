"""The newest checkpoint that all nodes have, where nodes share no disk (``mindresume.store.islands``).

That is known only to all of them together. So the ranks tell each other now and then (``mindresume.store.preemption``), and each
island keeps a note of it, which retention obeys: an island that is ahead must not remove the last one that the others have too.

    {root}/.mindresume/common          name of the newest checkpoint that all islands had; empty: none is known
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mindresume.file_record import MAX_NAME
from mindresume.manifest import FOLDER, MANIFEST, attempts, run_sequence
from mindresume.store.storage import Storage, publish, read_bytes

COMMON = "common"
_NEWEST = 8                     # checkpoints of an island that the others are told of
_WHY = "nodes share no disk, and not all of them are known to have a newer one"


def committed(storage: Storage, root: str) -> list[str]:
    """Names of the newest committed checkpoints of this island, newest first."""
    names = sorted((name for name, _, _ in attempts(storage.list(os.path.join(root, FOLDER)))), key=order_of, reverse=True)
    found = []
    for name in names:
        with suppress(OSError):                                 # one that cannot be listed is none that the others may count on
            if len(found) < _NEWEST and MANIFEST in storage.list(os.path.join(root, FOLDER, name)):
                found.append(name)
    return found


def newest_common(rows: Sequence[Any]) -> str:
    """``rows``: lists of names as of ``committed``, one an island. Empty if they have none in common."""
    names = set.intersection(*(set(row) for row in rows)) if rows else set()
    return max(names, key=order_of, default="")


def order_of(name: str) -> tuple[int, int]:
    """Of a folder of records: later runs are newer, then later steps."""
    (_, step, run), = attempts([name])                          # ValueError for another name
    return run_sequence(run), step


def note(storage: Storage, root: str, name: str, tag: str) -> None:
    """Remembers the newest checkpoint that all islands have. OSError."""
    publish(storage, os.path.join(root, FOLDER, COMMON), [name.encode()], tag)


def forget(storage: Storage, root: str) -> None:
    """Of a folder that all ranks see (again). OSError."""
    with suppress(FileNotFoundError):
        storage.remove(os.path.join(root, FOLDER, COMMON))


def spared(storage: Storage, root: str) -> Mapping[str, str]:
    """{name of an attempt folder: why it must stay}: the newest checkpoint that all islands have, and whatever is newer. Empty
    for a folder without such a note."""
    names = storage.list(os.path.join(root, FOLDER))
    if COMMON not in names:
        return {}
    try:
        noted = read_bytes(storage, os.path.join(root, FOLDER, COMMON), MAX_NAME).decode()
        least = order_of(noted) if noted else (0, 0)
    except (OSError, ValueError):                               # better too many than the last
        least = (0, 0)
    return {name: _WHY for name, _, _ in attempts(names) if order_of(name) >= least}
