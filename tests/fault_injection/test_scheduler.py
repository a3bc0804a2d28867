"""Ranks are threads that do one operation at a time, in an order that depends on the seed only."""

import random
import threading

import pytest

from mindresume.fault_injection import faults
from mindresume.fault_injection.faults import Hang, Scheduler


def order(seed, works):
    """Returns the ranks in the order of their operations. ``works``: number of operations of each
    rank."""
    scheduler, done = Scheduler(len(works), random.Random(seed)), []

    def work(rank, count):
        for _ in range(count):
            scheduler.acquire_turn(rank)
            done.append(rank)
            scheduler.release_turn(rank)
        return f"result {rank}"

    results = scheduler.run(
        [lambda rank=rank, count=count: work(rank, count) for rank, count in enumerate(works)]
    )
    assert results == [f"result {rank}" for rank in range(len(works))]
    return tuple(done)


def test_every_interleaving_is_possible():
    assert {order(seed, (2, 2)) for seed in range(100)} == {
        (0, 0, 1, 1),
        (0, 1, 0, 1),
        (0, 1, 1, 0),
        (1, 0, 0, 1),
        (1, 0, 1, 0),
        (1, 1, 0, 0),
    }


def test_ranks_that_hang_are_an_error(monkeypatch):
    """Rank 0 waits forever, so rank 1 is never scheduled."""
    monkeypatch.setattr(faults, "PATIENCE", 0.2)
    scheduler, seen = Scheduler(2, random.Random(0)), []
    release, told = threading.Event(), threading.Event()

    def waits_for_its_turn():
        try:
            scheduler.acquire_turn(1)
        except Hang as error:
            seen.append(str(error))
            told.set()
            raise

    try:
        with pytest.raises(Hang, match=r"ranks \[0(, 1)?\] hang"):
            scheduler.run([release.wait, waits_for_its_turn])
        assert told.wait(60)
    finally:
        release.set()
    assert len(seen) == 1 and "rank 1" in seen[0]
