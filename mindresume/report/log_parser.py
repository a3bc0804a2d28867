"""Finds and parses the logs of mindformers: the loss of each step, the start and the end of a
training.

    output/log[_SUFFIX]/rank_0/info.log.2, info.log.1, info.log      all starts, one after the other
    output/msrun_log[_SUFFIX]/worker_0.log                           output of the last start; the
                                                                     next one overwrites it

Event files (``event_log``) record what mindresume does. Both formats of mindformers are understood,
that of its files and that of its standard output:

    [INFO] 2026-11-21 20:50:43,411 [mindformers/core/callback/callback.py:747] print_output_info: {
    Epoch:[  1/  4], step:[ ... 2026-11-21 20:50:43,411 -
    mindformers/home/output/log[mindformers/core/callback/callback.py:747] - INFO - { Epoch:[  1/
    ...

The PyNative trainer begins a line with ``{ step:[``.

A killed process leaves a torn line, and the next line may follow on the same line: lines are also
cut where a time begins, and incomplete parts are skipped.
"""

from __future__ import annotations

import calendar
import heapq
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from mindresume import runtime
from mindresume.storage.posix import PosixStorage

_LOGS, _WORKERS, _WORKER = (
    re.compile(r"log(_.+)?"),
    re.compile(r"msrun_log(_.+)?"),
    re.compile(r"worker_(\d{1,9})\.log"),
)
_RANK, _INFO = re.compile(r"rank_(\d{1,9})"), re.compile(r"info\.log(?:\.(\d{1,6}))?")
LOOKED_FOR = ("log*/rank_*/info.log*", "msrun_log*/worker_*.log")


@dataclass(frozen=True)
class LogFile:
    """Describes one log. ``pieces``: its files in order of time: rotated files, oldest first, then
    the current one. ``rank``: from its name."""

    rank: int
    pieces: tuple[str, ...]


def find_logs(folders: Iterable[str]) -> tuple[LogFile, ...]:
    """Returns the logs in each of ``folders`` (output folders, or folders of logs), in order of
    rank."""
    found: dict[tuple[str, ...], LogFile] = {}
    for folder in folders:
        for log in (
            *_of_folder(folder),
            *(
                log
                for name in _names(folder)
                if _LOGS.fullmatch(name) or _WORKERS.fullmatch(name)
                for log in _of_folder(os.path.join(folder, name))
            ),
        ):
            found.setdefault(tuple(os.path.realpath(piece) for piece in log.pieces), log)
    return tuple(sorted(found.values(), key=lambda log: (log.rank, log.pieces)))


def _of_folder(folder: str) -> Iterator[LogFile]:
    for name in _names(folder):
        path = os.path.join(folder, name)
        if match := _WORKER.fullmatch(name):
            if os.path.isfile(path):
                yield LogFile(int(match[1]), (path,))
        elif match := _RANK.fullmatch(name):
            pieces = [
                (int(piece[1] or 0), piece[0])
                for piece in map(_INFO.fullmatch, _names(path))
                if piece
            ]
            paths = tuple(os.path.join(path, piece) for _, piece in sorted(pieces, reverse=True))
            if paths:
                yield LogFile(int(match[1]), paths)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


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
    # the position of the descriptor: buffered bytes lie before it
    place = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        data = os.lseek(descriptor, file.tell(), os.SEEK_DATA)
    except OSError:
        # nothing follows, or this file system does not support it
        file.seek(0, os.SEEK_END)
        return
    os.lseek(descriptor, place, os.SEEK_SET)  # the position that the buffer expects
    file.seek(data)


LINE_LIMIT = 1 << 16  # bytes; a longer line is no log line

START, OVER, LAST_CARD, LOSS = "start", "over", "last card", "loss"


class LogLine(NamedTuple):
    """Holds one parsed line. ``kind``: START (the trainer is created), OVER (the training is over),
    LAST_CARD (the last rank has the true loss) or LOSS. ``time``: seconds since 1970. Only for
    LOSS: ``step``, from 1 over all epochs; ``loss``; ``step_seconds``."""

    time: float
    kind: str
    step: int = 0
    loss: float = 0.0
    step_seconds: float = 0.0


_LOSS_MARK, _PYNATIVE_MARK = "{ Epoch:[", "{ step:["
_MARKS = (
    b"{ Epoch:[",
    b"{ step:[",
    b".Init Config.",
    b".Training Over!",
    b"loss on the last card is valid",
)
_WORDS = (
    (".Init Config.", START),
    (".Training Over!", OVER),
    ("loss on the last card is valid", LAST_CARD),
)
_HEAD = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}):([0-9]{2}),([0-9]{3}) ")
# a fixed first character is fast
_INSIDE, _BEFORE = re.compile(r"-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2},"), len("2026-11")
# Digits are limited: int() refuses thousands of them, numpy values of 2^63 and more.
_FEW, _NUMBER = r"(\d{1,9})", r"(-?\d{1,40}(?:\.\d{1,40})?(?:e[-+]?\d{1,4})?|nan|-?inf)"
_LOSS = re.compile(
    rf"{re.escape(_LOSS_MARK)} *{_FEW}/ *\d+\], step:\[ *{_FEW}/ *{_FEW}\], "
    rf"loss:(?:\[{_NUMBER}/{_NUMBER}\]| {_NUMBER}), .*?per_step_time: (-?\d{{1,12}})ms, "
)
# The PyNative trainer counts the steps of the whole training. Since 2.1.0 it names samples and
# batch size before the loss.
_PYNATIVE = re.compile(
    rf"{re.escape(_PYNATIVE_MARK)} *{_FEW}/ *\d+\], (?:consumed_samples: \d+, global_batch_size: "
    r"\d+, )?"
    rf"loss: *{_NUMBER}, per_step_time: *(-?\d{{1,12}})ms, "
)


class Clock:
    """Converts local times of a log to seconds since 1970. ``utc_offset``: of the log, in seconds
    east of UTC; None: the time zone of this machine. The last minute is cached."""

    def __init__(self, utc_offset: int | None = None) -> None:
        self._utc_offset = utc_offset
        self._minute, self._base = "", 0.0

    def __call__(self, minute: str, second: str, milli: str) -> float | None:
        if minute != self._minute:
            try:
                parsed = runtime.strptime(minute, "%Y-%m-%d %H:%M")
                self._base = (
                    runtime.mktime(parsed)
                    if self._utc_offset is None
                    else calendar.timegm(parsed) - self._utc_offset
                )
            except (ValueError, OverflowError):
                return None
            self._minute = minute
        return self._base + int(second) + int(milli) / 1000


def parse(line: str, clock: Clock) -> list[LogLine]:
    """Returns the parsed parts of a line: none or one; more if a process was killed within a line
    and the next one continued it."""
    heads, found = list(_heads(line)), []
    for head, end in zip(heads, [*(later.start() for later in heads[1:]), len(line)], strict=False):
        at = clock(*head.groups())
        parsed = None if at is None else _parse(line[head.end() : end], at)
        if parsed is not None:
            found.append(parsed)
    return found


def _heads(text: str) -> Iterator[re.Match[str]]:
    """Yields every time in a text, in the format of a logger."""
    for match in _INSIDE.finditer(text):
        head = _HEAD.match(text, match.start() - _BEFORE) if match.start() >= _BEFORE else None
        if head is not None:
            yield head


def _parse(text: str, at: float) -> LogLine | None:
    mark = text.find(_LOSS_MARK)
    if mark < 0 and _PYNATIVE_MARK in text:
        return _parse_pynative(text, at)
    if mark < 0:
        return next((LogLine(at, kind) for word, kind in _WORDS if word in text), None)
    match = _LOSS.match(text, mark)
    if match is None:
        return None
    epoch, step, size, one, _, other, milliseconds = match.groups()
    before = max(int(epoch) - 1, 0) * int(size)
    return LogLine(
        at, LOSS, before + int(step), float(one or other), max(int(milliseconds), 0) / 1000
    )


def _parse_pynative(text: str, at: float) -> LogLine | None:
    match = _PYNATIVE.search(text)
    if match is None:
        return None
    step, loss, milliseconds = match.groups()
    return LogLine(at, LOSS, int(step), float(loss), max(int(milliseconds), 0) / 1000)


def lines_of(log: LogFile, clock: Clock | None = None) -> Iterator[LogLine]:
    """Yields the parsed lines of a log in the order of its files. Skips a file that vanishes,
    because the job rotates its logs."""
    clock = clock or Clock()
    for path in log.pieces:
        try:
            file = PosixStorage().open(path)
        except OSError:  # an error of this file, not of the caller's
            continue
        with file:
            for piece in pieces_of(file, LINE_LIMIT):
                if any(mark in piece for mark in _MARKS):
                    yield from parse(piece.decode("utf-8", "replace").rstrip("\r\n\0"), clock)


def merged(logs: Iterable[LogFile], utc_offset: int | None = None) -> Iterator[LogLine]:
    """Yields the lines of several logs of one rank by time, without duplicates (a worker also
    prints what it logs)."""
    at, seen = 0.0, set()
    for line in heapq.merge(
        *(lines_of(log, Clock(utc_offset)) for log in logs), key=lambda line: line.time
    ):
        if line.time != at:
            at, seen = line.time, set()
        if line not in seen:
            seen.add(line)
            yield line
