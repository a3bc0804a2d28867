"""The output of ``mindresume report`` on a training that was killed once, compared with its
recorded steps."""

import json
from types import SimpleNamespace

import pytest

from st.training_run import Run


def reported(run: Run, *arguments: str) -> dict:
    done = run.mindresume("report", str(run.folder), "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def training(tmp_path_factory, whole_single) -> SimpleNamespace:
    """Is killed after step 13 at the earliest, reported on, and started again by the same
    command."""
    run = whole_single.like(tmp_path_factory.mktemp("report"))
    run.start().wait_for_step(13)
    run.kill()
    between, expected = reported(run), run.which()["chosen"]["step"]
    run.start().wait_for_success()
    return SimpleNamespace(
        run=run,
        between=between,
        expected=expected,
        after=reported(run, "-o", str(run.folder / "report.html")),
    )


def test_after_the_kill(training):
    (attempt,) = training.between["attempts"]
    last = training.run.steps(0)[-1]["step"]
    assert (attempt["outcome"], attempt["failed_rank"], attempt["has_events"]) == (
        "failed",
        None,
        True,
    ) and attempt["reason"]
    assert (attempt["first_step"], attempt["is_fresh"]) == (1, True) and last <= attempt[
        "last_step"
    ] <= last + 1
    assert training.between["steps"]["at_risk"] == attempt["last_step"] - training.expected
    assert training.between["checkpoints"][0]["step"] >= training.expected


def test_attempts_match_the_recorded_ones(training):
    first, second = training.after["attempts"]
    recorded = [training.run.steps(0), training.run.steps(1)]
    assert (first["outcome"], second["outcome"]) == ("failed", "finished")
    assert second["resumed_from"] == training.expected == recorded[1][0]["step"] - 1
    assert second["resumed_run_id"] == first["run_id"] and not second["is_inferred"]
    assert (second["first_step"], second["last_step"]) == (
        recorded[1][0]["step"],
        recorded[1][-1]["step"],
    )
    assert first["last_step"] == training.between["attempts"][0]["last_step"]
    assert second["loss"]["last"] == pytest.approx(recorded[1][-1]["loss"], abs=1e-6)
    for attempt, rows in zip((first, second), recorded, strict=True):
        assert attempt["started"] < rows[0]["time"] <= rows[-1]["time"] <= attempt["ended"] + 1
    assert (training.after["restarts"], training.after["failures"]) == (1, 1)


def test_each_attempt_writes_one_event_file(training):
    files = sorted((training.run.folder / "output" / "mindresume_events").glob("*.jsonl"))
    assert len(files) == 2 and {str(path) for path in files} <= set(
        training.after["sources"]["read"]
    )
    assert training.after["notes"] == []
