"""A training that records something at each step for weeks: the newest events are always there, in
a file of bounded size."""

import json
import os
from pathlib import Path

import pytest

from mindresume.events import (
    CandidateRefused,
    GaveUp,
    Notice,
    RankDied,
    SaveBegun,
    SaveCommitted,
    SaveWritten,
    SupervisorEnded,
    TrainingEnded,
    event_file,
)
from mindresume.events.event_file import OFTEN, EventFile, SupervisorEventFile

LIMIT = 400_000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(event_file, "LIMIT", LIMIT)


def recorded(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def frequent(number):
    return Notice(f"step {number} was saved into memory")


def test_events_at_each_step_are_thinned_out_and_never_end(tmp_path):
    warnings = []
    file = EventFile(str(tmp_path), 0, warnings.append)
    for number in range(30_000):
        file.handle(frequent(number), number)
        if number % 3000 == 0:
            file.handle(CandidateRefused(number, "damaged"), number)
    file.handle(TrainingEnded("finished"), 30_000)
    rows = recorded(file.path)
    steps = [int(row["text"].split()[1]) for row in rows if row["event"] == Notice.kind]
    assert steps[:OFTEN] == list(range(OFTEN)) and steps == sorted(set(steps))
    gaps = [later - now for now, later in zip(steps, steps[1:], strict=False)]
    assert gaps == sorted(gaps)  # ever larger ones
    assert 30_000 - steps[-1] <= 4 * gaps[-1] and sum(gap > 1 for gap in gaps) > 100
    assert os.path.getsize(file.path) <= LIMIT
    (warned,) = warnings
    assert file.path in warned.text and "half full" in warned.text
    # what occurs rarely
    kinds = [row["event"] for row in rows]
    assert kinds.count(CandidateRefused.kind) == 10 and kinds[-1] == TrainingEnded.kind


def test_of_a_save_all_events_are_recorded_or_none(tmp_path):
    """Although the first commit is that of a save of an earlier run."""
    file = EventFile(str(tmp_path), 0)
    file.handle(SaveCommitted(5, 1, 10, "0001-0000aaaa"), 0)
    for step in range(1, 8000):
        for event in (SaveBegun(step), SaveWritten(step, 10, 0.5, 0.5), SaveCommitted(step, 1, 10)):
            file.handle(event, step)
    kinds = {}
    for row in recorded(file.path)[1:]:
        kinds.setdefault(row.get("step"), set()).add(row["event"])
    assert 1000 < len(kinds) < 7000
    assert [step for step, found in kinds.items() if step is not None and len(found) != 3] == []


def test_the_end_of_a_supervisor_is_recorded_after_thousands_of_starts(tmp_path):
    file = SupervisorEventFile(str(tmp_path), 0)
    for number in range(100):
        file.handle(
            RankDied(number, "node-0", 1, 0, -9, "training", 5, ("error " * 300,) * 12), number
        )
    for number in range(OFTEN):
        file.handle(Notice(f"notice {number}"), 100)  # until nothing more fits
    file.handle(GaveUp(137, "a crash loop", 100), 100)
    file.handle(SupervisorEnded(137, "a crash loop", 100), 101)
    kinds = [row["event"] for row in recorded(file.path)]
    assert kinds.count(RankDied.kind) < 100 and kinds[-2:] == [GaveUp.kind, SupervisorEnded.kind]
