"""Computes the interval between saves that loses the least time, and the goodput of any interval (Young 1974, Daly 2006).

    disk = Tier("disk", stall_seconds=0.4, write_seconds=20.0, restart_seconds=90.0)
    memory = Tier("memory", stall_seconds=0.1, write_seconds=0.0, restart_seconds=30.0, survival=0.8)
    best_interval(disk, rate, share=0.2)                    # seconds of training between two saves to the disk
    goodput({disk: 900.0, memory: 60.0}, rate)              # share of the time that makes progress

A *tier* is a place that saves go to. A failure leaves a tier intact with the probability ``survival``; a restart takes the newest
checkpoint of all intact tiers. Tiers are nested: a failure that leaves a tier intact leaves every tier with a larger ``survival``
intact, too. So each tier has its *share* of the failures: those that it survives, and no tier with a smaller ``survival`` does.

For each tier, with the rate of its failures ``l``, the stall ``c``, and ``t`` seconds of training between two saves:

    time for t seconds of training = (1/l + r) * (exp(l * (t + c)) - 1)             r: restart, and what is not durable yet
    smallest at                      exp(l * (t + c)) * (1 - l * t) = 1             about sqrt(2 c / l)

A save in the background costs its stall, not its write. The write delays when a save counts (its seconds are lost once more at
each failure), and bounds the interval: the next save waits until it is done.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HOPELESS = 500.0                # exponents above have no meaning: the training never completes an interval


@dataclass(frozen=True)
class Tier:
    """Describes a place that saves go to.

    Attributes:
        name: for people.
        stall_seconds: the training waits so long for a save.
        write_seconds: in the background, until the save is durable; 0 if the training waits for all of it.
        restart_seconds: from a failure to the first new step.
        survival: probability that a failure leaves it intact.
    """
    name: str
    stall_seconds: float
    write_seconds: float
    restart_seconds: float
    survival: float = 1.0


def shares(tiers: Iterable[Tier]) -> dict[Tier, float]:
    """Returns {tier: share of the failures after which the restart takes its checkpoint}."""
    found, before = {}, 0.0
    for tier in sorted(tiers, key=lambda tier: tier.survival):
        found[tier], before = max(tier.survival - before, 0.0), max(tier.survival, before)
    return found


def best_interval(tier: Tier, rate: float, share: float = 1.0) -> float:
    """Returns the seconds of training between two saves that lose the least time: not less than the write takes.

    Args:
        rate: failures per second of training, above 0.
        share: of the failures, that this tier serves; 0: it is never needed, and the interval is infinite.
    """
    own = rate * share
    if own <= 0:
        return math.inf
    return max(_optimum(own, tier.stall_seconds), tier.write_seconds)


def _optimum(rate: float, stall: float) -> float:
    """Returns the root of exp(rate * (t + stall)) * (1 - rate * t) = 1, which lies between 0 and 1 / rate."""
    low, high = 0.0, 1 / rate
    for _ in range(200):
        middle = (low + high) / 2
        left = 1 - rate * middle
        if left > 0 and rate * (middle + stall) + math.log(left) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def goodput(intervals: Mapping[Tier, float], rate: float) -> float:
    """Returns the share of the time that makes progress, 0 to 1.

    Args:
        intervals: {tier: seconds of training between two of its saves}.
        rate: failures per second of training.
    """
    spent = 1.0
    for tier, share in shares(intervals).items():
        interval, own = intervals[tier], rate * share
        if own <= 0:
            spent += tier.stall_seconds / interval
            continue
        exponent = own * (interval + tier.stall_seconds)
        if exponent > HOPELESS:
            return 0.0
        spent += (1 / own + tier.restart_seconds + tier.write_seconds) * math.expm1(exponent) / interval - 1
    return 1 / spent
