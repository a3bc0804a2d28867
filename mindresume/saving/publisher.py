"""Publishes weights for others while the training goes on: Hugging Face folders of committed steps,
each written by a child process of low priority. Part of rank 0; ``mindresume.api.publication`` is
what the child runs.

    publisher = Publisher(settings.publish, root, step, resumed, emit)
    publisher.committed(20)         # in any thread
    publisher.poll(saver.busy())    # each step; True: a save is being written
    publisher.finish(600)           # the end of the training

    first commit at or after a multiple of every_steps ─▶ due ─▶ no save in progress: child
    a save begins ─▶ the child is stopped (SIGSTOP) ─▶ written ─▶ it continues

One child runs at a time. A step that becomes due meanwhile waits, or is skipped for the next one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from mindresume import runtime
from mindresume.events import Emit, PublishFailed, WeightsPublished, event_from_json
from mindresume.events.base import end_text
from mindresume.model.training_state import crosses_multiple
from mindresume.settings import PublishSettings
from mindresume.typed import parse_json

_LOW = (("nice", "-n", "19"), ("ionice", "-c", "3"))


def start_child(request: str) -> subprocess.Popen[bytes]:
    """Starts the process that publishes one step. It belongs to the job, and ends with it."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])
    low = [word for words in _LOW if shutil.which(words[0]) for word in words]
    return subprocess.Popen(
        [*low, sys.executable, "-m", "mindresume.api.publication", request],
        # a supervisor takes a process with MS_ROLE for a rank
        env={**os.environ, "PYTHONPATH": path, "MS_ROLE": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )


class Publisher:
    """Publishes the weights of one training.

    Args:
        settings: with ``config`` set.
        root: the checkpoint directory.
        step: the step after which the training begins.
        resumed: the first child publishes the newest step up to ``step`` that is due and was not
            published, because an earlier run died before that.
        emit: receives the events.
    """

    def __init__(
        self, settings: PublishSettings, root: str, step: int, resumed: bool, emit: Emit
    ) -> None:
        self.settings, self.root, self.emit = settings, root, emit
        self._catches_up = resumed and step > 0
        self._committed, self._due = step, step if self._catches_up else 0
        self._started = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._is_paused = False
        self._told: set[str] = set()  # kinds of failures since the last success

    def committed(self, step: int) -> None:
        """Receives a step that is committed, in any thread."""
        if crosses_multiple(self._committed, step, self.settings.every_steps):
            if self._due > self._started > 0:
                self._fail(self._due, f"those of step {self._started} are still being written")
            self._due = step
        self._committed = step

    def poll(self, is_saving: bool) -> None:
        """Reports a child that has ended, starts the step that is due, and lets the child pause
        while a save is being written. Does not wait."""
        if self._child is not None and self._child.poll() is not None:
            self._report(self._child)
            self._child = None
        if self._child is None and self._due > self._started and not is_saving:
            self._start(self._due)
        if self._child is not None and is_saving != self._is_paused:
            self._is_paused = is_saving
            self._child.send_signal(signal.SIGSTOP if is_saving else signal.SIGCONT)

    def finish(self, timeout: float) -> None:
        """Waits until the newest step that is due is published, at most ``timeout`` seconds."""
        until = runtime.monotonic() + timeout
        self.poll(False)
        while self._child is not None:
            try:
                self._child.wait(max(until - runtime.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._fail(
                    self._due,
                    f"they were not written {timeout:.0f} s after the end of the training; "
                    "mindresume export-hf writes them",
                )
                return
            self.poll(False)

    def _start(self, step: int) -> None:
        """Starts the child for ``step``."""
        self._started = step
        request = {
            "settings": asdict(self.settings),
            "root": self.root,
            "step": step,
            "catches_up": self._catches_up,
        }
        self._catches_up = self._is_paused = False
        try:
            self._child = start_child(json.dumps(request))
        except OSError as error:
            self._fail(step, f"no process can be started: {error}")

    def _report(self, child: subprocess.Popen[bytes]) -> None:
        """Emits the events of a child that has ended; none: it had nothing to do."""
        output = child.communicate()[0]
        if child.returncode:
            how = end_text(child.returncode)
            self._fail(self._started, f"the process that writes them {how}")
        for line in output.splitlines():
            event = None
            with suppress(ValueError, AttributeError):  # a line of a library
                event = event_from_json(parse_json(line))
            if isinstance(event, PublishFailed):
                self._fail(event.step, event.reason)
            elif event is not None:
                if isinstance(event, WeightsPublished):
                    self._told.clear()
                self.emit(event)

    def _fail(self, step: int, reason: str) -> None:
        """Reports a failure, once for each kind until a step is published."""
        kind = re.sub("[0-9]+", "", reason)
        if kind not in self._told:
            self._told.add(kind)
            self.emit(PublishFailed(step, reason))
