"""Finds and parses the logs of mindformers: the loss of each step, the start and the end of a
training.

    output/log[_SUFFIX]/rank_0/info.log.2, info.log.1, info.log      all starts, one after the other
    output/msrun_log[_SUFFIX]/worker_0.log                           output of the last start

Event files (``event_log``) record what mindresume does. Both formats of mindformers are understood,
that of its files and that of its standard output:

    [INFO] 2026-11-21 20:50:43,411 [mindformers/core/callback/callback.py:747] print_output_info:
        { Epoch:[  1/  4], step:[ ...
    2026-11-21 20:50:43,411 - mindformers/home/output/log[mindformers/core/callback/callback.py:747]
        - INFO - { Epoch:[  1/ ...

The PyNative trainer begins a line with ``{ step:[``.

A killed process leaves a torn line, and the next line may follow on the same line: lines are also
cut where a time begins, and incomplete parts are skipped.
"""

from __future__ import annotations

import calendar
import glob
import heapq
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, NamedTuple

from mindresume import runtime
from mindresume.storage.posix import PosixStorage

LOOKED_FOR = ("log*/rank_*/info.log*", "msrun_log*/worker_*.log")
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
