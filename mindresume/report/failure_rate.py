"""Estimates how often a training fails, from a number of failures in a time, and how well that number is known.

    rate = FailureRate(failures=3, seconds=86400.0)
    rate.per_second, rate.range(0.9)            # 4.05e-05, (1.25e-05, 8.14e-05)
    FailureRate(0, 86400.0).upper(0.95)         # 3.47e-05: a bound; one failure an eight hours is the most that fits

    PartRate(FailureRate(10, 86400.0), own=7, other=2)      # the rate of one of two kinds; one failure does not tell its kind

Failures are taken as a Poisson process. With Jeffreys' prior the rate after k failures in T seconds has the distribution
Gamma(k + 1/2, T). Without a failure there is no estimate, only an upper bound. With Jeffreys' prior the share of one kind, after
``own`` failures of this kind and ``other`` ones, has the distribution Beta(own + 1/2, other + 1/2).
"""
from __future__ import annotations

import math
from dataclasses import dataclass


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
