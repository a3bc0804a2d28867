"""One process, and the data set is another one at a resume, interrupted again. (The new data set
alone, and round after round, and another batch size: st/test_cookbook.py; both at once:
st/test_single_iterations.py; undeclared: the judge, "other data".)

The data sets are windows of one text, in other numbers: a sample is known by its tokens, and no two
sets have the same rows in the same places.
"""

import shutil
from types import SimpleNamespace

import pytest

from st.checkpoint_files import names
from st.run_attempts import (
    assert_event,
    in_parallel,
    notices,
    resume_summary,
    run_beside,
    selected_step,
    steps_of,
    train,
    train_well,
    use_register_path,
)
from st.training_run import FORMAT_2, Run, make_data

pytestmark = pytest.mark.timeout(1200)
IGNORE, SKIP = "--ignore_data_skip True", "--data_skip_steps 2"


@pytest.fixture(scope="module")
def second(data, tmp_path_factory) -> str:
    """Arguments of the program: the first data set has 80 samples (10 steps), this one 120 (15)."""
    folder = tmp_path_factory.mktemp("second") / "data"
    make_data(folder, "--samples", "120")
    return f"--train_dataset {folder / 'mcore.mindrecord'} --num_samples 120"


def samples(run: Run, attempt: int = -1) -> dict[int, list[str]]:
    """{step: ids of its samples}"""
    return {row["step"]: row["samples"] for row in run.steps(attempt)}


@pytest.fixture(scope="module")
def alone(whole_single, second, tmp_path_factory) -> list[list[str]]:
    """One pass over the second set: which samples each step has."""
    run = run_beside(whole_single, tmp_path_factory.mktemp("alone") / "run", copied=False)
    train_well(run, second, "--epochs 1")
    assert len(run.steps(0)) == 15
    return [row["samples"] for row in run.steps(0)]


def twice(run: Run, kill: int, *command: str) -> Run:
    """The same command two times; the first attempt is killed after step ``kill``."""
    train(run, *command, CPU_CLUSTER_KILL=f"all@{kill}")
    return train_well(run, *command)


@pytest.fixture(scope="module")
def changed(whole_single, second, alone, tmp_path_factory) -> SimpleNamespace:
    """Each resumes from a copy of the uninterrupted run at step 40, the end of epoch 4 of the first
    data set, or from its step 35."""
    base = tmp_path_factory.mktemp("changed")
    third = run_beside(whole_single, base / "third", copied=False)
    # the way of an unmodified script; the other runs take run_mindformer.py
    skip = use_register_path(
        third,
        {
            "trainer.data_skip_steps": 2,
            "load_checkpoint": str(whole_single.checkpoints),
            "resume_training": "qwen3_rank_0-4_5",
        },
    )
    runs = SimpleNamespace(
        third=third,
        **{name: run_beside(whole_single, base / name) for name in ("skipped", "new", "sinks")},
    )
    shutil.rmtree(runs.new.checkpoints)
    in_parallel(
        lambda: twice(runs.skipped, 47, second, SKIP, "--epochs 6"),
        lambda: train_well(runs.third, skip),
        lambda: train_well(
            runs.sinks, f"{second} {IGNORE} --epochs 5 --sink_mode True --runner_config.sink_size 2"
        ),
        lambda: (
            train_well(runs.new, FORMAT_2, "--epochs 1"),
            twice(runs.new, 17, FORMAT_2, second, IGNORE, "--epochs 3"),
        ),
    )
    return runs


# ---- a new data set that was declared ------------------------------------------------------------


def test_steps_that_were_trained_already_are_skipped(changed, alone):
    """Scenario 2: the first two steps of the new set are left out, once."""
    run = changed.skipped
    assert [samples(run, 0)[step] for step in range(41, 48)] == alone[2:9]
    assert [samples(run)[step] for step in range(46, 69)] == (alone * 2)[7:]
    assert steps_of(run)[-1] == 68


def test_steps_of_the_same_data_are_skipped_inside_an_epoch(changed, whole_single):
    """The samples of steps 1 and 2 are left out, the rest of an epoch follows."""
    run, before = changed.third, samples(whole_single)
    assert_event(run, "progress_restored", step=35)
    assert samples(run) == {33 + step: before[step] for step in range(3, 11)}
    assert names(run) == {40: "qwen3_rank_0-4_10.safetensors", 43: "qwen3_rank_0-5_3.safetensors"}


def test_in_sink_mode_too(changed, alone):
    """The fifth epoch has 15 steps, 7 sinks of 2."""
    run = changed.sinks
    assert steps_of(run) == list(range(41, 55))
    assert [samples(run)[step] for step in range(41, 55)] == alone[:14]
    # an epoch of mindformers is a sink
    assert_event(run, "progress_restored", epochs_done=30)
    assert resume_summary(run)["epoch"][0] == "recomputed"


def test_in_checkpoint_2_too(changed, alone):
    run = changed.new
    assert selected_step(run) == 15
    assert [samples(run)[step] for step in range(16, 41)] == (alone * 2)[5:]
    assert steps_of(run)[-1] == 40


def test_the_same_data_set_is_not_a_change(whole_single, tmp_path):
    """Moved to another place, read by more threads."""
    run = run_beside(whole_single, tmp_path / "run")
    shutil.copytree(whole_single.data, tmp_path / "moved")
    run.data = tmp_path / "moved"
    train(
        run,
        "--train_dataset.num_parallel_workers 2 --epochs 5",
        MINDRESUME_ON_DATASET_CHANGE="error",
    )
    assert steps_of(run) == list(range(41, 51)) and not notices(run, "ignore_data_skip")
    assert resume_summary(run)["data set"][0] == "restored"
