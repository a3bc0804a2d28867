"""supervisor/job_end.py: which ranks may finish a save when the job is ended."""

import pytest

from mindresume.coordination.rank_heartbeat import ENDING, SAVING, TRAINING, Heartbeat, Saves
from mindresume.supervisor.job_end import first_lost_step, may_finish, open_saves
from mindresume.supervisor.restart_policy import DIED, EXITED, HUNG, PEER, STOPPED


def rank(phase=TRAINING, **numbers):
    return Heartbeat(1, 1, phase=phase, saves=Saves(**numbers))


THREAD = rank(begun=10, written=5, writing=10)
SYNC = rank(SAVING, begun=10, written=5)


@pytest.mark.parametrize(
    ("beat", "steps"),
    [
        (rank(), []),
        (rank(begun=10, written=10), []),
        (THREAD, [10]),
        (SYNC, [10]),
        (rank(SAVING, begun=10, writing=5), [5, 10]),
        (rank(begun=10, written=5), []),  # a process writes it
        (rank(ENDING, begun=10, written=5), [10]),
        (rank(ENDING, begun=10, written=10), []),
    ],
)
def test_the_saves_of_a_ranks_threads(beat, steps):
    assert open_saves(beat) == steps


def test_a_rank_takes_the_step_that_it_was_writing_and_all_later_ones_with_it():
    assert first_lost_step([]) is None and first_lost_step([rank()]) is None
    assert first_lost_step([rank(), rank(SAVING, begun=10, written=5, writing=5), SYNC]) == 5


@pytest.mark.parametrize("beat", [THREAD, SYNC])
def test_a_save_is_waited_for_unless_a_dead_rank_had_not_written_it(beat):
    assert may_finish(beat, None, DIED) and may_finish(beat, 11, DIED)
    assert not may_finish(beat, 10, DIED) and not may_finish(beat, 5, DIED)


@pytest.mark.parametrize(
    ("kind", "in_training_thread"),
    [(DIED, True), (PEER, True), (STOPPED, True), (HUNG, False), (EXITED, False)],
)
def test_the_thread_in_the_background_is_waited_for_in_any_case(kind, in_training_thread):
    assert may_finish(THREAD, None, kind)
    assert (
        may_finish(SYNC, None, kind) == may_finish(rank(ENDING), None, kind) == in_training_thread
    )


def test_the_end_of_a_training_is_waited_for_unless_its_last_save_is_lost():
    ending = rank(ENDING, begun=10, written=10)
    assert (
        may_finish(ending, None, DIED)
        and may_finish(ending, 20, DIED)
        and not may_finish(ending, 10, DIED)
    )
    assert not may_finish(rank(begun=10, written=10), None, DIED)
