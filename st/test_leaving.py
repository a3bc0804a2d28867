"""Leaving in time: SIGTERM, to the launcher or to one rank, and mindformers' graceful exit. All ranks save one step and end;
the same command goes on behind it.
"""
from __future__ import annotations

import json
import os
import signal

import pytest

from st.copies import LIMIT, beside, happened, records, said, steps_of
from st.jobs import Run, differences
from st.lives import assert_nothing_left

pytestmark = pytest.mark.timeout(1200)
CHECK = {"MINDRESUME_PREEMPTION_CHECK_INTERVAL": "0.5"}


def left(run: Run, whole: Run, status: int) -> int:
    """The step at which the life just ended left; it is saved and committed, and nothing behind it was trained."""
    assert run.wait(LIMIT) == status, run.log()[-3000:]
    assert_nothing_left(run)
    step = steps_of(run)[-1]
    assert run.which()["chosen"]["step"] == step
    assert differences(whole.steps()[:step], run.steps()) == []
    return step


def goes_on(run: Run, whole: Run, step: int, command: str = "") -> None:
    run.start(command).ended(LIMIT)
    said(run, f"mindresume: resume from step {step},")
    assert steps_of(run) == list(range(step + 1, 41))
    assert differences(whole.steps(), run.steps(-1)) == []


def test_the_platform_ends_the_launcher_of_one_process(whole_single, tmp_path):
    run = beside(whole_single, tmp_path / "run", copied=False)
    run.start("--callbacks.1.async_save thread")
    run.until(11)
    os.kill(run.process.pid, signal.SIGTERM)
    step = left(run, whole_single, 143)
    happened(run, "preemption_requested", step=step, reason="SIGTERM")
    happened(run, "training_ended", outcome="preempted", reason="SIGTERM", step=step)
    goes_on(run, whole_single, step, "--callbacks.1.async_save thread")


@pytest.mark.parametrize("command", ["", pytest.param("--use_legacy_format False", marks=pytest.mark.soak)])
def test_one_rank_is_told_and_all_leave(whole_several, tmp_path, command):
    run = beside(whole_several, tmp_path / "run", copied=False)
    run.start(command, **CHECK)
    run.until(11)
    os.kill(run.worker(run.workers - 1), signal.SIGTERM)
    step = left(run, whole_several, 143)
    if not command:
        assert {record.step for record in records(run).values()} >= {step}
    goes_on(run, whole_several, step, command)


def test_the_file_of_the_graceful_exit(whole_single, tmp_path):
    """Without a signal the job ends with status 0."""
    run = beside(whole_single, tmp_path / "run", copied=False)
    run.start("--use_graceful_exit True")
    run.until(11)
    (run.folder / "graceful_exit.json").write_text(json.dumps({"GracefulExit": 1}), encoding="utf-8")
    step = left(run, whole_single, 0)
    (run.folder / "graceful_exit.json").unlink()
    goes_on(run, whole_single, step, "--use_graceful_exit True")
