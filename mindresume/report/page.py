"""Renders the report as one HTML page, which loads nothing from a network.

    page.html the template: tables, the static figure     page.css, plot.js, page.js are written
    into the page tables.py the cells     chart.py the data of the interactive charts
    texts.json, phrases.py its texts in both languages

Everything from a log, an event file or a name is escaped. The Content-Security-Policy of the page
lets a browser run only the script and apply only the style with the hashes that it names, so that
nothing that got into the page would run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from mindresume.events import FAILED
from mindresume.formatting import shortened, shown, size_text, span_text
from mindresume.report import tables
from mindresume.report.advice import advice_of, sentence_of
from mindresume.report.builder import Report, looked_for
from mindresume.report.chart import chart_data
from mindresume.report.phrases import LANGUAGES, TEXTS, Phrase, as_json, counted, joined, phrase
from mindresume.report.tables import number_text, recovery_summary, summary
from mindresume.resume.candidates import COMPLETE, NODE_LOCAL
from mindresume.typed import json_value

TEMPLATE = "page.html"
SCRIPTS = ("plot.js", "page.js")  # one script of the page, in this order
SHOWN = 2000  # most rows of a table; the JSON document has all
REASON = 400  # most characters of a reason
NAMED = 20  # most failures in the text alternative of the figure


class PhraseTable:
    """Numbers the phrases of one page. An element with a phrase has its number as ``data-t``, and
    page.js finds it here."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Phrase) -> int:
        """Returns the number of a phrase; equal ones have the same."""
        row = as_json(value)
        number = self._numbers.setdefault(json.dumps(row), len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        return number


def html(report: Report, figure: str) -> str:
    """Returns the page. ``figure``: SVG, inserted unchanged; empty if there is nothing to draw."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    phrases = PhraseTable()

    def printed(value: Any) -> Any:
        """Escapes hidden characters of names and texts, and marks a phrase with its number. Markup
        is printed as it is."""
        if isinstance(value, Phrase):
            return Markup('<span data-t="{}">{}</span>').format(phrases.number(value), plain(value))
        return value if isinstance(value, Markup) else plain(value)

    def plain(value: Any) -> str:
        return str.__str__(shown(value, keep="\n"))

    def data() -> Markup:
        """Returns the data block. The template calls it last, when all phrases have their
        numbers."""
        return Markup(
            json_block(
                {
                    "texts": {
                        name: {key: forms[column] for key, forms in TEXTS.items()}
                        for name, column in LANGUAGES.items()
                    },
                    "phrases": phrases.rows,
                    "title": as_json(title),
                    "chart": chart_data(report) if figure else None,
                }
            )
        )

    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        finalize=printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "span": span_text,
        "moment": tables.moment,
        "size": size_text,
        "number": number_text,
        "shortened": lambda text: shortened(text, REASON),
        "phrase_number": phrases.number,
        "in_attribute": lambda value: Markup.escape(plain(value)),
    }
    environment.globals |= {"t": phrase, "counted": counted}
    advice, title = advice_of(report), phrase("title.of", output=report.output)
    return environment.get_template(TEMPLATE).render(
        report=report,
        title=title,
        policy=policy(),
        css=Markup(style()),
        js=Markup(script()),
        data=data,
        summary=summary(report),
        tiles=tables.tiles(report) if report.accounts else [],
        figure=Markup(_with_text(report, figure)),
        rows=[tables.attempt_row(row) for row in report.accounts[-SHOWN:]],
        shown_rows=SHOWN,
        problems=tables.problems(report.attempts)[:SHOWN],
        spent=tables.spent(report),
        checkpoints=report.disk.checkpoints[:SHOWN],
        usable=(COMPLETE, NODE_LOCAL),
        notes=[*report.notes, *report.disk.notes],
        read=report.read[:SHOWN],
        looked_for=looked_for(report),
        advice=sentence_of(advice) if advice else "",
        recoveries=tables.recovery_rows(report, SHOWN),
        recovered=recovery_summary(report),
        phases=tables.phase_rows(report),
    )


def policy() -> str:
    """Returns the Content-Security-Policy of the page: nothing is loaded, only its own style and
    script are used, and no text can become markup (trusted types)."""
    return (
        f"default-src 'none'; script-src '{_hash(script())}'; style-src '{_hash(style())}'; "
        "base-uri 'none'; "
        f"form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def json_block(value: Any) -> str:
    """Returns ``value`` as JSON for a script element: hidden characters are shown, numbers that are
    not finite are null, and nothing can end the element or begin a comment in it."""
    text = json.dumps(
        _printable(json_value(value)), ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_printable(name): _printable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return shown(value, keep="\n") if isinstance(value, str) else value


@cache
def script() -> str:
    """Returns the script of the page."""
    return "".join(_part(name) for name in SCRIPTS)


@cache
def style() -> str:
    """Returns the style of the page."""
    return _part("page.css")


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _with_text(report: Report, figure: str) -> str:
    """Returns the figure with a text alternative, which has only numbers and words of
    mindresume."""
    from markupsafe import escape

    failed = [
        attempt
        for attempt in report.attempts
        if attempt.outcome == FAILED and attempt.last_step is not None
    ]
    text = phrase(
        "figure.alternative",
        reached=number_text(report.reached),
        summary=summary(report),
        failures=joined(
            [
                phrase("figure.failed", attempt=attempt.number, step=attempt.last_step)
                for attempt in failed[:NAMED]
            ],
            "semicolon",
        ),
    )
    return (
        figure.replace("<svg ", f'<svg role="img" aria-label="{escape(shown(text))}" ', 1)
        if report.accounts
        else ""
    )
