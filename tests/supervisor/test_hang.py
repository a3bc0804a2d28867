"""supervisor/hang.py: which heartbeats mean a hang."""

from dataclasses import replace

import pytest

from mindresume.coordination import rank_heartbeat as hb
from mindresume.coordination.liveness import AwakeClock
from mindresume.coordination.rank_heartbeat import Heartbeat, PhaseTimes, Saves
from mindresume.supervisor.hang import Heartbeats, JobSettings, find_hang

LIMITS = JobSettings(100, 1000)


def rank(number, phase=hb.TRAINING, step=5, progressed=0.0, changed=0.0):
    return Heartbeat(
        1000 + number, 1, number, 4, phase, step, times=PhaseTimes(progressed, changed)
    )


def hang(heartbeats, now, limits=LIMITS, clock=None):
    return find_hang(heartbeats, 0.0, now, limits, clock or AwakeClock())


@pytest.mark.parametrize(
    "heartbeat, now, limit",
    [
        (rank(0), 100, None),
        (rank(0), 101, "--hang-timeout"),
        (rank(0, hb.SAVING), 101, "--hang-timeout"),
        (rank(0, progressed=50), 150, None),
        (rank(0, hb.COMPILING, -1), 999, None),
        (rank(0, hb.COMPILING, -1, progressed=990), 1001, "--start-timeout"),
        (rank(0, hb.ENDED), 10**6, None),
        (rank(0, hb.INFERENCE), 10**6, None),
        (rank(0, hb.ENDING, changed=500), 1400, None),
        (rank(0, hb.ENDING, changed=500), 1501, "--start-timeout"),
    ],
)
def test_limits(heartbeat, now, limit):
    found = hang([heartbeat], now)
    assert (found and found.limit) == limit


@pytest.mark.parametrize(
    "outcome, limit", [("failed", "--start-timeout"), ("finished", None), ("preempted", None)]
)
def test_a_process_that_does_not_end_after_its_training_has_failed_hangs(outcome, limit):
    heartbeat = replace(rank(0, hb.ENDED, changed=500), outcome=outcome)
    assert hang([heartbeat], 1400) is None
    found = hang([heartbeat], 1501)
    assert (found and found.limit) == limit


def test_the_rank_that_is_behind_comes_first():
    found = hang(
        [rank(0, step=7), rank(1, step=6), rank(2, hb.SAVING, 6), rank(3, progressed=90, step=1)],
        150,
    )
    assert [heartbeat.rank for heartbeat in found.ranks] == [1, 2, 0] and found.seconds == 150


def test_without_limits_and_without_ranks_nothing_hangs():
    assert hang([rank(0), rank(1, hb.LOADING)], 10**9, JobSettings(0, 0)) is None
    assert hang([], 10**9) is None


def test_the_time_in_which_the_supervisor_was_suspended_does_not_count(clock):
    awake = AwakeClock()
    for moment in (1.0, 9.0, 5009.0, 5010.0):  # suspended for 5000 s, as its job was
        clock.now = moment
        awake()
    assert hang([rank(0)], 5010.0, clock=awake) is None
    assert hang([rank(0)], 5101.0, clock=awake).seconds == 111.0
    assert hang([rank(0)], 5010.0).seconds == 5010.0


@pytest.mark.parametrize(
    "unfinished",
    [
        {"saves": Saves(begun=6, committed=5)},
        {"phase": hb.ENDING},
        {"outcome": "failed"},
    ],
)
def test_a_training_has_finished_once_all_ranks_have_and_all_is_saved(unfinished):
    found = Heartbeats("")
    assert not found.has_finished
    ended = replace(rank(0, hb.ENDED), outcome="finished", saves=Saves(begun=5, committed=5))
    found.known = {0: ended, 1: replace(ended, rank=1, saves=Saves(begun=5, committed=-1))}
    assert found.has_finished
    found.known[0] = replace(ended, **unfinished)
    assert not found.has_finished
