"""Builds run attempts from event files and from the lines of mindformers' log. A *run attempt*
lasts from one start of the training to its end.

    event file of rank 0 ─▶ one attempt: run id, checkpoint, saves, outcome      event files of
    other ranks ─▶ why it failed event file of a supervisor ─▶ when the attempt was started, and why
    it ended, if no rank could say so before log ─▶ losses, assigned to attempts by time      a
    start in the log without an event file ─▶ an attempt with losses alone

Only this module infers what is not recorded; each field says from what.
"""

from __future__ import annotations

import functools
import heapq
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from mindresume import events as ev
from mindresume.events import FAILED, FINISHED, NOTHING_TO_TRAIN, PREEMPTED, Moments
from mindresume.report.log_reader import (
    LAST_CARD,
    LOSS,
    OVER,
    START,
    Failure,
    LogLine,
    RecordedEvent,
    SupervisedStart,
)
from mindresume.report.phrases import phrase

RUNNING, UNKNOWN = "running", "unknown"  # the other outcomes are those of TrainingEnded
NORMAL = (FINISHED, PREEMPTED, NOTHING_TO_TRAIN)  # nothing is lost after these
KILLED = phrase("reason.killed")
_NONE = functools.partial(np.empty, 0)
_MOMENTS: dict[type[ev.Event], str] = {  # the moment of a start that an event records
    ev.TrainingStarted: "joined",
    ev.CheckpointSelected: "selected",
    ev.FreshStart: "selected",
    ev.WeightsLoaded: "loaded",
    ev.NetworkCompiled: "compiled",
    ev.FirstStepDone: "stepped",
}
_SAVES = (
    ev.SaveBegun,
    ev.SaveStaged,
    ev.SaveWritten,
    ev.SaveCommitted,
    ev.SaveFailed,
    ev.SaveAbandoned,
)


@dataclass(frozen=True, eq=False)
class Losses:
    """Holds the losses of one attempt, in ascending order of steps. ``times``: when the line was
    written; ``seconds``: duration of the step. ``are_true``: False if the last rank has the true
    loss (pipeline stages)."""

    steps: np.ndarray = field(default_factory=_NONE)
    values: np.ndarray = field(default_factory=_NONE)
    times: np.ndarray = field(default_factory=_NONE)
    seconds: np.ndarray = field(default_factory=_NONE)
    are_true: bool = True

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def interval(self) -> int:
        """Steps between two lines: 1, unless the monitor prints less often, or a line is one
        sink."""
        return int(np.median(np.diff(self.steps))) if len(self) > 1 else 1

    @property
    def typical(self) -> float:
        """Seconds of an ordinary step: the median, because the first step includes the
        compilation."""
        return float(np.median(self.seconds)) if len(self) else 0.0

    @property
    def not_finite(self) -> int:
        """The number of losses that are nan or infinite."""
        return int(np.count_nonzero(~np.isfinite(self.values)))


@dataclass(frozen=True)
class Save:
    """Describes one save of one attempt. ``time``: when the training continued. ``stall_seconds``:
    how long the training thread waited. ``write_seconds``, ``size_bytes``: of rank 0, None: no
    record says that its part is durable. ``is_committed``: the files of all ranks are complete.
    ``failure``: why it was not saved or not committed."""

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
class RefusedCheckpoint:
    """Describes a checkpoint that an attempt refused."""

    step: int | None
    reason: str


@dataclass(frozen=True)
class Saves:
    """Holds the saves of one attempt, in order of steps. ``memory``: into the tier in memory, of
    rank 0. ``skipped``: number of skipped saves. ``disk_steps``, ``memory_steps``: the configured
    steps between two of them; None: not recorded, or not by steps."""

    disk: tuple[Save, ...] = ()
    memory: tuple[ev.TierSaved, ...] = ()
    skipped: int = 0
    disk_steps: int | None = None
    memory_steps: int | None = None


@dataclass(frozen=True)
class Origin:
    """Describes what an attempt began with.

    ``is_fresh``: there was no checkpoint. ``step``: of the checkpoint, in the count of the run that
    saved it; None: from the beginning. ``is_inferred``: it follows from the first loss. ``run_id``:
    the run that saved it. ``source``: where it lay, "disk" or "memory"; empty: nothing was
    selected. ``partner``: a node had lost its part, and got it from a partner node. ``checkpoint``:
    its description. ``base_step``: the step after which this attempt counts, which differs after a
    change of the batch size. ``step_scale``: steps of this attempt per step of the run that saved.
    ``refused``: the checkpoints that it did not take. ``moments``: of the start, as far as they
    were recorded.
    """

    is_fresh: bool = False
    step: int | None = None
    is_inferred: bool = False
    run_id: str | None = None
    source: str = ""
    partner: bool = False
    checkpoint: str = ""
    base_step: int = 0
    step_scale: float = 1.0
    load_seconds: float | None = None
    refused: tuple[RefusedCheckpoint, ...] = ()
    moments: Moments = Moments()


@dataclass(frozen=True)
class RunAttempt:
    """Describes one start of the training until its end.

    ``started``: of the command, if a supervisor recorded it, else of the first record. ``ended``:
    of the last record of its ranks; a killed process records no end. Both in seconds since 1970.
    ``outcome``: one of TrainingEnded, RUNNING or UNKNOWN; FAILED also if another start follows and
    no end was recorded. ``reason``: of the outcome. ``failed_rank``: the rank that failed first,
    None: unknown. ``has_events``: there is an event file; without one, ``run_id``, ``world_size``,
    ``saves`` and the reason of a failure are unknown. ``is_cut``: the log begins after the attempt
    began. ``first_step``, ``last_step``: steps done in this attempt; None: none. ``log_folders``:
    where a supervisor has moved its logs; empty: those of msrun are where it wrote them.
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
    last_step: int | None = None
    origin: Origin = Origin()
    saves: Saves = Saves()
    losses: Losses = field(default_factory=Losses)
    log_folders: tuple[str, ...] = ()

    @property
    def first_step(self) -> int | None:
        return None if self.last_step is None else self.origin.base_step + 1


def attempts_of(
    event_logs: Iterable[Iterable[RecordedEvent]],
    lines: Iterable[LogLine],
    failures: Iterable[Failure] = (),
    starts: Sequence[SupervisedStart] = (),
    last_steps: Mapping[str | None, int] = MappingProxyType({}),
) -> tuple[RunAttempt, ...]:
    """Returns the attempts in order of time. ``event_logs``: the event files of rank 0. ``lines``:
    the log of one rank. ``failures``: those of the other ranks. ``starts``: what supervisors
    recorded, in order of time. ``last_steps``: of the runs that have a step ledger."""
    attempts = _with_lines(
        [attempt for events in event_logs for attempt in _recorded(events)], lines
    )
    for index, attempt in enumerate(attempts):
        attempt.recorded = last_steps.get(attempt.run_id, 0)
        for run_id, step in attempt.committed_for_others:
            owner = next(
                (
                    other
                    for other in reversed(attempts[:index])
                    if other.run_id == run_id and step in other.saves
                ),
                None,
            )
            if owner is not None:
                owner.saves[step] = replace(owner.saves[step], is_committed=True, failure="")
    by_run = {attempt.run_id: attempt for attempt in attempts if attempt.run_id is not None}
    began = [attempt.started for attempt in attempts]
    for failure in failures:  # of its run; if the run is not recorded, of its time
        index = bisect_right(began, failure.time) - 1
        if failure.run_id in by_run:
            by_run[failure.run_id].fail(failure)
        elif index >= 0 and (failure.run_id is None or attempts[index].run_id is None):
            attempts[index].fail(failure)
    for start, until in zip(
        starts, [*(later.moments["started"] for later in starts[1:]), math.inf], strict=False
    ):
        if supervised := [
            attempt for attempt in attempts if start.moments["started"] <= attempt.started < until
        ]:
            supervised[0].started = start.moments["started"]
            supervised[0].moments = {**start.moments, **supervised[0].moments}
            supervised[-1].take_death(start.failure)
            for attempt in supervised:
                attempt.logs = start.logs
    ends = [*(attempt.started for attempt in attempts[1:]), None]
    return tuple(attempt.build(index + 1, ends[index]) for index, attempt in enumerate(attempts))


def with_losses(attempts: Sequence[RunAttempt], lines: Iterable[LogLine]) -> tuple[RunAttempt, ...]:
    """Returns the attempts with the loss of another rank, where only that rank has the true loss.
    Its lines are assigned to attempts by their time."""
    curves, starts = [array("d") for _ in attempts], [attempt.started for attempt in attempts]
    for line in lines:
        index = bisect_right(starts, line.time) - 1
        if line.kind == LOSS and index >= 0:
            curves[index].extend(_numbers(line))
    return tuple(
        attempt
        if attempt.losses.are_true or not curve
        else replace(attempt, losses=_losses_of(curve))
        for attempt, curve in zip(attempts, curves, strict=True)
    )


def with_outcome(attempt: RunAttempt, leases: Mapping[str, bool | None]) -> RunAttempt:
    """Returns the last attempt with the outcome that its lease shows, if no end was recorded.
    ``leases``: of the checkpoint folder, by run id: whether the process runs (None: it is on
    another machine)."""
    if attempt.outcome != UNKNOWN or attempt.run_id is None:
        return attempt
    if attempt.run_id not in leases:
        return replace(attempt, outcome=FAILED, reason=phrase("reason.lease_released"))
    outcomes = {True: (RUNNING, ""), False: (FAILED, KILLED), None: (UNKNOWN, "")}
    outcome, reason = outcomes[leases[attempt.run_id]]
    return replace(attempt, outcome=outcome, reason=reason)


def _recorded(events: Iterable[RecordedEvent]) -> list[_Attempt]:
    """Returns the attempt of each training in one event file: normally one."""
    attempts: list[_Attempt] = []
    for recorded in events:
        if not attempts or isinstance(recorded.event, ev.TrainingStarted) and attempts[-1].newest:
            attempts.append(_Attempt(recorded.time, has_events=True))
        attempts[-1].take(recorded)
    return attempts


def _with_lines(recorded: list[_Attempt], lines: Iterable[LogLine]) -> list[_Attempt]:
    """Adds the lines of the log to ``recorded``, and adds an attempt for each start without an
    event file."""
    attempts: list[_Attempt] = []
    for item in heapq.merge(sorted(recorded, key=_time_of), lines, key=_time_of):
        if isinstance(item, LogLine):
            if not attempts or item.kind == START and not attempts[-1].can_take_start():
                attempts.append(_Attempt(item.time, has_events=False, is_cut=item.kind != START))
            attempts[-1].take_line(item)
            continue
        if (
            attempts and attempts[-1].is_only_start
        ):  # mindformers logs its start shortly before the first event
            item.started = min(attempts.pop().started, item.started)
            item.logged.add(START)
        attempts.append(item)
    return attempts


def _time_of(item: _Attempt | LogLine) -> float:
    return item.time if isinstance(item, LogLine) else item.started


def _losses_of(numbers: array[float], are_true: bool = True) -> Losses:
    """Returns the losses of one attempt in ascending order of steps, without duplicates.
    ``numbers``: four of each line, as ``_numbers`` returns them."""
    if not numbers:
        return Losses()
    rows = np.frombuffer(numbers).reshape(-1, 4)
    is_next = np.diff(np.maximum.accumulate(rows[:, 0]), prepend=-1) > 0
    steps, values, times, seconds = rows[is_next].T
    return Losses(steps.astype(np.int64), values, times, seconds, are_true)


def _numbers(line: LogLine) -> tuple[float, ...]:
    return line.step, line.loss, line.time, line.step_seconds


class _Attempt:
    """Collects the records of one attempt. ``newest``: the newest event of each kind but Notice; a
    fresh start is a selection. ``moments``: the first time of each. ``logged``: the kinds of lines
    in the log of mindformers. ``recorded``: the last step in the step ledger; 0: not known, then
    the log and the saves tell. ``logs``: where its logs are. ``numbers``: of its losses, as for
    ``_losses_of``."""

    def __init__(self, started: float, has_events: bool, is_cut: bool = False):
        self.started = self.ended = started
        self.has_events, self.is_cut = has_events, is_cut
        self.newest: dict[type[ev.Event], Any] = {}
        self.moments: dict[str, float] = {}
        self.failure: Failure | None = None
        self.recorded = self.skipped_saves = 0
        self.saves: dict[int, Save] = {}
        self.memory_saves: list[ev.TierSaved] = []
        self.committed_for_others: list[tuple[str, int]] = []
        self.refused: list[RefusedCheckpoint] = []
        self.numbers, self.logged = array("d"), set[str]()
        self.logs: tuple[str, ...] = ()

    @property
    def run_id(self) -> str | None:
        return self.newest[ev.RunOpened].run_id if ev.RunOpened in self.newest else None

    # ---- the log

    @property
    def is_only_start(self) -> bool:
        """Whether only mindformers' start line is known."""
        return not (self.has_events or self.is_cut or OVER in self.logged or self.numbers)

    def can_take_start(self) -> bool:
        """Returns whether mindformers' start line can belong to this attempt, whose first event
        came before it."""
        return self.has_events and not (
            self.logged & {START, OVER} or self.numbers or ev.TrainingEnded in self.newest
        )

    def take_line(self, line: LogLine) -> None:
        """Takes a line of mindformers' log."""
        self.ended = max(self.ended, line.time)
        if line.kind == LOSS:
            self.numbers.extend(_numbers(line))
        else:
            self.logged.add(line.kind)

    # ---- events

    def take(self, recorded: RecordedEvent) -> None:
        """Takes an event."""
        at, event = recorded
        self.ended = max(self.ended, at)
        if isinstance(event, ev.Notice):
            return
        self.newest[ev.CheckpointSelected if isinstance(event, ev.FreshStart) else type(event)] = (
            event
        )
        moments = {_MOMENTS[type(event)]: at} if type(event) in _MOMENTS else {}
        if isinstance(event, ev.TrainingStarted):
            moments |= {"started": event.process_started, "imported": event.imported}
        elif isinstance(event, ev.WeightsLoaded) and event.seconds is not None:
            moments["loading"] = at - event.seconds
        elif isinstance(event, ev.CandidateRefused):
            self.refused.append(
                RefusedCheckpoint(
                    event.step, event.reason + (f" ({event.file})" if event.file else "")
                )
            )
        elif isinstance(event, ev.TrainingEnded):
            if event.outcome == FAILED:
                self.fail(Failure(at, 0, event.reason))
        elif isinstance(event, ev.SaveCommitted) and event.run_id not in (None, self.run_id):
            self.committed_for_others.append((event.run_id, event.step))
        elif isinstance(event, ev.SaveSkipped):
            self.skipped_saves += 1
        elif isinstance(event, ev.TierSaved):
            self.memory_saves.append(event)
        elif isinstance(event, _SAVES) and event.step is not None:
            self.saves[event.step] = _updated(
                self.saves.get(event.step, Save(event.step, at)), at, event
            )
        self.moments = {
            name: moment for name, moment in moments.items() if moment is not None
        } | self.moments

    def fail(self, failure: Failure) -> None:
        """Keeps the failure of the rank that failed first; other ranks fail because that rank is
        lost."""
        if failure.step is not None:
            save = self.saves.get(failure.step)
            if save is not None and not save.is_committed and not save.failure:
                self.saves[failure.step] = replace(
                    save, failure=f"rank {failure.rank}: {failure.reason}"
                )
            return
        self.ended = max(self.ended, failure.time)
        if self.failure is None or failure.time < self.failure.time:
            self.failure = failure

    def take_death(self, noticed: Failure | None) -> None:
        """Takes what a supervisor noticed. A killed or hanging rank records nothing, and others
        fail later, because of it."""
        end = self.newest.get(ev.TrainingEnded)
        ended_well = end.outcome != FAILED if end else OVER in self.logged
        if noticed is not None and (
            not ended_well if self.failure is None else noticed.time < self.failure.time
        ):
            self.failure = noticed

    # ---- the result

    def build(self, number: int, next_start: float | None) -> RunAttempt:
        """Returns the attempt. ``next_start``: of the next attempt."""
        losses = _losses_of(self.numbers, are_true=LAST_CARD not in self.logged)
        origin, opened = self._origin(losses), self.newest.get(ev.RunOpened)
        begun = opened or self.newest.get(ev.TrainingStarted)
        last = max(int(losses.steps[-1]) if len(losses) else 0, self.recorded, *self.saves)
        saves = Saves(
            tuple(self.saves[step] for step in sorted(self.saves)),
            tuple(self.memory_saves),
            self.skipped_saves,
            opened.save_steps if opened else None,
            opened.memory_steps if opened else None,
        )
        outcome, reason = self._outcome(next_start is None)
        return RunAttempt(
            number,
            self.started,
            self.ended if next_start is None else max(min(self.ended, next_start), self.started),
            outcome,
            reason,
            self.failure.rank if self.failure else None,
            self.has_events,
            self.is_cut,
            self.run_id,
            begun.world_size if begun else None,
            last if last > origin.base_step else None,
            origin,
            saves,
            losses,
            self.logs,
        )

    def _outcome(self, is_last: bool) -> tuple[str, str]:
        end = self.newest.get(ev.TrainingEnded)
        if self.failure is not None:
            return FAILED, self.failure.reason
        if end is not None:
            return end.outcome, end.reason
        if OVER in self.logged:
            return PREEMPTED if ev.PreemptionRequested in self.newest else FINISHED, ""
        return (UNKNOWN, "") if is_last else (FAILED, KILLED if self.has_events else "")

    def _origin(self, losses: Losses) -> Origin:
        choice = self.newest.get(ev.CheckpointSelected)
        progress, resumed = self.newest.get(ev.ProgressRestored), self.newest.get(ev.Resumed)
        is_fresh = isinstance(choice, ev.FreshStart)
        is_inferred = choice is None and progress is None
        step: int | None = None
        if is_inferred:
            step = max(int(losses.steps[0]) - losses.interval, 0) if len(losses) else 0
        elif choice is None:  # the line of the selection is damaged
            step = progress.saved_step
        elif not is_fresh and not choice.weights_only:
            step = choice.step
            if step is None:
                step = progress.step if progress else 0
        origin = Origin(
            is_fresh,
            step or None if is_inferred else step,
            is_inferred,
            base_step=progress.step if progress else step or 0,
            step_scale=progress.step_scale if progress else 1.0,
            load_seconds=resumed.load_seconds if resumed else None,
            refused=tuple(self.refused),
            moments=Moments(**self.moments),
        )
        if choice is None or is_fresh:
            return origin
        text = ("weights only: " if choice.weights_only else "") + choice.description
        fetched = self.newest.get(ev.PartnerFetched)
        return replace(
            origin,
            run_id=choice.run_id,
            source=choice.source,
            partner=fetched is not None and fetched.step == choice.step,
            checkpoint=text,
        )


def _updated(save: Save, at: float, event: Any) -> Save:
    if isinstance(event, ev.SaveStaged):
        return replace(save, time=at, stall_seconds=event.stall_seconds, is_background=True)
    if isinstance(event, ev.SaveWritten):
        stall = save.stall_seconds if event.stall_seconds is None else event.stall_seconds
        return replace(
            save,
            time=save.time if save.is_background else at,
            stall_seconds=stall,
            write_seconds=event.write_seconds,
            size_bytes=event.size_bytes,
            failure="",
        )
    if isinstance(event, ev.SaveCommitted):
        return replace(save, is_committed=True, failure="")
    return save if isinstance(event, ev.SaveBegun) else replace(save, failure=event.reason)
