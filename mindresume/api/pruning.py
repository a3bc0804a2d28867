"""Removes old checkpoints by a policy.

mindresume.prune("output/checkpoint", policy=mindresume.KeepLast(3), dry_run=True).removed
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

from mindresume.api.results import Result
from mindresume.api.sources import existing
from mindresume.coordination.lease import EndedRuns
from mindresume.coordination.read_locks import ReadLocks, read_locks
from mindresume.errors import ConfigError
from mindresume.events import Event, RemovalPostponed
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import parse_weight_file
from mindresume.formats.rank_folders import folder_rank
from mindresume.formats.records import scan_records
from mindresume.formats.scan import locate
from mindresume.formats.weight_files import file_sizes
from mindresume.model.manifest import FOLDER, TRASH, FileRecord, parse_attempt, strip_trash
from mindresume.saving.garbage_collector import carry_out, holds_weights, weights_of
from mindresume.saving.removal_plan import newest_lineage, plan
from mindresume.saving.retention import Policy
from mindresume.storage.posix import PosixStorage


@dataclass(frozen=True)
class PrunedCheckpoint(Result):
    """Holds the decision about one saved step.

    Attributes:
        step: Absolute optimizer step; None if it is unknown.
        run_id: The run that saved it.
        saved_at: Seconds since 1970; None if it is unknown.
        size_bytes: Bytes of its weights.
        committed: Whether it was a committed checkpoint, and not an incomplete save.
        reason: The rules that keep it, the reason of its removal, or who holds it.
    """

    step: int | None
    run_id: str | None
    saved_at: float | None
    size_bytes: int
    committed: bool
    reason: str


@dataclass(frozen=True)
class PruneResult(Result):
    """Lists what stays, what was removed (in a dry run: would be), and why. Each group is newest
    first.

    Attributes:
        root: The checkpoint folder.
        dry_run: Whether nothing was removed.
        kept: Checkpoints that stay, and incomplete saves of a job that may still run.
        removed: What was removed.
        held: What should be removed but stays for now, because a process reads it, or because the
            removal failed.
        resumed_removals: Removals that an earlier process began, and that were finished too.
        freed_bytes: Bytes of the removed weights.
    """

    root: str
    dry_run: bool
    kept: tuple[PrunedCheckpoint, ...]
    removed: tuple[PrunedCheckpoint, ...]
    held: tuple[PrunedCheckpoint, ...]
    resumed_removals: tuple[str, ...]
    freed_bytes: int


def prune(
    path: str | os.PathLike[str],
    *,
    policy: Policy,
    all_trainings: bool = False,
    dry_run: bool = False,
) -> PruneResult:
    """Removes the checkpoints that ``policy`` does not keep, and saves that never completed.

    These always stay: the newest checkpoint whose files are complete, what a job is reading,
    incomplete saves of a job that may still run, and everything that mindformers wrote alone
    (rules: ``mindresume/saving/removal_plan.py``).

    Args:
        path: The checkpoint folder, or the output folder or run folder above it.
        policy: ``KeepLast``, ``KeepEverySteps``, ``KeepBest``, ``KeepPerMinutes``, or ``KeepAny``
            of several.
        all_trainings: Whether the checkpoints of all trainings in the folder are counted and
            removed. False: only those of the training that saved last; if it started afresh in the
            folder of another training, those of the other one stay.
        dry_run: Whether to change nothing, and only return what would be done.

    Returns:
        A PruneResult. What could not be removed is in ``held``, with the reason.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ConfigError: It is not a checkpoint folder.
        MissingCheckpointError: Several folders below it hold checkpoints.
    """
    path = existing(path)
    storage = _ReadOnly() if dry_run else PosixStorage()
    root = locate(storage, path)
    if not os.path.isdir(root) or folder_rank(os.path.basename(os.path.abspath(root))) is not None:
        raise ConfigError(
            f"{root} is not a checkpoint folder; give the folder that contains the rank folders"
        )
    directory = CheckpointDir(storage, root)
    held, records = read_locks(directory), os.path.join(root, FOLDER)
    lineage = None if all_trainings else newest_lineage(scan_records(directory)[0])
    planned = plan(directory, policy, held, ended=EndedRuns(directory), lineage=lineage)
    begun = [
        name
        for name in storage.list(records)
        if name.startswith(TRASH) and strip_trash(name) not in held
    ]
    going = [*planned.to_delete, *planned.orphans]
    listed = (*planned.kept, *planned.unfinished, *planned.read_locked, *going)
    sized = {candidate.commit_dir: _size(directory, candidate.commit_dir) for candidate in listed}
    left = {name: _size(directory, os.path.join(records, name)) for name in begun}
    events: list[Event] = []
    removed = (
        going if dry_run else carry_out(directory, planned, ReadLocks(directory), events.append)
    )
    left = {
        name: count
        for name, count in left.items()
        if dry_run or storage.status(os.path.join(records, name)) is None
    }
    # meanwhile held, removed by another process, or not removable
    stayed = [c for c in going if c not in removed]
    postponed = {
        event.path: event.reason for event in events if isinstance(event, RemovalPostponed)
    }
    reasons = {
        **planned.reasons,
        **{
            c.commit_dir: postponed.get(
                c.commit_dir, "just became held, or was removed by another process"
            )
            for c in stayed
        },
    }
    kept, gone, held_back = (
        tuple(
            PrunedCheckpoint(
                c.step, c.run, c.saved_at, sized[c.commit_dir], c.committed, reasons[c.commit_dir]
            )
            for c in sorted(group, key=attrgetter("order"), reverse=True)
        )
        for group in (
            (*planned.kept, *planned.unfinished),
            removed,
            (*planned.read_locked, *stayed),
        )
    )
    return PruneResult(
        root,
        dry_run,
        kept,
        gone,
        held_back,
        tuple(map(_removal_text, left)),
        sum(sized[c.commit_dir] for c in removed) + sum(left.values()),
    )


class _ReadOnly(PosixStorage):
    """Raises an OSError for every change: the storage of a dry run."""

    def _refuse(self, *paths: Any, **options: Any) -> NoReturn:
        raise OSError(errno.EROFS, "a dry run changes nothing", *paths[:1])

    write = rename = sync = remove = make_folder = _refuse


def _size(directory: CheckpointDir, commit_dir: str) -> int:
    """Returns the bytes of the existing, readable weights of a save, recorded or not.
    ``commit_dir``: its iteration folder, or its records."""
    try:
        if holds_weights(directory.storage, commit_dir):
            paths = [
                os.path.join(commit_dir, name)
                for name in directory.storage.list(commit_dir)
                if parse_weight_file(name)
            ]
        else:
            paths = weights_of(directory, commit_dir)
    except OSError:
        return 0
    return sum(
        size or 0
        for size in file_sizes(
            directory, [FileRecord(os.path.relpath(path, directory.root), "") for path in paths]
        )
    )


def _removal_text(trash: str) -> str:
    """Returns a removal as text: its step, or the name of its folder."""
    found = parse_attempt(strip_trash(trash))
    return f"step {found[0]}" if found else trash
