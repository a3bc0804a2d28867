"""To the file system, a save of the PyNative trainer is one of the graph trainer in Checkpoint 2.0:
the same calls, in the same order. So the drill and the simulation, which inject faults into each of
these calls, hold for both trainers.
"""

import re
import shutil
import subprocess
from itertools import groupby
from pathlib import Path

import pytest

from st.pynative_cases import OURS, each
from st.pynative_run import PynativeRun
from st.run_attempts import FIXTURES
from st.strace import TRACED, Call, read_trace
from st.training_run import Run

STEPS = (5, 10)
CHANGES = [
    (r"(iteration_|step-)0*(\d+)", r"\1\2"),
    (r"\d{4}-[0-9a-f]{8}", "run"),
    (r"[A-Za-z0-9]+-(model|opt)-", r"\1-"),
    (r"\.[0-9a-f]{8,}", ".random"),
]


@pytest.fixture(scope="module")
def strace() -> None:
    """Skips where it is missing or forbidden; st/test_syscalls.py fails then."""
    tried = ["strace", "-f", "-o", "/dev/null", "true"]
    if (
        shutil.which("strace") is None
        or subprocess.run(tried, capture_output=True, check=False).returncode
    ):
        pytest.skip("strace is not allowed here")


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
