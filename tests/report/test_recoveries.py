"""Recoveries: phases between a failure and the first new step, with whatever moments are known."""

import pytest
from training_logs import RUNS, ZERO, Training, history, two_attempts

from mindresume import events as ev
from mindresume.events import Moments
from mindresume.report.accounting import accounts_of, recoveries_of, totals_of
from mindresume.report.event_log import RecordedEvent


def accounts(training):
    return accounts_of(training.attempts())


def shown(phases):
    return [(" + ".join(phase.names), phase.begin - ZERO, phase.end - ZERO) for phase in phases]


def test_phases_without_a_moment_between_them_are_one():
    (found,) = recoveries_of(accounts(two_attempts()))
    assert (
        found.failed,
        found.resumed,
        found.source,
        found.steps_redone,
        found.seconds_redone,
    ) == (1, 2, "disk", 3, 3.0)
    assert found.restart_seconds == pytest.approx(50 - 19.5) and shown(found.phases) == [
        ("notice + end + start + import + join", 19.5, pytest.approx(40.1)),
        ("select", pytest.approx(40.1), 41.0),
        ("build + load + compile + first step", 41.0, 50.0),
    ]
    assert sum(totals_of([found]).values()) == pytest.approx(50 - 19.5 + 3)


def test_a_start_that_fails_belongs_to_the_recovery_and_a_normal_end_ends_none():
    training = Training().start(0).fresh(1).run(2, RUNS[0]).steps(10, 1, 8).save(18.5, 5)
    training.start(30).event(31, ev.TrainingEnded(ev.FAILED, "no such file"))
    training.start(40).resume(41, 5, RUNS[0]).run(42, RUNS[1]).steps(50, 6, 9).over(56)
    training.start(60).resume(61, 9, RUNS[1]).run(62, RUNS[2]).steps(70, 10, 12)
    found = recoveries_of(accounts(training))
    assert [(row.failed, row.resumed, row.first_step - ZERO) for row in found] == [(1, 3, 51)]


def test_the_moments_of_a_start_come_from_its_events():
    training = Training().start(0).fresh(1).run(2, RUNS[0]).steps(10, 1, 8).save(18.5, 5)
    training.start(40)
    training.recorded[-1][0] = RecordedEvent(
        ZERO + 40.5, ev.TrainingStarted("a", 1, 1, "x", None, ZERO + 20.0, ZERO + 35.0)
    )
    training.resume(42, 5, RUNS[0]).event(46, ev.WeightsLoaded(0, 3, 10, 10, "step 5", 2.5)).run(
        47, RUNS[1]
    )
    training.event(49, ev.NetworkCompiled()).event(50, ev.FirstStepDone(6)).steps(49, 6, 9).over(60)
    (found,) = recoveries_of(accounts(training))
    died = found.died - ZERO
    assert shown(found.phases) == [
        ("notice + end + start", died, 20.0),
        ("import", 20.0, 35.0),
        ("join", 35.0, 40.5),
        ("select", 40.5, 42.0),
        ("build", 42.0, 43.5),
        ("load", 43.5, 46.0),
        ("compile", 46.0, 49.0),
        ("first step", 49.0, 50.0),
    ]
    assert list(totals_of([found]))[-1] == "redone" and found.first_step == ZERO + 50


def test_only_the_first_of_each_moment_counts():
    training = Training().start(0).fresh(1).run(2, RUNS[0])
    training.event(3, ev.WeightsLoaded(0, 1, 1)).event(4, ev.WeightsLoaded(0, 1, 1)).event(
        5, ev.FirstStepDone(1)
    )
    (row,) = accounts(training)
    assert row.attempt.origin.moments == Moments(
        joined=ZERO + 0.1, selected=ZERO + 1, loaded=ZERO + 3, stepped=ZERO + 5
    )


def test_a_recovery_knows_where_its_checkpoint_lay():
    found = recoveries_of(accounts(history(attempts=4, memory=3, sources="mdm")))
    assert [row.source for row in found] == ["memory", "disk", "memory"]
