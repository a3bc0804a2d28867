"""Makes the cells and sentences of the page from a report: numbers as text, and phrases in both
languages."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from mindresume import runtime
from mindresume.events import DISK, FAILED, MEMORY, PHASES
from mindresume.report.accounting import REDONE, totals_of
from mindresume.report.builder import Report
from mindresume.report.phrases import TEXTS, Phrase, counted, duration, joined, phrase
from mindresume.report.runs import NORMAL, RUNNING, UNKNOWN, RunAttempt

SHOWN = 2000  # most rows of a table; the JSON document has all
REASON = 400  # most characters of a reason
BAR = 24.0  # rem of the longest recovery
SHARE = 9.0  # rem of the whole time
LONGEST = 3  # phases that the line on recoveries names


def summary(report: Report) -> Phrase:
    """Returns the report in one line."""
    if not report.accounts:
        return phrase(
            "summary.empty",
            output=report.output,
            checkpoints=counted("checkpoint", len(report.checkpoints)),
        )
    return phrase(
        "summary",
        attempts=counted("run attempt", len(report.accounts)),
        failures=counted("failure", report.failures),
        reached=number_text(report.reached),
        lost=report.steps_lost,
        steps=counted("step", report.steps_done),
        span=duration(report.seconds.total),
        goodput=goodput_text(report),
    )


def recovery_summary(report: Report) -> str:
    """Returns the recoveries, at least one, in one line: where they resumed from, and where their
    time went."""
    restarts: dict[str, list[float]] = {MEMORY: [], DISK: [], "": []}
    for row in report.recoveries:
        restarts.get(row.source, []).append(row.restart_seconds)
    totals = totals_of(report.recoveries)
    longest = sorted(totals, key=totals.__getitem__, reverse=True)[:LONGEST]
    return phrase(
        "recoveries.summary",
        recoveries=counted("recovery", len(report.recoveries)),
        span=duration(sum(totals.values())),
        sources=joined(
            [
                phrase(
                    f"recoveries.{source or 'unknown'}",
                    count=len(seconds),
                    span=duration(statistics.median(seconds)),
                )
                for source, seconds in restarts.items()
                if seconds
            ]
        ),
        phases=joined(
            [
                phrase(
                    "recoveries.phase",
                    phase=phase_name(name.split(" + ")),
                    span=duration(totals[name]),
                )
                for name in longest
            ]
        ),
    )


def last_outcome(report: Report) -> Phrase:
    """Returns how the last attempt ended, in words."""
    outcome = report.attempts[-1].outcome
    key = f"tile.last.{outcome}" if outcome in (RUNNING, UNKNOWN) else "tile.last"
    return phrase(key, outcome=outcome_text(outcome))


def number_of_saves(report: Report) -> str:
    """Returns the number of saves to disk; that it is not known if no attempt has events."""
    if not any(attempt.has_events for attempt in report.attempts):
        return phrase("not_known")
    return str(sum(map(staged_saves, report.attempts)))


def saving_text(report: Report) -> str:
    """Returns how many saves went to memory, what all saves cost, and of how many attempts they are
    not known."""
    seconds, copies = report.seconds, sum(len(attempt.saves.memory) for attempt in report.attempts)
    span, share = duration(seconds.saving), percent(seconds.saving, seconds.total)
    unrecorded = sum(not attempt.has_events for attempt in report.attempts)
    parts = [
        phrase("tile.saves.memory", copies=copies) if copies else "",
        phrase("tile.saves.more", span=span, share=share),
        phrase("tile.saves.unknown", attempts=counted("attempt", unrecorded)) if unrecorded else "",
    ]
    text: str = joined(parts, "semicolon")
    return text


def staged_saves(attempt: RunAttempt) -> int:
    """Returns the number of its saves to disk."""
    return sum(save.is_staged for save in attempt.saves.disk)


def saves_text(attempt: RunAttempt) -> str:
    """Returns the saves of an attempt, as a cell."""
    if not attempt.has_events:
        return phrase("not_known")
    others = (
        ("failed", sum(bool(save.failure) for save in attempt.saves.disk)),
        ("memory", len(attempt.saves.memory)),
        ("skipped", attempt.saves.skipped),
    )
    return joined(
        [
            str(staged_saves(attempt)),
            *(phrase(f"saves.{name}", count=count) if count else "" for name, count in others),
        ],
        "semicolon",
    )


def reason_of(attempt: RunAttempt) -> str:
    """Returns why an attempt ended as it did, as logged; empty if it ended normally and said
    nothing."""
    if attempt.reason and attempt.failed_rank is not None:
        return f"rank {attempt.failed_rank}: {attempt.reason}"
    return attempt.reason or (phrase("reason.unknown") if attempt.outcome == FAILED else "")


def kind_of(attempt: RunAttempt) -> str:
    """Returns the class of page.css of its outcome."""
    return "good" if attempt.outcome in NORMAL else "bad" if attempt.outcome == FAILED else ""


def resumed_from(attempt: RunAttempt) -> str:
    """Returns where an attempt began, as a cell."""
    origin = attempt.origin
    if origin.step is not None:
        where = origin.source == MEMORY and ("partner" if origin.partner else "memory")
        text = phrase(f"resumed.{where or 'step'}", step=origin.step)
        if origin.step_scale != 1:
            text = phrase("resumed.scaled", where=text, step=origin.base_step)
        return phrase("resumed.inferred", where=text) if origin.is_inferred else text
    if origin.is_fresh:
        return phrase("resumed.fresh")
    if origin.checkpoint:
        return origin.checkpoint
    if attempt.first_step is not None:
        return phrase("resumed.beginning")
    return phrase("resumed.not_yet" if attempt.has_events else "not_known")


def problems(attempts: Sequence[RunAttempt]) -> list[tuple[int, int | None, str]]:
    """Returns (attempt, step, reason) of refused checkpoints, then of failed saves."""
    refused = [
        (attempt.number, row.step, row.reason)
        for attempt in attempts
        for row in attempt.origin.refused
    ]
    return refused + [
        (attempt.number, save.step, phrase("failed_save", reason=save.failure))
        for attempt in attempts
        for save in attempt.saves.disk
        if save.failure
    ]


def spent(report: Report) -> list[tuple[str, float, str]]:
    """Returns (name, seconds, rem of its bar) of the uses of the time."""
    return [
        (name, seconds, f"{SHARE * seconds / (report.seconds.total or 1):.2f}")
        for name, seconds in vars(report.seconds).items()
        if seconds or name in ("productive", "lost", "saving", "downtime")
    ]


def recovery_bars(report: Report) -> list[tuple[Any, list[tuple[str, Phrase, str, str]], str]]:
    """Returns the newest recoveries, each with the parts of its bar (class, text, where it begins
    and its width in rem) and the width of the bar; all bars have one scale."""
    rows = report.recoveries[-SHOWN:]
    scale = BAR / (max((row.restart_seconds + row.seconds_redone for row in rows), default=0) or 1)
    bars = []
    for row in rows:
        parts, at = [], 0.0
        redone = [((REDONE,), row.seconds_redone)] if row.seconds_redone else []
        for names, seconds in [*((phase.names, phase.seconds) for phase in row.phases), *redone]:
            tip = phrase("tip.phase", phase=phase_name(names), span=duration(seconds))
            parts.append((phase_class(names), tip, f"{at:.2f}", f"{scale * seconds:.2f}"))
            at += scale * seconds
        bars.append((row, parts, f"{at:.2f}"))
    return bars


def phase_rows(report: Report) -> list[tuple[list[str], float]]:
    """Returns the phases of all recoveries in their order: the names of those that are joined, and
    their seconds."""
    order = [*PHASES.values(), REDONE]
    rows = [(name.split(" + "), seconds) for name, seconds in totals_of(report.recoveries).items()]
    return sorted(rows, key=lambda row: (order.index(row[0][-1]), row[0]))


# ---- words ---------------------------------------------------------------------------------------


def phase_name(names: Iterable[str]) -> Phrase:
    """Returns the name of a part of a recovery, which may be of several phases."""
    return joined([phrase(f"phase.{name}") for name in names], "plus")


def phase_class(names: Sequence[str]) -> str:
    """Returns the class of page.css that colours it: that of its last phase, which names the moment
    that ends it."""
    return f"p-{names[-1].replace(' ', '-')}"


def outcome_text(outcome: str) -> str:
    """Returns the outcome of an attempt in words; one that this version does not know as
    recorded."""
    return (
        phrase(f"outcome.{outcome}") if f"outcome.{outcome}" in TEXTS else outcome.replace("_", " ")
    )


def source_text(source: str) -> str:
    """Returns where a checkpoint lay, in words; "?" if that is not known."""
    return phrase(source) if source in (DISK, MEMORY) else source or "?"


def moment(seconds: float) -> str:
    """Returns a time as local date and time."""
    return runtime.strftime("%Y-%m-%d %H:%M:%S", runtime.localtime(seconds))


def percent(part: float, whole: float) -> str:
    """Returns the share of ``part``, such as "2.5 %"."""
    value = 100 * part / whole if whole else 0
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < value < 10 else f"{value:.0f} %"


def number_text(value: int | None) -> str:
    """Returns a number as text; "?" for None."""
    return "?" if value is None else str(value)


def goodput_text(report: Report) -> str:
    """Returns the goodput as a share; that it is not known if some of the time is not."""
    seconds = report.seconds
    return (
        phrase("not_known")
        if seconds.goodput is None
        else percent(seconds.productive, seconds.total)
    )
