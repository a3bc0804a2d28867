"""Waits until the ranks that select a checkpoint list all files that other ranks see.

NFS caches the listing of a folder for up to a minute. Without this wait a checkpoint could count as
incomplete or absent, only because one host lists a name later than another.

    all ranks    newest folders of records and iterations that each lists
                 ─▶ the newest of all of them
    all ranks    which files of those each rank finds by name: manifests, its own record
                 ─▶ the paths that are expected
    repeatedly   the selecting ranks report which of those they do not list
                 ─▶ the others check that these still exist
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import Group, gather_results
from mindresume.coordination.storage_topology import SharedGroups, order_of
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import (
    COMMON,
    METADATA,
    TRACKER,
    iteration_name,
    parse_iteration,
    tracked,
)
from mindresume.formats.rank_folders import folder_name, parse_name, root_of
from mindresume.model.manifest import EMERGENCY, FOLDER, MANIFEST, attempts, record_name
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel

# checks, one a second: Linux caches the listing of a folder for at most 60 s (nfs(5), acdirmax)
PATIENCE = 65
_NEWEST = 3  # saves of each kind to check
# so many ranks, roughly, list the root: Checkpoint 1.0 has a folder for each rank there
_LISTING = 64
_MAX_MISSING = 5  # messages


@dataclass(frozen=True)
class Visibility:
    """The result of a wait, the same on all ranks. ``missing``: a message for each path that some
    rank sees and a selecting rank does not list."""

    wait_seconds: int = 0
    missing: tuple[str, ...] = ()


def wait_until_visible(
    storage: Storage,
    path: str,
    group: Group,
    shared_groups: SharedGroups,
) -> Visibility:
    """Waits, on all ranks together, until the selecting ranks list all files of the newest saves in
    ``path`` that any rank sees.

    Rank 0 selects; where nodes share no storage every rank does, in the folder of its node. Ends at
    once if all names are listed, and after ``PATIENCE`` seconds in any case.
    """
    if group.size == 1:
        return Visibility()
    root = root_of(path)
    view = _View(CheckpointDir(storage, root), group)
    rows = gather_results(group, view.newest)
    view.save_dirs = _latest(name for names in rows for name in names)
    sources = shared_groups.ranks(group.rank) if group.rank == 0 or shared_groups.is_split else ()
    visible = gather_results(group, view.visible)
    for seconds in range(PATIENCE + 1):
        unlisted = gather_results(group, partial(view.not_listed, sources, visible))
        if not any(unlisted) or seconds == PATIENCE:
            break
        runtime.sleep(1.0)
        now = gather_results(group, view.visible)
        # some may be removed
        visible = [
            [seen & again, weights if weights == newest else ""]
            for (seen, weights), (again, newest) in zip(visible, now, strict=True)
        ]
    missing = [
        f"rank {seeing_rank} sees {os.path.join(root, path)}, and rank {rank} does not list it "
        f"after {PATIENCE} s"
        for rank, rows in enumerate(unlisted)
        for path, seeing_rank in rows
    ]
    return Visibility(seconds, tuple(missing[:_MAX_MISSING]))


@dataclass
class _View:
    """What one rank sees. ``save_dirs``: the newest folders that any rank sees, relative to
    ``root``."""

    directory: CheckpointDir
    group: Group
    save_dirs: Sequence[str] = ()

    def newest(self) -> list[str]:
        """Returns folders, relative to ``root``, that this rank lists or that the tracker names."""
        folders = []
        for name in sorted(self._attempts(FOLDER), key=order_of)[-_NEWEST:]:
            # of an iteration folder in the making
            inner = f"{FOLDER}/{name}/{FOLDER}/{name}"
            folders.append(inner if self._exists(inner) else f"{FOLDER}/{name}")
        iteration_dirs = []
        with suppress(OSError, ValueError):
            step = tracked(self.directory)
            iteration_dirs += [iteration_name(step)] if step is not None else []
        if self.group.rank % max(1, self.group.size // _LISTING) == 0:
            names = [name for name in self._names("") if parse_iteration(name) is not None]
            iteration_dirs += sorted(names, key=parse_iteration)[-_NEWEST:]
        for name in dict.fromkeys(iteration_dirs):
            within = [
                f"{name}/{FOLDER}/{attempt}" for attempt in self._attempts(f"{name}/{FOLDER}")
            ]
            folders += within or ([name] if self._exists(name) else [])
        return folders

    def visible(self) -> list[Any]:
        """Returns [a bit for each path to check, newest file of weights if there are no
        records]."""
        bits = sum(
            1 << index
            for index, path in enumerate(self._paths_to_check(self.group.rank))
            if self._exists(path)
        )
        return [bits, "" if self.save_dirs else self._own_weights()]

    def not_listed(self, ranks: Sequence[int], visible: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Returns [path, a rank that sees it] of each path that one of ``ranks`` sees and this one
        cannot reach from ``root`` by listing one folder after the other. ``visible``: by rank, what
        it sees."""
        seen_by: dict[str, int] = {}
        for rank in [
            *(rank for rank in ranks if rank != self.group.rank),
            *(rank for rank in ranks if rank == self.group.rank),
        ]:
            bits, weights = visible[rank]
            paths = [
                path for index, path in enumerate(self._paths_to_check(rank)) if bits >> index & 1
            ]
            for path in (*paths, *([weights] if weights else ())):
                seen_by.setdefault(path, rank)
        folders = sorted({folder for path in seen_by for folder, _ in _steps(path)})
        listings = dict(
            zip(
                folders,
                map(frozenset, parallel(self.directory.storage, self._names, folders)),
                strict=True,
            )
        )
        return [
            [path, rank]
            for path, rank in seen_by.items()
            if not all(name in listings[folder] for folder, name in _steps(path))
        ]

    def _paths_to_check(self, rank: int) -> Iterator[str]:
        """Yields the paths that ``rank`` looks for: its record and the files that commit a save,
        else mindformers' metadata."""
        for folder in self.save_dirs:
            for name in (
                (MANIFEST, EMERGENCY, record_name(rank))
                if FOLDER in folder.split("/")
                else (COMMON, METADATA)
            ):
                yield f"{folder}/{name}"
        yield TRACKER

    def _own_weights(self) -> str:
        """Returns the newest file that mindformers wrote for this rank, by its name; empty if there
        is none."""
        folder = folder_name(self.group.rank)
        names = [name for name in map(parse_name, self._names(folder)) if name]
        newest = max(names, key=attrgetter("suffix", "epoch", "step"), default=None)
        return f"{folder}/{newest}" if newest else ""

    def _names(self, folder: str) -> list[str]:
        try:
            return self.directory.storage.list(self.directory.path(folder))
        except OSError:
            return []

    def _attempts(self, folder: str) -> list[str]:
        return [name for name, _, _ in attempts(self._names(folder))]

    def _exists(self, path: str) -> bool:
        try:
            return self.directory.storage.status(self.directory.path(path)) is not None
        except OSError:
            # ESTALE as well: the file is being replaced; the next check finds it
            return False


def _latest(folders: Iterable[str]) -> list[str]:
    """Returns the newest folders of each kind: those in the folder of records, and iterations,
    ordered by their number."""
    rows = sorted(set(folders))
    in_records = [row for row in rows if row.startswith(FOLDER)]
    iterations = [row for row in rows if not row.startswith(FOLDER)]
    return [
        *sorted(in_records, key=lambda row: order_of(os.path.basename(row)))[-_NEWEST:],
        *sorted(iterations, key=lambda row: parse_iteration(row.partition("/")[0]) or 0)[-_NEWEST:],
    ]


def _steps(path: str) -> Iterator[tuple[str, str]]:
    """Yields ("a/b", "c"), ("a", "b") and ("", "a") for "a/b/c"."""
    while path:
        folder, name = os.path.split(path)
        yield folder, name
        path = folder
