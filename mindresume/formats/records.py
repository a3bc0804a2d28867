"""Scans saved steps that have records, in either format.

    {root}/.mindresume/step-{step}-run-{run}/                 Checkpoint 1.0: the records; the
                                                              weights lie in rank folders
    {root}/.mindresume/step-{step}-run-{run}/                 Checkpoint 2.0 while it is saved: the
                                                              unpublished iteration folder,
    {root}/iteration_{step}/                                  and once it is committed; both hold
                                                              the weights and
        .mindresume/step-{step}-run-{run}/                    their records: an iteration folder can
                                                              be copied or moved alone

A folder of records holds ``rank_00000.json ...`` and, once rank 0 has found all of them,
``manifest.json``. A file ``emergency`` beside them means that other ranks were lost before this
save: it is a checkpoint if its files hold every slice of every tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from mindresume.errors import RecordError
from mindresume.formats import OURS, Candidate, CheckpointDir, Refusal, may_pass, unlisted_candidate
from mindresume.formats.iterations import parse_iteration
from mindresume.formats.metadata import missing_slices
from mindresume.formatting import listed
from mindresume.model.manifest import (
    EMERGENCY,
    FOLDER,
    MANIFEST,
    SCRUB_RESULT,
    Details,
    Manifest,
    Record,
    attempt_name,
    attempts,
    read_details,
    read_record,
    record_name,
    record_rank,
    run_sequence,
)
from mindresume.storage import Status, Storage, parallel

# of all manifests that are remembered, some 80 MB; one takes as much as that of ``_OWN`` ranks more
_MOST_RANKS, _OWN = 1 << 17, 8


class ReadManifests:
    """Reads manifests, and remembers them between the scans of one process: a committed one never
    changes. One that was replaced is known by its status."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Status, Manifest]] = {}
        self._ranks = 0

    def read(self, storage: Storage, path: str) -> Manifest:
        """Returns the manifest in the file at ``path``. Raises RecordError or OSError if it cannot
        be read."""
        status = storage.status(path)
        before = self._known.get(path)
        if before is not None and before[0] == status:
            return before[1]
        with storage.open(path) as file:
            manifest = Manifest.read(file)
        if status is not None and status.identity:
            if before is not None:
                self._forget(path)
            self._known[path] = status, manifest
            self._ranks += len(manifest.files) + _OWN
            while self._ranks > _MOST_RANKS:  # the oldest ones, which retention has removed
                self._forget(next(iter(self._known)))
        return manifest

    def _forget(self, path: str) -> None:
        self._ranks -= len(self._known.pop(path)[1].files) + _OWN


class Attempt(NamedTuple):
    """A folder of records.

    Attributes:
        name: of the folder.
        step: saved step.
        run: id of the run.
        iteration_dir: the iteration folder (published or not) that contains it, relative to the
            root; empty for rank folders.
        place: path of the folder, relative to the root.
        content: names in it.
        error: why it cannot be listed.
    """

    name: str
    step: int
    run: str
    iteration_dir: str
    place: str
    content: list[str]
    error: OSError | None = None


def find_attempts(
    directory: CheckpointDir, names: list[str] | None = None, top: list[str] | None = None
) -> list[Attempt]:
    """Finds every folder of records below ``root``, including folders that cannot be listed; but
    not in an iteration folder that cannot be listed, as the names of its records are unknown.

    Args:
        directory: the checkpoint directory.
        names: names in its FOLDER, if known.
        top: names in ``root``, if known.

    Raises:
        OSError: ``root`` or its FOLDER cannot be listed.
    """
    found: list[Attempt] = []
    for row in attempts(directory.storage.list(directory.path(FOLDER)) if names is None else names):
        attempt, making = attempt_at(directory, *row), f"{FOLDER}/{row[0]}"
        if FOLDER not in attempt.content:
            found.append(attempt)
            continue
        try:
            # If none is listed, the writer died while it made the folders, or the list lags behind:
            # open it by name.
            found += attempts_within(directory, making) or [attempt_at(directory, *row, making)]
        except OSError as error:
            found.append(attempt._replace(content=[], error=error))
    for name in directory.storage.list(directory.root) if top is None else top:
        if parse_iteration(name) is not None:
            with suppress(OSError):
                found += attempts_within(directory, name)
    return found


def attempts_within(directory: CheckpointDir, iteration_dir: str) -> list[Attempt]:
    """Returns the newest attempt in one iteration folder, as a list; older ones are obsolete.
    Raises OSError if its records cannot be listed."""
    rows = [
        attempt_at(directory, *row, iteration_dir)
        for row in attempts(directory.storage.list(directory.path(iteration_dir, FOLDER)))
    ]
    return sorted(rows, key=lambda row: (run_sequence(row.run), row.step))[-1:]


def attempt_at(
    directory: CheckpointDir, name: str, step: int, run: str, iteration_dir: str = ""
) -> Attempt:
    """Lists the folder of records of that name."""
    attempt = Attempt(name, step, run, iteration_dir, os.path.join(iteration_dir, FOLDER, name), [])
    try:
        return attempt._replace(content=directory.storage.list(directory.path(attempt.place)))
    except OSError as error:
        return attempt._replace(error=error)


def scan_records(
    directory: CheckpointDir,
    found: Iterable[Attempt] | None = None,
    brief: bool = False,
    manifests: ReadManifests | None = None,
) -> tuple[list[Candidate], set[str], list[str]]:
    """Finds candidates from records and manifests alone, without listing a rank folder. Returns
    them, newest first, the paths of all files that they name, and notes.

    Args:
        directory: the checkpoint directory.
        found: the folders of records to read; None: those of ``find_attempts``.
        brief: read only one record of a save that is certainly incomplete; its candidate then names
            the files of one rank.
        manifests: those that the caller has read before.
    """
    candidates: list[Candidate] = []
    notes: list[str] = []
    for attempt in find_attempts(directory) if found is None else found:
        candidate = _candidate(directory, attempt, brief, manifests)
        candidates.append(candidate)
        if MANIFEST in attempt.content and candidate.manifest_problem:
            notes.append(
                f"{attempt.place}/{MANIFEST}: {candidate.manifest_problem}; using the records of "
                "the ranks instead"
            )
    known = {file.path for candidate in candidates for file in candidate.all_files}
    return sorted(candidates, key=attrgetter("order"), reverse=True), known, notes


def _candidate(
    directory: CheckpointDir, attempt: Attempt, brief: bool, manifests: ReadManifests | None
) -> Candidate:
    """Makes a candidate of a folder of records: of its manifest if that can be used, else of the
    records."""
    path, content = directory.path(attempt.place), set(attempt.content)
    if attempt.error is not None:
        return unlisted_candidate(
            attempt.error,
            attempt.place,
            step=attempt.step,
            origin=OURS,
            run=attempt.run,
            records_dir=path,
            iteration_dir=attempt.iteration_dir,
            order=(run_sequence(attempt.run), attempt.step, 0.0),
        )
    candidate = None
    damage = ""
    unreadable = False
    if MANIFEST in content:
        try:
            if manifests is None:
                with directory.storage.open(os.path.join(path, MANIFEST)) as file:
                    manifest = Manifest.read(file)
            else:
                manifest = manifests.read(directory.storage, os.path.join(path, MANIFEST))
            if (manifest.run, manifest.state.step) != (attempt.run, attempt.step):
                raise RecordError(f"it is of run {manifest.run}, step {manifest.state.step}")
            if not (
                manifest.local_ranks
                and content.issuperset(map(record_name, range(manifest.world_size)))
            ):
                # else the files of all nodes are here
                candidate = candidate_of(manifest, path=path)
                lost = next(
                    (rank for rank in manifest.ranks if record_name(rank) not in content), None
                )
                if lost is not None:
                    candidate = replace(
                        candidate,
                        problem=candidate.refuse(
                            f"the record of rank {lost} is missing: "
                            f"{os.path.join(path, record_name(lost))}",
                            rank=lost,
                        ),
                    )
        except (RecordError, OSError) as error:
            damage, unreadable = str(error), may_pass(error)
    if candidate is None:
        candidate = replace(
            _from_records(directory.storage, path, attempt, brief),
            manifest_problem=damage,
            manifest_unreadable=unreadable,
        )
    stray = next(
        (
            file.path
            for file in candidate.all_files
            if ("/" in file.path) is bool(attempt.iteration_dir)
        ),
        None,
    )
    if stray is not None:
        candidate = replace(
            candidate,
            problem=candidate.refuse(
                f"its records name {stray}, which does not belong to it", stray
            ),
        )
    if attempt.iteration_dir:
        candidate = _in_iteration(candidate, attempt)
    return replace(candidate, has_scrub_result=SCRUB_RESULT in content)


def _in_iteration(candidate: Candidate, attempt: Attempt) -> Candidate:
    """Returns the candidate of an iteration folder with paths relative to the root. Refuses a
    folder whose number is not its step: somebody renamed it."""
    folder = attempt.iteration_dir
    files = {
        rank: tuple(file.below(folder) for file in files) for rank, files in candidate.files.items()
    }
    candidate = replace(
        candidate,
        iteration_dir=folder,
        files=files,
        metadata_files=tuple(file.below(folder) for file in candidate.metadata_files),
    )
    if folder.startswith(FOLDER + "/"):
        return candidate  # not published yet
    candidate = replace(candidate, maybe_completed=True)  # it was renamed after its commit
    if not candidate.committed and not candidate.missing_ranks and MANIFEST not in attempt.content:
        candidate = replace(candidate, manifest_problem="it is missing")
    if parse_iteration(folder) in (None, attempt.step):
        return candidate
    return replace(
        candidate,
        problem=candidate.refuse(
            f"{folder} holds step {attempt.step}: the folder was renamed, or is a copy of another; "
            "rename it back",
            folder,
        ),
    )


def candidate_of(manifest: Manifest, iteration_dir: str = "", path: str | None = None) -> Candidate:
    """Makes a candidate of a manifest, wherever it lies. ``iteration_dir``: the iteration folder;
    ``path``: the folder of records."""
    path = attempt_name(manifest.state.step, manifest.run) if path is None else path
    return Candidate(
        manifest.state.step,
        OURS,
        manifest.files[0][0].format,
        dict(zip(manifest.ranks, manifest.files, strict=True)),
        manifest.world_size,
        manifest.state,
        manifest.run,
        path,
        order=(run_sequence(manifest.run), manifest.state.step, 0.0),
        committed=True,
        saved_at=manifest.saved_at,
        epoch=manifest.state.epoch,
        records=manifest.records,
        iteration_dir=iteration_dir,
        metadata_files=manifest.metadata_files,
        deduplicated=manifest.deduplicated,
        local_ranks=manifest.local_ranks,
        lineage=manifest.lineage,
    )


def _from_records(storage: Storage, path: str, attempt: Attempt, brief: bool = False) -> Candidate:
    """Makes a candidate of a save without a readable manifest. It is complete if the records of all
    its ranks exist and agree; where nodes share no disk, of all ranks that saved here."""
    step = attempt.step
    run = attempt.run
    content = attempt.content
    last = EMERGENCY in content
    named = {rank for rank in map(record_rank, content) if rank is not None}
    rows = _read_records(storage, path, sorted(named), brief and not last)
    records = {rank: row for rank, row in rows.items() if isinstance(row, Record)}
    first = next(iter(records.values()), None)
    problem = next(
        (wrong for rank, row in rows.items() if (wrong := _wrong(attempt, rank, row, first))), None
    )
    world = max((record.world_size for record in records.values()), default=0)
    deduplicated = any(record.deduplicated for record in records.values())
    missing = [rank for rank in range(world) if rank not in named]
    # a phrase for a slice that no remaining rank of a failing job wrote in its last save; empty:
    # none
    gap = None
    if last and problem is None and missing:
        files = [
            [file.path for file in records[rank].files] if rank in records else []
            for rank in range(world)
        ]
        try:
            gap = missing_slices(files, deduplicated, RecordFolder(storage, path))
        except (RecordError, OSError) as error:
            gap = f"a record cannot be read: {error}"
    # If nodes share no disk, the folder holds the records of one node, or of several whose folders
    # were merged.
    nodes = {record.local_ranks for record in records.values()}
    local_ranks = tuple(sorted(set().union(*nodes)))
    if () in nodes or len(local_ranks) >= world or gap == "":
        local_ranks = ()
    if local_ranks:
        missing = [rank for rank in local_ranks if rank not in named]
    complete = bool(records) and problem is None and (not missing or gap == "")
    # Only a missing record proves that the save never completed. An unreadable one (damaged, of a
    # newer version, a failing file system) proves nothing.
    certain = not named or bool(missing) and (not last or bool(gap))
    if problem is None and not complete:
        expected = len(local_ranks) or world
        done = (
            f"{expected - len(missing)} of {expected} ranks recorded what they wrote"
            if records
            else "no rank recorded what it wrote"
        )
        problem = Refusal(
            step,
            f"the save never completed: {done}"
            + (f", missing: rank {listed(missing)}" if missing else "")
            + (f"; {gap}" if gap else ""),
            rank=missing[0] if missing else None,
        )
    candidate = Candidate(
        step,
        OURS,
        "",
        {rank: record.files for rank, record in records.items()},
        world,
        run=run,
        records_dir=path,
        order=(run_sequence(run), step, 0.0),
        maybe_completed=not certain or MANIFEST in content,
        problem=problem,
        records=tuple(record.checksum for record in records.values())
        if complete and not missing
        else (),
        deduplicated=deduplicated,
        missing_ranks=tuple(missing) if complete else (),
        local_ranks=local_ranks if complete else (),
    )
    if first is None:
        return candidate
    return replace(
        candidate,
        format=first.files[0].format,
        state=first.state,
        saved_at=first.saved_at,
        epoch=first.state.epoch,
        lineage=first.lineage,
    )


def _wrong(
    attempt: Attempt, rank: int, row: Record | Exception, first: Record | None
) -> Refusal | None:
    """Returns why the record of ``rank``, or the error of reading it, prevents the use of the save;
    None if it does not. ``first``: the record of the lowest rank."""
    if isinstance(row, Exception):
        reason = f"the record of rank {rank} cannot be read: {row}"
    elif (row.run, row.state.step, row.rank) != (attempt.run, attempt.step, rank):
        reason = f"the record of rank {rank} is of another run, step or rank"
    elif first is not None and row.world_size != first.world_size:
        reason = (
            f"the record of rank {rank} is of a job of {row.world_size} ranks, that of rank "
            f"{first.rank} of {first.world_size}"
        )
    else:
        return None
    error = row if isinstance(row, Exception) else None
    return Refusal(attempt.step, reason, rank=rank, is_unreadable=may_pass(error))


def _read_records(
    storage: Storage, path: str, ranks: list[int], brief: bool
) -> dict[int, Record | Exception]:
    """Returns for each of ``ranks`` its record, or the error that prevents reading it. ``brief``:
    only up to the first readable record, if that proves the save incomplete."""
    rows: dict[int, Record | Exception] = {}
    for rank in ranks if brief else ():
        row = rows[rank] = _read_record(storage, path, rank)
        if isinstance(row, Record):
            if len(ranks) < (len(row.local_ranks) or row.world_size):
                return rows
            break
    others = ranks[len(rows) :]
    read = partial(_read_record, storage, path)
    return rows | dict(zip(others, parallel(storage, read, others), strict=True))


def _read_record(storage: Storage, path: str, rank: int) -> Record | Exception:
    try:
        with storage.open(os.path.join(path, record_name(rank))) as file:
            return read_record(file)
    except (RecordError, OSError) as error:
        return error


@dataclass(frozen=True)
class RecordFolder:
    """The records in the folder ``path``. ``known``: keeps what was read; None: nothing is kept."""

    storage: Storage
    path: str
    known: dict[int, tuple[Record, Details]] | None = None

    def details(self, rank: int) -> Details:
        """Returns the details in a rank's record. Raises the errors of ``read``."""
        return self.read(rank)[1]

    def read(self, rank: int) -> tuple[Record, Details]:
        """Returns the record of a rank and its details. Raises RecordError or OSError if they
        cannot be read."""
        if self.known is not None and rank in self.known:
            return self.known[rank]
        with self.storage.open(os.path.join(self.path, record_name(rank))) as file:
            found = read_details(file)
        if self.known is not None:
            self.known[rank] = found
        return found


def iteration_record_names(directory: CheckpointDir) -> list[str]:
    """Returns the names of the folders of records in iteration folders, copied ones included."""
    found: list[str] = []
    for base in directory.storage.list(directory.root):
        if parse_iteration(base) is not None:
            # one that cannot be listed blocks no job; nothing can be removed there
            with suppress(OSError):
                found += directory.storage.list(directory.path(base, FOLDER))
    return found
