"""Events and log lines become run attempts: where one begins, how it ended, what it did."""

import random
from dataclasses import replace

import pytest
from training_logs import RUNS, ZERO, Log, Training, check, history, two_attempts

from mindresume import events as ev
from mindresume.events import FAILED, FINISHED, PREEMPTED
from mindresume.report import log_reader
from mindresume.report.log_reader import Failure, LogLine, RecordedEvent
from mindresume.report.runs import (
    RUNNING,
    UNKNOWN,
    RefusedCheckpoint,
    Save,
    attempts_of,
    with_losses,
    with_outcome,
)
from mindresume.report.tables import resumed_from

STOPPING = ev.PreemptionRequested(3, "SIGTERM")


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
    check(first, number=1, run_id=RUNS[0], started=ZERO, ended=ZERO + 19.5, outcome=FAILED)
    check(first, failed_rank=None, has_events=True, world_size=1, is_cut=False)
    check(first, first_step=1, last_step=8)
    check(first.origin, is_fresh=True, step=None, is_inferred=False)
    check(second, run_id=RUNS[1], outcome=FINISHED, first_step=6, last_step=10)
    check(second.origin, step=5, run_id=RUNS[0], checkpoint="1 rank, every byte verified")
    check(
        second.origin,
        refused=(RefusedCheckpoint(8, "the save never completed: no rank recorded what it wrote"),),
    )
    assert first.saves.disk == (Save(5, ZERO + 16.5, 0.5, 0.5, 13_000_000, is_committed=True),)
    assert list(second.losses.steps) == [6, 7, 8, 9, 10]


def test_a_log_without_events_gives_attempts_with_unknown_fields():
    first, second = attempts_of([], two_attempts().parsed)
    check(first, has_events=False, run_id=None, outcome=FAILED, reason="")
    check(first, first_step=1, last_step=8)
    check(first.origin, step=None, is_inferred=True)
    assert first.saves.disk == ()
    check(second, first_step=6, outcome=FINISHED)
    check(second.origin, step=5, is_inferred=True)


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
    check(attempt, started=ZERO + min(start_line, 10), run_id=RUNS[0], last_step=3)


@pytest.mark.parametrize(
    "events, is_over, outcome, reason",
    [
        ([ev.TrainingEnded(FINISHED)], True, FINISHED, ""),
        ([], True, FINISHED, ""),
        ([STOPPING], True, PREEMPTED, ""),
        ([STOPPING, ev.TrainingEnded(PREEMPTED, "SIGTERM", 3)], False, PREEMPTED, "SIGTERM"),
        ([ev.TrainingEnded(FAILED, "ValueError: nan")], False, FAILED, "ValueError: nan"),
        ([STOPPING], False, UNKNOWN, ""),
        ([], False, UNKNOWN, ""),
    ],
)
def test_the_outcome_of_an_attempt_is_recognized(events, is_over, outcome, reason):
    log = trained(Training(), 0, 1, 3)
    for event in events:
        log.event(20, event)
    if is_over:
        Log.over(log, 21)
    check(one(log), outcome=outcome, reason=reason, last_step=3)


@pytest.mark.parametrize(
    "failure, ranks",
    [
        (Failure(ZERO + 19, 3, "full"), (3, None)),
        (Failure(ZERO + 45, 3, "full"), (None, 3)),
        (Failure(ZERO + 45, 3, "late", None, RUNS[0]), (3, None)),
        (Failure(ZERO + 45, 3, "of a run whose events are gone", None, RUNS[9]), (None, None)),
        (Failure(ZERO - 99, 3, "of a training whose files are gone"), (None, None)),
    ],
)
def test_a_failure_belongs_to_its_run_or_to_the_attempt_of_its_time(failure, ranks):
    first, second = attempts(two_attempts(), failures=[failure])
    assert (first.failed_rank, second.failed_rank) == ranks
    assert (first.outcome, second.outcome) == (FAILED, FAILED if ranks[1] else FINISHED)


def test_a_save_that_another_rank_could_not_write():
    log = trained(Training(), 0, 1, 5).event(6, ev.SaveWritten(5, 1, 0.1, 0.1))
    failures = [Failure(ZERO + 7, 3, "full", 5)]
    assert one(log, failures=failures).saves.disk[0].failure == "rank 3: full"
    log.event(8, ev.SaveCommitted(5, 4, 4))
    check(one(log, failures=failures).saves.disk[0], failure="", is_committed=True)


def test_a_save_in_the_background_stops_the_training_for_its_copy_only():
    log = trained(Training(), 0, 1, 5).event(6.0, ev.SaveBegun(5))
    log.event(6.1, ev.SaveStaged(5, "x", 0.1))
    (save,) = one(log).saves.disk
    check(save, stall_seconds=0.1, write_seconds=None, is_background=True, is_staged=True)
    log.event(8, ev.SaveWritten(5, 9, 2.0)).event(9, ev.SaveCommitted(5, 1, 9))
    (save,) = one(log).saves.disk
    assert save == Save(5, ZERO + 6.1, 0.1, 2.0, 9, is_committed=True, is_background=True)


def test_failed_skipped_abandoned_and_unfinished_saves():
    log = trained(Training(), 0, 1, 9)
    for event in (
        ev.SaveBegun(5),
        ev.SaveFailed(5, "No space left"),
        ev.SaveSkipped(6, "the previous save is still being written", 1),
        ev.SaveAbandoned(7, "rank 3"),
        ev.SaveFailed(None, "not known", 2),
        ev.SaveBegun(9),
    ):
        log.event(10, event)
    attempt = one(log)
    assert [(save.step, save.failure, save.is_staged) for save in attempt.saves.disk] == [
        (5, "No space left", False),
        (7, "rank 3", False),
        (9, "", False),
    ]
    assert attempt.saves.skipped == 1 and attempt.last_step == 9


def test_a_save_that_the_next_attempt_commits_is_one_of_the_attempt_that_made_it():
    log = trained(Training(), 0, 1, 5).event(6, ev.SaveWritten(5, 1, 0.1, 0.1))
    log.start(20).resume(21, 5, RUNS[0])
    for run in (RUNS[0], RUNS[9]):
        log.event(22, ev.SaveCommitted(5, 1, 1, run))
    first, second = attempts(log.run(23, RUNS[1]).steps(24, 6, 7))
    assert [save.is_committed for save in first.saves.disk] == [True] and second.saves.disk == ()


def test_a_save_proves_that_its_step_was_done():
    # the loss every 10 steps
    log = Training().start(0).fresh(1).run(2, RUNS[0]).loss(10, 10).save(14, 14)
    assert one(log).last_step == 14


def test_a_resume_whose_selection_is_lost():
    training = Training().start(0).resume(1, 35, RUNS[0], after=17, scale=0.5).run(2, RUNS[1])
    kept = [row for row in training.recorded[0] if not isinstance(row.event, ev.CheckpointSelected)]
    (attempt,) = attempts_of([kept], training.steps(3, 18, 20).parsed)
    check(attempt.origin, step=35, base_step=17, run_id=None, is_inferred=False)


def test_a_weights_only_load_is_not_a_resume():
    selected = ev.CheckpointSelected(900, 3, RUNS[5], "/other", "4 ranks", weights_only=True)
    attempt = one(Training().start(0).event(1, selected).run(2, RUNS[0]).steps(5, 1, 4))
    check(attempt.origin, step=None, base_step=0, is_inferred=False)
    assert attempt.first_step == 1 and "4 ranks" in attempt.origin.checkpoint


@pytest.mark.parametrize("step, cell", [(40, "a part of it from a partner node"), (30, "")])
def test_a_node_that_got_its_part_from_a_partner_is_told(step, cell):
    """Step 40 was selected: of step 30 a part was fetched before."""
    fetched = ev.PartnerFetched(step, (2, 3), 0, 1 << 30, 1.0)
    selected = ev.CheckpointSelected(40, 1, RUNS[0], "/tier", "4 ranks", source="memory")
    attempt = one(Training().start(0).event(1, fetched).event(2, selected).run(3, RUNS[1]))
    assert attempt.origin.partner is bool(cell) and cell in resumed_from(attempt)
    assert resumed_from(attempt).startswith("step 40 in memory")


def test_a_line_that_comes_twice_with_another_time_is_one_step():
    assert list(one(Log().start(0).loss(5, 1).loss(5.001, 1).loss(6, 2)).losses.steps) == [1, 2]


def test_with_pipeline_stages_the_loss_of_another_rank_is_put_where_it_belongs():
    log = Log()
    for at, first in ((0, 1), (50, 3)):
        log.start(at).pipeline(at).loss(at + 5, first, 0.0)
    other = [
        LogLine(ZERO + at, log_reader.LOSS, step, value, 1.0)
        for at, step, value in ((5, 1, 6.0), (55, 3, 5.0))
    ]
    for lines, values in ((other, [[6.0], [5.0]]), (other[1:], [[0.0], [5.0]])):
        assert [list(row.losses.values) for row in with_losses(attempts(log), lines)] == values
    same = attempts(two_attempts())
    # no pipeline: its own loss is right
    assert with_losses(same, other) == same


@pytest.mark.parametrize(
    "leases, outcome",
    [
        ({RUNS[0]: True}, RUNNING),
        ({RUNS[0]: False}, FAILED),
        ({RUNS[0]: None}, UNKNOWN),
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
    assert attempts_of([], [], [Failure(ZERO, 3, "full")]) == attempts_of([[]], []) == ()
    assert len(one(Log().start(0)).losses) == 0


def test_saves_in_memory_and_where_a_resume_came_from():
    first, second = attempts(history(attempts=2, memory=3, sources="m", steps=10))
    copies = tuple(ev.TierSaved(step, 13_000_000, 0.1, 0.3) for step in (3, 6, 9))
    check(first.saves, memory=copies, disk=())
    assert first.origin.source == ""
    check(second.origin, source="memory", step=9)


@pytest.mark.parametrize("recorded, last", [({RUNS[0]: 17}, 17), ({RUNS[1]: 17}, 14), ({}, 14)])
def test_the_step_ledger_of_a_run_knows_its_last_step(recorded, last):
    # the loss every 10 steps
    log = Training().start(0).fresh(1).run(2, RUNS[0]).loss(10, 10).save(14, 14)
    (attempt,) = attempts_of(log.recorded, log.parsed, last_steps=recorded)
    check(attempt, first_step=1, last_step=last)
