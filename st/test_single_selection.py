"""load_checkpoint x resume_training, with the real Trainer in one process: what is selected, what
is refused, what is recorded.

All resumes start from the checkpoints of the uninterrupted run (steps 30, 35 and 40 are kept) and
are compared with it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindresume.model.manifest import FOLDER
from st.checkpoint_files import flip_bit, meta, names, records, weights
from st.run_attempts import (
    assert_event,
    assert_resumed,
    contains,
    in_parallel,
    notices,
    refused_steps,
    resume_summary,
    run_beside,
    selected_step,
    steps_of,
    train,
    train_well,
)
from st.training_run import Run, differences

# ---- resumes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(whole_single, tmp_path_factory) -> SimpleNamespace:
    """One training for each way to name a checkpoint, of the same 40 steps."""
    base, there = tmp_path_factory.mktemp("resumed"), whole_single.checkpoints
    own = {
        name: run_beside(whole_single, base / name, copied=False)
        for name in ("file", "file_and_name", "name", "stem")
    }
    alone = base / "elsewhere" / "copy.safetensors"
    alone.parent.mkdir()
    shutil.copy(weights(whole_single, 35), alone)
    newest = run_beside(whole_single, base / "newest")
    flip_bit(weights(newest, 40))
    in_parallel(
        lambda: train_well(newest),
        lambda: train_well(own["file"], f"--load_checkpoint {alone} --resume_training True"),
        lambda: train_well(
            own["file_and_name"],
            f"--load_checkpoint {weights(whole_single, 35)}",
            "--resume_training qwen3_rank_0-3_10.safetensors",
        ),
        lambda: train_well(
            own["name"],
            f"--load_checkpoint {there} --resume_training qwen3_rank_0-3_10.safetensors",
        ),
        lambda: train_well(
            own["stem"], f"--load_checkpoint {there} --resume_training qwen3_rank_0-4_5"
        ),
    )
    return SimpleNamespace(newest=newest, **own)


def resumed_to_the_end(run: Run, whole: Run, step: int) -> None:
    assert_resumed(run, whole, step)
    assert_event(run, "progress_restored", step=step, global_batch_size=8)
    assert_event(run, "training_ended", outcome="finished", step=40)


def test_a_folder_and_true_select_the_newest_intact_checkpoint(resumed, whole_single):
    resumed_to_the_end(resumed.newest, whole_single, 35)
    assert_event(
        resumed.newest,
        "candidate_refused",
        step=40,
        file=contains("qwen3_rank_0-4_10.safetensors"),
        reason=contains("damaged", "checksum"),
    )
    how, details = resume_summary(resumed.newest)["random state"]
    assert how == "restored" and "numpy" in details


def test_the_resumed_run_saves_under_new_names(resumed):
    run = resumed.newest
    assert names(run, 2) == {40: "qwen3_rank_0_1-4_10.safetensors"}
    assert meta(run) == {
        "last_epoch": 4,
        "last_step": 10,
        "last_ckpt_file": "qwen3_rank_0_1-4_10.safetensors",
    }
    assert run.which()["chosen"]["files"] == [str(weights(run, 40))]


def test_a_file_alone(resumed, whole_single):
    resumed_to_the_end(resumed.file, whole_single, 35)
    assert names(resumed.file) == {40: "qwen3_rank_0-4_10.safetensors"}


def test_a_file_and_a_name_ignores_the_name_and_warns(resumed, whole_single):
    resumed_to_the_end(resumed.file_and_name, whole_single, 35)
    ignored = notices(
        resumed.file_and_name,
        "qwen3_rank_0-3_10.safetensors",
        str(weights(whole_single, 35)),
        level="warning",
    )
    assert len(ignored) == 1


def test_a_folder_and_a_name(resumed, whole_single):
    resumed_to_the_end(resumed.name, whole_single, 30)


def test_a_folder_and_a_name_without_extension(resumed, whole_single):
    resumed_to_the_end(resumed.stem, whole_single, 35)


def test_complete_already(resumed):
    """The same command once more: nothing to train, nothing saved, exit status 0."""
    run = resumed.newest
    before = sorted(
        (str(path), path.stat().st_mtime_ns)
        for path in run.checkpoints.rglob("*")
        if path.is_file()
    )
    train_well(run)
    assert steps_of(run) == []
    assert_event(
        run,
        "training_ended",
        outcome="nothing_to_train",
        reason=contains("step 40", "runner_config.epochs"),
    )
    assert (
        sorted(
            (str(path), path.stat().st_mtime_ns)
            for path in run.checkpoints.rglob("*")
            if path.is_file()
        )
        == before
    )


# ---- fresh starts --------------------------------------------------------------------------------


def starts_afresh(run: Run, whole: Run, folder: str) -> None:
    assert selected_step(run) is None
    assert_event(run, "fresh_start", checkpoint_dir=contains(folder))
    rows = run.steps(-1)
    assert rows and rows[0]["step"] == 1
    assert differences(whole.steps()[: len(rows)], rows) == []


def killed_in_its_first_save(whole: Run, folder: Path) -> Run:
    """Kills a run while the weight file of step 5 is half-written. A save takes some milliseconds;
    if the kill comes too late, it is tried again."""
    for attempt in range(4):
        run = run_beside(whole, folder / str(attempt), copied=False).start()
        half = run.stop_in_a_save(3)
        run.kill()
        if records(run) == {} and any("qwen3_rank_0-1_5" in path for path in half):
            return run
    raise AssertionError("the first save could not be cut")


@pytest.mark.soak
def test_a_killed_first_save_is_a_fresh_start_and_is_cleaned_up(whole_single, tmp_path):
    """The next run starts afresh, cleans up and saves."""
    run = killed_in_its_first_save(whole_single, tmp_path)
    assert (
        len(list(run.checkpoints.glob(f"{FOLDER}/step-*"))) == 1 and run.which()["chosen"] is None
    )
    train(run, CPU_CLUSTER_KILL="0@7")
    starts_afresh(run, whole_single, "./output/checkpoint")
    assert 5 in refused_steps(run) and notices(run, ".qwen3_rank_0-1_5.safetensors")
    assert run.half_written() == []
    assert names(run) == {5: "qwen3_rank_0-1_5.safetensors"}
    assert run.which()["chosen"]["step"] == 5
