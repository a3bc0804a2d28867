"""Runs one piece of work after the other in one thread.

A new thread for each piece would delay the training: ``Thread.start`` returns when the new thread runs, and on a node whose cores
are all busy that takes longer than the copy of a small network.
"""
from __future__ import annotations

from collections.abc import Callable

from mindresume import runtime


class Work:
    """Work in the background. ``join`` and ``is_alive``: as of a thread."""

    def __init__(self, function: Callable[[], None]):
        self._function, self._ended = function, runtime.Event()

    def run(self) -> None:
        try:
            self._function()
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self._ended.is_set()


class BackgroundThread:
    """The thread begins with the first work and ends with ``close``."""

    def __init__(self, name: str):
        self.name = name
        self._waiting: runtime.SimpleQueue[Work | None] | None = None

    def start(self, function: Callable[[], None]) -> Work | None:
        """Runs ``function``, which raises no error, after what was started before. Returns None if it is done already, because
        no thread can be made."""
        if self._waiting is None:
            waiting: runtime.SimpleQueue[Work | None] = runtime.SimpleQueue()
            try:
                runtime.Thread(target=_serve, name=self.name, daemon=True, args=(waiting,)).start()
            except RuntimeError:                    # the limit of threads is reached
                function()
                return None
            self._waiting = waiting
        work = Work(function)
        self._waiting.put(work)
        return work

    def close(self) -> None:
        """Ends the thread after all work. A later ``start`` makes another one."""
        if self._waiting is not None:
            self._waiting.put(None)
            self._waiting = None


def _serve(waiting: runtime.SimpleQueue[Work | None]) -> None:
    while (work := waiting.get()) is not None:
        work.run()
        del work                                    # it refers to the memory of a save
