"""What a start leaves for people: its events, and the logs of its ranks.

Events are passed on to what can block, each in a thread of its own: who watches a job waits for
nobody.

    emit.add(BackgroundHandler(handler))        # a terminal or a pipe whose reader stops
    # the event file beside those of the ranks, on a disk that can hang
    emit.add(EventRecorder(emit))

    {output}/mindresume_events/20261123T052200.250-supervisor_0-4711.jsonl
        start (UTC), number of the node, process id

The output folder is known only when a rank has told it by its heartbeat. Until then events are kept
in memory.

    output/msrun_log/worker_3.log ─▶
        output/msrun_log/earlier/20261123T152001-node_0-start_1/worker_3.log

Logs are read for people, never for a decision. msrun writes those of each start over those of the
one before. Only files with a name of msrun to which a rank or the scheduler of that start printed
are moved, and what the launcher writes beside them: of another command it is not known what is a
log, what is appended to, and what belongs to somebody else. A file is renamed, so a process that
still writes it goes on in the same file, and a full disk needs no space for a copy.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from mindresume import runtime
from mindresume.events import Emitter, Event, Handler, warning
from mindresume.events.event_file import FOLDER, SupervisorEventFile

# events that wait for a handler, or for the folder; while more do, the oldest are dropped
KEPT = 1000
# seconds for which a handler, or the disk of a log, which can hang, is waited for
PATIENCE = 10.0
_PATIENCE = 30.0  # the same for the event file


class BackgroundHandler:
    """Passes events on to ``handler`` in a thread. ``handle`` never waits and never fails: while
    the handler hangs, or no thread can be started (the limit of threads), the newest events are
    kept, and tried with the next one. A handler that failed gets no more events.

    Args:
        handler: None: it is set later, and events are kept until then.
        emit: receives a warning if the handler fails.
        kept: events that wait; while more do, the oldest are dropped.
        patience: seconds for which ``close`` waits until the events that are left are handled.
    """

    def __init__(
        self,
        handler: Handler | None,
        emit: Emitter | None = None,
        kept: int = KEPT,
        patience: float = PATIENCE,
    ):
        self._handler = handler
        self._patience = patience
        self._emit = emit
        self._waiting: deque[tuple[Event, float]] = deque(maxlen=kept)
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
        if self._thread is None and self._handler is not None:
            thread = runtime.Thread(target=self._work, name="mindresume-events", daemon=True)
            # the limit of threads: the next event tries again
            with suppress(RuntimeError):
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
            except Exception as error:
                # as the emitter does with a handler that fails
                with self._changed:
                    self._is_off = True
                    self._waiting.clear()
                if self._emit is not None:
                    self._emit(
                        warning(
                            f"the event file of the supervisor is not written any more: {error}"
                        )
                    )

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._start()
        if self._thread is not None:
            self._thread.join(self._patience)


class EventRecorder(BackgroundHandler):
    """Writes events into the event file. ``emit``: receives a warning if that fails. ``node``:
    number of this node."""

    def __init__(self, emit: Emitter, node: int = 0):
        super().__init__(None, emit, patience=_PATIENCE)
        self.node, self._folder = node, ""

    def open(self, folder: str) -> None:
        """Sets the output folder. Only the first call has an effect, so that one file has all
        events."""
        with self._changed:
            if self._handler is None:
                self._folder = os.path.abspath(folder)  # paths in events are read in other folders
                self._handler = SupervisorEventFile(self._folder, self.node, emit=self._emit)
                self._start()

    def evidence(self) -> str | None:
        """Returns the prefix of the paths of files beside the event file; None: the folder is not
        known, or cannot be made. Its disk can hang."""
        if not self._folder:
            return None
        folder = os.path.join(self._folder, FOLDER)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return None
        return os.path.join(folder, f"stacks-{os.getpid()}")


# ---- logs ----------------------------------------------------------------------------------------

TAIL_BYTES = 1 << 18  # of the end of a log
MAX_LINES = 12
_MAX_CHARACTERS = 2000  # of a line: messages end with what to do
_ERROR = re.compile(
    r"error|exception|traceback|critical|fatal|abort|killed|out of "
    r"memory|oom|refused|failed|signal \d",
    re.I,
)
# the last line of a traceback
_NAMED = re.compile(r"^\s*[\w.]*(Error|Exception|Interrupt|Exit)\b(?! ignored in).*")
# Lines of tracebacks, and of the call stacks that MindSpore appends to a message: rulers, headings,
# frames.
_NOISE = re.compile(
    r"^\s*(File \"|~*\^+|[\W_]+$|- (C\+\+ Call Stack|The Traceback of Net)|# \d+ In file "
    r"|[\w/.]+\.(cc|cpp|h):\d+ )"
)
EARLIER = "earlier"
_LAUNCHER = "msrun_stderr.log"  # of scripts/msrun_launcher.sh
_LOG = re.compile(r"(?:.*_)?worker_\d+\.log|scheduler\.log")
_START = re.compile(r"\d{8}T\d{6}-node_(\d+)-start_\d+")


def excerpt(path: str) -> tuple[str, ...]:
    """Returns up to MAX_LINES lines of the end of a log that look like its error; empty if it has
    none or cannot be read."""
    return error_lines(tail(path).splitlines())


def tail(path: str) -> str:
    """Returns the last TAIL_BYTES of a log; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def error_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the last lines that look like an error: of a traceback its last lines, else those
    with a word for an error."""
    named = [index for index, line in enumerate(lines) if _NAMED.match(line)]
    if named:
        begin = max(
            (
                index
                for index, line in enumerate(lines[: named[-1]])
                if line.startswith("Traceback")
            ),
            default=named[-1],
        )
        after = _told(lines[named[-1] :])[:MAX_LINES]
        before = _told(lines[max(begin, named[-1] - MAX_LINES) : named[-1]])
        found = [*before[: MAX_LINES - len(after)], *after]
    else:
        found = [line for line in lines if _ERROR.search(line) and not _NOISE.match(line)][
            -MAX_LINES:
        ]
    return tuple(line.rstrip()[:_MAX_CHARACTERS] for line in found)


def _told(lines: Sequence[str]) -> list[str]:
    """Returns the lines without code and frames."""
    return [
        line
        for line in lines
        if line.strip()
        and not _NOISE.match(line)
        and (not line[:1].isspace() or _ERROR.search(line) or _NAMED.match(line))
    ]


# ---- the logs of earlier starts ------------------------------------------------------------------


def keep_logs(
    paths: Iterable[str], node: int, start: int, started: float, kept: int, is_alone: bool = True
) -> tuple[str, ...]:
    """Moves the logs of a start out of the way of the next one, and removes those of the oldest
    starts of this node.

    Args:
        paths: files to which the processes of that start printed.
        start: its number.
        started: when it began, in seconds since 1970.
        kept: starts whose logs stay.
        is_alone: no other node can write into the same folder.
    Returns:
        The folders in which the logs are now; empty if there are none.
    Raises:
        OSError: A file could not be moved.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(paths) if kept else ():
        folder, name = os.path.split(path)
        if _LOG.fullmatch(name) and os.path.isfile(path):
            found.setdefault(folder, []).append(name)
    targets, failure = [], None
    for folder, names in found.items():
        if is_alone and os.path.isfile(os.path.join(folder, _LAUNCHER)):
            names.append(_LAUNCHER)
        earlier = os.path.join(folder, EARLIER)
        second = runtime.strftime("%Y%m%dT%H%M%S", runtime.gmtime(started))
        target = os.path.join(earlier, f"{second}-node_{node}-start_{start}")
        os.makedirs(target, exist_ok=True)
        for name in names:
            try:
                os.rename(os.path.join(folder, name), os.path.join(target, name))
            except OSError as error:  # the others are moved all the same
                failure = error
        targets.append(target)
        _remove_oldest(earlier, node, kept)
    if failure is not None:
        raise failure
    return tuple(targets)


def _remove_oldest(earlier: str, node: int, kept: int) -> None:
    """Removes the logs of all but the newest ``kept`` starts of a node; files of others stay, and
    so do their folders."""
    mine = sorted(
        name
        for name in os.listdir(earlier)
        if (match := _START.fullmatch(name)) and int(match[1]) == node
    )
    for name in mine[:-kept]:
        folder = os.path.join(earlier, name)
        with suppress(OSError):
            for log in os.listdir(folder):
                if _LOG.fullmatch(log) or log == _LAUNCHER:
                    os.remove(os.path.join(folder, log))
            os.rmdir(folder)
