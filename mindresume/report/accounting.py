"""Computes how the steps and the seconds of a training were used, and its goodput. It only computes
with run attempts.

    time      |startup|-----productive-----|~~lost~~|shutdown|  downtime
              |startup|----productive----|shutdown|
    attempt 1  ^ trainer is created        ^ checkpoint from which attempt 2 resumes  ^ attempt 2

A step is *lost* if a later attempt resumed from a checkpoint before it, so that the present
training does not contain it. *Goodput* is the productive share of all seconds between the first
start and the last end.

A *recovery* is what passed between the end of an attempt that failed and the first new step, in
phases (``events.recovery_phases``). After these come the *redone* steps: those that the failed
attempt had done after the checkpoint, until the training is where it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from mindresume.events import JobEnded, JobStarted
from mindresume.events.recovery_phases import Moments, Phase, phases_of
from mindresume.report.event_log import RecordedEvent
from mindresume.report.runs import NORMAL, RunAttempt


@dataclass(frozen=True)
class Seconds:
    """Splits the time between the first start and the last end, in seconds.

    ``productive``: steps that the training contains, and the gaps between them. ``lost``: the same
        for lost steps. ``saving``:
    the training thread waited for a save. ``startup``: from the start of the command by a
    supervisor, or without one from the creation of the trainer, to the first step, compilation
    included. ``shutdown``: after the last step.
    ``downtime``: between a failure and the next start. ``idle``: between a normal end and the next
    start. ``unknown``: attempts that did steps, but whose log is missing.
    """

    productive: float = 0.0
    lost: float = 0.0
    saving: float = 0.0
    startup: float = 0.0
    shutdown: float = 0.0
    downtime: float = 0.0
    idle: float = 0.0
    unknown: float = 0.0

    @property
    def total(self) -> float:
        """All seconds."""
        return math.fsum(getattr(self, item.name) for item in fields(self))

    @property
    def goodput(self) -> float | None:
        """The productive share, 0 to 1. None: no time passed, or the use of some of it is
        unknown."""
        return self.productive / self.total if self.total and not self.unknown else None

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            *(getattr(self, item.name) + getattr(other, item.name) for item in fields(self))
        )


@dataclass(frozen=True)
class Span:
    """Describes a part of the timeline. ``kind``: a field of Seconds other than ``saving``.
    ``begin``, ``end``: seconds since 1970."""

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class AttemptAccount:
    """Holds the account of one attempt. ``kept``: its last step that the training contains; later
    ones are lost. ``seconds``, ``timeline``: of the attempt, and of the time from its end to the
    next start."""

    attempt: RunAttempt
    kept: float
    steps: int
    steps_lost: int
    seconds: Seconds
    timeline: tuple[Span, ...]

    @property
    def kept_losses(self) -> int:
        """The number of its losses, from the first one, that the training contains."""
        return int(np.searchsorted(self.attempt.losses.steps, self.kept, side="right"))


def accounts_of(attempts: Sequence[RunAttempt]) -> tuple[AttemptAccount, ...]:
    """Returns one account for each attempt, in their order."""
    starts = [*(attempt.started for attempt in attempts[1:]), None]
    return tuple(
        _account(attempt, limit, next_start)
        for attempt, limit, next_start in zip(attempts, _limits(attempts), starts, strict=False)
    )


def _limits(attempts: Sequence[RunAttempt]) -> list[float]:
    """Returns for each attempt the last of its steps that the present training contains: infinity
    if all, 0 if none.

    It follows the attempts backwards: from the last one to the one that saved the checkpoint from
    which it resumed, and so on. All steps of the attempts between them are lost.
    """
    limits, limit = [0.0] * len(attempts), math.inf
    last = len(attempts) - 1
    will_step = bool(attempts) and (
        attempts[-1].origin.is_fresh or attempts[-1].origin.step is not None
    )
    index = next(
        (
            index
            for index in range(last, -1, -1)
            if attempts[index].first_step is not None or index == last and will_step
        ),
        None,
    )
    while index is not None:
        limits[index] = limit
        index, limit = _parent(attempts, index)
    return limits


def _parent(attempts: Sequence[RunAttempt], index: int) -> tuple[int | None, float]:
    """Returns the attempt from which another one resumed, and the step in the count of that
    attempt; None if neither run nor step identify it."""
    origin, before = attempts[index].origin, range(index - 1, -1, -1)
    if origin.step is None:
        trained = next((other for other in before if attempts[other].first_step is not None), None)
        is_another = trained is not None and attempts[trained].outcome in NORMAL
        # what starts after a normal end is another training
        return (trained, math.inf) if is_another else (None, 0.0)
    for other in before:
        if origin.run_id is not None and attempts[other].run_id == origin.run_id:
            return other, origin.step
    for other in before:
        candidate = attempts[other]
        is_possible = candidate.run_id is None or origin.run_id is None
        if (
            is_possible
            and candidate.first_step is not None
            and candidate.origin.base_step < origin.step <= candidate.last_step
        ):
            return other, origin.step
    return None, 0.0


def _account(attempt: RunAttempt, limit: float, next_start: float | None) -> AttemptAccount:
    """Returns the account of one attempt. ``limit``: as of ``_limits``; ``next_start``: of the next
    attempt."""
    done = 0 if attempt.last_step is None else max(attempt.last_step - attempt.origin.base_step, 0)
    lost = (
        0
        if attempt.last_step is None
        else int(max(attempt.last_step - max(limit, attempt.origin.base_step), 0))
    )
    begin, kept, last = _edges(attempt, limit)
    spans = [
        Span("startup", attempt.started, begin),
        Span("productive", begin, kept),
        Span("lost", kept, last),
        Span("shutdown", last, attempt.ended),
    ]
    if attempt.last_step is not None and not len(attempt.losses):
        spans = [Span("unknown", attempt.started, attempt.ended)]
    if next_start is not None:
        spans.append(
            Span(
                "idle" if attempt.outcome in NORMAL else "downtime",
                attempt.ended,
                max(next_start, attempt.ended),
            )
        )
    seconds = {span.kind: max(span.end - span.begin, 0.0) for span in spans}
    saving = 0.0
    for save in attempt.saves.disk:
        kind = (
            "unknown"
            if "unknown" in seconds
            else "lost"
            if kept < save.time <= last
            else ("productive" if begin < save.time <= kept else "shutdown")
        )
        stalled = min(max(save.stall_seconds, 0.0), seconds[kind])
        seconds[kind] -= stalled
        saving += stalled
    for save in attempt.saves.memory:
        kind = "unknown" if "unknown" in seconds else "lost" if save.step > limit else "productive"
        stalled = min(max(save.stall_seconds, 0.0), seconds[kind])
        seconds[kind] -= stalled
        saving += stalled
    return AttemptAccount(
        attempt,
        min(limit, attempt.last_step or 0),
        done,
        lost,
        Seconds(**seconds, saving=saving),
        tuple(span for span in spans if span.end > span.begin),
    )


def _edges(attempt: RunAttempt, limit: float) -> tuple[float, float, float]:
    """Returns when the first step began, and when the last kept step and the last step ended. The
    first step is taken to be as long as an ordinary one; the rest of its time is compilation."""
    losses = attempt.losses
    if not len(losses):
        return attempt.ended, attempt.ended, attempt.ended
    last = max(min(float(losses.times[-1]), attempt.ended), attempt.started)
    count = min(max(int(losses.steps[0]) - attempt.origin.base_step, 1), losses.interval)
    begin = min(max(float(losses.times[0]) - count * losses.typical, attempt.started), last)
    if attempt.is_cut:
        begin = attempt.started
    counting = int(np.searchsorted(losses.steps, limit, side="right"))
    kept = begin if not counting else max(begin, min(float(losses.times[counting - 1]), last))
    return begin, kept, last


def total_of(accounts: Sequence[AttemptAccount]) -> Seconds:
    """Returns the seconds of all attempts."""
    return sum((account.seconds for account in accounts), Seconds())


def steps_at_risk(accounts: Sequence[AttemptAccount], newest: int | None) -> int | None:
    """Returns how many steps the next start would repeat, because they follow the newest checkpoint
    (``newest``: its step); None if the last attempt ended normally."""
    if not accounts or accounts[-1].attempt.outcome in NORMAL:
        return None
    reached = next(
        (
            account.attempt.last_step
            for account in reversed(accounts)
            if account.attempt.last_step is not None
        ),
        0,
    )
    return max(reached - (newest or 0), 0)


REDONE = "redone"


@dataclass(frozen=True)
class Recovery:
    """Describes one recovery.

    Attributes:
        failed: number of the attempt that failed.
        resumed: number of the attempt that did the first new step; attempts between them failed
            before theirs.
        source: where its checkpoint lay, "disk" or "memory"; empty: not known, or it began without
            one.
        died: the last record of the failed attempt, in seconds since 1970.
        first_step: when the first new step was done, as far as is known; ``phases`` end there.
        phases: in order, without gaps.
        steps_redone: steps of the failed attempt that were done again.
        seconds_redone: time that the failed attempt had spent on them.
    """

    failed: int
    resumed: int
    source: str
    died: float
    first_step: float
    phases: tuple[Phase, ...]
    steps_redone: int
    seconds_redone: float

    @property
    def restart_seconds(self) -> float:
        """From the end of the failed attempt to the end of the first new step."""
        return self.first_step - self.died


def recoveries_of(
    accounts: Sequence[AttemptAccount], moments: Mapping[int, Moments] | None = None
) -> tuple[Recovery, ...]:
    """Returns the recoveries, in order of time. ``moments``: those of a supervisor, by the number
    of the attempt that it started; they count where the attempt itself recorded none."""
    found = []
    for index, row in enumerate(accounts):
        if row.attempt.last_step is None or row.attempt.outcome in NORMAL:
            continue
        until = next(
            (
                other
                for other in range(index + 1, len(accounts))
                if accounts[other].attempt.last_step is not None
            ),
            None,
        )
        if until is None or any(
            other.attempt.outcome in NORMAL for other in accounts[index + 1 : until]
        ):
            continue
        later = accounts[until]
        known = _joined(later.attempt.origin.moments, (moments or {}).get(later.attempt.number))
        # the start after the failure itself
        first = (moments or {}).get(accounts[index + 1].attempt.number, Moments())
        known = replace(known, noticed=first.noticed, ended=first.ended)
        died, end = row.attempt.ended, _first_step(later, known)
        if end is not None and end >= died:
            found.append(
                Recovery(
                    row.attempt.number,
                    later.attempt.number,
                    later.attempt.origin.source,
                    died,
                    end,
                    phases_of(died, known, end),
                    row.steps_lost,
                    row.seconds.lost,
                )
            )
    return tuple(found)


def supervisor_moments(
    events: Iterable[RecordedEvent], attempts: Sequence[RunAttempt]
) -> dict[int, Moments]:
    """Returns the moments between two starts, by the number of the attempt that the later start
    began.

    Args:
        events: of the supervisors of one node, in order of time.
        attempts: in order of time. The attempt of a start is the first one that began after it and
            before the next start.
    """
    starts: list[tuple[float, Moments]] = []
    ended: tuple[float, float] | None = None  # noticed, and the last process was gone
    for at, event in events:
        if isinstance(event, JobEnded):
            ended = (at - event.end_seconds, at)
        elif isinstance(event, JobStarted):
            starts.append(
                (at, Moments(noticed=ended and ended[0], ended=ended and ended[1], started=at))
            )
            ended = None
    found = {}
    for index, (at, moments) in enumerate(starts):
        until = starts[index + 1][0] if index + 1 < len(starts) else float("inf")
        attempt = next((row for row in attempts if at <= row.started < until), None)
        if attempt is not None:
            found[attempt.number] = moments
    return found


def totals_of(recoveries: Sequence[Recovery]) -> dict[str, float]:
    """Returns {phases, joined with " + ": seconds} over all recoveries, and the redone steps."""
    found: dict[str, float] = {}
    for recovery in recoveries:
        for phase in recovery.phases:
            found[phase.name] = found.get(phase.name, 0.0) + phase.seconds
    redone = sum(recovery.seconds_redone for recovery in recoveries)
    return {**found, **({REDONE: redone} if redone else {})}


def _joined(own: Moments, other: Moments | None) -> Moments:
    if other is None:
        return own
    return Moments(
        **{
            field.name: getattr(other, field.name)
            if getattr(own, field.name) is None
            else getattr(own, field.name)
            for field in fields(Moments)
        }
    )


def _first_step(row: AttemptAccount, moments: Moments) -> float | None:
    """Returns when the first step of an attempt was done: as recorded, else by the log; None if
    neither tells."""
    if moments.stepped is not None:
        return moments.stepped
    losses = row.attempt.losses
    return float(losses.times[0]) if len(losses) else None
