"""Steps that are trained for the second time: whose rows count, and what differs."""

import math
import os
from dataclasses import replace

import pytest

from mindresume.events.step_ledger import LedgerRun, StepLedger, StepRow
from mindresume.resume.redone_steps import RedoneSteps, earlier_rows

FIRST = LedgerRun("0001-aaaa", "0001-aaaa", 0, 8, "layout", "release", True, "float32")
AGAIN = replace(FIRST, run_id="0002-bbbb", resumed=10)
ROW = StepRow(11, 2, 88, 1234, 1e-4, 1.0, 2.5)


def write(folder, name, run, steps, **values):
    ledger = StepLedger(str(folder / name), run)
    for step in steps:
        ledger.add(ROW._replace(step=step, **values))
    ledger.close()


def compared(row, run=AGAIN, first=FIRST, expected=ROW, **settings):
    redone = RedoneSteps(run, {ROW.step: (expected, first)}, **settings)
    return redone.add(row), redone


def test_the_same_row_is_no_difference():
    difference, redone = compared(ROW)
    assert difference is None and (redone.steps, redone.largest, redone.last) == (1, 0.0, 11)


@pytest.mark.parametrize(
    "name, value",
    [
        ("epoch", 3),
        ("samples", 96),
        ("batch", 1235),
        ("learning_rate", 1.0000001e-4),
        ("loss_scale", 2.0),
        ("loss", 2.5000002),
        ("loss", math.nan),
        ("loss", math.inf),
    ],
)
def test_each_value_is_compared(name, value):
    difference, redone = compared(ROW._replace(**{name: value}))
    assert (difference.name, difference.step, difference.first_run) == (name, 11, "0001-aaaa")
    assert f"{ROW._asdict()[name]!r} then, {value!r} now" in difference.text()
    assert redone.differences == [difference]


@pytest.mark.parametrize("name", ["epoch", "samples", "batch", "learning_rate", "loss"])
def test_what_one_of_the_runs_did_not_see_is_not_compared(name):
    for row, expected in ((ROW._replace(**{name: None}), ROW), (ROW, ROW._replace(**{name: None}))):
        assert compared(row, expected=expected)[0] is None


def test_two_losses_that_are_no_numbers_are_equal():
    nan = ROW._replace(loss=math.nan)
    assert compared(nan, expected=nan)[0] is None


@pytest.mark.parametrize(
    "changes",
    [{"layout": "other"}, {"release": "other"}, {"dtype": "bfloat16"}, {"deterministic": False}],
)
def test_a_loss_may_differ_a_little_where_sums_have_another_order(changes):
    near, far = ROW._replace(loss=2.5 * (1 + 5e-5)), ROW._replace(loss=2.5 * 1.05)
    first = replace(FIRST, **changes)
    assert compared(near, first=first)[0] is None and compared(near)[0] is not None
    assert compared(far, first=first)[0].name == "loss"
    assert compared(far, first=first, tolerance=0.1)[0] is None


def test_another_layout_cuts_the_batch_and_counts_epochs_in_its_own_way():
    row = ROW._replace(batch=77, epoch=9)
    assert compared(row, first=replace(FIRST, layout="other"))[0] is None
    assert compared(row, first=replace(FIRST, release="other"))[0].name == "epoch"
    shifted = row._replace(samples=96, loss=3.0)
    assert compared(shifted, first=replace(FIRST, layout="other"))[0].name == "samples"


def test_the_largest_difference_of_a_loss_is_that_of_all_steps():
    _, redone = compared(ROW._replace(batch=77, loss=5.0))
    assert redone.largest == 0.5


def test_a_step_that_nobody_trained_before_is_not_counted():
    difference, redone = compared(ROW._replace(step=12))
    assert difference is None and redone.steps == 0


def test_the_newest_row_of_an_earlier_run_of_this_training_counts(tmp_path):
    write(tmp_path, "1-rank_0.steps", FIRST, range(1, 16), loss=1.0)
    write(
        tmp_path,
        "2-rank_0.steps",
        replace(FIRST, run_id="0001-cc", resumed=8),
        (9, 10, 11, 12),
        loss=2.0,
    )
    write(tmp_path, "3-rank_0.steps", replace(FIRST, run_id="x", lineage="x"), (11, 20), loss=3.0)
    write(tmp_path, "4-rank_0.steps", AGAIN, (11,), loss=4.0)
    (tmp_path / "5-rank_0.steps").write_bytes(b"garbage")
    os.mkfifo(tmp_path / "7-rank_0.steps")
    (tmp_path / "6-rank_0.jsonl").write_bytes(b"{}")
    found = earlier_rows(str(tmp_path), AGAIN, 10)
    assert {step: row.loss for step, (row, _) in found.items()} == {
        11: 2.0,
        12: 2.0,
        13: 1.0,
        14: 1.0,
        15: 1.0,
    }
    assert earlier_rows(str(tmp_path / "absent"), AGAIN, 10) == {}
