"""Waits until the ranks that select a checkpoint list all files that other ranks see.

NFS caches the listing of a folder for up to a minute. Without this wait a checkpoint could count as incomplete or absent, only
because one host lists a name later than another.

    all ranks    newest folders of records and iterations that each lists ─▶ the newest of all of them
    all ranks    which files of those each rank finds by name: manifests, its own record ─▶ the paths that are expected
    repeatedly   the selecting ranks report which of those they do not list ─▶ the others check that these still exist
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mindresume import runtime
from mindresume.coordination.collectives import Group, gather_results
from mindresume.coordination.storage_topology import SharedGroups, order_of
from mindresume.formats.iteration_naming import COMMON, METADATA, TRACKER, iteration_name, parse_iteration
from mindresume.formats.iteration_scan import tracked
from mindresume.formats.rank_folder_naming import folder_name, folder_rank, parse_name
from mindresume.model.manifest import EMERGENCY, FOLDER, MANIFEST, attempts, record_name
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel

PATIENCE = 65                   # checks, one a second: Linux caches the listing of a folder for at most 60 s (nfs(5), acdirmax)
_NEWEST = 3                     # saves of each kind to check
_LISTING = 64                   # so many ranks, roughly, list the root: Checkpoint 1.0 has a folder for each rank there
_MAX_MISSING = 5                # messages


@dataclass(frozen=True)
class Visibility:
    """The result of a wait, the same on all ranks. ``missing``: a message for each path that some rank sees and a selecting rank
    does not list."""
    wait_seconds: int = 0
    missing: tuple[str, ...] = ()


def wait_until_visible(storage: Storage, path: str, group: Group, shared_groups: SharedGroups,
                       sleep: Callable[[float], None] = runtime.sleep) -> Visibility:
    """Waits, on all ranks together, until the selecting ranks list all files of the newest saves in ``path`` that any rank sees.

    Rank 0 selects; where nodes share no storage every rank does, in the folder of its node. Ends at once if all names are listed,
    and after ``PATIENCE`` seconds in any case.
    """
    if group.size == 1:
        return Visibility()
    root = os.path.dirname(os.path.abspath(path)) if folder_rank(os.path.basename(path)) is not None else path
    listed = gather_results(group, lambda: _newest(storage, root, group))
    save_dirs = _latest(name for ranks in listed for name in ranks)

    def find_visible() -> list[str]:
        """Returns [a bit for each path to check, newest file of weights if there are no records]."""
        bits = "".join("1" if _exists(storage, root, path) else "0" for path in _paths_to_check(save_dirs, group.rank))
        return [bits, "" if save_dirs else _own_weights(storage, root, group.rank)]

    def find_unlisted() -> list[list[object]]:
        """Returns [path, a rank that sees it] of each path that this rank needs and does not list."""
        if group.rank and not shared_groups.is_split:
            return []
        seen_by: dict[str, int] = {}
        for rank in sorted(shared_groups.ranks(group.rank), key=lambda rank: rank == group.rank):
            for path in _visible_paths(save_dirs, rank, visible[rank]):
                seen_by.setdefault(path, rank)
        return [[path, seen_by[path]] for path in _not_listed(storage, root, seen_by)]

    visible = gather_results(group, find_visible)
    for seconds in range(PATIENCE + 1):
        unlisted = gather_results(group, find_unlisted)
        if not any(unlisted) or seconds == PATIENCE:
            break
        sleep(1.0)
        visible = [_intersect(before, now)
                   for before, now in zip(visible, gather_results(group, find_visible), strict=True)]  # some may be removed
    return Visibility(seconds, tuple(_messages(root, unlisted))[:_MAX_MISSING])


def _newest(storage: Storage, root: str, group: Group) -> list[str]:
    """Returns folders, relative to ``root``, that this rank lists or that the tracker names."""
    found = []
    with suppress(OSError):
        names = [name for name, _, _ in attempts(storage.list(os.path.join(root, FOLDER)))]
        for name in sorted(names, key=order_of)[-_NEWEST:]:
            inner = f"{FOLDER}/{name}/{FOLDER}/{name}"                      # of an iteration folder in the making
            found.append(inner if _exists(storage, root, inner) else f"{FOLDER}/{name}")
    iteration_dirs = []
    with suppress(OSError, ValueError):
        step = tracked(storage, root)
        iteration_dirs += [iteration_name(step)] if step is not None else []
    if group.rank % max(1, group.size // _LISTING) == 0:
        with suppress(OSError):
            names = [name for name in storage.list(root) if parse_iteration(name) is not None]
            iteration_dirs += sorted(names, key=parse_iteration)[-_NEWEST:]
    for iteration_dir in dict.fromkeys(iteration_dirs):
        with suppress(OSError):
            names = [name for name, _, _ in attempts(storage.list(os.path.join(root, iteration_dir, FOLDER)))]
            within = [f"{iteration_dir}/{FOLDER}/{name}" for name in names]
            if within or _exists(storage, root, iteration_dir):
                found += within or [iteration_dir]
    return found


def _latest(folders: Iterable[str]) -> list[str]:
    """Returns the newest folders of each kind: those in the folder of records, and iterations, ordered by their number."""
    rows = sorted(set(folders))
    in_records = [row for row in rows if row.startswith(FOLDER)]
    iterations = [row for row in rows if not row.startswith(FOLDER)]
    return [*sorted(in_records, key=lambda row: order_of(os.path.basename(row)))[-_NEWEST:],
            *sorted(iterations, key=lambda row: parse_iteration(row.partition("/")[0]) or 0)[-_NEWEST:]]


def _paths_to_check(save_dirs: Sequence[str], rank: int) -> Iterator[str]:
    """Yields the paths that ``rank`` looks for: its record and the files that commit a save, else mindformers' metadata files."""
    for save_dir in save_dirs:
        for name in (MANIFEST, EMERGENCY, record_name(rank)) if FOLDER in save_dir.split("/") else (COMMON, METADATA):
            yield f"{save_dir}/{name}"
    yield TRACKER


def _visible_paths(save_dirs: Sequence[str], rank: int, row: Sequence[str]) -> list[str]:
    """Returns the paths that ``rank`` sees. ``row``: its result of ``find_visible``."""
    bits, weights = row
    return [path for path, bit in zip(_paths_to_check(save_dirs, rank), bits, strict=True) if bit == "1"] + ([weights] if weights
                                                                                                             else [])


def _intersect(before: Sequence[str], now: Sequence[str]) -> list[str]:
    bits = "".join("1" if one == two == "1" else "0" for one, two in zip(before[0], now[0], strict=True))
    return [bits, before[1] if before[1] == now[1] else ""]


def _own_weights(storage: Storage, root: str, rank: int) -> str:
    """Returns the newest file that mindformers wrote for ``rank``, by its name; empty if there is none."""
    folder, names = folder_name(rank), []
    with suppress(OSError):
        names = [parsed for parsed in map(parse_name, storage.list(os.path.join(root, folder))) if parsed]
    newest = max(names, key=lambda name: (name.suffix, name.epoch, name.step), default=None)
    return f"{folder}/{newest}" if newest else ""


def _exists(storage: Storage, root: str, path: str) -> bool:
    try:
        return storage.status(os.path.join(root, path)) is not None
    except OSError:                                     # ESTALE as well: the file is being replaced; the next check finds it
        return False


def _not_listed(storage: Storage, root: str, paths: Iterable[str]) -> list[str]:
    """Returns the paths that cannot be reached from ``root`` by listing one folder after the other."""
    ways = {path: [os.path.split(step) for step in _downwards(path)] for path in paths}
    folders = sorted({folder for way in ways.values() for folder, _ in way})

    def names(folder: str) -> frozenset[str]:
        try:
            return frozenset(storage.list(os.path.join(root, folder)))
        except OSError:
            return frozenset()
    listings = dict(zip(folders, parallel(storage, names, folders), strict=True))
    return [path for path, way in ways.items() if not all(name in listings[folder] for folder, name in way)]


def _downwards(path: str) -> list[str]:
    """Returns "a", "a/b" and "a/b/c" for "a/b/c"."""
    return [path[:index] for index, letter in enumerate(path) if letter == "/"] + [path]


def _messages(root: str, unlisted: Sequence[Sequence[Sequence[object]]]) -> Iterator[str]:
    for rank, rows in enumerate(unlisted):
        for path, seeing_rank in rows:
            yield f"rank {seeing_rank} sees {os.path.join(root, str(path))}, and rank {rank} does not list it after {PATIENCE} s"
