"""Schedules: drawing, printing, shrinking."""

import json
import random

import pytest

from mindresume.fault_injection.faults import Fault
from sim.schedule import (
    DEATHS,
    ERRORS,
    EXPLAINED,
    KILL_LAUNCHER,
    KINDS,
    MEMORY,
    OUTAGE,
    OWN_SIGNAL,
    PASSING,
    QUOTA,
    QUOTA_OF_HOST,
    ROT,
    ROT_IN_MEMORY,
    UNREADABLE,
    Schedule,
    random_schedule,
)

DRAWN = [random_schedule(random.Random(seed), 150) for seed in range(200)]


def test_the_same_seed_draws_the_same():
    assert [random_schedule(random.Random(seed), 150) for seed in range(200)] == DRAWN
    assert len({schedule.seed for schedule in DRAWN}) == 200


def test_everything_that_can_happen_is_drawn():
    faults = [fault for schedule in DRAWN for fault in schedule.faults]
    assert {fault.kind for fault in faults} == set(KINDS) and {*ERRORS, *DEATHS} < set(KINDS)
    assert {len(schedule.faults) for schedule in DRAWN} == {0, 1, 2, 3}
    assert (
        {bool(schedule.lag) for schedule in DRAWN}
        == {bool(schedule.clocks) for schedule in DRAWN}
        == {True, False}
    )
    assert any(len(schedule.switches) > 20 for schedule in DRAWN) and any(
        not schedule.switches for schedule in DRAWN
    )
    assert any(schedule.picks for schedule in DRAWN)
    power = {fault.amount == 0 for fault in faults if fault.kind == "power"}
    assert power == {True, False}


def test_all_moments_are_in_the_run_in_order_and_unique():
    for schedule in DRAWN:
        for rows in (schedule.switches, [(fault.at, 0) for fault in schedule.faults]):
            moments = [at for at, _ in rows]
            # 151: behind the last strike
            assert moments == sorted(set(moments)) and all(1 <= at <= 151 for at in moments)


def test_only_requested_kinds_of_faults_are_drawn():
    drawn = [
        random_schedule(random.Random(seed), 150, kinds=("kill",), lags=(5.0,))
        for seed in range(50)
    ]
    assert {fault.kind for schedule in drawn for fault in schedule.faults} == {"kill"}
    assert {schedule.lag for schedule in drawn} == {5.0}


def test_faults_of_few_scenarios_have_their_own_amounts():
    rare = (OUTAGE, QUOTA, QUOTA_OF_HOST, MEMORY, KILL_LAUNCHER, UNREADABLE)
    faults = [
        fault
        for seed in range(200)
        for fault in random_schedule(random.Random(seed), 150, kinds=rare).faults
    ]
    amounts = {kind: {fault.amount for fault in faults if fault.kind == kind} for kind in rare}
    assert amounts[QUOTA] == amounts[QUOTA_OF_HOST] == {20, 200, 2000} and amounts[OUTAGE] == {
        3,
        30,
        300,
    }
    assert (
        amounts[MEMORY] == {0, 100, 1 << 40}
        and amounts[KILL_LAUNCHER] == {0}
        and len(amounts[UNREADABLE]) > 20
    )
    assert not set(rare) & set(KINDS) and {
        *rare,
        ROT,
        ROT_IN_MEMORY,
        OWN_SIGNAL,
        *PASSING,
        *KINDS,
    } == set(EXPLAINED)


@pytest.mark.parametrize("schedule", [Schedule(), *DRAWN[:40]])
def test_a_schedule_survives_json(schedule):
    again = Schedule.from_json(json.loads(json.dumps(schedule.to_json())))
    assert again == schedule and hash(again) == hash(schedule) and again.size == schedule.size


def test_a_key_of_an_older_replay_line_is_refused():
    with pytest.raises(ValueError, match="strikes"):
        Schedule.from_json({"seed": 1, "strikes": [{"at": 5, "kind": "kill"}]})


def test_shrink_candidates_are_smaller_parts():
    for schedule in DRAWN:
        for candidate in schedule.shrink_candidates():
            assert candidate.size < schedule.size and candidate.seed == schedule.seed
            for name in ("switches", "picks", "faults"):
                assert set(getattr(candidate, name)) <= set(getattr(schedule, name))
            assert candidate.lag in (schedule.lag, 0.0) and candidate.clocks in (
                schedule.clocks,
                (),
            )


def test_everything_can_be_left_out_one_by_one():
    for schedule in DRAWN:
        assert (
            len(
                {
                    candidate
                    for candidate in schedule.shrink_candidates()
                    if candidate.size == schedule.size - 1
                }
            )
            == schedule.size
        )
        while schedule.shrink_candidates():
            schedule = schedule.shrink_candidates()[-1]
        assert schedule.size == 0 and schedule == Schedule(schedule.seed)


def test_large_reductions_come_first():
    schedule = Schedule(switches=tuple((at, 1) for at in range(1, 11)))
    sizes = [candidate.size for candidate in schedule.shrink_candidates()]
    assert sizes == sorted(sizes) and sizes.count(9) == 10 and sizes.count(5) == 2


def test_the_size_counts_faults_and_switches():
    assert Schedule(seed=5).size == 0 and Schedule(seed=5).shrink_candidates() == []
    assert Schedule(1, ((1, 1), (2, 1)), ((1, 1),), (Fault(1, "kill"),), 30.0, (5.0,)).size == 6
