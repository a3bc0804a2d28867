"""Checkpoint 2.0 in one process, on the real Trainer: interruption, the built-in reading ours and
we reading its, both dialects of the keys, automatic recovery, another batch size and data set.

    torn first save ─▶ killed after step 12 ─▶ to step 40         async_save: process; the same
        command three times over
                           │                     └─▶ steps 30, 35, 40: what most runs below start
                               from
                           └─▶ mindformers alone, to step 40 ─▶ its tracker set back to 35, and we
                               go on

All losses are compared with the uninterrupted run, which saves Checkpoint 1.0.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindresume.formats.iterations import TRACKER, iteration_name
from mindresume.model.manifest import FOLDER, attempt_name
from mindresume.model.training_state import is_transient
from st.builtin_versions import VERSIONS, expect_readable
from st.checkpoint_files import (
    OF_TRAIN_STEP,
    common_json,
    copy_iterations,
    flip_bit,
    iteration_files,
    iteration_steps,
    layout_table,
    not_equal,
    of_network,
    saved_tensors,
    tensors_in,
    tracker,
)
from st.layout_runs import PROGRAM, loaded_tensors, start_recorded
from st.run_attempts import (
    LIMIT,
    assert_event,
    assert_no_process_left,
    assert_not_trained,
    assert_resumed,
    committed_steps,
    contains,
    failure,
    in_parallel,
    log_has,
    notices,
    refused_steps,
    resume_summary,
    selected_step,
    steps_of,
)
from st.training_run import FORMAT_2, Run, differences

pytestmark = pytest.mark.timeout(1200)
PROCESS = "--callbacks.1.async_save process"
SINKS = "--sink_mode True --runner_config.sink_size 4 --callbacks.1.save_checkpoint_steps 8"
BOTH = ["qwen3-model-0000000-0000001.safetensors", "qwen3-opt-0000000-0000001.safetensors"]


def in_folder(folder: Path, whole: Run, *steps: int, of: Path | None = None) -> Run:
    """Runs like ``whole`` in ``folder``, which has these iterations of ``of``."""
    run = whole.like(folder, program=PROGRAM)
    if of is not None:
        copy_iterations(of, run.checkpoints, *steps)
    return run


def use_section(run: Run, resume_training: bool, **section: Any) -> Run:
    """Gives ``run`` a configuration of its own: a ``checkpoint:`` section; of the older keys
    resume_training alone."""
    plain = {
        key: str(value) if isinstance(value, Path) else value for key, value in section.items()
    }
    return run.configure(
        {"load_checkpoint": "", "resume_training": resume_training, "checkpoint": plain}
    )


# ---- the runs ------------------------------------------------------------------------------------


def torn_first_save(run: Run) -> None:
    """Leaves the files of a training killed in its first save: of ours, and of mindformers (no
    tracker, half a file)."""
    attempt = attempt_name(5, "0001-0000beef")
    making, theirs = run.checkpoints / FOLDER / attempt, run.checkpoints / iteration_name(5)
    (making / FOLDER / attempt).mkdir(parents=True)
    theirs.mkdir()
    (making / f".{BOTH[0]}.0001-0000beef.mindresume-tmp").write_bytes(b"\0" * 1000)
    (theirs / BOTH[0]).write_bytes(b"\0" * 1000)


@pytest.fixture(scope="module")
def broken(whole_single, tmp_path_factory) -> SimpleNamespace:
    """``early``: its checkpoints as they were after the kill."""
    base = tmp_path_factory.mktemp("broken")
    run = in_folder(base / "run", whole_single)
    torn_first_save(run)
    status = start_recorded(run, FORMAT_2, PROCESS, kill="12@10").wait(LIMIT)
    # the process that writes ends what it has begun
    assert_no_process_left(run)
    shutil.copytree(run.checkpoints, base / "early")
    start_recorded(run, FORMAT_2, PROCESS).wait_for_success(LIMIT)
    return SimpleNamespace(run=run, root=run.checkpoints, early=base / "early", status=status)


@pytest.fixture(scope="module")
def alone(broken, whole_single, tmp_path_factory) -> SimpleNamespace:
    """``run``: mindformers alone resumes where ours was killed. ``back``: we resume from there,
    with its tracker set back."""
    base = tmp_path_factory.mktemp("alone")
    run, back = in_folder(base / "alone", whole_single), in_folder(base / "back", whole_single)
    shutil.copytree(broken.early, run.checkpoints)
    shutil.rmtree(run.checkpoints / FOLDER)
    start_recorded(run, FORMAT_2, "--no-mindresume").wait_for_success(LIMIT)
    shutil.copytree(run.checkpoints, back.checkpoints)
    (back.checkpoints / TRACKER).chmod(0o600)
    (back.checkpoints / TRACKER).write_text("35", encoding="utf-8")
    start_recorded(back, FORMAT_2).wait_for_success(LIMIT)
    return SimpleNamespace(run=run, back=back)


@pytest.fixture(scope="module")
def others(broken, whole_single, tmp_path_factory) -> SimpleNamespace:
    """Everything that starts from steps 30, 35 and 40."""
    base, root = tmp_path_factory.mktemp("others"), broken.root
    runs = SimpleNamespace(
        **{
            name: in_folder(base / name, whole_single)
            for name in (
                "saves",
                "weights",
                "stateless",
                "larger",
                "sinks",
            )
        },
        returned=in_folder(base / "returned", whole_single, 30, 35, 40, of=root),
    )
    flip_bit(runs.returned.checkpoints / iteration_name(35) / BOTH[1])
    (runs.returned.checkpoints / TRACKER).write_text("35", encoding="utf-8")
    use_section(
        runs.saves,
        False,
        save_path="./kept/here",
        save_max=2,
        save_interleaved_steps=2,
        no_save_optim=True,
        async_save=True,
        prefix="other",
        save_remove_redundancy=True,
        load_path=root / iteration_name(35),
        load_balanced=True,
        no_load_optim=False,
        reshard_worker_num=2,
    )
    use_section(runs.stateless, True, load_path=base / "absent")
    use_section(runs.returned, True, load_path="./output/checkpoint")
    use_section(runs.weights, False, load_path=root, no_load_optim=True)

    def saves_and_what_comes_of_it() -> None:
        start_recorded(runs.saves).wait_for_success(LIMIT)
        start_recorded(
            runs.stateless, f"--load_checkpoint {runs.saves.folder}/kept/here --epochs 5"
        ).wait(LIMIT)

    def twice_in_sinks() -> None:
        start_recorded(runs.sinks, FORMAT_2, SINKS, kill="20@16").wait(LIMIT)
        start_recorded(runs.sinks, FORMAT_2, SINKS).wait_for_success(LIMIT)

    in_parallel(
        saves_and_what_comes_of_it,
        twice_in_sinks,
        lambda: start_recorded(runs.returned).wait_for_success(LIMIT),
        lambda: start_recorded(runs.weights, "--epochs 1").wait_for_success(LIMIT),
        lambda: start_recorded(
            runs.larger,
            FORMAT_2,
            f"--load_checkpoint {root}/{iteration_name(30)} --batch_size 16",
            "--num_samples 160 --epochs 5 --callbacks.1.save_checkpoint_steps 4",
        ).wait_for_success(LIMIT),
    )
    return runs


# ---- interruption --------------------------------------------------------------------------------


def test_a_torn_first_save_is_a_fresh_start(broken, whole_single):
    assert selected_step(broken.run, attempt=0) is None and refused_steps(
        broken.run, attempt=0
    ) == [5, 5]
    assert_event(
        broken.run,
        "fresh_start",
        attempt=0,
        checkpoint_dir=contains("output/checkpoint"),
        is_expected=True,
    )
    first = broken.run.steps(0)
    assert broken.status == 128 + 9 and [row["step"] for row in first] == list(range(1, 13))
    assert differences(whole_single.steps()[:12], first) == []
    assert committed_steps(broken.run, 0) == [5, 10]
    assert iteration_steps(broken.early) == [5, 10] and tracker(broken.early) == 10
    assert iteration_files(broken.early, 5) == ["common.json", *BOTH]


def test_the_same_command_continues_bit_for_bit(broken, whole_single):
    assert_resumed(broken.run, whole_single, 10)
    assert not_equal(saved_tensors(broken.early, 10), parameters(broken.run, broken.root, 40)) == []


def parameters(run: Run, root: Path, step: int) -> dict[str, np.ndarray]:
    """Returns the parameters at the start of the last attempt, without transient state of a step.
    ``step``: one that it saved to ``root``."""
    loaded = loaded_tensors(run, layout_table(root, step))
    return {name: array for name, array in loaded.items() if not is_transient(name)}


def test_every_step_is_saved_once_the_last_one_too(broken):
    assert committed_steps(broken.run) == [15, 20, 25, 30, 35, 40]
    assert iteration_steps(broken.root) == [30, 35, 40] and tracker(broken.root) == 40


def test_the_folder_has_the_files_of_mindformers_and_our_records(broken, alone):
    """The same names, all of its tensors in the same file bit by bit, the same numbers, and nothing
    else beside .mindresume."""
    assert sorted(path.name for path in broken.root.iterdir()) == [
        FOLDER,
        *map(iteration_name, (30, 35, 40)),
        TRACKER,
    ]
    assert {path.name.partition("-")[0] for path in (broken.root / FOLDER).iterdir()} <= {"ended"}
    theirs = alone.run.checkpoints
    for step in (30, 35, 40):
        assert (
            iteration_files(broken.root, step)
            == iteration_files(theirs, step)
            == ["common.json", *BOTH]
        )
        known = common_json(theirs, step)
        assert known.pop("ckpt_status") is None and common_json(broken.root, step) == known
        for name in BOTH:
            ours, built_in = (
                tensors_in(root / iteration_name(step) / name) for root in (broken.root, theirs)
            )
            assert set(not_equal(ours, built_in)) == set(ours) - set(built_in) <= OF_TRAIN_STEP, (
                f"{name} of step {step}"
            )


def test_mindformers_alone_resumes_from_our_folder(alone, whole_single):
    assert alone.run.event_files() == []
    assert steps_of(alone.run) == list(range(11, 41))
    assert differences(whole_single.steps(), alone.run.steps()) == []


def test_a_mindformers_folder_whose_tracker_was_set_back_is_resumed(alone, whole_single):
    """Our step 40 takes the place of its step 40. What mindformers saved is not removed, and what
    we did counts."""
    run = alone.back
    assert_resumed(run, whole_single, 35)
    selected = assert_event(
        run, "checkpoint_selected", step=35, description=contains("iteration_00000035")
    )
    # mindformers saved it
    assert "run_id" not in selected and resume_summary(run)["random state"][0] == "absent"
    # which is newer than the tracker
    assert notices(run, "step 35", "step 40")
    assert tracker(run.checkpoints) == 40 and committed_steps(run) == [40]
    assert (
        set(
            not_equal(saved_tensors(run.checkpoints, 40), of_mindformers(alone.run.checkpoints, 40))
        )
        <= OF_TRAIN_STEP
    )
    assert set(iteration_steps(run.checkpoints)) >= {30, 35, 40}


def of_mindformers(root: Path, step: int) -> dict[str, np.ndarray]:
    arrays = {}
    for name in BOTH:
        arrays.update(tensors_in(root / iteration_name(step) / name))
    return {name: np.atleast_1d(array) for name, array in arrays.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_built_in_reads_it_without_a_trainer(broken, version):
    expect_readable(broken.root, of_network(saved_tensors(broken.root, 40)), None, version)


# ---- sinks ---------------------------------------------------------------------------------------


def test_sinks_that_do_not_divide_an_epoch(others, whole_single):
    """Sinks of 4 steps, epochs of 10: killed in sink 5, resumed from the end of sink 4, in the
    middle of epoch 2 of the data. st/cpu_cluster/model_build.py emulates the loop of a device."""
    run = others.sinks
    assert [row["step"] for row in run.steps(0)] == list(range(1, 21))
    assert differences(whole_single.steps()[:20], run.steps(0)) == []
    assert_resumed(run, whole_single, 16)
    # an epoch of mindformers is a sink
    assert_event(run, "progress_restored", step=16, epochs_done=4)
    assert (
        committed_steps(run, 0) == [8, 16]
        and committed_steps(run) == [24, 32, 40]
        and tracker(run.checkpoints) == 40
    )


# ---- the checkpoint: section ---------------------------------------------------------------------


def test_load_path_and_resume_training_resume(others, whole_single):
    """mindformers ignores the keys and starts at step 0. The tracker was set back to 35, which is
    damaged: 30, and not 40."""
    run = others.returned
    assert_resumed(run, whole_single, 30)
    assert_event(run, "candidate_refused", step=35, file=contains(BOTH[1]))
    assert notices(run, "step 35", "step 40") and 40 not in refused_steps(run)


def test_no_load_optim_false_resumes_without_resume_training(others, whole_single):
    assert_resumed(others.saves, whole_single, 35)


def test_every_key_of_saving(others, broken):
    """save_path, save_max, save_interleaved_steps, no_save_optim, async_save, prefix,
    save_remove_redundancy."""
    run, root = others.saves, others.saves.folder / "kept" / "here"
    assert (
        committed_steps(run) == [36, 38, 40]
        and iteration_steps(root) == [38, 40]
        and tracker(root) == 40
    )
    assert_event(run, "save_staged", step=36, name=contains("iteration_00000036"))
    model = "other-model-0000000-0000001.safetensors"
    assert iteration_files(root, 40) == ["common.json", model]
    whole = tensors_in(broken.root / iteration_name(40) / BOTH[0])
    assert not_equal(tensors_in(root / iteration_name(40) / model), whole) == []
    assert not run.checkpoints.exists() or not list(run.checkpoints.glob("iteration_*"))


def test_no_optimizer_in_the_checkpoint_is_an_error_that_names_the_key(others):
    run = others.stateless
    assert log_has(run, "--load_checkpoint", "checkpoint.load_path")
    assert_not_trained(run, 1)
    error = failure(run)
    assert "LoadError" in error and "no_save_optim" in error and "no_load_optim: True" in error


def test_no_load_optim_loads_weights_only(others, broken, whole_single):
    """Step 0, moments of zeros, the learning rate of a first step, the first data: only the weights
    are those of step 40."""
    run, saved = others.weights, saved_tensors(broken.root, 40)
    rows = run.steps(-1)
    assert steps_of(run) == list(range(1, 11)) and rows[0]["lr"] == whole_single.steps()[0]["lr"]
    assert [row["samples"] for row in rows] == [row["samples"] for row in whole_single.steps()[:10]]
    loaded = parameters(run, run.checkpoints, 10)
    moments = {name for name in saved if name.startswith("adam_")}
    assert len(moments) >= 20 and not any(loaded[name].any() for name in moments)
    weights = set(tensors_in(broken.root / iteration_name(40) / BOTH[0]))
    assert (
        weights
        and not_equal(
            {name: saved[name] for name in weights}, {name: loaded[name] for name in weights}
        )
        == []
    )
    assert int(loaded["global_step"][0]) == 0
    assert_event(run, "checkpoint_selected", step=40, weights_only=True)
    assert common_json(run.checkpoints, 10)["global_step"] == 10


# ---- another batch size, another data set --------------------------------------------------------


def test_twice_the_batch_of_another_data_set_for_more_epochs(others, broken):
    """Step 30 of 40, batch 8, 80 samples an epoch -> step 15, batch 16, 160 samples an epoch, of
        which three are done.

    step_scale = 8 / 16; initial_step = 30 * step_scale = 15; global_step = 30 * step_scale = 15"""
    run = others.larger
    assert_event(
        run,
        "progress_restored",
        step=15,
        epochs_done=3,
        global_batch_size=16,
        step_scale=0.5,
        saved_step=30,
    )
    assert notices(run, "num_samples", "80", "160", level="warning")
    # step: the optimizer's global_step
    rows = {row["step"]: row for row in run.steps(-1)}
    assert list(rows) == list(range(16, 36))
    assert [rows[step]["epoch"] for step in (16, 25, 26, 35)] == [4, 4, 5, 5]
    first = [row["samples"] for row in sorted(broken.run.steps(0), key=lambda row: row["step"])][
        :10
    ]
    assert [rows[step]["samples"] for step in range(16, 21)] == [
        first[i] + first[i + 1] for i in range(0, 10, 2)
    ]
    assert [rows[step]["samples"] for step in range(16, 26)] == [
        rows[step]["samples"] for step in range(26, 36)
    ]
    assert not {sample for step in range(21, 26) for sample in rows[step]["samples"]} & {
        s for row in first for s in row
    }
    loaded, saved = parameters(run, run.checkpoints, 28), saved_tensors(broken.root, 30)
    assert not_equal(saved, loaded) == ["global_step"] and int(loaded["global_step"][0]) == 15


def test_saves_count_in_steps_of_the_new_batch_size(others):
    root = others.larger.checkpoints
    assert committed_steps(others.larger) == [16, 20, 24, 28, 32, 35] and tracker(root) == 35
    assert common_json(root, 28) == {
        "epoch_num": 3,
        "step_num": 28,
        "global_step": 28,
        "loss_scale": 1.0,
        "global_batch_size": 16,
    }
    assert int(saved_tensors(root, 28)["global_step"][0]) == 28
