"""Changes a folder of checkpoints: removes old ones by a policy, re-reads and repairs what is
kept, and brings a save from memory of this node to disk, for a training that has ended and does not
come back to this node.

    mindresume.prune("output/checkpoint", policy=mindresume.KeepLast(3), dry_run=True).removed
    report = mindresume.scrub("output/checkpoint", rate_mb=50, repair=True)
    report.damaged, report.repaired
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

from mindresume import runtime
from mindresume.api.checkpoint import existing
from mindresume.api.results import Problem, Result, problem_of
from mindresume.coordination.lease import ReadLocks, read_locks
from mindresume.coordination.lease_acquisition import EndedRuns, check_no_live_job
from mindresume.errors import ConfigError, LeaseHeldError, MissingCheckpointError
from mindresume.events import SILENT, Event, Progress, RemovalPostponed
from mindresume.formats import Candidate, CheckpointDir, Refusal
from mindresume.formats.iterations import parse_weight_file
from mindresume.formats.rank_folders import folder_rank
from mindresume.formats.records import scan_records
from mindresume.formats.scan import CONSOLIDATED, JOB_FOLDERS, kind_of, locate, scan
from mindresume.maintenance.scrub import (
    DAMAGED,
    UNREADABLE,
    CheckpointScrub,
    Scrubber,
    ScrubOptions,
)
from mindresume.model.manifest import FOLDER, TRASH, parse_attempt, strip_trash
from mindresume.reshard.strategy_store import StrategyLookup
from mindresume.resume.candidates import list_checkpoints
from mindresume.resume.eligible import read_size
from mindresume.resume.memory_source import DiskCopy
from mindresume.resume.verifier import Verifier
from mindresume.saving.garbage_collector import carry_out, holds_weights, weights_of
from mindresume.saving.memory_tier.directory import PARTNER, TierOwner, find_tier, read_mark
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.retention import Policy, newest_lineage, plan
from mindresume.storage import Storage, parallel
from mindresume.storage.object_store import FsspecStore, RetryingStore
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
    (rules: ``mindresume/saving/retention.py``).

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
    names = [c.commit_dir for c in stayed]
    unknown = "just became held, or was removed by another process"
    reasons = {**planned.reasons, **{name: postponed.get(name, unknown) for name in names}}
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
    found = parallel(directory.storage, directory.storage.status, paths)
    return sum(status.size for status in found if status is not None)


def _removal_text(trash: str) -> str:
    """Returns a removal as text: its step, or the name of its folder."""
    found = parse_attempt(strip_trash(trash))
    return f"step {found[0]}" if found else trash


# ---- scrub ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScrubbedCheckpoint(Result):
    """Holds the result of a scrub of one checkpoint.

    Attributes:
        step: The step.
        run_id: The run that saved it; None: mindformers alone.
        state: "intact" (every byte is as written), "repaired" (all damage is repaired), "damaged"
            (some is left, and the checkpoint is refused from now on), "unreadable" (no damage is
            known, and some files could not be read; nothing is recorded, and the next scrub or
            start reads them again), "removed" (by a job, meanwhile), or "skipped".
        reason: Why it was skipped; empty otherwise.
        damaged: What is left damaged, or cannot be read, each with its file and tensors.
        repaired: What was damaged or missing and is as written again.
        notes: Why a repair failed, and defects that do not prevent a resume, as sentences.
        bytes_read: Number of bytes read.
        cached_bytes: An estimate of the bytes that the cache of the kernel may have answered
            instead of the disk.
    """

    step: int | None
    run_id: str | None
    state: str
    reason: str
    damaged: tuple[Problem, ...]
    repaired: tuple[Problem, ...]
    notes: tuple[str, ...]
    bytes_read: int
    cached_bytes: int


@dataclass(frozen=True)
class ScrubReport(Result):
    """Holds the result of a scrub of a folder.

    Attributes:
        root: The checkpoint folder.
        damaged: Whether damage is left.
        unreadable: Whether a checkpoint without known damage has files that could not be read.
            Nothing is recorded of them.
        repaired: Number of files that were repaired.
        checkpoints: In the order in which they were read: those first whose last scrub is the
            oldest.
        bytes_read: Number of bytes read.
        seconds: Duration.
    """

    root: str
    damaged: bool
    unreadable: bool
    repaired: int
    checkpoints: tuple[ScrubbedCheckpoint, ...]
    bytes_read: int
    seconds: float


def scrub(
    path: str | os.PathLike[str],
    *,
    rate_mb: float = 0.0,
    repair: bool = False,
    remote: str | None = None,
    step: int | None = None,
    older_than_hours: float = 0.0,
    progress: Progress = SILENT,
) -> ScrubReport:
    """Reads every byte of the kept checkpoints from the disk, and records beside them what is
    damaged.

    A damaged checkpoint is refused from then on by resumes, ``select`` and ``list`` without a new
    reading, until its files are replaced. Each checkpoint has a read lock while it is read, so that
    no job removes it.

    Args:
        path: The checkpoint folder, or the output folder above it.
        rate_mb: Megabytes (10^6 bytes) a second at most; 0: no limit.
        repair: Whether damaged files are replaced by intact copies: from other ranks with the same
            recorded checksum, or from ``remote``. The copy is a new file that is proven before it
            takes the name of the damaged one.
        remote: ``remote_save_url`` of the training; only with ``repair``.
        step: Only this step.
        older_than_hours: Leaves out what was saved, or read by a scrub, since then.
        progress: Receives the numbers of bytes to read, and of bytes read.

    Returns:
        A ScrubReport; ``damaged`` is the answer.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        MissingCheckpointError: There is no such step.
        ConfigError: ``path`` holds merged weights, which `verify` reads; or an argument is wrong.
        OSError: The locks and results cannot be written, such as in a read-only folder; use
            ``verify`` there.
    """
    if rate_mb < 0 or older_than_hours < 0:
        raise ConfigError(
            f"scrub: rate_mb is {rate_mb}, older_than_hours {older_than_hours}; expected numbers "
            "of at least 0"
        )
    if remote is not None and not repair:
        raise ConfigError("scrub: remote is given without repair; set repair, or leave out remote")
    started, storage = runtime.monotonic(), PosixStorage()
    place = locate(storage, existing(path))
    if kind_of(storage, place) in CONSOLIDATED:
        raise ConfigError(
            f"{place} holds merged weights, which have no records; mindresume verify reads every "
            "byte of them"
        )
    found, rows = list_checkpoints(storage, place, StrategyLookup(storage))
    wanted = [row for row in rows if step is None or row.candidate.step == step]
    if step is not None and not wanted:
        raise MissingCheckpointError(f"{found.root} has no step {step}")
    bucket = (
        None
        if remote is None
        else RemoteCheckpoints(
            RetryingStore(FsspecStore(remote)), f"{remote.rstrip('/')}/checkpoint"
        )
    )
    scrubber = Scrubber(
        found.directory,
        ScrubOptions(rate_mb * 1e6, repair, bucket, older_than_hours * 3600),
        progress=progress.advance,
    )
    progress.expect(
        sum(
            read_size(row.candidate, [*row.candidate.files])
            for row in wanted
            if not scrubber.due(row.candidate)
        )
    )
    results = list(scrubber.scrub(wanted))
    states = {row.state for row in results}
    return ScrubReport(
        found.root,
        DAMAGED in states,
        UNREADABLE in states,
        sum(len(row.repaired) for row in results),
        tuple(_scrubbed(found.root, row) for row in results),
        sum(row.bytes_read for row in results),
        round(runtime.monotonic() - started, 3),
    )


def _scrubbed(root: str, row: CheckpointScrub) -> ScrubbedCheckpoint:
    candidate = row.candidate
    return ScrubbedCheckpoint(
        candidate.step,
        candidate.run,
        row.state,
        row.reason,
        tuple(problem_of(root, refusal) for refusal in row.damaged),
        tuple(problem_of(root, refusal) for refusal in row.repaired),
        row.notes,
        row.bytes_read,
        row.cached_bytes,
    )


# ---- flush ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlushResult(Result):
    """Holds what was written to disk.

    Attributes:
        root: The checkpoint folder.
        step: The step that was written; None: none.
        size_bytes: Bytes of its files.
        committed: Whether it is a checkpoint now; False: parts of other nodes are missing.
        up_to_date: The disk had a checkpoint that is as new.
        reason: Why nothing was written, as a sentence.
    """

    root: str
    step: int | None = None
    size_bytes: int = 0
    committed: bool = False
    up_to_date: bool = False
    reason: str = ""


def flush(path: str | os.PathLike[str], *, progress: Progress = SILENT) -> FlushResult:
    """Writes the newest save in memory of this node, whose bytes are all verified, to disk, if the
    disk is older. Of a job of several nodes it writes older ones too, until one is complete: a node
    can have died before the others. What this node keeps of another one is written, too. Watches
    the lease of a job on another node for some heartbeats, to find out whether it is alive.

    Args:
        path: The checkpoint folder, or one above it.
        progress: Receives the numbers of bytes to write, and of bytes written.

    Raises:
        LeaseHeldError: A job saves into the folder.
        SaveError: A file of that name holds something else, or the bytes changed meanwhile.
        FileNotFoundError: ``path`` does not exist.
    """
    storage = PosixStorage()
    root = os.path.realpath(_root_of(storage, existing(path)))
    directory = CheckpointDir(storage, root)
    tier, problem = find_tier(directory)
    if not tier:
        return FlushResult(root, reason=problem or "there is no save of it in memory of this node")
    owner = TierOwner.read(storage, tier)
    if owner is None or owner.is_alive:
        who = f"run {owner.run}" if owner else "an unknown run"
        raise LeaseHeldError(f"{root} is in use by {who}; a job that runs saves by itself")
    # a killed job has left its lease, mostly on another node
    check_no_live_job(directory)
    newest = max(
        (
            candidate.order[:2]
            for candidate in scan(directory).candidates
            if candidate.problem is None
            # else a part that a flush wrote
            and (candidate.committed or not candidate.local_ranks)
        ),
        default=(0, 0),
    )
    in_memory = CheckpointDir(storage, tier)
    kept = CheckpointDir(storage, find_tier(directory, PARTNER)[0])
    copies = {row.name: row for row in scan_records(kept)[0]} if kept.root else {}
    reasons = []
    written = None
    for candidate in scan_records(in_memory)[0]:
        if candidate.problem is not None:
            continue
        if candidate.order[:2] <= newest:
            return written or FlushResult(
                root, up_to_date=True, reason="the disk has a checkpoint that is as new"
            )
        refused = _damage(in_memory, candidate)
        if refused is not None:
            reasons.append(str(refused))
            continue
        size = read_size(candidate, [*candidate.files])
        progress.expect(size)
        copy = DiskCopy(directory, tier, candidate, progress=progress)
        copy.write()
        is_committed = copy.commit()
        of_partner = copies.get(candidate.name)
        if not is_committed and of_partner is not None and not _damage(kept, of_partner):
            DiskCopy(directory, kept.root, of_partner, progress=progress).write()
            is_committed = copy.commit()
        result = FlushResult(root, candidate.step, size, is_committed)
        if result.committed or not candidate.local_ranks:
            return result
        written = written or result  # another node may have only an older one
    return written or FlushResult(
        root, reason="; ".join(reasons) or "no save in memory of this node is whole"
    )


def _damage(tier: CheckpointDir, candidate: Candidate) -> Refusal | None:
    """Returns why a save in memory is not written to disk, after reading all of its bytes."""
    if candidate.problem is not None:
        return candidate.problem
    found = map(Verifier(tier, candidate).verify, candidate.files)
    return next((row for row in found if isinstance(row, Refusal)), None)


def _root_of(storage: Storage, path: str) -> str:
    """Returns the checkpoint directory that ``path`` means, also if only memory has a save of
    it."""
    found = [locate(storage, path), *(os.path.join(path, inner) for inner in JOB_FOLDERS)]
    return next(
        (root for root in found if read_mark(CheckpointDir(storage, root)) is not None), found[0]
    )
