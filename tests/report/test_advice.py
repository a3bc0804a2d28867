"""The advice on the intervals between saves: what it says of each tier, also with few failures."""
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_logs import history

import mindresume
from mindresume.events import DISK, MEMORY
from mindresume.report.advice import advice_from, failures_text, interval_rows, lines_of, sentence_of, steps_of, stop_text
from mindresume.report.measurement import Measured, TierCosts
from mindresume.report.save_interval import FailureRate, Tier

DISK_TIER = Tier(DISK, 0.5, 20.0, 100.0)


def measured(failures=10, now=100, tier=DISK_TIER, **more):
    return Measured(2.0, TierCosts(tier, 9, failures, 5.0, now), **{"is_background": True,
                                                                    "rate": FailureRate(failures, 86400.0), **more})


def with_memory(intact, lost, failures=None, every=10, **more):
    """The same with a tier in memory, after so many failures that left it intact or did not."""
    found = measured(intact + lost if failures is None else failures, intact=intact, lost=lost, **more)
    tier = Tier(MEMORY, 0.1, 0.3, 30.0, found.rate_of_memory.share)
    return replace(found, memory=TierCosts(tier, 50, intact, 1.0, every))


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
        found = advice_from(measured(now=now))
        assert "Nothing to change" in found.change and found.goodput_now == pytest.approx(found.goodput_advised, abs=1e-3)


def test_the_write_bounds_the_interval():
    found = advice_from(measured(tier=Tier(DISK, 0.5, 1001.0, 100.0)))
    assert found.tiers[0].steps_advised == 510 and found.tiers[0].is_limited_by_write       # 501 steps, rounded up
    assert any("faster disk" in note for note in found.notes)


def test_without_a_failure_there_is_a_bound_and_no_goodput():
    found = advice_from(measured(failures=0))
    tier = found.tiers[0]
    assert (tier.steps_advised, tier.steps_high, found.goodput_now, found.goodput_advised) == (None,) * 4
    assert found.seconds_between_failures is None and found.seconds_between_failures_low == pytest.approx(86400 / 3, rel=0.01)
    assert tier.steps_low == pytest.approx(math.sqrt(2 * 0.5 * 28800) / 2, rel=0.1) and "nothing to change" in found.change
    frequent = advice_from(measured(failures=0, now=10))
    assert f"{frequent.tiers[0].steps_low}" in frequent.change and "Keep 10" in frequent.change


def test_two_tiers_are_advised_apart():
    found = advice_from(with_memory(8, 2, now=400))
    memory, disk = found.tiers
    assert (memory.name, memory.failures, disk.name, disk.failures) == (MEMORY, 8, DISK, 2)
    assert memory.steps_advised < disk.steps_advised and found.goodput_advised > found.goodput_now
    assert found.goodput_advised > advice_from(measured()).goodput_advised
    for tier, failures in ((memory, 8.5), (disk, 2.5)):
        assert tier.seconds_between_failures == pytest.approx(86400 / failures * 11 / 10.5)
        assert tier.seconds_advised == pytest.approx(math.sqrt(2 * tier.stall_seconds * tier.seconds_between_failures), rel=0.1)
        assert tier.steps_low < tier.steps_advised < tier.steps_high
        assert tier.seconds_between_failures_low < tier.seconds_between_failures < tier.seconds_between_failures_high
    assert f"every_steps: {memory.steps_advised}" in found.change and f"_steps: {disk.steps_advised}" in found.change
    assert found.goodput_with_memory is None and found.tiers_with_memory == ()


def test_a_tier_that_served_no_failure_has_half_a_failure_and_a_wide_range():
    for found, quiet in ((advice_from(with_memory(10, 0)), 1), (advice_from(with_memory(0, 10)), 0)):
        tier, other = found.tiers[quiet], found.tiers[1 - quiet]
        assert tier.failures == 0 and tier.seconds_between_failures == pytest.approx(86400 / 0.5 * 11 / 10.5)
        assert tier.steps_high / tier.steps_low > 10 > 3 > other.steps_high / other.steps_low
        assert any("half a failure" in note for note in found.notes)


def test_a_tier_that_costs_more_than_it_saves_is_better_off():
    found, alone = advice_from(with_memory(0, 200)), advice_from(measured(200))
    assert (found.tiers[0].steps_advised, found.tiers[0].seconds_advised) == (0, None)
    assert found.tiers[1] == alone.tiers[0] and found.goodput_advised == alone.goodput_advised > found.goodput_now
    assert "every_steps: 0" in found.change and "no saves to memory" in str(list(lines_of(found)))
    assert interval_rows(found)[0][2:4] == ("none", "") and sentence_of(found)
    assert advice_from(with_memory(0, 2)).tiers[0].steps_advised > 0                    # too few to say so


def test_a_tier_that_survived_every_failure_stays_on():
    found = with_memory(20, 0)
    dear = replace(found, memory=replace(found.memory, tier=replace(found.memory.tier, stall_seconds=30.0)))
    assert advice_from(dear).tiers[0].steps_advised > 0 and "every_steps: 0" not in advice_from(dear).change
    assert advice_from(replace(dear, intact=19, lost=1)).tiers[0].steps_advised == 0


def test_failures_that_do_not_tell_count_for_the_rate_alone():
    found = advice_from(with_memory(3, 1, failures=40))
    rates = [1 / tier.seconds_between_failures for tier in found.tiers]
    assert sum(rates) == pytest.approx(1 / found.seconds_between_failures) and rates[0] / sum(rates) == pytest.approx(3.5 / 5)
    assert any("36 of 40" in note for note in found.notes)


def test_without_a_failure_each_tier_has_the_bound_of_all():
    found = advice_from(with_memory(0, 0))
    assert [tier.steps_advised for tier in found.tiers] == [None, None]
    assert {tier.seconds_between_failures_low for tier in found.tiers} == {found.seconds_between_failures_low}


def test_what_a_tier_would_bring():
    possible = TierCosts(Tier(MEMORY, 0.1, 0.1, 100.0, 0.5), 0)
    found = advice_from(measured(possible=possible, assumed=("A.", "B.")))
    assert [tier.name for tier in found.tiers_with_memory] == [MEMORY, DISK] and found.assumed == ("A.", "B.")
    assert found.goodput_with_memory > found.goodput_advised and found.tiers_with_memory[0].saves == 0
    assert found.tiers_with_memory[1].steps_advised > found.tiers[0].steps_advised
    text = dict(lines_of(found))["memory"]
    assert f"every_steps: {found.tiers_with_memory[0].steps_advised}" in text and text.endswith("A. B.")
    slow = replace(possible, tier=replace(possible.tier, stall_seconds=50.0))
    assert "nothing" in dict(lines_of(advice_from(measured(possible=slow))))["memory"]
    assert advice_from(measured(failures=0, possible=possible)).tiers_with_memory == ()


def test_two_tiers_that_are_nearly_best_are_not_changed():
    found = advice_from(with_memory(8, 2))
    memory, disk = (tier.steps_advised for tier in found.tiers)
    same = advice_from(with_memory(8, 2, every=memory, now=disk))
    assert same.change.startswith("Nothing to change") and f"every_steps: {memory}" in same.change
    half = advice_from(with_memory(8, 2, every=memory, now=4 * disk))
    assert f"every_steps: {memory}" in half.change and f"Set save_checkpoint_steps: {disk}" in half.change


def test_an_unknown_interval_is_said():
    found = advice_from(measured(now=None))
    assert found.goodput_now is None and found.tiers[0].steps_now is None and any("unknown" in note for note in found.notes)


@pytest.mark.parametrize("seconds, least, steps", [(100.0, 0.0, 50), (2468.0, 0.0, 1200), (1.0, 0.0, 1), (2468.0, 2468.0, 1300),
                                                   (0.0, 0.0, 1), (3.0, 3.0, 2)])
def test_intervals_have_two_digits(seconds, least, steps):
    assert steps_of(seconds, 2.0, least) == steps


@pytest.mark.parametrize("failures", [1, 4, 5])
def test_a_few_failures_change_nothing(failures):
    """A change after one failure in 13 s would be made on chance."""
    change = advice_from(measured(failures=failures, now=10000)).change
    assert change.startswith("Nothing to change yet") == (failures < 5)
    assert ("Set save_checkpoint_steps" in change) == (failures >= 5)


@pytest.mark.parametrize("failures", [0, 1, 10])
def test_the_lines_for_people(failures):
    found = advice_from(measured(failures=failures))
    names = [name for name, _ in lines_of(found)]
    goodput = ["goodput"] if failures else []
    assert [name for name in names if name != "note"] == ["save", "failure", "now", "advised", *goodput, "change"]
    assert found.change in sentence_of(found) and failures_text(found) in sentence_of(found)


@pytest.mark.parametrize("intact, lost", [(0, 0), (1, 0), (8, 2)])
def test_the_lines_of_two_tiers(intact, lost):
    found = advice_from(with_memory(intact, lost))
    names = [name for name, _ in lines_of(found) if name != "note"]
    assert names == ["save", "save", "failure", *(["served"] if intact else []), "now", "advised", "advised",
                     *(["goodput"] if intact else []), "change"]
    assert found.change in sentence_of(found)


def test_the_api_reads_a_folder(tmp_path):
    history().write_all(tmp_path / "output")
    found = mindresume.advise(tmp_path)
    assert found.output == str(tmp_path / "output") and found.failures == 2 and found.tiers[0].steps_now == 20
    assert mindresume.advise(tmp_path / "output").to_json() == found.to_json()
    assert found.to_json()["tiers"][0]["name"] == "disk"
    with pytest.raises(FileNotFoundError):
        mindresume.advise(tmp_path / "gone")


NUMBERS = st.floats(0, 1e18) | st.sampled_from([0.0, 1e-300, 1e18])


@settings(deadline=None, max_examples=60)
@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.integers(1, 1 << 59), st.integers(0, 40), st.integers(0, 40),
       st.integers(0, 3))
def test_any_numbers_of_an_event_file_have_an_advice(stall, write, restart, copy, behind, every, intact, lost, unknown):
    """Events are not trusted: a report of them must not fail."""
    memory = TierCosts(Tier(MEMORY, copy, behind, restart, 0.5), 3, steps_now=every)
    for more in ({"memory": memory}, {"possible": memory}):
        found = measured(intact + lost + unknown, every, Tier(DISK, stall, write, restart), intact=intact, lost=lost, **more)
        advice = advice_from(found)
        assert list(lines_of(advice)) and sentence_of(advice) and interval_rows(advice)
        for goodput in (advice.goodput_now, advice.goodput_advised, advice.goodput_with_memory):
            assert goodput is None or 0 <= goodput <= 1


@pytest.mark.parametrize("seconds, text", [(0.391, "0.39 s"), (0.1, "0.10 s"), (0.0042, "4.2 ms"), (75.0, "1 min 15 s")])
def test_short_stops_are_in_milliseconds(seconds, text):
    assert stop_text(seconds) == text
