"""The curve thinned out keeps its ends and its extremes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.report.chart import thinned
from mindresume.report.runs import Losses

VALUES = st.lists(st.floats(width=32), max_size=300).map(np.array)


@given(VALUES, st.integers(4, 60))
def test_ends_and_extremes_are_kept(values, most):
    kept = thinned(values, most)
    assert len(kept) <= most and (np.diff(kept) > 0).all()
    if len(values):
        assert kept[0] == 0 and kept[-1] == len(values) - 1
    finite = values[np.isfinite(values)]
    if len(finite):
        assert {finite.min(), finite.max()} <= set(values[kept])


def losses(steps, seconds=()):
    return Losses(
        np.array(steps), np.ones(len(steps)), np.arange(len(steps)), np.array(seconds, float)
    )


def test_interval_and_typical_step():
    assert losses([5, 10, 15, 20], [9, 1, 1, 2]).interval == 5
    assert losses([5, 10, 15, 20], [9, 1, 1, 2]).typical == pytest.approx(1.5)
    assert (losses([3], [2]).interval, Losses().interval, Losses().typical) == (1, 1, 0.0)


def test_losses_that_are_not_finite_are_counted():
    assert (
        Losses(np.arange(4), np.array([1, np.nan, np.inf, 2]), np.arange(4), np.ones(4)).not_finite
        == 2
    )
