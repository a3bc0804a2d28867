"""How far long work on bytes is: one event every few seconds, none for work that is done sooner.

    progress = ProgressReporter("saving step 500", emit)
    progress.expect(80 << 30); progress.advance(1 << 20) ...
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from mindresume.events import Emit, WorkProgress, ignore

Piece = TypeVar("Piece", bytes, memoryview)
EVERY = 10.0                    # seconds between two events


class ProgressReporter:
    """Emits WorkProgress events, at most one in ``every`` seconds. ``clock`` in seconds; ``unit``: of what is counted. Any thread
    may advance it."""

    def __init__(self, what: str, emit: Emit, every: float = EVERY, clock: Callable[[], float] = time.monotonic,
                 unit: str = "bytes"):
        self.what, self.emit, self.every, self.clock, self.unit = what, emit, every, clock, unit
        self._lock = threading.Lock()
        self.expect(0)

    def expect(self, total: int) -> None:
        """Begins anew: ``total`` bytes (or units) are to come; 0: not known."""
        with self._lock:
            self.total, self.done = total, 0
            self.began = self._last = self.clock()

    def advance(self, count: int) -> None:
        """Counts ``count`` more."""
        event, now = None, self.clock()
        with self._lock:
            self.done += count
            if now - self._last >= self.every and self.done != self.total:
                self._last = now
                event = WorkProgress(self.what, self.done, self.total, now - self.began, self.unit)
        if event is not None:
            self.emit(event)

    def counted(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Passes ``pieces`` on; each counts when the next one is asked for."""
        for piece in pieces:
            yield piece
            self.advance(len(piece))

    @classmethod
    def silent(cls) -> ProgressReporter:
        """Returns one that nobody hears."""
        return cls("", ignore)
