"""How a long call reports its progress: it passes byte counts to a ``Progress``."""
from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives byte counts; any thread may call it. A progress bar, or any object with these two methods."""

    def expect(self, count: int) -> None:
        """Receives how many bytes are to come, before the first ``advance``."""

    def advance(self, count: int) -> None:
        """Receives how many bytes were processed since the last call."""


class SilentProgress:
    """A Progress that does nothing."""

    def expect(self, count: int) -> None:
        pass

    def advance(self, count: int) -> None:
        pass


SILENT = SilentProgress()
