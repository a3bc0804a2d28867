"""Which save in memory is overwritten, for ranks of unequal speed."""

import random

import pytest

from mindresume.saving.memory_tier.slots import common_step, slots_needed, step_to_overwrite


def test_two_slots_suffice_if_an_end_of_a_step_lies_between_two_saves():
    assert [slots_needed(every, 1) for every in (1, 2, 3, 100)] == [3, 2, 2, 2]
    assert [slots_needed(10, jump) for jump in (1, 5, 6, 10, 20)] == [2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    "held, slots, whole, expected",
    [
        ([], 2, [], None),
        ([10], 2, [10], None),  # a slot is free
        ([20, 10], 2, [10, 20], 10),  # the newest is common
        # it failed on some rank: the older one is kept
        ([20, 10], 2, [10], 20),
        ([3, 2], 3, [2], None),
        ([3, 2, 1], 3, [1, 2], 1),
        ([3, 2, 1], 3, [1], 2),
    ],
)
def test_the_newest_common_save_is_kept(held, slots, whole, expected):
    assert step_to_overwrite(held, slots, whole) == expected


def test_the_common_step_is_one_that_no_rank_can_still_be_writing():
    assert common_step([20, 10], 2, [20, 10]) == 20
    assert common_step([20, 10], 2, [10]) == 10
    assert common_step([3, 2, 1], 3, [3, 2, 1]) == 2
    assert common_step([3], 3, [3]) is None


class Rank:
    """Saves as ``MemoryTier`` does; ``held``: {step: recorded}."""

    def __init__(self, ranks, every, jump, slots=0, waits=True, alone=False):
        self.ranks, self.every, self.slots, self.waits = (
            ranks,
            every,
            slots or slots_needed(every, jump),
            waits,
        )
        self.held, self.ended, self.working, self.overwriting, self.alone = (
            {},
            0,
            None,
            False,
            alone,
        )

    def is_whole(self, step):
        return all(rank.held.get(step) for rank in ([self] if self.alone else self.ranks))

    def actions(self, jump):
        """Returns what this rank can do next."""
        if self.overwriting:
            return [self.copy]
        # the collective of the next step
        ready = all(rank.ended - rank.overwriting >= self.ended for rank in self.ranks)
        # the wait at the end of that step
        done = self.working is None or not self.waits
        found = [lambda: self.end(jump)] if ready and done else []
        return found + ([self.finish] if self.working is not None else [])

    def finish(self):
        self.held[self.working], self.working = random.random() > self.failing, None

    def end(self, jump):
        before, self.ended = self.ended, self.ended + jump
        if self.ended // self.every > before // self.every:
            held = sorted(self.held, reverse=True)
            oldest = step_to_overwrite(held, self.slots, set(filter(self.is_whole, held)))
            if oldest is not None:
                del self.held[oldest]
            self.overwriting = True

    def copy(self):
        self.overwriting, self.held[self.ended], self.working = False, False, self.ended


def run(every, jump, failing=0.0, seeds=12, **options):
    """Runs three ranks in random orders. Returns whether all of them had a common save at every
    moment after the first one."""
    for seed in range(seeds):
        random.seed(seed)
        ranks: list[Rank] = []
        ranks += [Rank(ranks, every, jump, **options) for _ in range(3)]
        for rank in ranks:
            rank.failing = failing
        had, newest = False, 0
        for _ in range(300):
            rank = random.choice([rank for rank in ranks if rank.actions(jump)])
            random.choice(rank.actions(jump))()
            common = [
                step
                for step in range(1, ranks[0].ended + jump + 1)
                if all(rank.held.get(step) for rank in ranks)
            ]
            if had and (not common or max(common) < newest):
                return False
            had, newest = had or bool(common), max([newest, *common])
        if not had:
            return False
    return True


@pytest.mark.parametrize("failing", [0.0, 0.2])
@pytest.mark.parametrize("every, jump", [(1, 1), (2, 1), (3, 1), (5, 2), (3, 2), (4, 4), (5, 4)])
def test_at_every_moment_all_ranks_have_a_save_whatever_their_order(every, jump, failing):
    assert run(every, jump, failing)
    assert failing or run(every, jump, alone=True)  # each on a node of its own


def test_the_third_slot_and_the_wait_are_needed():
    assert not run(1, 1, slots=2, alone=True) and not run(2, 1, waits=False, alone=True)
