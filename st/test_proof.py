"""Resumes of the real Trainer that go wrong behind all checks: the proof of the resume finds each,
and nothing in one that is right. docs/reliability.md has the table."""

import shutil

import pytest

from st.run_attempts import LIMIT, PROGRAMS, assert_event, events, failure
from st.training_run import Run

STEP = 30


@pytest.fixture
def resume(whole_single, tmp_path):
    """resume(fault): the finished training, whose steps after STEP are trained again."""

    def run(fault: str, **settings: str) -> Run:
        shutil.copytree(whole_single.folder / "output", tmp_path / "run" / "output")
        again = whole_single.like(tmp_path / "run", program=PROGRAMS / "faulty_resume.py")
        for path in (again.checkpoints / ".mindresume").glob("step-*"):
            if int(path.name.split("-")[1]) > STEP:
                shutil.rmtree(path)
        again.start(RESUME_FAULT=fault, **settings).wait(LIMIT)
        return again

    return run


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    "fault, what, step",
    [
        ("samples shifted", "batch", 31),
        pytest.param("stale tensor", "loss", 31, marks=SOAK),
        pytest.param("flipped bit read", "loss", 31, marks=SOAK),
        pytest.param("swapped tensors", "loss", 31, marks=SOAK),
        pytest.param("moments from the start", "loss", 32, marks=SOAK),
        pytest.param("optimizer one step ahead", "learning_rate", 31, marks=SOAK),
        pytest.param("one step ahead", "batch", 32, marks=SOAK),
    ],
)
def test_a_wrong_resume_is_noticed(resume, fault, what, step):
    run = resume(fault)
    assert_event(run, "resume_differs", what=what, step=step)
    assert run.process.returncode == 0
    shown = run.mindresume("proof", str(run.folder / "output"))
    assert shown.returncode == 1 and "differs" in shown.stdout and f"step {step}" in shown.stdout


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("flipped bit loaded", marks=SOAK),
        pytest.param("swapped tensors loaded", marks=SOAK),
    ],
)
def test_weights_that_change_after_the_load_end_the_job(resume, fault):
    run = resume(fault)
    assert run.process.returncode == 65 and failure(run).startswith("AlteredWeightsError")
    assert run.mindresume("proof", str(run.folder / "output")).returncode == 1


def test_a_difference_stops_the_job_if_asked(resume):
    run = resume("optimizer one step ahead", MINDRESUME_ON_RESUME_DIFFERENCE="stop")
    assert run.process.returncode == 66 and failure(run).startswith("ResumeDifferenceError")
    assert_event(run, "resume_differs", what="learning_rate", step=31)


def test_a_resume_that_is_right_is_proved(resume):
    run = resume("none")
    proved = assert_event(run, "resume_proved", steps=10, differences=0, unproved="")
    assert proved["largest_loss_difference"] == 0 and proved["tensors"] > 30
    assert events(run, "resume_differs") == []
    shown = run.mindresume("proof", str(run.folder / "output"))
    assert shown.returncode == 0 and " proved " in shown.stdout
