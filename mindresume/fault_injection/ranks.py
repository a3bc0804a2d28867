"""Several ranks in one process, as threads of which one at a time does one operation, in an order that a seed decides.

    turns = Turns(2, random.Random(7))
    results = turns.run([work_of_rank_0, work_of_rank_1])       # the same order for the same seed
"""
from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE = 120.0                    # real seconds after which a drill that hangs is an error


class Hang(Exception):
    """Ranks wait for each other. No OSError, which the product would take for trouble of the file system."""


class Turns:
    """``take`` before an operation, ``give`` after it. A turn is given when every rank that still works waits for one. Operations
    of one rank may come from several threads, as long as only one of them is at work at a time."""

    def __init__(self, size: int, chance: random.Random):
        self.size, self.chance = size, chance
        self._condition = threading.Condition()
        self._working: set[int] = set()
        self._waiting: set[int] = set()
        self._turn: int | None = None

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Calls all of them side by side. Returns their results; an exception is a result too."""
        results: list[Any] = [None] * len(works)
        self._working = set(range(len(works)))

        def call(rank: int) -> None:
            try:
                results[rank] = works[rank]()
            except BaseException as error:      # noqa: B036  a killed rank is a result
                results[rank] = error
            finally:
                self._leave(rank)
        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        if any(thread.is_alive() for thread in threads):
            raise Hang(f"ranks {sorted(self._working)} hang: they wait for more than {PATIENCE:.0f} s")
        return results

    def take(self, rank: int) -> None:
        with self._condition:
            if rank not in self._working:       # outside of run: one rank alone
                return
            self._waiting.add(rank)
            self._choose()
            if not self._condition.wait_for(lambda: self._turn == rank, PATIENCE):
                raise Hang(f"rank {rank} got no turn within {PATIENCE:.0f} s; working: {sorted(self._working)}")
            self._waiting.discard(rank)

    def give(self, rank: int) -> None:
        with self._condition:
            if self._turn == rank:
                self._turn = None
                self._choose()

    def _leave(self, rank: int) -> None:
        with self._condition:
            self._working.discard(rank)
            self._waiting.discard(rank)
            self._choose()

    def _choose(self) -> None:
        if self._turn is None and self._waiting and self._waiting >= self._working:
            self._turn = self.chance.choice(sorted(self._waiting))
            self._condition.notify_all()
