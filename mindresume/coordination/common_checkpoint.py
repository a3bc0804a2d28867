"""Records the newest checkpoint that all nodes have, where nodes share no disk (``mindresume.coordination.storage_topology``).

The ranks exchange their checkpoints now and then (``mindresume.coordination.peer_state``), and each node records the newest
common one. Retention keeps it: a node that is ahead must not remove the last checkpoint that the others have too.

    {root}/.mindresume/common          name of the newest checkpoint that all nodes have; empty: none is known
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mindresume.model.manifest import FOLDER, MANIFEST, MAX_NAME, attempts, run_sequence
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
from mindresume.storage.operations import read_bytes

COMMON = "common"
_NEWEST = 8                     # checkpoints of a group that are sent to the others
_WHY = "nodes share no disk, and not all of them are known to have a newer one"


def committed(storage: Storage, root: str) -> list[str]:
    """Returns the names of the newest committed checkpoints in ``root``, newest first."""
    names = sorted((name for name, _, _ in attempts(storage.list(os.path.join(root, FOLDER)))), key=order_of, reverse=True)
    found = []
    for name in names:
        with suppress(OSError):                                 # others must not rely on one that cannot be listed
            if len(found) < _NEWEST and MANIFEST in storage.list(os.path.join(root, FOLDER, name)):
                found.append(name)
    return found


def newest_common(rows: Sequence[Any]) -> str:
    """Returns the newest name that is in all ``rows``: the ``committed`` names of each group. Empty if there is none."""
    names = set.intersection(*(set(row) for row in rows)) if rows else set()
    return max(names, key=order_of, default="")


def order_of(name: str) -> tuple[int, int]:
    """Returns the sort key of a folder of records: run, then step. Raises ValueError for another name."""
    (_, step, run), = attempts([name])                          # ValueError for another name
    return run_sequence(run), step


def record(storage: Storage, root: str, name: str, tag: str) -> None:
    """Records the newest checkpoint that all nodes have. Raises OSError."""
    publish(storage, os.path.join(root, FOLDER, COMMON), [name.encode()], tag)


def clear(storage: Storage, root: str) -> None:
    """Removes the record from a directory that all ranks share (again). Raises OSError."""
    with suppress(FileNotFoundError):
        storage.remove(os.path.join(root, FOLDER, COMMON))


def protected_by_peers(storage: Storage, root: str) -> Mapping[str, str]:
    """Returns {name of an attempt folder: why it must stay}: the recorded checkpoint and all newer ones. Empty for a directory
    without a record."""
    names = storage.list(os.path.join(root, FOLDER))
    if COMMON not in names:
        return {}
    try:
        noted = read_bytes(storage, os.path.join(root, FOLDER, COMMON), MAX_NAME).decode()
        least = order_of(noted) if noted else (0, 0)
    except (OSError, ValueError):                               # unreadable: keep all
        least = (0, 0)
    return {name: _WHY for name, _, _ in attempts(names) if order_of(name) >= least}
