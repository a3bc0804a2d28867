"""Writes the events of a supervisor into an event file beside those of the ranks.

    {output}/mindresume_events/20261123T052200.250-supervisor_0-4711.jsonl          number of the node, process id

The output folder is known only when a rank has told it by its heartbeat. Until then events are kept in memory. A thread of its
own writes the file: it lies on a disk that can hang, and whoever emits an event goes on to end a job.
"""
from __future__ import annotations

import os
from collections import deque

from mindresume.events import Event, warning
from mindresume.events.emitter import Emitter
from mindresume.events.event_file import FOLDER, SupervisorEventFile
from mindresume.supervisor.background import BackgroundHandler

_KEPT = 1000                    # newest events that are kept until the folder is known
_PATIENCE = 30.0                # seconds for which the end waits for the disk


class EventRecorder:
    """Handles events. ``emit``: receives a warning if the file cannot be written. ``node``: number of this node."""

    def __init__(self, emit: Emitter, node: int = 0):
        self.emit, self.node = emit, node
        self._file: BackgroundHandler | None = None
        self._folder = ""
        self._kept: deque[tuple[Event, float]] = deque(maxlen=_KEPT)

    def open(self, folder: str) -> None:
        """Sets the output folder. Only the first call has an effect, so that one file has all events."""
        if self._file is None:
            self._folder = os.path.abspath(folder)          # paths in events are read in other folders
            self._file = BackgroundHandler(SupervisorEventFile(self._folder, self.node, emit=self.emit), self._failed, _PATIENCE)
            for row in self._kept:
                self._file.handle(*row)
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

    def _failed(self, error: Exception) -> None:
        self.emit(warning(f"the event file of the supervisor is not written any more: {error}"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
