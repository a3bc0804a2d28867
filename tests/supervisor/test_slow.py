"""Slow ranks and slow saves are noticed from heartbeats, once each."""

import pytest

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import Heartbeat, Saves
from mindresume.events import SlowRank, SlowSave
from mindresume.supervisor.slow import Slowness


class Node:
    """Ranks of a node, in time that passes only here."""

    def __init__(self, ranks=4, factor=3.0):
        self.events, self.now = [], 0.0
        self.slowness = Slowness(factor, self.events.append)
        self.start(ranks)

    def start(self, ranks, first=100):
        self.waited, self.step = [0.0] * ranks, 0
        self.saves, self.first = Saves(), first
        self.look()

    def look(self):
        beats = {
            self.first + rank: Heartbeat(
                self.first + rank, 1, rank, step=self.step, saves=self.saves, waited=waited
            )
            for rank, waited in enumerate(self.waited)
        }
        with runtime.answers({runtime.monotonic: lambda: self.now}):
            self.slowness.watch(beats)

    def train(self, steps, waits, seconds=1.0):
        for _ in range(steps):
            self.step += 1
            self.now += seconds
            self.waited = [sum(pair) for pair in zip(self.waited, waits, strict=True)]
            self.look()
        return self.events

    def save(self, seconds):
        self.step += 1
        self.saves = Saves(self.step, self.saves.written)
        self.look()
        self.now += seconds
        self.look()
        self.saves = Saves(self.step, self.step)
        self.look()


EVEN = [0.01, 0.012, 0.011, 0.01]
THIRD = [0.01, 0.012, 0.5, 0.01]


def test_the_slow_rank_is_named_once_and_its_end_is_told():
    node = Node()
    node.train(12, EVEN)
    (found,) = node.train(30, THIRD)
    assert (found.rank, found.has_ended) == (2, False) and found.seconds == pytest.approx(0.5)
    assert found.median == pytest.approx(0.01)
    first, last = node.train(6, EVEN)
    assert isinstance(last, SlowRank) and last.has_ended and last.rank == 2


@pytest.mark.parametrize(
    "waits",
    [EVEN, [0.01, 0.01, 0.1, 0.01], [0.5, 0.5, 0.6, 0.5]],
    ids=["all are as fast", "it costs a tenth of a step", "all are slow"],
)
def test_no_rank_is_slow(waits):
    assert Node().train(40, waits) == []


def test_a_hiccup_is_no_slow_rank():
    node = Node()
    for _ in range(5):
        node.train(9, EVEN)
        node.train(1, [0.0, 9.0, 0.0, 0.0])
    assert node.events == []


def test_of_two_ranks_one_can_be_slow():
    assert [it.rank for it in Node(2).train(20, [0.01, 0.5])] == [1]


def test_another_start_begins_anew():
    node = Node()
    node.train(8, THIRD)
    node.start(4, first=200)
    node.train(8, THIRD)
    assert node.events == []


def test_a_slow_save_is_told_once_while_it_lasts_and_when_saves_are_fast_again():
    node = Node()
    for seconds in (2.0, 2.1, 1.9, 20.0, 21.0, 2.0, 2.0):
        node.save(seconds)
    first, last = node.events
    assert isinstance(first, SlowSave)
    assert (first.step, first.usual, first.has_ended) == (4, 2.0, False)
    assert (last.step, last.has_ended) == (6, True)


def test_short_saves_are_not_slow():
    node = Node()
    for seconds in (0.1, 0.1, 0.1, 4.0, 0.1):
        node.save(seconds)
    assert node.events == []
