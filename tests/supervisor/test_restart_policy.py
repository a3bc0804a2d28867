"""supervisor/restart_policy.py: when a job is started again, and when not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.supervisor.restart_policy import (
    DIED,
    EXIT,
    EXITED,
    GIVE_UP,
    HUNG,
    MAX_ROLLBACKS,
    NOT_STARTED,
    PEER,
    RESTART,
    ROLLBACK,
    STOPPED,
    JobEnd,
    StartOutcome,
    decide,
    fruitless_starts,
)


def died(number=1, resumed=-1, committed=-1, status=137, kind=DIED, **more):
    return StartOutcome(
        number,
        1e9,
        10.0,
        JobEnd(kind, status, "rank 1 died"),
        resumed=resumed,
        committed=committed,
        **more,
    )


steps = st.integers(-1, 50)
outcomes = st.builds(
    died,
    resumed=steps,
    committed=steps,
    status=st.integers(1, 255),
    kind=st.sampled_from([DIED, EXITED, HUNG, PEER, STOPPED]),
    is_preempted=st.booleans(),
    has_finished=st.booleans(),
    has_begun=st.booleans(),
)


def rolled_back(number=1, kind=DIED, **more):
    return died(number, status=ROLLBACK, kind=kind, has_begun=True, **more)


@pytest.mark.parametrize(
    "outcome, action",
    [
        (died(status=0, kind=EXITED), EXIT),
        (died(status=2, kind=EXITED), EXIT),
        (died(status=2), EXIT),
        (died(status=130, kind=EXITED), EXIT),
        (died(status=65, has_begun=True), EXIT),
        (died(status=66, kind=EXITED, has_begun=True), EXIT),
        (died(status=68, has_begun=True), EXIT),
        (died(status=68, kind=EXITED, has_begun=True), EXIT),
        (died(status=143, kind=STOPPED), EXIT),
        (died(status=143, kind=EXITED, is_preempted=True), EXIT),
        (died(status=1, kind=EXITED, has_finished=True), EXIT),
        (died(status=139, has_finished=True), EXIT),
        (died(), RESTART),
        (died(status=1, kind=EXITED), RESTART),
        (died(status=143), RESTART),
        (died(status=124, kind=HUNG), RESTART),
        (died(status=2, kind=PEER), RESTART),
        (died(status=1, kind=NOT_STARTED), RESTART),
        (died(status=65), RESTART),
        # of a program that means something else with it
        (died(status=67), RESTART),
        (died(status=68), RESTART),
    ],
)
def test_what_is_started_again(outcome, action):
    decision = decide(5, [outcome])
    assert (decision.action, decision.status) == (action, outcome.end.status)
    assert (decision.delay, decision.fruitless) == (float(action == RESTART), 1)


def test_a_failure_after_a_new_checkpoint_is_restarted_at_once_and_for_ever():
    starts = [died(number + 1, 10 * number, 10 * number + 10) for number in range(50)]
    for count in range(1, 51):
        decision = decide(5, starts[:count])
        assert (decision.action, decision.delay, decision.fruitless) == (RESTART, 0.0, 0)


def test_a_job_that_dies_at_the_same_step_is_given_up_after_growing_delays():
    starts = [died(1, -1, 100)] + [died(number, 100, -1, last_step=105) for number in range(2, 8)]
    decisions = [decide(5, starts[:count]) for count in range(1, 8)]
    assert [decision.delay for decision in decisions] == [0, 1, 2, 4, 8, 16, 0]
    assert [decision.action for decision in decisions] == [RESTART] * 6 + [GIVE_UP]
    assert decisions[-1].status == 137


def test_a_resume_from_a_later_step_is_progress_of_the_start_before():
    """Rank 0 died before it could say that its last save was complete."""
    assert fruitless_starts([died(1, -1, -1), died(2, 5, -1)]) == 0
    assert fruitless_starts([died(1, 5, -1), died(2, 5, -1), died(3, 4, -1)]) == 3


def test_memory_alone_is_no_progress_while_saves_to_disk_fail():
    """Each start resumes from memory, trains on and ends with the third failed save; one that finds
    room again is progress."""
    full = [died(number, 30 * number, -1, failed_saves=3) for number in range(1, 9)]
    starts = [died(1, -1, 10, failed_saves=3), *full]
    assert [fruitless_starts(starts[:count]) for count in range(1, 5)] == [0, 1, 2, 3]
    decisions = [decide(5, starts[:count]) for count in range(1, 8)]
    assert [it.action for it in decisions] == [RESTART] * 6 + [GIVE_UP]
    assert "free space" in decisions[-1].reason
    assert fruitless_starts([*starts, died(10, 270, 280)]) == 0
    assert fruitless_starts([*full[:1], died(2, 30, -1)]) == 2


@pytest.mark.parametrize("kind", [EXITED, DIED])
def test_a_rollback_is_restarted_at_once_and_does_not_count(kind):
    """The job counts its rollbacks itself, and ends with another status after the last one."""
    crashes = [died(1, -1, 100), died(2, 100), died(3, 100)]
    starts = [*crashes, *(rolled_back(number, kind, resumed=100) for number in range(4, 20))]
    for count in range(4, 20):
        decision = decide(5, starts[:count])
        assert (decision.action, decision.delay, decision.fruitless) == (RESTART, 0.0, 2)
    assert decide(5, [*starts, died(20, 100)]).fruitless == 3
    assert decide(5, [*starts, died(20, 100, 104)]).fruitless == 0
    assert decide(0, [rolled_back(committed=100)]).action == EXIT


def test_a_job_that_rolls_back_for_ever_is_given_up():
    """Its note of bad steps is lost each time."""
    starts = [rolled_back(number, resumed=100) for number in range(MAX_ROLLBACKS + 7)]
    assert decide(5, starts).action == GIVE_UP
    assert decide(5, starts[:MAX_ROLLBACKS]).fruitless == 0


@given(st.lists(outcomes, min_size=1, max_size=12), st.integers(0, 6))
def test_every_decision(starts, limit):
    decision = decide(limit, starts)
    last, fruitless = starts[-1], fruitless_starts(starts)
    assert 0 <= fruitless <= len(starts) and decision.fruitless == fruitless
    assert decision.status == last.end.status
    if decision.action == RESTART:
        assert 0 <= decision.delay <= 60 and fruitless <= limit != 0
        assert not (last.end.kind == STOPPED or last.is_preempted or last.has_finished)
    else:
        assert decision.delay == 0
    if decision.action == GIVE_UP:
        reached = [start.reached for start in starts]
        assert fruitless > limit and max(reached[-fruitless:]) <= max(reached[: 1 - fruitless])


@given(st.lists(st.builds(died, resumed=steps, committed=steps), max_size=12), st.integers(1, 5))
def test_restarts_without_progress_end(starts, limit):
    """Whatever came before, ``limit`` + 1 starts that reach nothing new end the job."""
    stuck = [died(committed=-1, resumed=-1)] * (limit + 1)
    assert decide(limit, [*starts, *stuck]).action == GIVE_UP


@pytest.mark.parametrize("kind", [EXITED, DIED, NOT_STARTED])
def test_status_2_without_a_rank_is_final_unless_the_same_command_has_worked_before(kind):
    """Script and interpreter can lie on a mount that is away for seconds."""
    missing = died(status=2, kind=kind)
    assert decide(5, [missing]).action == EXIT
    assert decide(5, [died(has_begun=True), missing]).action == RESTART
    if kind != NOT_STARTED:
        assert decide(5, [died(has_begun=True), replace(missing, has_begun=True)]).action == EXIT
    assert decide(5, [died(has_begun=True), *[missing] * 6]).action == GIVE_UP
