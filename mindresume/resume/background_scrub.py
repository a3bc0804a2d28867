"""Scrubs the checkpoint directory of a running training in the background (``mindresume: {scrub: {every_hours: 24}}``).

    scrub = BackgroundScrub(storage, root, settings.scrub, emit)     # on one rank of each node
    emit.add(scrub);  scrub.start();  scrub.stop()

A thread of idle priority reads what was neither saved nor scrubbed for ``every_hours``, at ``rate_mb``. While this rank saves, it
waits. Of several nodes that see one directory one scrubs at a time, by the lock of each checkpoint; where nodes share no disk
each scrubs its own. The thread takes part in no collective, and no error of it reaches the training: it is a warning in the log.
"""
from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from contextlib import suppress

from mindresume import runtime
from mindresume.events import CheckpointScrubbed, Emit, Event, SaveBegun, SaveFailed, SaveWritten, warning
from mindresume.formats import CheckpointDir
from mindresume.resume.candidates import list_checkpoints
from mindresume.resume.replicas import unknown_strategy
from mindresume.resume.scrub import SKIPPED, CheckpointScrub, Scrubber, ScrubOptions
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.settings import ScrubSettings
from mindresume.storage.atomic_publish import error_text
from mindresume.storage.throttled_reads import ReadStoppedError

FIRST, POLL = 60.0, 600.0       # seconds before the first look at the directory, and between two
LONGEST_SAVE = 1800.0           # seconds; the scrub goes on if no event says that a save ended
PAUSE = 0.2                     # seconds between two looks while a save is written
ENDING = 5.0                    # seconds that ``stop`` waits for a read in progress; a hanging file system is not waited for
NICEST = 19
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}            # numbers of the system call
_IOPRIO_WHO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13          # linux/ioprio.h


class BackgroundScrub:
    """Scrubs a directory until it is stopped. It is a handler of events: it sees when this rank saves.

    Args:
        bucket: the object store to which checkpoints are uploaded; None: none.
        first, poll: seconds before the first look at the directory, and between two.
    """

    def __init__(self, directory: CheckpointDir, settings: ScrubSettings, emit: Emit, bucket: RemoteCheckpoints | None = None,
                 first: float = FIRST, poll: float = POLL, clock: Callable[[], float] = runtime.monotonic):
        self.storage, self.root, self.settings, self.emit, self.bucket = directory.storage, directory.root, settings, emit, bucket
        self._first, self._poll, self._clock = first, poll, clock
        self._stop, self._thread = runtime.Event(), None
        self._saving_since: float | None = None
        self._problem = ""

    def start(self) -> BackgroundScrub:
        """Starts the thread."""
        self._thread = runtime.Thread(target=self._work, name="mindresume-scrub", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread at its next read. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(ENDING)

    # ---- as a handler of events

    def handle(self, event: Event, time_s: float) -> None:
        """Notes when this rank begins to save, and when its part is written."""
        if isinstance(event, SaveBegun):
            self._saving_since = self._clock()
        elif isinstance(event, (SaveWritten, SaveFailed)):
            self._saving_since = None

    def close(self) -> None:
        self.stop()

    # ---- the thread

    def _work(self) -> None:
        lower_priority()
        self._stop.wait(self._first)
        while not self._stop.is_set():
            try:
                self._scrub_once()
            except ReadStoppedError:
                return
            except Exception as error:
                if error_text(error) != self._problem:                  # the same one is said once
                    self._problem = error_text(error)
                    self.emit(warning(f"the scrub of {self.root} failed and is tried again later: {self._problem}"))
            self._stop.wait(self._poll)

    def _scrub_once(self) -> None:
        """Scrubs every checkpoint that is due."""
        options = ScrubOptions(self.settings.rate_mb * 1e6, bool(self.settings.repair), self.bucket,
                               self.settings.every_hours * 3600, False, self._is_stopped)
        found, rows = list_checkpoints(self.storage, self.root, unknown_strategy)
        scrubber, started = Scrubber(self.storage, found.root, options, wait=self._stop.wait), self._clock()
        for result in scrubber.scrub(rows):
            if result.is_elsewhere:
                return                                                  # another node does it
            if result.state != SKIPPED:
                self.emit(_event(result, self._clock() - started))
            started = self._clock()

    def _is_stopped(self) -> bool:
        """Returns whether to stop; waits while this rank saves."""
        while not self._stop.is_set():
            since = self._saving_since
            if since is None or self._clock() - since > LONGEST_SAVE:
                return False
            self._stop.wait(PAUSE)
        return True


def _event(result: CheckpointScrub, seconds: float) -> CheckpointScrubbed:
    files = tuple(row.file or "" for row in (*result.damaged, *result.repaired))
    reason = "; ".join([*(row.reason for row in result.damaged), *result.notes])
    return CheckpointScrubbed(result.candidate.step or 0, result.state, result.bytes_read, seconds, files, reason)


@runtime.asks_machine
def lower_priority() -> None:
    """Gives this thread the lowest priority for the processor and, where the scheduler of the device has it, for the disk."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, runtime.thread_id(), NICEST)      # Linux: of the thread
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
