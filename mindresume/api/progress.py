"""Defines ``Progress``, to which long calls report byte counts. Apart from the results: the command line starts without them."""
from __future__ import annotations

from typing import Protocol

from mindresume.events.progress import ProgressReporter


class Progress(Protocol):
    """Receives byte counts from any thread: a progress bar, or any object with these two methods."""

    def expect(self, count: int) -> None:
        """Receives the number of bytes to come, before the first ``advance``."""

    def advance(self, count: int) -> None:
        """Receives the number of bytes processed since the last call."""


SILENT: Progress = ProgressReporter.silent()
