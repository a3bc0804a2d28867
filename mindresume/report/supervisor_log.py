"""Reads from the event files of supervisors (``mindresume run``) when each start began, why it ended, when that was noticed, and
when what it had started was gone.

    starts = supervised_starts(events)                              # for ``runs.attempts_of``
    moments = supervisor_moments(events, attempts)                  # for ``recoveries.recoveries_of``
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mindresume.events import HangDetected, JobEnded, JobStarted, RankDied
from mindresume.events.log_lines import end_text
from mindresume.events.recovery_phases import Moments
from mindresume.report.event_log import EventLog, Failure, RecordedEvent
from mindresume.report.runs import RunAttempt, SupervisedStart

SUPERVISED = (JobStarted, RankDied, HangDetected, JobEnded)        # the events that are read


def of_first_node(logs: Sequence[EventLog]) -> list[EventLog]:
    """Returns the files of the supervisors of one node: those of the others tell the same."""
    return [log for log in logs if log.rank == min(other.rank for other in logs)]


def supervised_starts(events: Iterable[RecordedEvent]) -> list[SupervisedStart]:
    """Returns the starts of the command, in order. ``events``: of the supervisors of one node, in order of time."""
    found: list[SupervisedStart] = []
    for at, event in events:
        if isinstance(event, JobStarted):
            found.append(SupervisedStart(at))
        elif found and isinstance(event, (RankDied, HangDetected, JobEnded)):
            found[-1] = replace(found[-1], failure=_failure(found[-1].failure, at, event))
    return found


def _failure(before: Failure | None, at: float, event: RankDied | HangDetected | JobEnded) -> Failure | None:
    """Returns the failure of a start, after one more event. ``before``: as it was known until then; the first death counts."""
    if isinstance(event, RankDied):
        return before or Failure(at, event.rank, end_text(event.status))
    if isinstance(event, HangDetected):
        return before or Failure(at, next(iter(event.ranks), None), f"made no progress for {event.seconds:.0f} s "
                                                                    f"while {event.phase}")
    if not event.status:
        return None
    rank, noticed = before.rank if before else None, at - event.end_seconds
    return Failure(min(noticed, before.time) if before else noticed, rank, event.reason.removeprefix(f"rank {rank} "))


def supervisor_moments(events: Iterable[RecordedEvent], attempts: Sequence[RunAttempt]) -> dict[int, Moments]:
    """Returns the moments between two starts, by the number of the attempt that the later start began.

    Args:
        events: of the supervisors of one node, in order of time.
        attempts: in order of time. The attempt of a start is the first one that began after it and before the next start.
    """
    starts: list[tuple[float, Moments]] = []
    ended: tuple[float, float] | None = None                # noticed, and the last process was gone
    for at, event in events:
        if isinstance(event, JobEnded):
            ended = (at - event.end_seconds, at)
        elif isinstance(event, JobStarted):
            starts.append((at, Moments(noticed=ended and ended[0], ended=ended and ended[1], started=at)))
            ended = None
    found = {}
    for index, (at, moments) in enumerate(starts):
        until = starts[index + 1][0] if index + 1 < len(starts) else float("inf")
        attempt = next((row for row in attempts if at <= row.started < until), None)
        if attempt is not None:
            found[attempt.number] = moments
    return found
