"""The rate of failures and its range: against published quantiles of the chi-squared distribution, and without a failure."""
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.report.save_interval import FailureRate, PartRate, gamma_cdf, gamma_quantile


@pytest.mark.parametrize("degrees, probability, quantile", [
    (1, 0.95, 3.8415), (1, 0.05, 0.00393), (2, 0.95, 5.9915), (7, 0.05, 2.1673), (7, 0.95, 14.0671), (21, 0.05, 11.5913),
    (21, 0.95, 32.6706), (100, 0.95, 124.342)])
def test_quantiles_of_chi_squared(degrees, probability, quantile):
    assert 2 * gamma_quantile(degrees / 2, probability) == pytest.approx(quantile, rel=2e-3 if quantile < 1 else 1e-4)


@given(st.floats(0.5, 5000), st.floats(0.001, 0.999))
def test_a_quantile_inverts_the_distribution(shape, probability):
    assert gamma_cdf(shape, gamma_quantile(shape, probability)) == pytest.approx(probability, abs=1e-6)


def test_the_exponential_distribution():
    assert gamma_cdf(1, 2) == pytest.approx(1 - math.exp(-2)) and gamma_cdf(1, 0) == 0 and gamma_cdf(3, 1e4) == 1


def test_the_range_narrows_with_the_failures():
    wide, narrow = FailureRate(2, 1000.0), FailureRate(200, 100_000.0)
    for rate in (wide, narrow):
        low, high = rate.range(0.9)
        assert low < rate.per_second < high
    assert narrow.range(0.9)[1] / narrow.range(0.9)[0] < 1.3 < 5 < wide.range(0.9)[1] / wide.range(0.9)[0]


def test_without_a_failure_there_is_a_bound_and_no_number():
    rate = FailureRate(0, 1000.0)
    assert rate.per_second is None and rate.upper(0.95) == pytest.approx(-math.log(0.05) / 1000)
    assert rate.range(0.95) == (0.0, rate.upper(0.95))


def test_the_rates_of_both_kinds_make_the_whole():
    whole = FailureRate(12, 1000.0)
    parts = PartRate(whole, 7, 3), PartRate(whole, 3, 7)
    assert sum(part.per_second for part in parts) == pytest.approx(whole.per_second)
    assert parts[0].per_second == pytest.approx(whole.per_second * 7.5 / 11)
    for part in parts:
        low, high = part.range(0.9)
        assert low < part.per_second < high
        assert high / low > whole.range(0.9)[1] / whole.range(0.9)[0]


@pytest.mark.parametrize("own, other", [(8, 2), (40, 0), (3, 100)])
def test_the_range_of_a_kind_is_nearly_that_of_its_own_count(own, other):
    ours = PartRate(FailureRate(own + other, 1000.0), own, other).range(0.9)
    alone = [gamma_quantile(own + 0.5, part) / 1000 for part in (0.05, 0.95)]
    assert ours == pytest.approx(alone, rel=0.3)


def test_without_a_failure_all_can_be_of_one_kind():
    whole = FailureRate(0, 1000.0)
    part = PartRate(whole, 0, 0)
    assert part.per_second is None and part.range(0.9) == whole.range(0.9) and part.upper(0.95) == whole.upper(0.95)
    assert PartRate(FailureRate(5, 1000.0), 0, 0).share == 0.5
