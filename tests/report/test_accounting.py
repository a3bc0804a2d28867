"""Accounting of steps and seconds: computed by hand, and as properties of any history."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_logs import RUNS, ZERO, Training, check, history, two_attempts

from mindresume import events as ev
from mindresume.events import FAILED, FINISHED, PREEMPTED, Moments
from mindresume.report.accounting import Seconds, accounts_of, recoveries_of, total_of, totals_of
from mindresume.report.log_reader import RecordedEvent
from mindresume.report.runs import UNKNOWN, Losses, Origin, RunAttempt, Save, Saves, attempts_of


def attempt(number, first, last, parent=None, outcome=FAILED, **more):
    """Returns an attempt with steps ``first`` to ``last``, each of a second, resumed after ``first
    - 1``. ``parent``: the run that saved it."""
    start, count = 100.0 * number, last - first + 1
    steps, ones = np.arange(first, last + 1), np.ones(count)
    attempt = RunAttempt(
        number,
        start,
        start + 9 + count,
        outcome,
        run_id=RUNS[number],
        last_step=last,
        losses=Losses(steps, ones, start + 10 + np.arange(count), ones),
        origin=Origin(first == 1, first - 1 or None, run_id=parent, base_step=first - 1),
    )
    return replace(attempt, **more)


def lost(*attempts):
    return [account.steps_lost for account in accounts_of(attempts)]


def test_two_attempts_second_by_second():
    first, second = accounts_of(two_attempts().attempts())
    assert (first.steps, first.steps_lost, first.kept) == (8, 3, 5)
    # step 1 took 10 s, of which one is an ordinary step; then 4 steps and a save of 0.5 s; then 3
    # steps that are lost
    assert first.seconds == Seconds(
        productive=5.0, lost=3.0, saving=0.5, startup=11.0, shutdown=0.0, downtime=20.5
    )
    assert second.seconds == Seconds(
        productive=5.0, lost=0.0, saving=0.5, startup=9.0, shutdown=0.5
    )
    total = total_of([first, second])
    assert total.total == pytest.approx(55.0) and total.goodput == pytest.approx(10 / 55)
    assert [(span.kind, span.begin - ZERO, span.end - ZERO) for span in first.timeline] == [
        ("startup", 0, 11),
        ("productive", 11, 16),
        ("lost", 16, 19.5),
        ("downtime", 19.5, 40),
    ]


def test_the_use_of_time_is_unknown_without_a_log():
    first, second = accounts_of(attempts_of(two_attempts().recorded, []))
    check(first.seconds, unknown=pytest.approx(15.9), saving=0.5, productive=0)
    check(first, steps=5, steps_lost=0)
    assert total_of([first, second]).goodput is None and total_of([]).goodput is None


def test_an_older_checkpoint_loses_steps_of_more_than_one_attempt():
    assert lost(
        attempt(1, 1, 28), attempt(2, 26, 33, RUNS[1]), attempt(3, 21, 40, RUNS[1], FINISHED)
    ) == [8, 8, 0]


def test_an_attempt_in_between_that_resumed_from_elsewhere_is_lost():
    """It resumed from an older checkpoint, because the newer one was unreadable then; the next
    attempt used the newer one."""
    assert lost(
        attempt(1, 1, 20), attempt(2, 11, 15, RUNS[1]), attempt(3, 21, 30, RUNS[1], FINISHED)
    ) == [0, 5, 0]


def test_an_attempt_that_failed_while_it_loaded_loses_nothing():
    loading = replace(attempt(2, 11, 11, RUNS[1]), last_step=None, losses=Losses())
    assert lost(attempt(1, 1, 20), loading, attempt(3, 21, 30, RUNS[1], FINISHED)) == [0, 0, 0]
    about_to = replace(loading, origin=replace(loading.origin, step=20))
    assert lost(attempt(1, 1, 25), about_to) == [5, 0]


def test_a_fresh_start_after_a_failure_loses_everything_and_after_an_end_nothing():
    assert lost(attempt(1, 1, 4), attempt(2, 1, 9, outcome=FINISHED)) == [4, 0]
    assert lost(attempt(1, 1, 4, outcome=FINISHED), attempt(2, 1, 9, outcome=FINISHED)) == [0, 0]


def test_the_attempt_that_reached_the_step_counts_if_the_saving_run_is_unknown():
    assert lost(attempt(1, 1, 20), attempt(2, 16, 18), attempt(3, 19, 30, outcome=FINISHED)) == [
        5,
        0,
        0,
    ]


def test_a_saving_run_without_an_attempt_is_not_another_run():
    gone = attempt(3, 19, 30, RUNS[9], FINISHED)
    assert lost(attempt(1, 1, 20), gone) == [20, 0]
    # it can be the one without events
    assert lost(attempt(1, 1, 20, run_id=None, has_events=False), gone) == [2, 0]


def test_another_batch_size_counts_in_the_steps_of_the_attempt_that_lost_them():
    scaled = attempt(2, 18, 30, outcome=FINISHED)
    origin = Origin(step=35, run_id=RUNS[1], base_step=17, step_scale=17 / 35)
    assert lost(attempt(1, 1, 38), replace(scaled, origin=origin)) == [3, 0]


def test_a_log_that_begins_in_the_middle_was_training_from_its_first_line():
    (account,) = accounts_of([attempt(1, 51, 60, outcome=UNKNOWN, is_cut=True)])
    assert account.seconds.startup == 0


def test_a_log_with_a_loss_every_few_steps_began_so_many_steps_before_its_first():
    losses = Losses(np.array([5, 10, 15]), np.ones(3), np.array([130.0, 135.0, 140.0]), np.ones(3))
    (account,) = accounts_of([attempt(1, 1, 15, outcome=FINISHED, losses=losses, ended=141.0)])
    assert account.seconds == Seconds(productive=15.0, startup=25.0, shutdown=1.0)


@st.composite
def histories(draw):
    """Draws attempts that resume from a checkpoint of an earlier one, or start from the beginning;
    saves at any time."""
    attempts, at = [], 0.0
    for number in range(1, draw(st.integers(1, 6)) + 1):
        parents = [other for other in attempts if other.last_step]
        parent = draw(st.sampled_from([None, *parents]))
        base = draw(st.integers(parent.origin.base_step, parent.last_step)) if parent else 0
        count = draw(st.integers(0, 8))
        seconds = draw(st.lists(st.floats(0, 5), min_size=count, max_size=count))
        start = at + draw(st.floats(0, 9))
        times = start + draw(st.floats(0, 9)) + np.cumsum(seconds)
        end = float(times[-1]) + draw(st.floats(0, 3)) if count else start
        steps = np.arange(base + 1, base + count + 1)
        losses = (
            Losses(steps, np.ones(count), times, np.array(seconds))
            if draw(st.booleans())
            else Losses()
        )
        saves = tuple(
            Save(base + 1, draw(st.floats(start, end)), draw(st.floats(0, 4)))
            for _ in range(draw(st.integers(0, 2)))
        )
        attempts.append(
            RunAttempt(
                number,
                start,
                end,
                draw(st.sampled_from([FAILED, PREEMPTED, FINISHED])),
                run_id=RUNS[number],
                origin=Origin(
                    parent is None,
                    base or None if parent else None,
                    run_id=parent.run_id if parent else None,
                    base_step=base,
                ),
                losses=losses,
                saves=Saves(saves),
                last_step=base + count if count else None,
            )
        )
        at = end
    return attempts


@given(histories())
def test_every_second_is_counted_once_and_every_step_is_kept_or_lost(attempts):
    accounts = accounts_of(attempts)
    total = total_of(accounts)
    assert math.isclose(total.total, attempts[-1].ended - attempts[0].started, abs_tol=1e-6)
    assert total.goodput is None or 0 <= total.goodput <= 1
    for account in accounts:
        assert 0 <= account.steps_lost <= account.steps
        assert min(vars(account.seconds).values()) >= 0
        assert all(
            before.end == after.begin
            for before, after in zip(account.timeline, account.timeline[1:], strict=False)
        )
    assert accounts[-1].steps_lost == 0
    last = attempts[-1]
    if last.first_step is not None and not any(
        one.outcome in (PREEMPTED, FINISHED) for one in attempts
    ):
        # one chain of kept steps
        assert sum(account.steps - account.steps_lost for account in accounts) == last.last_step


def accounts(training):
    return accounts_of(training.attempts())


def shown(phases):
    return [(" + ".join(phase.names), phase.begin - ZERO, phase.end - ZERO) for phase in phases]


def test_phases_without_a_moment_between_them_are_one():
    (found,) = recoveries_of(accounts(two_attempts()))
    check(found, failed=1, resumed=2, source="disk", steps_redone=3, seconds_redone=3.0)
    assert found.restart_seconds == pytest.approx(50 - 19.5) and shown(found.phases) == [
        ("notice + end + start + import + join", 19.5, pytest.approx(40.1)),
        ("select", pytest.approx(40.1), 41.0),
        ("build + load + compile + first step", 41.0, 50.0),
    ]
    assert sum(totals_of([found]).values()) == pytest.approx(50 - 19.5 + 3)


def test_a_start_that_fails_belongs_to_the_recovery_and_a_normal_end_ends_none():
    training = trained().start(30).event(31, ev.TrainingEnded(ev.FAILED, "no such file"))
    training.start(40).resume(41, 5, RUNS[0]).run(42, RUNS[1]).steps(50, 6, 9).over(56)
    training.start(60).resume(61, 9, RUNS[1]).run(62, RUNS[2]).steps(70, 10, 12)
    (found,) = recoveries_of(accounts(training))
    check(found, failed=1, resumed=3, first_step=ZERO + 51)


def test_the_moments_of_a_start_come_from_its_events():
    training = trained().start(40)
    started = ev.TrainingStarted("a", 1, 1, "x", None, ZERO + 20.0, ZERO + 35.0)
    training.recorded[-1][0] = RecordedEvent(ZERO + 40.5, started)
    loaded = ev.WeightsLoaded(0, 3, 10, 10, "step 5", 2.5)
    training.resume(42, 5, RUNS[0]).event(46, loaded).run(47, RUNS[1])
    training.event(49, ev.NetworkCompiled()).event(50, ev.FirstStepDone(6)).steps(49, 6, 9).over(60)
    (found,) = recoveries_of(accounts(training))
    ends = [(name, end) for name, _, end in shown(found.phases)]
    assert ends == [
        ("notice + end + start", 20.0),
        ("import", 35.0),
        ("join", 40.5),
        ("select", 42.0),
        ("build", 43.5),
        ("load", 46.0),
        ("compile", 49.0),
        ("first step", 50.0),
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


def trained():
    return Training().start(0).fresh(1).run(2, RUNS[0]).steps(10, 1, 8).save(18.5, 5)
