"""Removes what earlier runs left: their saves in the tier of this training, and tiers of dead jobs, which would fill the memory
of a node for ever.

    former = FormerSaves(target, loaded)            # ``loaded``: the one of these saves from which this training resumes
    remove_leftovers(storage, tier, keep_days)      # at a start, on the first rank of each node

A tier of another checkpoint directory stays as long as it may be the newest of its training. It is removed if its owner is dead
and its directory is gone or belongs to another training now, or has a newer save on disk; or if nothing was saved into it for
``keep_days`` and its owner is not known to be alive. The path of a directory means something in its own container only.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from mindresume import runtime
from mindresume.events import Emit, Notice, ignore
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.rank_folders import folder_rank
from mindresume.formats.records import scan_records
from mindresume.formats.scan import scan
from mindresume.model.manifest import FOLDER, parse_attempt, record_name
from mindresume.saving.memory_tier.directory import OWNER, SLOTS, TierOwner, identity_of, read_mark
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.interface import Storage
from mindresume.storage.operations import TEMPORARY, remove_tree

_REMOVED = "removed-"           # prefix of the name of a tier that is being removed


class FormerSaves:
    """The saves of earlier runs in a tier. ``loaded``: the one from which this training resumes; None: none, or it is removed."""

    def __init__(self, target: SaveTarget, loaded: Candidate | None = None):
        self.target, self.loaded = target, loaded

    def paths(self) -> list[str]:
        """Returns the files and folders of earlier runs, except those of the loaded save. Raises OSError."""
        storage, root, run, loaded = self.target.storage, self.target.root, self.target.run, self.loaded
        kept = set()
        if loaded is not None:
            kept = {os.path.join(FOLDER, loaded.name), *(file.path for file in loaded.all_files)}
        entries = storage.list(root)
        found = [entry for entry in entries if entry.startswith("stale-") and entry != f"stale-{run}"]
        for folder in [FOLDER, SLOTS, *(entry for entry in entries if folder_rank(entry) is not None)]:
            found += [os.path.join(folder, entry) for entry in storage.list(os.path.join(root, folder))
                      if (folder != FOLDER or parse_attempt(entry)) and not entry.endswith(f".{run}{TEMPORARY}")]
        return [os.path.join(root, path) for path in found if path not in kept]

    def size(self) -> int:
        """Returns the bytes of ``paths``. Raises OSError."""
        storage, size, paths = self.target.storage, 0, self.paths()
        while paths:
            path = paths.pop()
            status = storage.status(path)
            if status is not None and status.is_folder:
                paths += [os.path.join(path, entry) for entry in storage.list(path)]
            elif status is not None:
                size += status.size
        return size

    def set_aside(self, emit: Emit) -> str:
        """Renames these saves into one folder, to be removed. Returns it. No rank of this run has saved yet; the removal itself
        can be late, when a rank uses one of the names again."""
        storage, stale = self.target.storage, os.path.join(self.target.root, f"stale-{self.target.run}")
        try:
            paths = self.paths()
            storage.make_folder(stale)
            for number, path in enumerate(paths):
                storage.rename(path, os.path.join(stale, str(number)))
        except OSError as error:
            emit(Notice(f"{self.target.root}: saves of earlier runs are not removed now: {error}"))
        return stale

    def remove_loaded(self) -> None:
        """Removes the save that the training has loaded: a newer one is common to all ranks. Each rank removes its files."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        storage, ranks = self.target.storage, list(self.target.ranks)
        for rank in sorted(loaded.files)[ranks.index(self.target.rank)::len(ranks)]:
            storage.remove(os.path.join(loaded.records_dir or "", record_name(rank)))
            for file in loaded.files[rank]:
                storage.remove(os.path.join(self.target.root, file.path))
        records_dir = loaded.records_dir or ""
        remove_empty_folders(self.target, [records_dir, os.path.dirname(records_dir), loaded.commit_dir])


def remove_empty_folders(tier: CheckpointDir, folders: Iterable[str]) -> None:
    """Removes those of ``folders`` in which no rank has files any more. The tier itself and its folder of records stay."""
    for folder in dict.fromkeys(folders):
        if folder not in (tier.root, tier.path(FOLDER)):
            with suppress(OSError):                 # other ranks still have files in it
                tier.storage.remove(folder)


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
    directory = CheckpointDir(storage, owner.directory)
    mark, (identity, _) = read_mark(directory), identity_of(directory)
    if mark is not None and identity and (mark.token, identity) != (owner.token, owner.identity):
        return f"{owner.directory} belongs to another training now"
    with suppress(OSError):
        mine = [candidate.order[:2] for candidate in scan_records(CheckpointDir(storage, path))[0]]
        disk = [candidate.order[:2] for candidate in scan(directory).candidates
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
