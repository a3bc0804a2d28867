"""Advises how often a training should save to each tier, from what its event files and logs have measured.

    advice = mindresume.advise("output")
    advice.failures, advice.tiers[0].steps_now, advice.tiers[0].steps_advised, advice.change

    measurement: Measured ─▶ advice_from: failure_rate, save_interval ─▶ Advice

Every number of the future assumes that the training goes on as it did: the same size of the job, the same disk, the same rate of
failures.
"""
from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindresume.api.results import Result
from mindresume.events import DISK, MEMORY
from mindresume.formatting import counted, span_text
from mindresume.report import phrases
from mindresume.report.builder import Report, build_report, folders_of
from mindresume.report.measurement import Measured, TierCosts, TooLittleMeasuredError, measure
from mindresume.report.phrases import Phrase, joined, phrase, sentences
from mindresume.report.save_interval import FailureRate, PartRate, Tier, best_interval, goodput
from mindresume.storage.posix import PosixStorage

SHARE = 0.9                     # probability of the ranges
BOUND = 0.95                    # probability of the bound without a failure
ENOUGH = 0.05                   # an interval that loses less than this more than the best one is as good
FEW = 5                         # failures; with fewer, the ranges are wide
KNOWN = 3                     # failures that tell whether memory survives; with fewer, or if it survived all, the tier stays on
KEYS = {DISK: "save_checkpoint_steps", MEMORY: "every_steps"}      # settings; their places: texts advice.place.*


@dataclass(frozen=True)
class TierFacts(Result):
    """Holds what was measured of one tier.

    Attributes:
        name: "memory" or "disk".
        saves: Number of saves that were measured; 0: the costs are assumed.
        stall_seconds: The training waits so long for a save (median).
        write_seconds: A save in the background takes so long until it counts (median); 0 if the training waits for it.
        restarts: Number of restarts from this tier that were measured; 0: ``restart_seconds`` is that of another tier, or of a
            start.
        restart_seconds: From the end of a failed attempt to the first new step (median).
        load_seconds: Median time of selecting, verifying and loading; None if it was not measured.
        failures: Number of failures that this tier served; those that do not tell are not counted.
        seconds_between_failures: Expected time of training between two failures that this tier serves; None without a failure.
        seconds_between_failures_low: With 90 % probability at least this; without a failure, with 95 %.
        seconds_between_failures_high: With 90 % probability at most this; None without a failure.
        steps_now: Steps between two saves in the latest attempt; None if it has too few saves to tell.
        seconds_now: The same in seconds of training.
    """
    name: str
    saves: int
    stall_seconds: float
    write_seconds: float
    restarts: int
    restart_seconds: float
    load_seconds: float | None
    failures: int
    seconds_between_failures: float | None
    seconds_between_failures_low: float
    seconds_between_failures_high: float | None
    steps_now: int | None
    seconds_now: float | None


@dataclass(frozen=True)
class TierAdvice(TierFacts):
    """Advises how often to save to one tier, and holds what was measured of it (``TierFacts``).

    Attributes:
        steps_advised: Steps between two saves that lose the least time; None without a failure. 0: the tier is better off,
            because the other one alone loses less.
        seconds_advised: The same in seconds of training; None if the tier is better off.
        steps_low: With 90 % probability the best interval is at least so long; without a failure, it is with 95 %.
        steps_high: With 90 % probability the best interval is at most so long; None without a failure.
        is_limited_by_write: The write in the background takes longer than the best interval by failures; the write decides.
    """
    steps_advised: int | None
    seconds_advised: float | None
    steps_low: int
    steps_high: int | None
    is_limited_by_write: bool


@dataclass(frozen=True)
class TrainingFacts(Result):
    """Holds what was measured of a training.

    Attributes:
        output: The output folder of the training.
        step_seconds: Duration of an ordinary step (median).
        is_background: Whether the disk is written while the training continues.
        failures: Number of failures after a first step.
        training_seconds: Time of training in which they happened.
        seconds_between_failures: Expected time of training between two failures; None without a failure.
        seconds_between_failures_low: With 90 % probability at least this; without a failure, with 95 %.
        seconds_between_failures_high: With 90 % probability at most this; None without a failure.
    """
    output: str
    step_seconds: float
    is_background: bool
    failures: int
    training_seconds: float
    seconds_between_failures: float | None
    seconds_between_failures_low: float
    seconds_between_failures_high: float | None


@dataclass(frozen=True)
class Advice(TrainingFacts):
    """Holds an advice on the intervals between saves, and what was measured of the training (``TrainingFacts``).

    Attributes:
        tiers: One TierAdvice for each place that saves go to: memory, if the training has that tier, then the disk.
        goodput_now: Expected share of the time that makes progress with the present intervals, 0 to 1; None if it is not known.
        goodput_advised: The same with the advised intervals; None without a failure.
        goodput_advised_low: With 90 % probability at least this.
        goodput_advised_high: With 90 % probability at most this.
        tiers_with_memory: What ``tiers`` would be with a tier in memory; empty if there is one, or without a failure.
        goodput_with_memory: The expected goodput with their intervals.
        assumed: What ``tiers_with_memory`` assumes, as sentences.
        change: What to change in the YAML file, as sentences.
        notes: What limits the advice, as sentences.
    """
    tiers: tuple[TierAdvice, ...]
    goodput_now: float | None
    goodput_advised: float | None
    goodput_advised_low: float | None
    goodput_advised_high: float | None
    tiers_with_memory: tuple[TierAdvice, ...]
    goodput_with_memory: float | None
    assumed: tuple[str, ...]
    change: str
    notes: tuple[str, ...]


Parts = Mapping[str, tuple[TierCosts, FailureRate | PartRate]]


def advice_from(measured: Measured, output: str = "") -> Advice:
    """Returns the advice that follows from ``measured``."""
    rate, step = measured.rate, measured.step_seconds
    expected, (low, high) = rate.per_second, _range(rate)
    parts = _parts(measured, measured.memory)
    rows = tuple(_tier_advice(costs, part, step) for costs, part in parts.values())
    now, tiers = [row.seconds_now for row in rows], [costs.tier for costs, _ in parts.values()]
    kept, best = tiers, [row.seconds_advised for row in rows]
    if measured.memory and measured.lost and measured.intact + measured.lost >= KNOWN:
        alone = _tier_advice(measured.disk, rate, step)
        if _goodput(tiers[1:], [alone.seconds_advised], expected) > _goodput(tiers, best, expected):
            rows = (replace(rows[0], steps_advised=0, seconds_advised=None), alone)
            kept, best = tiers[1:], [alone.seconds_advised]
            parts = {**parts, DISK: (measured.disk, rate)}
    other = tuple(_tier_advice(costs, part, step) for costs, part in _parts(measured, measured.possible).values()
                  ) if measured.possible and expected else ()
    more = [measured.possible.tier, measured.disk.tier] if other else []
    return Advice(
        output, step, measured.is_background, rate.failures, rate.seconds, 1 / expected if expected else None, 1 / high,
        1 / low if expected else None, rows, _goodput(tiers, now, expected), _goodput(kept, best, expected),
        _goodput(kept, best, high), _goodput(kept, best, low), other,
        _goodput(more, [row.seconds_advised for row in other], expected) if other else None, measured.assumed if other else (),
        _change(rows, parts, measured.rate.failures), tuple(_notes(measured, rows)))


def _parts(measured: Measured, memory: TierCosts | None) -> Parts:
    """Returns {name of a tier: (its costs, the rate of the failures that it serves)}, with or without ``memory``."""
    if memory is None:
        return {DISK: (measured.disk, measured.rate)}
    return {MEMORY: (memory, measured.rate_of_memory), DISK: (measured.disk, measured.rate_of_disk)}


def _range(rate: FailureRate | PartRate) -> tuple[float, float]:
    """Returns the least and the highest probable rate; without a failure 0 and a bound."""
    return rate.range(SHARE) if rate.per_second else (0.0, rate.upper(BOUND))


def _goodput(tiers: Sequence[Tier], seconds: Sequence[float | None], rate: float | None) -> float | None:
    """Returns the goodput with these seconds between two saves to each tier; None if one is not known, or no rate."""
    if rate is None or None in seconds:
        return None
    return goodput(dict(zip(tiers, seconds, strict=True)), rate)


def _tier_advice(costs: TierCosts, rate: FailureRate | PartRate, step: float) -> TierAdvice:
    tier, now, expected, (least, most) = costs.tier, costs.steps_now, rate.per_second, _range(rate)
    low, high = best_interval(tier, most), best_interval(tier, least)
    best = best_interval(tier, expected) if expected else None
    steps = None if best is None else steps_of(best, step, tier.write_seconds)
    return TierAdvice(
        tier.name, costs.saves, tier.stall_seconds, tier.write_seconds, costs.restarts, tier.restart_seconds, costs.load_seconds,
        rate.own if isinstance(rate, PartRate) else rate.failures, 1 / expected if expected else None, 1 / most,
        1 / least if expected else None, now, now and now * step, steps, steps and steps * step,
        steps_of(low, step, tier.write_seconds), steps_of(high, step, tier.write_seconds) if expected else None,
        tier.write_seconds > 0 and (best or low) <= tier.write_seconds)


def steps_of(seconds: float, step_seconds: float, at_least: float = 0.0) -> int:
    """Returns an interval as a number of steps, at least 1, with two significant digits: the cost is flat near its minimum, and a
    number that looks exact would promise more than is known. Not shorter than ``at_least`` seconds."""
    steps = max(seconds / step_seconds, 1.0)
    unit = 10 ** max(math.floor(math.log10(steps)) - 1, 0)
    rounded = max(round(steps / unit) * unit, 1)
    return rounded if rounded * step_seconds >= at_least else math.ceil(math.ceil(at_least / step_seconds) / unit) * unit


def loss_of(tier: Tier, interval: float, rate: float) -> float:
    """Returns the share of the time that saves and repeated steps cost with this interval. The restarts themselves cost the same
    with any. ``rate``: of the failures that the tier serves."""
    alone = Tier(tier.name, tier.stall_seconds, tier.write_seconds, tier.restart_seconds)
    return 1 / max(goodput({alone: interval}, rate), 1e-12) - 1 - rate * tier.restart_seconds


# ---- words -----------------------------------------------------------------------------------------------------------

def _change(rows: Sequence[TierAdvice], parts: Parts, failures: int) -> str:
    """Returns what to change, as one sentence for each tier; the same for all is said once. A few failures are no reason."""
    if 0 < failures < FEW:
        return phrase("advice.too_few", failures=failures, enough=FEW)
    said = [_change_of(row, *parts[row.name]) for row in rows]
    if all(text.key == "advice.keep" for text in said):
        keys = joined([phrase("advice.key", key=KEYS[row.name], steps=row.steps_now) for row in rows])
        return phrase("advice.keep_all" if len(rows) == 1 else "advice.keep_all_several", keys=keys, enough=f"{ENOUGH:.0%}")
    return sentences(said)


def _change_of(row: TierAdvice, costs: TierCosts, rate: FailureRate | PartRate) -> Phrase:
    key, place, now = KEYS[row.name], phrase(f"advice.place.{row.name}"), "_now" if row.steps_now else ""
    if row.steps_advised is None:
        if row.steps_now is not None and row.steps_now < row.steps_low:
            return phrase("advice.too_often", key=key, now=row.steps_now, low=row.steps_low)
        return phrase(f"advice.may_be{now}", key=key, low=row.steps_low, now=row.steps_now)
    if row.steps_advised == 0:
        return phrase(f"advice.off{now}", key=key, place=place, now=row.steps_now)
    if row.steps_now is not None:
        present, best = (loss_of(costs.tier, seconds, rate.per_second) for seconds in (row.seconds_now, row.seconds_advised))
        if present <= best * (1 + ENOUGH):
            return phrase("advice.keep", key=key, now=row.steps_now)
    return phrase(f"advice.set{now}", key=key, steps=row.steps_advised, place=place, now=row.steps_now)


def _notes(measured: Measured, rows: Sequence[TierAdvice]) -> Iterable[str]:
    failures, known = measured.rate.failures, measured.intact + measured.lost
    if not failures:
        yield ("No failure after a first step was recorded: this is a bound, no estimate. A short training without a failure "
               "says little about a long one.")
    elif failures < FEW:
        yield (f"{failures} failure{'' if failures == 1 else 's'}: the ranges are wide. An interval half or twice the best one "
               f"costs about a quarter more than it.")
    if measured.memory is not None and failures:
        if not known:
            yield "No failure tells yet whether the memory of the nodes survives: it is taken to survive half of them."
        elif not measured.lost:
            yield (f"No failure has needed the disk yet (of {known} that tell): half a failure is counted, so its range is wide. "
                   f"The loss of a node costs all steps since the last save to disk.")
        elif not measured.intact:
            yield (f"The memory of the nodes has not survived a failure yet (of {known} that tell): half a failure is counted, "
                   f"so its range is wide.")
        if 0 < known < failures:
            yield (f"{failures - known} of {failures} failures do not tell whether memory survived: the disk had as new a save, "
                   f"the tier was off, or no start followed. They count for the rate alone.")
    if not any(row.restarts for row in rows):
        yield "No restart was recorded: the time of a start is taken for it. It does not change the interval."
    if measured.failed_starts:
        yield f"{counted(measured.failed_starts, 'start')} failed before a first step; that time counts to the restarts."
    if rows[-1].is_limited_by_write:
        yield ("The write in the background takes longer than the best interval by failures, and the next save waits for it: a "
               "faster disk, or remove_redundancy: True, would allow a shorter interval.")
    if not measured.is_background:
        yield ("The training waits for the whole write. With async_save: True it waits for one copy in memory; save so for a "
               "while, then ask again: the best interval becomes shorter, and less is lost.")
    for row in rows:
        if row.steps_now is None:
            yield f"No attempt has two saves{' in memory' * (row.name == MEMORY)}, so the present interval is unknown."


def advise(path: str | os.PathLike[str], *, logs: Iterable[str | os.PathLike[str]] = ()) -> Advice:
    """Advises how often a training should save.

    Args:
        path: The output folder of the training, with its logs, event files and checkpoint folder; or the folder above it, or the
            checkpoint folder.
        logs: Other folders with logs or event files.

    Returns:
        An Advice. Nothing is written.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        TooLittleMeasuredError: No save, no step, or no time of training was measured.
    """
    output, root = folders_of(os.fspath(path))
    built = build_report(PosixStorage(), output, root, [os.fspath(folder) for folder in logs])
    return advice_from(measure(built.accounts, output), output)


def advice_of(report: Report) -> Advice | None:
    """Returns the advice for a report; None if too little was measured."""
    try:
        return advice_from(measure(report.accounts, report.output), report.output)
    except TooLittleMeasuredError:
        return None


def lines_of(advice: Advice) -> Iterable[tuple[str, str]]:
    """Yields (name, text) of each line."""
    for tier in advice.tiers:
        yield "save", _costs(advice, tier)
    yield "failure", failures_text(advice)
    if len(advice.tiers) > 1 and advice.failures:
        yield "served", "; ".join(map(_served, advice.tiers))
    known = [tier for tier in advice.tiers if tier.steps_now is not None]
    if known:
        yield "now", "; ".join(_interval(advice, tier, tier.steps_now, tier.seconds_now) for tier in known) + (
            f": goodput {percent(advice.goodput_now)} expected" if advice.goodput_now is not None else "")
    for tier in advice.tiers:
        yield "advised", _advised(advice, tier)
    if advice.goodput_advised is not None:
        yield "goodput", (f"{percent(advice.goodput_advised)} expected as advised (90 %: {percent(advice.goodput_advised_low)} "
                          f"to {percent(advice.goodput_advised_high)})")
    yield "change", advice.change
    if (text := memory_text(advice)) is not None:
        yield "memory", text
    for note in advice.notes:
        yield "note", note


def sentence_of(advice: Advice) -> str:
    """Returns the advice in a few sentences, with what it is computed from."""
    is_several = len(advice.tiers) > 1
    stops = joined([phrase("advice.stop_of", span=stop_text(tier.stall_seconds), tier=phrase(tier.name)) if is_several
                    else stop_text(tier.stall_seconds) for tier in advice.tiers])
    found = phrase("advice.sentence", change=advice.change, failures=failures_text(advice), stops=stops)
    if advice.goodput_advised is None:
        return found
    advised = percent(advice.goodput_advised)
    if advice.goodput_now is None:
        return sentences([found, phrase("advice.expected", advised=advised)])
    key = "advice.expected_now_several" if is_several else "advice.expected_now"
    return sentences([found, phrase(key, advised=advised, now=percent(advice.goodput_now))])


def interval_rows(advice: Advice) -> list[tuple[str, str, str, str, str, str]]:
    """Returns the rows of the table of the page: for each tier, then the goodput: (what, now, advised, range, stop, failures)."""
    def steps(count: int | None, key: str = "advice.steps") -> str:
        if count is None:
            return "?"
        return phrase(key, count=count, span=span_text(count * advice.step_seconds)) if count else phrase("none")

    def known(share: float | None) -> str:
        return "?" if share is None else percent(share)

    def between(low: object, high: object) -> Phrase:
        return phrase("advice.between", low=low, high=high)
    rows = []
    for tier in advice.tiers:
        is_bound = tier.steps_advised is None
        each = span_text(tier.seconds_between_failures_low if is_bound else tier.seconds_between_failures)
        rows.append((phrase("advice.saves_to", tier=phrase(tier.name)), steps(tier.steps_now),
                     steps(tier.steps_low, "advice.steps_or_more") if is_bound else steps(tier.steps_advised),
                     between(tier.steps_low, tier.steps_high) if tier.steps_advised else "",
                     stop_text(tier.stall_seconds), phrase("advice.or_more", span=each) if is_bound else each))
    if advice.goodput_advised is not None:
        rows.append((phrase("advice.goodput"), known(advice.goodput_now), percent(advice.goodput_advised),
                     between(percent(advice.goodput_advised_low), percent(advice.goodput_advised_high)), "", ""))
    return rows


def memory_text(advice: Advice) -> str | None:
    """Returns what a tier in memory would bring; None if the training has one, or nothing is known."""
    if advice.goodput_with_memory is None:
        return None
    memory, disk = advice.tiers_with_memory
    what = phrase("advice.memory_nothing")
    if advice.goodput_with_memory > advice.goodput_advised:
        what = phrase("advice.memory", memory=memory.steps_advised, disk=disk.steps_advised,
                      goodput=percent(advice.goodput_with_memory))
    return sentences([what, *([phrase("advice.assumed")] if advice.assumed else []), *advice.assumed])


def failures_text(advice: Advice) -> str:
    """Returns how often the training fails, and how well that is known."""
    trained, low = span_text(advice.training_seconds), span_text(advice.seconds_between_failures_low)
    if advice.seconds_between_failures is None:
        return phrase("advice.no_failure", trained=trained, low=low)
    return phrase("advice.failures", failures=phrases.counted("failure", advice.failures), trained=trained,
                  each=span_text(advice.seconds_between_failures), low=low, high=span_text(advice.seconds_between_failures_high))


def stop_text(seconds: float) -> str:
    """Returns how long a save stops the training: '0.39 s', or '4.2 ms'."""
    return span_text(seconds) if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def percent(share: float) -> str:
    """Returns '94.6 %'; near 100 % with more digits, so that what is lost has two."""
    digits = 1 if share < 0.99 else 2 if share < 0.999 else 3
    return f"{share * 100:.{digits}f} %"


def _costs(advice: Advice, tier: TierAdvice) -> str:
    write = "" if not tier.write_seconds else (
        f"; its checksums take {stop_text(tier.write_seconds)} in the background" if tier.name == MEMORY else
        f"; it is written in the background in {span_text(tier.write_seconds)}")
    load = "" if tier.load_seconds is None else f", {span_text(tier.load_seconds)} of it select and load the checkpoint"
    any_start = "a restart" if any(row.restarts for row in advice.tiers) else "a start"
    start = f"a restart from {tier.name}" if tier.restarts and len(advice.tiers) > 1 else any_start
    return (f"to {tier.name}: the training stops for {stop_text(tier.stall_seconds)} ({tier.saves} measured){write}; a step "
            f"takes {span_text(advice.step_seconds)}; {start} takes {span_text(tier.restart_seconds)}{load}")


def _served(tier: TierAdvice) -> str:
    return (f"{tier.name}: {tier.failures} failure{'' if tier.failures == 1 else 's'}, one in "
            f"{span_text(tier.seconds_between_failures)} (90 %: {span_text(tier.seconds_between_failures_low)} to "
            f"{span_text(tier.seconds_between_failures_high)})")


def _advised(advice: Advice, tier: TierAdvice) -> str:
    if tier.steps_advised is None:
        return f"{_interval(advice, tier, tier.steps_low, tier.steps_low * advice.step_seconds)} or less often"
    if not tier.steps_advised:
        return f"no saves to {tier.name}: saves to disk alone lose less"
    found = _interval(advice, tier, tier.steps_advised, tier.seconds_advised)
    return f"{found}; the best is with 90 % between {tier.steps_low} and {tier.steps_high} steps"


def _interval(advice: Advice, tier: TierAdvice, steps: int, seconds: float | None) -> str:
    where = f" to {tier.name}" if len(advice.tiers) > 1 else ""
    return f"a save{where} every {steps} step{'' if steps == 1 else 's'}" + (f" ({span_text(seconds)})" if seconds else "")
