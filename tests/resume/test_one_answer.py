"""Whoever asks for the newest checkpoint gets the same one: which, ls, verify, convert, and the job."""
import os

import iteration_folders
import pytest
from rank_folders import STORAGE, flip_bit, path_of, save

import mindresume
from mindresume.errors import NoUsableCheckpointError
from mindresume.resume.selection import preview_selection
from mindresume.resume.selection_policy import SelectionPolicy, every_rank


def taken(folder, **policy):
    """Returns the step that a job takes, and what it refuses."""
    choice = preview_selection(STORAGE, str(folder), SelectionPolicy(ranks_to_verify=every_rank, **policy)).choice
    return choice.chosen.step, [refusal.reason for refusal in choice.refused]


def test_after_a_scrub_a_conversion_takes_what_a_job_takes(tmp_path):
    """It was taken by a second rule, which did not ask for known damage: the dry run promised it, and the conversion failed."""
    root = tmp_path / "checkpoint"
    for step in (5, 10):
        save(root, step, world=1)
    flip_bit(path_of(root, 10, 0))
    assert mindresume.scrub(root).damaged and taken(root)[0] == 5
    dry, made = (mindresume.merge(root, tmp_path / "new", dry_run=is_dry) for is_dry in (True, False))
    assert dry.source == made.source and "step 5" in made.source
    with pytest.raises(NoUsableCheckpointError, match="a scrub at .* found it damaged"):
        mindresume.merge(root, tmp_path / "other", step=10)


def test_a_forgotten_file_of_the_optimizer_is_named_and_the_older_step_is_taken(tmp_path):
    """Checkpoint 2.0 of mindformers, one process: no metadata.json names the files, but the other step has one."""
    root = iteration_folders.foreign(tmp_path, "mf190_20_single")
    assert taken(root)[0] == 15
    os.remove(root / "iteration_00000015" / "qwen3-opt-0000000-0000001.safetensors")
    step, (reason,) = taken(root)
    assert step == 10 and "iteration_00000015/qwen3-opt-0000000-0000001.safetensors is missing" in reason
    rows = {row.step: row.state for row in mindresume.open(root).list()}
    assert rows == {15: "unusable", 10: "complete"}
    report = mindresume.open(root).verify()
    assert report.damaged and [row.step for row in report.checkpoints if row.problems] == [15]
    assert taken(root, require_counters=False)[0] == 15                      # weights alone are whole


def test_a_training_that_saves_no_optimizer_state_has_no_missing_files(tmp_path):
    root = iteration_folders.foreign(tmp_path, "mf190_20_single")
    for path in root.glob("*/*-opt-*"):
        os.remove(path)
    assert taken(root) == (15, [])
