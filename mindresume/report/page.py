"""Renders the report as one HTML page, which loads nothing from a network, and makes the data of
its charts: the loss over steps, and the timeline.

    page.html                  the template
    page.css, plot.js, page.js are written into the page
    tables.py                  the cells
    texts.json, phrases.py     its texts in both languages

Everything from a log, an event file or a name is escaped. The Content-Security-Policy of the page
lets a browser run only the script and apply only the style with the hashes that it names, so that
nothing that got into the page would run.

The page stays small: curves are thinned to the smallest and the largest loss of each interval,
marks and attempts are limited, and the data says how many were left out. Times are seconds since
the first start; texts of marks are phrases.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindresume.events import DISK, FAILED, MEMORY
from mindresume.formatting import shortened, shown, size_text
from mindresume.report import tables
from mindresume.report.accounting import AttemptAccount
from mindresume.report.advice import advice_of, sentence_of
from mindresume.report.builder import Report, defect_of, looked_for
from mindresume.report.phrases import (
    LANGUAGES,
    TEXTS,
    Phrase,
    as_json,
    counted,
    duration,
    phrase,
    stall_duration,
)
from mindresume.report.runs import RunAttempt
from mindresume.report.tables import REASON, moment, phase_class, phase_name, reason_of
from mindresume.typed import json_value

FOLDER = Path(__file__).parent
TEMPLATE = "page.html"
SCRIPTS = ("plot.js", "page.js")  # one script of the page, in this order
SCRIPT = "".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
STYLE = (FOLDER / "page.css").read_text(encoding="utf-8")


def html(report: Report) -> str:
    """Returns the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def printed(value: Any) -> Any:
        """Escapes hidden characters of names and texts. A phrase carries itself, for the script.
        Markup is printed as it is."""
        if isinstance(value, Phrase):
            return Markup('<span data-t="{}">{}</span>').format(marked(value), plain(value))
        return value if isinstance(value, Markup) else plain(value)

    def plain(value: Any) -> str:
        return str.__str__(shown(value, keep="\n"))

    def marked(value: Phrase) -> str:
        return json.dumps(as_json(value), ensure_ascii=False, separators=(",", ":"))

    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        finalize=printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "span": duration,
        "moment": tables.moment,
        "size": size_text,
        "number": tables.number_text,
        "percent": tables.percent,
        "shortened": lambda text: shortened(text, tables.REASON),
        "marked": marked,
        "in_attribute": lambda value: Markup.escape(plain(value)),
    }
    environment.globals |= {
        "t": phrase,
        "counted": counted,
        "tables": tables,
        "defect_of": defect_of,
    }
    data = {
        "texts": {
            name: {key: forms[column] for key, forms in TEXTS.items()}
            for name, column in LANGUAGES.items()
        },
        "chart": chart_data(report),
    }
    advice = advice_of(report)
    return environment.get_template(TEMPLATE).render(
        report=report,
        title=phrase("title.of", output=report.output),
        policy=policy(),
        css=Markup(STYLE),
        js=Markup(SCRIPT),
        data=Markup(json_block(data)),
        looked_for=looked_for(report),
        advice=sentence_of(advice) if advice else "",
    )


def policy() -> str:
    """Returns the Content-Security-Policy of the page: nothing is loaded, only its own style and
    script are used, and no text can become markup (trusted types)."""
    script, style = (
        "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (SCRIPT, STYLE)
    )
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; "
        f"form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def json_block(value: Any) -> str:
    """Returns ``value`` as JSON for a script element, in ASCII: numbers that are not finite are
    null, and nothing can end the element or begin a comment in it."""
    text = json.dumps(json_value(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---- the data of the charts ----------------------------------------------------------------------


POINTS = 6000  # most points of the kept curve, and most of all lost parts
PARTS = 500  # most lost parts: the last ones
ATTEMPTS = 2000  # most attempts: the last ones
MARKS = 1500  # most marks of one kind of save
Pair = tuple[RunAttempt, Any]  # with its save
Mark = tuple[str, RunAttempt, int | None, float | None, float | None, Phrase]


def chart_data(report: Report) -> dict[str, Any] | None:
    """Returns the data; None if there is no attempt. A mark has a kind, the step and the time where
    it lies, the loss at which it is drawn, and a text. A save has no loss: it is drawn at the
    bottom. A failure before the first step has no step."""
    if not report.accounts:
        return None
    rows, origin = report.accounts[-ATTEMPTS:], report.accounts[0].attempt.started
    steps = np.concatenate([row.attempt.losses.steps[: row.kept_losses] for row in rows])
    values = np.concatenate([row.attempt.losses.values[: row.kept_losses] for row in rows])
    curves = list(_curves(rows, values, origin))
    saves = _saves(rows)
    shown = [(kind, *pair) for kind, pairs in saves.items() for pair in _spread(pairs)]
    marks = [*(_save_mark(*save) for save in shown), *_attempt_marks(rows, steps, values)]
    return {
        "curves": curves,
        "marks": [
            {
                "kind": kind,
                "attempt": attempt.number,
                "step": step,
                "at": None if at is None else _since(at, origin),
                "loss": loss,
                "text": as_json(text),
            }
            for kind, attempt, step, at, loss, text in marks
        ],
        "areas": [
            [max(row.kept, row.attempt.origin.base_step), row.attempt.last_step]
            for row in rows
            if row.steps_lost
        ],
        "spans": [
            [span.kind, row.attempt.number, _since(span.begin, origin), _since(span.end, origin)]
            for row in rows
            for span in row.timeline
        ],
        "phases": [
            [
                phase_class(phase.names),
                recovery.failed,
                _since(phase.begin, origin),
                _since(phase.end, origin),
                as_json(phase_name(phase.names)),
                as_json(duration(phase.seconds)),
            ]
            for recovery in report.recoveries
            if recovery.failed >= rows[0].attempt.number
            for phase in recovery.phases
        ],
        "length": _since(
            max((span.end for row in report.accounts for span in row.timeline), default=origin),
            origin,
        ),
        "losses": {
            "shown": sum(len(curve["steps"]) for curve in curves),
            "total": sum(len(row.attempt.losses) for row in report.accounts),
        },
        "saves": {"shown": len(shown), "total": sum(map(len, saves.values()))},
        "attempts": {"shown": len(rows), "total": len(report.accounts)},
    }


# ---- curves --------------------------------------------------------------------------------------


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Returns ascending indices of at most ``most`` (at least 4) values: the first, the last, and
    the smallest and largest of each interval, so that no peak is lost. Values that are not finite
    are no extremes; an interval without finite values keeps its first."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(count), (most - 2) // 2):
        finite = stretch[np.isfinite(values[stretch])]
        kept |= (
            {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
            if len(finite)
            else {int(stretch[0])}
        )
    return np.array(sorted(kept))


def _curves(
    rows: Sequence[AttemptAccount], values: np.ndarray, origin: float
) -> Iterator[dict[str, Any]]:
    """Yields the losses that the training contains, a curve for each attempt, thinned together;
    then the lost losses. ``values``: all that it contains."""
    shown, begin = thinned(values, POINTS), 0
    for row in rows:
        end = begin + row.kept_losses
        own = shown[(shown >= begin) & (shown < end)] - begin
        begin = end
        if len(own):
            yield _curve("kept", row.attempt, own, origin)
    parts = [row for row in rows if row.steps_lost and row.kept_losses < len(row.attempt.losses)]
    parts = parts[-PARTS:]
    for row in parts:
        lost = thinned(row.attempt.losses.values[row.kept_losses :], max(POINTS // len(parts), 4))
        yield _curve("lost", row.attempt, row.kept_losses + lost, origin)


def _curve(kind: str, attempt: RunAttempt, shown: np.ndarray, origin: float) -> dict[str, Any]:
    losses = attempt.losses
    return {
        "kind": kind,
        "attempt": attempt.number,
        "steps": losses.steps[shown].tolist(),
        "values": [float(f"{value:.7g}") for value in losses.values[shown]],
        "times": [_since(at, origin) for at in losses.times[shown]],
    }


def _since(at: float, origin: float) -> float:
    """Returns a time in seconds since ``origin``, with milliseconds: the page shows how long
    something took."""
    return round(float(at) - origin, 3)


# ---- marks ---------------------------------------------------------------------------------------


def _saves(rows: Sequence[AttemptAccount]) -> dict[str, list[Pair]]:
    """Returns the saves of each kind, with their attempts."""
    saves: dict[str, list[Pair]] = {"committed": [], "staged": [], "memory": []}
    for attempt in (row.attempt for row in rows):
        for save in attempt.saves.disk:
            if save.is_staged:
                saves["committed" if save.is_committed else "staged"].append((attempt, save))
        saves["memory"] += [(attempt, save) for save in attempt.saves.memory]
    return saves


def _spread(pairs: list[Pair]) -> list[Pair]:
    """Returns at most MARKS of the saves, evenly spread, with the newest one."""
    every = max(math.ceil(len(pairs) / MARKS), 1)
    return pairs[::-every][::-1]


def _save_mark(kind: str, attempt: RunAttempt, save: Any) -> Mark:
    size, stall = size_text(save.size_bytes), stall_duration(save.stall_seconds)
    if kind == "memory":
        text = phrase("tip.memory", step=save.step, attempt=attempt.number, size=size, stall=stall)
        return kind, attempt, save.step, None, None, text
    text = phrase(
        "tip.save",
        step=save.step,
        at=moment(save.time),
        state=phrase(f"tip.{kind}"),
        size=size,
        stall=stall,
        write=_span(save.write_seconds),
    )
    return kind, attempt, save.step, save.time, None, text


def _attempt_marks(
    rows: Sequence[AttemptAccount], steps: np.ndarray, values: np.ndarray
) -> Iterator[Mark]:
    """Yields the resumes and failures. ``steps``, ``values``: of the kept curve, on which the
    resumes lie."""
    for attempt in (row.attempt for row in rows):
        base = attempt.origin.base_step
        if base and attempt.last_step is not None:
            source = attempt.origin.source if attempt.origin.source in (DISK, MEMORY) else "unknown"
            yield (
                "resumed",
                attempt,
                base,
                None,
                _loss_at(base, steps, values),
                phrase(
                    "tip.resumed",
                    attempt=attempt.number,
                    step=base,
                    at=moment(attempt.started),
                    source=phrase(f"source.{source}"),
                    load=_span(attempt.origin.load_seconds),
                ),
            )
        if attempt.outcome == FAILED:
            loss = attempt.last_step and _loss_at(
                attempt.last_step, attempt.losses.steps, attempt.losses.values
            )
            yield (
                "failed",
                attempt,
                attempt.last_step,
                attempt.ended,
                loss,
                phrase(
                    "tip.failed_early" if attempt.last_step is None else "tip.failed",
                    attempt=attempt.number,
                    step=attempt.last_step,
                    at=moment(attempt.ended),
                    reason=shortened(reason_of(attempt), REASON),
                ),
            )


def _loss_at(step: int, steps: np.ndarray, values: np.ndarray) -> float | None:
    """Returns the loss at a step, or at the nearest step that has one; None if no step has one."""
    finite = np.flatnonzero(np.isfinite(values))
    return float(values[finite][np.abs(steps[finite] - step).argmin()]) if len(finite) else None


def _span(seconds: float | None) -> str:
    return "?" if seconds is None else duration(seconds)
