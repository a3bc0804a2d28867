"""All ranks get one result, an error on one rank reaches all, and no rank waits in a collective
while another one works."""

import threading
from itertools import pairwise

import pytest
from rank_folders import Ranks

from mindresume.coordination.collectives import (
    LONGEST_PAUSE,
    CollectiveError,
    SingleProcess,
    Watchdog,
    gather_results,
    run_on_all,
    run_on_rank0,
    run_until_all_done,
)
from sim import threads
from sim.cluster import current_cluster
from sim.communicator import ExchangeError


def fail(rank, on):
    if rank == on:
        raise ValueError("broken")
    return rank


def gathered(size, work, watchdog=None):
    """Returns what each rank gets that gathers the results of ``work(rank)``."""
    return Ranks(size).run(lambda group: gather_results(group, lambda: work(group.rank), watchdog))


def sleep(seconds):
    current_cluster().scheduler.sleep(seconds)


@pytest.mark.parametrize("watchdog", [None, Watchdog()])
def test_results_and_errors_reach_all_ranks(watchdog):
    def on_rank0(work):
        return Ranks(3).run(lambda group: run_on_rank0(group, lambda: work(group.rank), watchdog))

    assert on_rank0(lambda rank: rank + 7) == [7] * 3
    assert gathered(3, lambda rank: rank, watchdog) == [[0, 1, 2]] * 3
    assert Ranks(3).run(lambda group: run_on_all(group, lambda: group.rank, watchdog)) == [0, 1, 2]
    for error in gathered(3, lambda rank: fail(rank, 1), watchdog):
        assert isinstance(error, CollectiveError) and str(error) == "rank 1: ValueError: broken"
    for error in on_rank0(lambda rank: fail(rank, 0)):
        assert isinstance(error, CollectiveError) and str(error) == "rank 0: ValueError: broken"
    assert gather_results(SingleProcess(), lambda: 5, watchdog) == [5]
    assert (
        Ranks(3).run(
            lambda group: gather_results(group, lambda: group.rank, watchdog, group.rank != 1)
        )
        == [[0, None, 2]] * 3
    )


def test_a_single_process_runs_work_in_its_own_thread():
    assert gather_results(SingleProcess(), threading.get_ident, Watchdog()) == [
        threading.get_ident()
    ]


def test_the_ranks_exchange_while_one_of_them_works():
    """HCCL would time out if the others waited for rank 1 in one exchange. The pauses between two
    exchanges grow to two seconds."""
    moments = []

    def work(group):
        gather = group.gather

        def noted(message):
            if group.rank == 0:
                moments.append(current_cluster().scheduler.now)
            return gather(message)

        group.gather = noted
        return gather_results(
            group,
            lambda: group.rank == 0 or sleep(600.0),
            Watchdog(stall_timeout=1e9),
        )

    assert Ranks(2).run(work) == [[True, None]] * 2
    pauses = [later - before for before, later in pairwise(moments)]
    assert len(pauses) > 300 and max(pauses) == pytest.approx(LONGEST_PAUSE)
    assert 600.0 <= moments[-1] <= 600.0 + LONGEST_PAUSE


def test_no_rank_waits_longer_than_the_work_takes():
    def work(group):
        gather_results(group, lambda: sleep(600.0), Watchdog(stall_timeout=1e9))
        return current_cluster().scheduler.now

    assert Ranks(2).run(work) == [600.0] * 2


def test_all_ranks_give_up_work_without_progress():
    def work(group):
        try:
            return gather_results(
                group,
                lambda: group.rank != 2 or current_cluster().scheduler.block(None),
                Watchdog("checking", stall_timeout=100.0),
            )
        except CollectiveError as error:
            return str(error), current_cluster().scheduler.now

    found = Ranks(3).run(work)
    assert (
        len(set(found)) == 1
        and found[0][0].startswith("rank 2: checking: no progress for 10")
        and 100 < found[0][1] < 110
    )


class Growing:
    """Progress until second 900."""

    @property
    def done(self):
        return min(900.0, current_cluster().scheduler.now) // 30


def test_work_with_progress_is_waited_for():
    """The wait lasts as long as a number changes, however slowly; here until second 900."""

    def wait(seconds):
        watchdog = Watchdog(progress=Growing(), stall_timeout=50.0)
        return gathered(2, lambda rank: rank == 0 or sleep(seconds), watchdog)

    assert wait(940.0) == [[True, None]] * 2
    assert all(isinstance(error, CollectiveError) for error in wait(1000.0))


def test_work_that_is_broken_off_is_an_error_of_all():
    def end():
        raise SystemExit

    found = gathered(2, lambda rank: rank == 0 or end(), Watchdog())
    assert all(str(error).startswith("rank 1: the work was interrupted") for error in found)


def test_a_rank_without_a_new_thread_works_in_its_own(monkeypatch):
    """An error of this rank alone would leave the others waiting. The work is done before the first
    exchange, for which nobody pauses."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    def work(group):
        return gather_results(
            group, lambda: group.rank, Watchdog()
        ), current_cluster().scheduler.now

    monkeypatch.setattr(threads.Thread, "start", refuse)
    assert Ranks(2).run(work) == [([0, 1], 0.0)] * 2


def test_work_that_is_followed_is_finished_even_if_another_rank_is_lost():
    """The exchange fails after 600 seconds, and the work of this rank takes longer."""
    done = []

    def work(group):
        if group.rank:
            raise ValueError("this rank has ended")
        run_until_all_done(
            group,
            lambda: done.append(sleep(900.0)),
            Watchdog(stall_timeout=1e9),
        )

    error, _ = Ranks(2).run(work)
    assert isinstance(error, ExchangeError) and done == [None]


def test_work_that_is_followed_is_done_on_all_ranks_when_it_returns():
    done = []

    def work(group):
        run_until_all_done(
            group,
            lambda: sleep(60.0 * group.rank) or done.append(group.rank),
            Watchdog(),
        )
        return len(done)

    assert Ranks(3).run(work) == [3] * 3
