"""Makes the data of the interactive charts of the page (page.js): curves, marks and the timeline, as one JSON value.

The page stays small: curves are thinned to the smallest and the largest loss of each interval, marks and attempts are limited,
and the data says how many were left out. Times are seconds since the first start; texts of marks are phrases.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindresume.events import DISK, FAILED, MEMORY
from mindresume.formatting import shortened, size_text, span_text
from mindresume.report.accounting import AttemptAccount
from mindresume.report.advice_text import stop_text
from mindresume.report.builder import Report
from mindresume.report.chart import kept_curve, loss_at, spread
from mindresume.report.losses import thinned
from mindresume.report.phrases import as_json, phrase
from mindresume.report.runs import RunAttempt
from mindresume.report.tables import moment, phase_class, phase_name, reason_of

POINTS = 6000                   # most points of the kept curve, and most of all lost parts
PARTS = 500                     # most lost parts: the last ones
ATTEMPTS = 2000                 # most attempts: the last ones
REASON = 300                    # most characters of a reason


def chart_data(report: Report) -> dict[str, Any] | None:
    """Returns the data; None if there is no attempt. Losses that are not finite are None."""
    if not report.accounts:
        return None
    rows = report.accounts[-ATTEMPTS:]
    origin = report.attempts[0].started
    curves = [*_kept(rows, origin), *_lost(rows, origin)]
    marks, saves = _marks(rows, origin)
    numbers = {row.attempt.number for row in rows}
    return {
        "curves": curves, "marks": marks,
        "areas": [[max(row.kept, row.attempt.base_step), row.attempt.last_step] for row in rows if row.steps_lost],
        "spans": [[span.kind, row.attempt.number, _since(span.begin, origin), _since(span.end, origin)]
                  for row in rows for span in row.timeline],
        "phases": [[phase_class(phase.names), recovery.failed, _since(phase.begin, origin), _since(phase.end, origin),
                    as_json(phase_name(phase.names)), span_text(phase.seconds)]
                   for recovery in report.recoveries if recovery.failed in numbers for phase in recovery.phases],
        "length": _since(max(span.end for row in report.accounts for span in row.timeline), origin)
        if any(row.timeline for row in report.accounts) else 0,
        "losses": {"shown": sum(len(curve["steps"]) for curve in curves),
                   "total": sum(len(account.attempt.losses) for account in report.accounts)},
        "saves": saves, "attempts": {"shown": len(rows), "total": len(report.accounts)},
    }


# ---- curves ----------------------------------------------------------------------------------------------------------

def _kept(rows: Sequence[AttemptAccount], origin: float) -> list[dict[str, Any]]:
    """Returns the losses that the training contains, a curve for each attempt, thinned together."""
    counts = [int(np.searchsorted(row.attempt.losses.steps, row.kept, side="right")) for row in rows]
    if not sum(counts):
        return []
    values = np.concatenate([row.attempt.losses.values[:count] for row, count in zip(rows, counts, strict=True)])
    kept, begin, found = thinned(values, POINTS), 0, []
    for row, count in zip(rows, counts, strict=True):
        own = kept[(kept >= begin) & (kept < begin + count)] - begin
        begin += count
        if len(own):
            found.append(_curve("kept", row.attempt, own, origin))
    return found


def _lost(rows: Sequence[AttemptAccount], origin: float) -> list[dict[str, Any]]:
    """Returns the lost losses, a curve for each attempt."""
    parts = [(row.attempt, int(np.searchsorted(row.attempt.losses.steps, row.kept, side="right"))) for row in rows
             if row.steps_lost and len(row.attempt.losses)][-PARTS:]
    most = max(POINTS // max(len(parts), 1), 4)
    return [_curve("lost", attempt, first + thinned(attempt.losses.values[first:], most), origin) for attempt, first in parts
            if first < len(attempt.losses)]


def _curve(kind: str, attempt: RunAttempt, kept: np.ndarray, origin: float) -> dict[str, Any]:
    losses = attempt.losses
    return {"kind": kind, "attempt": attempt.number, "steps": [int(step) for step in losses.steps[kept]],
            "values": [float(f"{value:.7g}") for value in losses.values[kept]],
            "times": [seconds if (seconds := _since(at, origin)) < 1e5 else round(seconds) for at in losses.times[kept]]}


def _since(at: float, origin: float) -> float:
    """Returns a time in seconds since ``origin``, with milliseconds: the page shows how long something took."""
    return round(float(at) - origin, 3)


# ---- marks -----------------------------------------------------------------------------------------------------------

def _marks(rows: Sequence[AttemptAccount], origin: float) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Returns the marks (kind, step, seconds since the first start, loss at which they are drawn, text), and how many saves they
    are and there were. A save has no loss: it is drawn at the bottom. A failure before the first step has no step."""
    steps, values = kept_curve(rows)
    found, shown, total = [], 0, 0

    def mark(kind: str, step: int | None, at: float | None, loss: float | None, text: Any) -> None:
        found.append({"kind": kind, "step": step, "at": None if at is None else _since(at, origin), "loss": loss,
                      "text": as_json(text)})
    staged = [(row, save) for row in rows for save in row.attempt.saves if save.is_staged]
    copies = [(row, save) for row in rows for save in row.attempt.memory_saves]
    for kind, group in (("committed", [pair for pair in staged if pair[1].is_committed]),
                        ("staged", [pair for pair in staged if not pair[1].is_committed]), ("memory", copies)):
        kept = spread(group, lambda pair: pair[1].step)
        shown, total = shown + len(kept), total + len(group)
        for row, save in kept:
            if kind == "memory":
                mark(kind, save.step, None, None, phrase(
                    "tip.memory", step=save.step, attempt=row.attempt.number, size=size_text(save.size_bytes),
                    stall=stop_text(save.stall_seconds)))
            else:
                mark(kind, save.step, save.time, None, phrase(
                    "tip.save", step=save.step, at=moment(save.time), state=phrase(f"tip.{kind}"),
                    size=size_text(save.size_bytes), stall=stop_text(save.stall_seconds), write=_span(save.write_seconds)))
    for row in rows:
        attempt = row.attempt
        if attempt.base_step and attempt.last_step is not None:
            source = attempt.resumed_source if attempt.resumed_source in (DISK, MEMORY) else "unknown"
            mark("resumed", attempt.base_step, None, loss_at(attempt.base_step, steps, values), phrase(
                "tip.resumed", attempt=attempt.number, step=attempt.base_step, at=moment(attempt.started),
                source=phrase(f"source.{source}"), load=_span(attempt.load_seconds)))
        if attempt.outcome == FAILED:
            known = {"attempt": attempt.number, "at": moment(attempt.ended), "reason": shortened(reason_of(attempt), REASON)}
            if attempt.last_step is None:
                mark("failed", None, attempt.ended, None, phrase("tip.failed_early", **known))
            else:
                loss = loss_at(attempt.last_step, attempt.losses.steps, attempt.losses.values)
                mark("failed", attempt.last_step, attempt.ended, loss, phrase("tip.failed", step=attempt.last_step, **known))
            found[-1]["attempt"] = attempt.number
    return found, {"shown": shown, "total": total}


def _span(seconds: float | None) -> str:
    return "?" if seconds is None else span_text(seconds)
