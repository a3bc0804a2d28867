"""What ``mindresume report`` says of a training that was killed once, against what its steps recorded themselves."""
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from st.jobs import Run


def told(run: Run, *arguments: str) -> dict:
    done = run.mindresume("report", str(run.folder), "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def story(tmp_path_factory, whole_single) -> SimpleNamespace:
    """Killed behind step 13 at the earliest, asked, and started again by the same command."""
    run = whole_single.like(tmp_path_factory.mktemp("report"))
    run.start().until(13)
    run.kill()
    between, would = told(run), run.which()["chosen"]["step"]
    run.start().ended()
    return SimpleNamespace(run=run, between=between, would=would, after=told(run, "-o", str(run.folder / "report.html")))


def test_behind_the_kill(story):
    life, = story.between["lives"]
    last = story.run.steps(0)[-1]["step"]
    assert life["end"] == "died" and "its process is gone" in life["why"]
    assert (life["first_step"], life["fresh"]) == (1, True) and last <= life["last_step"] <= last + 1
    assert story.between["steps"]["not_safe"] == life["last_step"] - story.would
    assert story.between["checkpoints"][0]["step"] >= story.would


def test_lives_are_those_that_were_recorded(story):
    first, second = story.after["lives"]
    recorded = [story.run.steps(0), story.run.steps(1)]
    assert (first["end"], second["end"]) == ("died", "finished")
    assert second["resumed_from"] == story.would == recorded[1][0]["step"] - 1
    assert (second["first_step"], second["last_step"]) == (recorded[1][0]["step"], recorded[1][-1]["step"])
    assert first["last_step"] == story.between["lives"][0]["last_step"]
    assert second["loss"]["last"] == pytest.approx(recorded[1][-1]["loss"], abs=1e-6)
    for life, rows in zip((first, second), recorded, strict=True):
        assert life["started"] < rows[0]["time"] <= rows[-1]["time"] <= life["ended"] + 1


def test_steps_lost_are_those_that_were_done_twice(story):
    twice = {row["step"] for row in story.run.steps(0)} & {row["step"] for row in story.run.steps(1)}
    first, second = story.after["lives"]
    assert len(twice) <= first["steps_lost"] == first["last_step"] - story.would <= len(twice) + 1
    assert (second["steps_lost"], story.after["steps"]["reached"]) == (0, 40)
    assert story.after["steps"]["done"] == 40 + first["steps_lost"]


def test_saves_are_every_fifth_step_and_the_newest_are_on_disk(story):
    first, second = ([save["step"] for save in life["saves"] if save["committed"]] for life in story.after["lives"])
    assert first == list(range(5, story.would + 1, 5)) and second == list(range(story.would + 5, 41, 5))
    assert [(row["step"], row["state"]) for row in story.after["checkpoints"]] == [(step, "complete") for step in (40, 35, 30)]


def test_seconds_are_all_of_them(story):
    seconds, lives = story.after["seconds"], story.after["lives"]
    assert seconds["total"] == pytest.approx(lives[-1]["ended"] - lives[0]["started"], abs=0.01)
    assert seconds["total"] == pytest.approx(sum(value for name, value in seconds.items() if name != "total"), abs=0.02)
    assert min(seconds["training"], seconds["starting"], seconds["down"], seconds["saving"]) > 0


def test_the_page_is_there(story):
    page, picture = map(Path, story.after["files"])
    text = page.read_text(encoding="utf-8")
    assert "0002-" in text and "<svg role=" in text and "<script" not in text
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
