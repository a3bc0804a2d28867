"""Resumes of the real Trainer that go wrong behind all checks: the proof of the resume finds each,
at the step and by the number that docs/reliability.md says, and nothing in one that is right."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from st.layout_runs import Layout
from st.programs.faulty_resume import (
    DROPOUT,
    FAULT,
    FAULTS,
    FOLDER,
    FOUR,
    ONE,
    OTHER,
    PYNATIVE,
    SINKS,
    TENSOR,
    TWO,
    UNSEEN,
    Fault,
)
from st.pynative_cases import DECAY, OURS, dies
from st.pynative_run import PynativeRun
from st.run_attempts import LIMIT, PROGRAMS, assert_event, events, failure
from st.training_run import ONE_LAYER, Run, make_data

STEP, PYNATIVE_STEP = 35, 10
SOAK = pytest.mark.soak
# one of each way to find it
ALWAYS = (
    "one bit changed after the load",
    "one tensor read wrong by 0.1 %",
    "moments zero",
    "samples shifted by one",
)


@pytest.fixture
def finished(request, data, device, graphs, trained) -> Callable[[str], Run]:
    """finished(kind): the training whose last steps are trained again."""

    def single(name: str, options: str, workers: int = 1) -> Run:
        run = Run(
            Path(),
            "quickstart_qwen3.yaml",
            data,
            workers,
            device=device,
            options=f"{ONE_LAYER} {options}",
            graphs=graphs,
        )
        return trained(name, run)

    def pynative(name: str, changes: dict) -> Run:
        run = PynativeRun(Path(), data=data, changes={**DECAY, **changes})
        play = lambda run: dies(run.start(CPU_CLUSTER_KILL="all@13", **OURS))  # noqa: E731
        return trained(name, run, play)

    def tensor() -> Run:
        return single("proof_tensor", Layout(1, 2).options, 2)

    makers = {
        ONE: lambda: request.getfixturevalue("whole_single"),
        TWO: lambda: request.getfixturevalue("whole_two"),
        FOUR: lambda: request.getfixturevalue("whole_four"),
        SINKS: lambda: single("proof_sinks", "--sink_mode True --runner_config.sink_size 1"),
        TENSOR: tensor,
        OTHER: tensor,
        PYNATIVE: lambda: pynative("proof_pynative", {}),
        DROPOUT: lambda: pynative("proof_dropout", {"model.hidden_dropout": 0.1}),
    }
    return lambda kind: makers[kind]()


@pytest.fixture
def resume(finished, tmp_path):
    """resume(fault): the last steps of the finished training are trained again."""

    def run(fault: Fault, name: str = "", **settings: str) -> Run:
        whole = finished(fault.kind)
        again = whole.like(tmp_path / "run", program=PROGRAMS / "faulty_resume.py")
        shutil.copytree(whole.folder / "output", tmp_path / "run" / "output")
        settings = {FAULT: name, FOLDER: str(again.checkpoints), **settings}
        if isinstance(whole, PynativeRun):
            changes = {}
            if "another data set" in name:
                make_data(tmp_path / "other", "--samples", "200")
                file = str(tmp_path / "other" / "mcore.mindrecord")
                changes = {"train_dataset.dataloader.dataset_files": file}
            again.resume(changes, **OURS, **settings).wait(LIMIT)
            return again
        for path in (again.checkpoints / ".mindresume").glob("step-*"):
            if int(path.name.split("-")[1]) > STEP:
                shutil.rmtree(path)
        if fault.kind == OTHER:
            again.workers, again.options = 1, f"{ONE_LAYER} --auto_trans_ckpt True"
        if fault.compiles:
            again.graphs = None
        again.start(fault.words, **settings).wait(LIMIT)
        return again

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else SOAK) for name in FAULTS]
)
def test_a_wrong_resume_is_noticed(resume, name):
    fault = FAULTS[name]
    run = resume(fault, name)
    if fault.found == UNSEEN:
        assert_event(run, "resume_proved", differences=0)
        assert events(run, "resume_differs") == []
        return
    if fault.found == "weights":
        assert run.process.returncode == 65 and failure(run).startswith("AlteredWeightsError")
    else:
        first = PYNATIVE_STEP if isinstance(run, PynativeRun) else STEP
        assert_event(run, "resume_differs", what=fault.found, step=first + fault.step)
    if name in ALWAYS:
        shown = run.mindresume("proof", str(run.folder / "output"))
        assert shown.returncode == 1 and "differs" in shown.stdout


def test_a_difference_stops_the_job_if_asked(resume):
    name = "learning rate one step ahead"
    run = resume(FAULTS[name], name, MINDRESUME_ON_RESUME_DIFFERENCE="stop")
    assert run.process.returncode == 66 and failure(run).startswith("ResumeDifferenceError")
    assert_event(run, "resume_differs", what="learning_rate", step=STEP + 1)


def test_a_resume_in_another_output_folder_is_compared(whole_single, tmp_path):
    """By what the damaged save of step 40 has copied of the ledger."""
    saves = tmp_path / "saves"
    shutil.copytree(whole_single.checkpoints, saves)
    weights = (saves / "rank_0").glob("*.safetensors")
    newest = max(weights, key=lambda path: path.stat().st_mtime)
    newest.write_bytes(newest.read_bytes()[:-1])
    again = whole_single.like(tmp_path / "run")
    again.start(f"--load_checkpoint {saves} --resume_training True").wait(LIMIT)
    assert_event(again, "resumed", step=STEP, lost_steps=5)
    proved = assert_event(again, "resume_proved", steps=5, differences=0, unproved="")
    assert proved["largest_loss_difference"] == 0 and "batch" in proved["compared"]


@pytest.mark.parametrize(
    "kind",
    [
        ONE,
        *(
            pytest.param(kind, marks=SOAK)
            for kind in (SINKS, TWO, TENSOR, OTHER, PYNATIVE, DROPOUT)
        ),
    ],
)
def test_a_resume_that_is_right_is_proved(resume, kind):
    run = resume(Fault(lambda: None, "", 0, kind=kind))
    steps = 2 if isinstance(run, PynativeRun) else 5
    proved = assert_event(run, "resume_proved", steps=steps, differences=0, unproved="")
    assert proved["largest_loss_difference"] <= (1e-6 if kind == OTHER else 0)
    assert proved["tensors"] > 30 and events(run, "resume_differs") == []
    shown = run.mindresume("proof", str(run.folder / "output"))
    assert shown.returncode == 0 and " proved " in shown.stdout
