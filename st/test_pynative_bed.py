"""The PyNative trainer of each release on CPU, with mindformers' own checkpointing: what the tests
of mindresume rest on.

A release that is not installed is skipped, with the reason.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mindresume.tensor_files import read_header
from st.pynative_run import PynativeRun, why_not
from st.releases import python_of
from st.training_run import ROOT, Attempt, differences

# a save every 5 steps, so the newest one of the killed run is that of step 10
STEPS, KILLED, SAVED = 20, 13, 10
TRACKER = "latest_checkpointed_iteration.txt"


def case(release: str, workers: int = 1) -> object:
    reason = why_not(release, workers)
    return pytest.param(
        (release, workers),
        id=f"{release}-{workers}",
        marks=pytest.mark.skipif(bool(reason), reason=reason),
    )


CASES = [case("1.9.0"), case("2.0.0"), case("2.1.0"), case("2.0.0", 2), case("2.1.0", 2)]


@pytest.fixture(scope="session")
def uninterrupted_pynative(shared, data) -> Callable[[str, int], PynativeRun]:
    """uninterrupted_pynative(release, workers): a run of 20 steps, made once for all tests. Read
    it, do not change it."""

    def found(release: str, workers: int) -> PynativeRun:
        def train(folder: Path) -> None:
            PynativeRun(
                folder, data=data, release=release, workers=workers
            ).start().wait_for_success()

        return PynativeRun(
            shared(f"pynative_{release}_{workers}", train),
            data=data,
            release=release,
            workers=workers,
            attempts=[Attempt()],
        )

    return found


@pytest.fixture(scope="module", params=CASES)
def whole(request, uninterrupted_pynative) -> PynativeRun:
    return uninterrupted_pynative(*request.param)


def numbers(run: PynativeRun, attempt: int = -1, rank: int = 0) -> list[int]:
    return [row["step"] for row in run.steps(attempt, rank)]


def tracked(run: PynativeRun) -> int:
    """The step that the built-in resumes from."""
    return int((run.checkpoints / TRACKER).read_text())


def model_files(run: PynativeRun, step: int) -> list[Path]:
    return sorted((run.checkpoints / f"iteration_{step:08d}").glob("*-model-*.safetensors"))


def test_a_training_is_recorded_and_saved(whole):
    rows = whole.steps()
    assert numbers(whole) == list(range(1, STEPS + 1)) and tracked(whole) == STEPS
    assert [row["opt_step"] for row in rows] == numbers(whole)
    assert [row["consumed"] for row in rows] in (
        [None] * STEPS,
        [8 * step for step in numbers(whole)],
    )
    assert (rows[-1]["consumed"] is not None) == (whole.release == "2.1.0")
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2  # the gradients are real
    samples = [
        sample
        for rank in range(whole.workers)
        for row in whole.steps(rank=rank)
        for sample in row["samples"]
    ]
    # one epoch, shared among the ranks
    assert len(samples) == len(set(samples)) == 160
    assert len(model_files(whole, STEPS)) == whole.workers


def test_the_built_in_resumes_bit_by_bit(whole, tmp_path):
    run = PynativeRun(tmp_path, data=whole.data, release=whole.release, workers=whole.workers)
    assert run.start(CPU_CLUSTER_KILL=f"all@{KILLED}").wait() in (-9, 137)
    assert numbers(run) == list(range(1, KILLED + 1)) and tracked(run) == SAVED
    run.resume().wait_for_success()
    assert numbers(run) == list(range(SAVED + 1, STEPS + 1))
    for rank in range(whole.workers):
        assert differences(whole.steps(rank=rank)[:KILLED], run.steps(0, rank)) == []
        assert differences(whole.steps(rank=rank), run.steps(-1, rank)) == []


@pytest.mark.parametrize("chosen", [case("2.0.0"), case("2.1.0")])
def test_float32_masters_of_bfloat16_weights_are_resumed(chosen, data, tmp_path):
    """The computation stays in float32: the CPU has no MatMul of bfloat16."""
    changes = {"model.params_dtype": "bfloat16", "training.steps": 10}
    whole, run = (
        PynativeRun(tmp_path / name, data=data, release=chosen[0], changes=changes)
        for name in ("whole", "run")
    )
    whole.start().wait_for_success()
    with open(next((whole.checkpoints / "iteration_00000010").glob("*-opt-*")), "rb") as file:
        masters = [
            name for name in read_header(file, file.name).tensors if name.startswith("main_param.")
        ]
    assert masters
    run.start(CPU_CLUSTER_KILL="0@8").wait()
    run.resume().wait_for_success()
    assert numbers(run) == [6, 7, 8, 9, 10] and differences(whole.steps(), run.steps(-1)) == []


@pytest.mark.soak
def test_the_built_in_reads_other_samples_in_the_epoch_after_a_resume(whole, tmp_path):
    """What mindformers does, so that a release that does otherwise is noticed: the samples that a
    resume skips are skipped again in each later epoch. Step 21 is the first of the second epoch.
    (2.1.0 goes back to the first sample only with a dynamic batch.)"""
    run = PynativeRun(
        tmp_path,
        data=whole.data,
        release=whole.release,
        workers=whole.workers,
        changes={"training.steps": STEPS + 3},
    )
    run.start(
        {"checkpoint.load_path": str(whole.checkpoints / "iteration_00000015")}
    ).wait_for_success()
    assert numbers(run) == list(range(16, STEPS + 4))
    samples = {row["step"]: row["samples"] for row in whole.steps()}
    assert [row["samples"] for row in run.steps()[5:]] == [samples[step] for step in (16, 17, 18)]


@pytest.fixture(scope="module")
def short(data) -> Callable[..., PynativeRun]:
    """short(folder, **environment): 1.9.0, ten steps, which end with a save, and their end."""
    reason = why_not("1.9.0")
    if reason:
        pytest.skip(reason)

    def trained(folder: Path, **environment: str) -> PynativeRun:
        run = PynativeRun(folder, data=data, changes={"training.steps": SAVED})
        run.start(**environment).wait()
        return run

    return trained


def test_a_process_dies_at_a_file_operation_of_a_save(short, tmp_path):
    run = short(tmp_path, CPU_CLUSTER_KILL_IN_SAVE=f"0@{SAVED}:2")
    assert run.process.returncode == -9 and "killed itself after step 10, before" in run.log()
    # a step is recorded after its save
    assert numbers(run) == list(range(1, SAVED)) and tracked(run) == 5
    assert (run.checkpoints / f"iteration_{SAVED:08d}").exists()


def test_a_process_dies_at_a_function_of_a_save_and_a_plug_in_is_imported(short, tmp_path):
    (tmp_path / "plug_in_of_test.py").write_text("print('plug-in: imported')\n", encoding="utf-8")
    place = f"0@{SAVED}:after:mindformers.checkpoint.checkpoint:CommonInfo.save_common"
    run = short(
        tmp_path / "run",
        CPU_CLUSTER_KILL_CALL=place,
        CPU_CLUSTER_PLUGIN="plug_in_of_test",
        PYTHONPATH=os.pathsep.join((str(ROOT), str(tmp_path))),
    )
    assert (
        run.process.returncode == -9
        and "after CommonInfo.save_common" in run.log()
        and "plug-in: imported" in run.log()
    )
    assert (run.checkpoints / f"iteration_{SAVED:08d}" / "common.json").exists() and tracked(
        run
    ) == 5


@pytest.mark.parametrize("release", ["2.0.0", "2.1.0"])
def test_backward_gives_the_gradients_of_mindspore(release):
    """The stand-in for hyper_parallel's ``enable_mindspore_backward_compat``."""
    if why_not(release):
        pytest.skip(why_not(release))
    code = """
import numpy as np
import mindspore as ms
from mindspore import Parameter, Tensor, ops
from st.cpu_cluster.pynative import backward
ms.set_device("CPU")
backward.enable()
weight = Parameter(Tensor(np.array([1.0, -2.0, 3.0], np.float32)), name="weight")
weight.requires_grad = True
x = Tensor(np.array([2.0, 5.0, 7.0], np.float32))
def loss_of(weight): return ops.tanh(weight * x * 0.1).sum() + (weight ** 3).mean()
expected = ms.grad(loss_of)(Tensor(weight.asnumpy())).asnumpy()
backward.enable()                                       # ms.grad has cleared the flag
loss = loss_of(weight)
assert weight.is_leaf and not loss.is_leaf and weight.grad is None
loss.backward(Tensor([1.0], ms.float32).reshape(()))
np.testing.assert_array_equal(weight.grad.asnumpy(), expected)
loss_of(weight).backward(Tensor(0.5, ms.float32))
np.testing.assert_allclose(weight.grad.asnumpy(), expected * 1.5, rtol=1e-6)
weight.grad = None
loss_of(weight.detach()); assert weight.grad is None
(weight * x).sum().backward()
assert weight.grad.asnumpy().tolist() == [2.0, 5.0, 7.0]
"""
    done = subprocess.run(
        [str(python_of(release)), "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
