"""One result on all ranks; an error on one reaches all; and nobody sits in a collective while another one works."""
import threading

import pytest
from folders import Ranks

from mindresume.agree import AgreementError, Solo, Waiting, agreed, decide, report


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
        assert isinstance(found, AgreementError) and str(found) == "rank 1: ValueError: broken"
    for found in Ranks(3).run(lambda group: decide(group, lambda: fail(group.rank, 0), waiting)):
        assert isinstance(found, AgreementError) and str(found) == "rank 0: ValueError: broken"
    assert report(Solo(), lambda: 5, waiting) == [5]


def test_one_process_works_in_its_own_thread():
    assert report(Solo(), threading.get_ident, Waiting()) == [threading.get_ident()]


def at_once(done, seconds):
    """No real time passes."""


def test_the_ranks_exchange_while_one_of_them_works():
    """The work of rank 1 ends only after twenty exchanges: if the others waited for it in one of them, it never would."""
    exchanges, enough = [], threading.Event()

    class Counting:
        def __init__(self, group):
            self.group, self.rank, self.size, self.broadcast = group, group.rank, group.size, group.broadcast

        def gather(self, message):
            if self.rank == 0:
                exchanges.append(message)
                if len(exchanges) == 20:
                    enough.set()
            return self.group.gather(message)
    waiting = Waiting(pause=at_once)
    found = Ranks(2).run(lambda group: report(Counting(group), lambda: group.rank == 0 or enough.wait(), waiting))
    assert found == [[True, True]] * 2 and len(exchanges) > 20


def test_work_without_progress_is_given_up_by_all_ranks_together():
    forever, clock = threading.Event(), iter(range(0, 10**9, 10))
    waiting = Waiting("checking", patience=100.0, clock=lambda: next(clock), pause=at_once)
    found = Ranks(3).run(lambda group: report(group, lambda: group.rank != 2 or forever.wait(), waiting))
    forever.set()
    for error in found:
        assert isinstance(error, AgreementError) and str(error).startswith("rank 2: checking: no progress for ")


def test_work_with_progress_is_waited_for():
    count, enough = iter(range(1, 10**9)), threading.Event()

    def progress():
        number = next(count)
        if number > 100:
            enough.set()
        return number
    clock = iter(range(0, 10**9, 10))
    waiting = Waiting(progress=progress, patience=50.0, clock=lambda: next(clock), pause=at_once)
    assert Ranks(2).run(lambda group: report(group, lambda: group.rank == 0 or enough.wait(), waiting)) == [[True, True]] * 2


def test_work_that_is_broken_off_is_an_error_of_all():
    def end():
        raise SystemExit
    found = Ranks(2).run(lambda group: report(group, lambda: group.rank == 0 or end(), Waiting(pause=at_once)))
    assert all(str(error).startswith("rank 1: the work was broken off") for error in found)


def test_a_rank_that_gets_no_thread_works_in_its_own(monkeypatch):
    """An error of this rank alone would leave the others waiting."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "mindresume-work":
            raise RuntimeError("can't start new thread")
        start(thread)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert Ranks(2).run(lambda group: report(group, lambda: group.rank, Waiting())) == [[0, 1]] * 2
