"""The cookbook: each scenario of docs/cookbook.md with its file in configs/, by the real Trainer.

A run starts run_mindformer.py with the file as it is. The command line gives what differs from
Ascend (``on_cpu``), fewer epochs, and what a test must choose: where data and weights are, and when
a job is killed. An epoch has 10 steps, and every fifth step is saved; the interrupted run is killed
after step 17.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from st.run_attempts import (
    LIMIT,
    assert_event,
    assert_no_process_left,
    in_parallel,
    resume_summary,
    selected_step,
    steps_of,
    train,
    train_well,
    wrong_steps,
)
from st.supervised_run import Start, supervised, supervisor_events
from st.test_remote import Moxing
from st.training_run import FORMAT_2, ROOT, Run, differences, make_data

pytestmark = pytest.mark.timeout(1200)
TWO_EPOCHS, LAST, KILLED, SAVED = "--epochs 2", 20, 17, 15
KILL = {"CPU_CLUSTER_KILL": f"all@{KILLED}"}
# of a loss of about 6 in float32, where sums are taken in another order
TOLERANCE = 1e-5
# Keys of a config.json of Hugging Face, which the YAML has as well.
KEYS = (
    "model_type",
    "architectures",
    "vocab_size",
    "max_position_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
)
MORE = 120  # samples of the second data set: 15 steps

Cook = Callable[..., Run]


def on_cpu(device: str) -> str:
    """Returns the options that a machine without NPU needs."""
    return "--device_target CPU" if device == "CPU" else ""


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cook(data, device, graphs) -> Cook:
    """cook(config, folder, more options): a run of a file of the cookbook, not started yet."""

    def run(config: str, folder: Path, options: str = TWO_EPOCHS, workers: int = 1) -> Run:
        return Run(
            folder,
            config,
            data,
            workers,
            device=device,
            graphs=graphs,
            options=f"{on_cpu(device)} {options}",
        )

    return run


@pytest.fixture(scope="module")
def whole(cook, trained) -> Run:
    """The training that was never interrupted."""
    return trained("cookbook_whole", cook("base.yaml", Path()))


@pytest.fixture(scope="module")
def interrupted(cook, trained, whole) -> Run:
    """The same, killed. Read it, do not change it."""
    return trained(
        "cookbook_interrupted", cook("base.yaml", Path()), lambda run: train(run, **KILL)
    )


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> str:
    """Returns the option that names another data set."""
    folder = tmp_path_factory.mktemp("cookbook") / "data_2"
    make_data(folder, "--samples", str(MORE))
    return f"--train_dataset {folder / 'mcore.mindrecord'}"


def start_from(interrupted: Run, run: Run) -> Run:
    """Gives ``run`` a copy of the checkpoints of the interrupted run."""
    shutil.copytree(interrupted.checkpoints, run.checkpoints)
    return run


def samples(run: Run, attempt: int = -1) -> list[list[str]]:
    return [row["samples"] for row in run.steps(attempt)]


def assert_goes_on(run: Run, whole: Run, step: int, ranks: int = 1) -> None:
    """The last attempt resumed from ``step`` on all ranks, and is then the uninterrupted run bit by
    bit."""
    assert [selected_step(run, rank) for rank in range(ranks)] == [step] * ranks
    assert steps_of(run) == list(range(step + 1, LAST + 1))
    assert differences(whole.steps(), run.steps(-1)) == []


def assert_goes_on_in_another_layout(
    run: Run, whole: Run, step: int, ranks: int, last: int = LAST
) -> None:
    """The last attempt resumed from ``step``, and sees the samples and learning rates of the
    uninterrupted run up to ``last``. The losses may differ in their last digits, because sums over
    ranks are taken in another order."""
    reference = {row["step"]: row for row in whole.steps()}
    assert [selected_step(run, rank) for rank in range(ranks)] == [step] * ranks
    assert steps_of(run) == list(range(step + 1, last + 1))
    for row in run.steps(-1):
        expected = reference[row["step"]]
        assert (row["lr"], row["samples"]) == (expected["lr"], expected["samples"])
        assert abs(row["loss"] - expected["loss"]) <= TOLERANCE, row["step"]


# ---- one folder, the same training ---------------------------------------------------------------


def test_resume(cook, whole, interrupted, tmp_path):
    """resume.yaml"""
    assert interrupted.which()["chosen"]["step"] == SAVED
    newest, named = (
        start_from(interrupted, cook("resume.yaml", tmp_path / name))
        for name in ("newest", "named")
    )
    in_parallel(
        lambda: train_well(newest),
        lambda: train_well(named, "--resume_training qwen3_rank_0-10_1.safetensors"),
    )
    assert_goes_on(newest, whole, SAVED)
    assert_goes_on(named, whole, 10)


def test_automatic_recovery(cook, whole, tmp_path):
    """automatic_recovery.yaml: one command, which finds an empty folder, is killed, and starts
    again by itself."""
    run = cook("automatic_recovery.yaml", tmp_path / "run")
    train_well(run, MSRUN_RESTARTS="5", CPU_CLUSTER_KILLED=str(tmp_path / "killed"), **KILL)
    assert [row["step"] for row in run.steps()] == [
        *range(1, KILLED + 1),
        *range(SAVED + 1, LAST + 1),
    ]
    assert wrong_steps(run, whole) == []
    health = json.loads((run.folder / "output" / "health_ckpts.json").read_text(encoding="utf-8"))
    assert {row["is_health"] for row in health} == {0} and len(health) >= 4
    assert_no_process_left(run)


def test_supervisor(cook, whole, tmp_path, memory):
    """supervisor.yaml: the second start takes the save in memory, which is newer than the one on
    disk."""
    run = supervised(
        cook("supervisor.yaml", tmp_path / "run"),
        extra="",
        MINDRESUME_MEMORY_TIER_DIR=memory,
        CPU_CLUSTER_KILLED=str(tmp_path / "killed"),
        **KILL,
    )
    run.wait_for_success(LIMIT)
    assert len(supervisor_events(run, "job_started")) == 2
    again = Start(run, 2)
    assert again.source() == "memory"
    (selected,) = again.events("checkpoint_selected")
    assert SAVED <= selected["step"] <= KILLED
    assert [row["step"] for row in again.steps()] == list(range(selected["step"] + 1, LAST + 1))
    assert differences(whole.steps(), again.steps()) == []
    assert_no_process_left(run)


def test_modelarts(cook, whole, tmp_path):
    """modelarts.yaml, with a stand-in for moxing: the job ends after an epoch and its disk is
    lost."""
    run = cook("modelarts.yaml", tmp_path / "run")
    environment = Moxing.environment(run)
    train_well(run, "--epochs 1", **environment)
    shutil.rmtree(run.folder / "output")
    train_well(run, **environment)
    assert_event(run, "checkpoint_fetched", step=10)
    assert_goes_on(run, whole, 10)


# ---- another layout ------------------------------------------------------------------------------


def test_change_strategy(cook, whole, interrupted, tmp_path):
    """change_strategy.yaml: from data parallel 2 to tensor parallel 2, then to one device. The
    first change is given the strategy files of the old layout too, as checkpoints of mindformers
    alone need them. (The old layout begins with step 5 of one device, because random weights are
    other ones in each layout.)"""
    old = (
        "--use_parallel True --batch_size 4 --parallel_config.data_parallel 2 "
        "--parallel.dataset_strategy [[2,1],[2,1],[2,1],[2,1]]"
    )
    before = start_from(interrupted, cook("base.yaml", tmp_path / "run", f"{TWO_EPOCHS} {old}", 2))
    train(
        before,
        "--auto_trans_ckpt True --resume_training qwen3_rank_0-5_1.safetensors",
        CPU_CLUSTER_KILL="all@12",
        MSRUN_GRACE="1",
    )
    shutil.copytree(before.folder / "output" / "strategy", before.folder / "old_strategy")
    run = cook("change_strategy.yaml", before.folder, workers=2)
    train(run, "--src_strategy_path_or_dir ./old_strategy", **KILL, MSRUN_GRACE="1")
    assert_goes_on_in_another_layout(run, whole, 10, 2, KILLED)
    run.workers = 1
    train_well(run, "--use_parallel False --parallel_config.model_parallel 1")
    assert_goes_on_in_another_layout(run, whole, SAVED, 1)


def test_checkpoint_2(cook, whole, tmp_path):
    """checkpoint_2.yaml: from one device to two."""
    train(cook("base.yaml", tmp_path / "run", f"{TWO_EPOCHS} {FORMAT_2}"), **KILL)
    run = train_well(cook("checkpoint_2.yaml", tmp_path / "run", workers=2))
    assert_goes_on_in_another_layout(run, whole, SAVED, 2)
    assert (run.checkpoints / "latest_checkpointed_iteration.txt").read_text(
        encoding="utf-8"
    ).strip() == str(LAST)


# ---- other data ----------------------------------------------------------------------------------


def test_change_batch_size(cook, whole, interrupted, tmp_path):
    """change_batch_size.yaml: 15 steps of 8 samples are 7 steps of 16, and 8 samples are seen
    again."""
    run = train_well(start_from(interrupted, cook("change_batch_size.yaml", tmp_path / "run")))
    assert_event(run, "progress_restored", step_scale=0.5, saved_step=SAVED)
    rows = samples(whole)
    assert steps_of(run) == [8, 9, 10]
    assert samples(run) == [rows[i] + rows[i + 1] for i in range(14, 20, 2)]


def test_a_new_data_set_and_incremental_training(cook, whole, interrupted, second, tmp_path):
    """new_dataset.yaml in the middle of an epoch, and killed again; incremental.yaml, two rounds.
    Each trains one pass over the second set."""
    changed = start_from(
        interrupted, cook("new_dataset.yaml", tmp_path / "changed", f"{TWO_EPOCHS} {second}")
    )
    rounds = cook("incremental.yaml", tmp_path / "rounds", "")

    def twice() -> None:
        train(changed, CPU_CLUSTER_KILL="all@22")
        train_well(changed)

    def two_rounds() -> None:
        train_well(rounds, "--epochs 1 --num_samples 80")
        train_well(rounds, second)

    in_parallel(twice, two_rounds)
    new = samples(changed, 0)[:5] + samples(changed)
    assert selected_step(changed) == 20 and [row["step"] for row in changed.steps(0)] == list(
        range(16, 23)
    )
    assert (
        steps_of(changed) == list(range(21, 31))
        and resume_summary(changed)["data"][0] == "restored"
    )
    assert samples(rounds, 0) == samples(whole)[:10]
    assert steps_of(rounds) == list(range(11, 26)) and samples(rounds) == new
    # the first round has the key, too: the second one is meant, and does not warn
    assert "is still set" not in rounds.log()
    assert len({row for step in new for row in step}) == MORE and new[:10] != samples(whole)[:10]
    assert differences(whole.steps()[:10], rounds.steps(0)) == []
    planned = {row["step"]: row["lr"] for row in whole.steps()}
    assert all(row["lr"] == planned[row["step"]] for row in rounds.steps() if row["step"] <= LAST)
    assert all(row["lr"] == planned[row["step"]] for row in changed.steps() if row["step"] <= LAST)


# ---- weights of others ---------------------------------------------------------------------------


def test_huggingface(cook, interrupted, tmp_path):
    """huggingface.yaml: begins with what export-hf wrote, is killed, and resumes; compared with a
    training that begins with the weights of the checkpoint itself."""
    config = yaml.safe_load(
        (ROOT / "configs" / "quickstart_qwen3.yaml").read_text(encoding="utf-8")
    )["model"]["model_config"]
    (tmp_path / "config.json").write_text(
        json.dumps({key: config[key] for key in KEYS} | {"torch_dtype": "float32"}),
        encoding="utf-8",
    )
    done = interrupted.mindresume(
        "export-hf",
        str(interrupted.checkpoints),
        str(tmp_path / "qwen3"),
        "--config",
        str(tmp_path / "config.json"),
    )
    assert done.returncode == 0, done.stderr
    weights = f"--pretrained_model_dir {tmp_path / 'qwen3'}"
    run = cook("huggingface.yaml", tmp_path / "run", f"{TWO_EPOCHS} {weights}")
    plain = cook(
        "base.yaml",
        tmp_path / "plain",
        f"{TWO_EPOCHS} --resume_training False --load_checkpoint {interrupted.checkpoints}",
    )

    def twice() -> None:
        train(run, **KILL)
        train_well(run)

    in_parallel(lambda: train_well(plain), twice)
    # of random weights
    assert plain.steps(0)[0]["loss"] < interrupted.steps()[0]["loss"] - 0.5
    assert differences(plain.steps(), run.steps(0)) == [
        f"step {step} is missing" for step in range(KILLED + 1, LAST + 1)
    ]
    assert_goes_on(run, plain, SAVED)
