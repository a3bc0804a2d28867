"""Finds and reads what a training wrote on itself: the logs of mindformers, with the loss of each
step, the start and the end of a training; and the event files (``mindresume.events.event_file``),
which record what mindresume does.

    output/log[_SUFFIX]/rank_0/info.log.2, info.log.1, info.log      all starts, one after the other
    output/msrun_log[_SUFFIX]/worker_0.log                           output of the last start
    output/mindresume_events/...

    20261123T052200.250-rank_0-4711.jsonl         one for each start of the training
    20261123T060102.125-rank_3-4714.jsonl         one for each failed rank
    20261123T052100.000-supervisor_0-4700.jsonl   one for each supervisor of a node

Both formats of the logs of mindformers are understood, that of its files and that of its standard
output:

    [INFO] 2026-11-21 20:50:43,411 [mindformers/core/callback/callback.py:747] print_output_info:
        { Epoch:[  1/  4], step:[ ...
    2026-11-21 20:50:43,411 - mindformers/home/output/log[mindformers/core/callback/callback.py:747]
        - INFO - { Epoch:[  1/ ...

The PyNative trainer begins a line with ``{ step:[``.

A killed process leaves a torn line, and the next line may follow on the same line: lines are also
cut where a time begins, and incomplete parts are skipped. The content of an event file is not
trusted. A line is skipped if it is torn, too long, no JSON, of a later version, or has numbers out
of range. Memory per line and per file is bounded.
"""

from __future__ import annotations

import calendar
import glob
import heapq
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import BinaryIO, NamedTuple

from mindresume import runtime
from mindresume.events import (
    FAILED,
    Event,
    HangDetected,
    JobEnded,
    JobStarted,
    LogsKept,
    RankDied,
    RunOpened,
    SaveFailed,
    TrainingEnded,
    TrainingStarted,
    end_text,
    event_from_json,
)
from mindresume.events.event_file import FOLDER, LEDGER, LIMIT, SUFFIX, with_short_texts
from mindresume.resume.step_ledger import ledger_of
from mindresume.storage.posix import PosixStorage
from mindresume.typed import is_number, parse_json

LOOKED_FOR = ("log*/rank_*/info.log*", "msrun_log*/worker_*.log", f"{FOLDER}/*{SUFFIX}")
_PLACES, _FILES = ("", "log*/", "msrun_log*/"), ("rank_*/info.log*", "worker_*.log")
_FILE = re.compile(
    r"(?:(?:msrun_)?log(?:_[^/]+)?/)?"
    r"(?:worker_(\d{1,9})\.log|rank_(\d{1,9})/info\.log(?:\.(\d{1,6}))?)"
)


@dataclass(frozen=True)
class LogFile:
    """Describes one log. ``pieces``: its files in order of time: rotated files, oldest first, then
    the current one. ``rank``: from its name."""

    rank: int
    pieces: tuple[str, ...]


def find_logs(folders: Iterable[str]) -> tuple[LogFile, ...]:
    """Returns the logs in each of ``folders`` (output folders, or folders of logs), in order of
    rank."""
    logs: dict[tuple[str, ...], LogFile] = {}
    for folder in folders:
        pieces: dict[
            tuple[int, str], list[tuple[int, str]]
        ] = {}  # {(rank, file or folder of a log): [(age, path)]}
        for pattern in (place + file for place in _PLACES for file in _FILES):
            for name in glob.iglob(pattern, root_dir=folder):
                if match := _FILE.fullmatch(name):
                    worker, rank, age = match.groups()
                    log = int(worker or rank), name if worker else os.path.dirname(name)
                    pieces.setdefault(log, []).append((-int(age or 0), os.path.join(folder, name)))
        for (rank, _), aged in pieces.items():
            paths = tuple(path for _, path in sorted(aged))
            logs.setdefault(tuple(map(os.path.realpath, paths)), LogFile(rank, paths))
    return tuple(sorted(logs.values(), key=lambda log: (log.rank, log.pieces)))


def pieces_of(file: BinaryIO, limit: int, total: int | None = None) -> Iterator[bytes]:
    """Yields each line with its end; a line longer than ``limit`` bytes in pieces of that size.
    Skips any number of zero bytes before a line. Stops after ``total`` bytes of content (None: at
    the end of the file)."""
    read = 0
    while (total is None or read < total) and (piece := file.readline(limit)):
        read += len(piece)
        if piece.startswith(b"\0"):
            is_cut = len(piece) == limit and not piece.endswith(b"\n")
            piece = piece.lstrip(b"\0")
            if is_cut and not piece:
                _skip_hole(file)
            elif is_cut:  # reads the rest of the line that begins in this piece
                piece += file.readline(limit - len(piece))
        if piece:
            yield piece


def _skip_hole(file: BinaryIO) -> None:
    """Seeks to the next written bytes: a host that loses its power leaves holes of any size."""
    descriptor = file.fileno()
    place = os.lseek(
        descriptor, 0, os.SEEK_CUR
    )  # the position of the descriptor: buffered bytes lie before it
    try:
        data = os.lseek(descriptor, file.tell(), os.SEEK_DATA)
    except OSError:  # nothing follows, or this file system does not support it
        file.seek(0, os.SEEK_END)
        return
    os.lseek(descriptor, place, os.SEEK_SET)  # the position that the buffer expects
    file.seek(data)


LINE_LIMIT = 1 << 16  # bytes; a longer line is no log line

START = "start"
OVER = "over"
LAST_CARD = "last card"
LOSS = "loss"


class LogLine(NamedTuple):
    """Holds one parsed line. ``kind``: START (the trainer is created), OVER (the training is over),
    LAST_CARD (the last rank has the true loss) or LOSS. ``time``: seconds since 1970. Only for
    LOSS: ``step``, from 1 over all epochs; ``loss``; ``step_seconds``."""

    time: float
    kind: str
    step: int = 0
    loss: float = 0.0
    step_seconds: float = 0.0


_WORDS = (
    (".Init Config.", START),
    (".Training Over!", OVER),
    ("loss on the last card is valid", LAST_CARD),
)
_MARKS = (b"{ Epoch:[", b"{ step:[", *(word.encode() for word, _ in _WORDS))
_HEAD = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}):([0-9]{2}),([0-9]{3}) ")
# Digits are limited: int() refuses thousands of them, numpy values of 2^63 and more. The PyNative
# trainer has no epoch and counts the steps of the whole training; since 2.1.0 it names samples and
# batch size before the loss.
_FEW, _NUMBER = r"(\d{1,9})", r"(-?\d{1,40}(?:\.\d{1,40})?(?:e[-+]?\d{1,4})?|nan|-?inf)"
_LOSS = re.compile(
    rf"\{{ (?:Epoch:\[ *{_FEW}/ *\d+\], )?step:\[ *{_FEW}/ *{_FEW}\], "
    rf"(?:consumed_samples: \d+, global_batch_size: \d+, )?"
    rf"loss:(?:\[{_NUMBER}/{_NUMBER}\]| *{_NUMBER}), "
    rf"[^{{]*?per_step_time: *(-?\d{{1,12}})ms, "
)


@lru_cache(maxsize=64)
def _minute(text: str, utc_offset: int | None) -> float | None:
    """Returns a local time as seconds since 1970. ``utc_offset``: as for ``parse``."""
    try:
        parsed = runtime.strptime(text, "%Y-%m-%d %H:%M")
        return (
            runtime.mktime(parsed) if utc_offset is None else calendar.timegm(parsed) - utc_offset
        )
    except (ValueError, OverflowError):
        return None


def parse(line: str, utc_offset: int | None = None) -> list[LogLine]:
    """Returns the parsed parts of a line: none or one; more if a process was killed within a line
    and the next one continued it. ``utc_offset``: of the times in the log, in seconds east of UTC;
    None: the time zone of this machine."""
    heads, parts = list(_HEAD.finditer(line)), []
    for head, end in zip(heads, [*(later.start() for later in heads[1:]), len(line)], strict=False):
        minute = _minute(head[1], utc_offset)
        if minute is not None:
            parts.append(
                _parse(line[head.end() : end], minute + int(head[2]) + int(head[3]) / 1000)
            )
    return [part for part in parts if part is not None]


def _parse(text: str, at: float) -> LogLine | None:
    match = _LOSS.search(text)
    if match is None:
        return next((LogLine(at, kind) for word, kind in _WORDS if word in text), None)
    epoch, step, size, one, _, other, milliseconds = match.groups()
    before = max(int(epoch) - 1, 0) * int(size) if epoch else 0
    return LogLine(
        at, LOSS, before + int(step), float(one or other), max(int(milliseconds), 0) / 1000
    )


def lines_of(log: LogFile, utc_offset: int | None = None) -> Iterator[LogLine]:
    """Yields the parsed lines of a log in the order of its files. Skips a file that vanishes,
    because the job rotates its logs."""
    for path in log.pieces:
        try:
            file = PosixStorage().open(path)
        except OSError:  # an error of this file, not of the caller's
            continue
        with file:
            for piece in pieces_of(file, LINE_LIMIT):
                if any(mark in piece for mark in _MARKS):
                    yield from parse(piece.decode("utf-8", "replace").rstrip("\r\n\0"), utc_offset)


def merged(logs: Iterable[LogFile], utc_offset: int | None = None) -> Iterator[LogLine]:
    """Yields the lines of several logs of one rank by time, without duplicates (a worker also
    prints what it logs)."""
    at, seen = 0.0, set()
    for line in heapq.merge(
        *(lines_of(log, utc_offset) for log in logs), key=lambda line: line.time
    ):
        if line.time != at:
            at, seen = line.time, set()
        if line not in seen:
            seen.add(line)
            yield line


# ---- event files ---------------------------------------------------------------------------------


EVENT_LIMIT = 1 << 18  # bytes; longer lines are skipped
FILE_LIMIT = 4 * LIMIT  # bytes of one file; mindresume writes at most half of it
MAX_VALUES = 1 << 15  # JSON values of one line
LATEST = 4e11  # seconds since 1970, the year 14645: later times cannot be formatted
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
            for piece in pieces_of(file, EVENT_LIMIT, FILE_LIMIT):
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
    recorded = _recorded(line)
    begin = line.rfind(_BEGIN)
    return _recorded(line[begin:]) if recorded is None and begin > 0 else recorded


def _recorded(line: bytes) -> RecordedEvent | None:
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
    first; None: nothing. ``logs``: folders that its logs were moved to and are
    still in."""

    moments: dict[str, float]
    failure: Failure | None = None
    logs: tuple[str, ...] = ()


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
        elif starts and isinstance(event, LogsKept):
            starts[-1] = replace(starts[-1], logs=tuple(filter(os.path.isdir, event.folders)))
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
