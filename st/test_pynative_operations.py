"""To the file system, a save of the PyNative trainer is one of the graph trainer in Checkpoint 2.0:
the same calls, in the same order. So the drill and the simulation, which inject faults into each of
these calls, hold for both trainers.
"""

import os
import re
import subprocess
from itertools import groupby
from pathlib import Path

import pytest

from st.pynative_cases import OURS, each
from st.pynative_run import PynativeRun, why_not
from st.releases import python_of
from st.run_attempts import FIXTURES
from st.strace import TRACED, Call, read_trace
from st.test_syscalls import strace  # noqa: F401  a fixture
from st.training_run import ROOT, Run

# ruff: noqa: F811  strace is a fixture
STEPS = (5, 10)
CHANGES = [
    (r"(iteration_|step-)0*(\d+)", r"\1\2"),
    (r"\d{4}-[0-9a-f]{8}", "run"),
    (r"[A-Za-z0-9]+-(model|opt)-", r"\1-"),
    (r"\.[0-9a-f]{8,}", ".random"),
]


def watched(run: Run, trace: Path, *extra: object, **environment: str) -> list[Call]:
    """Starts the run under strace and returns the calls below its folder of checkpoints that change
    it."""
    prefix = (
        "strace",
        "-f",
        "--seccomp-bpf",
        "-y",
        "-s",
        "0",
        "-o",
        str(trace),
        "-e",
        f"trace={TRACED}",
    )
    run.start(*extra, prefix=prefix, **environment).wait_for_success()
    calls = read_trace(trace.read_text(), str(run.checkpoints))
    return [call for call in calls if call.changes and not call.error]


def saves(calls: list[Call]) -> list[str]:
    """Returns what the calls do to the checkpoints of STEPS and to the tracker, without numbers
    that each run draws anew. Several writes to a file are one. What the lease does depends on the
    time."""
    found = []
    for call in calls:
        text = f"{call.kind} {call.path}" + (f" -> {call.to}" if call.to else "")
        for old, new in CHANGES:
            text = re.sub(old, new, text)
        if "claim-" not in text and "probe-" not in text:
            found.append(text)
    first = next(number for number, text in enumerate(found) if f"step-{STEPS[0]}-" in text)
    return [text for text, _ in groupby(found[first:])]


@pytest.mark.soak
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@each("a save makes the calls of the graph trainer's, one by one", "1.9.0")
def test_a_save_makes_the_calls_of_the_graph_trainer(
    strace, sequences, data, tmp_path, release, workers, asynchronous
):
    graph = Run(tmp_path / "graph", str(FIXTURES / "mf190_20_single" / "config.yaml"), sequences)
    options = f"--runner_config.epochs 1 --callbacks.1.async_save {asynchronous}"
    of_graph = saves(watched(graph, tmp_path / "graph.trace", options))
    run = PynativeRun(tmp_path / "pynative", data=data, release=release)
    changes = {
        "training.steps": STEPS[-1],
        "checkpoint.async_save": asynchronous,
        "checkpoint.save_max": 5,
    }
    of_pynative = saves(watched(run, tmp_path / "pynative.trace", changes, **OURS))
    assert of_pynative == of_graph
    for step in STEPS:
        assert sum(f"step-{step}-" in text for text in of_pynative) > 20, of_pynative


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
