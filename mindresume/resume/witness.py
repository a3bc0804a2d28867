"""Names that other hosts have created can appear late (NFS: up to a minute). Before the choice, the ranks are asked what they saw
of their own, so that a checkpoint is neither taken for incomplete nor for absent just because rank 0's host lists it later.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable

from mindresume.agree import Group, report
from mindresume.manifest import FOLDER, attempts, record_name
from mindresume.store.common import order_of
from mindresume.store.storage import Storage

PATIENCE = 65.0                 # seconds: Linux believes a listing of a folder for at most 60 (nfs(5), acdirmax)
_NEWEST = 3                     # attempts a rank looks for its record in


def settle(storage: Storage, root: str, group: Group, clock: Callable[[], float] = time.monotonic,
           sleep: Callable[[float], None] = time.sleep) -> float:
    """Waits on rank 0 until it sees the records of all ranks of the newest save of which each rank sees its own. Returns the
    seconds waited; at most ``PATIENCE``, and next to none where names appear at once."""
    if group.size == 1:
        return 0.0
    seen = report(group, lambda: _own(storage, root, group.rank))
    common = set.intersection(*map(set, seen))
    if group.rank != 0 or not common:
        return 0.0
    folder = os.path.join(root, FOLDER, max(common, key=order_of))
    wanted, started = {record_name(rank) for rank in range(group.size)}, clock()
    while not wanted.issubset(storage.list(folder)) and clock() - started < PATIENCE:
        sleep(1.0)
    return clock() - started


def _own(storage: Storage, root: str, rank: int) -> list[str]:
    """Names of the newest attempts that hold the record of ``rank``."""
    folder = os.path.join(root, FOLDER)
    names = sorted((name for name, _, _ in attempts(storage.list(folder))), key=order_of)
    return [name for name in names[-_NEWEST:] if storage.status(os.path.join(folder, name, record_name(rank))) is not None]
