"""Reads from the event files of supervisors (``mindresume run``) when a failure was noticed, and what it had started was gone.

    moments = supervisor_moments(read_events(log), attempts)        # for ``recoveries.recoveries_of``
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from mindresume.events import JobEnded, JobStarted
from mindresume.events.recovery_phases import Moments
from mindresume.report.event_log import EventLog, RecordedEvent
from mindresume.report.runs import RunAttempt


def of_first_node(logs: Sequence[EventLog]) -> list[EventLog]:
    """Returns the files of the supervisors of one node: those of the others tell the same."""
    return [log for log in logs if log.rank == min(other.rank for other in logs)]


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
