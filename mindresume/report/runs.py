"""Builds run attempts from event files and from the lines of mindformers' log. A *run attempt* lasts from one start of the
training to its end.

    event file of rank 0 ─▶ one attempt: run id, checkpoint, saves, outcome      event files of other ranks ─▶ why it failed
    event file of a supervisor ─▶ when the attempt was started, and why it ended, if no rank could say so before
    log ─▶ losses, assigned to attempts by time      a start in the log without an event file ─▶ an attempt with losses alone

Only this module infers what is not recorded; each field says from what.
"""
from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from mindresume import events as ev
from mindresume.events import FAILED, FINISHED, NOTHING_TO_TRAIN, PREEMPTED
from mindresume.events.recovery_phases import Moments
from mindresume.report import log_parser
from mindresume.report.event_log import Failure, RecordedEvent
from mindresume.report.log_parser import LogLine
from mindresume.report.losses import Losses
from mindresume.report.phrases import phrase

RUNNING, UNKNOWN = "running", "unknown"             # the other outcomes are those of TrainingEnded
NORMAL = (FINISHED, PREEMPTED, NOTHING_TO_TRAIN)    # nothing is lost after these
KILLED = phrase("reason.killed")


@dataclass(frozen=True)
class Save:
    """Describes one save of one attempt. ``time``: when the training continued. ``stall_seconds``: how long the training thread
    waited. ``write_seconds``, ``size_bytes``: of rank 0, None: no record says that its part is durable. ``is_committed``: the
    files of all ranks are complete. ``failure``: why it was not saved or not committed."""
    step: int
    time: float
    stall_seconds: float = 0.0
    write_seconds: float | None = None
    size_bytes: int | None = None
    is_committed: bool = False
    is_background: bool = False
    failure: str = ""

    @property
    def is_staged(self) -> bool:
        """Whether rank 0 wrote it, or passed it to the writer in the background."""
        return self.write_seconds is not None or self.is_committed or self.is_background


@dataclass(frozen=True)
class MemorySave:
    """Describes one save into the tier in memory. ``stall_seconds``: the training waited so long for the copy.
    ``background_seconds``: of its checksums. ``size_bytes``: of rank 0."""
    step: int
    stall_seconds: float
    background_seconds: float
    size_bytes: int


@dataclass(frozen=True)
class RefusedCheckpoint:
    """Describes a checkpoint that an attempt refused."""
    step: int | None
    reason: str


@dataclass(frozen=True)
class SupervisedStart:
    """Describes one start of the command by a supervisor. ``began``: in seconds since 1970. ``failure``: what the supervisor
    noticed first; None: nothing."""
    began: float
    failure: Failure | None = None


@dataclass(frozen=True)
class RunAttempt:
    """Describes one start of the training until its end.

    ``started``: of the command, if a supervisor recorded it, else of the first record. ``ended``: of the last record of its
    ranks; a killed process records no end. Both in seconds since 1970. ``is_cut``: the log begins after the attempt began.
    ``has_events``: there is an event file; without one, ``run_id``, ``world_size``, ``saves``, ``skipped_saves``, ``refused`` and
    the reason of a failure are unknown. ``outcome``: one of TrainingEnded, RUNNING or UNKNOWN; FAILED also if another start
    follows and no end was recorded. ``reason``: of the outcome. ``failed_rank``: the rank that failed first, None: unknown.
    ``resumed_from``: step of the checkpoint, in the count of the run that saved it; None: from the beginning. ``is_inferred``: it
    follows from the first loss. ``resumed_run_id``: the run that saved it. ``resumed_source``: where it lay, "disk" or "memory";
    empty: nothing was selected. ``checkpoint``: its description. ``base_step``: the step after which this attempt counts, which
    differs after a change of the batch size. ``step_scale``: steps of this attempt per step of the run that saved.
    ``first_step``, ``last_step``: steps done in this attempt; None: none. ``has_true_loss``: False if the last rank has the true
    loss (pipeline stages). ``moments``: of its start, as far as they were recorded. ``save_steps``, ``memory_steps``: the
    configured steps between two saves to disk, and into memory; None: not recorded, or not by steps.
    """
    number: int
    started: float
    ended: float
    outcome: str
    reason: str = ""
    failed_rank: int | None = None
    has_events: bool = True
    is_cut: bool = False
    run_id: str | None = None
    world_size: int | None = None
    is_fresh: bool = False
    resumed_from: int | None = None
    is_inferred: bool = False
    resumed_run_id: str | None = None
    checkpoint: str = ""
    base_step: int = 0
    step_scale: float = 1.0
    first_step: int | None = None
    last_step: int | None = None
    load_seconds: float | None = None
    saves: tuple[Save, ...] = ()
    skipped_saves: int = 0
    refused: tuple[RefusedCheckpoint, ...] = ()
    has_true_loss: bool = True
    losses: Losses = field(default_factory=Losses)
    moments: Moments = Moments()
    resumed_source: str = ""
    memory_saves: tuple[MemorySave, ...] = ()
    save_steps: int | None = None
    memory_steps: int | None = None


def attempts_of(event_logs: Iterable[Iterable[RecordedEvent]], lines: Iterable[LogLine], failures: Iterable[Failure] = (),
                starts: Sequence[SupervisedStart] = ()) -> tuple[RunAttempt, ...]:
    """Returns the attempts in order of time. ``event_logs``: the event files of rank 0. ``lines``: the log of one rank.
    ``failures``: those of the other ranks. ``starts``: what supervisors recorded, in order of time."""
    builders = _with_lines([builder for events in event_logs for builder in _recorded(events)], lines)
    for index, builder in enumerate(builders):
        for run_id, step in builder.committed_for_others:
            owner = next((other for other in reversed(builders[:index]) if other.run_id == run_id and step in other.saves), None)
            if owner is not None:
                owner.saves[step] = replace(owner.saves[step], is_committed=True, failure="")
    _assign(builders, failures)
    for start, until in zip(starts, [*(later.began for later in starts[1:]), math.inf], strict=False):
        if rows := [row for row in builders if start.began <= row.started < until]:
            rows[0].started = start.began
            rows[-1].take_death(start.failure)
    ends = [*(builder.started for builder in builders[1:]), None]
    return tuple(builder.build(number, end) for number, builder, end in zip(count(1), builders, ends, strict=False))


def with_losses(attempts: Sequence[RunAttempt], lines: Iterable[LogLine]) -> tuple[RunAttempt, ...]:
    """Returns the attempts with the loss of another rank, where only that rank has the true loss. Its lines are assigned to
    attempts by their time."""
    curves, starts = [_Curve() for _ in attempts], [attempt.started for attempt in attempts]
    for line in lines:
        index = bisect_right(starts, line.time) - 1
        if line.kind == log_parser.LOSS and index >= 0:
            curves[index].add(line)
    return tuple(attempt if attempt.has_true_loss or not curve.steps else replace(attempt, losses=curve.build())
                 for attempt, curve in zip(attempts, curves, strict=True))


def with_outcome(attempt: RunAttempt, leases: Mapping[str, bool | None] | None) -> RunAttempt:
    """Returns the last attempt with the outcome that its lease shows, if no end was recorded. ``leases``: of the checkpoint
    directory, by run id: whether the process runs (None: it is on another machine); None: there is no such directory."""
    if attempt.outcome != UNKNOWN or attempt.run_id is None or leases is None:
        return attempt
    if attempt.run_id not in leases:
        return replace(attempt, outcome=FAILED, reason=phrase("reason.lease_released"))
    alive = leases[attempt.run_id]
    if alive is None:
        return attempt
    return replace(attempt, outcome=RUNNING) if alive else replace(attempt, outcome=FAILED, reason=KILLED)


def _recorded(events: Iterable[RecordedEvent]) -> list[_AttemptBuilder]:
    """Returns a builder for each training in one event file: normally one."""
    found: list[_AttemptBuilder] = []
    for recorded in events:
        if not found or isinstance(recorded.event, ev.TrainingStarted) and found[-1].is_begun:
            found.append(_AttemptBuilder(recorded.time, has_events=True))
        found[-1].take(recorded)
    return found


def _with_lines(recorded: list[_AttemptBuilder], lines: Iterable[LogLine]) -> list[_AttemptBuilder]:
    """Adds the lines of the log to ``recorded``, and adds an attempt for each start without an event file."""
    found: list[_AttemptBuilder] = []
    coming = deque(sorted(recorded, key=lambda builder: builder.started))

    def enter(builder: _AttemptBuilder) -> None:
        """Adds a builder. mindformers logs its start shortly before the first event."""
        if found and found[-1].is_only_start:
            builder.started, builder.has_start_line = min(found.pop().started, builder.started), True
        found.append(builder)
    for line in lines:
        while coming and coming[0].started <= line.time:
            enter(coming.popleft())
        if not found or line.kind == log_parser.START and not found[-1].can_take_start():
            found.append(_AttemptBuilder(line.time, has_events=False, is_cut=line.kind != log_parser.START))
        found[-1].take_line(line)
    while coming:
        enter(coming.popleft())
    return found


def _assign(builders: Sequence[_AttemptBuilder], failures: Iterable[Failure]) -> None:
    """Assigns each failure of another rank to the attempt of its run; if the run is not recorded, to the attempt of its time."""
    by_run = {builder.run_id: builder for builder in builders if builder.run_id is not None}
    starts = [builder.started for builder in builders]
    for failure in failures:
        index = bisect_right(starts, failure.time) - 1
        if failure.run_id in by_run:
            by_run[failure.run_id].fail(failure)
        elif index >= 0 and (failure.run_id is None or builders[index].run_id is None):
            builders[index].fail(failure)


class _Curve:
    """Collects the losses of one attempt in ascending order of steps, without duplicates."""

    def __init__(self) -> None:
        self.steps, self.rows = array("q"), [array("d") for _ in range(3)]

    def add(self, line: LogLine) -> None:
        if not self.steps or line.step > self.steps[-1]:
            self.steps.append(line.step)
            for row, value in zip(self.rows, (line.loss, line.time, line.step_seconds), strict=True):
                row.append(value)

    def build(self) -> Losses:
        return Losses(np.frombuffer(self.steps, np.int64) if self.steps else np.empty(0, np.int64),
                      *(np.frombuffer(row) if row else np.empty(0) for row in self.rows))


class _AttemptBuilder:
    """Collects the records of one attempt."""

    def __init__(self, started: float, has_events: bool, is_cut: bool = False):
        self.started = self.ended = started
        self.has_events, self.is_cut = has_events, is_cut
        self.is_begun = self.has_start_line = False
        self.run_id: str | None = None
        self.world_size: int | None = None
        self.save_steps: int | None = None
        self.memory_steps: int | None = None
        self.choice: ev.CheckpointSelected | ev.FreshStart | None = None
        self.progress: ev.ProgressRestored | None = None
        self.load_seconds: float | None = None
        self.end: ev.TrainingEnded | None = None
        self.failure: Failure | None = None
        self.is_over = self.is_preempted = self.is_pipeline = False
        self.reached = self.skipped_saves = 0
        self.saves: dict[int, Save] = {}
        self.memory_saves: list[MemorySave] = []
        self.committed_for_others: list[tuple[str, int]] = []
        self.refused: list[RefusedCheckpoint] = []
        self.curve = _Curve()
        self.moments = Moments()

    # ---- the log

    @property
    def is_only_start(self) -> bool:
        """Whether only mindformers' start line is known."""
        return not self.has_events and not self.is_cut and not self.is_over and not self.curve.steps

    def can_take_start(self) -> bool:
        """Returns whether mindformers' start line can belong to this attempt, whose first event came before it."""
        return self.has_events and not (self.has_start_line or self.end or self.is_over or self.curve.steps)

    def take_line(self, line: LogLine) -> None:
        """Takes a line of mindformers' log."""
        self.ended = max(self.ended, line.time)
        if line.kind == log_parser.LOSS:
            self.curve.add(line)
        elif line.kind == log_parser.START:
            self.has_start_line = True
        elif line.kind == log_parser.LAST_CARD:
            self.is_pipeline = True
        elif line.kind == log_parser.OVER:
            self.is_over = True

    # ---- events

    def take(self, recorded: RecordedEvent) -> None:
        """Takes an event."""
        at, event = recorded
        self.ended = max(self.ended, at)
        self.is_begun = self.is_begun or not isinstance(event, ev.Notice)
        if isinstance(event, ev.TrainingStarted):
            self.world_size = event.world_size
            self._see(started=event.process_started, imported=event.imported, joined=at)
        elif isinstance(event, ev.RunOpened):
            self.run_id, self.world_size = event.run_id, event.world_size
            self.save_steps, self.memory_steps = event.save_steps, event.memory_steps
        elif isinstance(event, (ev.CheckpointSelected, ev.FreshStart)):
            self.choice = event
            self._see(selected=at)
        elif isinstance(event, ev.CandidateRefused):
            self.refused.append(RefusedCheckpoint(event.step, event.reason + (f" ({event.file})" if event.file else "")))
        elif isinstance(event, ev.ProgressRestored):
            self.progress = event
        elif isinstance(event, ev.Resumed):
            self.load_seconds = event.load_seconds
        elif isinstance(event, ev.WeightsLoaded):
            self._see(loading=None if event.seconds is None else at - event.seconds, loaded=at)
        elif isinstance(event, ev.NetworkCompiled):
            self._see(compiled=at)
        elif isinstance(event, ev.FirstStepDone):
            self._see(stepped=at)
        elif isinstance(event, ev.PreemptionRequested):
            self.is_preempted = True
        elif isinstance(event, ev.TrainingEnded):
            self._take_end(at, event)
        else:
            self._take_save(at, event)

    def _see(self, **moments: float | None) -> None:
        """Keeps the first of each moment of the start."""
        known = {name: at for name, at in moments.items() if at is not None and getattr(self.moments, name) is None}
        self.moments = replace(self.moments, **known)

    def _take_end(self, at: float, event: ev.TrainingEnded) -> None:
        self.end = event
        if event.outcome != NOTHING_TO_TRAIN and event.step is not None:
            self.reached = max(self.reached, event.step)
        if event.outcome == FAILED:
            self.fail(Failure(at, 0, event.reason))

    def _take_save(self, at: float, event: ev.Event) -> None:
        if isinstance(event, ev.SaveCommitted) and event.run_id not in (None, self.run_id):
            self.committed_for_others.append((event.run_id, event.step))
        elif isinstance(event, ev.SaveSkipped):
            self.skipped_saves += 1
            self.reached = max(self.reached, event.step)
        elif isinstance(event, ev.TierSaved):
            self.memory_saves.append(MemorySave(event.step, event.stall_seconds, event.background_seconds, event.size_bytes))
            self.reached = max(self.reached, event.step)
        elif isinstance(event, (ev.SaveBegun, ev.SaveStaged, ev.SaveWritten, ev.SaveCommitted, ev.SaveFailed, ev.SaveAbandoned)
                        ) and event.step is not None:
            self.saves[event.step] = _updated(self.saves.get(event.step, Save(event.step, at)), at, event)

    def fail(self, failure: Failure) -> None:
        """Keeps the failure of the rank that failed first; other ranks fail because that rank is lost."""
        if failure.step is not None:
            save = self.saves.get(failure.step)
            if save is not None and not save.is_committed and not save.failure:
                self.saves[failure.step] = replace(save, failure=f"rank {failure.rank}: {failure.reason}")
            return
        self.ended = max(self.ended, failure.time)
        if self.failure is None or failure.time < self.failure.time:
            self.failure = failure

    def take_death(self, noticed: Failure | None) -> None:
        """Takes what a supervisor noticed. A killed or hanging rank records nothing, and others fail later, because of it."""
        ended_well = self.is_over if self.end is None else self.end.outcome != FAILED
        if noticed is not None and (not ended_well if self.failure is None else noticed.time < self.failure.time):
            self.failure = noticed

    # ---- the result

    def build(self, number: int, next_start: float | None) -> RunAttempt:
        """Returns the attempt. ``next_start``: of the next attempt."""
        losses, choice = self.curve.build(), self.choice
        base, scale = self._base(losses)
        last = max(int(losses.steps[-1]) if len(losses) else 0, self.reached, *self.saves, 0)
        last_step = last if last > base else None
        selected = choice if isinstance(choice, ev.CheckpointSelected) else None
        is_inferred = choice is None and self.progress is None
        resumed = base or None if is_inferred else None
        if selected is not None and not selected.weights_only:
            resumed = base if selected.step is None else selected.step
        elif choice is None and self.progress is not None:          # the line of the selection is damaged
            resumed = self.progress.saved_step
        outcome, reason = self._outcome(next_start is None)
        return RunAttempt(
            number, self.started, self.ended if next_start is None else max(min(self.ended, next_start), self.started),
            outcome, reason, self.failure.rank if self.failure else None, self.has_events, self.is_cut, self.run_id,
            self.world_size, isinstance(choice, ev.FreshStart), resumed, is_inferred, selected.run_id if selected else None,
            _description(selected) if selected else "", base, scale, base + 1 if last_step is not None else None, last_step,
            self.load_seconds, tuple(self.saves[step] for step in sorted(self.saves)), self.skipped_saves, tuple(self.refused),
            not self.is_pipeline, losses, self.moments, selected.source if selected else "", tuple(self.memory_saves),
            self.save_steps, self.memory_steps)

    def _outcome(self, is_last: bool) -> tuple[str, str]:
        if self.failure is not None:
            return FAILED, self.failure.reason
        if self.end is not None:
            return self.end.outcome, self.end.reason
        if self.is_over:
            return PREEMPTED if self.is_preempted else FINISHED, ""
        return (UNKNOWN, "") if is_last else (FAILED, KILLED if self.has_events else "")

    def _base(self, losses: Losses) -> tuple[int, float]:
        """Returns the step after which this attempt counts, and its steps per step of the run that saved."""
        if self.progress is not None:
            return self.progress.step, self.progress.step_scale
        if isinstance(self.choice, ev.CheckpointSelected) and self.choice.step is not None and not self.choice.weights_only:
            return self.choice.step, 1.0
        if self.choice is not None or not len(losses):
            return 0, 1.0
        return max(int(losses.steps[0]) - losses.interval, 0), 1.0


def _updated(save: Save, at: float, event: ev.Event) -> Save:
    if isinstance(event, ev.SaveStaged):
        return replace(save, time=at, stall_seconds=event.stall_seconds, is_background=True)
    if isinstance(event, ev.SaveWritten):
        stall = save.stall_seconds if event.stall_seconds is None else event.stall_seconds
        return replace(save, time=save.time if save.is_background else at, stall_seconds=stall, write_seconds=event.write_seconds,
                       size_bytes=event.size_bytes, failure="")
    if isinstance(event, ev.SaveCommitted):
        return replace(save, is_committed=True, failure="")
    if isinstance(event, (ev.SaveFailed, ev.SaveAbandoned)):
        return replace(save, failure=event.reason)
    return save


def _description(selected: ev.CheckpointSelected) -> str:
    return f"weights only: {selected.description}" if selected.weights_only else selected.description
