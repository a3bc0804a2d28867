"""Makes the texts of the report in English and Chinese. A Phrase is its English text, and carries
what its Chinese text needs, so that the page can switch between both; everything else takes it as a
string.

texts.json holds every fixed text: {key: [English, Chinese]}. ``{name}`` is replaced by an argument;
"one form|other form" depends on the argument ``count``. Names of files, settings and commands are
the same in both languages. Texts of logs and event files are not there: the page shows them as
logged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindresume.formatting import shown, span_text, stall_text

TEXTS: dict[str, tuple[str, str]] = json.loads(
    (Path(__file__).parent / "texts.json").read_text(encoding="utf-8")
)
ENGLISH, CHINESE = 0, 1
LANGUAGES = {"en": ENGLISH, "zh": CHINESE}  # a column of TEXTS for each language of the page
_PLACE = re.compile(r"\{(\w+)\}")


class Phrase(str):
    """Holds a fixed text of the report: the English one as its value, its key in TEXTS, and its
    arguments by name."""

    key: str
    arguments: dict[str, Any]


def phrase(key: str, /, **arguments: Any) -> Phrase:
    """Returns a text of the table TEXTS.

    Args:
        key: of the text.
        arguments: what replaces ``{name}`` in it: strings and numbers as they are, phrases in the
            language of the text. If the text has two forms ("{count} step|{count} steps"), the
            first is taken if ``count`` is 1.
    """
    text = Phrase(text_of(key, arguments, ENGLISH))
    text.key, text.arguments = key, arguments
    return text


def text_of(key: str, arguments: dict[str, Any], language: int) -> str:
    """Returns a text in one language; page.js does the same in the browser."""
    forms = TEXTS[key][language].split("|")
    text = forms[0] if arguments.get("count") == 1 else forms[-1]
    return _PLACE.sub(lambda place: in_language(arguments[place[1]], language), text)


def in_language(value: Any, language: int) -> str:
    """Returns a phrase in one language, and anything else as text."""
    return (
        text_of(value.key, value.arguments, language) if isinstance(value, Phrase) else str(value)
    )


def joined(parts: Iterable[Any], by: str = "comma") -> Any:
    """Returns the parts that are not empty as one phrase, with the separator ``join.BY`` between
    them; "" without parts."""
    text: Any = ""
    for part in parts:
        if part:
            text = phrase(f"join.{by}", first=text, second=part) if text else part
    return text


def counted(what: str, count: int) -> Phrase:
    """Returns "1 step" or "3 steps"; ``what``: a key ``count.WHAT`` of TEXTS."""
    return phrase(f"count.{what}", count=count)


def duration(seconds: float) -> Phrase:
    """Returns a duration, as ``span_text`` writes it in English."""
    return _duration(span_text(seconds))


def stall_duration(seconds: float) -> Phrase:
    """Returns how long a save stops the training, as ``stall_text`` writes it in English."""
    return _duration(stall_text(seconds))


def _duration(text: str) -> Phrase:
    first, unit, *second = text.split()
    return phrase(f"span.{unit}", first=first, second=second[0] if second else "")


def as_json(value: Any) -> Any:
    """Returns a phrase as [key, arguments] for page.js, in which hidden characters of texts are
    shown; a number unchanged."""
    if isinstance(value, Phrase):
        return [value.key, {name: as_json(inner) for name, inner in value.arguments.items()}]
    return shown(value, keep="\n") if isinstance(value, str) else value
