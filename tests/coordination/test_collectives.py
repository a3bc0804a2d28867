"""One result on all ranks; an error on one reaches all; and nobody sits in a collective while another one works."""
import threading
from itertools import pairwise

import pytest
from rank_folders import Ranks

from mindresume.coordination.collectives import (
    LONGEST_PAUSE,
    CollectiveError,
    SingleProcess,
    Waiting,
    agreed,
    decide,
    followed,
    report,
)
from mindresume.simulation import runtime_fakes
from mindresume.simulation.cluster import current_cluster
from mindresume.simulation.communicator import ExchangeError


def fail(rank, on):
    if rank == on:
        raise ValueError("broken")
    return rank


@pytest.mark.parametrize("waiting", [None, Waiting()])
def test_results_and_errors_reach_all_ranks(waiting):
    assert Ranks(3).run(lambda group: decide(group, lambda: group.rank + 7, waiting)) == [7] * 3
    assert Ranks(3).run(lambda group: report(group, lambda: group.rank, waiting)) == [[0, 1, 2]] * 3
    assert Ranks(3).run(lambda group: agreed(group, lambda: group.rank, waiting)) == [0, 1, 2]
    for found in Ranks(3).run(lambda group: report(group, lambda: fail(group.rank, 1), waiting)):
        assert isinstance(found, CollectiveError) and str(found) == "rank 1: ValueError: broken"
    for found in Ranks(3).run(lambda group: decide(group, lambda: fail(group.rank, 0), waiting)):
        assert isinstance(found, CollectiveError) and str(found) == "rank 0: ValueError: broken"
    assert report(SingleProcess(), lambda: 5, waiting) == [5]


def test_one_process_works_in_its_own_thread():
    assert report(SingleProcess(), threading.get_ident, Waiting()) == [threading.get_ident()]


def test_the_ranks_exchange_while_one_of_them_works():
    """If the others waited for rank 1 in one exchange, HCCL would give up. The pauses between two grow to two seconds."""
    moments = []

    def work(group):
        gather = group.gather

        def noted(message):
            if group.rank == 0:
                moments.append(current_cluster().scheduler.now)
            return gather(message)
        group.gather = noted
        return report(group, lambda: group.rank == 0 or current_cluster().scheduler.sleep(600.0), Waiting(patience=1e9))
    assert Ranks(2).run(work) == [[True, None]] * 2
    pauses = [later - before for before, later in pairwise(moments)]
    assert len(pauses) > 300 and max(pauses) == pytest.approx(LONGEST_PAUSE)
    assert 600.0 <= moments[-1] <= 600.0 + LONGEST_PAUSE


def test_nobody_waits_longer_than_the_work_takes():
    def work(group):
        report(group, lambda: current_cluster().scheduler.sleep(600.0), Waiting(patience=1e9))
        return current_cluster().scheduler.now
    assert Ranks(2).run(work) == [600.0] * 2


def test_work_without_progress_is_given_up_by_all_ranks_together():
    def work(group):
        try:
            return report(group, lambda: group.rank != 2 or current_cluster().scheduler.block(None),
                          Waiting("checking", patience=100.0))
        except CollectiveError as error:
            return str(error), current_cluster().scheduler.now
    found = Ranks(3).run(work)
    assert len(set(found)) == 1 and found[0][0].startswith("rank 2: checking: no progress for 10") and 100 < found[0][1] < 110


def test_work_with_progress_is_waited_for():
    """As long as a number changes, however slowly; here until second 900."""
    def work(group):
        waiting = Waiting(progress=lambda: min(900.0, current_cluster().scheduler.now) // 30, patience=50.0)
        return report(group, lambda: group.rank == 0 or current_cluster().scheduler.sleep(1000.0 if late else 940.0), waiting)
    late = False
    assert Ranks(2).run(work) == [[True, None]] * 2
    late = True
    assert all(isinstance(error, CollectiveError) for error in Ranks(2).run(work))


def test_work_that_is_broken_off_is_an_error_of_all():
    def end():
        raise SystemExit
    found = Ranks(2).run(lambda group: report(group, lambda: group.rank == 0 or end(), Waiting()))
    assert all(str(error).startswith("rank 1: the work was broken off") for error in found)


def test_a_rank_that_gets_no_thread_works_in_its_own(monkeypatch):
    """An error of this rank alone would leave the others waiting."""
    def refuse(thread):
        raise RuntimeError("can't start new thread")
    monkeypatch.setattr(runtime_fakes.Thread, "start", refuse)
    assert Ranks(2).run(lambda group: report(group, lambda: group.rank, Waiting())) == [[0, 1]] * 2


def test_work_that_is_followed_is_finished_even_if_another_rank_is_lost():
    """The exchange fails after 600 seconds, and the work of this rank takes longer."""
    done = []

    def work(group):
        if group.rank:
            raise ValueError("this rank has ended")
        followed(group, lambda: done.append(current_cluster().scheduler.sleep(900.0)), Waiting(patience=1e9))
    error, _ = Ranks(2).run(work)
    assert isinstance(error, ExchangeError) and done == [None]


def test_work_that_is_followed_is_done_on_all_ranks_when_it_returns():
    done = []

    def work(group):
        followed(group, lambda: current_cluster().scheduler.sleep(60.0 * group.rank) or done.append(group.rank), Waiting())
        return len(done)
    assert Ranks(3).run(work) == [3] * 3
