"""Renders the report as one HTML page (``page.html``), without scripts, fonts or network access. Everything from a log, an event
file or a name is escaped."""
from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindresume.events import DISK, FAILED, MEMORY
from mindresume.formatting import shown, size_text, span_text
from mindresume.report.accounting import AttemptAccount
from mindresume.report.advice_text import interval_rows, memory_text, sentence_of
from mindresume.report.advise import advice_of
from mindresume.report.builder import Report, looked_for
from mindresume.report.recoveries import REDONE, totals_of
from mindresume.report.runs import NORMAL, RUNNING, UNKNOWN, RunAttempt
from mindresume.resume.listing import COMPLETE, NODE_LOCAL

TEMPLATE = "page.html"
SHOWN = 2000                    # most rows of a table; the JSON document has all
REASON = 400                    # most characters of a reason
HATCHED = "repeating-linear-gradient(-45deg,#fff 0 2px,#8b97a1 2px 3px)"
COLOURS = {"productive": "#1f5f8b", "lost": "#f2a65a", "saving": "#4d5b66", "startup": "#aeb9c2", "shutdown": "#aeb9c2",
           "downtime": HATCHED, "idle": HATCHED, "unknown": "#e9edf0"}
BAR = 24.0                      # rem of the longest recovery
LONGEST = 3                     # phases that the line on recoveries names
PHASES = {"notice": "#9c1f18", "end": "#c2554f", "start": "#8b97a1", "import": "#4d5b66", "join": "#7d6ca8", "select": "#1b7f5c",
          "build": "#5f9ea0", "load": "#1f5f8b", "compile": "#b58900", "first step": "#7fb3d5", "redone": "#f2a65a"}
MEANINGS = {"notice": "until somebody noticed the failure", "end": "until the last process of the attempt was gone",
            "start": "until the process of rank 0 was started anew", "import": "imports of MindSpore and mindformers",
            "join": "until the training began: the context, joining the job", "select": "selecting and verifying the checkpoint",
            "build": "building the network and the data set", "load": "loading", "compile": "compiling the first step",
            "first step": "the first step", "redone": "steps that the failed attempt had done after the checkpoint"}
SPENT = (("productive", "Productive", "from the first to the last step, for steps that the training contains: the goodput"),
         ("lost", "Lost", "steps after the checkpoint from which the next attempt resumed"),
         ("saving", "Saving", "the training waited for a checkpoint; writing in the background is not counted"),
         ("startup", "Startup", "from mindformers' first line to the first step: loading, compilation"),
         ("shutdown", "Shutdown", "from the last step to the last line, including the wait for the last save"),
         ("downtime", "Downtime", "from a failure to the next start, including scheduling and importing"),
         ("idle", "Idle", "from a normal end to the next start"),
         ("unknown", "Not known", "attempts whose log is missing"))


def html(report: Report, figure: str) -> str:
    """Returns the page. ``figure``: SVG, inserted unchanged; empty if there is nothing to draw."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def printed(value: Any) -> Any:
        """Escapes hidden characters of names and texts; the figure is markup already."""
        return value if isinstance(value, Markup) else shown(value, keep="\n")
    environment = Environment(autoescape=True, loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
                              finalize=printed, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"span": span_text, "moment": _moment, "size": size_text, "number": _text, "shortened": _shortened,
                            "count": _count, "percent": _percent}
    rows, advice = report.accounts[-SHOWN:], advice_of(report)
    return environment.get_template(TEMPLATE).render(
        report=report, summary=summary(report), tiles=_tiles(report) if report.accounts else [],
        figure=Markup(_with_text(report, figure)), rows=[_row(row) for row in rows], shown_rows=SHOWN,
        problems=_problems(report.attempts)[:SHOWN], spent=_spent(report), checkpoints=report.disk.checkpoints[:SHOWN],
        usable=(COMPLETE, NODE_LOCAL), notes=[*report.notes, *report.disk.notes], read=report.read[:SHOWN],
        looked_for=looked_for(report), advice=sentence_of(advice) if advice else "",
        with_memory=memory_text(advice) if advice else None, intervals=interval_rows(advice) if advice else [],
        recoveries=_recoveries(report), recovered=recovery_summary(report), phases=_phase_totals(report))


def summary(report: Report) -> str:
    """Returns the report in one line."""
    if not report.accounts:
        return f"no logs of a training in {report.output}; {_count(len(report.disk.checkpoints), 'checkpoint')} on disk"
    seconds = report.seconds
    goodput = "not known" if seconds.goodput is None else _percent(seconds.productive, seconds.total)
    return (f"{_count(len(report.accounts), 'run attempt')}, {_count(report.failures, 'failure')}; step {_text(report.reached)} "
            f"reached, {report.steps_lost} of {_count(report.steps_done, 'step')} lost; {span_text(seconds.total)}, goodput "
            f"{goodput}")


def recovery_summary(report: Report) -> str:
    """Returns the recoveries in one line: where they resumed from, and where their time went; empty if there was none."""
    rows = report.recoveries
    if not rows:
        return ""
    sources = [(MEMORY, "from memory"), (DISK, "from disk"), ("", "without a checkpoint that is known")]
    counted = [f"{len(some)} {words} ({span_text(statistics.median(row.restart_seconds for row in some))} to the first step)"
               for source, words in sources if (some := [row for row in rows if row.source == source])]
    totals = totals_of(rows)
    longest = sorted(totals, key=totals.get, reverse=True)[:LONGEST]
    return (f"{len(rows)} recover{'y' if len(rows) == 1 else 'ies'}: {', '.join(counted)}; {span_text(sum(totals.values()))} in "
            f"all, most of it {', '.join(f'{name} {span_text(totals[name])}' for name in longest)}")


# ---- parts -----------------------------------------------------------------------------------------------------------

def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """Returns (name, value, explanation) of the key figures."""
    attempts, seconds = report.attempts, report.seconds
    staged = [save for attempt in attempts for save in attempt.saves if save.is_staged]
    last = {RUNNING: "the last attempt is running", UNKNOWN: "how the last attempt ended is not known"}.get(
        attempts[-1].outcome, f"the last attempt: {_words(attempts[-1].outcome)}")
    at_risk = f"; {report.steps_at_risk} more follow the newest checkpoint" if report.steps_at_risk else ""
    unrecorded = sum(not attempt.has_events for attempt in attempts)
    some = f"; not known of {_count(unrecorded, 'attempt')}" if unrecorded else ""
    copies = sum(len(attempt.memory_saves) for attempt in attempts)
    return [("Restarts", str(report.restarts), f"{_count(report.failures, 'failure')}; {last}"),
            ("Step reached", _text(report.reached), f"{_count(report.steps_done, 'step')} done for it"),
            ("Steps lost", str(report.steps_lost),
             f"{_percent(report.steps_lost, report.steps_done)} of the steps done{at_risk}"),
            ("Goodput", "not known" if seconds.goodput is None else _percent(seconds.productive, seconds.total),
             f"{span_text(seconds.productive)} productive of {span_text(seconds.total)}"),
            ("Cost of failures", span_text(seconds.lost + seconds.downtime),
             f"{span_text(seconds.lost)} of lost steps, {span_text(seconds.downtime)} downtime"),
            ("Saves", "not known" if unrecorded == len(attempts) else str(len(staged)),
             f"{f'and {copies} in memory; ' if copies else ''}training stopped for {span_text(seconds.saving)} "
             f"({_percent(seconds.saving, seconds.total)}){some}")]


def _with_text(report: Report, figure: str) -> str:
    """Returns the figure with a text alternative, which has only numbers and words of mindresume."""
    from markupsafe import escape
    failed = [attempt for attempt in report.attempts if attempt.outcome == FAILED and attempt.last_step is not None]
    text = (f"Loss over steps 1 to {_text(report.reached)}, and below it the timeline of the run attempts. {summary(report)}. "
            + "; ".join(f"attempt {attempt.number} failed at step {attempt.last_step}" for attempt in failed[:20]))
    return figure.replace("<svg ", f'<svg role="img" aria-label="{escape(shown(text))}" ', 1) if report.accounts else ""


def _row(account: AttemptAccount) -> dict[str, Any]:
    """Returns the cells of one attempt."""
    attempt = account.attempt
    failed = sum(bool(save.failure) for save in attempt.saves)
    saves = [str(sum(save.is_staged for save in attempt.saves)), *([f"{failed} failed"] if failed else []),
             *([f"{len(attempt.memory_saves)} in memory"] if attempt.memory_saves else []),
             *([f"{attempt.skipped_saves} skipped"] if attempt.skipped_saves else [])]
    reason = attempt.reason if attempt.failed_rank is None else f"rank {attempt.failed_rank}: {attempt.reason}"
    if attempt.outcome == FAILED and not reason:
        reason = "why is not known"
    return {"attempt": attempt, "run": attempt.run_id or "not known", "outcome": _words(attempt.outcome), "reason": reason,
            "kind": "good" if attempt.outcome in NORMAL else "bad" if attempt.outcome == FAILED else "",
            "resumed": _resumed_from(attempt), "lost": account.steps_lost,
            "steps": "none" if attempt.first_step is None else f"{attempt.first_step} to {attempt.last_step}",
            "saves": "; ".join(saves) if attempt.has_events else "not known"}


def _resumed_from(attempt: RunAttempt) -> str:
    """Returns where an attempt began, as a cell."""
    if attempt.resumed_from is not None:
        scaled = f" (counted on as step {attempt.base_step})" if attempt.step_scale != 1 else ""
        where = " in memory" if attempt.resumed_source == MEMORY else ""
        return f"step {attempt.resumed_from}{where}{scaled}" + (" (inferred)" if attempt.is_inferred else "")
    if attempt.is_fresh:
        return "fresh start"
    if attempt.checkpoint:
        return attempt.checkpoint
    if attempt.first_step is not None:
        return "the beginning (inferred)"
    return "nothing was selected yet" if attempt.has_events else "not known"


def _problems(attempts: Sequence[RunAttempt]) -> list[tuple[int, int | None, str]]:
    """Returns (attempt, step, reason) of refused checkpoints, then of failed saves."""
    refused = [(attempt.number, row.step, row.reason) for attempt in attempts for row in attempt.refused]
    return refused + [(attempt.number, save.step, f"failed save: {save.failure}")
                      for attempt in attempts for save in attempt.saves if save.failure]


def _spent(report: Report) -> list[dict[str, Any]]:
    """Returns the rows of the use of the time."""
    seconds = report.seconds
    found = []
    for name, title, meaning in SPENT:
        value = getattr(seconds, name)
        if value or name in ("productive", "lost", "saving", "downtime"):
            width = 9 * value / seconds.total if seconds.total else 0
            found.append({"title": title, "seconds": value, "share": _percent(value, seconds.total), "meaning": meaning,
                          "style": f"width:{width:.2f}rem;background:{COLOURS[name]}"})
    return found


def _recoveries(report: Report) -> list[dict[str, Any]]:
    """Returns the rows of the recoveries: for each a bar of phases, all bars to one scale."""
    rows = report.recoveries[-SHOWN:]
    longest = max((row.restart_seconds + row.seconds_redone for row in rows), default=0.0) or 1.0
    found = []
    for row in rows:
        parts = [(" + ".join(phase.names), phase.names[-1], phase.seconds) for phase in row.phases]
        parts += [(REDONE, REDONE, row.seconds_redone)] if row.seconds_redone else []
        found.append({"row": row, "source": row.source or "?", "lasted": row.restart_seconds, "parts": [
            {"name": name, "seconds": seconds, "style": f"width:{BAR * seconds / longest:.2f}rem;background:{PHASES[last]}"}
            for name, last, seconds in parts]})
    return found


def _phase_totals(report: Report) -> list[dict[str, Any]]:
    """Returns the rows of the totals of the phases, in their order."""
    totals = totals_of(report.recoveries)
    whole = sum(totals.values())
    order, found = list(PHASES), []
    for name, seconds in totals.items():
        last = name.split(" + ")[-1]                            # which names the moment that ends it
        found.append((order.index(last), name, {
            "name": name, "seconds": seconds, "share": _percent(seconds, whole), "meaning": MEANINGS[last],
            "style": f"width:.9rem;background:{PHASES[last]}"}))
    return [row for _, _, row in sorted(found, key=lambda item: item[:2])]


# ---- words -----------------------------------------------------------------------------------------------------------

def _words(outcome: str) -> str:
    return outcome.replace("_", " ")


def _shortened(text: str) -> str:
    return text if len(text) <= REASON else text[:REASON] + " ..."


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _percent(part: float, whole: float) -> str:
    if not whole:
        return "0 %"
    value = 100 * part / whole
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < value < 10 else f"{value:.0f} %"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _text(value: int | None) -> str:
    return "?" if value is None else str(value)
