"""One process: .ckpt files, and data sink mode."""

import subprocess
import sys

import pytest

from st.checkpoint_files import counter, meta, names, records, weights
from st.run_attempts import (
    assert_event,
    contains,
    in_parallel,
    run_beside,
    steps_of,
    train,
    train_well,
)
from st.training_run import Run, differences

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
    -1: (
        27,
        20,
        {step: f"qwen3_rank_0-{step // 10}_10.safetensors" for step in (10, 20)},
        {step: f"qwen3_rank_0_1-{step // 10}_10.safetensors" for step in (30, 40)},
    ),
}


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), -1])
def test_sink_mode_resumed_is_the_uninterrupted_run(whole_single, tmp_path, size):
    """Killed, inside a sink if its size allows. Also equal to a run without sink mode: sinks only
    decide when callbacks run. save_checkpoint_steps is 5: a sink that ends on or behind a multiple
    is saved, under a name of which epochs are sinks."""
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    killed, chosen, first, second = SINKS[size]
    extra = (
        f"--sink_mode True --runner_config.sink_size {size} --callbacks.1.keep_checkpoint_max 20"
    )
    train(run, extra, CPU_CLUSTER_KILL=f"0@{killed}")
    assert names(run) == first
    train_well(run, extra)
    assert [row["step"] for row in run.steps(0)] == list(range(1, killed + 1))
    assert steps_of(run) == list(range(chosen + 1, 41))
    assert differences(whole_single.steps()[:killed], run.steps(0)) == []
    assert differences(whole_single.steps(), run.steps(-1)) == []
    assert_event(run, "checkpoint_selected", step=chosen, description=contains(first[chosen]))
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
