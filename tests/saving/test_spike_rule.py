"""Which values of a curve are spikes."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.saving.spike_rule import FLOOR, SpikeRule

WINDOW, FACTOR, FIRST = 32, 10.0, 8
VALUES = st.floats(-1e6, 1e6)
CURVES = st.lists(VALUES, max_size=100)


def rule(values=(), **changes):
    """Returns a rule that has seen these values."""
    made = SpikeRule(**{"window": WINDOW, "factor": FACTOR, "min_steps": FIRST, **changes})
    for value in values:
        made.judge(value)
    return made


def noisy(steps, level=2.0, seed=1):
    draw = random.Random(seed)
    return [draw.gauss(level, 0.05) for _ in range(steps)]


def test_a_spike_is_found_and_the_reason_has_its_numbers():
    three = [1.0, 2.0, 3.0] * 4  # median 2, MAD 1
    assert not rule(three).judge(12.0)
    reason = rule(three).judge(12.5)
    assert all(number in reason for number in ("12.5 ", " 10.5 ", " 1 ", " 2,", " 12 "))


def test_one_spike_does_not_hide_the_next():
    curve = rule(noisy(WINDOW))
    assert all(curve.judge(4.0) and not curve.judge(2.0) for _ in range(2 * WINDOW))


def test_a_jump_that_stays_is_a_new_level():
    curve = rule(noisy(WINDOW))
    found = [bool(curve.judge(value)) for value in noisy(2 * WINDOW, level=5.0)]
    assert found == [True] * FIRST + [False] * (2 * WINDOW - FIRST)
    assert curve.judge(7.0)


def test_a_flat_curve_allows_for_rounding():
    curve = rule([2.0] * WINDOW)
    assert not curve.judge(2.0 * (1 + 0.9 * FACTOR * FLOOR))
    assert curve.judge(2.0 * (1 + 1.1 * FACTOR * FLOOR))


def test_a_curve_of_zeros_has_no_scale():
    assert not rule([0.0] * WINDOW).judge(1.0)


def test_a_window_below_the_first_steps_is_enough():
    assert rule(noisy(64), window=8, min_steps=32).judge(9.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_no_spike_and_changes_nothing(value):
    curve = rule(noisy(FIRST))
    assert not any(curve.judge(value) for _ in range(WINDOW))
    assert curve.judge(4.0)


@given(st.lists(VALUES, max_size=FIRST))
def test_the_first_steps_are_not_judged(values):
    curve = rule()
    assert not any(curve.judge(value) for value in values)


@given(CURVES, st.floats(0, 1e6))
def test_a_low_value_is_none(values, less):
    assert not rule(values, factor=0.0).judge(min(values, default=0.0) - less)


@given(CURVES)
def test_a_curve_that_only_falls_has_none(values):
    curve = rule()
    assert not any(curve.judge(value) for value in sorted(values, reverse=True))


@given(CURVES, st.floats(0.001, 1000), st.integers(-20, 20))
def test_the_unit_does_not_matter(values, factor, power):
    one, other = rule(factor=factor), rule(factor=factor)
    for value in values:
        assert bool(one.judge(value)) == bool(other.judge(value * 2.0**power))


@given(st.lists(VALUES, min_size=FIRST, max_size=WINDOW), VALUES, st.floats(0, 5))
def test_a_larger_factor_finds_no_more(values, value, smaller):
    large, small = (rule(factor=math.inf) for _ in range(2))
    for seen in values:  # both accept all of them
        large.judge(seen), small.judge(seen)
    large.factor, small.factor = FACTOR, smaller
    assert not large.judge(value) or small.judge(value)
