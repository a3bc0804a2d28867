"""load_checkpoint x resume_training, with the real Trainer in one process: what is chosen, what is refused, what the log says.

All resumes start from the checkpoints of the uninterrupted run (steps 30, 35 and 40 are kept) and are compared with it.
"""
from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindresume.model.manifest import FOLDER
from st.copies import (
    beside,
    events,
    finished,
    flip,
    happened,
    lines,
    meta,
    names,
    records,
    said,
    steps_of,
    succeeded,
    together,
    weights,
)
from st.jobs import Run, differences


def refused(run: Run) -> None:
    """Nothing was trained, and the job says by its exit status that it failed."""
    assert run.process.returncode not in (0, None), run.log()[-3000:]
    assert steps_of(run) == []


# ---- what resumes --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def resumed(whole_single, tmp_path_factory) -> SimpleNamespace:
    """One training for each way to name a checkpoint, of the same 40 steps."""
    base, there = tmp_path_factory.mktemp("resumed"), whole_single.checkpoints
    own = {name: beside(whole_single, base / name, copied=False) for name in ("file", "file_and_name", "name", "stem")}
    alone = base / "elsewhere" / "copy.safetensors"
    alone.parent.mkdir()
    shutil.copy(weights(whole_single, 35), alone)
    newest = beside(whole_single, base / "newest")
    flip(weights(newest, 40))
    together(
        lambda: succeeded(newest),
        lambda: succeeded(own["file"], f"--load_checkpoint {alone} --resume_training True"),
        lambda: succeeded(own["file_and_name"], f"--load_checkpoint {weights(whole_single, 35)}",
                          "--resume_training qwen3_rank_0-3_10.safetensors"),
        lambda: succeeded(own["name"], f"--load_checkpoint {there} --resume_training qwen3_rank_0-3_10.safetensors"),
        lambda: succeeded(own["stem"], f"--load_checkpoint {there} --resume_training qwen3_rank_0-4_5"))
    return SimpleNamespace(newest=newest, **own)


def goes_on(run: Run, whole: Run, step: int) -> None:
    """``run`` was resumed from ``step`` and is ``whole`` from there on, bit by bit and sample by sample."""
    assert steps_of(run) == list(range(step + 1, 41))
    assert differences(whole.steps(), run.steps(-1)) == []
    said(run, "mindresume: resume from step", f"step {step},")
    happened(run, "progress_restored", step=step, global_batch_size=8)
    happened(run, "training_ended", outcome="finished", step=40)


def test_folder_and_true_takes_the_newest_that_is_as_it_was_written(resumed, whole_single):
    goes_on(resumed.newest, whole_single, 35)
    said(resumed.newest, "not resuming from step 40", "qwen3_rank_0-4_10.safetensors", "tensor")
    said(resumed.newest, "random state", "restored", "numpy")


def test_the_resumed_run_saves_under_new_names(resumed):
    run = resumed.newest
    assert names(run, 2) == {40: "qwen3_rank_0_1-4_10.safetensors"}
    assert meta(run) == {"last_epoch": 4, "last_step": 10, "last_ckpt_file": "qwen3_rank_0_1-4_10.safetensors"}
    assert run.which()["chosen"]["files"] == [str(weights(run, 40))]


def test_a_file_alone(resumed, whole_single):
    goes_on(resumed.file, whole_single, 35)
    assert names(resumed.file) == {40: "qwen3_rank_0-4_10.safetensors"}


def test_a_file_and_a_name_ignores_the_name_and_warns(resumed, whole_single):
    goes_on(resumed.file_and_name, whole_single, 35)
    line = lines(resumed.file_and_name, "qwen3_rank_0-3_10.safetensors is ignored")
    assert len(line) == 1 and "WARNING" in line[0] and str(weights(whole_single, 35)) in line[0]


def test_a_folder_and_a_name(resumed, whole_single):
    goes_on(resumed.name, whole_single, 30)


def test_a_folder_and_a_name_without_extension(resumed, whole_single):
    goes_on(resumed.stem, whole_single, 35)


def test_complete_already(resumed):
    """The same command once more: nothing to train, nothing saved, exit status 0."""
    run = resumed.newest
    before = sorted((str(path), path.stat().st_mtime_ns) for path in run.checkpoints.rglob("*") if path.is_file())
    succeeded(run)
    assert steps_of(run) == []
    said(run, "the training is complete: step 40", "4 epochs of 10 steps", "runner_config.epochs")
    happened(run, "training_ended", outcome="nothing_to_train")
    assert sorted((str(path), path.stat().st_mtime_ns) for path in run.checkpoints.rglob("*")
                  if path.is_file()) == before


# ---- what stops ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def stopped(whole_single, tmp_path_factory) -> SimpleNamespace:
    base = tmp_path_factory.mktemp("stopped")
    unnamed, ruined = beside(whole_single, base / "unnamed", copied=False), beside(whole_single, base / "ruined")
    flip(weights(ruined, 40))
    weights(ruined, 30).unlink()
    half = weights(ruined, 35)
    half.write_bytes(half.read_bytes()[:100_000])
    together(
        lambda: finished(unnamed, f"--load_checkpoint {whole_single.checkpoints}",
                         "--resume_training qwen3_rank_0-2_5.safetensors"),
        lambda: finished(ruined))
    return SimpleNamespace(unnamed=unnamed, ruined=ruined)


def test_a_name_that_is_not_there(stopped, whole_single):
    refused(stopped.unnamed)
    said(stopped.unnamed, "MissingCheckpointError", "qwen3_rank_0-2_5.safetensors", f"{whole_single.checkpoints}/rank_0",
         "There are: qwen3_rank_0-3_10.safetensors, qwen3_rank_0-4_10.safetensors, qwen3_rank_0-4_5.safetensors")


def test_all_damaged_is_an_error_that_lists_every_candidate(stopped):
    run = stopped.ruined
    refused(run)
    said(run, "NoUsableCheckpointError", "none can be used")
    [ended] = events(run, "training_ended")
    assert ended["outcome"] == "failed" and "NoUsableCheckpointError" in ended["reason"]
    for step, name, reason in ((40, "qwen3_rank_0-4_10", "tensor"), (35, "qwen3_rank_0-4_5", "100000"),
                               (30, "qwen3_rank_0-3_10", "missing")):
        said(run, f"step {step}", name, reason)
    said(run, "to start afresh, set resume_training: False")
    assert len(list(run.checkpoints.glob(f"{FOLDER}/step-*"))) == 3


# ---- what starts afresh --------------------------------------------------------------------------------------------

def starts_afresh(run: Run, whole: Run, folder: str) -> None:
    line = lines(run, "fresh start")
    assert len(line) == 1 and folder in line[0] and "weights are initialised at random" in line[0]
    rows = run.steps(-1)
    assert rows and rows[0]["step"] == 1
    assert differences(whole.steps()[:len(rows)], rows) == []


def test_a_folder_that_is_missing_or_empty(whole_single, tmp_path):
    """Both are killed soon: only the beginning matters."""
    missing, empty = (beside(whole_single, tmp_path / name, copied=False) for name in ("missing", "empty"))
    (tmp_path / "nothing").mkdir()
    together(lambda: finished(missing, f"--load_checkpoint {tmp_path}/absent", CPU_CLUSTER_KILL="0@3"),
             lambda: finished(empty, f"--load_checkpoint {tmp_path}/nothing", CPU_CLUSTER_KILL="0@3"))
    starts_afresh(missing, whole_single, f"{tmp_path}/absent")
    starts_afresh(empty, whole_single, f"{tmp_path}/nothing")


def killed_in_its_first_save(whole: Run, folder: Path) -> Run:
    """Killed while the file of weights of step 5 was half-written. A save takes some milliseconds; looking may come too late,
    then it is tried again."""
    for attempt in range(4):
        run = beside(whole, folder / str(attempt), copied=False).start()
        half = run.stop_in_a_save(3)
        run.kill()
        if records(run) == {} and any("qwen3_rank_0-1_5" in path for path in half):
            return run
    raise AssertionError("the first save could not be cut")


@pytest.mark.soak
def test_debris_of_a_first_save(whole_single, tmp_path):
    """Killed in its first save, the run starts afresh, cleans up and saves."""
    run = killed_in_its_first_save(whole_single, tmp_path)
    assert len(list(run.checkpoints.glob(f"{FOLDER}/step-*"))) == 1 and run.which()["chosen"] is None
    finished(run, CPU_CLUSTER_KILL="0@7")
    starts_afresh(run, whole_single, "./output/checkpoint")
    said(run, "not resuming from", "step 5", "never completed")
    said(run, "removed .qwen3_rank_0-1_5.safetensors", "left half-written")
    assert run.half_written() == []
    assert names(run) == {5: "qwen3_rank_0-1_5.safetensors"}
    assert run.which()["chosen"]["step"] == 5
