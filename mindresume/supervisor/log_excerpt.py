"""Finds the lines of a rank's log that say why it ended: for people, never for a decision."""
from __future__ import annotations

import os
import re
from collections.abc import Sequence

TAIL_BYTES = 1 << 18            # of the end of a log
MAX_LINES = 12
PATIENCE = 10.0                 # seconds for the disk of a log to answer: it can hang, and the job is to be ended all the same
_MAX_CHARACTERS = 2000          # of a line: messages end with what to do
_ERROR = re.compile(r"error|exception|traceback|critical|fatal|abort|killed|out of memory|oom|refused|failed|signal \d", re.I)
_NAMED = re.compile(r"^\s*[\w.]*(Error|Exception|Interrupt|Exit)\b(?! ignored in).*")       # the last line of a traceback
# Lines of tracebacks, and of the call stacks that MindSpore appends to a message: rulers, headings, frames.
_NOISE = re.compile(r"^\s*(File \"|~*\^+|[\W_]+$|- (C\+\+ Call Stack|The Traceback of Net)|# \d+ In file "
                    r"|[\w/.]+\.(cc|cpp|h):\d+ )")


def excerpt(path: str) -> tuple[str, ...]:
    """Returns up to MAX_LINES lines of the end of a log that look like its error; empty if it has none or cannot be read."""
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
    """Returns the last lines that look like an error: of a traceback its last lines, else those with a word for an error."""
    named = [index for index, line in enumerate(lines) if _NAMED.match(line)]
    if named:
        begin = max((index for index, line in enumerate(lines[:named[-1]]) if line.startswith("Traceback")), default=named[-1])
        after = _told(lines[named[-1]:])[:MAX_LINES]
        before = _told(lines[max(begin, named[-1] - MAX_LINES):named[-1]])
        found = [*before[:MAX_LINES - len(after)], *after]
    else:
        found = [line for line in lines if _ERROR.search(line) and not _NOISE.match(line)][-MAX_LINES:]
    return tuple(line.rstrip()[:_MAX_CHARACTERS] for line in found)


def _told(lines: Sequence[str]) -> list[str]:
    """Returns the lines without code and frames."""
    return [line for line in lines if line.strip() and not _NOISE.match(line)
            and (not line[:1].isspace() or _ERROR.search(line) or _NAMED.match(line))]
