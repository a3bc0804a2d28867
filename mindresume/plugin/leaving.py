"""Leaving in time: a training that is asked to end saves the step it is at, on all ranks alike, and ends.

    SIGTERM on any rank, or the file of mindformers' graceful exit ─▶ noted
    at the same steps on all ranks, about every ``leave_check`` seconds ─▶ has anybody noted something?
    all ranks: save this step ─▶ the training stops ─▶ committed ─▶ exit status 143 after SIGTERM, 0 after the file

Ranks must agree on a step, and only an exchange can do that; at every step it would cost too much, so rank 0 says with each
exchange at which step the next one is. One process asks nobody.
"""
from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from mindresume.agree import Group, report

STATUS = 128 + signal.SIGTERM           # of a process that left because of the signal
BY_SIGNAL, BY_FILE = "SIGTERM", "graceful exit"
FILE = "graceful_exit.json"             # with MS_ENABLE_GRACEFUL_EXIT=1, where no OnRequestExit names another
_KEY = "GracefulExit"                   # mindspore train/callback/_on_request_exit.py
_FILE_CHECK = 1.0                       # seconds between two looks at the file


class Leaving:
    """``seconds``: about so often the ranks exchange what they noted; 0: never, so that nobody leaves. ``callbacks``: of the
    training. Those of MindSpore's class OnRequestExit name the file of the graceful exit, and may take the signal themselves."""

    def __init__(self, group: Group, seconds: float, callbacks: Iterable[Any] = (),
                 clock: Callable[[], float] = time.monotonic):
        self.group, self.seconds, self.clock = group, seconds, clock
        self.others = [callback for callback in callbacks if hasattr(callback, "remote_config_file")]
        self.file = next((str(other.remote_config_file) for other in self.others if other.remote_config_file),
                         FILE if os.environ.get("MS_ENABLE_GRACEFUL_EXIT") == "1" else "")
        self.signalled = False
        self._next, self._interval = 0, 1
        self._asked: tuple[int, float] | None = None            # (step, time) of the last exchange
        self._looked = -_FILE_CHECK
        self._before: Any = None

    def listen(self) -> None:
        """From here on SIGTERM is noted instead of ending the process at once. Only the main thread can."""
        if self.seconds and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def close(self) -> None:
        """SIGTERM does again what it did before."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, *_: Any) -> None:
        self.signalled = True

    def noted(self) -> str:
        """By this rank: BY_SIGNAL, BY_FILE, or empty."""
        if self.signalled or any(other.exit for other in self.others):
            return BY_SIGNAL
        if self.file and self.clock() - self._looked >= _FILE_CHECK:
            self._looked = self.clock()
            if asks_to_leave(self.file):
                return BY_FILE
        return ""

    def at(self, step: int) -> str:
        """At the end of ``step``, on all ranks: why to leave now, the same on all; empty: go on."""
        if not self.seconds:
            return ""
        if self.group.size == 1:
            return self.noted()
        if step < self._next:
            return ""
        rows = report(self.group, lambda: [self.noted(), self._propose(step)])
        self._interval = rows[0][1]
        self._next, self._asked = step + self._interval, (step, self.clock())
        return next((reason for reason, _ in rows if reason), "")

    def _propose(self, step: int) -> int:
        """Steps until the next exchange: as many as fit into ``seconds``, at most twice as many as the last time."""
        if self._asked is None:
            return 1
        before, then = self._asked
        each = max(self.clock() - then, 1e-6) / max(step - before, 1)
        return max(1, min(2 * self._interval, int(self.seconds / each)))


def asks_to_leave(path: str) -> bool:
    """Whether the file says so. One that is not there, or is being written, does not."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and value.get(_KEY) == 1
