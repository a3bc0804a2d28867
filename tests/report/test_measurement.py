"""What an advice is computed from: the costs of each tier, failures, and what is refused."""
from dataclasses import replace

import pytest
from training_logs import RUNS, Training, history

from mindresume import events as ev
from mindresume.events import DISK, MEMORY
from mindresume.report.accounting import accounts_of
from mindresume.report.event_log import RecordedEvent
from mindresume.report.log_parser import Clock, parse
from mindresume.report.measurement import TierCosts, TooLittleMeasuredError, measure
from mindresume.report.runs import attempts_of
from mindresume.report.save_interval import FailureRate, Tier


def accounts(training):
    return accounts_of(attempts_of(training.recorded, [found for line in training.lines for found in parse(line, Clock())]))


def test_what_a_training_measured():
    found = measure(accounts(history()), "output")
    assert (found.step_seconds, found.is_background, found.memory, found.intact, found.lost) == (2.0, True, None, 0, 0)
    # the last loss of a failed attempt, 40 s, then 30 s to the begin of the first step
    assert found.disk == TierCosts(Tier(DISK, 0.5, 5.5, pytest.approx(70.0)), 15, 2, None, 20)
    # the last attempt is not known to have failed
    assert found.rate == FailureRate(2, pytest.approx(3 * (110 * 2 + 5 * 0.5)))


def test_a_save_that_the_training_waits_for_has_no_write_beside_its_stall():
    found = measure(accounts(history(background=False)), "output")
    assert (found.disk.tier.write_seconds, found.disk.tier.stall_seconds, found.is_background) == (0.0, 0.5, False)


def test_a_start_that_fails_lengthens_the_restart_and_is_no_failure_of_the_training():
    training = history(attempts=1)
    training.start(300).event(301, ev.TrainingEnded(ev.FAILED, "no such file"))
    training.start(400).resume(401, 100, RUNS[0]).run(402, RUNS[1]).steps(430, 101, 140, 2.0).save(520, 140)
    found = measure(accounts(training), "output")
    assert (found.rate.failures, found.failed_starts, found.disk.restarts) == (1, 1, 1)
    assert found.disk.tier.restart_seconds > 400 - 300


@pytest.mark.parametrize("training, word", [
    (Training(), "event files"), (Training().start(0).fresh(1).run(2, RUNS[0]), "time of a step"),
    (Training().start(0).fresh(1).run(2, RUNS[0]).steps(10, 1, 9), "at least one save")], ids=["nothing", "no step", "no save"])
def test_too_little_is_refused(training, word):
    with pytest.raises(TooLittleMeasuredError, match=word):
        measure(accounts(training), "the/folder")


def test_a_training_that_finished_has_no_more_failures():
    found = measure(accounts(history(finished=True)), "output")
    assert found.rate.failures == 2


def test_the_tier_in_memory():
    found = measure(accounts(history(attempts=5, memory=3, sources="mmdm")), "output")
    assert (found.intact, found.lost, found.possible, found.assumed) == (3, 1, None, ())
    assert found.memory == TierCosts(Tier(MEMORY, 0.1, 0.3, pytest.approx(70.0), pytest.approx(3.5 / 5)), 50, 3, None, 3)
    assert (found.disk.restarts, found.disk.steps_now) == (1, 20)
    assert found.rate_of_memory.share + found.rate_of_disk.share == pytest.approx(1)


def test_a_restart_from_each_tier_has_its_own_time():
    training = history(attempts=2, memory=3, sources="m")
    last = training.recorded[-1]
    last.insert(2, RecordedEvent(last[1].time, ev.Resumed(108, (), 1.5)))
    later = history(attempts=3, memory=3, sources="md", start=50)
    later.recorded[-1].insert(2, RecordedEvent(later.recorded[-1][1].time, ev.Resumed(200, (), 8.0)))
    assert measure(accounts(training), "output").memory.load_seconds == 1.5
    found = measure(accounts(later), "output")
    assert (found.memory.load_seconds, found.disk.load_seconds, found.memory.restarts, found.disk.restarts) == (None, 8.0, 1, 1)


def test_checksums_that_last_longer_than_a_step_stop_the_training():
    training = history(memory=3, sources="mm")
    for recorded in training.recorded:
        recorded[:] = [row._replace(event=replace(row.event, background_seconds=2.5)) if isinstance(row.event, ev.TierSaved)
                       else row for row in recorded]
    tier = measure(accounts(training), "output").memory.tier
    assert (tier.stall_seconds, tier.write_seconds) == (pytest.approx(0.1 + 0.5), 2.5)


@pytest.mark.parametrize("memory, counted", [(54, 1), (55, 0), (109, 0), (100, 0), (500, 0)], ids=[
    "108 is whole in memory, the disk has 100", "110 is not surely whole, 55 is older", "the only one is not surely whole",
    "the same step is on disk", "none"])
def test_a_resume_from_the_disk_tells_only_if_memory_had_a_newer_save(memory, counted):
    found = measure(accounts(history(attempts=2, memory=memory, sources="d")), "output")
    assert (found.intact, found.lost) == (0, counted)


def test_a_fresh_start_after_saves_in_memory_has_lost_them():
    training = history(attempts=1, memory=3)
    training.start(300).fresh(301).run(302, RUNS[1]).steps(310, 1, 9, 2.0)
    assert measure(accounts(training), "output").lost == 1


def test_a_tier_that_is_off_by_now_is_possible_with_its_measured_costs():
    training = history(attempts=2, memory=3, sources="m")
    training.over(1000).start(1100).resume(1101, 200, RUNS[1]).run(1102, RUNS[2]).steps(1110, 201, 260, 2.0).save(1231, 260)
    found = measure(accounts(training), "output")
    assert found.memory is None and found.possible.saves == 50 and found.possible.restarts == 1 and found.assumed == ()


@pytest.mark.parametrize("background, stall", [(True, 0.5), (False, 13 / (1 << 30))])
def test_without_a_tier_its_costs_are_those_of_a_copy(background, stall):
    found = measure(accounts(history(background=background)), "output")
    tier = found.possible.tier
    assert (found.possible.saves, tier.stall_seconds, tier.survival) == (0, pytest.approx(stall), 0.5)
    assert tier.restart_seconds == found.disk.tier.restart_seconds and len(found.assumed) == 4


def test_without_a_tier_its_load_takes_a_copy_and_checksums():
    training = history()
    for recorded in training.recorded[1:]:
        recorded.insert(2, RecordedEvent(recorded[1].time, ev.Resumed(100, (), 8.0)))
    found = measure(accounts(training), "output")
    assert found.disk.load_seconds == 8.0
    assert found.possible.tier.restart_seconds == pytest.approx(found.disk.tier.restart_seconds - 8 + 2 * 0.5)


@pytest.mark.parametrize("saved, configured, present", [
    ([7, 8], 7, 7),                                 # the second save is that of a preemption
    ([7, 8], None, 1), ([7, 14, 15], None, 7),      # of an earlier version
    ([7], 7, 7), ([7, 14, 28], 7, 7),               # one of them failed
    ([10, 20, 23], 4, 10)])                         # a sink has 10 steps
def test_the_present_interval_is_the_configured_one(saved, configured, present):
    training = Training().start(0).fresh(1).run(2, RUNS[0], configured, configured).steps(10, 1, max(saved))
    for step in saved:
        training.save(10.5 + step, step).event(10.5 + step, ev.TierSaved(step, 13_000_000, 0.1, 0.3))
    training.event(90, ev.TrainingEnded(ev.PREEMPTED, "SIGTERM", max(saved)))
    found = measure(accounts(training), "output")
    assert (found.disk.steps_now, found.memory.steps_now) == (present, present)
