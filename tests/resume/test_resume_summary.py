"""The summary of a resume: every item restored, recomputed, absent or changed, and one warning for
each relevant item."""

import pytest

from mindresume.errors import ProgressError
from mindresume.model.training_state import DataPosition, DataRequest, TrainingState
from mindresume.resume.progress import (
    RunSettings,
    random_state_row,
    resume_progress,
    resume_warnings,
    summary_rows,
)

OURS = {"files": "a"}


def rows_of(state, new):
    return [*summary_rows(state, resume_progress(state, new), new), random_state_row(())]


STOOD = DataPosition(3, 40, identity=OURS)


def state(step=35, data=STOOD, **more):
    return TrainingState(step, 10, step, 8, dataset_size=10, data=data, consumed=step * 8, **more)


def test_nothing_changed():
    assert rows_of(state(loss_scale=1024.0), RunSettings(8, 10, None, OURS)) == [
        ("step", "restored", "35"),
        ("samples", "restored", "280 seen"),
        ("epoch", "restored", "3 done"),
        ("data", "restored", "pass 4, behind 40 of 80 samples: 35 steps are skipped"),
        ("data set", "restored", "the same"),
        ("learning rate", "restored", "position of the schedule: step 35 of the optimizer"),
        ("loss scale", "restored", "1024"),
        ("random state", "absent", "not in the checkpoint: the seeds of the configuration apply"),
    ]


def test_items_that_are_smaller_than_a_step():
    """The PyNative trainer of 2.1.0 reads one item for each micro-batch: here two of 4 samples make
    a step of 8."""
    rows = rows_of(state(), RunSettings(8, 20, None, OURS, item_samples=4))
    assert ("data", "restored", "pass 4, behind 40 of 80 samples: 70 items are skipped") in rows


def test_another_batch_size():
    assert rows_of(state(), RunSettings(16, 5, None, OURS)) == [
        ("step", "recomputed", "35 * 8 / 16 = 17.5, so 17"),
        ("samples", "restored", "280 seen"),
        ("epoch", "recomputed", "3 done"),
        (
            "data",
            "recomputed",
            "pass 4, behind 32 of 80 samples: 17 steps are skipped; 8 samples are seen again",
        ),
        ("data set", "restored", "the same"),
        ("learning rate", "recomputed", "position of the schedule: 35 * 8 / 16 = 17.5, so 17"),
        ("loss scale", "absent", "not in use"),
        ("random state", "absent", "not in the checkpoint: the seeds of the configuration apply"),
    ]


def test_another_data_set_and_an_absent_fingerprint_are_reported():
    rows = rows_of(state(), RunSettings(8, 10, None, {"files": "b"}, DataRequest(False, 2)))
    assert (
        "data",
        "recomputed",
        "as data_skip_steps: 2 says: pass 1, behind 16 of 80 samples: 2 steps are skipped",
    ) in rows
    assert ("data set", "changed", "files: a, now b") in rows
    assert ("data set", "absent", "not in the checkpoint: taken for the same") in rows_of(
        state(data=None), RunSettings(8, 10)
    )


def test_random_states_by_name():
    assert random_state_row(["numpy", "mindspore"]) == (
        "random state",
        "restored",
        "numpy, mindspore",
    )
    assert random_state_row((), "saved by 4 ranks, this job has 2") == (
        "random state",
        "absent",
        "saved by 4 ranks, this job has 2: the seeds of the configuration apply",
    )


def warnings(saved, new, on_change="warn"):
    return resume_warnings(resume_progress(saved, new), new, on_change)


def test_a_resume_without_a_reason_gives_no_warning():
    assert warnings(state(), RunSettings(8, 10, None, OURS), "error") == []
    assert (
        warnings(state(), RunSettings(8, 10, None, {"files": "b"}, DataRequest(True)), "error")
        == []
    )
    assert warnings(state(), RunSettings(8, 10), "error") == []


def test_samples_that_are_seen_again():
    (sentence,) = warnings(state(), RunSettings(16, 5, None, OURS))
    assert sentence == (
        "8 samples are seen again: the checkpoint is within a step of global batch size 16, and "
        "steps are rounded down"
    )


def test_an_undeclared_change_is_a_warning():
    new = RunSettings(8, 10, None, {"files": "b"})
    (sentence,) = warnings(state(), new)
    assert sentence.startswith(
        "the data set differs from that of the checkpoint (files: a, now b); 35 steps of it are "
        "skipped as if it were the same. If it is a new data set, set ignore_data_skip: True"
    )
    with pytest.raises(
        ProgressError, match="mindresume.on_dataset_change: error.*ignore_data_skip: True"
    ):
        warnings(state(), new, "error")


def test_a_remaining_data_request_is_reported_when_the_data_set_changes_again():
    """``ignore_data_skip: True`` remained in the configuration: its effect is reported; without a
    change it has none."""
    data_request, stood = DataRequest(True), DataPosition(0, 40, 3, "ignore_data_skip: True", OURS)
    (sentence,) = warnings(
        state(data=stood), RunSettings(8, 10, None, {"files": "b"}, data_request), "error"
    )
    assert sentence.startswith(
        "ignore_data_skip: True is still set, and the data set differs from that of the checkpoint "
        "(files: a, now b), so it starts as that key says."
    )
    assert warnings(state(data=stood), RunSettings(8, 10, None, OURS, data_request)) == []
