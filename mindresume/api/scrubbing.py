"""Scrubs a folder of checkpoints: re-reads what is kept, tells what rotted, and repairs it.

report = mindresume.scrub("output/checkpoint", rate_mb=50, repair=True)
report.damaged, report.repaired
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindresume import runtime
from mindresume.api.results import Problem, Result, problem_of
from mindresume.api.sources import existing
from mindresume.errors import ConfigError, MissingCheckpointError
from mindresume.events.progress import SILENT, Progress
from mindresume.formats.scan import is_consolidated, locate
from mindresume.reshard.strategy_store import strategy_lookup
from mindresume.resume.candidates import list_checkpoints
from mindresume.resume.choice import read_size
from mindresume.resume.scrub import DAMAGED, UNREADABLE, CheckpointScrub, Scrubber, ScrubOptions
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.storage.object_store import FsspecStore, RetryingStore
from mindresume.storage.posix import PosixStorage


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
    if is_consolidated(storage, place):
        raise ConfigError(
            f"{place} holds merged weights, which have no records; mindresume verify reads every "
            "byte of them"
        )
    found, rows = list_checkpoints(storage, place, strategy_lookup(storage))
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
