"""Steps that are trained for the second time: whose rows count, and what differs."""

import math
import os
from dataclasses import replace

import pytest

from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import iteration_name
from mindresume.model.manifest import FOLDER, LAST_STEPS, attempt_name
from mindresume.resume.step_ledger import (
    COPIED,
    Ledger,
    LedgerRun,
    RedoneSteps,
    StepLedger,
    StepRow,
    earlier_ledger,
)
from mindresume.storage.posix import PosixStorage

FIRST = LedgerRun("0001-aaaaaaaa", "0001-aaaaaaaa", 0, 8, "layout", "release", True, "float32")
AGAIN = replace(FIRST, run_id="0005-bbbbbbbb", resumed=10)
ROW = StepRow(11, 2, 88, 1234, 1e-4, 1.0, 2.5)


def write(folder, name, run, steps, **values):
    ledger = StepLedger(str(folder / name), run)
    for step in steps:
        ledger.add(ROW._replace(step=step, **values))
    ledger.close()


def compared(row, run=AGAIN, first=FIRST, expected=ROW, **settings):
    redone = RedoneSteps(run, Ledger(first, {ROW.step: expected}), **settings)
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
    assert (difference.name, difference.found.step, difference.first_run) == (
        name,
        11,
        "0001-aaaaaaaa",
    )
    assert f"{ROW._asdict()[name]!r}; now {value!r}" in difference.text()
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
    near, far = ROW._replace(loss=2.5 * (1 + 5e-4)), ROW._replace(loss=2.5 * 1.05)
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


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8)])
def test_another_number_of_ranks_is_another_layout(sizes):
    first, again = (
        replace(run, world_size=size) for run, size in zip((FIRST, AGAIN), sizes, strict=True)
    )
    assert compared(ROW._replace(batch=77), again, first)[0] is None


def test_the_larger_tolerance_of_two_dtypes_counts():
    row = ROW._replace(loss=2.5 * 1.015)
    for dtypes in (("bfloat16", "float32"), ("float32", "bfloat16")):
        first, again = (
            replace(run, dtype=dtype) for run, dtype in zip((FIRST, AGAIN), dtypes, strict=True)
        )
        assert compared(row, again, first)[0] is None


def test_a_network_that_draws_anew_has_other_losses():
    row, draws = ROW._replace(loss=3.0), replace(FIRST, draws=True)
    difference, redone = compared(row, first=draws, random_is_restored=False)
    assert difference is None and redone.largest is None and "loss" not in redone.compared
    assert compared(row, first=draws)[0].name == "loss"
    assert compared(row, random_is_restored=False)[0].name == "loss"  # nothing is drawn


def test_what_was_compared_is_known():
    _, redone = compared(ROW._replace(batch=None), expected=ROW._replace(loss_scale=None))
    assert redone.compared == {"samples", "epoch", "learning_rate", "loss"}


# ---- whose rows ----------------------------------------------------------------------------------


def run_of(number, **changes):
    return replace(FIRST, run_id=f"{number:04d}-aaaaaaaa", **changes)


def found(folder, since="0001-aaaaaaaa", after=10):
    saves = CheckpointDir(PosixStorage(), str(folder / "checkpoint"))
    ledger = earlier_ledger(str(folder), saves, AGAIN, after, since)
    return ledger and (ledger.run.run_id[:4], list(ledger.rows))


def test_the_newest_run_that_trained_a_step_after_the_checkpoint_counts(tmp_path):
    # names do not count: clocks can be set back
    write(tmp_path, "9-rank_0.steps", run_of(1), range(1, 16))
    write(tmp_path, "8-rank_0.steps", run_of(2, resumed=10), (11, 12))
    write(tmp_path, "7-rank_0.steps", run_of(3, resumed=8), (9, 10))
    assert found(tmp_path) == ("0002", [11, 12]) and found(tmp_path, None) == ("0002", [11, 12])
    assert found(tmp_path, after=12) == ("0001", [13, 14, 15])


def test_a_run_that_went_back_behind_the_checkpoint_does_not_count(tmp_path):
    """It was told to resume from an older one, and may have gone another way from there."""
    write(tmp_path, "1-rank_0.steps", run_of(1), range(1, 16))
    write(tmp_path, "2-rank_0.steps", run_of(2, resumed=8), range(9, 14))
    assert found(tmp_path) == ("0001", [11, 12, 13, 14, 15])
    assert found(tmp_path, after=8)[0] == "0002"


def test_runs_older_than_the_one_that_saved_the_checkpoint_do_not_count(tmp_path):
    """They branched off before it: with another batch size, for example."""
    write(tmp_path, "1-rank_0.steps", run_of(1), range(1, 34))
    write(tmp_path, "2-rank_0.steps", run_of(2, resumed=10), range(11, 16))
    assert found(tmp_path, "0002-aaaaaaaa", 15) is None
    assert found(tmp_path, "0001-aaaaaaaa", 15)[0] == "0001"


def test_a_run_is_of_another_way_if_one_before_it_is(tmp_path):
    """A training of batch 8 goes on with batch 16, is started again, and then goes back: the steps
    of batch 16 have other numbers."""
    write(tmp_path, "1-rank_0.steps", run_of(1), range(1, 38))
    write(tmp_path, "2-rank_0.steps", run_of(2, resumed=18, branches=True), range(19, 21))
    write(tmp_path, "3-rank_0.steps", run_of(3, resumed=20), range(21, 41))
    for since, after, newest, branches in (
        ("0001-aaaaaaaa", 18, "0003", True),
        ("0001-aaaaaaaa", 36, "0001", False),
        ("0002-aaaaaaaa", 20, "0003", False),
        ("0003-aaaaaaaa", 30, "0003", False),
        (None, 36, "0003", True),
    ):
        saves = CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))
        ledger = earlier_ledger(str(tmp_path), saves, AGAIN, after, since)
        assert (ledger.run.run_id[:4], ledger.run.branches) == (newest, branches)


def test_what_is_not_of_this_training_is_ignored(tmp_path):
    write(tmp_path, "1-rank_0.steps", run_of(3, lineage="0003-cccccccc"), (11, 20))
    write(tmp_path, "2-rank_0.steps", AGAIN, (11,))
    write(tmp_path, "3-rank_0.steps", run_of(9), (11,))
    write(tmp_path, "4-rank_0.steps", replace(FIRST, run_id="../x"), (11,))
    (tmp_path / "5-rank_0.steps").write_bytes(b"garbage")
    os.mkfifo(tmp_path / "6-rank_0.steps")
    assert found(tmp_path) is None and found(tmp_path / "absent") is None


def test_a_step_that_no_ring_can_hold_is_ignored(tmp_path):
    write(tmp_path, "1-rank_0.steps", FIRST, (11, 12, 2**62))
    assert found(tmp_path) == ("0001", [11, 12])


# ---- in the saves of the checkpoint directory ----------------------------------------------------


def save(folder, step, run, steps, iteration=False):
    """A save of ``step`` with the last rows of the ledger of its run."""
    path = folder / "checkpoint" / (iteration_name(step) if iteration else "")
    path = path / FOLDER / attempt_name(step, run.run_id)
    path.mkdir(parents=True)
    ledger = StepLedger(str(folder / f"{run.run_id}-{step}"), run)
    for number in steps:
        ledger.add(ROW._replace(step=number))
    (path / LAST_STEPS).write_bytes(ledger.copy(ROW._replace(step=step)))
    ledger.close()
    return path / LAST_STEPS


@pytest.mark.parametrize("iteration", [False, True])
def test_newer_saves_have_the_rows_in_another_output_folder(tmp_path, iteration):
    save(tmp_path, 10, run_of(1), range(1, 10), iteration)
    assert found(tmp_path) is None
    save(tmp_path, 15, run_of(1), range(1, 15), iteration)
    assert found(tmp_path) == ("0001", [11, 12, 13, 14, 15])
    save(tmp_path, 13, run_of(2, resumed=10), (11, 12), iteration)
    assert found(tmp_path) == ("0002", [11, 12, 13])
    assert found(tmp_path, "0003-aaaaaaaa") is None


def test_the_ledger_beside_the_events_counts_where_both_are(tmp_path):
    save(tmp_path, 15, run_of(2, resumed=10), range(11, 15))
    write(tmp_path, "1-rank_0.steps", run_of(1), range(11, 30))
    assert found(tmp_path) == ("0002", [11, 12, 13, 14, 15])
    write(tmp_path, "2-rank_0.steps", run_of(2, resumed=10), range(11, 18))
    assert found(tmp_path) == ("0002", list(range(11, 18)))


def test_of_many_saves_those_next_to_the_checkpoint_count(tmp_path):
    """A copy has the last rows of its run only."""
    for step in (1000, 2000, 9000, 3000, 4000, 5000):
        save(tmp_path, step, run_of(1), range(1, step))
    assert found(tmp_path, after=500) == ("0001", list(range(501, 1001)))
    assert found(tmp_path, after=1000) == ("0001", list(range(2001 - COPIED, 2001)))


def test_runs_of_another_directory_are_numbered_in_their_own_way(tmp_path):
    save(tmp_path, 15, run_of(7), range(11, 15))
    assert found(tmp_path, "0007-aaaaaaaa")[0] == "0007"


def test_a_ledger_in_a_save_is_not_trusted(tmp_path):
    save(tmp_path, 15, AGAIN, range(11, 15))
    save(tmp_path, 16, run_of(3), range(11, 16)).write_bytes(b"garbage")
    odd = save(tmp_path, 18, run_of(2), ())
    odd.unlink()
    os.mkfifo(odd)
    cut = save(tmp_path, 17, run_of(1), range(11, 17))
    os.truncate(cut, 4096 + 2 * 64 + 7)
    assert found(tmp_path) == ("0001", [11, 12])
    for number in range(2, 10):
        save(tmp_path, 14, run_of(number, lineage="0004-cccccccc"), range(11, 14))
    assert found(tmp_path) is None  # few files are read


def test_a_branch_between_two_runs_is_found_in_its_own_save(tmp_path):
    """Its saves are few beside those of the run that went on from it."""
    save(tmp_path, 20, run_of(1), range(1, 20))
    save(tmp_path, 12, run_of(2, resumed=10, branches=True), (11,))
    for step in (13, 14, 15, 16, 20):
        save(tmp_path, step, run_of(3, resumed=12), range(13, step))
    saves = CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))
    ledger = earlier_ledger(str(tmp_path), saves, AGAIN, 10, "0001-aaaaaaaa")
    assert ledger.run.branches and ledger.run.run_id == "0003-aaaaaaaa"


def test_of_iterations_the_newest_run_counts_also_if_its_saves_are_few(tmp_path):
    for step in (11, 12, 13, 14, 15, 16, 17, 18, 19):
        save(tmp_path, step, run_of(1), range(11, step), iteration=True)
    save(tmp_path, 20, run_of(2, resumed=10), range(11, 20), iteration=True)
    assert found(tmp_path) == ("0002", list(range(11, 21)))
