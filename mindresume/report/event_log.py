"""Finds and reads the event files of a training (``mindresume.events.event_file``):

    {output}/mindresume_events/20261123T052200.250-rank_0-4711.jsonl      one for each start of the
    training {output}/mindresume_events/20261123T060102.125-rank_3-4714.jsonl      one for each
    failed rank {output}/mindresume_events/20261123T052100.000-supervisor_0-4700.jsonl      one for
    each supervisor of a node

The content of a file is not trusted. A line is skipped if it is torn, too long, no JSON, of a later
version, or has numbers out of range. Memory per line and per file is bounded.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from mindresume.events.event_file import FOLDER, LEDGER, LIMIT, SUFFIX, with_short_texts
from mindresume.report.log_parser import pieces_of
from mindresume.resume.step_ledger import ledger_of
from mindresume.storage.posix import PosixStorage
from mindresume.typed import is_number, parse_json

LINE_LIMIT = 1 << 18  # bytes; longer lines are skipped
FILE_LIMIT = 4 * LIMIT  # bytes of one file; mindresume writes at most half of it
MAX_VALUES = 1 << 15  # JSON values of one line
LATEST = 4e11  # seconds since 1970, the year 14645: later times cannot be formatted
LOOKED_FOR = f"{FOLDER}/*{SUFFIX}"
_NAME = re.compile(r"\d{8}T\d{6}(?:\.\d{3})?-(rank|supervisor)_(\d{1,9})-\d{1,18}\.jsonl")
_BEGIN = b'{"time": '


@dataclass(frozen=True)
class EventLog:
    """Describes one event file. ``rank``: from its name; of a supervisor, the number of its
    node."""

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


def find_event_logs(folders: Iterable[str], writer: str = "rank") -> tuple[EventLog, ...]:
    """Returns the event files in each of ``folders`` (output folders, or folders of event files),
    in order of their start. ``writer``: "rank" or "supervisor"."""
    logs: dict[str, EventLog] = {}
    for path in _files(folders, SUFFIX):
        match = _NAME.fullmatch(os.path.basename(path))
        if match and match[1] == writer:
            logs.setdefault(os.path.realpath(path), EventLog(path, int(match[2])))
    return tuple(sorted(logs.values(), key=lambda log: (os.path.basename(log.path), log.path)))


def last_steps(folders: Iterable[str]) -> dict[str | None, int]:
    """Returns {run: the last step that it did}, by the step ledgers in ``folders``."""
    ledgers = (ledger_of(PosixStorage(), path) for path in _files(folders, LEDGER))
    return {found.run.run_id: max(found.rows) for found in ledgers if found and found.rows}


def _files(folders: Iterable[str], suffix: str) -> Iterator[str]:
    for folder in folders:
        for place in (folder, os.path.join(folder, FOLDER)):
            for name in glob.iglob(f"*{suffix}", root_dir=place):
                yield os.path.join(place, name)


def find_supervisor_logs(folders: Iterable[str]) -> list[EventLog]:
    """Returns the event files of the supervisors of one node: those of the others tell the same."""
    logs = find_event_logs(folders, "supervisor")
    return [log for log in logs if log.rank == min(other.rank for other in logs)]


def read_events(log: EventLog) -> Iterator[RecordedEvent]:
    """Yields the events of a file in order. A file that cannot be read has no events."""
    try:
        with PosixStorage().open(log.path) as file:
            is_inside = False  # within a line that is too long
            for piece in pieces_of(file, LINE_LIMIT, FILE_LIMIT):
                is_whole = piece.endswith(b"\n")
                recorded = (
                    parse_event(piece.strip(b"\0\r\n")) if is_whole and not is_inside else None
                )
                if recorded is not None:
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
    if (
        not isinstance(value, dict)
        or not is_number(at := value.get("time"))
        or not 0 <= at <= LATEST
    ):
        return None
    event = event_from_json(with_short_texts(value))
    return None if event is None else RecordedEvent(float(at), event)


@dataclass(frozen=True)
class SupervisedStart:
    """Describes one start of the command by a supervisor. ``moments``: when it began, and when the
    end of the start before it was noticed and complete. ``failure``: what the supervisor noticed
    first; None: nothing."""

    moments: dict[str, float]
    failure: Failure | None = None


def supervised_starts(events: Iterable[RecordedEvent]) -> list[SupervisedStart]:
    """Returns the starts of the command, in order. ``events``: of the supervisors of one node, in
    order of time."""
    starts: list[SupervisedStart] = []
    ended: dict[str, float] = {}
    for at, event in events:
        if isinstance(event, JobStarted):
            starts.append(SupervisedStart({**ended, "started": at}))
            ended = {}
        elif isinstance(event, JobEnded):
            ended = {"noticed": at - event.end_seconds, "ended": at}
        if starts and isinstance(event, (RankDied, HangDetected, JobEnded)):
            starts[-1] = replace(starts[-1], failure=_failure(starts[-1].failure, at, event))
    return starts


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
    failures: list[Failure] = []
    for log in logs:
        run_id: str | None = None
        for at, event in read_events(log) if log.rank else ():
            if isinstance(event, RunOpened):
                run_id = event.run_id
            elif isinstance(event, SaveFailed) and event.step is not None:
                failures.append(Failure(at, log.rank, event.reason, event.step, run_id))
            elif isinstance(event, TrainingEnded) and event.outcome == FAILED:
                failures.append(Failure(at, log.rank, event.reason, None, run_id))
    return sorted(failures, key=lambda failure: failure.time)


def foreign_utc_offsets(logs: Iterable[EventLog]) -> list[int]:
    """Returns the UTC offsets of the local times in which mindformers logged, in seconds east of
    UTC: normally one. Empty: those of this machine."""
    offsets, is_own = set(), True
    for log in logs:
        for at, event in read_events(log) if not log.rank else ():
            if isinstance(
                event, TrainingStarted
            ):  # the others of this process have the same offset
                if event.utc_offset_seconds is not None:
                    offsets.add(event.utc_offset_seconds)
                    is_own = is_own and event.utc_offset_seconds == runtime.localtime(at).tm_gmtoff
                break
    return [] if is_own else sorted(offsets)
