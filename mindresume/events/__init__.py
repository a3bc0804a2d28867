"""Defines the events of a run as small frozen values. Code that acts emits an event; handlers turn
it into a line of the log, TensorBoard scalars, and a line of the event file (``event_file``). The
text of the log is a template or a method of its event.

    emit(SaveCommitted(step=500, ranks=8, size_bytes=1 << 30))

    saving, resume, reshard ─▶ emit ─▶ Emitter ─▶ log line, event file, TensorBoard
    event file ─▶ ``event_from_json`` ─▶ report

No part of mindresume parses the text in an event: ``reason`` and ``text`` are for people alone.
Sizes are in bytes, durations in seconds. Every field is a JSON value or a tuple of them, so an
event can be sent to another process and written to a file.
"""

from mindresume.events.base import *  # noqa: F403
from mindresume.events.run import *  # noqa: F403
from mindresume.events.saves import *  # noqa: F403
from mindresume.events.supervision import *  # noqa: F403
