"""Events and log lines become run attempts: where one begins, how it ended, what it did."""

import random
from dataclasses import replace

import numpy as np
import pytest
from training_logs import RUNS, ZERO, Log, Training, history, two_attempts

from mindresume import events as ev
from mindresume.events import FAILED, FINISHED, PREEMPTED
from mindresume.report import log_parser
from mindresume.report.event_log import Failure, RecordedEvent
from mindresume.report.log_parser import LogLine
from mindresume.report.runs import (
    RUNNING,
    UNKNOWN,
    RefusedCheckpoint,
    Save,
    attempts_of,
    with_losses,
    with_outcome,
)


def attempts(*written, failures=()):
    return attempts_of(
        [recorded for log in written if isinstance(log, Training) for recorded in log.recorded],
        [line for log in written for line in log.parsed],
        failures,
    )


def one(log, **given):
    (attempt,) = attempts(log, **given)
    return attempt


def trained(log, at, first, last):
    return log.start(at).fresh(at + 0.2).run(at + 0.3, RUNS[0]).steps(at + 1, first, last)


def test_two_attempts():
    first, second = attempts(two_attempts())
    assert (first.number, first.run_id, first.started - ZERO, first.ended - ZERO) == (
        1,
        RUNS[0],
        0,
        19.5,
    )
    assert (first.outcome, first.failed_rank, first.has_events, first.world_size) == (
        FAILED,
        None,
        True,
        1,
    )
    assert (first.origin.is_fresh, first.origin.step, first.first_step, first.last_step) == (
        True,
        None,
        1,
        8,
    )
    assert (second.run_id, second.outcome) == (RUNS[1], FINISHED)
    assert (second.origin.step, second.first_step, second.last_step) == (5, 6, 10)
    assert (second.origin.run_id, second.origin.checkpoint) == (
        RUNS[0],
        "1 rank, every byte verified",
    )
    assert second.origin.refused == (
        RefusedCheckpoint(8, "the save never completed: no rank recorded what they wrote"),
    )
    assert first.saves.disk == (Save(5, ZERO + 16.5, 0.5, 0.5, 13_000_000, is_committed=True),)
    assert (
        list(second.losses.steps) == [6, 7, 8, 9, 10]
        and not first.origin.is_inferred
        and not first.is_cut
    )


def test_a_log_without_events_gives_attempts_with_unknown_fields():
    first, second = attempts_of([], two_attempts().parsed)
    assert (first.has_events, first.run_id, first.saves.disk, first.outcome, first.reason) == (
        False,
        None,
        (),
        FAILED,
        "",
    )
    assert (first.origin.step, first.first_step, first.last_step, first.origin.is_inferred) == (
        None,
        1,
        8,
        True,
    )
    assert (second.origin.step, second.origin.is_inferred, second.first_step, second.outcome) == (
        5,
        True,
        6,
        FINISHED,
    )


def test_attempts_with_and_without_events_in_one_folder():
    """mindformers alone; with mindresume; one that ended before mindresume was reached; with
    mindresume."""
    before, between = Log().start(0).steps(5, 1, 4), Log().start(100)
    first = trained(Training(), 50, 1, 8)
    second = Training().start(150).resume(151, 5, RUNS[0]).run(152, RUNS[1]).steps(155, 6, 9)
    found = attempts(before, first, between, second)
    assert [
        (row.has_events, row.started - ZERO, row.first_step, row.last_step) for row in found
    ] == [(False, 0, 1, 4), (True, 50, 1, 8), (False, 100, None, None), (True, 150, 6, 9)]


@pytest.mark.parametrize("start_line", [0, 10.5])
def test_the_line_of_the_start_may_be_before_or_after_the_first_event(start_line):
    training = Training()
    training.recorded.append([])
    training.event(10, ev.TrainingStarted("a", 1, 1, "x")).run(11, RUNS[0])
    Log.start(training, start_line)
    attempt = one(training.steps(12, 1, 3))
    assert (attempt.started - ZERO, attempt.run_id, attempt.last_step) == (
        min(start_line, 10),
        RUNS[0],
        3,
    )


@pytest.mark.parametrize(
    "ending, outcome, reason",
    [
        (lambda log: log.over(20), FINISHED, ""),
        (lambda log: Log.over(log, 20), FINISHED, ""),
        (
            lambda log: Log.over(log.event(20, ev.PreemptionRequested(3, "SIGTERM")), 21),
            PREEMPTED,
            "",
        ),
        (
            lambda log: (
                log.event(20, ev.PreemptionRequested(3, "SIGTERM"))
                .save(21, 3)
                .event(22, ev.TrainingEnded(PREEMPTED, "SIGTERM", 3))
            ),
            PREEMPTED,
            "SIGTERM",
        ),
        (
            lambda log: log.event(20, ev.TrainingEnded(FAILED, "ValueError: nan")),
            FAILED,
            "ValueError: nan",
        ),
        (lambda log: log.event(20, ev.PreemptionRequested(3, "SIGTERM")), UNKNOWN, ""),
        (lambda log: log, UNKNOWN, ""),
    ],
)
def test_the_outcome_of_an_attempt_is_recognized(ending, outcome, reason):
    attempt = one(ending(trained(Training(), 0, 1, 3)))
    assert (attempt.outcome, attempt.reason, attempt.last_step) == (outcome, reason, 3)


def test_a_failure_belongs_to_its_run_or_to_the_attempt_of_its_time():
    def reasons(*failures):
        return [
            (attempt.failed_rank, attempt.outcome)
            for attempt in attempts(two_attempts(), failures=failures)
        ]

    assert reasons(Failure(ZERO + 19, 3, "full")) == [(3, FAILED), (None, FINISHED)]
    assert reasons(Failure(ZERO + 45, 3, "full")) == [(None, FAILED), (3, FAILED)]
    assert reasons(Failure(ZERO + 45, 3, "late", None, RUNS[0])) == [(3, FAILED), (None, FINISHED)]
    assert reasons(Failure(ZERO + 45, 3, "of a run whose events are gone", None, RUNS[9])) == [
        (None, FAILED),
        (None, FINISHED),
    ]
    assert reasons(Failure(ZERO - 99, 3, "of a training whose files are gone")) == [
        (None, FAILED),
        (None, FINISHED),
    ]


def test_a_save_that_another_rank_could_not_write():
    log = trained(Training(), 0, 1, 5).event(6, ev.SaveWritten(5, 1, 0.1, 0.1))
    (save,) = one(log, failures=[Failure(ZERO + 7, 3, "full", 5)]).saves.disk
    assert "rank 3" in save.failure and "full" in save.failure
    (save,) = one(
        log.event(8, ev.SaveCommitted(5, 4, 4)), failures=[Failure(ZERO + 7, 3, "full", 5)]
    ).saves.disk
    assert save.failure == "" and save.is_committed


def test_a_save_in_the_background_stops_the_training_for_its_copy_only():
    log = (
        trained(Training(), 0, 1, 5)
        .event(6.0, ev.SaveBegun(5))
        .event(6.1, ev.SaveStaged(5, "x", 0.1))
    )
    (save,) = one(log).saves.disk
    assert (save.stall_seconds, save.write_seconds, save.is_background, save.is_staged) == (
        0.1,
        None,
        True,
        True,
    )
    (save,) = one(
        log.event(8, ev.SaveWritten(5, 9, 2.0)).event(9, ev.SaveCommitted(5, 1, 9))
    ).saves.disk
    assert save == Save(5, ZERO + 6.1, 0.1, 2.0, 9, is_committed=True, is_background=True)


def test_failed_skipped_abandoned_and_unfinished_saves():
    log = (
        trained(Training(), 0, 1, 9)
        .event(10, ev.SaveBegun(5))
        .event(10, ev.SaveFailed(5, "No space left"))
    )
    log.event(11, ev.SaveSkipped(6, "the previous save is still being written", 1)).event(
        12, ev.SaveAbandoned(7, "rank 3")
    )
    log.event(12, ev.SaveFailed(None, "not known", 2)).event(13, ev.SaveBegun(9))
    attempt = one(log)
    assert [(save.step, save.failure, save.is_staged) for save in attempt.saves.disk] == [
        (5, "No space left", False),
        (7, "rank 3", False),
        (9, "", False),
    ]
    assert attempt.saves.skipped == 1 and attempt.last_step == 9


def test_a_save_that_the_next_attempt_commits_is_one_of_the_attempt_that_made_it():
    log = (
        trained(Training(), 0, 1, 5)
        .event(6, ev.SaveWritten(5, 1, 0.1, 0.1))
        .start(20)
        .resume(21, 5, RUNS[0])
    )
    log.event(22, ev.SaveCommitted(5, 1, 1, RUNS[0])).event(22, ev.SaveCommitted(5, 1, 1, RUNS[9]))
    log.run(23, RUNS[1]).steps(24, 6, 7)
    first, second = attempts(log)
    assert [save.is_committed for save in first.saves.disk] == [True] and second.saves.disk == ()


def test_a_save_proves_that_its_step_was_done():
    # the loss every 10 steps
    log = Training().start(0).fresh(1).run(2, RUNS[0]).loss(10, 10).save(14, 14)
    assert one(log).last_step == 14


def test_a_resume_whose_selection_is_lost():
    training = (
        Training()
        .start(0)
        .resume(1, 35, RUNS[0], after=17, scale=0.5)
        .run(2, RUNS[1])
        .steps(3, 18, 20)
    )
    kept = [
        found
        for found in training.recorded[0]
        if not isinstance(found.event, ev.CheckpointSelected)
    ]
    (attempt,) = attempts_of([kept], training.parsed)
    origin = attempt.origin
    assert (origin.step, origin.base_step, origin.run_id, origin.is_inferred) == (
        35,
        17,
        None,
        False,
    )


def test_a_weights_only_load_is_not_a_resume():
    selected = ev.CheckpointSelected(900, 3, RUNS[5], "/other", "4 ranks", weights_only=True)
    attempt = one(Training().start(0).event(1, selected).run(2, RUNS[0]).steps(5, 1, 4))
    assert (
        attempt.origin.step,
        attempt.origin.base_step,
        attempt.first_step,
        attempt.origin.is_inferred,
    ) == (None, 0, 1, False)
    assert "4 ranks" in attempt.origin.checkpoint


def test_a_line_that_comes_twice_with_another_time_is_one_step():
    assert list(one(Log().start(0).loss(5, 1).loss(5.001, 1).loss(6, 2)).losses.steps) == [1, 2]


def test_with_pipeline_stages_the_loss_of_another_rank_is_put_where_it_belongs():
    log = Log()
    for at, first in ((0, 1), (50, 3)):
        log.start(at).pipeline(at).loss(at + 5, first, 0.0)
    other = [
        LogLine(ZERO + at, log_parser.LOSS, step, value, 1.0)
        for at, step, value in ((5, 1, 6.0), (55, 3, 5.0))
    ]
    first, second = with_losses(attempts(log), other)
    assert (list(first.losses.values), list(second.losses.values)) == ([6.0], [5.0])
    assert [list(attempt.losses.values) for attempt in with_losses(attempts(log), other[1:])] == [
        [0.0],
        [5.0],
    ]
    same = attempts(two_attempts())
    # no pipeline: its own loss is right
    assert with_losses(same, other) == same


@pytest.mark.parametrize(
    "leases, outcome",
    [
        ({RUNS[0]: True}, RUNNING),
        ({RUNS[0]: False}, FAILED),
        ({RUNS[0]: None}, UNKNOWN),
        ({}, FAILED),
        ({RUNS[3]: True}, FAILED),
    ],
)
def test_the_lease_of_the_last_attempt_decides_whether_it_runs(leases, outcome):
    attempt = with_outcome(one(trained(Training(), 0, 1, 3)), leases)
    assert attempt.outcome == outcome and bool(attempt.reason) == (outcome == FAILED)
    unrecorded = replace(attempt, run_id=None, outcome=UNKNOWN)
    assert with_outcome(unrecorded, leases) is unrecorded


def test_clocks_that_step_back():
    """Within an attempt, and between two: nothing is lost, and no attempt ends after the next one
    began."""
    training = two_attempts()
    late = [
        [
            RecordedEvent(at - 30 if index > 3 else at, event)
            for index, (at, event) in enumerate(training.recorded[0])
        ],
        [RecordedEvent(at - 35, event) for at, event in training.recorded[1]],
    ]
    found = attempts_of(late, training.parsed)
    assert {attempt.run_id for attempt in found} >= set(RUNS[:2])
    for before, after in zip(found, found[1:], strict=False):
        assert before.started <= before.ended <= after.started


def test_events_in_any_order_are_no_error():
    training, draw = two_attempts(), random.Random(3)
    for _ in range(200):
        recorded = [found for events in training.recorded for found in events]
        spoken = training.parsed
        draw.shuffle(recorded)
        draw.shuffle(spoken)
        cut = draw.randrange(len(recorded))
        assert len(attempts_of([recorded[:cut], recorded[cut:]], spoken)) >= 1


def test_no_events_give_no_attempts():
    assert attempts_of([], []) == () and attempts_of([[]], []) == ()
    assert attempts_of([], [], [Failure(ZERO, 3, "full")]) == ()
    assert np.array_equal(one(Log().start(0)).losses.steps, [])


def test_saves_in_memory_and_where_a_resume_came_from():
    first, second = attempts(history(attempts=2, memory=3, sources="m", steps=10))
    assert (
        first.saves.memory == tuple(ev.TierSaved(step, 13_000_000, 0.1, 0.3) for step in (3, 6, 9))
        and first.saves.disk == ()
    )
    assert (first.origin.source, second.origin.source, second.origin.step) == ("", "memory", 9)
    silent = one(
        Training()
        .start(0)
        .fresh(1)
        .run(2, RUNS[0])
        .steps(3, 1, 4)
        .event(9, ev.TierSaved(6, 1, 0.1, 0.1))
    )
    assert silent.last_step == 6
