"""Where steps and seconds went: by hand, and as properties of any history."""
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logfiles import RUNS, ZERO, two_lives

from mindresume.report.account import Seconds, not_safe, shares_of, total_of
from mindresume.report.history import ASKED, DIED, FINISHED, UNKNOWN, Life, Save, lives_of
from mindresume.report.logs import Clock, parse
from mindresume.report.losses import Losses


def life(number, first, last, parent=None, end=DIED, run=None, **more):
    """Steps ``first`` to ``last``, each of a second, resumed behind ``first - 1``. ``parent``: the run that saved it."""
    start, count = 100.0 * number, last - first + 1
    steps = np.arange(first, last + 1)
    losses = Losses(steps, np.ones(count), start + 10 + np.arange(count), np.ones(count))
    source = f"epoch 1, x, run {parent}, 1 rank, every byte checked" if parent else ""
    ended = more.pop("ended", start + 9 + count)
    given = dict(run=run or RUNS[number], resumed_from=first - 1 or None, source=source, base=first - 1, first_step=first,
                 last_step=last, losses=losses, fresh=first == 1)
    return Life(number, start, ended, end, **{**given, **more})


def lost(*lives):
    return [share.steps_lost for share in shares_of(lives)]


def test_two_lives_second_by_second():
    events = [event for line in two_lives().lines for event in parse(line, Clock())]
    first, second = shares_of(lives_of(events))
    assert (first.steps, first.steps_lost, first.kept) == (8, 3, 5)
    # step 1 took 10 s, of which one is an ordinary step; then 4 steps and a save of 0.5 s; then 3 steps that are lost
    assert first.seconds == Seconds(training=5.0, lost=3.0, saving=0.5, starting=11.0, ending=0.0, down=20.5)
    assert second.seconds == Seconds(training=5.0, lost=0.0, saving=0.5, starting=9.0, ending=0.5)
    assert total_of([first, second]).total == pytest.approx(55.0)
    assert [(span.kind, span.begin - ZERO, span.end - ZERO) for span in first.spans] == [
        ("starting", 0, 11), ("training", 11, 16), ("lost", 16, 19.5), ("down", 19.5, 40)]


def test_steps_that_are_lost_again_and_again():
    again = [life(number, 6, last, RUNS[1]) for number, last in ((2, 9), (3, 13), (4, 40))]
    assert lost(life(1, 1, 10), *again) == [5, 4, 8, 0]


def test_an_older_checkpoint_takes_from_more_than_one_life():
    assert lost(life(1, 1, 28), life(2, 26, 33, RUNS[1]), life(3, 21, 40, RUNS[1], FINISHED)) == [8, 8, 0]


def test_a_life_in_between_that_went_on_from_elsewhere_is_in_vain():
    """It took an older checkpoint, because the newer one could not be read then; the next life took the newer one again."""
    assert lost(life(1, 1, 20), life(2, 11, 15, RUNS[1]), life(3, 21, 30, RUNS[1], FINISHED)) == [0, 5, 0]


def test_a_life_that_died_while_it_loaded_takes_nothing_away():
    loading = replace(life(2, 11, 11, RUNS[1]), first_step=None, last_step=None, losses=Losses())
    assert lost(life(1, 1, 20), loading, life(3, 21, 30, RUNS[1], FINISHED)) == [0, 0, 0]
    assert lost(life(1, 1, 25), replace(loading, resumed_from=20)) == [5, 0]                # it is about to


def test_a_fresh_start_behind_a_death_loses_everything_and_behind_an_end_nothing():
    assert lost(life(1, 1, 4), life(2, 1, 9, end=FINISHED)) == [4, 0]
    assert lost(life(1, 1, 4, end=FINISHED), life(2, 1, 9, end=FINISHED)) == [0, 0]


def test_what_was_saved_when_asked_to_leave_is_kept():
    assert lost(life(1, 1, 17, end=ASKED), life(2, 18, 20, RUNS[1], FINISHED)) == [0, 0]


def test_without_the_name_of_the_run_the_life_that_reached_the_step_is_taken():
    assert lost(life(1, 1, 20), life(2, 16, 18), life(3, 19, 30, end=FINISHED)) == [5, 0, 0]


def test_another_batch_size_counts_in_the_steps_of_the_life_that_lost_them():
    scaled = life(2, 18, 30, RUNS[1], FINISHED, resumed_from=35, scale=17 / 35)
    assert lost(life(1, 1, 38), scaled) == [3, 0]


def test_a_pause_behind_a_normal_end_is_no_down_time():
    first, _ = shares_of([life(1, 1, 5, end=ASKED), life(2, 6, 9, RUNS[1], FINISHED)])
    assert (first.seconds.waiting, first.seconds.down) == (86.0, 0.0)


def test_a_log_that_begins_in_the_middle_was_training_from_its_first_line():
    share, = shares_of([life(1, 51, 60, end=UNKNOWN, cut=True)])
    assert share.seconds.starting == 0


def test_a_log_with_a_loss_every_few_steps_began_so_many_steps_before_its_first():
    losses = Losses(np.array([5, 10, 15]), np.ones(3), np.array([130.0, 135.0, 140.0]), np.ones(3))
    share, = shares_of([life(1, 1, 15, end=FINISHED, losses=losses, ended=141.0)])
    assert share.seconds == Seconds(training=15.0, starting=25.0, ending=1.0)


def test_steps_that_are_not_safe_yet():
    died = shares_of([life(1, 1, 8)])
    assert (not_safe(died, 5), not_safe(died, None), not_safe(died, 10)) == (3, 8, 0)
    assert not_safe(shares_of([life(1, 1, 8, end=FINISHED)]), 5) is None
    assert not_safe([], None) is None


@st.composite
def histories(draw):
    """Each life goes on from a checkpoint of one before it, or from the beginning; saves at any time."""
    lives, at = [], 0.0
    for number in range(1, draw(st.integers(1, 6)) + 1):
        parents = [other for other in lives if other.last_step]
        parent = draw(st.sampled_from([None, *parents]))
        base = draw(st.integers(parent.base, parent.last_step)) if parent else 0
        count = draw(st.integers(0, 8))
        seconds = draw(st.lists(st.floats(0, 5), min_size=count, max_size=count))
        start = at + draw(st.floats(0, 9))
        times = start + draw(st.floats(0, 9)) + np.cumsum(seconds)
        end = float(times[-1]) + draw(st.floats(0, 3)) if count else start
        losses = Losses(np.arange(base + 1, base + count + 1), np.ones(count), times, np.array(seconds))
        saves = tuple(Save(base + 1, draw(st.floats(start, end)), draw(st.floats(0, 4))) for _ in range(draw(st.integers(0, 2))))
        lives.append(Life(number, start, end, draw(st.sampled_from([DIED, ASKED, FINISHED])), run=RUNS[number],
                          fresh=parent is None, resumed_from=base or None if parent else None, base=base, losses=losses,
                          saves=saves,
                          source=f"x, run {parent.run}, y" if parent else "", first_step=base + 1 if count else None,
                          last_step=base + count if count else None))
        at = end
    return lives


@given(histories())
def test_every_second_is_counted_once_and_every_step_is_kept_or_lost(lives):
    shares = shares_of(lives)
    assert math.isclose(total_of(shares).total, lives[-1].ended - lives[0].started, abs_tol=1e-6)
    for share in shares:
        assert 0 <= share.steps_lost <= share.steps
        assert min(vars(share.seconds).values()) >= 0
        assert all(before.end == after.begin for before, after in zip(share.spans, share.spans[1:], strict=False))
    assert shares[-1].steps_lost == 0
    last = lives[-1]
    if last.first_step is not None and not any(one.end in (ASKED, FINISHED) for one in lives):
        assert sum(share.steps - share.steps_lost for share in shares) == last.last_step        # one chain of kept steps
