"""Words an advice for people: the lines of ``mindresume advise``, and the sentence of the report."""
from __future__ import annotations

from collections.abc import Iterable

from mindresume.formatting import span_text
from mindresume.report.advice import Advice, TierAdvice


def lines_of(advice: Advice) -> Iterable[tuple[str, str]]:
    """Yields (name, text) of each line."""
    for tier in advice.tiers:
        yield "save", _costs(advice, tier)
    yield "failure", failures_text(advice)
    for tier in advice.tiers:
        if tier.steps_now is not None:
            yield "now", (f"{_interval(tier.steps_now, tier.seconds_now)}"
                          + (f": goodput {_percent(advice.goodput_now)} expected" if advice.goodput_now is not None else ""))
        yield "advised", _advised(advice, tier)
    yield "change", advice.change
    for note in advice.notes:
        yield "note", note


def sentence_of(advice: Advice) -> str:
    """Returns the advice in one sentence, with what it is computed from."""
    tier = advice.tiers[-1]
    expected = "" if advice.goodput_advised is None else f" Expected goodput {_percent(advice.goodput_advised)}"
    if expected and advice.goodput_now is not None:
        expected += f", {_percent(advice.goodput_now)} with the present interval"
    return f"{advice.change} ({failures_text(advice)}; a save stops the training for {span_text(tier.stall_seconds)}.)" + (
        expected + "." if expected else "")


def failures_text(advice: Advice) -> str:
    """Returns how often the training fails, and how well that is known."""
    trained, low = span_text(advice.training_seconds), span_text(advice.seconds_between_failures_low)
    if advice.seconds_between_failures is None:
        return f"none in {trained} of training: with 95 % probability at most one in {low}"
    count = f"{advice.failures} failure{'' if advice.failures == 1 else 's'}"
    return (f"{count} in {trained} of training: one in {span_text(advice.seconds_between_failures)} (90 %: {low} to "
            f"{span_text(advice.seconds_between_failures_high)})")


def _costs(advice: Advice, tier: TierAdvice) -> str:
    write = f"; it is written in the background in {span_text(tier.write_seconds)}" if tier.write_seconds else ""
    load = "" if advice.load_seconds is None else f", {span_text(advice.load_seconds)} of it select and load the checkpoint"
    start = "a restart" if advice.restarts else "a start"
    return (f"to {tier.name}: the training stops for {span_text(tier.stall_seconds)} ({advice.saves} measured){write}; a step "
            f"takes {span_text(advice.step_seconds)}; {start} takes {span_text(tier.restart_seconds)}{load}")


def _advised(advice: Advice, tier: TierAdvice) -> str:
    if tier.steps_advised is None:
        return f"{_interval(tier.steps_low, tier.steps_low * advice.step_seconds)} or less often"
    found = (f"{_interval(tier.steps_advised, tier.seconds_advised)}: goodput {_percent(advice.goodput_advised)} expected (90 %: "
             f"{_percent(advice.goodput_advised_low)} to {_percent(advice.goodput_advised_high)})")
    if tier.steps_high is None:
        return found
    return f"{found}; the best is with 90 % between {tier.steps_low} and {tier.steps_high} steps"


def _interval(steps: int, seconds: float | None) -> str:
    return f"a save every {steps} step{'' if steps == 1 else 's'}" + (f" ({span_text(seconds)})" if seconds else "")


def _percent(share: float) -> str:
    """Returns '94.6 %'; near 100 % with more digits, so that what is lost has two."""
    digits = 1 if share < 0.99 else 2 if share < 0.999 else 3
    return f"{share * 100:.{digits}f} %"
