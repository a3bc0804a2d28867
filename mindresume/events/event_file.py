"""The event file of a run: one JSON object per line, appended, on the local disk in mindformers'
output folder.

    {output}/mindresume_events/20261123T052200.250-rank_0-4711.jsonl
    {"time": 1795411320.25, "rank": 0, "event": "save_committed", "step": 500, "ranks": 8, ...}

The name has the start (UTC), the rank and the process id.

Rank 0 writes all of its events. Any other rank keeps its newest events in memory and writes them
when it fails, so that the reason of a failure is recorded whichever rank it was. A killed process
can leave a torn last line, which readers ignore.

A write that fails (a full disk) loses the events of this write only: the next event is written on a
new line, because the failed write can have left a torn one. One warning says so, and one line when
the file is written again.

The size of a file and the number of files are bounded. When a file is half full, only every fourth
event of a kind that occurs often is written, when three quarters are full every sixteenth, and so
on, so that later ones are always there; one warning says so. Of a save all events are written, or
none. Other kinds are written up to ``LIMIT`` bytes, failures and the end of the run beyond it, too.
When a new run begins, only the files of the newest ``MAX_FILES`` runs are kept, and for each of
them those of the ``MAX_FAILED`` ranks that failed first: when one of 8,192 ranks fails, all of them
do.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from contextlib import suppress
from typing import Any

from mindresume import runtime
from mindresume.events import (
    FAILED,
    CandidateRefused,
    Emit,
    Event,
    GaveUp,
    Notice,
    SaveBegun,
    SaveCommitted,
    SaveFailed,
    SaveStaged,
    SaveWritten,
    SupervisorEnded,
    TrainingEnded,
    WorkProgress,
    ignore,
    warning,
)

FOLDER = "mindresume_events"
SUFFIX = ".jsonl"
LEDGER = ".steps"  # of the step ledger of a run
MAX_LEDGERS = 20
# bytes of all events of a file; failures and the end may use as much again
LIMIT = 16 << 20
MAX_FILES = 200  # files of rank 0 in one folder
MAX_FAILED = 8  # files of other ranks per file of rank 0: those that failed first
KEPT = 200  # newest events that a rank without a file keeps in memory
TEXT_LIMIT = 2000  # characters of a string in an event
# events of one kind in a file; further ones are thinned out as the file fills
OFTEN = 1000
# least number of seconds between two warnings that the file cannot be written
WARN_EVERY = 600.0


class EventFile:
    """Writes events to a file. Creates it with the first event of rank 0, or with the failure of
    another rank.

    Args:
        folder: the output folder of the training.
        rank: of this process.
        emit: receives a warning when the file cannot be written, and a line when it is written
            again. It may pass both on to this handler.
    """

    _writer = "rank"  # in the name of the file
    _has_failure = False  # this rank needs a file

    def __init__(self, folder: str, rank: int, emit: Emit = ignore):
        self.folder = os.path.join(folder, FOLDER)
        self.rank = rank
        self.emit = emit
        self.path: str | None = None
        self._file = -1
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        # the last write failed: the file may end with part of a line
        self._is_torn = False
        # a warning was emitted since the last write that did not fail
        self._is_reported = False
        self._last_warning: float | None = None
        self._is_closed = False
        self._thinning = _Thinning()
        # reentrant: a signal handler can interrupt the thread that holds it
        self._lock = runtime.RLock()

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, WorkProgress):  # only useful while the work runs
            return
        line = _line(event, time_s, self.rank)
        with self._lock:
            if self._is_closed:
                return
            notice = None
            if self._thinning.begins():
                notice = warning(
                    f"the event file {self.path} is half full: of events that occur often, such as "
                    "saves at each step, only a part is recorded from here on. All others are"
                )
            try:
                if self._append(event, line, time_s) and self._is_reported:
                    self._is_reported = False
                    notice = Notice(f"the event file {self.path} is written again")
            except OSError as error:
                notice = self._failed(error, time_s) or notice
        # without the lock: another handler can wait for a lock of its own
        if notice is not None:
            self.emit(notice)

    def _append(self, event: Event, line: bytes, time_s: float) -> bool:
        """Writes an event. Returns False if it is only kept in memory, or left out because of the
        limit."""
        if self._file < 0:
            self._kept.append(line)
            self._has_failure = self._has_failure or _is_failure(event)
            if self.rank and not self._has_failure:
                return False
            self._open(time_s)
            line = b"".join(self._kept)
            self._kept.clear()
        if self._thinning.leaves_out(event):
            return False
        if self._is_torn:
            line = b"\n" + line
        if self._thinning.size + len(line) > LIMIT * (2 if _says_more(event) else 1):
            return False
        self._is_torn = True  # until all of it is written
        done = os.write(self._file, line)
        self._thinning.size += done
        if done < len(line):
            raise OSError(f"{done} of {len(line)} bytes written")
        self._is_torn = False
        return True

    def _failed(self, error: OSError, time_s: float) -> Notice | None:
        """Returns a warning, but no second one until the file is written again, and none within
        WARN_EVERY: a disk that is almost full can fail every other write."""
        if (
            self._is_reported
            or self._last_warning is not None
            and abs(time_s - self._last_warning) < WARN_EVERY
        ):
            return None
        self._is_reported, self._last_warning = True, time_s
        return warning(
            f"the event file {self.path or self.folder} cannot be written, so events are missing "
            f"in it: {error}; each later event is tried"
        )

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file, self._is_closed = -1, True

    def _open(self, time_s: float) -> None:
        os.makedirs(self.folder, exist_ok=True)
        if self.rank == 0:
            _remove_oldest(self.folder)
        self.path = file_of_run(self.folder, f"{self._writer}_{self.rank}", SUFFIX, time_s)
        self._file = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )


class _Thinning:
    """Decides which events of a file are left out because their kind occurs often and the file
    fills. ``size``: of the file."""

    def __init__(self) -> None:
        self.size = 0
        self._counts: Counter[str] = Counter()  # events of each kind so far
        # steps of the newest saves that are not recorded
        self._saves_left_out: deque[int] = deque(maxlen=KEPT)
        self._has_begun = False

    def begins(self) -> bool:
        """Returns True once: when events begin to be left out."""
        if self._has_begun or self._stride() == 1 or max(self._counts.values(), default=0) <= OFTEN:
            return False
        self._has_begun = True
        return True

    def leaves_out(self, event: Event) -> bool:
        """Counts an event, and returns whether it is left out. Of a save the first one decides:
        else a report would take it for one that was never committed."""
        self._counts[event.kind] += 1
        if isinstance(event, (SaveStaged, SaveWritten, SaveCommitted)):
            return event.step in self._saves_left_out
        number = self._counts[event.kind]
        is_left_out = number > OFTEN and number % self._stride() != 0 and not _says_more(event)
        if is_left_out and isinstance(event, SaveBegun):
            self._saves_left_out.append(event.step)
        return is_left_out

    def _stride(self) -> int:
        """Returns of how many events that occur often one is written: 1, 4, 16 ... as each half of
        what is left is full. So each half holds twice as many steps as the one before it, and the
        file is never full of them."""
        left = max(LIMIT - self.size, 1)
        return 4 ** (max(LIMIT // left, 1).bit_length() - 1)


class SupervisorEventFile(EventFile):
    """Writes the events of the supervisor of a node; all of them, from the first one on. ``rank``:
    the number of the node."""

    _writer = "supervisor"
    _has_failure = True


def file_of_run(folder: str, writer: str, suffix: str, time_s: float) -> str:
    """Returns the path of a file that this process writes about its run; ``time_s``: its begin,
    seconds since 1970."""
    second = runtime.strftime("%Y%m%dT%H%M%S", runtime.gmtime(time_s))
    start = f"{second}.{int(time_s % 1 * 1000):03d}"
    return os.path.join(folder, f"{start}-{writer}-{os.getpid()}{suffix}")


def _line(event: Event, time_s: float, rank: int) -> bytes:
    # that of the writer would be taken for that of the event, which is not known
    own = {} if getattr(event, "rank", rank) is None else {"rank": rank}
    values = with_short_texts({"time": round(time_s, 3), **own, **event.to_json()})
    return json.dumps(values, allow_nan=False).encode("ascii") + b"\n"


def with_short_texts(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of an event with at most TEXT_LIMIT characters of each text."""
    return {
        name: value[:TEXT_LIMIT] if isinstance(value, str) else value
        for name, value in values.items()
    }


def _is_failure(event: Event) -> bool:
    return (
        isinstance(event, SaveFailed)
        or isinstance(event, TrainingEnded)
        and event.outcome == FAILED
    )


def _says_more(event: Event) -> bool:
    """Returns whether an event is written beyond the limit of the file."""
    return isinstance(event, (SaveFailed, TrainingEnded, CandidateRefused, GaveUp, SupervisorEnded))


def _remove_oldest(folder: str) -> None:
    """Removes the event files that are too many. Names begin with the time of the first event, so
    they sort by run, and by the time of the failure for the ranks of a run."""
    with suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
        # the file of a supervisor has the events of many runs
        supervisors = [name for name in names if "-supervisor_" in name]
        # for each run: the file of rank 0, then those of other ranks
        runs: list[list[str]] = [[]]
        for name in names:
            if "-rank_0-" in name:
                runs.append([])
            if "-supervisor_" not in name:
                runs[-1].append(name)
        oldest = max(len(runs) - MAX_FILES + 1, 0)  # one run is about to begin
        for name in supervisors[:-MAX_FILES]:
            os.remove(os.path.join(folder, name))
        for index, run in enumerate(runs):
            for name in run[0 if index < oldest else 1 + MAX_FAILED :]:
                os.remove(os.path.join(folder, name))
        ledgers = sorted(name for name in os.listdir(folder) if name.endswith(LEDGER))
        for name in ledgers[: -MAX_LEDGERS + 1]:
            os.remove(os.path.join(folder, name))
