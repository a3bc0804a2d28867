"""Whoever asks for the newest checkpoint gets the same one: which, ls, verify, convert, and the
job."""

import os
import shutil

import iteration_folders
import pytest
from job_choices import choose
from rank_folders import flip_bit, path_of, save
from reshard.plans import MODEL, Plan, random_tensors, recorded

import mindresume
from mindresume.errors import NoUsableCheckpointError


def taken(folder, **policy):
    """Returns the step that a job takes, and what it refuses."""
    choice = choose(folder, **policy)
    return choice.chosen.step, [refusal.reason for refusal in choice.refused]


def test_after_a_scrub_a_conversion_takes_what_a_job_takes(tmp_path):
    """It was taken by a second rule, which did not ask for known damage: the dry run promised it,
    and the conversion failed."""
    root = tmp_path / "checkpoint"
    for step in (5, 10):
        save(root, step, world=1)
    flip_bit(path_of(root, 10, 0))
    assert mindresume.scrub(root).damaged and taken(root)[0] == 5
    dry, made = (
        mindresume.merge(root, tmp_path / "new", dry_run=is_dry) for is_dry in (True, False)
    )
    assert dry.source == made.source and "step 5" in made.source
    with pytest.raises(NoUsableCheckpointError, match="a scrub at .* found it damaged"):
        mindresume.merge(root, tmp_path / "other", step=10)


def test_a_forgotten_file_of_the_optimizer_is_named_and_the_older_step_is_taken(tmp_path):
    """Checkpoint 2.0 of mindformers, one process: no metadata.json names the files, but the other
    step has one."""
    root = iteration_folders.foreign(tmp_path, "mf190_20_single")
    assert taken(root)[0] == 15
    os.remove(root / "iteration_00000015" / "qwen3-opt-0000000-0000001.safetensors")
    step, (reason,) = taken(root)
    assert (
        step == 10
        and "iteration_00000015/qwen3-opt-0000000-0000001.safetensors is missing" in reason
    )
    rows = {row.step: row.state for row in mindresume.open(root).list()}
    assert rows == {15: "unusable", 10: "complete"}
    report = mindresume.open(root).verify()
    assert report.damaged and [row.step for row in report.checkpoints if row.problems] == [15]
    # weights alone are whole
    assert taken(root, require_counters=False)[0] == 15


def test_a_training_that_saves_no_optimizer_state_has_no_missing_files(tmp_path):
    root = iteration_folders.foreign(tmp_path, "mf190_20_single")
    for path in root.glob("*/*-opt-*"):
        os.remove(path)
    assert taken(root) == (15, [])


def lose_a_replica(root):
    path_of(root, 10, 1).unlink()
    return "rank_1/net_rank_1-1_10.safetensors"


def spoil_the_manifest(root):
    (manifest,) = root.glob(".mindresume/step-0000000010-*/manifest.json")
    manifest.write_bytes(b"")
    return str(manifest.relative_to(root))


@pytest.mark.parametrize("spoil", [lose_a_replica, spoil_the_manifest])
def test_verify_names_the_damage_and_says_that_a_resume_takes_the_step(tmp_path, spoil):
    save(tmp_path, 10)
    damaged = spoil(tmp_path)
    assert taken(tmp_path) == (10, [])
    (row,) = mindresume.open(tmp_path).verify().checkpoints
    assert (row.state, row.is_usable, row.problems[0].file) == (
        "damaged",
        True,
        str(tmp_path / damaged),
    )


def test_verify_says_that_a_resume_does_not_take_a_damaged_step(tmp_path):
    save(tmp_path, 10)
    lose_a_replica(tmp_path)
    flip_bit(path_of(tmp_path, 10, 2))
    (row,) = mindresume.open(tmp_path).verify().checkpoints
    assert (row.state, row.is_usable) == ("damaged", False)


@pytest.mark.parametrize(
    "put",
    [lambda path: path.write_text("x"), lambda path: path.symlink_to(path.name), lambda path: None],
    ids=["a file", "a link to itself", "nothing"],
)
def test_a_rank_folder_that_is_none_is_missing_for_all(tmp_path, put):
    """A job took its tensors from replicas, and a conversion refused the same step."""
    root = tmp_path / "checkpoint"
    recorded(root, Plan.parse("dp2"), random_tensors(MODEL))
    shutil.rmtree(root / "rank_0")
    put(root / "rank_0")
    step = taken(root)[0]
    assert f"step {step}" in mindresume.merge(root, tmp_path / "new", dry_run=True).source
    assert mindresume.merge(root, tmp_path / "new").target
    assert next(
        row for row in mindresume.open(root).verify().checkpoints if row.step == step
    ).is_usable
