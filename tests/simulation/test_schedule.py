"""Schedules: drawing, printing, shrinking."""

import json
import random

from sim.schedule import (
    DEATHS,
    ERRORS,
    KINDS,
    Schedule,
    random_schedule,
)

DRAWN = [random_schedule(random.Random(seed), 150) for seed in range(200)]


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


def test_a_schedule_survives_json():
    for schedule in (Schedule(), *DRAWN):
        again = Schedule.from_json(json.loads(json.dumps(schedule.to_json())))
        assert again == schedule and hash(again) == hash(schedule) and again.size == schedule.size


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
