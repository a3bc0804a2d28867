"""Defines the events of a run as small frozen values. Code that acts emits an event; handlers turn
it into a line of the log, TensorBoard scalars, and a line of the event file (``event_file``). The
text of the log is a template or a method of its event.

    emit(SaveCommitted(step=500, ranks=8, size_bytes=1 << 30))

    progress = ProgressReporter("saving step 500", emit)    # an event every few seconds
    progress.expect(80 << 30)
    progress.advance(1 << 20)

    saving, resume, reshard ─▶ emit ─▶ Emitter ─▶ log line, event file, TensorBoard
    event file ─▶ ``event_from_json`` ─▶ report

No part of mindresume parses the text in an event: ``reason`` and ``text`` are for people alone.
Sizes are in bytes, durations in seconds. Every field is a JSON value or a tuple of them, so an
event can be sent to another process and written to a file.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from mindresume import runtime
from mindresume.events.base import *  # noqa: F403
from mindresume.events.base import Emit, Event
from mindresume.events.run import *  # noqa: F403
from mindresume.events.run import WorkProgress, warning
from mindresume.events.saves import *  # noqa: F403
from mindresume.events.supervision import *  # noqa: F403
from mindresume.formatting import with_short_checksums

PREFIX = "mindresume: "


class Handler(Protocol):
    """Processes events. Any thread may call it."""

    def handle(self, event: Event, time_s: float) -> None:
        """Processes one event. ``time_s``: seconds since 1970."""

    def close(self) -> None:
        """Ends the handler; the last call, made once at the end of the training."""


class Emitter:
    """Passes each event on to all handlers: ``emit = Emitter(LogLines(logger), event_file)``; then
    ``emit(event)`` from any thread.

    No error of a handler reaches the caller: a training must not end because a log line cannot be
    written. A handler that fails is removed, and the others receive one Notice about it.
    """

    def __init__(self, *handlers: Handler):
        self._handlers = list(handlers)

    def add(self, handler: Handler) -> None:
        self._handlers.append(handler)

    def __call__(self, event: Event) -> None:
        now = runtime.time()
        for handler in tuple(self._handlers):
            try:
                handler.handle(event, now)
            except Exception as error:
                try:
                    self._handlers.remove(handler)
                except ValueError:  # another thread removed it first
                    continue
                self(warning(f"{type(handler).__name__} failed and is off from now on: {error}"))

    def close(self) -> None:
        """Closes all handlers. Idempotent."""
        handlers, self._handlers = self._handlers, []
        for handler in handlers:
            with suppress(Exception):
                handler.close()


class LogLines(Handler):
    """Writes each event that has a log line to ``logger``. Where other records have the file that
    logged, these have the kind of the event."""

    def __init__(self, logger: logging.Logger):
        self.logger = logger

    def handle(self, event: Event, time_s: float) -> None:
        if text := event.line():
            level = logging.getLevelName(event.log_level.upper())
            # the loggers' own records would all name this file and line
            record = logging.LogRecord(
                "mindresume",
                level,
                event.kind,
                0,
                "%s%s",
                (PREFIX, with_short_checksums(text)),
                None,
                "event",
            )
            if self.logger.isEnabledFor(level):
                self.logger.handle(record)


def texts_into(texts: list[str]) -> Emit:
    """Returns an emitter that appends the log line of each event to ``texts``, unless the event has
    none."""

    def emit(event: Event) -> None:
        if text := event.line():
            texts.append(text)

    return emit


# ---- progress ------------------------------------------------------------------------------------


_EVERY = 10.0  # seconds between two events


class Progress(Protocol):
    """Receives byte counts from any thread: a progress bar, or any object with these two
    methods."""

    def expect(self, count: int) -> None:
        """Receives the number of bytes to come, before the first ``advance``."""

    def advance(self, count: int) -> None:
        """Receives the number of bytes processed since the last call."""


class ProgressReporter:
    """Emits WorkProgress events. Any thread may call ``advance``.

    Args:
        what: the work, for the log.
        emit: receives the events.
        unit: what ``advance`` counts: "bytes", or a noun in the plural.
    """

    def __init__(self, what: str, emit: Emit, unit: str = "bytes"):
        self.what = what
        self.emit = emit
        self.unit = unit
        self._lock = runtime.Lock()
        self.total = self.done = 0
        self.began = self._last = runtime.monotonic()

    def expect(self, total: int) -> None:
        """Restarts the count. ``total``: bytes (or units) to come; 0 if unknown."""
        with self._lock:
            self.total, self.done = total, 0
            self.began = self._last = runtime.monotonic()

    def advance(self, count: int) -> None:
        """Adds ``count`` to the count."""
        event, now = None, runtime.monotonic()
        with self._lock:
            self.done += count
            if now - self._last >= _EVERY and self.done != self.total:
                self._last = now
                event = WorkProgress(self.what, self.done, self.total, now - self.began, self.unit)
        if event is not None:
            self.emit(event)


class _Silent:
    """Reports nothing."""

    def expect(self, count: int) -> None: ...

    def advance(self, count: int) -> None: ...


SILENT: Progress = _Silent()


@dataclass
class Counted:
    """Counts bytes, and passes them on. ``done``: so far."""

    progress: Progress = SILENT
    done: int = 0

    def advance(self, count: int) -> None:
        self.done += count
        self.progress.advance(count)
