"""Draws the two charts of a report, the loss over steps and the timeline: as a static figure, and
as data of the page's script.

The figure needs matplotlib, an optional dependency: ``pip install mindresume[report]``. Only
numbers of a log are written into it, and fonts are drawn as outlines, so that it looks the same
everywhere.

``chart_data`` is one JSON value, which page.js draws. The page stays small: curves are thinned to
the smallest and the largest loss of each interval, marks and attempts are limited, and the data
says how many were left out. Times are seconds since the first start; texts of marks are phrases.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mindresume.errors import ConfigError
from mindresume.events import DISK, FAILED, MEMORY
from mindresume.formatting import shortened, size_text, span_text, stall_text
from mindresume.report.accounting import AttemptAccount
from mindresume.report.builder import Report
from mindresume.report.phrases import as_json, phrase
from mindresume.report.runs import RunAttempt
from mindresume.report.tables import moment, phase_class, phase_name, reason_of

T = TypeVar("T")
POINTS = 4000  # most points of all curves: more than there are pixels
MARKS = 1500  # most marks of one kind
NAMED = 12  # most failures with a number; with more, marks are smaller
SQUARES = 60  # most saves drawn as squares; more are drawn as ticks
KEPT, LOST, DEAD, RESUMED, SAVE, IDLE = (
    "#1f5f8b",
    "#f2a65a",
    "#b3261e",
    "#1b7f5c",
    "#4d5b66",
    "#c3ccd4",
)
COLOURS = {
    "startup": IDLE,
    "productive": KEPT,
    "lost": LOST,
    "shutdown": IDLE,
    "unknown": "#e9edf0",
    "downtime": "#ffffff",
    "idle": "#ffffff",
}
UNITS = (
    (2 * 86400, 86400, "days"),
    (2 * 3600, 3600, "hours"),
    (120, 60, "minutes"),
    (0, 1, "seconds"),
)


def check_installed() -> None:
    """Raises ConfigError if what a page is made with is not installed. Imports nothing."""
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a report needs {' and '.join(missing)}, which this Python does not have: pip install "
            f"'mindresume[report]' (or {' '.join(missing)} alone); or use --json, which does not "
            "need it"
        )


def draw(accounts: Sequence[AttemptAccount]) -> Any:
    """Returns a matplotlib figure: the loss above, the timeline below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[4.6, 1])
    _losses(above, accounts)
    _times(below, accounts)
    return figure


def svg(figure: Any) -> str:
    """Returns the figure as SVG for a page, without prolog and metadata, and without inline styles:
    the Content-Security-Policy of the page forbids those."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "mindresume", "svg.fonttype": "path"}):
        out = io.StringIO()
        figure.savefig(
            out,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style[^>]*>(.*?)</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' style="([^"]*)"', _attributes, text)
    text = text.replace("<svg ", '<svg stroke-linejoin="round" stroke-linecap="butt" ', 1)
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*" ',
        r"<svg \1",
        re.sub(r' height="[^"]*pt"', "", text, count=1),
        count=1,
    )


def _attributes(style: re.Match[str]) -> str:
    """Returns the properties of an inline style as attributes of SVG, which have the same names."""
    properties = [item.split(":", 1) for item in style[1].split(";") if ":" in item]
    return "".join(f' {name.strip()}="{value.strip()}"' for name, value in properties)


def png(figure: Any) -> bytes:
    """Returns the figure as PNG."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()


# ---- the loss ------------------------------------------------------------------------------------


def _losses(axes: Any, accounts: Sequence[AttemptAccount]) -> None:
    curves = [account for account in accounts if len(account.attempt.losses)]
    # most points of each lost part
    most = max(POINTS // 2 // max(sum(account.steps_lost > 0 for account in curves), 1), 8)
    for account in curves:
        if account.steps_lost:
            losses, first = account.attempt.losses, account.kept_losses
            _line(
                axes,
                losses.steps[first:],
                losses.values[first:],
                most,
                color=LOST,
                linewidth=5,
                alpha=0.8,
                solid_capstyle="butt",
                zorder=2,
            )
            axes.axvspan(
                max(account.kept, account.attempt.origin.base_step),
                account.attempt.last_step,
                color=LOST,
                alpha=0.13,
                linewidth=0,
                zorder=0,
            )
    steps, values = kept_curve(curves)
    _line(axes, steps, values, POINTS // 2, color=KEPT, linewidth=1.5, zorder=3)
    _marks(axes, accounts, steps, values)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.margins(x=0.015)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e8ec", linewidth=0.7)
    axes.set_axisbelow(True)
    _legend(axes)


def kept_curve(accounts: Sequence[AttemptAccount]) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and losses that the training contains, over all attempts. Where steps go back
    (another training, another batch size), a nan interrupts the curve."""
    steps, values = [np.empty(0)], [np.empty(0)]
    for account in accounts:
        losses = account.attempt.losses
        count = account.kept_losses
        if count and len(steps[-1]) and losses.steps[0] <= steps[-1][-1]:
            steps.append(steps[-1][-1:])
            values.append(np.array([np.nan]))
        if count:
            steps.append(losses.steps[:count].astype(float))
            values.append(losses.values[:count])
    return np.concatenate(steps), np.concatenate(values)


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


def _line(axes: Any, steps: np.ndarray, values: np.ndarray, most: int, **style: Any) -> None:
    if len(steps):
        kept = thinned(values, most)
        marker = (
            {"marker": "o", "markersize": style["linewidth"] + 1, "markeredgewidth": 0}
            if len(kept) == 1
            else {}
        )
        axes.plot(
            steps[kept],
            np.where(np.isfinite(values[kept]), values[kept], np.nan),
            **style,
            **marker,
        )


def _marks(
    axes: Any, accounts: Sequence[AttemptAccount], steps: np.ndarray, values: np.ndarray
) -> None:
    """Draws saves, resumes and failures. ``steps``, ``values``: the kept curve, on which the marks
    lie."""
    low, high = axes.get_ylim()
    saves = [save for account in accounts for save in account.attempt.saves.disk]
    good = sorted({save.step for save in saves if save.is_committed})
    other = sorted({save.step for save in saves if save.is_staged} - set(good))
    for marks, face, label in (
        (good, SAVE, "committed: complete on all ranks"),
        (other, "none", "saved, not committed"),
    ):
        if marks:
            marks = spread(marks, float)
            axes.plot(
                marks,
                [low - 0.05 * (high - low)] * len(marks),
                linestyle="none",
                markersize=4.5,
                marker="s" if len(marks) <= SQUARES else "|",
                markerfacecolor=face,
                markeredgecolor=SAVE,
                label=label,
                zorder=4,
                clip_on=False,
            )
    resumed = [
        (base, _at(base, steps, values, low))
        for account in accounts
        if account.attempt.last_step is not None and (base := account.attempt.origin.base_step)
    ]
    _points(axes, resumed, ">", RESUMED, "resumed after this step", 5)
    attempts = [account.attempt for account in accounts]
    failed = [
        attempt
        for attempt in attempts
        if attempt.outcome == FAILED and attempt.last_step is not None
    ]
    failures = [
        (
            attempt.last_step,
            _at(attempt.last_step, attempt.losses.steps, attempt.losses.values, low),
        )
        for attempt in failed
    ]
    _points(axes, failures, "X", DEAD, "failed here (number of the attempt)", 6)
    for attempt, place in list(zip(failed, failures, strict=True))[:NAMED]:
        axes.annotate(
            str(attempt.number), place, (6, 5), textcoords="offset points", fontsize=8.5, color=DEAD
        )


def loss_at(step: int, steps: np.ndarray, values: np.ndarray) -> float | None:
    """Returns the loss at a step, or at the nearest step that has one; None if no step has one."""
    finite = np.flatnonzero(np.isfinite(values))
    return float(values[finite][np.abs(steps[finite] - step).argmin()]) if len(finite) else None


def _at(step: int, steps: np.ndarray, values: np.ndarray, otherwise: float) -> float:
    found = loss_at(step, steps, values)
    return otherwise if found is None else found


def _points(
    axes: Any,
    places: Sequence[tuple[float, float]],
    marker: str,
    colour: str,
    label: str,
    order: int,
) -> None:
    if places:
        axes.plot(
            *zip(*places, strict=True),
            linestyle="none",
            marker=marker,
            markerfacecolor=colour,
            markersize=9 if len(places) <= NAMED else 6,
            markeredgecolor="white",
            markeredgewidth=0.8,
            label=label,
            zorder=order,
        )


def spread(items: Sequence[T], place: Callable[[T], float]) -> list[T]:
    """Returns at most about MARKS of the items: one for each interval of equal length, of which
    ``place`` gives the position."""
    if len(items) <= MARKS:
        return list(items)
    first, last = min(map(place, items)), max(map(place, items))
    width = (last - first) / MARKS or 1
    return list({int((place(item) - first) / width): item for item in items}.values())


def _legend(axes: Any) -> None:
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    handles = [
        Line2D([], [], color=KEPT, linewidth=2),
        Line2D([], [], color=LOST, linewidth=6, alpha=0.75),
        *handles,
    ]
    axes.legend(
        handles,
        ["loss", "lost: later attempts do not contain it", *labels],
        frameon=False,
        fontsize=8.5,
        loc="upper right",
        borderaxespad=0.2,
    )


# ---- the timeline --------------------------------------------------------------------------------


def _times(axes: Any, accounts: Sequence[AttemptAccount]) -> None:
    spans = [span for account in accounts for span in account.timeline]
    if not spans:
        axes.set_axis_off()
        return
    origin, end = spans[0].begin, max(span.end for span in spans)
    size, unit = next((size, unit) for least, size, unit in UNITS if end - origin >= least)

    def place(begin: float, until: float) -> tuple[float, float]:
        return (begin - origin) / size, (until - begin) / size

    for kind, label in (
        ("startup", "startup, shutdown"),
        ("shutdown", None),
        ("productive", "productive"),
        ("lost", "lost"),
        ("downtime", "downtime, idle"),
        ("idle", None),
        ("unknown", "not known" if any(span.kind == "unknown" for span in spans) else None),
    ):
        rows = [place(span.begin, span.end) for span in spans if span.kind == kind]
        if rows or label:
            idle = kind in ("downtime", "idle")
            axes.broken_barh(
                rows,
                (0, 1),
                facecolors=COLOURS[kind],
                label=label,
                hatch="////" if idle else None,
                edgecolor="#9aa5ae" if idle else "none",
                linewidth=0,
            )
    failures = [
        (account.attempt.ended - origin) / size
        for account in accounts
        if account.attempt.outcome == FAILED
    ]
    axes.plot(
        failures,
        [1.0] * len(failures),
        linestyle="none",
        marker="X",
        markersize=8,
        markerfacecolor=DEAD,
        markeredgecolor="white",
        markeredgewidth=0.8,
        clip_on=False,
    )
    saves = spread(
        [
            save.time
            for account in accounts
            for save in account.attempt.saves.disk
            if save.is_staged
        ],
        float,
    )
    axes.plot(
        [(at - origin) / size for at in saves],
        [0.0] * len(saves),
        linestyle="none",
        marker="|",
        markersize=7,
        color=SAVE,
        clip_on=False,
    )
    axes.set_xlim(0, max((end - origin) / size, 1e-9))
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xlabel(f"{unit} since the first start")
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.legend(
        frameon=False,
        fontsize=8.5,
        ncols=4,
        loc="lower left",
        bbox_to_anchor=(0, 1.02),
        borderaxespad=0,
    )


PAGE_POINTS = 6000  # most points of the kept curve, and most of all lost parts
PARTS = 500  # most lost parts: the last ones
ATTEMPTS = 2000  # most attempts: the last ones
REASON = 300  # most characters of a reason


def chart_data(report: Report) -> dict[str, Any] | None:
    """Returns the data; None if there is no attempt. Losses that are not finite are None."""
    if not report.accounts:
        return None
    rows = report.accounts[-ATTEMPTS:]
    origin = report.attempts[0].started
    curves = [*_kept(rows, origin), *_lost(rows, origin)]
    marks, saves = _page_marks(rows, origin)
    numbers = {row.attempt.number for row in rows}
    return {
        "curves": curves,
        "marks": marks,
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
                span_text(phase.seconds),
            ]
            for recovery in report.recoveries
            if recovery.failed in numbers
            for phase in recovery.phases
        ],
        "length": _since(max(span.end for row in report.accounts for span in row.timeline), origin)
        if any(row.timeline for row in report.accounts)
        else 0,
        "losses": {
            "shown": sum(len(curve["steps"]) for curve in curves),
            "total": sum(len(account.attempt.losses) for account in report.accounts),
        },
        "saves": saves,
        "attempts": {"shown": len(rows), "total": len(report.accounts)},
    }


# ---- curves --------------------------------------------------------------------------------------


def _kept(rows: Sequence[AttemptAccount], origin: float) -> list[dict[str, Any]]:
    """Returns the losses that the training contains, a curve for each attempt, thinned together."""
    counts = [row.kept_losses for row in rows]
    if not sum(counts):
        return []
    values = np.concatenate(
        [row.attempt.losses.values[:count] for row, count in zip(rows, counts, strict=True)]
    )
    kept, begin, found = thinned(values, PAGE_POINTS), 0, []
    for row, count in zip(rows, counts, strict=True):
        own = kept[(kept >= begin) & (kept < begin + count)] - begin
        begin += count
        if len(own):
            found.append(_curve("kept", row.attempt, own, origin))
    return found


def _lost(rows: Sequence[AttemptAccount], origin: float) -> list[dict[str, Any]]:
    """Returns the lost losses, a curve for each attempt."""
    parts = [
        (row.attempt, row.kept_losses) for row in rows if row.steps_lost and len(row.attempt.losses)
    ][-PARTS:]
    most = max(PAGE_POINTS // max(len(parts), 1), 4)
    return [
        _curve("lost", attempt, first + thinned(attempt.losses.values[first:], most), origin)
        for attempt, first in parts
        if first < len(attempt.losses)
    ]


def _curve(kind: str, attempt: RunAttempt, kept: np.ndarray, origin: float) -> dict[str, Any]:
    losses = attempt.losses
    return {
        "kind": kind,
        "attempt": attempt.number,
        "steps": [int(step) for step in losses.steps[kept]],
        "values": [float(f"{value:.7g}") for value in losses.values[kept]],
        "times": [
            seconds if (seconds := _since(at, origin)) < 1e5 else round(seconds)
            for at in losses.times[kept]
        ],
    }


def _since(at: float, origin: float) -> float:
    """Returns a time in seconds since ``origin``, with milliseconds: the page shows how long
    something took."""
    return round(float(at) - origin, 3)


# ---- marks ---------------------------------------------------------------------------------------


def _page_marks(
    rows: Sequence[AttemptAccount], origin: float
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Returns the marks (kind, step, seconds since the first start, loss at which they are drawn,
    text), and how many saves they are and there were. A save has no loss: it is drawn at the
    bottom. A failure before the first step has no step."""
    steps, values = kept_curve(rows)
    found, shown, total = [], 0, 0

    def mark(kind: str, step: int | None, at: float | None, loss: float | None, text: Any) -> None:
        found.append(
            {
                "kind": kind,
                "step": step,
                "at": None if at is None else _since(at, origin),
                "loss": loss,
                "text": as_json(text),
            }
        )

    staged = [(row, save) for row in rows for save in row.attempt.saves.disk if save.is_staged]
    copies = [(row, save) for row in rows for save in row.attempt.saves.memory]
    for kind, group in (
        ("committed", [pair for pair in staged if pair[1].is_committed]),
        ("staged", [pair for pair in staged if not pair[1].is_committed]),
        ("memory", copies),
    ):
        kept = spread(group, lambda pair: pair[1].step)
        shown, total = shown + len(kept), total + len(group)
        for row, save in kept:
            if kind == "memory":
                mark(
                    kind,
                    save.step,
                    None,
                    None,
                    phrase(
                        "tip.memory",
                        step=save.step,
                        attempt=row.attempt.number,
                        size=size_text(save.size_bytes),
                        stall=stall_text(save.stall_seconds),
                    ),
                )
            else:
                mark(
                    kind,
                    save.step,
                    save.time,
                    None,
                    phrase(
                        "tip.save",
                        step=save.step,
                        at=moment(save.time),
                        state=phrase(f"tip.{kind}"),
                        size=size_text(save.size_bytes),
                        stall=stall_text(save.stall_seconds),
                        write=_span(save.write_seconds),
                    ),
                )
    for row in rows:
        attempt = row.attempt
        if attempt.origin.base_step and attempt.last_step is not None:
            source = attempt.origin.source if attempt.origin.source in (DISK, MEMORY) else "unknown"
            mark(
                "resumed",
                attempt.origin.base_step,
                None,
                loss_at(attempt.origin.base_step, steps, values),
                phrase(
                    "tip.resumed",
                    attempt=attempt.number,
                    step=attempt.origin.base_step,
                    at=moment(attempt.started),
                    source=phrase(f"source.{source}"),
                    load=_span(attempt.origin.load_seconds),
                ),
            )
        if attempt.outcome == FAILED:
            known = {
                "attempt": attempt.number,
                "at": moment(attempt.ended),
                "reason": shortened(reason_of(attempt), REASON),
            }
            if attempt.last_step is None:
                mark("failed", None, attempt.ended, None, phrase("tip.failed_early", **known))
            else:
                loss = loss_at(attempt.last_step, attempt.losses.steps, attempt.losses.values)
                mark(
                    "failed",
                    attempt.last_step,
                    attempt.ended,
                    loss,
                    phrase("tip.failed", step=attempt.last_step, **known),
                )
            found[-1]["attempt"] = attempt.number
    return found, {"shown": shown, "total": total}


def _span(seconds: float | None) -> str:
    return "?" if seconds is None else span_text(seconds)
