"""A seeded scheduler: ranks are threads, and one of them does one operation at a time.

    scheduler = Scheduler(2, random.Random(7))
    results = scheduler.run([work_of_rank_0, work_of_rank_1])   # the same order for the same seed
"""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from mindresume import runtime

PATIENCE = 120.0                    # real seconds after which waiting ranks are an error


class Hang(Exception):
    """Ranks wait for each other. It is no OSError, which the product would handle as an error of the file system."""


class Scheduler:
    """Orders the operations of ranks: ``acquire_turn`` before an operation, ``release_turn`` after it. The next rank is drawn
    when every rank that still works waits for its turn. Operations of one rank may come from several threads, one at a time."""

    def __init__(self, size: int, rng: random.Random):
        self.size, self.rng = size, rng
        self._condition = runtime.Condition()
        self._working: set[int] = set()
        self._waiting: set[int] = set()
        self._current_rank: int | None = None

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs all works concurrently. Returns their results; an exception is a result too."""
        results: list[Any] = [None] * len(works)
        self._working = set(range(len(works)))

        def call(rank: int) -> None:
            try:
                results[rank] = works[rank]()
            except BaseException as error:      # noqa: B036  a killed rank is a result
                results[rank] = error
            finally:
                self._leave(rank)
        threads = [runtime.Thread(target=call, args=(rank,), daemon=True) for rank in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        if any(thread.is_alive() for thread in threads):
            raise Hang(f"ranks {sorted(self._working)} hang: they wait for more than {PATIENCE:.0f} s")
        return results

    def acquire_turn(self, rank: int) -> None:
        with self._condition:
            if rank not in self._working:       # outside of ``run``: no other rank
                return
            self._waiting.add(rank)
            self._choose()
            if not self._condition.wait_for(lambda: self._current_rank == rank, PATIENCE):
                raise Hang(f"rank {rank} was not scheduled within {PATIENCE:.0f} s; working: {sorted(self._working)}")
            self._waiting.discard(rank)

    def release_turn(self, rank: int) -> None:
        with self._condition:
            if self._current_rank == rank:
                self._current_rank = None
                self._choose()

    def _leave(self, rank: int) -> None:
        with self._condition:
            self._working.discard(rank)
            self._waiting.discard(rank)
            self._choose()

    def _choose(self) -> None:
        if self._current_rank is None and self._waiting and self._waiting >= self._working:
            self._current_rank = self.rng.choice(sorted(self._waiting))
            self._condition.notify_all()
