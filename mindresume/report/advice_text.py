"""Words an advice for people: the lines of ``mindresume advise``, and the sentences of the report."""
from __future__ import annotations

from collections.abc import Iterable

from mindresume.events import MEMORY
from mindresume.formatting import span_text
from mindresume.report.advice import Advice, TierAdvice
from mindresume.report.phrases import Phrase, counted, joined, phrase, sentences


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
    return phrase("advice.failures", failures=counted("failure", advice.failures), trained=trained,
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
