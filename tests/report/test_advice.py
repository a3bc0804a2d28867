"""The advice on the interval between saves: what is measured, what is refused, and what it says with few failures."""
import math

import pytest
from training_logs import RUNS, Training

import mindresume
from mindresume import events as ev
from mindresume.report.accounting import accounts_of
from mindresume.report.advice import DISK, Measured, TooLittleMeasuredError, advice_from, measure, steps_of
from mindresume.report.advice_text import failures_text, lines_of, sentence_of
from mindresume.report.failure_rate import FailureRate
from mindresume.report.log_parser import Clock, parse
from mindresume.report.runs import attempts_of
from mindresume.report.save_interval import Tier


def accounts(training):
    return accounts_of(attempts_of(training.recorded, [found for line in training.lines for found in parse(line, Clock())]))


def history(attempts=3, background=True, every=20, steps=110, start=30, down=40, finished=False):
    """Returns a training whose attempts each do ``steps`` steps of 2 s and fail 10 steps after a save; a save stops it for
    0.5 s. It starts in ``start`` seconds, ``down`` seconds after a failure."""
    training, at, step = Training(), 0.0, 0
    for number in range(attempts):
        training.start(at)
        training.fresh(at + 1) if not number else training.resume(at + 1, step, RUNS[number - 1])
        training.run(at + 2, RUNS[number])
        now, base = at + start, step
        for done in range(base + 1, base + steps + 1):
            now += 2
            training.loss(now, done, 4.0, 2.0)
            if done % every == 0:
                now, step = now + 0.5, done
                training.event(now - 0.5, ev.SaveBegun(done))
                if background:
                    training.event(now, ev.SaveStaged(done, "x", 0.5))
                training.event(now + (5 if background else 0), ev.SaveWritten(done, 13, 5.5 if background else 0.5, 0.5))
        if finished and number == attempts - 1:
            training.over(now + 1)
        at = now + down
    return training


def measured(failures=10, **more):
    given = dict(step_seconds=2.0, tiers=(Tier(DISK, 0.5, 20.0, 100.0),), saves=9, is_background=True, load_seconds=5.0,
                 restarts=failures, rate=FailureRate(failures, 86400.0), failed_starts=0, steps_now={DISK: 100})
    return Measured(**{**given, **more})


def test_what_a_training_measured():
    found = measure(accounts(history()), "output")
    assert (found.step_seconds, found.saves, found.is_background, found.restarts) == (2.0, 15, True, 2)
    # the last loss of a failed attempt, 40 s, then 30 s to the begin of the first step
    assert found.tiers == (Tier(DISK, 0.5, 5.5, pytest.approx(70.0)),)
    # the last attempt is not known to have failed
    assert found.rate == FailureRate(2, pytest.approx(3 * (110 * 2 + 5 * 0.5))) and found.steps_now == {DISK: 20}


def test_a_save_that_the_training_waits_for_has_no_write_beside_its_stall():
    found = measure(accounts(history(background=False)), "output")
    assert found.tiers[0].write_seconds == 0.0 and found.tiers[0].stall_seconds == 0.5
    assert any("async_save" in note for note in advice_from(found).notes)


def test_a_start_that_fails_lengthens_the_restart_and_is_no_failure_of_the_training():
    training = history(attempts=1)
    training.start(300).event(301, ev.TrainingEnded(ev.FAILED, "no such file"))
    training.start(400).resume(401, 100, RUNS[0]).run(402, RUNS[1]).steps(430, 101, 140, 2.0).save(520, 140)
    found = measure(accounts(training), "output")
    assert (found.rate.failures, found.failed_starts, found.restarts) == (1, 1, 1)
    assert found.tiers[0].restart_seconds > 400 - 300


@pytest.mark.parametrize("training, word", [
    (Training(), "event files"), (Training().start(0).fresh(1).run(2, RUNS[0]), "time of a step"),
    (Training().start(0).fresh(1).run(2, RUNS[0]).steps(10, 1, 9), "at least one save")], ids=["nothing", "no step", "no save"])
def test_too_little_is_refused(training, word):
    with pytest.raises(TooLittleMeasuredError, match=word):
        measure(accounts(training), "the/folder")


def test_the_advice():
    found = advice_from(measured())
    tier = found.tiers[0]
    young = math.sqrt(2 * 0.5 * found.seconds_between_failures)
    assert tier.seconds_advised == pytest.approx(young, rel=0.1) and tier.steps_low < tier.steps_advised < tier.steps_high
    assert found.seconds_between_failures_low < found.seconds_between_failures < found.seconds_between_failures_high
    assert found.goodput_now < found.goodput_advised and found.goodput_advised_low < found.goodput_advised
    assert f"save_checkpoint_steps: {tier.steps_advised}" in found.change and "it is 100" in found.change


def test_what_is_nearly_best_is_not_changed():
    best = advice_from(measured()).tiers[0].steps_advised
    for now in (best, round(best * 1.1)):
        found = advice_from(measured(steps_now={DISK: now}))
        assert "Nothing to change" in found.change and found.goodput_now == pytest.approx(found.goodput_advised, abs=1e-3)


def test_the_write_bounds_the_interval():
    found = advice_from(measured(tiers=(Tier(DISK, 0.5, 1001.0, 100.0),)))
    assert found.tiers[0].steps_advised == 510 and found.tiers[0].is_limited_by_write       # 501 steps, rounded up
    assert any("faster disk" in note for note in found.notes)


def test_without_a_failure_there_is_a_bound_and_no_goodput():
    found = advice_from(measured(failures=0))
    tier = found.tiers[0]
    assert (tier.steps_advised, tier.steps_high, found.goodput_now, found.goodput_advised) == (None,) * 4
    assert found.seconds_between_failures is None and found.seconds_between_failures_low == pytest.approx(86400 / 3, rel=0.01)
    assert tier.steps_low == pytest.approx(math.sqrt(2 * 0.5 * 28800) / 2, rel=0.1) and "nothing to change" in found.change
    frequent = advice_from(measured(failures=0, steps_now={DISK: 10}))
    assert f"{frequent.tiers[0].steps_low}" in frequent.change and "Keep 10" in frequent.change


def test_two_tiers_are_advised_apart():
    memory = Tier("memory", 0.1, 0.0, 30.0, 0.8)
    found = advice_from(measured(tiers=(Tier(DISK, 0.5, 20.0, 100.0), memory), steps_now={DISK: 100, "memory": 10}))
    by_name = {tier.name: tier for tier in found.tiers}
    assert by_name["memory"].steps_advised < by_name[DISK].steps_advised and found.goodput_advised > found.goodput_now
    assert found.goodput_advised > advice_from(measured()).goodput_advised


def test_an_unknown_interval_is_said():
    found = advice_from(measured(steps_now={}))
    assert found.goodput_now is None and found.tiers[0].steps_now is None and any("unknown" in note for note in found.notes)


@pytest.mark.parametrize("seconds, least, steps", [(100.0, 0.0, 50), (2468.0, 0.0, 1200), (1.0, 0.0, 1), (2468.0, 2468.0, 1300),
                                                   (0.0, 0.0, 1), (3.0, 3.0, 2)])
def test_intervals_have_two_digits(seconds, least, steps):
    assert steps_of(seconds, 2.0, least) == steps


@pytest.mark.parametrize("failures", [0, 1, 10])
def test_the_lines_for_people(failures):
    found = advice_from(measured(failures=failures))
    names = [name for name, _ in lines_of(found)]
    assert names[:5] == ["save", "failure", "now", "advised", "change"] and set(names[5:]) <= {"note"}
    assert found.change in sentence_of(found) and failures_text(found) in sentence_of(found)


def test_the_api_reads_a_folder(tmp_path):
    history().write_all(tmp_path / "output")
    found = mindresume.advise(tmp_path)
    assert found.output == str(tmp_path / "output") and found.failures == 2 and found.tiers[0].steps_now == 20
    assert mindresume.advise(tmp_path / "output").to_json() == found.to_json()
    assert found.to_json()["tiers"][0]["name"] == "disk"
    with pytest.raises(FileNotFoundError):
        mindresume.advise(tmp_path / "gone")


def test_a_training_that_finished_has_no_more_failures():
    found = measure(accounts(history(finished=True)), "output")
    assert found.rate.failures == 2
