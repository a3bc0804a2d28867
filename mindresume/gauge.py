"""How far long work on bytes is, in one line every few seconds; nothing for work that is done sooner.

    gauge = Gauge("saving step 500", logger.info)
    gauge.expect(80 << 30); gauge.advance(1 << 20) ...
    saving step 500: 12.3 GiB of 80.0 GiB (15 %), 1.9 GiB/s, 36 s left
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from mindresume.words import size_text

Piece = TypeVar("Piece", bytes, memoryview)
EVERY = 10.0                    # seconds between two lines


class Gauge:
    """``say(line)``; ``clock`` in seconds; ``amount``: how a count is written, by default as bytes. Any thread may advance it."""

    def __init__(self, what: str, say: Callable[[str], None], every: float = EVERY, clock: Callable[[], float] = time.monotonic,
                 amount: Callable[[float], str] = size_text):
        self.what, self.say, self.every, self.clock, self.amount = what, say, every, clock, amount
        self._lock = threading.Lock()
        self.expect(0)

    def expect(self, total: int) -> None:
        """Begins anew: so many bytes are to come; 0: not known."""
        with self._lock:
            self.total, self.done = total, 0
            self.began = self._said = self.clock()

    def advance(self, count: int) -> None:
        line, now = "", self.clock()
        with self._lock:
            self.done += count
            if now - self._said >= self.every and self.done != self.total:
                self._said, line = now, self._line(now)
        if line:
            self.say(line)

    def counted(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Passes them on; each counts when the next is asked for."""
        for piece in pieces:
            yield piece
            self.advance(len(piece))

    @classmethod
    def silent(cls) -> Gauge:
        return cls("", lambda line: None)

    def _line(self, now: float) -> str:
        rate = self.done / max(now - self.began, 1e-9)
        text = f"{self.what}: {self.amount(self.done)}"
        if self.total:
            text += f" of {self.amount(self.total)} ({min(100, 100 * self.done // self.total)} %)"
        text += f", {self.amount(rate)}/s"
        return text + (f", {max(self.total - self.done, 0) / rate:.0f} s left" if self.total and rate else "")
