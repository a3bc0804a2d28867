"""Makes the cells and sentences of the page from a report: numbers as text, and phrases in both
languages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from mindresume import runtime
from mindresume.events import DISK, FAILED, MEMORY
from mindresume.events.recovery_phases import PHASES
from mindresume.formatting import span_text
from mindresume.report.accounting import REDONE, AttemptAccount, totals_of
from mindresume.report.builder import Report
from mindresume.report.phrases import TEXTS, Phrase, counted, joined, phrase
from mindresume.report.runs import NORMAL, RUNNING, UNKNOWN, RunAttempt

BAR = 24.0  # rem of the longest recovery
SHARE = 9.0  # rem of the whole time
LONGEST = 3  # phases that the line on recoveries names
SPENT = ("productive", "lost", "saving", "startup", "shutdown", "downtime", "idle", "unknown")


def summary(report: Report) -> Phrase:
    """Returns the report in one line."""
    if not report.accounts:
        return phrase(
            "summary.empty",
            output=report.output,
            checkpoints=counted("checkpoint", len(report.disk.checkpoints)),
        )
    seconds = report.seconds
    return phrase(
        "summary",
        attempts=counted("run attempt", len(report.accounts)),
        failures=counted("failure", report.failures),
        reached=number_text(report.reached),
        lost=report.steps_lost,
        steps=counted("step", report.steps_done),
        span=span_text(seconds.total),
        goodput=_goodput(report),
    )


def recovery_summary(report: Report) -> str:
    """Returns the recoveries in one line: where they resumed from, and where their time went; empty
    if there was none."""
    rows = report.recoveries
    if not rows:
        return ""
    sources = [(MEMORY, "memory"), (DISK, "disk"), ("", "unknown")]
    found = [
        phrase(
            f"recoveries.{name}",
            count=len(some),
            span=span_text(statistics.median(row.restart_seconds for row in some)),
        )
        for source, name in sources
        if (some := [row for row in rows if row.source == source])
    ]
    totals = totals_of(rows)
    longest = sorted(totals, key=totals.get, reverse=True)[:LONGEST]
    return phrase(
        "recoveries.summary",
        recoveries=counted("recovery", len(rows)),
        sources=joined(found),
        span=span_text(sum(totals.values())),
        phases=joined(
            [
                phrase(
                    "recoveries.phase",
                    phase=phase_name(name.split(" + ")),
                    span=span_text(totals[name]),
                )
                for name in longest
            ]
        ),
    )


def tiles(report: Report) -> list[tuple[str, str, str]]:
    """Returns (name, value, explanation) of the key figures."""
    attempts, seconds = report.attempts, report.seconds
    staged = [save for attempt in attempts for save in attempt.saves.disk if save.is_staged]
    outcome = attempts[-1].outcome
    last = (
        phrase(f"tile.last.{outcome}")
        if outcome in (RUNNING, UNKNOWN)
        else phrase("tile.last", outcome=outcome_text(outcome))
    )
    unrecorded = sum(not attempt.has_events for attempt in attempts)
    copies = sum(len(attempt.saves.memory) for attempt in attempts)
    saves = [
        *([phrase("tile.saves.memory", copies=copies)] if copies else []),
        phrase(
            "tile.saves.more",
            span=span_text(seconds.saving),
            share=percent(seconds.saving, seconds.total),
        ),
        *(
            [phrase("tile.saves.unknown", attempts=counted("attempt", unrecorded))]
            if unrecorded
            else []
        ),
    ]
    return [
        (
            phrase("tile.restarts"),
            str(report.restarts),
            phrase("tile.restarts.more", failures=counted("failure", report.failures), last=last),
        ),
        (
            phrase("tile.reached"),
            number_text(report.reached),
            phrase("tile.reached.more", steps=counted("step", report.steps_done)),
        ),
        (
            phrase("tile.lost"),
            str(report.steps_lost),
            phrase(
                "tile.lost.risk" if report.steps_at_risk else "tile.lost.more",
                steps=report.steps_at_risk,
                share=percent(report.steps_lost, report.steps_done),
            ),
        ),
        (
            phrase("tile.goodput"),
            _goodput(report),
            phrase(
                "tile.goodput.more",
                productive=span_text(seconds.productive),
                total=span_text(seconds.total),
            ),
        ),
        (
            phrase("tile.cost"),
            span_text(seconds.lost + seconds.downtime),
            phrase(
                "tile.cost.more", lost=span_text(seconds.lost), downtime=span_text(seconds.downtime)
            ),
        ),
        (
            phrase("tile.saves"),
            phrase("not_known") if unrecorded == len(attempts) else str(len(staged)),
            joined(saves, "semicolon"),
        ),
    ]


def attempt_row(account: AttemptAccount) -> dict[str, Any]:
    """Returns the cells of one attempt."""
    attempt = account.attempt
    failed = sum(bool(save.failure) for save in attempt.saves.disk)
    saves = [
        str(sum(save.is_staged for save in attempt.saves.disk)),
        *([phrase("saves.failed", count=failed)] if failed else []),
        *(
            [phrase("saves.memory", count=len(attempt.saves.memory))]
            if attempt.saves.memory
            else []
        ),
        *([phrase("saves.skipped", count=attempt.saves.skipped)] if attempt.saves.skipped else []),
    ]
    started = moment(attempt.started)
    return {
        "attempt": attempt,
        "run": attempt.run_id or phrase("not_known"),
        "outcome": outcome_text(attempt.outcome),
        "started": phrase("before", moment=started) if attempt.is_cut else started,
        "reason": reason_of(attempt),
        "kind": "good" if attempt.outcome in NORMAL else "bad" if attempt.outcome == FAILED else "",
        "resumed": _resumed_from(attempt),
        "lost": account.steps_lost,
        "steps": phrase("none")
        if attempt.first_step is None
        else phrase("steps.range", first=attempt.first_step, last=attempt.last_step),
        "saves": joined(saves, "semicolon") if attempt.has_events else phrase("not_known"),
    }


def reason_of(attempt: RunAttempt) -> str:
    """Returns why an attempt ended as it did, as logged; empty if it ended normally and said
    nothing."""
    if attempt.reason and attempt.failed_rank is not None:
        return f"rank {attempt.failed_rank}: {attempt.reason}"
    return attempt.reason or (phrase("reason.unknown") if attempt.outcome == FAILED else "")


def _resumed_from(attempt: RunAttempt) -> str:
    """Returns where an attempt began, as a cell."""
    if attempt.origin.step is not None:
        found = phrase(
            "resumed.memory" if attempt.origin.source == MEMORY else "resumed.step",
            step=attempt.origin.step,
        )
        if attempt.origin.step_scale != 1:
            found = phrase("resumed.scaled", where=found, step=attempt.origin.base_step)
        return phrase("resumed.inferred", where=found) if attempt.origin.is_inferred else found
    if attempt.origin.is_fresh:
        return phrase("resumed.fresh")
    if attempt.origin.checkpoint:
        return attempt.origin.checkpoint
    if attempt.first_step is not None:
        return phrase("resumed.beginning")
    return phrase("resumed.not_yet") if attempt.has_events else phrase("not_known")


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


def spent(report: Report) -> list[dict[str, Any]]:
    """Returns the rows of the use of the time."""
    seconds = report.seconds
    found = []
    for name in SPENT:
        value = getattr(seconds, name)
        if value or name in ("productive", "lost", "saving", "downtime"):
            width = SHARE * value / seconds.total if seconds.total else 0
            found.append(
                {
                    "title": phrase(f"spent.{name}"),
                    "seconds": value,
                    "share": percent(value, seconds.total),
                    "meaning": phrase(f"spent.{name}.meaning"),
                    "width": f"{width:.2f}",
                    "kind": f"k-{name}",
                }
            )
    return found


def recovery_rows(report: Report, most: int) -> list[dict[str, Any]]:
    """Returns the rows of the last ``most`` recoveries: for each a bar of phases, all bars to one
    scale."""
    rows = report.recoveries[-most:]
    longest = max((row.restart_seconds + row.seconds_redone for row in rows), default=0.0) or 1.0
    found = []
    for row in rows:
        parts, at = [(phase.names, phase.seconds) for phase in row.phases], 0.0
        parts += [((REDONE,), row.seconds_redone)] if row.seconds_redone else []
        bars = []
        for names, seconds in parts:
            bars.append(
                {
                    "tip": phrase("tip.phase", phase=phase_name(names), span=span_text(seconds)),
                    "kind": phase_class(names),
                    "at": f"{BAR * at / longest:.2f}",
                    "width": f"{BAR * seconds / longest:.2f}",
                }
            )
            at += seconds
        found.append(
            {
                "row": row,
                "source": source_text(row.source),
                "lasted": row.restart_seconds,
                "parts": bars,
                "width": f"{BAR * at / longest:.2f}",
            }
        )
    return found


def phase_rows(report: Report) -> list[dict[str, Any]]:
    """Returns the rows of the totals of the phases, in their order."""
    totals = totals_of(report.recoveries)
    whole = sum(totals.values())
    order, found = [*PHASES.values(), REDONE], []
    for name, seconds in totals.items():
        names = name.split(" + ")
        found.append(
            (
                order.index(names[-1]),
                name,
                {
                    "name": phase_name(names),
                    "seconds": seconds,
                    "share": percent(seconds, whole),
                    "kind": phase_class(names),
                    "meaning": phrase(f"phase.{names[-1]}.meaning"),
                },
            )
        )
    return [row for _, _, row in sorted(found, key=lambda item: item[:2])]


# ---- words ---------------------------------------------------------------------------------------


def phase_name(names: Sequence[str]) -> Phrase:
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
    if not whole:
        return "0 %"
    value = 100 * part / whole
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < value < 10 else f"{value:.0f} %"


def number_text(value: int | None) -> str:
    """Returns a number as text; "?" for None."""
    return "?" if value is None else str(value)


def _goodput(report: Report) -> str:
    seconds = report.seconds
    return (
        phrase("not_known")
        if seconds.goodput is None
        else percent(seconds.productive, seconds.total)
    )
