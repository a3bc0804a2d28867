"""Events become lives: where one begins, how it ended, what it did."""
import numpy as np
import pytest
from logfiles import RUNS, ZERO, Log, two_lives

from mindresume.report import logs
from mindresume.report.history import (
    ASKED,
    DIED,
    FINISHED,
    NOTHING_LEFT,
    RUNNING,
    UNKNOWN,
    Refused,
    Save,
    lives_of,
    settled,
    with_losses,
)
from mindresume.report.logs import Clock, Event, parse


def lives(*written):
    return lives_of(event for log in written for line in log.lines for event in parse(line, Clock()))


def one(log):
    life, = lives(log)
    return life


def trained(log, at, first, last):
    return log.start(at).fresh(at).run(at, RUNS[0]).steps(at + 1, first, last)


def test_two_lives():
    first, second = lives(two_lives())
    assert (first.number, first.run, first.started - ZERO, first.ended - ZERO, first.end) == (1, RUNS[0], 0, 19.5, DIED)
    assert (first.fresh, first.resumed_from, first.first_step, first.last_step) == (True, None, 1, 8)
    assert (second.run, second.end, second.resumed_from, second.first_step, second.last_step) == (RUNS[1], FINISHED, 5, 6, 10)
    assert second.refused == (Refused(8, "the save never completed: no rank recorded what they wrote"),)
    assert first.saves == (Save(5, ZERO + 16.5, 0.5, 0.5, committed=True),)
    assert list(second.losses.steps) == [6, 7, 8, 9, 10] and not first.inferred and not first.cut


def test_a_life_that_died_before_it_chose_is_one():
    assert [life.first_step for life in lives(Log().start(0), trained(Log(), 50, 1, 3))] == [None, 1]


def test_without_the_first_line_of_the_trainer_the_second_choice_begins_a_life():
    log = Log().fresh(1).run(2, RUNS[0]).steps(3, 1, 8)
    log.ours(40, "not resuming from step 8: x").resume(41, 5, RUNS[0]).run(42, RUNS[1]).steps(43, 6, 7)
    first, second = lives(log)
    assert first.cut and (first.last_step, second.resumed_from) == (8, 5) and [row.step for row in second.refused] == [8]


def test_a_log_that_begins_in_the_middle():
    life = one(Log().steps(100, 51, 60))
    assert life.cut and (life.resumed_from, life.inferred, life.first_step, life.last_step) == (50, True, 51, 60)


def test_a_training_of_mindformers_alone_begins_where_its_first_loss_says():
    first, second = lives(Log().start(0).steps(10, 1, 8).start(50).steps(60, 6, 9))
    assert (first.resumed_from, first.first_step, first.fresh) == (None, 1, False)
    assert (second.resumed_from, second.inferred, second.first_step) == (5, True, 6)


@pytest.mark.parametrize("ending, end, why", [
    (lambda log: log.over(20), FINISHED, ""),
    (lambda log: log.ours(20, "SIGTERM: the training saves step 3 and ends").save(21, 3).over(21).ours(
        22, "left because of SIGTERM; start the same command again to go on"), ASKED, "SIGTERM"),
    (lambda log: log.ours(20, "graceful exit: the training saves step 3 and ends").over(21), ASKED, ""),
    (lambda log: log.ours(20, "SIGTERM: the training saves step 3 and ends"), UNKNOWN, ""),
    (lambda log: log, UNKNOWN, ""),
])
def test_how_it_ended(ending, end, why):
    life = one(ending(trained(Log(), 0, 1, 3)))
    assert (life.end, life.why) == (end, why)


def test_a_training_that_was_complete():
    life = one(Log().start(0).resume(1, 40, RUNS[0]).ours(2, "the training is complete: step 40 is the end of 4 epochs"))
    assert (life.end, life.why, life.first_step, life.resumed_from) == (NOTHING_LEFT, "step 40 is the end of 4 epochs", None, 40)


def test_a_save_in_the_background_stops_the_training_for_its_copy_only():
    log = trained(Log(), 0, 1, 5).ours(6.1, "step 5 is being saved as x; training stopped for 0.100 s").save(8, 5, 2.0)
    save, = one(log).saves
    assert (save.stopped, save.seconds, save.background, save.committed) == (0.1, 2.0, True, True)


def test_failed_and_skipped_saves():
    log = trained(Log(), 0, 1, 9).ours(10, "step 5 was not saved on rank 0: No space left (1 failed in a row)")
    log.ours(11, "step 6 is not saved: the save before is still being written (1 skipped so far)")
    log.ours(12, "step 7 is not committed: no record of rank 3 within 600 s. A resume will take an older step")
    life = one(log)
    assert [(save.step, save.problem, save.done) for save in life.saves] == [
        (5, "rank 0: No space left (1 failed in a row)", False),
        (7, "is not committed: no record of rank 3 within 600 s. A resume will take an older step", False)]
    assert life.skipped == 1 and life.last_step == 9


def test_a_save_that_the_next_life_commits_is_one_of_the_life_that_made_it():
    log = trained(Log(), 0, 1, 5).ours(6, "saved step 5, 1.0 MiB in 0.10 s").start(20).resume(21, 5, RUNS[0])
    log.ours(22, "step 5 was complete already and is committed now").run(23, RUNS[1]).steps(24, 6, 7)
    first, second = lives(log)
    assert [save.committed for save in first.saves] == [True] and second.saves == ()


def test_a_save_says_that_its_step_was_done():
    log = Log().start(0).fresh(1).run(2, RUNS[0]).loss(10, 10).save(14, 14)         # the loss every 10 steps
    assert one(log).last_step == 14


def test_another_batch_size_renumbers():
    log = Log().start(0).ours(1, "resume from step 35, epoch 4, x, run 0001-0000aaaa, 1 rank, every byte checked")
    log.ours(1, "continues after step 17 (epoch 3 done), global batch size 16, loss scale 1.0; steps scaled by 0.5 from 35")
    life = one(log.run(2, RUNS[1]).steps(3, 18, 20))
    assert (life.resumed_from, life.base, life.first_step, life.last_step) == (35, 17, 18, 20)
    assert life.scale == pytest.approx(17 / 35)


def test_a_line_that_comes_twice_with_another_time_is_one_step():
    assert list(one(Log().start(0).loss(5, 1).loss(5.001, 1).loss(6, 2)).losses.steps) == [1, 2]


def test_with_pipeline_stages_the_loss_of_another_rank_is_put_where_it_belongs():
    log = Log()
    for at, first in ((0, 1), (50, 3)):
        log.start(at).line(at, "pipeline stages: 2 > 1, the loss on the last card is valid.", "WARNING").loss(at + 5, first, 0.0)
    other = [Event(ZERO + at, logs.LOSS, step, value, 1.0) for at, step, value in ((5, 1, 6.0), (55, 3, 5.0))]
    first, second = with_losses(lives(log), other)
    assert (list(first.losses.values), list(second.losses.values)) == ([6.0], [5.0])
    assert [list(life.losses.values) for life in with_losses(lives(log), other[1:])] == [[0.0], [5.0]]
    same = lives(two_lives())
    assert with_losses(same, other) == same                             # no pipeline: its own loss is right


ERROR = Event(ZERO + 9, logs.ERROR, text="failed: SaveError: full")


@pytest.mark.parametrize("claims, error, end, why", [
    ({RUNS[0]: True}, ERROR, RUNNING, ""),
    ({RUNS[0]: False}, None, DIED, "its process is gone"),
    ({RUNS[0]: False}, ERROR, DIED, "failed: SaveError: full"),
    ({RUNS[0]: None}, None, UNKNOWN, ""),
    ({}, None, DIED, "it gave its claim on the folder back"),
    ({RUNS[3]: True}, ERROR, DIED, "failed: SaveError: full"),
    (None, None, UNKNOWN, ""),
])
def test_the_last_life_is_asked_for(claims, error, end, why):
    life = settled(one(trained(Log(), 0, 1, 3)), claims, error)
    assert life.end == end and life.why.startswith(why)


def test_a_life_that_ended_well_is_not_asked_for():
    life = lives(two_lives())[-1]
    assert settled(life, {}, ERROR) is life


def test_no_events_no_lives():
    assert lives_of([]) == ()
    assert lives_of([ERROR]) == ()
    assert np.array_equal(one(Log().start(0)).losses.steps, [])
