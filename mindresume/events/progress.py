"""Reports the progress of long work: one event every few seconds, none for work that ends sooner.

progress = ProgressReporter("saving step 500", emit)
progress.expect(80 << 30)
progress.advance(1 << 20)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mindresume import runtime
from mindresume.events import Emit, WorkProgress

EVERY = 10.0  # seconds between two events


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
            if now - self._last >= EVERY and self.done != self.total:
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
