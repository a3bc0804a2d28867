"""Advises how often a training should save, from what its event files and logs have measured.

    advice = mindresume.advise("output")
    advice.failures, advice.tiers[0].steps_now, advice.tiers[0].steps_advised, advice.change

    accounts of the attempts ─▶ measure: stall and write of the saves, steps, failures, restarts ─▶ Measured
    Measured ─▶ advice_from: failure_rate, save_interval ─▶ Advice

Stalls, writes and restarts are medians, so that one save on a busy disk, or a restart that waited for a person, does not decide.
Every number of the future assumes that the training goes on as it did: the same size of the job, the same disk, the same rate of
failures.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mindresume.api.results import Result
from mindresume.errors import MindResumeError
from mindresume.events import FAILED
from mindresume.report.accounting import AttemptAccount
from mindresume.report.failure_rate import FailureRate
from mindresume.report.recoveries import recoveries_of
from mindresume.report.save_interval import Tier, best_interval, goodput, shares

SHARE = 0.9                     # probability of the ranges
BOUND = 0.95                    # probability of the bound without a failure
RECENT = 50                     # newest saves that count: the disk and the settings of today
ENOUGH = 0.05                   # an interval that loses less than this more than the best one is as good
DISK = "disk"


class TooLittleMeasuredError(MindResumeError):
    """The event files and logs of a training do not tell what an advice needs."""


@dataclass(frozen=True)
class Measured:
    """Holds what an advice is computed from.

    Attributes:
        step_seconds: of an ordinary step.
        tiers: where saves go to, with what they cost.
        saves: number of saves that were measured.
        is_background: the disk is written while the training continues.
        load_seconds: of selecting, verifying and loading; None: not measured.
        restarts: number of restarts that were measured; 0: the restart of a tier is only the time of a start.
        rate: failures after a first step, and the time of training in which they happened.
        failed_starts: starts that failed before their first step; they lengthen restarts, and count there.
        steps_now: {name of a tier: steps between two saves in the latest attempt that tells}.
    """
    step_seconds: float
    tiers: tuple[Tier, ...]
    saves: int
    is_background: bool
    load_seconds: float | None
    restarts: int
    rate: FailureRate
    failed_starts: int
    steps_now: dict[str, int]


@dataclass(frozen=True)
class TierAdvice(Result):
    """Advises how often to save to one tier.

    Attributes:
        name: "disk".
        stall_seconds: The training waits so long for a save (median).
        write_seconds: A save in the background takes so long until it is durable (median); 0 if the training waits for it.
        restart_seconds: From the end of a failed attempt to the first new step (median).
        steps_now: Steps between two saves in the latest attempt; None if it has too few saves to tell.
        seconds_now: The same in seconds of training.
        steps_advised: Steps between two saves that lose the least time; None without a failure.
        seconds_advised: The same in seconds of training.
        steps_low: With 90 % probability the best interval is at least so long; without a failure, it is with 95 %.
        steps_high: With 90 % probability the best interval is at most so long; None without a failure.
        is_limited_by_write: The write in the background takes longer than the best interval by failures; the write decides.
    """
    name: str
    stall_seconds: float
    write_seconds: float
    restart_seconds: float
    steps_now: int | None
    seconds_now: float | None
    steps_advised: int | None
    seconds_advised: float | None
    steps_low: int
    steps_high: int | None
    is_limited_by_write: bool


@dataclass(frozen=True)
class Advice(Result):
    """Holds an advice on the interval between saves.

    Attributes:
        output: The output folder of the training.
        step_seconds: Duration of an ordinary step (median).
        saves: Number of saves that were measured.
        is_background: Whether the disk is written while the training continues.
        load_seconds: Median time of selecting, verifying and loading; None if it was not measured.
        restarts: Number of restarts that were measured; 0: ``restart_seconds`` is only the time of a start.
        failures: Number of failures after a first step.
        training_seconds: Time of training in which they happened.
        seconds_between_failures: Expected time of training between two failures; None without a failure.
        seconds_between_failures_low: With 90 % probability at least this; without a failure, with 95 %.
        seconds_between_failures_high: With 90 % probability at most this; None without a failure.
        tiers: One TierAdvice for each place that saves go to.
        goodput_now: Expected share of the time that makes progress with the present intervals, 0 to 1; None if it is not known.
        goodput_advised: The same with the advised intervals; None without a failure.
        goodput_advised_low: With 90 % probability at least this.
        goodput_advised_high: With 90 % probability at most this.
        change: What to change in the YAML file, as a sentence.
        notes: What limits the advice, as sentences.
    """
    output: str
    step_seconds: float
    saves: int
    is_background: bool
    load_seconds: float | None
    restarts: int
    failures: int
    training_seconds: float
    seconds_between_failures: float | None
    seconds_between_failures_low: float
    seconds_between_failures_high: float | None
    tiers: tuple[TierAdvice, ...]
    goodput_now: float | None
    goodput_advised: float | None
    goodput_advised_low: float | None
    goodput_advised_high: float | None
    change: str
    notes: tuple[str, ...]


# ---- measuring -------------------------------------------------------------------------------------------------------

def measure(rows: Sequence[AttemptAccount], where: str) -> Measured:
    """Returns what the attempts of a training tell. ``where``: its output folder, for messages. Raises
    TooLittleMeasuredError."""
    if not rows:
        raise TooLittleMeasuredError(f"{where}: no logs and no event files of a training were found (mindresume_events/*.jsonl "
                                     f"and log*/rank_*/info.log*); give the output folder, and other folders with --logs")
    step = next((row.attempt.losses.typical for row in reversed(rows) if len(row.attempt.losses)), 0.0)
    if step <= 0:
        raise TooLittleMeasuredError(f"{where}: the logs hold no time of a step, so the costs of a failure are unknown; give the "
                                     f"folder of mindformers' logs (log*/rank_*/info.log*) with --logs")
    saves = [save for row in rows for save in row.attempt.saves if save.write_seconds is not None][-RECENT:]
    if not saves:
        raise TooLittleMeasuredError(f"{where}: no event file tells how long a save took; an advice needs at least one save of a "
                                     f"training with mindresume")
    background = saves[-1].is_background
    saves = [save for save in saves if save.is_background == background]
    trained = [row for row in rows if _trained_seconds(row) > 0]
    rate = FailureRate(sum(row.attempt.outcome == FAILED for row in trained), math.fsum(map(_trained_seconds, trained)))
    if rate.seconds <= 0:
        raise TooLittleMeasuredError(f"{where}: no attempt has two logged steps, so the time of training is unknown")
    found = recoveries_of(rows)
    restart = [max(recovery.restart_seconds - step, 0.0) for recovery in found] or [
        row.seconds.startup for row in trained if not row.attempt.is_cut][-1:] or [0.0]
    loads = [row.attempt.load_seconds for row in rows if row.attempt.load_seconds is not None]
    disk = Tier(DISK, statistics.median(save.stall_seconds for save in saves),
                statistics.median(save.write_seconds for save in saves) if background else 0.0, statistics.median(restart))
    now = _steps_between_saves(rows)
    return Measured(step, (disk,), len(saves), background, statistics.median(loads) if loads else None, len(found), rate,
                    sum(row.attempt.outcome == FAILED and row.attempt.last_step is None for row in rows),
                    {} if now is None else {DISK: now})


def _trained_seconds(row: AttemptAccount) -> float:
    """Returns the seconds from the begin of the first step to the last one."""
    return math.fsum(span.end - span.begin for span in row.timeline if span.kind in ("productive", "lost"))


def _steps_between_saves(rows: Sequence[AttemptAccount]) -> int | None:
    """Returns the usual number of steps between two saves of the latest attempt with two; None if no attempt has two. The save at
    the end of a training is not counted, which falls on any step."""
    for row in reversed(rows):
        steps = [save.step for save in row.attempt.saves if save.is_staged]
        apart = np.diff(steps)
        if len(apart):
            return int(np.median(apart[:-1] if len(apart) > 1 else apart)) or None
    return None


# ---- computing -------------------------------------------------------------------------------------------------------

def advice_from(measured: Measured, output: str = "") -> Advice:
    """Returns the advice that follows from ``measured``."""
    rate, step, tiers = measured.rate, measured.step_seconds, measured.tiers
    low, high = rate.range(SHARE)                           # without a failure: 0 and an upper bound
    bound = rate.upper(BOUND)
    expected = rate.per_second
    rows = tuple(_tier_advice(tier, share, measured, (low, high) if expected else (0.0, bound))
                 for tier, share in shares(tiers).items())
    by_name = {row.name: row for row in rows}
    now = {tier: by_name[tier.name].seconds_now for tier in tiers}
    best = {tier: by_name[tier.name].seconds_advised for tier in tiers}
    ready = None not in best.values()
    return Advice(
        output, step, measured.saves, measured.is_background, measured.load_seconds, measured.restarts, rate.failures,
        rate.seconds, 1 / expected if expected else None, 1 / (high if expected else bound), 1 / low if expected else None, rows,
        goodput(now, expected) if expected and None not in now.values() else None,
        goodput(best, expected) if ready else None, goodput(best, high) if ready else None, goodput(best, low) if ready else None,
        _change(measured, rows), tuple(_notes(measured, rows)))


def _tier_advice(tier: Tier, share: float, measured: Measured, rates: tuple[float, float]) -> TierAdvice:
    step, now, expected = measured.step_seconds, measured.steps_now.get(tier.name), measured.rate.per_second
    low, high = (best_interval(tier, rate, share) for rate in reversed(rates))
    best = best_interval(tier, expected, share) if expected else None
    steps = None if best is None else steps_of(best, step, tier.write_seconds)
    limited = tier.write_seconds > 0 and (best or low) <= tier.write_seconds
    return TierAdvice(
        tier.name, tier.stall_seconds, tier.write_seconds, tier.restart_seconds, now, now and now * step, steps,
        steps and steps * step, steps_of(low, step, tier.write_seconds),
        steps_of(high, step, tier.write_seconds) if expected and math.isfinite(high) else None, limited)


def steps_of(seconds: float, step_seconds: float, at_least: float = 0.0) -> int:
    """Returns an interval as a number of steps, at least 1, with two significant digits: the cost is flat near its minimum, and a
    number that looks exact would promise more than is known. Not shorter than ``at_least`` seconds."""
    steps = max(seconds / step_seconds, 1.0)
    unit = 10 ** max(math.floor(math.log10(steps)) - 1, 0)
    rounded = max(round(steps / unit) * unit, 1)
    return rounded if rounded * step_seconds >= at_least else math.ceil(math.ceil(at_least / step_seconds) / unit) * unit


def loss_of(tier: Tier, interval: float, rate: float) -> float:
    """Returns the share of the time that saves and repeated steps cost with this interval. The restarts themselves cost the same
    with any."""
    return 1 / max(goodput({tier: interval}, rate), 1e-12) - 1 - rate * tier.restart_seconds


def _change(measured: Measured, rows: Sequence[TierAdvice]) -> str:
    row = next(row for row in rows if row.name == DISK)
    tier = next(tier for tier in measured.tiers if tier.name == DISK)
    share, key = shares(measured.tiers)[tier], "save_checkpoint_steps"
    if row.steps_advised is None:
        if row.steps_now is not None and row.steps_now < row.steps_low:
            return (f"No failure was seen. {key}: {row.steps_now} saves more often than the measured time calls for: "
                    f"{row.steps_low} would do. Keep {row.steps_now} if more failures are expected, in a larger job for example.")
        return (f"No failure was seen, so there is nothing to change: {key} may be {row.steps_low} or more"
                + (f" (it is {row.steps_now})." if row.steps_now else "."))
    if row.steps_now is not None:
        own = measured.rate.per_second * share
        now, best = (loss_of(tier, seconds, own) for seconds in (row.seconds_now, row.seconds_advised))
        if now <= best * (1 + ENOUGH):
            return f"Nothing to change: {key}: {row.steps_now} costs less than {ENOUGH:.0%} more than the best interval."
    return (f"Set {key}: {row.steps_advised} in the CheckpointMonitor of callbacks"
            + (f"; it is {row.steps_now}." if row.steps_now else "."))


def _notes(measured: Measured, rows: Sequence[TierAdvice]) -> Iterable[str]:
    failures = measured.rate.failures
    if not failures:
        yield ("No failure after a first step was recorded: this is a bound, no estimate. A short training without a failure "
               "says little about a long one.")
    elif failures < 5:
        yield (f"{failures} failure{'' if failures == 1 else 's'}: the ranges are wide. An interval half or twice the best one "
               f"costs about a quarter more than it.")
    if not measured.restarts:
        yield "No restart was recorded: the time of a start is taken for it. It does not change the interval."
    if measured.failed_starts:
        yield f"{measured.failed_starts} starts failed before their first step; their time counts to the restarts."
    if any(row.is_limited_by_write for row in rows):
        yield ("The write in the background takes longer than the best interval by failures, and the next save waits for it: a "
               "faster disk, or remove_redundancy: True, would allow a shorter interval.")
    if not measured.is_background:
        yield ("The training waits for the whole write. With async_save: True it waits for one copy in memory; save so for a "
               "while, then ask again: the best interval becomes shorter, and less is lost.")
    if DISK not in measured.steps_now:
        yield "No attempt has two saves, so the present interval is unknown."
