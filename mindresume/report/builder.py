"""Builds the report: reads a folder, and returns what is known about its training, also as one JSON
document."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mindresume.api.checkpoint import existing
from mindresume.coordination.lease import SAVING, is_alive, known_lease_holders
from mindresume.events import FAILED
from mindresume.events.recovery_phases import Moments
from mindresume.formats import CheckpointDir
from mindresume.formats.scan import locate
from mindresume.report import accounting, event_log, log_parser
from mindresume.report.accounting import (
    AttemptAccount,
    Recovery,
    Seconds,
    accounts_of,
    recoveries_of,
    supervisor_moments,
    total_of,
    totals_of,
)
from mindresume.report.event_log import (
    SUPERVISED,
    EventLog,
    failures_in,
    find_event_logs,
    find_supervisor_logs,
    foreign_utc_offsets,
    is_thinned,
    of_first_node,
    read_events,
    supervised_starts,
)
from mindresume.report.log_parser import LogFile, find_logs, merged
from mindresume.report.phrases import Phrase, phrase
from mindresume.report.runs import RunAttempt, attempts_of, with_losses, with_outcome
from mindresume.reshard.strategy_store import StrategyLookup
from mindresume.resume.candidates import COMPLETE, list_checkpoints, size_of
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage


@dataclass(frozen=True)
class StoredCheckpoint:
    """Describes a saved step. Its fields have the names of ``mindresume ls --json``.

    ``state``: as of ``mindresume.resume.candidates.CheckpointStatus``. ``reason``: why a resume
        refuses it; or what is missing or
    damaged in it and not needed. ``run_id`` None: mindformers wrote it. ``saved_at``: seconds since
        1970.
    """

    step: int | None
    epoch: int | None
    run_id: str | None
    world_size: int
    size_bytes: int
    format: str
    iteration_dir: str | None
    committed: bool
    saved_at: float | None
    state: str
    reason: str = ""


@dataclass(frozen=True)
class CheckpointState:
    """Holds the checkpoints of ``root``. ``leases``: {run id: whether its process runs, None: it is
    on another machine}."""

    root: str
    exists: bool
    checkpoints: tuple[StoredCheckpoint, ...]
    notes: tuple[str, ...]
    leases: dict[str, bool | None]

    @property
    def newest(self) -> StoredCheckpoint | None:
        """The checkpoint that a resume would take, as far as is known without reading it."""
        return next((row for row in self.checkpoints if row.state == COMPLETE), None)


def read_checkpoint_state(directory: CheckpointDir) -> CheckpointState:
    """Returns the checkpoints, newest first, in the order in which a resume tries them."""
    found, seen = list_checkpoints(
        directory.storage, directory.root, StrategyLookup(directory.storage)
    )
    rows = [
        StoredCheckpoint(
            saved.step,
            saved.epoch,
            saved.run,
            saved.world_size,
            size_of(found.directory, saved),
            saved.format,
            saved.iteration_dir or None,
            saved.committed,
            saved.saved_at,
            row.state,
            row.problem.reason if row.problem else "; ".join(row.warnings),
        )
        for row in seen
        for saved in [row.candidate]
    ]
    leases = {
        holder.run: is_alive(holder)
        for holder in known_lease_holders(found.directory)
        if holder.purpose == SAVING
    }
    return CheckpointState(found.root, found.exists, tuple(rows), found.notes, leases)


@dataclass(frozen=True)
class Report:
    """Holds the report of one training. ``read``: the logs and event files that were used.
    ``rank``: the rank of the log; None: there is no log. ``loss_rank``: the rank of the loss, if it
    is another one. ``notes``: what a reader must know. ``supervised``: moments that a supervisor
    recorded, by the number of the attempt that it started."""

    output: str
    folders: tuple[str, ...]
    read: tuple[str, ...]
    rank: int | None
    loss_rank: int | None
    accounts: tuple[AttemptAccount, ...]
    disk: CheckpointState
    notes: tuple[str, ...]
    supervised: Mapping[int, Moments] = field(default_factory=dict)

    @property
    def attempts(self) -> tuple[RunAttempt, ...]:
        """The run attempts."""
        return tuple(row.attempt for row in self.accounts)

    @property
    def restarts(self) -> int:
        """The number of starts after the first one."""
        return max(len(self.accounts) - 1, 0)

    @property
    def failures(self) -> int:
        """The number of attempts that failed."""
        return sum(attempt.outcome == FAILED for attempt in self.attempts)

    @property
    def steps_done(self) -> int:
        """The number of steps of all attempts."""
        return sum(row.steps for row in self.accounts)

    @property
    def steps_lost(self) -> int:
        """The number of lost steps."""
        return sum(row.steps_lost for row in self.accounts)

    @property
    def reached(self) -> int | None:
        """The last step of the present training."""
        return next(
            (
                row.attempt.last_step
                for row in reversed(self.accounts)
                if row.attempt.last_step is not None
            ),
            None,
        )

    @property
    def steps_at_risk(self) -> int | None:
        """The number of steps after the newest checkpoint, if the last attempt did not end
        normally; None also if there is no checkpoint directory."""
        if not self.disk.exists:
            return None
        return accounting.steps_at_risk(
            self.accounts, self.disk.newest.step if self.disk.newest else None
        )

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """What passed between each failure and the first new step."""
        return recoveries_of(self.accounts, self.supervised)

    @property
    def seconds(self) -> Seconds:
        """The seconds of all attempts."""
        return total_of(self.accounts)


def folders_of(path: str) -> tuple[str, str]:
    """Returns the output folder of the training that ``path`` means (its output folder, the folder
    above it, or its checkpoint folder), and the checkpoint folder in it.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        MissingCheckpointError: Several folders below it hold checkpoints.
    """
    root = locate(PosixStorage(), existing(path))
    if (
        os.path.abspath(root) == os.path.abspath(path)
        and os.path.basename(os.path.abspath(root)) == "checkpoint"
    ):
        return os.path.dirname(os.path.abspath(root)), root
    inner = os.path.join(path, "output")
    output = (
        inner if root.startswith(inner + os.sep) or root == path and os.path.isdir(inner) else path
    )
    return output, root if root != path else os.path.join(output, "checkpoint")


def build_report(storage: Storage, output: str, root: str, more: Sequence[str] = ()) -> Report:
    """Returns the report of one training.

    Args:
        storage: of the checkpoints.
        output: folder that contains the logs and the event files.
        root: the checkpoint directory.
        more: other folders with logs or event files.
    """
    folders = (output, *more)
    found, recorded, disk = (
        find_logs(folders),
        find_event_logs(folders),
        read_checkpoint_state(CheckpointDir(storage, root)),
    )
    rank = min((log.rank for log in found), default=None)
    own, utc_offsets = [log for log in found if log.rank == rank], foreign_utc_offsets(recorded)
    utc_offset = utc_offsets[0] if len(utc_offsets) == 1 else None
    supervisors = of_first_node(find_supervisor_logs(folders))
    watched = [row for log in supervisors for row in read_events(log, SUPERVISED)]
    attempts = attempts_of(
        (read_events(log) for log in recorded if log.rank == 0),
        merged(own, utc_offset),
        failures_in(recorded),
        supervised_starts(watched),
    )
    attempts, others = _with_true_losses(attempts, found, rank, utc_offset)
    if attempts:
        attempts = (
            *attempts[:-1],
            with_outcome(attempts[-1], disk.leases if disk.exists else None),
        )
    supervised = supervisor_moments(watched, attempts)
    read = [piece for log in found if log in own or log.rank in others for piece in log.pieces]
    read += [log.path for log in (*recorded, *supervisors)]
    return Report(
        output,
        folders,
        tuple(read),
        rank,
        max(others, default=None),
        accounts_of(attempts),
        disk,
        tuple(_notes(attempts, rank, others, utc_offsets, recorded)),
        supervised,
    )


def _with_true_losses(
    attempts: tuple[RunAttempt, ...],
    found: Iterable[LogFile],
    rank: int | None,
    utc_offset: int | None,
) -> tuple[tuple[RunAttempt, ...], list[int]]:
    """Returns the attempts with the true loss, and the ranks whose logs have it. With pipeline
    stages that is the last rank; if the number of ranks changed, another rank for each attempt."""
    used: list[int] = []
    by_rank = sorted({log.rank for log in found} - {rank}, reverse=True)
    todo = {
        attempt.number
        for attempt in attempts
        if not attempt.losses.are_true and len(attempt.losses)
    }
    for other in by_rank:
        if not todo:
            break
        better = with_losses(
            attempts, merged((log for log in found if log.rank == other), utc_offset)
        )
        got = {
            new.number
            for old, new in zip(attempts, better, strict=True)
            if new is not old and new.number in todo
        }
        if got:
            attempts = tuple(
                new if new.number in got else old for old, new in zip(attempts, better, strict=True)
            )
            used.append(other)
            todo -= got
    return attempts, used


def _notes(
    attempts: Sequence[RunAttempt],
    rank: int | None,
    others: Sequence[int],
    utc_offsets: Sequence[int],
    recorded: Sequence[EventLog],
) -> Iterable[str]:
    """Yields what a reader must know about missing or inferred data."""
    unrecorded = [attempt.number for attempt in attempts if not attempt.has_events]
    if unrecorded:
        yield phrase("note.no_events", attempts=_named(unrecorded))
    unlogged = [
        attempt.number
        for attempt in attempts
        if attempt.last_step is not None and not len(attempt.losses)
    ]
    if unlogged:
        yield phrase("note.no_log", attempts=_named(unlogged))
    if rank:
        yield phrase("note.other_rank", rank=rank)
    if (
        any(not attempt.losses.are_true and len(attempt.losses) for attempt in attempts)
        and not others
    ):
        yield phrase("note.no_last_rank", rank=rank)
    if others:
        yield phrase("note.last_rank", ranks=", ".join(map(str, sorted(others))))
    if attempts and attempts[0].is_cut:
        yield phrase("note.cut")
    interval = max((attempt.losses.interval for attempt in attempts), default=1)
    if interval > 1:
        yield phrase("note.interval", interval=interval, more=interval - 1)
    bad = sum(attempt.losses.not_finite for attempt in attempts)
    if bad:
        yield phrase("note.not_finite", steps=bad)
    if any(attempt.origin.step_scale != 1 for attempt in attempts):
        yield phrase("note.renumbered")
    if len(utc_offsets) > 1:
        yield phrase(
            "note.offsets", offsets=", ".join(f"{offset / 3600:+g} h" for offset in utc_offsets)
        )
    thinned = [os.path.basename(log.path) for log in recorded if log.rank == 0 and is_thinned(log)]
    if thinned:
        yield phrase("note.thinned", files=", ".join(thinned))


def _named(numbers: Sequence[int]) -> Phrase:
    """Returns the attempts as text: "attempt 3", or "attempts 3, 4"."""
    return phrase(
        "note.attempts",
        count=len(numbers),
        numbers=", ".join(map(str, numbers[:10])) + (" ..." if len(numbers) > 10 else ""),
    )


# ---- for programs --------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """Returns one document. Its fields are those of Report, RunAttempt, Save, Seconds and
    StoredCheckpoint, with the same meaning. Times are seconds since 1970, durations seconds, sizes
    bytes, ``goodput`` a share of 1. None: unknown."""
    seconds = report.seconds
    return {
        "output": report.output,
        "root": report.disk.root,
        "sources": {
            "read": list(report.read),
            "looked_for": looked_for(report),
            "rank": report.rank,
            "loss_rank": report.loss_rank,
        },
        "restarts": report.restarts,
        "failures": report.failures,
        "goodput": None if seconds.goodput is None else round(seconds.goodput, 6),
        "steps": {
            "reached": report.reached,
            "done": report.steps_done,
            "lost": report.steps_lost,
            "at_risk": report.steps_at_risk,
        },
        "seconds": {**_rounded(asdict(seconds)), "total": round(seconds.total, 3)},
        "attempts": [_attempt(row) for row in report.accounts],
        "timeline": [
            {
                "attempt": row.attempt.number,
                "kind": span.kind,
                "begin": round(span.begin, 3),
                "end": round(span.end, 3),
            }
            for row in report.accounts
            for span in row.timeline
        ],
        "recoveries": {
            "failures": [_recovery(row) for row in report.recoveries],
            "seconds": _rounded(totals_of(report.recoveries)),
        },
        "checkpoints": [asdict(row) for row in report.disk.checkpoints],
        "notes": [*report.notes, *report.disk.notes],
    }


def looked_for(report: Report) -> list[str]:
    """Returns the patterns of the files that are looked for."""
    return [
        os.path.join(folder, pattern)
        for folder in report.folders
        for pattern in (*log_parser.LOOKED_FOR, event_log.LOOKED_FOR)
    ]


def _attempt(row: AttemptAccount) -> dict[str, Any]:
    """Returns the JSON object of one attempt."""
    attempt = row.attempt
    known = attempt.has_events
    return {
        "number": attempt.number,
        "run_id": attempt.run_id,
        "has_events": known,
        "world_size": attempt.world_size,
        "started": attempt.started,
        "ended": attempt.ended,
        "outcome": attempt.outcome,
        "reason": attempt.reason,
        "failed_rank": attempt.failed_rank,
        "is_fresh": attempt.origin.is_fresh,
        "resumed_from": attempt.origin.step,
        "resumed_run_id": attempt.origin.run_id,
        "resumed_source": attempt.origin.source,
        "is_inferred": attempt.origin.is_inferred,
        "checkpoint": attempt.origin.checkpoint,
        "load_seconds": attempt.origin.load_seconds,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "steps": row.steps,
        "steps_lost": row.steps_lost,
        "loss": _ends(attempt),
        "seconds": _rounded(asdict(row.seconds)),
        "saves": [asdict(save) for save in attempt.saves.disk] if known else None,
        "skipped_saves": attempt.saves.skipped if known else None,
        "memory_saves": len(attempt.saves.memory) if known else None,
        "refused": [asdict(refused) for refused in attempt.origin.refused] if known else None,
    }


def _recovery(row: Recovery) -> dict[str, Any]:
    """Returns the JSON object of one recovery."""
    return {
        "failed": row.failed,
        "resumed": row.resumed,
        "source": row.source,
        "died": round(row.died, 3),
        "first_step": round(row.first_step, 3),
        "restart_seconds": round(row.restart_seconds, 3),
        "steps_redone": row.steps_redone,
        "seconds_redone": round(row.seconds_redone, 3),
        "phases": [
            {"names": list(phase.names), "begin": round(phase.begin, 3), "end": round(phase.end, 3)}
            for phase in row.phases
        ],
    }


def _ends(attempt: RunAttempt) -> dict[str, float | None]:
    """Returns the first and the last loss of an attempt."""
    losses = attempt.losses
    first, last = (
        ((float(value) if math.isfinite(value) else None) for value in losses.values[[0, -1]])
        if len(losses)
        else (None, None)
    )
    return {"first": first, "last": last}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}
