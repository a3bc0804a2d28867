"""Preemption: SIGTERM, to the launcher or to one rank, and mindformers' graceful exit. All ranks
save one step and end; the same command resumes from it.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from st.run_attempts import (
    LIMIT,
    assert_event,
    assert_no_process_left,
    assert_resumed,
    events,
    run_beside,
    steps_of,
)
from st.training_run import Run, differences

pytestmark = pytest.mark.timeout(1200)
CHECK = {"MINDRESUME_PREEMPTION_CHECK_INTERVAL": "0.5"}


def preempted_at(run: Run, whole: Run, status: int) -> int:
    """Returns the step after which the attempt stopped; it is saved and committed, and nothing
    behind it was trained."""
    assert run.wait(LIMIT) == status, run.log()[-3000:]
    assert_no_process_left(run)
    step = steps_of(run)[-1]
    assert run.which()["chosen"]["step"] == step
    assert differences(whole.steps()[:step], run.steps()) == []
    return step


def scheduler(run: Run) -> int:
    """Returns the process of MindSpore's scheduler: below the one that msrun has started."""
    return max(
        pid
        for pid in run.processes()
        if b"MS_ROLE=MS_SCHED" in Path(f"/proc/{pid}/environ").read_bytes()
    )


def resume(run: Run, whole: Run, step: int, command: str = "") -> None:
    run.start(command).wait_for_success(LIMIT)
    assert_resumed(run, whole, step)


# by default st/test_supervisor.py, through the supervisor, and the judge
@pytest.mark.soak
def test_sigterm_to_the_launcher_saves_and_ends_one_process(whole_single, tmp_path):
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    run.start("--callbacks.1.async_save thread")
    run.wait_for_step(11)
    os.kill(run.process.pid, signal.SIGTERM)
    step = preempted_at(run, whole_single, 143)
    assert_event(run, "preemption_requested", step=step, reason="SIGTERM")
    assert_event(run, "training_ended", outcome="preempted", reason="SIGTERM", step=step)
    resume(run, whole_single, step, "--callbacks.1.async_save thread")


# by default tests/coordination/test_preemption.py and the killed worker in st/test_supervisor.py
@pytest.mark.soak
def test_the_death_of_the_scheduler_is_a_failure_and_no_preemption(whole_two, tmp_path):
    """Without it each rank sends itself SIGTERM after 20 s, or fails in a collective before, as
    MindSpore closes its communication library: with an error, or with SIGSEGV in a thread of
    libmindspore_ops_cpu.so. msrun kills the others when the first one has ended."""
    run = run_beside(whole_two, tmp_path / "run", copied=False)
    run.start("--epochs 1000", **CHECK)
    run.wait_for_step(6)
    os.kill(scheduler(run), signal.SIGKILL)
    assert run.wait(LIMIT) not in (0, 143)
    assert_no_process_left(run)
    ended = [event for rank in range(2) for event in events(run, "training_ended", rank)]
    assert ended or f"Error code: -{signal.SIGSEGV.value}" in run.launcher_log()
    reasons = ("MindSpore sent SIGTERM to its own process", "between the scheduler and the worker")
    for event in ended:
        assert event["outcome"] == "failed" and any(text in event["reason"] for text in reasons)
    assert not [event for rank in range(2) for event in events(run, "preemption_requested", rank)]


def test_the_graceful_exit_file_saves_and_ends_all_ranks(whole_single, tmp_path):
    """The job ends with status 0 without a signal."""
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    run.start("--use_graceful_exit True")
    run.wait_for_step(11)
    (run.folder / "graceful_exit.json").write_text(
        json.dumps({"GracefulExit": 1}), encoding="utf-8"
    )
    step = preempted_at(run, whole_single, 0)
    (run.folder / "graceful_exit.json").unlink()
    resume(run, whole_single, step, "--use_graceful_exit True")
