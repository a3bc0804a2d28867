"""What a listing of rank folders shows: candidates, their order, and notes."""

import json
import os
import shutil
from pathlib import Path

import pytest
from rank_folders import (
    LATER_RUN,
    RECORDS,
    RUN,
    counters,
    name_of,
    path_of,
    records_of,
    save,
    tensors_of,
    write_foreign,
    write_rank,
)
from reshard.plans import put
from storages import ListedLate

import mindresume
from mindresume.api.catalog import Catalog

OURS, MINDFORMERS = "mindresume", "mindformers"


def found(root):
    return mindresume.open(root).list()


def notes(root):
    return [
        note for note in found(root).notes if "assumed from the number of rank folders" not in note
    ]


def order(root):
    """(step, origin) newest first."""
    return [(row.step, row.origin) for row in found(root)]


# ---- results of a scan ---------------------------------------------------------------------------


def test_a_file_of_rank_1_in_the_folder_of_rank_0_is_ignored(tmp_path):
    write_foreign(tmp_path, 5, world=2)
    shutil.copy(path_of(tmp_path, 5, 1), tmp_path / "rank_0")
    (row,) = found(tmp_path)
    assert row.files == (str(path_of(tmp_path, 5, 0)), str(path_of(tmp_path, 5, 1)))
    assert (
        "rank_0/net_rank_1-1_5.safetensors: a file of rank 1 in the folder of rank 0; ignored"
        in found(tmp_path).notes
    )


@pytest.mark.parametrize(
    "content, note_text",
    [
        ("", "empty or truncated"),
        ("[]", "empty or truncated"),
        ('{"last_ckpt_file": ' * 50_000, "empty or truncated"),
        ('{"last_ckpt_file": "\\ud800"}', "which is not there"),
        ('{"last_ckpt_file": "gone.ckpt"}', "names gone.ckpt, which is not there"),
    ],
)
def test_a_wrong_meta_json_is_noted(tmp_path, content, note_text):
    write_foreign(tmp_path, 5, world=2)
    (tmp_path / "rank_1" / "meta.json").write_text(content)
    (note,) = notes(tmp_path)
    assert note.startswith("rank_1/meta.json ") and note_text in note and "the files decide" in note


def test_weights_without_counters_and_damaged_files_are_candidates_with_a_problem(tmp_path):
    folder = tmp_path / "rank_0"
    put(folder / "net_rank_0-1_5.ckpt", {"w": tensors_of(0, 5)["layer.bias"]})
    (folder / "net_rank_0-1_6.ckpt").write_bytes(b"")
    (folder / "net_rank_0-1_7.safetensors").write_bytes(b"\xff" * 64)
    reasons = {os.path.basename(row.files[0]): row.problem.reason for row in found(tmp_path)}
    assert "holds no step_num: weights only" in reasons["net_rank_0-1_5.ckpt"]
    assert "the file is empty" in reasons["net_rank_0-1_6.ckpt"]
    assert "truncated, or not a safetensors file" in reasons["net_rank_0-1_7.safetensors"]


@pytest.mark.parametrize("prefix", ["checkpoint_", "llama2_7b_", "7b-rank_", "3x8_"])
def test_files_of_a_transform_are_grouped_with_any_digits_in_the_prefix(tmp_path, prefix):
    for rank in range(12):
        put(tmp_path / f"rank_{rank}" / f"{prefix}{rank}.safetensors", tensors_of(rank, 5))
    (row,) = found(tmp_path)
    assert row.step == 5 and row.files == tuple(
        str(tmp_path / f"rank_{rank}" / f"{prefix}{rank}.safetensors") for rank in range(12)
    )


# ---- the number of ranks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, expected",
    [
        (["ckpt_strategy_rank_0.ckpt", "ckpt_strategy_rank_7.ckpt"], 8),
        (["x_rank_3.json"], 4),
        (["merged.ckpt", "rank_9"], 3),
    ],
)
def test_expected_ranks_of_the_strategy_folder_beside(tmp_path, names, expected):
    write_foreign(tmp_path / "checkpoint", 5, world=3)
    (tmp_path / "strategy").mkdir()
    for name in names:
        (tmp_path / "strategy" / name).write_bytes(b"")
    (row,) = found(tmp_path / "checkpoint")
    missing = ", ".join(map(str, range(3, expected)))
    assert (
        f"no file of rank {missing} for this step" in row.problem.reason if missing else row.usable
    )


# ---- order ---------------------------------------------------------------------------------------


def test_mindformers_files_are_ordered_by_samples_when_global_batch_sizes_differ(tmp_path):
    # 800 samples; then a larger batch: 960
    for step, batch, suffix in ((100, 8, 0), (60, 16, 1)):
        path = put(
            path_of(tmp_path, step, 0, suffix, "ckpt"),
            {**tensors_of(0, step), **counters(step, batch)},
        )
        name = name_of(0, step, suffix, "ckpt")
        path.with_name("meta.json").write_text(
            json.dumps(
                {"last_epoch": name.epoch, "last_step": name.step, "last_ckpt_file": path.name}
            )
        )
    assert [row.step for row in found(tmp_path)] == [60, 100]


# ---- our files, records and labels ---------------------------------------------------------------


def test_labelled_files_stay_candidates_after_the_next_run(tmp_path):
    save(tmp_path, 10, world=2)
    # cp -r rank_* here, resumed ...
    shutil.rmtree(tmp_path / RECORDS)
    # ... and killed in the first save
    write_rank(tmp_path, 15, 0, 2, run="0001-0000cccc", suffix=1)
    assert [row.step for row in found(tmp_path) if row.state == "complete"] == [10]


def test_a_file_of_a_run_that_keeps_records_here_but_none_of_this_step_never_completed(tmp_path):
    save(tmp_path, 5, world=2)
    save(tmp_path, 10, world=2)
    shutil.rmtree(records_of(tmp_path, 10))
    newest = found(tmp_path).checkpoints[0]
    assert (newest.step, newest.origin, newest.run_id, newest.state) == (
        10,
        OURS,
        RUN,
        "incomplete",
    )
    assert newest.problem.reason == "the save never completed: no record of it was written"


@pytest.mark.parametrize("missing", ["newest", "all", "trouble"])
@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_records_that_are_listed_late_are_looked_up(tmp_path, fmt, missing):
    """The files counted as a checkpoint without records: unverified, and without a lease holder."""
    for step, run, suffix in ((5, RUN, 0), (10, LATER_RUN, 1)):
        save(tmp_path, step, world=2, fmt=fmt, run=run, suffix=suffix)
    late = records_of(tmp_path, 10, LATER_RUN)
    storage = ListedLate(
        tmp_path / RECORDS,
        late.name,
        *([records_of(tmp_path, 5).name] if missing == "all" else []),
        trouble=str(late) if missing == "trouble" else None,
    )
    rows = [
        (row.origin, row.step, row.run_id, row.committed)
        for row in Catalog(storage, str(tmp_path)).list()
    ]
    assert rows == [(OURS, 10, LATER_RUN, missing != "trouble"), (OURS, 5, RUN, True)]


# ---- several runs, when the times of files are lost ---------------------------------------------


def forget_times(root, copy):
    """Sets the time of every file to now, as ``cp -r`` or a restore from an object store does."""
    shutil.copytree(root, copy, copy_function=shutil.copyfile)
    return copy


def test_a_copy_without_times_does_not_make_old_files_of_mindformers_newer_than_ours(tmp_path):
    write_foreign(tmp_path / "a", 5, world=2, time=100.0)
    save(tmp_path / "a", 100, world=2, suffix=1)
    assert order(forget_times(tmp_path / "a", tmp_path / "b"))[0] == (100, OURS)


def test_files_of_mindformers_after_ours_stay_newer_with_any_times(tmp_path):
    save(tmp_path, 100, world=2)
    write_foreign(tmp_path, 105, world=2, suffix=1, time=1.0)
    assert order(tmp_path) == [(105, MINDFORMERS), (100, OURS)]


def test_an_emergency_save_is_ordered_among_the_steps_of_its_run(tmp_path):
    for step in (5, 10):
        save(tmp_path, step, world=1)
    write_foreign(tmp_path, 7, world=1, meta=False, time=1.0)
    assert order(tmp_path) == [(10, OURS), (7, MINDFORMERS), (5, OURS)]


def test_meta_json_decides_which_mindformers_run_is_newer_after_a_fallback(tmp_path):
    for step in (5, 10, 15, 20):
        write_foreign(tmp_path, step, world=2)
    write_foreign(tmp_path, 15, world=2, suffix=1)
    name = os.path.basename(found(tmp_path).checkpoints[0].files[0])
    assert (
        name
        == json.loads((tmp_path / "rank_0" / "meta.json").read_text())["last_ckpt_file"]
        == "net_rank_0_1-2_5.safetensors"
    )


def test_an_old_prefix_stays_old_though_mindformers_saved_in_our_run_since(tmp_path):
    save(tmp_path, 100, world=1)
    write_foreign(tmp_path, 105, world=1, time=4e9)
    write_foreign(tmp_path, 5, world=1)
    other = path_of(tmp_path, 5, 0).with_name("other_rank_0-1_5.safetensors")
    path_of(tmp_path, 5, 0).rename(other)
    os.utime(other, (1.0, 1.0))
    assert [step for step, _ in order(tmp_path)] == [105, 100, 5]


@pytest.mark.parametrize("meta", [True, False])
def test_two_prefixes_are_ordered_by_time_with_a_note(tmp_path, meta):
    for step, time in ((5, 100.0), (10, 200.0)):
        write_foreign(tmp_path, step, world=1, time=time, meta=meta)
    assert not any("common prefix" in note for note in found(tmp_path).notes)
    path_of(tmp_path, 10, 0).rename(
        path_of(tmp_path, 10, 0).with_name("other_rank_0-1_10.safetensors")
    )
    (tmp_path / "rank_0" / "meta.json").unlink(missing_ok=True)
    os.utime(path_of(tmp_path, 5, 0), (300.0, 300.0))
    assert order(tmp_path) == [(5, MINDFORMERS), (10, MINDFORMERS)]
    assert "the names of 'net', 'other' have no common prefix" in found(tmp_path).notes[0]


FIXTURES = sorted(
    path.parents[1]
    for path in (Path(__file__).parents[2] / "st" / "fixtures").glob("*/output/checkpoint")
)
TIMES = {"all alike": lambda age: 1e9, "reversed": lambda age: 1e9 - age}


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("hints", [True, False])
@pytest.mark.parametrize("name", [path.name for path in FIXTURES])
def test_saves_of_mindformers_in_a_copy_without_times(tmp_path, name, hints, times):
    fixture = next(path for path in FIXTURES if path.name == name)
    copy = shutil.copytree(fixture / "output" / "checkpoint", tmp_path / "checkpoint")
    known = sorted(map(int, json.loads((fixture / "steps.json").read_text())["steps"]))
    for row in mindresume.open(copy).list():
        for path in row.files:
            os.utime(path, (TIMES[times](known.index(row.step)),) * 2)
    for path in [] if hints else [*copy.glob("*/meta.json"), *copy.glob("latest_*")]:
        path.unlink()
    assert [step for step, _ in order(copy)] == sorted(known, reverse=True)


def test_files_of_exception_save_are_not_candidates(tmp_path):
    """MindSpore counts step_num within the epoch: at step 17 with 10 steps per epoch it stores
    7."""
    save(tmp_path, 15, world=1)
    put(
        tmp_path / "rank_0" / "net_rank_0-2_7_breakpoint.ckpt", {**tensors_of(0, 17), **counters(7)}
    )
    assert order(tmp_path) == [(15, OURS)]
    assert "exception_save" in found(tmp_path).notes[0]
