"""Finds which ranks share storage, waits until they list the same files there, and says which
checkpoint all nodes have where nodes share no disk.

    # every rank, at the start: a probe file of each node; who sees it
    groups = find_shared_groups(directory, group)
    visibility = wait_until_visible(storage, path, group, groups)
    peers = PeerState(directory, run, groups, rank, uploads)
    # all ranks at the same step, see ``preemption``
    peers.on_peer_state(rows_of_all_ranks(peers.local_state()))

    {root}/.mindresume/common          name of the newest checkpoint that all nodes have; empty:
                                       none is known

Each group commits what its own ranks recorded. The ranks exchange their checkpoints now and then,
and each node records the newest common one. Retention keeps it: a node that is ahead must not
remove the last checkpoint that the others have too. If no upload is in progress, that checkpoint is
uploaded next; each node locks it now (``mindresume.saving.upload``).

NFS caches the listing of a folder for up to a minute. Without ``wait_until_visible`` a checkpoint
could count as incomplete or absent, only because one host lists a name later than another.

    all ranks    newest folders of records and iterations that each lists
                 ─▶ the newest of all of them
    all ranks    which files of those each rank finds by name: manifests, its own record
                 ─▶ the paths that are expected
    repeatedly   the selecting ranks report which of those they do not list
                 ─▶ the others check that these still exist
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from mindresume import runtime
from mindresume.coordination.collectives import Group, gather_results
from mindresume.coordination.lease import Lease, holder_of_this_process, lease_holders
from mindresume.coordination.lease_acquisition import next_run
from mindresume.coordination.liveness import namespace
from mindresume.errors import LeaseHeldError
from mindresume.events import Emit, ignore, warning
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
from mindresume.model.manifest import (
    EMERGENCY,
    FOLDER,
    MANIFEST,
    MAX_NAME,
    PROBE,
    attempts,
    is_probe,
    record_name,
    run_name,
    run_sequence,
)
from mindresume.storage import Storage, parallel, publish, read_bytes, remove_stale
from mindresume.storage.posix import is_local

# checks, one a second: Linux caches the listing of a folder for at most 60 s (nfs(5), acdirmax)
PATIENCE = 65
LOOKS = 5  # the same, for local disks
NEWEST_COMMON = "common"
_MOST_SENT = 8  # checkpoints of a group that are sent to the others
_WHY = "nodes share no disk, and not all of them are known to have a newer one"


@dataclass(frozen=True)
class SharedGroups:
    """Groups of ranks that share storage. ``leaders``: by rank, the first rank of those that see
    the same directory."""

    leaders: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        return len(set(self.leaders)) > 1

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that see the directory of ``rank``."""
        return tuple(
            other for other, leader in enumerate(self.leaders) if leader == self.leaders[rank]
        )

    def of_leaders(self, rows: Sequence[Any]) -> list[Any]:
        """Returns those of the rows of all ranks that are of the first rank of a group."""
        return [rows[leader] for leader in sorted(set(self.leaders))]

    def is_leader(self, rank: int) -> bool:
        return self.leaders[rank] == rank


def single_group(size: int) -> SharedGroups:
    return SharedGroups((0,) * size)


def find_shared_groups(directory: CheckpointDir, group: Group) -> SharedGroups:
    """Finds the groups of ranks that share ``root``. In each container one rank writes a probe
    file; ranks that see the file of another rank, or whose file it sees, share storage with it.

    Two groups in one directory would both commit there, so all ranks check repeatedly until they
    are one group or no listing can be so old (``PATIENCE``; local disks need less). Leaves nothing
    behind, and removes old probe files of dead jobs. Raises CollectiveError on all ranks if one of
    them cannot list or write there.
    """
    if group.size == 1:
        return single_group(1)
    holder, path = holder_of_this_process(""), os.path.realpath(directory.root)
    container = f"{holder.machine}/{namespace('mnt')}"
    mounts = gather_results(
        group, lambda: [holder.host, container, path, is_local(path), runtime.token_hex(4)]
    )
    first: dict[tuple[Any, ...], int] = {}
    for rank, mount in enumerate(mounts):
        first.setdefault(tuple(mount[:4]), rank)
    probes = _Probes(
        directory.storage, directory.path(FOLDER), mounts[0][4], group.rank, sorted(first.values())
    )
    try:
        gather_results(group, probes.write)
        for attempt in range(LOOKS if all(mount[3] for mount in mounts) else PATIENCE):
            if attempt:
                runtime.sleep(1.0)
            rows = gather_results(group, probes.visible)
            leaders = _leaders([int(row, 16) for row in rows], probes.ranks)
            if not any(leaders):
                break
    except BaseException:  # also KeyboardInterrupt
        with suppress(OSError):
            probes.remove()
            probes.remove_empty_folder()
        raise
    if leaders[group.rank] == group.rank:
        with suppress(OSError):
            probes.remove_stale()
    gather_results(group, probes.remove)
    # no rank goes on while the folder may be removed
    gather_results(group, probes.remove_empty_folder)
    return SharedGroups(leaders)


@dataclass(frozen=True)
class _Probes:
    """The probe files of one search, as this rank handles them. ``tag``: of the search. ``ranks``:
    that write one; the others only read the folder."""

    storage: Storage
    folder: str
    tag: str
    rank: int
    ranks: Sequence[int]

    def path(self, rank: int) -> str:
        return os.path.join(self.folder, f"{PROBE}{self.tag}-{rank}")

    def write(self) -> None:
        if self.rank in self.ranks:
            self.storage.make_folder(self.folder)
            publish(self.storage, self.path(self.rank), [b""], self.tag)

    def visible(self) -> str:
        """Returns a bit for each of ``ranks``, whether its file is visible here, in few bytes: each
        of thousands of ranks sends them to all others. A listing may be a minute old; a name that
        this host never looked up is looked up on the server."""
        listed = set(self.storage.list(self.folder))
        paths = [self.path(rank) for rank in self.ranks]
        bits = [
            "1"
            if os.path.basename(path) in listed or self.storage.status(path) is not None
            else "0"
            for path in paths
        ]
        return f"{int(''.join(bits), 2):x}"

    def remove(self) -> None:
        if self.rank in self.ranks:
            self.storage.remove(self.path(self.rank))

    def remove_stale(self) -> None:
        """Removes what dead jobs have left."""
        if self.rank in self.ranks:
            others = [
                name
                for name in self.storage.list(self.folder)
                if is_probe(name) and not name.startswith(f"{PROBE}{self.tag}")
            ]
            remove_stale(
                self.storage,
                [os.path.join(self.folder, name) for name in others],
                self.path(self.rank),
            )

    def remove_empty_folder(self) -> None:
        if self.rank in self.ranks:
            # not empty; a listing may be old, so it is not asked
            with suppress(OSError):
                self.storage.remove(self.folder)


def _leaders(rows: Sequence[int], probers: Sequence[int]) -> tuple[int, ...]:
    """Returns, by rank, the first rank that shares storage with it, directly or through others.
    ``rows``: by rank, a bit for each of ``probers``, the last one the lowest."""
    leader = list(range(len(rows)))
    for row in set(rows):  # a few kinds of thousands of rows
        visible = [rank for index, rank in enumerate(reversed(probers)) if row >> index & 1]
        for rank in [rank for rank, other in enumerate(rows) if other == row and visible] + visible:
            one, two = sorted((_top(leader, rank), _top(leader, visible[0])))
            leader[two] = one
    return tuple(_top(leader, rank) for rank in range(len(rows)))


def _top(leader: list[int], rank: int) -> int:
    while leader[rank] != rank:
        leader[rank] = rank = leader[leader[rank]]
    return rank


def check_not_shared(lease: Lease) -> None:
    """Raises LeaseHeldError if two leaders have acquired the same directory for one run. Called
    after all leaders have acquired theirs."""
    me = lease.holder
    for other in lease_holders(lease.directory):
        if other.run == me.run and (other.host, other.machine, other.pid) != (
            me.host,
            me.machine,
            me.pid,
        ):
            raise LeaseHeldError(
                f"{lease.directory.root} counted as a separate folder on each node, because the "
                f"nodes did not see each other's files there, but host {other.host} and host "
                f"{me.host} now find each other's lease in it. The file system shows new files too "
                "late: start the job again"
            )


def next_common_run(directory: CheckpointDir, group: Group) -> str:
    """Returns the name of a run later than every run in the directory of any rank; the same on all
    ranks."""
    rows = gather_results(group, lambda: next_run(directory.storage.list(directory.path(FOLDER))))
    return run_name(max(map(run_sequence, rows)), rows[0].rpartition("-")[2])


# ---- the checkpoint that all nodes have ----------------------------------------------------------


def newest_committed(directory: CheckpointDir) -> list[str]:
    """Returns the names of the newest committed checkpoints in ``root``, newest first."""
    names = sorted(
        (name for name, _, _ in attempts(directory.storage.list(directory.path(FOLDER)))),
        key=order_of,
        reverse=True,
    )
    found = []
    for name in names:
        # others must not rely on one that cannot be listed
        with suppress(OSError):
            if len(found) < _MOST_SENT and MANIFEST in directory.storage.list(
                directory.path(FOLDER, name)
            ):
                found.append(name)
    return found


def newest_common(rows: Sequence[Any]) -> str:
    """Returns the newest name that is in all ``rows``: the ``committed`` names of each group. Empty
    if there is none."""
    names = set.intersection(*(set(row) for row in rows)) if rows else set()
    return max(names, key=order_of, default="")


def order_of(name: str) -> tuple[int, int]:
    """Returns the sort key of a folder of records: run, then step. Raises ValueError for another
    name."""
    ((_, step, run),) = attempts([name])  # ValueError for another name
    return run_sequence(run), step


def newest_first(names: Iterable[str]) -> list[str]:
    """Returns names of saves by ``order_of``, the newest first; in the same order on all ranks,
    also if two are of runs with the same number."""
    return sorted(sorted(names), key=order_of, reverse=True)


def record_common(directory: CheckpointDir, name: str, tag: str) -> None:
    """Records the newest checkpoint that all nodes have. Raises OSError."""
    publish(directory.storage, directory.path(FOLDER, NEWEST_COMMON), [name.encode()], tag)


def clear_common(directory: CheckpointDir) -> None:
    """Removes the record from a directory that all ranks share (again). Raises OSError."""
    with suppress(FileNotFoundError):
        directory.storage.remove(directory.path(FOLDER, NEWEST_COMMON))


def protected_by_peers(directory: CheckpointDir) -> Mapping[str, str]:
    """Returns {name of an attempt folder: why it must stay}: the recorded checkpoint and all newer
    ones. Empty for a directory without a record."""
    names = directory.storage.list(directory.path(FOLDER))
    if NEWEST_COMMON not in names:
        return {}
    try:
        noted = read_bytes(
            directory.storage, directory.path(FOLDER, NEWEST_COMMON), MAX_NAME
        ).decode()
        least = order_of(noted) if noted else (0, 0)
    except (OSError, ValueError):  # unreadable: keep all
        least = (0, 0)
    return {name: _WHY for name, _, _ in attempts(names) if order_of(name) >= least}


class Uploads(Protocol):
    """The methods of an ``UploadQueue`` that an exchange calls."""

    def ready(self) -> bool: ...

    def schedule(self, name: str) -> None: ...


@dataclass
class PeerState:
    """Sends the state of each leader (first rank of a group that shares storage) to the others, and
    acts on all states. Where all ranks share the directory there is nothing to exchange.
    ``uploads``: of this rank, if checkpoints are uploaded. ``emit``: receives a warning if the
    common checkpoint cannot be recorded: then nothing newer than the recorded one is removed."""

    directory: CheckpointDir
    run: str
    shared_groups: SharedGroups
    rank: int
    uploads: Uploads | None = None
    emit: Emit = ignore
    _recorded: str | None = None

    def local_state(self) -> Any:
        """Returns [names of the newest checkpoints of this group, whether an upload can begin];
        None: nothing to exchange."""
        if not self.shared_groups.is_split or not self.shared_groups.is_leader(self.rank):
            return None
        try:
            names = newest_committed(self.directory)
        except OSError:
            # then no checkpoint is common, and nothing is removed
            names = []
        return [names, self.uploads is not None and self.uploads.ready()]

    def on_peer_state(self, rows: Sequence[Any]) -> None:
        """Acts on ``rows``, the local states of all ranks."""
        if not self.shared_groups.is_split or not self.shared_groups.is_leader(self.rank):
            return
        leaders = self.shared_groups.of_leaders(rows)
        common = newest_common([names for names, _ in leaders])
        if self.uploads is not None and leaders[0][1]:
            # before the record: after it older ones may be removed
            self.uploads.schedule(common)
        self.record(common)

    def record(self, name: str) -> None:
        """Records ``name`` as the common checkpoint, unless it is recorded already."""
        if name != self._recorded and self.shared_groups.is_leader(self.rank):
            try:
                record_common(self.directory, name, self.run)
                self._recorded = name
            except OSError as error:
                self.emit(warning(f"{self.directory.root}: {error}"))


# ---- names that one host lists later than another ------------------------------------------------


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
