"""Computes how the steps and the seconds of a training were used, and its goodput. It only computes
with run attempts.

    time      |startup|-----productive-----|~~lost~~|shutdown|  downtime
    |startup|----productive----|shutdown| attempt 1  ^ trainer is created        ^ checkpoint from
    which attempt 2 resumes  ^ attempt 2

A step is *lost* if a later attempt resumed from a checkpoint before it, so that the present
training does not contain it. *Goodput* is the productive share of all seconds between the first
start and the last end.

A *recovery* is what passed between the end of an attempt that failed and the first new step, in
phases (``events.supervision``). After these come the *redone* steps: those that the failed
attempt had done after the checkpoint, until the training is where it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from mindresume.events import Phase, phases_of
from mindresume.report.runs import NORMAL, RunAttempt


@dataclass(frozen=True)
class Seconds:
    """Splits the time between the first start and the last end, in seconds.

    ``productive``: steps that the training contains, and the gaps between them. ``lost``: the same
    for lost steps. ``saving``: the training thread waited for a save. ``startup``: from the start
    of the command by a supervisor, or without one from the creation of the trainer, to the first
    step, compilation included. ``shutdown``: after the last step. ``downtime``: between a failure
    and the next start. ``idle``: between a normal end and the next start. ``unknown``: attempts
    that did steps, but whose log is missing.
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
        return (
            (trained, math.inf) if is_another else (None, 0.0)
        )  # what starts after a normal end is another training
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
    reached, base = attempt.last_step or 0, attempt.origin.base_step
    done, lost = max(reached - base, 0), int(max(reached - max(limit, base), 0))
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
    stalls = [
        (
            "lost"
            if kept < save.time <= last
            else "productive"
            if begin < save.time <= kept
            else "shutdown",
            save.stall_seconds,
        )
        for save in attempt.saves.disk
    ]
    stalls += [
        ("lost" if save.step > limit else "productive", save.stall_seconds)
        for save in attempt.saves.memory
    ]
    saving = 0.0
    for kind, stall in stalls:
        kind = "unknown" if "unknown" in seconds else kind
        stalled = min(max(stall, 0.0), seconds[kind])
        seconds[kind] -= stalled
        saving += stalled
    return AttemptAccount(
        attempt,
        min(limit, reached),
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
        restart_seconds: from ``died`` to ``first_step``.
        steps_redone: steps of the failed attempt that were done again.
        seconds_redone: time that the failed attempt had spent on them.
        phases: in order, without gaps.
    """

    failed: int
    resumed: int
    source: str
    died: float
    first_step: float
    restart_seconds: float
    steps_redone: int
    seconds_redone: float
    phases: tuple[Phase, ...]


def recoveries_of(accounts: Sequence[AttemptAccount]) -> tuple[Recovery, ...]:
    """Returns the recoveries, in order of time."""
    recoveries = []
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
        origin, losses = accounts[until].attempt.origin, accounts[until].attempt.losses
        first = accounts[index + 1].attempt.origin.moments  # of the start after the failure itself
        moments = replace(origin.moments, noticed=first.noticed, ended=first.ended)
        died, end = row.attempt.ended, moments.stepped
        if end is None and len(losses):
            end = float(losses.times[0])
        if end is not None and end >= died:
            recoveries.append(
                Recovery(
                    row.attempt.number,
                    accounts[until].attempt.number,
                    origin.source,
                    died,
                    end,
                    end - died,
                    row.steps_lost,
                    row.seconds.lost,
                    phases_of(died, moments, end),
                )
            )
    return tuple(recoveries)


def totals_of(recoveries: Sequence[Recovery]) -> dict[str, float]:
    """Returns {phases, joined with " + ": seconds} over all recoveries, and the redone steps."""
    totals: dict[str, float] = {}
    for recovery in recoveries:
        for phase in recovery.phases:
            totals[phase.name] = totals.get(phase.name, 0.0) + phase.seconds
    redone = sum(recovery.seconds_redone for recovery in recoveries)
    return {**totals, REDONE: redone} if redone else totals
