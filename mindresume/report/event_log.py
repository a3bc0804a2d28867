"""Finds and reads the event files of a training (``mindresume.events.event_file``):

    {output}/mindresume_events/20261123T052200.250-rank_0-4711.jsonl      one for each start of the
                                                                          training
    {output}/mindresume_events/20261123T060102.125-rank_3-4714.jsonl      one for each failed rank
    {output}/mindresume_events/20261123T052100.000-supervisor_0-4700.jsonl      one for each
                                                                                supervisor of a node

The content of a file is not trusted. A line is skipped if it is torn, too long, no JSON, of a later
version, or has numbers out of range. Memory per line and per file is bounded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from mindresume import runtime
from mindresume.events import (
    FAILED,
    Event,
    HangDetected,
    JobEnded,
    JobStarted,
    RankDied,
    RunOpened,
    SaveFailed,
    TrainingEnded,
    TrainingStarted,
    end_text,
    event_from_json,
)
from mindresume.events.event_file import FOLDER, LIMIT, TEXT_LIMIT
from mindresume.report.log_parser import pieces_of
from mindresume.storage.posix import PosixStorage
from mindresume.typed import parse_json

LINE_LIMIT = 1 << 18  # bytes; longer lines are skipped
FILE_LIMIT = 4 * LIMIT  # bytes of one file; mindresume writes at most half of it
MAX_VALUES = 1 << 15  # JSON values of one line
# seconds since 1970, the year 14645: later times cannot be formatted
LATEST = 4e11
COUNTABLE = 1 << 60  # steps and bytes; larger numbers overflow in numpy
LOOKED_FOR = f"{FOLDER}/*.jsonl"
_NAME = re.compile(r"\d{8}T\d{6}(?:\.\d{3})?-rank_(\d{1,9})-\d{1,18}\.jsonl")
_SUPERVISOR = re.compile(_NAME.pattern.replace("rank_", "supervisor_"))
_BEGIN = b'{"time": '
# the events of a supervisor that are read
SUPERVISED = (JobStarted, RankDied, HangDetected, JobEnded)


@dataclass(frozen=True)
class EventLog:
    """Describes one event file. ``rank``: from its name."""

    path: str
    rank: int


class RecordedEvent(NamedTuple):
    """Holds an event and its time, in seconds since 1970 by the clock of the host that wrote it."""

    time: float
    event: Event


class Failure(NamedTuple):
    """Describes the failure that one rank, or a supervisor, recorded. ``rank``: None: not known.
    ``step`` None: the training ended with it; else a save of that step failed. ``run_id``: None if
    the rank recorded no run."""

    time: float
    rank: int | None
    reason: str
    step: int | None = None
    run_id: str | None = None


def find_event_logs(folders: Iterable[str]) -> tuple[EventLog, ...]:
    """Returns the event files in each of ``folders`` (output folders, or folders of event files),
    in order of their start."""
    return _found(folders, _NAME)


def find_supervisor_logs(folders: Iterable[str]) -> tuple[EventLog, ...]:
    """Returns the event files of supervisors in each of ``folders``, in order of their start; their
    ``rank`` is the number of the node."""
    return _found(folders, _SUPERVISOR)


def _found(folders: Iterable[str], pattern: re.Pattern[str]) -> tuple[EventLog, ...]:
    found: dict[str, EventLog] = {}
    for folder in folders:
        for place in (folder, os.path.join(folder, FOLDER)):
            for name in _names(place):
                if match := pattern.fullmatch(name):
                    path = os.path.join(place, name)
                    found.setdefault(os.path.realpath(path), EventLog(path, int(match[1])))
    return tuple(sorted(found.values(), key=lambda log: (os.path.basename(log.path), log.path)))


def read_events(log: EventLog, kinds: tuple[type[Event], ...] = ()) -> Iterator[RecordedEvent]:
    """Yields the events of a file in order. ``kinds``: only these (empty: all). A file that cannot
    be read has no events."""
    marks = [f'"{kind.kind}"'.encode() for kind in kinds]
    try:
        with PosixStorage().open(log.path) as file:
            is_inside = False  # within a line that is too long
            for piece in pieces_of(file, LINE_LIMIT, FILE_LIMIT):
                is_whole = piece.endswith(b"\n")
                if (
                    is_whole
                    and not is_inside
                    and (not marks or any(mark in piece for mark in marks))
                ):
                    recorded = parse_event(piece.strip(b"\0\r\n"))
                    if recorded is not None and (not kinds or isinstance(recorded.event, kinds)):
                        yield recorded
                is_inside = not is_whole
    except OSError:
        return


def is_thinned(log: EventLog) -> bool:
    """Returns whether a file is so full that only a part of the events that occur often was
    recorded."""
    try:
        return os.path.getsize(log.path) > LIMIT // 2
    except OSError:
        return False


def parse_event(line: bytes) -> RecordedEvent | None:
    """Returns the event of a line; None if this version understands none. If a whole line follows a
    torn one on the same line, the whole one is returned."""
    recorded = _parse(line)
    begin = line.rfind(_BEGIN)
    return _parse(line[begin:]) if recorded is None and begin > 0 else recorded


def _parse(line: bytes) -> RecordedEvent | None:
    try:
        value = parse_json(line, MAX_VALUES)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    at, event = value.get("time"), event_from_json(value)
    if (
        event is None
        or isinstance(at, bool)
        or not isinstance(at, (int, float))
        or not 0 <= at <= LATEST
    ):
        return None
    return (
        RecordedEvent(float(at), _shortened(event))
        if all(map(_is_countable, vars(event).items()))
        else None
    )


def _is_countable(item: tuple[str, Any]) -> bool:
    """Returns whether the numbers of a field are within range."""
    name, value = item
    if isinstance(value, tuple):
        return all(_is_countable((name, inner)) for inner in value)
    if name == "utc_offset_seconds":
        return value is None or abs(value) <= 86400
    least = -COUNTABLE if name == "status" else 0  # a signal that killed a process
    return not isinstance(value, (int, float)) or least <= value < COUNTABLE


def _shortened(event: Event) -> Event:
    """Returns the event with texts no longer than mindresume writes them."""
    long = {
        field.name: text[:TEXT_LIMIT]
        for field in fields(event)
        if isinstance(text := getattr(event, field.name), str) and len(text) > TEXT_LIMIT
    }
    return replace(event, **long) if long else event


@dataclass(frozen=True)
class SupervisedStart:
    """Describes one start of the command by a supervisor. ``began``: in seconds since 1970.
    ``failure``: what the supervisor noticed first; None: nothing."""

    began: float
    failure: Failure | None = None


def of_first_node(logs: Sequence[EventLog]) -> list[EventLog]:
    """Returns the files of the supervisors of one node: those of the others tell the same."""
    return [log for log in logs if log.rank == min(other.rank for other in logs)]


def supervised_starts(events: Iterable[RecordedEvent]) -> list[SupervisedStart]:
    """Returns the starts of the command, in order. ``events``: of the supervisors of one node, in
    order of time."""
    found: list[SupervisedStart] = []
    for at, event in events:
        if isinstance(event, JobStarted):
            found.append(SupervisedStart(at))
        elif found and isinstance(event, (RankDied, HangDetected, JobEnded)):
            found[-1] = replace(found[-1], failure=_failure(found[-1].failure, at, event))
    return found


def _failure(
    before: Failure | None, at: float, event: RankDied | HangDetected | JobEnded
) -> Failure | None:
    """Returns the failure of a start, after one more event. ``before``: as it was known until then;
    the first death counts."""
    if isinstance(event, RankDied):
        return before or Failure(at, event.rank, end_text(event.status))
    if isinstance(event, HangDetected):
        return before or Failure(
            at,
            next(iter(event.ranks), None),
            f"made no progress for {event.seconds:.0f} s while {event.phase}",
        )
    if not event.status:
        return None
    rank, noticed = before.rank if before else None, at - event.end_seconds
    return Failure(
        min(noticed, before.time) if before else noticed,
        rank,
        event.reason.removeprefix(f"rank {rank} "),
    )


def failures_in(logs: Iterable[EventLog]) -> list[Failure]:
    """Returns all failures that ranks other than 0 recorded, in order of time."""
    found: list[Failure] = []
    for log in logs:
        run_id: str | None = None
        for at, event in (
            read_events(log, (RunOpened, SaveFailed, TrainingEnded)) if log.rank else ()
        ):
            if isinstance(event, RunOpened):
                run_id = event.run_id
            elif isinstance(event, SaveFailed):
                if event.step is not None:
                    found.append(Failure(at, log.rank, event.reason, event.step, run_id))
            elif isinstance(event, TrainingEnded) and event.outcome == FAILED:
                found.append(Failure(at, log.rank, event.reason, None, run_id))
    return sorted(found, key=lambda failure: failure.time)


def foreign_utc_offsets(logs: Iterable[EventLog]) -> list[int]:
    """Returns the UTC offsets of the local times in which mindformers logged, in seconds east of
    UTC: normally one. Empty: those of this machine."""
    offsets, is_own = set(), True
    for log in logs:
        for at, event in read_events(log, (TrainingStarted,)) if not log.rank else ():
            if isinstance(event, TrainingStarted) and event.utc_offset_seconds is not None:
                offsets.add(event.utc_offset_seconds)
                is_own = is_own and event.utc_offset_seconds == runtime.localtime(at).tm_gmtoff
    return [] if is_own else sorted(offsets)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
