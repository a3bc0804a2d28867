"""Advises how often a training should save to each tier, by what its event files and logs have
measured (Young 1974, Daly 2006).

    steps between two saves = sqrt(2 * stall / rate of the failures that the tier serves) / seconds
    of a step

An interval is not shorter than the write in the background, because the next save waits for it, nor
than one step. Stalls, writes and restarts are medians, so that one save on a busy disk, or a
restart that waited for a person, does not decide.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from mindresume.api.results import Result
from mindresume.errors import MindResumeError
from mindresume.events import DISK, FAILED, MEMORY
from mindresume.formatting import counted, span_text, stall_text
from mindresume.report import phrases
from mindresume.report.builder import Report, build_report, folders_of
from mindresume.report.phrases import Phrase, duration, joined, phrase, stall_duration
from mindresume.report.runs import RunAttempt, Save
from mindresume.storage.posix import PosixStorage

ENOUGH = 5  # failures; with fewer, nothing is proposed
RECENT = 50  # newest saves that count: the disk and the settings of today
HANG = 5  # times the longest step: what is only slow is no hang
NORMAL_95 = 1.645  # quantile of the normal distribution; two tails of 5 % leave 90 %
# settings; their places: texts advice.place.*
KEYS = {DISK: "save_checkpoint_steps", MEMORY: "every_steps"}


class TooLittleMeasuredError(MindResumeError):
    """The event files and logs of a training do not tell what an advice needs."""

    code = "MR-901"


@dataclass(frozen=True)
class TierAdvice(Result):
    """Advises how often to save to one tier, and holds what was measured of it.

    Attributes:
        name: "memory" or "disk".
        saves: Number of saves that were measured.
        stall_seconds: The training waits so long for a save (median).
        write_seconds: A save in the background takes so long until it counts (median); 0 if the
            training waits for it.
        restart_seconds: From the end of a failed attempt to the first new step (median); None
            without a restart from this tier.
        failures: Number of failures that this tier served; those that do not tell are not counted.
        steps_now: Steps between two saves in the latest attempt; None if it has too few saves to
            tell.
        seconds_between_failures: Expected time of training between two failures that this tier
            serves; None, as all below, if there were too few failures.
        steps_advised: Steps between two saves that lose the least time, with two significant
            digits.
        steps_low: With 90 % probability the best interval is at least so long.
        steps_high: With 90 % probability the best interval is at most so long; None if the tier
            served no failure.
        is_limited_by_write: Whether the write in the background decides, because it takes longer
            than the best interval.
    """

    name: str
    saves: int
    stall_seconds: float
    write_seconds: float
    restart_seconds: float | None
    failures: int
    steps_now: int | None
    seconds_between_failures: float | None = None
    steps_advised: int | None = None
    steps_low: int | None = None
    steps_high: int | None = None
    is_limited_by_write: bool = False


@dataclass(frozen=True)
class Advice(Result):
    """Holds an advice on the intervals between saves, and what was measured of the training.

    Attributes:
        output: The output folder of the training.
        step_seconds: Duration of an ordinary step (median).
        failures: Number of failures after a first step.
        training_seconds: Time of training in which they happened, without starts and downtime.
        seconds_between_failures: Expected time of training between two failures; None without a
            failure.
        seconds_between_failures_low: With 90 % probability at least this; None without a failure.
        seconds_between_failures_high: With 90 % probability at most this; None without a failure.
        tiers: One TierAdvice for each place that saves go to: memory, if the training has that
            tier, then the disk.
        change: What to change in the YAML file, as sentences.
        hang_timeout: Seconds for ``--hang-timeout`` of ``mindresume run``: HANG times the longest
            time between two logged steps, saves and evaluations in it, in full minutes, 300 at
            least; None: there are no two.
    """

    output: str
    step_seconds: float
    failures: int
    training_seconds: float
    seconds_between_failures: float | None
    seconds_between_failures_low: float | None
    seconds_between_failures_high: float | None
    tiers: tuple[TierAdvice, ...]
    change: str
    hang_timeout: int | None = None


def advise(path: str | os.PathLike[str], *, logs: Iterable[str | os.PathLike[str]] = ()) -> Advice:
    """Advises how often a training should save.

    Args:
        path: The output folder of the training, with its logs, event files and checkpoint folder;
            or the folder above it, or the checkpoint folder.
        logs: Other folders with logs or event files.

    Returns:
        An Advice. Nothing is written.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        TooLittleMeasuredError: No save, no step, or no time of training was measured.
    """
    output, root = folders_of(os.fspath(path))
    return _advice(
        build_report(PosixStorage(), output, root, [os.fspath(folder) for folder in logs])
    )


def advice_of(report: Report) -> Advice | None:
    """Returns the advice for a report; None if too little was measured."""
    try:
        return _advice(report)
    except TooLittleMeasuredError:
        return None


def _advice(report: Report) -> Advice:
    attempts, where = report.attempts, report.output
    if not attempts:
        raise TooLittleMeasuredError(
            f"{where}: no logs and no event files of a training were found "
            "(mindresume_events/*.jsonl "
            f"and log*/rank_*/info.log*); give the output folder, and other folders with --logs"
        )
    step = next(
        (attempt.losses.typical for attempt in reversed(attempts) if len(attempt.losses)), 0.0
    )
    if step <= 0:
        raise TooLittleMeasuredError(
            f"{where}: the logs hold no time of a step, so the costs of a failure are unknown; "
            f"give the folder of mindformers' logs (log*/rank_*/info.log*) with --logs"
        )
    saves = [save for attempt in attempts for save in attempt.saves.disk]
    saves = [save for save in saves if save.write_seconds is not None][-RECENT:]
    if not saves:
        raise TooLittleMeasuredError(
            f"{where}: no event file tells how long a save took; an advice needs at least one save "
            f"to disk of a training with mindresume"
        )
    trained = [
        math.fsum(
            span.end - span.begin for span in row.timeline if span.kind in ("productive", "lost")
        )
        for row in report.accounts
    ]
    seconds = math.fsum(trained)
    if seconds <= 0:
        raise TooLittleMeasuredError(
            f"{where}: no attempt has two logged steps, so the time of training is unknown"
        )
    failures = sum(
        spent > 0 and attempt.outcome == FAILED
        for spent, attempt in zip(trained, attempts, strict=True)
    )
    tiers = _measured_tiers(report, saves, step, failures)
    if failures >= ENOUGH:
        tiers = [_with_interval(tier, tiers, failures / seconds, step) for tier in tiers]
    low, high = count_range(failures)
    between = (
        (seconds / failures, seconds / high, seconds / low) if failures else (None, None, None)
    )
    longest = max(
        (np.diff(it.losses.times).max() for it in attempts if len(it.losses) > 1), default=0.0
    )
    return Advice(
        where,
        step,
        failures,
        seconds,
        *between,
        tuple(tiers),
        _change(tiers, failures),
        max(300, math.ceil(HANG * longest / 60) * 60) if longest else None,
    )


def _measured_tiers(
    report: Report, saves: Sequence[Save], step: float, failures: int
) -> list[TierAdvice]:
    """Returns what was measured of memory, if the latest attempt with saves uses it, and of the
    disk. ``saves``: the newest ones to the disk whose writes were measured."""
    attempts, is_background = report.attempts, saves[-1].is_background
    saves = [save for save in saves if save.is_background == is_background]
    disk = TierAdvice(
        DISK,
        len(saves),
        median(save.stall_seconds for save in saves),
        median(save.write_seconds or 0.0 for save in saves) if is_background else 0.0,
        _restart_seconds(report, step, is_memory=False),
        failures,
        _steps_now(attempts, DISK),
    )
    used = (row.saves.memory for row in reversed(attempts) if row.saves.disk or row.saves.memory)
    if not next(used):
        return [disk]
    copies = [save for attempt in attempts for save in attempt.saves.memory][-RECENT:]
    checksums = median(save.background_seconds for save in copies)
    survived, lost = _survivals(attempts)
    memory = TierAdvice(
        MEMORY,
        len(copies),
        # The end of the next step waits until the checksums are done.
        median(save.stall_seconds for save in copies) + max(checksums - step, 0.0),
        checksums,
        _restart_seconds(report, step, is_memory=True),
        survived,
        _steps_now(attempts, MEMORY),
    )
    return [memory, replace(disk, failures=lost)]


def _restart_seconds(report: Report, step: float, is_memory: bool) -> float | None:
    """Returns the median time of a restart from one tier; None if there was none."""
    seconds = [
        max(row.restart_seconds - step, 0.0)
        for row in report.recoveries
        if (row.source == MEMORY) == is_memory
    ]
    return median(seconds) if seconds else None


def _steps_now(attempts: Sequence[RunAttempt], tier: str) -> int | None:
    """Returns the number of steps between two saves of the latest attempt that tells; None if none
    does.

    It is the configured one, or in sink mode with longer sinks the least one that occurred; in
    event files of earlier versions the usual one. The save at the end of a training is not counted,
    which falls on any step.
    """
    for saves in (attempt.saves for attempt in reversed(attempts)):
        if tier == MEMORY:
            configured, steps = saves.memory_steps, [save.step for save in saves.memory]
        else:
            configured, steps = saves.disk_steps, [row.step for row in saves.disk if row.is_staged]
        apart = np.diff(steps)
        if configured:
            return max(configured, int(min(apart[:-1], default=0)))
        if len(apart):
            return int(np.median(apart[:-1] if len(apart) > 1 else apart)) or None
    return None


def _survivals(attempts: Sequence[RunAttempt]) -> tuple[int, int]:
    """Returns the number of failures that left the memory of the nodes intact, and of those that
    did not, by what the next start took. A start that took a checkpoint from the disk tells only if
    memory had had a newer one on all ranks."""
    survived = lost = 0
    for index, attempt in enumerate(attempts):
        origin = next(
            (
                row.origin
                for row in attempts[index + 1 :]
                if row.origin.source or row.origin.is_fresh
            ),
            None,
        )
        if attempt.outcome != FAILED or attempt.last_step is None or origin is None:
            continue
        # The end of a step waits for a save of an earlier end; all ranks have begun a step that one
        # of them has done.
        sure = attempt.last_step - 2 * attempt.losses.interval
        newest = max(
            (save.step for save in attempt.saves.memory if save.step <= sure), default=None
        )
        if origin.source == MEMORY:
            survived += 1
        elif newest is not None and (
            origin.step is None
            or origin.step < newest
            or origin.run_id not in (None, attempt.run_id)
        ):
            lost += 1
    return survived, lost


def _with_interval(
    tier: TierAdvice, tiers: Sequence[TierAdvice], rate: float, step: float
) -> TierAdvice:
    """Returns the tier with its interval. ``rate``: of all failures, in 1/s. A tier beside another
    one serves the share (k + 1/2) / (n + 1) of them, after k of the n failures that tell."""
    count = float(tier.failures)
    if len(tiers) > 1:
        count += 0.5
        rate *= count / (sum(other.failures for other in tiers) + 1)
    least = max(math.ceil(tier.write_seconds / step), 1)

    def steps(failures: float) -> int:
        """Returns the best interval if this tier had served so many failures."""
        best = math.sqrt(2 * tier.stall_seconds * count / (rate * failures)) / step
        return max(round(float(f"{best:.2g}")), least)

    low, high = count_range(count)
    return replace(
        tier,
        seconds_between_failures=1 / rate,
        steps_advised=steps(count),
        steps_low=steps(high),
        steps_high=steps(low) if low else None,
        is_limited_by_write=1 < least == steps(count),
    )


def count_range(count: float) -> tuple[float, float]:
    """Returns the numbers between which the expected number of events lies with 90 %, after
    ``count`` events. It is the interval of a Poisson process by chi-squared quantiles, as Wilson
    and Hilferty approximate them. Its lower end is 0 below one event.
    """

    def end(number: float, quantile: float) -> float:
        return number * (1 - 1 / (9 * number) + quantile / (3 * math.sqrt(number))) ** 3

    return end(count, -NORMAL_95) if count >= 1 else 0.0, end(count + 1, NORMAL_95)


# ---- words ---------------------------------------------------------------------------------------


def _change(tiers: Sequence[TierAdvice], failures: int) -> Phrase:
    """Returns what to change, as one sentence for each tier. An interval in the range of the best
    one stays."""
    if failures < ENOUGH:
        return (
            phrase("advice.too_few", failures=failures, enough=ENOUGH)
            if failures
            else phrase("advice.no_estimate")
        )
    changes = []
    for tier in tiers:
        key, now = KEYS[tier.name], tier.steps_now
        if now and tier.steps_low <= now <= (tier.steps_high or math.inf):
            changes.append(phrase("advice.keep", key=key, now=now))
        else:
            changes.append(
                phrase(
                    "advice.set_now" if now else "advice.set",
                    key=key,
                    steps=tier.steps_advised,
                    now=now,
                    place=phrase(f"advice.place.{tier.name}"),
                )
            )
    return joined(changes, "sentence")


def failures_text(advice: Advice) -> Phrase:
    """Returns how often the training fails, and how well that is known."""
    return phrase(
        "advice.failures",
        failures=phrases.counted("failure", advice.failures),
        trained=duration(advice.training_seconds),
        **{
            name: duration(getattr(advice, f"seconds_between_failures{end}"))
            for name, end in (("each", ""), ("low", "_low"), ("high", "_high"))
        },
    )


def sentence_of(advice: Advice) -> Phrase:
    """Returns the advice in a few sentences, with what it is computed from; in one as long as
    nothing is proposed."""
    stops = [
        phrase("advice.stop_of", span=stall_duration(tier.stall_seconds), tier=phrase(tier.name))
        for tier in advice.tiers
    ]
    if advice.failures < ENOUGH:
        return phrase(
            "advice.none",
            failures=phrases.counted("failure", advice.failures),
            trained=duration(advice.training_seconds),
            enough=ENOUGH,
            stops=joined(stops),
        )
    return phrase(
        "advice.sentence", change=advice.change, failures=failures_text(advice), stops=joined(stops)
    )


def lines_of(advice: Advice) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each line; one without a name as long as nothing is proposed."""
    if advice.failures < ENOUGH:
        yield "", sentence_of(advice)
    else:
        yield from _interval_lines(advice)
    if advice.hang_timeout:
        yield (
            "hang",
            f"--hang-timeout {advice.hang_timeout} of mindresume run: {HANG} times the longest "
            "time between two steps, five minutes at least",
        )


def _interval_lines(advice: Advice) -> Iterator[tuple[str, str]]:
    """Yields the lines on the intervals between saves."""
    for tier in advice.tiers:
        write = (
            f", and is complete after {stall_text(tier.write_seconds)} in the background"
            if tier.write_seconds
            else ""
        )
        restart = (
            ""
            if tier.restart_seconds is None
            else f"; a restart from it takes {span_text(tier.restart_seconds)}"
        )
        yield (
            tier.name,
            f"a save stops the training for {stall_text(tier.stall_seconds)} ({tier.saves} "
            f"measured){write}{restart}",
        )
    yield "failure", failures_text(advice)
    for tier in advice.tiers:
        if tier.steps_now is not None:
            yield "now", f"a save to {tier.name} {_every(tier.steps_now, advice)}"
        if tier.steps_advised is not None:
            high = "or more steps" if tier.steps_high is None else f"to {tier.steps_high} steps"
            limit = "; the write in the background decides" if tier.is_limited_by_write else ""
            served = (
                f"{counted(tier.failures, 'failure')}, one in "
                f"{span_text(tier.seconds_between_failures)}"
            )
            yield (
                "advised",
                (
                    f"a save to {tier.name} {_every(tier.steps_advised, advice)}; 90 %: "
                    f"{tier.steps_low} {high}; it served {served}{limit}"
                ),
            )
    yield "change", advice.change


def _every(steps: int, advice: Advice) -> str:
    return f"every {counted(steps, 'step')} ({span_text(steps * advice.step_seconds)})"
