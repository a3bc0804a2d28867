"""The best interval between saves: Young's and Daly's formulas, bounds, two tiers, and replays of random failures."""
import importlib.util
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.report.advice import advice_from
from mindresume.report.save_interval import Tier, best_interval, goodput, shares

SPEC = importlib.util.spec_from_file_location("advice_benchmark", Path(__file__).parents[2] / "benchmarks" / "advice.py")


def disk(stall=1.0, write=0.0, restart=60.0, survival=1.0):
    return Tier("disk", stall, write, restart, survival)


def test_it_is_youngs_for_rare_failures():
    assert best_interval(disk(stall=2.0), 1e-6) == pytest.approx(math.sqrt(2 * 2.0 / 1e-6), rel=0.01)


@given(st.floats(0.01, 100), st.floats(1e-7, 1e-2), st.floats(0, 1000))
def test_no_other_interval_is_better(stall, rate, restart):
    tier = disk(stall, restart=restart)
    best = best_interval(tier, rate)
    for factor in (0.8, 0.98, 1.02, 1.25):
        assert goodput({tier: best}, rate) >= goodput({tier: best * factor}, rate) - 1e-9


def test_an_interval_twice_as_long_costs_a_quarter_more():
    tier = disk(restart=0.0)
    best = best_interval(tier, 1e-6)
    costs = [1 / goodput({tier: best * factor}, 1e-6) - 1 for factor in (0.5, 1, 2)]
    assert [cost / costs[1] for cost in costs] == pytest.approx([1.25, 1, 1.25], rel=0.01)


def test_a_write_in_the_background_bounds_the_interval_and_costs_at_failures():
    slow = disk(stall=0.1, write=3600.0)
    assert best_interval(slow, 1e-4) == 3600.0 and best_interval(disk(stall=0.1), 1e-4) < 60
    assert goodput({slow: 3600.0}, 1e-4) < goodput({replace(slow, write_seconds=0.0): 3600.0}, 1e-4)


def test_a_training_that_fails_within_each_interval_has_no_goodput():
    assert goodput({disk(): 1e7}, 1e-3) == 0.0


def test_each_failure_belongs_to_the_cheapest_intact_tier():
    memory, slow = Tier("memory", 0.1, 0.0, 30.0, 0.8), disk(stall=2.0)
    assert shares([slow, memory]) == {memory: 0.8, slow: pytest.approx(0.2)}
    rate, part = 1e-5, shares([memory, slow])
    intervals = {tier: best_interval(tier, rate, part[tier]) for tier in part}
    assert intervals[slow] == pytest.approx(best_interval(slow, rate) * math.sqrt(5), rel=0.02)
    assert goodput(intervals, rate) > goodput({slow: best_interval(slow, rate)}, rate)


def test_a_tier_that_serves_no_failure_is_never_saved_to():
    assert best_interval(disk(), 1e-5, 0.0) == math.inf and shares([disk(survival=0.0)]) == {disk(survival=0.0): 0.0}
    assert goodput({disk(stall=1.0, survival=0.0): 99.0}, 1e-5) == pytest.approx(0.99)


@pytest.fixture
def benchmark_of_advice(monkeypatch):
    """benchmarks/advice.py as a module."""
    module = importlib.util.module_from_spec(SPEC)
    monkeypatch.setitem(sys.modules, SPEC.name, module)                 # where its dataclasses look for their module
    SPEC.loader.exec_module(module)
    return module


def known_and_other(module, rnd, change):
    """Returns a random schedule twice, with 400 failures each: one for the advice, one that judges it."""
    schedule, mean = module.random_schedule(rnd)
    schedule = change(schedule, rnd)
    for _ in range(2):
        gaps = tuple(rnd.expovariate(1 / mean) for _ in range(400))
        yield module.with_kinds(replace(schedule, gaps=gaps, work=0.5 * sum(gaps)), rnd)


def test_the_advice_loses_little_more_than_the_best_interval(benchmark_of_advice):
    """The small form of benchmarks/advice.py: the advice knows 400 failures, and 400 others judge it."""
    module, rnd, worst = benchmark_of_advice, random.Random(3), []
    for _ in range(6):
        known, other = known_and_other(module, rnd, lambda schedule, rnd: schedule)
        steps = advice_from(known.measured(400)).tiers[0].steps_advised
        worst.append(module.lost(other, steps) / min(module.lost(other, each) for each in module.grid(other)[::3]))
    assert max(worst) <= 1.05


def test_two_advised_intervals_lose_little_more_than_the_best_pair(benchmark_of_advice):
    module, rnd, pairs = benchmark_of_advice, random.Random(5), []
    for _ in range(6):
        known, other = known_and_other(module, rnd, module.with_memory)
        pairs.append(module.ratios(known, other)["all"])
    assert sum(ours for ours, _ in pairs) <= 1.05 * sum(best for _, best in pairs)


def test_a_replay_of_two_tiers_by_hand(benchmark_of_advice):
    """Steps of 1 s; a save in memory each 10 steps, 1 s; each second one to disk, too, 2 s. One period lasts 24 s."""
    module, memory = benchmark_of_advice, Tier("memory", 1.0, 0.0, 5.0, 0.5)
    schedule = module.Schedule(1.0, disk(stall=2.0, restart=9.0), (60.0, 11.5, 12.5, 48.0), 1000.0, memory,
                               (True, True, False, True))
    # 60 s: 40 steps on disk, 50 in memory. 11.5 s: 60 in memory; the save to disk had begun. 12.5 s: 70 in memory, which is lost:
    # back to 40. 48 s: 80 steps.
    (loss,) = module.lost_in_two(schedule, np.array([10.0]), np.array([2.0]))
    spent = 60 + 11.5 + 12.5 + 48 + 3 * 5 + 9
    assert loss == pytest.approx((spent - 80) / 80 * 1000)
