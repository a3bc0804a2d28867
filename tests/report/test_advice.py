"""The advice on the intervals between saves: what is measured of a training, and the interval of
each tier."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_folders import STORAGE
from training_logs import RUNS, Training, check, history

import mindresume
from mindresume.events import DISK, MEMORY
from mindresume.report.advice import (
    TooLittleMeasuredError,
    advice_of,
    count_range,
    lines_of,
    sentence_of,
)
from mindresume.report.builder import build_report


@pytest.fixture
def advice(tmp_path):
    """Returns the advice on a training."""
    return lambda training: training.write_all(tmp_path / "output") and mindresume.advise(tmp_path)


def with_costs(training, **costs):
    """Returns the training with other fields of its events."""
    for recorded in training.recorded:
        recorded[:] = [
            row._replace(event=replace(row.event, **costs.get(type(row.event).__name__, {})))
            for row in recorded
        ]
    return training


@pytest.mark.parametrize(
    "count, low, high",
    [(0, 0, 2.996), (0.5, 0, 3.907), (2, 0.355, 6.296), (5, 1.970, 10.513), (100, 84.14, 118.08)],
)
def test_the_range_of_a_count_is_that_of_the_chi_squared_quantiles(count, low, high):
    assert count_range(count) == pytest.approx((low, high), rel=0.03)


def test_one_tier(advice):
    found = advice(history(attempts=7))
    (tier,) = found.tiers
    between = found.seconds_between_failures
    check(found, step_seconds=2.0, failures=6, training_seconds=pytest.approx(7 * 222.5, rel=1e-3))
    check(tier, name=DISK, saves=35, stall_seconds=0.5, write_seconds=5.5, failures=6, steps_now=20)
    # 40 s, then 30 s to the begin of the first step
    check(tier, restart_seconds=pytest.approx(70.0), seconds_between_failures=between)
    check(tier, steps_advised=8, steps_low=6, steps_high=12, is_limited_by_write=False)
    assert between == pytest.approx(found.training_seconds / 6)
    assert found.seconds_between_failures_low < between < found.seconds_between_failures_high
    assert (
        found.change
        == "Set save_checkpoint_steps: 8 in the CheckpointMonitor of callbacks; it is 20."
    )
    assert (
        advice(history(attempts=7, every=10)).change
        == "save_checkpoint_steps: 10 stays; it lies in the 90 % range."
    )


@pytest.mark.parametrize(
    "attempts, finished, failures, words",
    [
        (1, False, 0, "no estimate"),
        (5, False, 4, "4 of at least 5"),
        (6, True, 5, "Set"),
    ],
)
def test_too_few_failures_propose_nothing(advice, attempts, finished, failures, words):
    found = advice(history(attempts=attempts, finished=finished, background=False))
    (tier,) = found.tiers
    assert found.failures == failures and words in found.change and tier.write_seconds == 0
    assert (tier.steps_advised is None) == (failures < 5)
    assert (found.seconds_between_failures is None) == (not failures)


@pytest.mark.parametrize("sources, served", [("mmmdmm", [5, 1]), ("dddddd", [0, 6])])
def test_each_tier_serves_its_share_of_the_failures(advice, sources, served):
    found = advice(history(attempts=7, memory=3, sources=sources))
    assert [tier.name for tier in found.tiers] == [MEMORY, DISK]
    assert [tier.failures for tier in found.tiers] == served
    for tier in found.tiers:
        assert tier.seconds_between_failures == pytest.approx(
            found.seconds_between_failures * 7 / (tier.failures + 0.5)
        )
        young = math.sqrt(2 * tier.stall_seconds * tier.seconds_between_failures) / 2
        assert tier.steps_advised == max(round(float(f"{young:.2g}")), 1)
        assert tier.steps_low <= tier.steps_advised <= (tier.steps_high or math.inf)
        assert (tier.steps_high is None) == (tier.failures == 0) == (tier.restart_seconds is None)


@pytest.mark.parametrize(
    "training, served",
    [
        # 108 is whole in memory, the disk has 100
        (history(attempts=2, memory=54, sources="d"), (0, 1)),
        # 110 is not surely whole, 55 is older
        (history(attempts=2, memory=55, sources="d"), (0, 0)),
        (history(attempts=2, memory=109, sources="d"), (0, 0)),
        (history(attempts=2, memory=100, sources="d"), (0, 0)),
        (
            history(attempts=1, memory=3)
            .start(300)
            .fresh(301)
            .run(302, RUNS[1])
            .steps(310, 1, 9, 2.0),
            (0, 1),
        ),
        (
            history(attempts=2, memory=3, sources="m")
            .start(1100)
            .resume(1101, 200, RUNS[1])
            .run(1102, RUNS[2])
            .steps(1110, 201, 260, 2.0)
            .save(1231, 260),
            (2,),
        ),
    ],
)  # the tier is off by now
def test_a_resume_from_the_disk_tells_only_if_memory_had_a_newer_save(advice, training, served):
    assert tuple(tier.failures for tier in advice(training).tiers) == served


def test_the_write_bounds_the_interval_and_checksums_stop_the_next_step(advice):
    memory, disk = advice(
        with_costs(
            history(attempts=7, memory=3, sources="mmmmmd"),
            TierSaved={"background_seconds": 12.5},
            SaveWritten={"write_seconds": 1001},
        )
    ).tiers
    assert (memory.stall_seconds, memory.write_seconds) == (
        pytest.approx(0.1 + 10.5),
        12.5,
    ) and not memory.is_limited_by_write
    assert (disk.steps_low, disk.steps_advised, disk.is_limited_by_write) == (501, 501, True)


@pytest.mark.parametrize(
    "training, words",
    [
        (Training(), "no logs"),
        (Training().start(0).fresh(1).run(2, RUNS[0]), "no time of a step"),
        (Training().start(0).steps(10, 1, 9), "at least one save"),
        (Training().start(12).run(12, RUNS[0]).loss(12, 1).save(12.5, 1), "two logged steps"),
    ],
)
def test_too_little_is_refused(advice, tmp_path, training, words):
    with pytest.raises(TooLittleMeasuredError, match=words):
        advice(training)
    assert advice_of(build_report(STORAGE, str(tmp_path / "output"), str(tmp_path))) is None


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(0, 1e18) | st.sampled_from([1e-300, 1e18]), min_size=4, max_size=4),
    st.integers(0, (1 << 63) - 1),
)
def test_any_numbers_of_an_event_file_have_an_advice(tmp_path_factory, numbers, every):
    """Events are not trusted: a report of them must not fail."""
    training = with_costs(
        history(attempts=6, steps=25, memory=3, sources="mmdmm"),
        SaveStaged={"stall_seconds": numbers[0]},
        SaveWritten={"write_seconds": numbers[1]},
        RunOpened={"save_steps": every, "memory_steps": every},
        TierSaved={"stall_seconds": numbers[2], "background_seconds": numbers[3]},
    )
    training.write_all(folder := tmp_path_factory.mktemp("hostile"))
    found = advice_of(build_report(STORAGE, str(folder), str(folder)))
    assert list(lines_of(found)) and sentence_of(found)
