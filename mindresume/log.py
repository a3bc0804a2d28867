"""What says lines to people: a ``logging.Logger``, or anything with these three methods of it."""
from __future__ import annotations

from typing import Any, Protocol


class Log(Protocol):
    """``text % values`` is the line."""

    def info(self, text: str, *values: Any) -> None: ...

    def warning(self, text: str, *values: Any) -> None: ...

    def error(self, text: str, *values: Any) -> None: ...
