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

How often a training fails is estimated from a number of failures in a time, with how well that number is known:

    rate = FailureRate(failures=3, seconds=86400.0)
    rate.per_second, rate.range(0.9)            # 4.05e-05, (1.25e-05, 8.14e-05)
    FailureRate(0, 86400.0).upper(0.95)         # 3.47e-05: a bound; one failure in eight hours is the most that fits

    PartRate(FailureRate(10, 86400.0), own=7, other=2)      # the rate of one of two kinds; one failure does not tell its kind

Failures are taken as a Poisson process. With Jeffreys' prior the rate after k failures in T seconds has the distribution
Gamma(k + 1/2, T). Without a failure there is no estimate, only an upper bound. With Jeffreys' prior the share of one kind, after
``own`` failures of this kind and ``other`` ones, has the distribution Beta(own + 1/2, other + 1/2).
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


@dataclass(frozen=True)
class FailureRate:
    """Holds ``failures`` in ``seconds`` of training."""
    failures: int
    seconds: float

    @property
    def per_second(self) -> float | None:
        """The expected rate; None without a failure."""
        return (self.failures + 0.5) / self.seconds if self.failures else None

    def range(self, share: float) -> tuple[float, float]:
        """Returns the rates between which the true one lies with the probability ``share``; from 0 without a failure."""
        if not self.failures:
            return 0.0, self.upper(share)
        tail = (1 - share) / 2
        return tuple(gamma_quantile(self.failures + 0.5, part) / self.seconds for part in (tail, 1 - tail))

    def upper(self, share: float) -> float:
        """Returns the rate with which so few failures, or fewer, have the probability ``1 - share``. It has no prior, so that
        without a failure it is a bound by the measurement alone."""
        return gamma_quantile(self.failures + 1.0, share) / self.seconds


@dataclass(frozen=True)
class PartRate:
    """Holds the rate of the failures of one of two kinds. ``whole``: the rate of both. ``own``, ``other``: failures whose kind is
    known, of this kind and of the other one."""
    whole: FailureRate
    own: int
    other: int

    @property
    def share(self) -> float:
        """The expected share of this kind; a half if nothing is known."""
        return (self.own + 0.5) / (self.own + self.other + 1)

    @property
    def per_second(self) -> float | None:
        """The expected rate; None without a failure of any kind."""
        whole = self.whole.per_second
        return None if whole is None else whole * self.share

    def range(self, share: float) -> tuple[float, float]:
        """Returns the rates between which the true one lies with the probability ``share``. The product of rate and share is
        taken as a gamma distribution with the same mean and variance; it is nearly one if the kind of all failures is known."""
        if not self.whole.failures:
            return self.whole.range(share)
        rate, own, other = self.whole.failures + 0.5, self.own + 0.5, self.other + 0.5
        shape = 1 / ((1 + 1 / rate) * (1 + other / (own * (own + other + 1))) - 1)
        tail = (1 - share) / 2
        return tuple(gamma_quantile(shape, part) * self.per_second / shape for part in (tail, 1 - tail))

    def upper(self, share: float) -> float:
        """Returns the bound of the rate without a failure: all of them can be of this kind."""
        return self.whole.upper(share)


def gamma_quantile(shape: float, probability: float) -> float:
    """Returns the value below which a Gamma(shape, 1) variable lies with ``probability`` (0 to 1, exclusive)."""
    low, high = 0.0, shape + 1.0
    while gamma_cdf(shape, high) < probability:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if high - low <= 1e-12 * high:
            break
        if gamma_cdf(shape, middle) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def gamma_cdf(shape: float, value: float) -> float:
    """Returns the probability that a Gamma(shape, 1) variable is at most ``value``: the regularized lower incomplete gamma
    function, by its power series, or above its mean by the continued fraction of the upper one."""
    if value <= 0:
        return 0.0
    factor = math.exp(shape * math.log(value) - value - math.lgamma(shape))
    if value < shape + 1:
        term = total = 1 / shape
        for number in range(1, 10_000):
            term *= value / (shape + number)
            total += term
            if term < total * 1e-16:
                break
        return min(total * factor, 1.0)
    tiny = 1e-300
    b = value + 1 - shape
    c, d = 1 / tiny, 1 / b
    fraction = d
    for number in range(1, 10_000):                     # the algorithm of Lentz
        a = -number * (number - shape)
        b += 2
        d = 1 / _not_zero(a * d + b, tiny)
        c = _not_zero(b + a / c, tiny)
        fraction *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return max(1 - factor * fraction, 0.0)


def _not_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
