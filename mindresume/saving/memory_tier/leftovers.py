"""Removes tiers of dead jobs, which would fill the memory of a node for ever.

    remove_leftovers(storage, tier, keep_days)      # at a start, on the first rank of each node

A tier of another checkpoint directory stays as long as it may be the newest of its training. It is removed if its owner is dead
and its directory is gone or belongs to another training now, or has a newer save on disk; or if nothing was saved into it for
``keep_days`` and its owner is not known to be alive. The path of a directory means something in its own container only.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from mindresume import runtime
from mindresume.events import Emit, Notice, ignore
from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.formats.scan import scan
from mindresume.saving.memory_tier.directory import OWNER, TierOwner, identity_of, read_mark
from mindresume.storage.interface import Storage
from mindresume.storage.operations import remove_tree

_REMOVED = "removed-"           # prefix of the name of a tier that is being removed


def remove_leftovers(storage: Storage, tier: str, keep_days: float, emit: Emit = ignore) -> list[str]:
    """Removes what dead jobs left beside ``tier``. Returns their folders. Raises no error: the next start tries again.

    Times are those of the tmpfs: the owner file of ``tier`` was written just now.
    """
    parent, removed = os.path.dirname(tier), []
    try:
        names, now = storage.list(parent), storage.status(os.path.join(tier, OWNER))
    except OSError:
        return []
    for path in (os.path.join(parent, name) for name in names if name != os.path.basename(tier)):
        try:
            reason = "its removal was interrupted" if os.path.basename(path).startswith(_REMOVED) else \
                _why_removable(storage, path, now.mtime if now else 0.0, keep_days * 86400)
            if reason:
                aside = os.path.join(parent, f"{_REMOVED}{runtime.token_hex(4)}")     # so that no job opens it from here on
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
    if owner is None:                               # a job that is starting has made the folder, and not the file yet
        return old
    alive = owner.is_alive
    if alive:
        return ""
    if alive is None or not owner.sees_directory:   # in another container: its age alone can tell
        return old
    if owner.directory_is_gone:
        return f"{owner.directory} does not exist any more"
    mark, (identity, _) = read_mark(CheckpointDir(storage, owner.directory)), identity_of(CheckpointDir(storage, owner.directory))
    if mark is not None and identity and (mark.token, identity) != (owner.token, owner.identity):
        return f"{owner.directory} belongs to another training now"
    with suppress(OSError):
        mine = [candidate.order[:2] for candidate in scan_records(CheckpointDir(storage, path))[0]]
        disk = [candidate.order[:2] for candidate in scan(CheckpointDir(storage, owner.directory)).candidates
                if candidate.committed and candidate.problem is None]
        if disk and max(disk) > max(mine, default=(0, 0)):
            return f"{owner.directory} has a newer save"
    return old


def _times(storage: Storage, path: str) -> Iterator[float]:
    """Yields the times of the last changes of what lies directly in a tier, and of the folders in it."""
    status = storage.status(path)
    if status is None:
        return
    yield status.mtime
    for name in storage.list(path):
        inner = storage.status(os.path.join(path, name))
        if inner is not None:
            yield inner.mtime
