"""``mindresume run`` around the real Trainer in several processes: a rank is killed, the job ends
and starts again by itself."""

import os
import signal
import time
from pathlib import Path

import pytest

from st.run_attempts import (
    LIMIT,
    PROGRAMS,
    assert_no_process_left,
    committed_steps,
    events,
    run_beside,
    wrong_steps,
)
from st.supervised_run import supervised, supervisor_events
from st.training_run import Run

pytestmark = pytest.mark.timeout(1500)
LAST = 40


def train_until(run: Run, step: int) -> None:
    """Waits until the first start has committed a checkpoint and finished ``step``."""
    while not committed_steps(run):
        assert run.process.poll() is None, run.launcher_log()
        time.sleep(0.02)
    run.wait_for_step(step)


def assert_uninterrupted(run: Run, whole: Run) -> None:
    """Checks that every step of any start equals that of the uninterrupted run, and none is
    missing."""
    assert {row["step"] for row in run.steps()} == set(range(1, LAST + 1))
    assert wrong_steps(run, whole) == []


def test_ranks_that_hang_are_ended_after_their_stacks_are_written_and_resume(
    whole_several, tmp_path
):
    """One rank is suspended, so the others wait for it in a collective. It cannot write its own
    stacks."""
    run = supervised(
        run_beside(whole_several, tmp_path / "run", copied=False), "--hang-timeout", "15"
    )
    train_until(run, 8)
    os.kill(run.worker(1), signal.SIGSTOP)
    run.wait_for_success(LIMIT)
    assert_no_process_left(run)
    assert_uninterrupted(run, whole_several)
    (hang,) = supervisor_events(run, "hang_detected")
    assert (
        1 in hang["ranks"]
        and hang["phase"] in ("training", "saving")
        and len(hang["stacks"]) >= run.workers - 1
    )
    assert any("Thread" in Path(path).read_text(encoding="utf-8") for path in hang["stacks"])
    assert [event["status"] for event in supervisor_events(run, "job_ended")] == [124, 0]


def test_a_killed_worker_of_the_data_set_is_a_failure_and_the_job_starts_again(
    whole_single, tmp_path
):
    """MindSpore then sends SIGTERM to its own process, which is no preemption."""
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    run.program = PROGRAMS / "data_workers.py"
    supervised(run)
    train_until(run, 8)
    worker = next(run.folder.glob("data_worker_*"))
    os.kill(int(worker.name.rpartition("_")[2]), signal.SIGKILL)
    run.wait_for_success(LIMIT)
    assert_no_process_left(run)
    assert_uninterrupted(run, whole_single)
    (died,) = supervisor_events(run, "rank_died")
    assert died.get("status", 1) == 1 and any(
        "Dataset worker process" in line for line in died["log"]
    )
    assert [event["status"] for event in supervisor_events(run, "job_ended")] == [1, 0]
    failed, finished = events(run, "training_ended")
    assert (failed["outcome"], finished["outcome"]) == ("failed", "finished")
    assert "MindSpore sent SIGTERM to its own process" in failed["reason"]


def test_sigterm_to_the_supervisor_saves_and_stops(whole_several, tmp_path):
    run = supervised(run_beside(whole_several, tmp_path / "run", copied=False))
    train_until(run, 8)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(LIMIT) == 143
    assert_no_process_left(run)
    (ended,) = events(run, "training_ended")
    assert ended["outcome"] == "preempted" and committed_steps(run)[-1] == ended["step"]
    assert len(supervisor_events(run, "job_started")) == 1
