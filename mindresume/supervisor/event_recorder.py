"""Passes the events of a supervisor on to what can block, each in a thread of its own: who watches a job waits for nobody.

    emit.add(BackgroundHandler(handler))        # a terminal or a pipe whose reader stops
    emit.add(EventRecorder(emit))               # the event file beside those of the ranks, on a disk that can hang

    {output}/mindresume_events/20261123T052200.250-supervisor_0-4711.jsonl          number of the node, process id

The output folder is known only when a rank has told it by its heartbeat. Until then events are kept in memory.
"""
from __future__ import annotations

import os
from collections import deque
from contextlib import suppress

from mindresume import runtime
from mindresume.events import Event, warning
from mindresume.events.emitter import Emitter, Handler
from mindresume.events.event_file import FOLDER, SupervisorEventFile

KEPT = 1000                     # events that wait for a handler, or for the folder; while more do, the oldest are dropped
PATIENCE = 10.0                 # seconds for which the end waits for a handler
_PATIENCE = 30.0                # the same for the event file


class BackgroundHandler:
    """Passes events on to ``handler`` in a thread. ``handle`` never waits and never fails: while the handler hangs, or no thread
    can be started (the limit of threads), the newest events are kept, and tried with the next one. A handler that failed gets no
    more events.

    Args:
        emit: receives a warning if the handler fails.
        patience: seconds for which ``close`` waits until the events that are left are handled.
    """

    def __init__(self, handler: Handler, emit: Emitter | None = None, patience: float = PATIENCE):
        self._handler, self._patience, self._emit = handler, patience, emit
        self._waiting: deque[tuple[Event, float]] = deque(maxlen=KEPT)
        self._changed = runtime.Condition()
        self._thread: runtime.Thread | None = None
        self._is_closing = self._is_off = False

    def handle(self, event: Event, time_s: float) -> None:
        with self._changed:
            if not self._is_off and not self._is_closing:
                self._waiting.append((event, time_s))
                self._start()

    def _start(self) -> None:
        """Starts the thread, or wakes it."""
        if self._thread is None:
            thread = runtime.Thread(target=self._work, name="mindresume-events", daemon=True)
            with suppress(RuntimeError):                # the limit of threads: the next event tries again
                thread.start()
                self._thread = thread
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
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
                if self._emit is not None:
                    self._emit(warning(f"the event file of the supervisor is not written any more: {error}"))

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._start()
        if self._thread is not None:
            self._thread.join(self._patience)


class EventRecorder:
    """Writes events into the event file. ``emit``: receives a warning if that fails. ``node``: number of this node."""

    def __init__(self, emit: Emitter, node: int = 0):
        self.emit, self.node = emit, node
        self._file: BackgroundHandler | None = None
        self._folder = ""
        self._kept: deque[tuple[Event, float]] = deque(maxlen=KEPT)

    def open(self, folder: str) -> None:
        """Sets the output folder. Only the first call has an effect, so that one file has all events."""
        if self._file is None:
            self._folder = os.path.abspath(folder)          # paths in events are read in other folders
            self._file = BackgroundHandler(SupervisorEventFile(self._folder, self.node, emit=self.emit), self.emit, _PATIENCE)
            for event, time_s in self._kept:
                self._file.handle(event, time_s)
            self._kept.clear()

    def evidence(self) -> str | None:
        """Returns the prefix of the paths of files beside the event file; None: the folder is not known, or cannot be made. Its
        disk can hang."""
        if self._file is None:
            return None
        folder = os.path.join(self._folder, FOLDER)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return None
        return os.path.join(folder, f"stacks-{os.getpid()}")

    def handle(self, event: Event, time_s: float) -> None:
        if self._file is None:
            self._kept.append((event, time_s))
        else:
            self._file.handle(event, time_s)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
