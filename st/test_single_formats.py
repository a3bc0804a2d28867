"""One process: .ckpt files, data sink mode, and a folder that mindformers wrote without
mindresume."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindresume.formats.rank_folders import LABEL
from st.checkpoint_files import counter, meta, names, records, weights
from st.run_attempts import (
    FIXTURES,
    assert_event,
    contains,
    failure,
    in_parallel,
    resume_summary,
    run_beside,
    run_from_fixture,
    steps_of,
    train,
    train_well,
)
from st.training_run import ROOT, Run, differences

FIXTURE = "mf190_10_safetensors_single"


# ---- .ckpt ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory, data, device, graphs) -> tuple[Run, Run]:
    """Uninterrupted; and killed at the end of step 23, in the middle of an epoch and between two
    saves, then resumed."""
    base = tmp_path_factory.mktemp("llama")
    whole, broken = (
        Run(base / name, "quickstart_llama.yaml", data, device=device, legacy=True, graphs=graphs)
        for name in ("whole", "broken")
    )
    in_parallel(lambda: train_well(whole), lambda: train(broken, CPU_CLUSTER_KILL="0@23"))
    assert broken.process.returncode != 0 and steps_of(broken)[-1] == 23
    assert names(broken) == {
        10: "llama_rank_0-1_10.ckpt",
        15: "llama_rank_0-2_5.ckpt",
        20: "llama_rank_0-2_10.ckpt",
    }
    weights(broken, 20).write_bytes(b"")  # so that the resume starts inside an epoch
    return whole, train_well(broken)


def test_ckpt_resumed_in_mid_epoch_is_the_uninterrupted_run(llama):
    whole, broken = llama
    assert steps_of(whole) == list(range(1, 41)) and steps_of(broken) == list(range(16, 41))
    assert differences(whole.steps()[:23], broken.steps(0)) == []
    assert differences(whole.steps(), broken.steps(-1)) == []
    assert_event(
        broken, "checkpoint_selected", step=15, description=contains("llama_rank_0-2_5.ckpt")
    )


def test_a_callback_that_loads_other_weights_ends_the_job_before_it_trains(llama, tmp_path):
    """MindSpore's OnRequestExit loads what it finds under its name, after the checkpoint was
    loaded."""
    whole, _ = llama
    run, own = run_beside(whole, tmp_path / "run"), tmp_path / "rank_0" / "mine_train.ckpt"
    own.parent.mkdir()
    shutil.copy(weights(run, 30), own)
    last = "llama_rank_0-4_10.ckpt"
    # so that steps are left: it continues after step 35
    (run.checkpoints / "rank_0" / last).unlink()
    callbacks = [
        *yaml.safe_load((ROOT / "configs" / run.config).read_text(encoding="utf-8"))["callbacks"],
        {
            "type": "OnRequestExit",
            "file_name": "mine",
            "directory": str(tmp_path),
            "save_mindir": False,
        },
    ]
    train(run.configure({"callbacks": callbacks}))
    assert run.process.returncode == 65 and steps_of(run) == []
    assert "AlteredWeightsError" in failure(run) and "OnRequestExit" in failure(run)
    own.unlink()  # nothing to load: the same job trains
    train_well(run)
    assert (
        steps_of(run) == list(range(36, 41))
        and differences(whole.steps()[35:], run.steps(-1)) == []
    )


def test_ckpt_names_continue_from_the_absolute_step(llama):
    """Saves at 30, 35 and 40 as in the uninterrupted run, with the suffix of the second run."""
    whole, broken = llama
    assert names(whole) == {
        30: "llama_rank_0-3_10.ckpt",
        35: "llama_rank_0-4_5.ckpt",
        40: "llama_rank_0-4_10.ckpt",
    }
    assert names(broken, 2) == {
        30: "llama_rank_0_1-3_10.ckpt",
        35: "llama_rank_0_1-4_5.ckpt",
        40: "llama_rank_0_1-4_10.ckpt",
    }
    assert meta(broken) == {
        "last_epoch": 4,
        "last_step": 10,
        "last_ckpt_file": "llama_rank_0_1-4_10.ckpt",
    }
    assert [
        counter(weights(broken, 35), name)
        for name in ("step_num", "epoch_num", "global_step", "global_batch_size")
    ] == [35, 4, 35, 8]


def test_ckpt_files_are_read_by_mindspore(llama):
    """Byte by byte the same parameters in both runs, as MindSpore reads them."""
    whole, broken = llama
    code = (
        "import sys, mindspore as ms\n"
        "a, b = (ms.load_checkpoint(path) for path in sys.argv[1:])\n"
        "assert sorted(a) == sorted(b) and len(a) > 60, (len(a), len(b))\n"
        "wrong = [name for name in a if a[name].asnumpy().tobytes() != "
        "b[name].asnumpy().tobytes()]\n"
        "assert not wrong, wrong\n"
        "print(int(b['step_num']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(weights(whole, 40)), str(weights(broken, 40))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["40"]), done.stderr


# ---- sink mode -----------------------------------------------------------------------------------

SINKS = {
    1: (
        17,
        15,
        {step: f"qwen3_rank_0-{step}_1.safetensors" for step in (5, 10, 15)},
        {step: f"qwen3_rank_0_1-{step}_1.safetensors" for step in (20, 25, 30, 35, 40)},
    ),
    2: (
        17,
        16,
        {step: f"qwen3_rank_0-{step // 2}_2.safetensors" for step in (6, 10, 16)},
        {step: f"qwen3_rank_0_1-{step // 2}_2.safetensors" for step in (20, 26, 30, 36, 40)},
    ),
    -1: (
        27,
        20,
        {step: f"qwen3_rank_0-{step // 10}_10.safetensors" for step in (10, 20)},
        {step: f"qwen3_rank_0_1-{step // 10}_10.safetensors" for step in (30, 40)},
    ),
}


@pytest.fixture(scope="module")
def sunk(whole_single, tmp_path_factory) -> dict[int, Run]:
    """Returns, for each sink size, a run that was killed (inside a sink if its size allows) and
    resumed. It keeps all checkpoints."""
    base = tmp_path_factory.mktemp("sink")
    runs = {size: run_beside(whole_single, base / str(size), copied=False) for size in SINKS}

    def play(size: int) -> Run:
        extra = (
            f"--sink_mode True --runner_config.sink_size {size} "
            "--callbacks.1.keep_checkpoint_max 20"
        )
        train(runs[size], extra, CPU_CLUSTER_KILL=f"0@{SINKS[size][0]}")
        assert names(runs[size]) == SINKS[size][2]
        return train_well(runs[size], extra)

    in_parallel(*[lambda size=size: play(size) for size in SINKS])
    return runs


@pytest.mark.parametrize("size", SINKS)
def test_sink_mode_resumed_is_the_uninterrupted_run(sunk, whole_single, size):
    """Also equal to a run without sink mode: sinks only decide when callbacks run."""
    run, (killed, chosen, _, _) = sunk[size], SINKS[size]
    assert [row["step"] for row in run.steps(0)] == list(range(1, killed + 1))
    assert steps_of(run) == list(range(chosen + 1, 41))
    assert differences(whole_single.steps()[:killed], run.steps(0)) == []
    assert differences(whole_single.steps(), run.steps(-1)) == []
    assert_event(
        run, "checkpoint_selected", step=chosen, description=contains(SINKS[size][2][chosen])
    )


@pytest.mark.parametrize("size", SINKS)
def test_sink_mode_saves_on_absolute_multiples_under_the_names_of_sinks(sunk, size):
    """save_checkpoint_steps is 5: a sink that ends on or behind a multiple is saved. Epochs of a
    name are sinks."""
    run, (_, _, first, second) = sunk[size], SINKS[size]
    assert names(run, 1) == first and names(run, 2) == second
    steps = 10 if size == -1 else size
    assert meta(run) == {
        "last_epoch": 40 // steps,
        "last_step": steps,
        "last_ckpt_file": second[40],
    }
    for step, record in records(run).items():
        state = record.state
        assert (
            state.step,
            state.steps_per_epoch,
            state.global_step,
            state.sink_size,
            state.dataset_size,
        ) == (step, steps, step, steps, 10)
        assert counter(weights(run, step), "step_num") == step


# ---- written by mindformers alone ----------------------------------------------------------------


def test_a_folder_of_mindformers_is_resumed_to_the_same_losses(tmp_path, sequences, device):
    """mindformers 1.9.0 saved steps 5, 10 and 15 and was killed in step 18; we go on to the end,
    step 20."""
    run = run_from_fixture(FIXTURE, tmp_path / "run", sequences, device)
    before = {
        path.name: path.read_bytes() for path in (run.checkpoints / "rank_0").glob("*.safetensors")
    }
    train_well(run, "--load_checkpoint ./output/checkpoint --resume_training True")
    selected = assert_event(
        run, "checkpoint_selected", step=15, description=contains("qwen3_rank_0-2_5.safetensors")
    )
    # mindformers saved it
    assert "run_id" not in selected and resume_summary(run)["random state"][0] == "absent"
    expected = [
        row
        for row in json.loads((FIXTURES / FIXTURE / "losses.json").read_text())["uninterrupted"]
        if row["step"] > 15
    ]
    assert [(row["step"], row["hex"], row["batch"]) for row in run.steps()] == [
        (row["step"], row["hex"], row["batch"]) for row in expected
    ]
    assert [row["step"] for row in run.steps()] == [16, 17, 18, 19, 20]
    assert names(run) == {20: "qwen3_rank_0_1-2_10.safetensors"}
    # keep_checkpoint_max is 3, but these are not ours to remove
    for name, content in before.items():
        assert (Path(run.checkpoints) / "rank_0" / name).read_bytes() == content
    assert LABEL.encode() in weights(run, 20).read_bytes()[:100_000]
