"""Builds the report: reads a folder, and returns what is known about its training, also as one JSON
document.

    for proof in proofs_in(folders): print(proof.verdict, proof.text)       # from the event files

How each resume was proved: the weights are compared with what was loaded at the first step, and the
steps that a run trains for the second time with the step ledgers of the runs that trained them
first (``resume.step_ledger``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from mindresume.api.checkpoint import existing
from mindresume.api.results import CheckpointInfo, info_of
from mindresume.coordination.lease import SAVING, is_alive, known_lease_holders
from mindresume.events import (
    FAILED,
    Resumed,
    ResumeDiffers,
    ResumeProved,
    RunOpened,
    TrainingEnded,
)
from mindresume.formats.scan import find
from mindresume.report.accounting import (
    AttemptAccount,
    Recovery,
    Seconds,
    accounts_of,
    recoveries_of,
    total_of,
    totals_of,
)
from mindresume.report.log_reader import (
    LOOKED_FOR,
    EventLog,
    LogFile,
    failures_in,
    find_event_logs,
    find_logs,
    find_supervisor_logs,
    foreign_utc_offsets,
    is_thinned,
    last_steps,
    merged,
    read_events,
    supervised_starts,
)
from mindresume.report.phrases import Phrase, phrase
from mindresume.report.runs import NORMAL, RunAttempt, attempts_of, with_losses, with_outcome
from mindresume.reshard.strategy_store import StrategyLookup
from mindresume.resume.candidates import COMPLETE, list_checkpoints
from mindresume.storage import Storage
from mindresume.storage.posix import PosixStorage
from mindresume.typed import json_value


@dataclass(frozen=True)
class Report:
    """Holds the report of one training.

    Attributes:
        output: the output folder.
        folders: the output folder, and others with logs or event files.
        read: the logs and event files that were used.
        rank: the rank of the log; None: there is no log.
        loss_rank: the rank of the loss, if it is another one.
        accounts: of the run attempts.
        root: the checkpoint folder.
        root_exists: whether it exists.
        checkpoints: newest first, in the order in which a resume tries them.
        notes: what a reader must know.
    """

    output: str
    folders: tuple[str, ...]
    read: tuple[str, ...]
    rank: int | None
    loss_rank: int | None
    accounts: tuple[AttemptAccount, ...]
    root: str
    root_exists: bool
    checkpoints: tuple[CheckpointInfo, ...]
    notes: tuple[str, ...]

    @property
    def attempts(self) -> tuple[RunAttempt, ...]:
        """The run attempts."""
        return tuple(row.attempt for row in self.accounts)

    @property
    def failures(self) -> int:
        """The number of attempts that failed."""
        return sum(row.attempt.outcome == FAILED for row in self.accounts)

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
        normally; None also if there is no checkpoint folder."""
        if not self.root_exists or not self.accounts or self.accounts[-1].attempt.outcome in NORMAL:
            return None
        newest = next((row.step for row in self.checkpoints if row.state == COMPLETE), None)
        return max((self.reached or 0) - (newest or 0), 0)

    @cached_property
    def proofs(self) -> list[Proof]:
        """What proves each resume."""
        return proofs_in(self.folders)

    @cached_property
    def recoveries(self) -> tuple[Recovery, ...]:
        """What passed between each failure and the first new step."""
        return recoveries_of(self.accounts)

    @cached_property
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
    found = find(PosixStorage(), existing(path))
    root, name = found or path, os.path.basename(os.path.abspath(path))
    if root == path and (found or name == "checkpoint"):
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
    event_logs, supervisors = find_event_logs(folders), find_supervisor_logs(folders)
    logs = find_logs(folders)
    scan, statuses = list_checkpoints(storage, root, StrategyLookup(storage))
    checkpoints = tuple(info_of(scan.directory, status) for status in statuses)
    rank = min((log.rank for log in logs), default=None)
    own, utc_offsets = [log for log in logs if log.rank == rank], foreign_utc_offsets(event_logs)
    utc_offset = utc_offsets[0] if len(utc_offsets) == 1 else None
    attempts = attempts_of(
        (read_events(log) for log in event_logs if log.rank == 0),
        merged(own, utc_offset),
        failures_in(event_logs),
        supervised_starts(row for log in supervisors for row in read_events(log)),
        last_steps(folders),
    )
    attempts, loss_ranks = _with_true_losses(attempts, logs, rank, utc_offset)
    if attempts and scan.exists:
        holders = known_lease_holders(scan.directory)
        leases = {holder.run: is_alive(holder) for holder in holders if holder.purpose == SAVING}
        attempts = (*attempts[:-1], with_outcome(attempts[-1], leases))
    read = [piece for log in logs if log.rank in (rank, *loss_ranks) for piece in log.pieces]
    read += [log.path for log in (*event_logs, *supervisors)]
    notes = (*_notes(attempts, rank, loss_ranks, utc_offsets, event_logs), *scan.notes)
    return Report(
        output,
        folders,
        tuple(read),
        rank,
        max(loss_ranks, default=None),
        accounts_of(attempts),
        scan.root,
        scan.exists,
        checkpoints,
        notes,
    )


def _with_true_losses(
    attempts: tuple[RunAttempt, ...],
    logs: Iterable[LogFile],
    rank: int | None,
    utc_offset: int | None,
) -> tuple[tuple[RunAttempt, ...], list[int]]:
    """Returns the attempts with the true loss, and the ranks whose logs have it. With pipeline
    stages that is the last rank; if the number of ranks changed, another rank for each attempt."""
    used: list[int] = []
    for other in sorted({log.rank for log in logs} - {rank}, reverse=True):
        if all(attempt.losses.are_true for attempt in attempts):
            break
        better = with_losses(
            attempts, merged((log for log in logs if log.rank == other), utc_offset)
        )
        if better != attempts:
            attempts = better
            used.append(other)
    return attempts, used


def _notes(
    attempts: Sequence[RunAttempt],
    rank: int | None,
    loss_ranks: Sequence[int],
    utc_offsets: Sequence[int],
    event_logs: Sequence[EventLog],
) -> Iterator[str]:
    """Yields what a reader must know about missing or inferred data."""
    if unrecorded := [attempt.number for attempt in attempts if not attempt.has_events]:
        yield phrase("note.no_events", attempts=_named(unrecorded))
    if unlogged := [
        attempt.number
        for attempt in attempts
        if attempt.last_step is not None and not len(attempt.losses)
    ]:
        yield phrase("note.no_log", attempts=_named(unlogged))
    if rank:
        yield phrase("note.other_rank", rank=rank)
    if loss_ranks:
        yield phrase("note.last_rank", ranks=", ".join(map(str, sorted(loss_ranks))))
    elif not all(attempt.losses.are_true for attempt in attempts):
        yield phrase("note.no_last_rank", rank=rank)
    if attempts and attempts[0].is_cut:
        yield phrase("note.cut")
    interval = max((attempt.losses.interval for attempt in attempts), default=1)
    if interval > 1:
        yield phrase("note.interval", interval=interval, more=interval - 1)
    if bad := sum(attempt.losses.not_finite for attempt in attempts):
        yield phrase("note.not_finite", steps=bad)
    if any(attempt.origin.step_scale != 1 for attempt in attempts):
        yield phrase("note.renumbered")
    if len(utc_offsets) > 1:
        yield phrase(
            "note.offsets", offsets=", ".join(f"{offset / 3600:+g} h" for offset in utc_offsets)
        )
    if thinned := [
        os.path.basename(log.path) for log in event_logs if log.rank == 0 and is_thinned(log)
    ]:
        yield phrase("note.thinned", files=", ".join(thinned))


def _named(numbers: Sequence[int]) -> Phrase:
    """Returns the attempts as text: "attempt 3", or "attempts 3, 4"."""
    text = ", ".join(map(str, numbers[:10])) + (" ..." if len(numbers) > 10 else "")
    return phrase("note.attempts", count=len(numbers), numbers=text)


# ---- for programs --------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """Returns one document. Its fields are those of Report, RunAttempt, Save, Seconds and
    CheckpointInfo, with the same meaning. Times are seconds since 1970, durations seconds, sizes
    bytes, ``goodput`` a share of 1. None: unknown."""
    seconds = report.seconds
    return {
        "output": report.output,
        "root": report.root,
        "sources": {
            "read": list(report.read),
            "looked_for": looked_for(report),
            "rank": report.rank,
            "loss_rank": report.loss_rank,
        },
        "restarts": max(len(report.accounts) - 1, 0),
        "failures": report.failures,
        "goodput": None if seconds.goodput is None else round(seconds.goodput, 6),
        "steps": {
            "reached": report.reached,
            "done": report.steps_done,
            "lost": report.steps_lost,
            "at_risk": report.steps_at_risk,
        },
        "seconds": _rounded({**asdict(seconds), "total": seconds.total}),
        "attempts": [_attempt(row) for row in report.accounts],
        "timeline": [
            _rounded({"attempt": row.attempt.number, **asdict(span)})
            for row in report.accounts
            for span in row.timeline
        ],
        "recoveries": {
            "failures": [_rounded(asdict(row)) for row in report.recoveries],
            "seconds": _rounded(totals_of(report.recoveries)),
        },
        "proofs": [_rounded(asdict(row)) for row in report.proofs],
        "checkpoints": [_checkpoint(row) for row in report.checkpoints],
        "notes": list(report.notes),
    }


def looked_for(report: Report) -> list[str]:
    """Returns the patterns of the files that are looked for."""
    return [os.path.join(folder, pattern) for folder in report.folders for pattern in LOOKED_FOR]


def _attempt(row: AttemptAccount) -> dict[str, Any]:
    """Returns the JSON object of one attempt."""
    attempt, origin = row.attempt, row.attempt.origin
    has_events = attempt.has_events
    first, last = attempt.losses.values[[0, -1]].tolist() if len(attempt.losses) else (None, None)
    return {
        "number": attempt.number,
        "run_id": attempt.run_id,
        "has_events": has_events,
        "world_size": attempt.world_size,
        "started": attempt.started,
        "ended": attempt.ended,
        "outcome": attempt.outcome,
        "reason": attempt.reason,
        "failed_rank": attempt.failed_rank,
        "is_fresh": origin.is_fresh,
        "resumed_from": origin.step,
        "resumed_run_id": origin.run_id,
        "resumed_source": origin.source,
        "is_inferred": origin.is_inferred,
        "checkpoint": origin.checkpoint,
        "load_seconds": origin.load_seconds,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "steps": row.steps,
        "steps_lost": row.steps_lost,
        "loss": json_value({"first": first, "last": last}),
        "seconds": _rounded(asdict(row.seconds)),
        "saves": [asdict(save) for save in attempt.saves.disk] if has_events else None,
        "skipped_saves": attempt.saves.skipped if has_events else None,
        "memory_saves": len(attempt.saves.memory) if has_events else None,
        "refused": [asdict(refused) for refused in origin.refused] if has_events else None,
        "log_folders": list(attempt.log_folders),
    }


def _checkpoint(row: CheckpointInfo) -> dict[str, Any]:
    """Returns the JSON object of one checkpoint: fields of ``mindresume ls --json``, and its
    defect."""
    names = (
        "step",
        "epoch",
        "run_id",
        "world_size",
        "size_bytes",
        "format",
        "iteration_dir",
        "committed",
        "saved_at",
        "state",
    )
    return {**{name: getattr(row, name) for name in names}, "reason": defect_of(row)}


def defect_of(row: CheckpointInfo) -> str:
    """Returns why a resume refuses a checkpoint; or what is missing or damaged in it and not
    needed."""
    return row.problem.reason if row.problem else "; ".join(row.warnings)


def _rounded(value: Any) -> Any:
    """Returns a JSON value with its numbers rounded to milliseconds."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value


# ---- how each resume was proved ------------------------------------------------------------------


# also in the texts of the page
PROVED, WEIGHTS_ONLY, DIFFERS, NOT_PROVED = "proved", "weights", "differs", "unproved"


@dataclass(frozen=True)
class Proof:
    """Describes the proof of one resume.

    Attributes:
        time: of the resume, seconds since 1970.
        run_id: of the run that resumed; None: it is not recorded.
        step: after which it continued.
        verdict: PROVED: weights and steps are the same; WEIGHTS_ONLY: the weights are, and no step
            was done again; DIFFERS; NOT_PROVED: the weights were not compared, or
            the run ended before, or was of an earlier version.
        tensors: how many parameters were compared.
        steps: how many steps were compared.
        largest_loss_difference: relative; None: no loss was compared.
        text: what differs, or why steps were not compared; empty: nothing to say.
    """

    time: float
    run_id: str | None
    step: int
    verdict: str
    tensors: int = 0
    steps: int = 0
    largest_loss_difference: float | None = None
    text: str = ""


def proofs_in(folders: Iterable[str]) -> list[Proof]:
    """Returns the proof of each resume whose events are in ``folders``, in order of time."""
    found = []
    for log in find_event_logs(folders):
        run_id: str | None = None
        resumed: tuple[float, Resumed] | None = None
        proved: ResumeProved | None = None
        problem = ""
        for at, event in read_events(log) if log.rank == 0 else ():
            if isinstance(event, RunOpened):
                run_id = event.run_id
            elif isinstance(event, Resumed):
                resumed = at, event
            elif isinstance(event, ResumeProved):
                proved = event
            elif isinstance(event, ResumeDiffers):
                problem = event.line()
            elif isinstance(event, TrainingEnded) and event.outcome == FAILED:
                altered = event.reason.startswith("AlteredWeightsError")
                problem = problem or (event.reason if altered else "")
        if resumed is not None:
            found.append(_proof(*resumed, run_id, proved, problem))
    return found


def _proof(
    time: float, resumed: Resumed, run_id: str | None, proved: ResumeProved | None, problem: str
) -> Proof:
    proof = proved or ResumeProved(resumed.step, 0, unproved="nothing has been compared yet")
    if proof.differences and not problem:
        problem = f"{proof.differences} of {proof.steps} steps are not as before"
    if problem:
        verdict = DIFFERS
    else:
        proved = PROVED if proof.steps else WEIGHTS_ONLY
        verdict = proved if proof.tensors else NOT_PROVED
    return Proof(
        time,
        run_id,
        resumed.step,
        verdict,
        proof.tensors,
        proof.steps,
        proof.largest_loss_difference,
        problem or proof.unproved,
    )
