"""st/training_run.py: which end of a job counts as success."""

import subprocess

import pytest

from mindresume.events.event_file import FOLDER
from st.training_run import Attempt, Run

STARTED = '{"event": "training_started"}\n'
ENDED = '{"event": "training_ended", "outcome": "%s"}\n'


def run_that_ended(folder, status, *logs):
    """Returns a run whose launcher ended with ``status``, and whose ranks recorded ``logs``."""
    (folder / "output" / FOLDER).mkdir(parents=True)
    (folder / "launcher_1.log").write_text("Training Over")
    (folder / "output" / "msrun_log").mkdir()
    (folder / "output" / "msrun_log" / "worker_0.log").write_text("Training Over")
    for rank, log in enumerate(logs):
        (folder / "output" / FOLDER / f"20261123T000000.000-rank_{rank}-1.jsonl").write_text(log)
    run = Run(folder, "quickstart_qwen3.yaml", folder, workers=len(logs), attempts=[Attempt()])
    run.process = subprocess.Popen(["sh", "-c", f"exit {status}"])
    return run


def test_a_crash_after_every_rank_has_finished_is_a_warning(tmp_path):
    run = run_that_ended(tmp_path, 139, STARTED + ENDED % "finished", STARTED + ENDED % "finished")
    with pytest.warns(UserWarning, match="crashed at its exit"):
        assert run.wait_for_success() is run


@pytest.mark.parametrize(
    "status, log",
    [
        (1, STARTED + ENDED % "finished"),
        (137, STARTED + ENDED % "finished"),
        (139, STARTED),
        (139, ""),
        (139, STARTED + ENDED % "failed"),
        (139, (STARTED + ENDED % "finished")[:-3]),
    ],
)
def test_every_other_failure_is_one(tmp_path, status, log):
    with pytest.raises(AssertionError, match=f"exit status {status}"):
        run_that_ended(tmp_path, status, STARTED + ENDED % "finished", log).wait_for_success()
