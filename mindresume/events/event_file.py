"""The event file of a run: one JSON object per line, appended, on the local disk in mindformers' output folder.

    {output}/mindresume_events/20261123T052200.250-rank_0-4711.jsonl      start (UTC), rank, process id
    {"time": 1795411320.25, "rank": 0, "event": "save_committed", "step": 500, "ranks": 8, "size_bytes": 1073741824}

Rank 0 writes all of its events. Any other rank keeps its newest events in memory and writes them when it fails, so that the
reason of a failure is recorded whichever rank it was. A killed process can leave a torn last line, which readers ignore.

The size of a file and the number of files are bounded. Beyond ``LIMIT`` bytes only failures and the end of the run are written.
When a new run begins, only the files of the newest ``MAX_FILES`` runs are kept, and for each of them those of the ``MAX_FAILED``
ranks that failed first: when one of 8,192 ranks fails, all of them do.
"""
from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from mindresume.events import FAILED, CandidateRefused, Event, SaveFailed, TrainingEnded, WorkProgress

FOLDER = "mindresume_events"
SUFFIX = ".jsonl"
LIMIT = 16 << 20                # bytes of all events of a file; failures and the end may use as much again
MAX_FILES = 200                 # files of rank 0 in one folder
MAX_FAILED = 8                  # files of other ranks per file of rank 0: those that failed first
KEPT = 200                      # newest events that a rank without a file keeps in memory
TEXT_LIMIT = 2000               # characters of a string in an event


class EventFile:
    """Writes events to a file. Creates it with the first event of rank 0, or with the failure of another rank. ``handle`` raises
    OSError if the file cannot be written.

    Args:
        folder: the output folder of the training.
        rank: of this process.
        limit: bytes, as LIMIT.
    """

    def __init__(self, folder: str, rank: int, limit: int = LIMIT):
        self.folder, self.rank, self.limit = os.path.join(folder, FOLDER), rank, limit
        self.path: str | None = None
        self._file = -1
        self._size = 0
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._is_closed = False
        self._lock = threading.RLock()                  # reentrant: a signal handler can interrupt the thread that holds it

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, WorkProgress):             # only useful while the work runs
            return
        line = _line(event, time_s, self.rank)
        with self._lock:
            if self._is_closed:
                return
            if self._file < 0:
                self._kept.append(line)
                if self.rank and not _is_failure(event):
                    return
                self._open(time_s)
                line = b"".join(self._kept)
                self._kept.clear()
            if self._size + len(line) <= self.limit or _says_more(event) and self._size + len(line) <= 2 * self.limit:
                self._write(line)

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file, self._is_closed = -1, True

    def _open(self, time_s: float) -> None:
        os.makedirs(self.folder, exist_ok=True)
        if self.rank == 0:
            _remove_oldest(self.folder)
        start = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(time_s))}.{int(time_s % 1 * 1000):03d}"
        self.path = os.path.join(self.folder, f"{start}-rank_{self.rank}-{os.getpid()}{SUFFIX}")
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _write(self, line: bytes) -> None:
        done = os.write(self._file, line)
        self._size += done
        if done < len(line):                            # a full disk: a later event would continue the torn line
            raise OSError(f"{self.path}: {done} of {len(line)} bytes written")


def _line(event: Event, time_s: float, rank: int) -> bytes:
    values = {"time": round(time_s, 3), "rank": rank, **event.to_json()}
    short = {name: value[:TEXT_LIMIT] if isinstance(value, str) else value for name, value in values.items()}
    return json.dumps(short, allow_nan=False).encode("ascii") + b"\n"


def _is_failure(event: Event) -> bool:
    return isinstance(event, SaveFailed) or isinstance(event, TrainingEnded) and event.outcome == FAILED


def _says_more(event: Event) -> bool:
    """Returns whether an event is written beyond the limit of the file."""
    return isinstance(event, (SaveFailed, TrainingEnded, CandidateRefused))


def _remove_oldest(folder: str) -> None:
    with suppress(OSError):
        for name in _superfluous(name for name in os.listdir(folder) if name.endswith(SUFFIX)):
            os.remove(os.path.join(folder, name))


def _superfluous(names: Iterable[str]) -> list[str]:
    """Returns the names of the event files to remove. Names begin with the time of the first event, so they sort by run, and
    by the time of the failure for the ranks of a run."""
    runs: list[list[str]] = [[]]                    # for each run: the file of rank 0, then those of other ranks
    for name in sorted(names):
        if "-rank_0-" in name:
            runs.append([])
        runs[-1].append(name)
    oldest = max(len(runs) - MAX_FILES + 1, 0)      # one run is about to begin
    return [name for index, run in enumerate(runs) for name in run[0 if index < oldest else 1 + MAX_FAILED:]]
