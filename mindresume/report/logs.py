"""Lines of a log -> events. Both formats of mindformers are understood, that of its files and that of its standard output:

    [INFO] 2026-11-21 20:50:43,411 [mindformers/core/callback/callback.py:747] print_output_info: { Epoch:[  1/  4], step:[ ...
    2026-11-21 20:50:43,411 - mindformers/home/output/log[mindformers/core/callback/callback.py:747] - INFO - { Epoch:[  1/ ...

Files are read line by line, and of most lines only that they are no event. A line that is torn, or glued to the torn one of a
process that died, is cut where a time begins; what is not whole is no event.
"""
from __future__ import annotations

import heapq
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

from mindresume.report.sources import LogFile
from mindresume.store.storage import open_regular

LINE_LIMIT = 1 << 16            # bytes: what is longer is no line of a log, and is not kept in memory
TAIL = 1 << 16                  # bytes at the end of what a worker printed in which its last words are looked for
TEXT_LIMIT = 2000               # characters of a text that goes into the page

START, OVER, LAST_CARD, LOSS, ERROR, SAID = "start", "over", "last card", "loss", "error", "said"
FRESH, RESUME, CONTINUES, REFUSED, RUN, COMPLETE = "fresh", "resume", "continues", "refused", "run", "complete"
SAVING, SAVED, COMMITTED, LATE = "saving", "saved", "committed", "late"
FAILED, UNCOMMITTED, SKIPPED, LEAVING, LEFT = "failed", "uncommitted", "skipped", "leaving", "left"


class Event(NamedTuple):
    """``time``: seconds since 1970, if the log was written in the time zone of this machine. ``value``: the loss; seconds of a
    save or of the training standing still; steps before scaling. ``seconds``: of a step. ``size``: MiB."""
    time: float
    kind: str
    step: int | None = None
    value: float | None = None
    seconds: float | None = None
    text: str = ""


_LOSS_MARK = "{ Epoch:["
_MARKS = (b"{ Epoch:[", b"mindresume: ", b".Init Config.", b".Training Over!", b"loss on the last card is valid")
_THEIRS = ((".Init Config.", START), (".Training Over!", OVER), ("loss on the last card is valid", LAST_CARD))
_HEAD = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}):([0-9]{2}),([0-9]{3}) ")
_INSIDE, _BEFORE = re.compile(r"-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2},"), len("2026-11")       # begins with a fixed character
_LEVEL = re.compile(r"\[[A-Z]{4,8}\] \Z")
# No more digits than what is counted, timed or computed with can have: int() refuses thousands, numpy more than 2^63.
_COUNT, _FEW, _SPAN, _NUMBER = r"(\d{1,18})", r"(\d{1,9})", r"(\d{1,9}(?:\.\d{0,9})?)", \
    r"(-?\d{1,40}(?:\.\d{1,40})?(?:e[-+]?\d{1,4})?|nan|-?inf)"
_LOSS = re.compile(rf"{re.escape(_LOSS_MARK)} *{_FEW}/ *\d+\], step:\[ *{_FEW}/ *{_FEW}\], "
                   rf"loss:(?:\[{_NUMBER}/{_NUMBER}\]| {_NUMBER}), .*?per_step_time: (-?\d{{1,12}})ms, ")
_LAST_WORDS = re.compile(r"^run_mindformer\.py: ((?:failed|error)\b.*)", re.MULTILINE)


def _step(match: re.Match[str], at: float, kind: str) -> Event:
    return Event(at, kind, step=int(match[1]))


def _step_and_text(match: re.Match[str], at: float, kind: str) -> Event:
    return Event(at, kind, step=None if match[1] == "?" else int(match[1]), text=match[2][:TEXT_LIMIT])


def _step_and_value(match: re.Match[str], at: float, kind: str) -> Event:
    return Event(at, kind, step=int(match[1]), value=float(match[2]))


def _text(match: re.Match[str], at: float, kind: str) -> Event:
    return Event(at, kind, text=match[1][:TEXT_LIMIT])


# What mindresume says in the log -> event. The first that fits.
_OURS: tuple[tuple[re.Pattern[str], str, Callable[[re.Match[str], float, str], Event]], ...] = tuple(
    (re.compile(pattern), kind, make) for pattern, kind, make in (
        (r"saved step " + _COUNT + r", [\d.]{1,40} MiB in " + _SPAN + r" s$", SAVED, _step_and_value),
        (r"step " + _COUNT + r" committed: ", COMMITTED, _step),
        (r"step " + _COUNT + r" was complete already and is committed now", LATE, _step),
        (r"step " + _COUNT + r" is being saved as .*; training stopped for " + _SPAN + r" s$", SAVING, _step_and_value),
        (r"step " + _COUNT + r" (?:was not|may not be|may not stay) saved on (.*)", FAILED, _step_and_text),
        (r"step " + _COUNT + r" is not saved: (.*)", SKIPPED, _step_and_text),
        (r"step " + _COUNT + r" (is given up: .*|is not committed: .*)", UNCOMMITTED, _step_and_text),
        (r"not resuming from step (\d{1,18}|\?): (.*)", REFUSED, _step_and_text),
        (r"fresh start: (.*)", FRESH, _text),
        (r"resume from step " + _COUNT + r", (.*)", RESUME, _step_and_text),
        (r"resume from (.*)", RESUME, _text),
        (r"continues after step " + _COUNT + r" .*; steps scaled by [\d.e+-]+ from " + _COUNT + r"$", CONTINUES, _step_and_value),
        (r"continues after step " + _COUNT + r" ", CONTINUES, _step),
        (r"run (\d{1,18}-[0-9a-f]{8}) saves to ", RUN, _text),
        (r"the training is complete: (.*)", COMPLETE, _text),
        (r"[^:]*: the training saves step " + _COUNT + r" and ends", LEAVING, _step),
        (r"left because of (.*?); start the same command again", LEFT, _text),
        (r"(.*\(\d+ failed in a row\)$)", FAILED, _text),
        (r"(.*)", SAID, _text)))


class Clock:
    """Local times of a log as seconds since 1970. Lines of the same minute are not worked out again."""

    def __init__(self) -> None:
        self._minute, self._base = "", 0.0

    def __call__(self, minute: str, second: str, milli: str) -> float | None:
        if minute != self._minute:
            try:
                self._base = time.mktime(time.strptime(minute, "%Y-%m-%d %H:%M"))
            except (ValueError, OverflowError):
                return None
            self._minute = minute
        return self._base + int(second) + int(milli) / 1000


def parse(line: str, clock: Clock) -> list[Event]:
    """The events of a line without its end: one or none; more if a process died within a line and the next one wrote on there."""
    heads, found = list(_heads(line)), []
    for head, end in zip(heads, [*(later.start() for later in heads[1:]), len(line)], strict=False):
        at = clock(*head.groups())
        text = line[head.end():end]
        event = None if at is None else _event(text if end == len(line) else _LEVEL.sub("", text), at)
        if event is not None:
            found.append(event)
    return found


def _heads(text: str) -> Iterator[re.Match[str]]:
    """Every time in a text as a logger writes it."""
    for match in _INSIDE.finditer(text):
        head = _HEAD.match(text, match.start() - _BEFORE) if match.start() >= _BEFORE else None
        if head is not None:
            yield head


def _event(text: str, at: float) -> Event | None:
    mark = text.find(_LOSS_MARK)
    if mark >= 0:
        match = _LOSS.match(text, mark)
        if match is None:
            return None
        epoch, step, size, one, _, other, milliseconds = match.groups()
        return Event(at, LOSS, (int(epoch) - 1) * int(size) + int(step), float(one or other), max(int(milliseconds), 0) / 1000)
    mark = text.find("mindresume: ")
    if mark >= 0:
        said = text[mark + len("mindresume: "):]
        return next(make(match, at, kind) for pattern, kind, make in _OURS if (match := pattern.match(said)) is not None)
    return next((Event(at, kind) for word, kind in _THEIRS if word in text), None)


def events_of(log: LogFile, clock: Clock | None = None) -> Iterator[Event]:
    """In the order of the file. A piece that vanishes meanwhile (the job rotates its logs) is passed over."""
    clock = clock or Clock()
    for path in log.pieces:
        try:
            file = open_regular(path)
        except OSError:                     # is not one of the caller
            continue
        with file:
            while line := file.readline(LINE_LIMIT):
                if len(line) == LINE_LIMIT and not line.strip(b"\0"):
                    _over_hole(file)
                elif any(mark in line for mark in _MARKS):
                    yield from parse(line.decode("utf-8", "replace").rstrip("\r\n\0"), clock)


def _over_hole(file: BinaryIO) -> None:
    """To where the next bytes were written: a host that lost its power leaves holes, which can be of any size."""
    try:
        file.seek(os.lseek(file.fileno(), file.tell(), os.SEEK_DATA))
    except OSError:                         # nothing was written behind it, or this file system does not tell
        file.seek(0, os.SEEK_END)


def merged(logs: Iterable[LogFile]) -> Iterator[Event]:
    """Events of several logs of one rank by time. What two of them have alike (a worker prints what it logs) is there once."""
    at, seen = 0.0, set()
    for event in heapq.merge(*map(events_of, logs), key=lambda event: event.time):
        if event.time != at:
            at, seen = event.time, set()
        if event not in seen:
            seen.add(event)
            yield event


def last_words(log: LogFile, clock: Clock | None = None) -> Event | None:
    """What a worker said when it failed: run_mindformer.py prints it without a time, so it has that of the line before."""
    try:
        with open_regular(log.pieces[-1]) as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - TAIL, 0))
            text = file.read(TAIL).decode("utf-8", "replace")
    except OSError:
        return None
    words, clock = _LAST_WORDS.search(text), clock or Clock()
    heads = list(_heads(text))
    at = clock(*heads[-1].groups()) if heads else None
    return Event(at, ERROR, text=words[1][:TEXT_LIMIT]) if words and at is not None else None
