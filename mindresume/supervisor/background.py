"""Lets what can block wait in a thread of its own: the supervisor, which watches and ends a job, waits for nobody.

    emit.add(BackgroundHandler(handler))        # a terminal or a pipe whose reader stops, a disk that hangs
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from mindresume import runtime
from mindresume.events import Event
from mindresume.events.emitter import Handler

KEPT = 1000                     # events that wait for a handler; while more do, the oldest are dropped
PATIENCE = 10.0                 # seconds for which the end waits for a handler


class BackgroundHandler:
    """Passes events on to ``handler`` in a thread. ``handle`` never waits and never fails: while the handler hangs, or no thread
    can be started (the limit of threads), the newest events are kept, and tried with the next one.

    Args:
        on_error: receives the error of a handler that failed; it gets no more events.
        patience: seconds for which ``close`` waits until the events that are left are handled.
    """

    def __init__(self, handler: Handler, on_error: Callable[[Exception], None] = lambda error: None, patience: float = PATIENCE):
        self._handler, self._on_error, self._patience = handler, on_error, patience
        self._waiting: deque[tuple[Event, float]] = deque(maxlen=KEPT)
        self._changed = runtime.Condition()
        self._thread: runtime.Thread | None = None
        self._is_closing = self._is_off = False

    def handle(self, event: Event, time_s: float) -> None:
        with self._changed:
            if not self._is_off and not self._is_closing:
                self._waiting.append((event, time_s))
                self._start()
                self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            thread = runtime.Thread(target=self._work, name="mindresume-events", daemon=True)
            with suppress(RuntimeError):                # the limit of threads: the next event tries again
                thread.start()
                self._thread = thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                row = self._waiting.popleft() if self._waiting else None
            if row is None:
                with suppress(Exception):
                    self._handler.close()
                return
            try:
                self._handler.handle(*row)
            except Exception as error:                  # as the emitter does with a handler that fails
                with self._changed:
                    self._is_off = True
                    self._waiting.clear()
                self._on_error(error)

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._start()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._patience)
