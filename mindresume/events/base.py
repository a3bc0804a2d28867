"""Defines what all events have, and what several lines of the log share."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from mindresume.errors import ConfigError, RecordError
from mindresume.typed import Limits, decode, json_value

INFO = "info"
WARNING = "warning"
ERROR = "error"
DISK, MEMORY = "disk", "memory"
FINISHED = "finished"
PREEMPTED = "preempted"
NOTHING_TO_TRAIN = "nothing_to_train"
FAILED = "failed"

Measure = Annotated[float, Limits(0, 1e18)]  # of time, or a scale

_KINDS: dict[str, type[Event]] = {}
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True)
class Event:
    """Base class of all events. ``kind``: the class name in snake_case, which names the event in
    the event file. ``log_level``: of its line in the log: INFO, WARNING or ERROR. ``template``: the
    line, with names of fields; empty: there is none."""

    kind: ClassVar[str] = ""
    log_level: ClassVar[str] = INFO
    template: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.kind = _WORD.sub("_", cls.__name__).lower()
        _KINDS[cls.kind] = cls

    def line(self) -> str:
        """Returns the line in the log; empty: there is none. No program reads it."""
        return self.template.format_map(vars(self))

    def to_json(self) -> dict[str, Any]:
        """Returns {"event": kind, field: value, ...} without fields that are None. NaN and
        infinity, which JSON does not have, become None."""
        values = {field.name: json_value(getattr(self, field.name)) for field in fields(self)}
        return {
            "event": self.kind,
            **{name: value for name, value in values.items() if value is not None},
        }


Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Discards an event: an emitter for callers that need none."""


def event_from_json(value: Mapping[str, Any]) -> Event | None:
    """Returns the event that ``value`` describes; ignores unknown fields. Returns None for an
    unknown kind, and if a field without default is missing, or a value has the wrong type or is not
    allowed."""
    known = _KINDS.get(value["event"]) if isinstance(value.get("event"), str) else None
    if known is None:
        return None
    try:
        return decode(
            known, {name: found for name, found in value.items() if found is not None}, known.kind
        )
    except (ConfigError, RecordError):
        return None


def numbers_text(noun: str, numbers: Iterable[int]) -> str:
    """Returns for example ``rank 3`` or ``ranks 3, 5``."""
    names = list(map(str, numbers))
    return f"{noun}{'' if len(names) == 1 else 's'} {', '.join(names)}"


def end_text(status: int | None) -> str:
    """Returns how a process ended. ``status``: negative for a signal, None if it is not known."""
    if status is None:
        return "ended, its status is not known"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
