"""Estimates how often a training fails, from a number of failures in a time, and how well that number is known.

    rate = FailureRate(failures=3, seconds=86400.0)
    rate.per_second, rate.range(0.9)            # 4.05e-05, (1.25e-05, 8.14e-05)
    FailureRate(0, 86400.0).upper(0.95)         # 3.47e-05: a bound; one failure an eight hours is the most that fits

Failures are taken as a Poisson process. With Jeffreys' prior the rate after k failures in T seconds has the distribution
Gamma(k + 1/2, T). Without a failure there is no estimate, only an upper bound.
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
