"""Schedules: drawing, printing, shrinking."""

import random

from sim.schedule import (
    DEATHS,
    ERRORS,
    KINDS,
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
