"""The order of several runs of mindformers and mindresume when file times are lost."""

import json
import os
import shutil
from pathlib import Path

import pytest
from rank_folders import counters, path_of, save, tensors_of, write_foreign
from reshard.plans import put

import mindresume

OURS, MINDFORMERS = "mindresume", "mindformers"


def order(root):
    return [(row.step, row.origin) for row in mindresume.open(root).list()]


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
    name = os.path.basename(mindresume.open(tmp_path).list().checkpoints[0].files[0])
    assert (
        name
        == json.loads((tmp_path / "rank_0" / "meta.json").read_text())["last_ckpt_file"]
        == "net_rank_0_1-2_5.safetensors"
    )


@pytest.mark.parametrize("time, first", [(1.0, OURS), (4e9, MINDFORMERS)])
def test_another_prefix_is_ordered_by_time(tmp_path, time, first):
    save(tmp_path, 10, world=1)
    write_foreign(tmp_path, 5, world=1)
    other = path_of(tmp_path, 5, 0).with_name("other_rank_0-1_5.safetensors")
    path_of(tmp_path, 5, 0).rename(other)
    os.utime(other, (time, time))
    assert order(tmp_path)[0][1] == first


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
    assert not any("common prefix" in note for note in mindresume.open(tmp_path).list().notes)
    path_of(tmp_path, 10, 0).rename(
        path_of(tmp_path, 10, 0).with_name("other_rank_0-1_10.safetensors")
    )
    (tmp_path / "rank_0" / "meta.json").unlink(missing_ok=True)
    os.utime(path_of(tmp_path, 5, 0), (300.0, 300.0))
    assert order(tmp_path) == [(5, MINDFORMERS), (10, MINDFORMERS)]
    assert (
        "the names of 'net', 'other' have no common prefix"
        in mindresume.open(tmp_path).list().notes[0]
    )


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
    assert "exception_save" in mindresume.open(tmp_path).list().notes[0]
