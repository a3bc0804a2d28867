"""One file per run, written by rank 0 and by failing ranks; bounded in size and number."""
import json
import os

import pytest

from mindresume.events import FAILED, FINISHED, Notice, SaveBegun, SaveFailed, TrainingEnded, WorkProgress, event_file
from mindresume.events.event_file import FOLDER, EventFile


def lines_of(folder):
    return {name: [json.loads(line) for line in (folder / FOLDER / name).read_text().splitlines()]
            for name in sorted(os.listdir(folder / FOLDER))} if (folder / FOLDER).exists() else {}


def test_rank_0_writes_all_but_progress(tmp_path):
    file = EventFile(str(tmp_path), 0)
    file.handle(SaveBegun(5), 0.0)
    file.handle(WorkProgress("saving", 1, 2, 3.0), 1.0)
    file.handle(TrainingEnded(FINISHED), 2.0004)
    file.close()
    assert lines_of(tmp_path) == {f"19700101T000000.000-rank_0-{os.getpid()}.jsonl": [
        {"time": 0.0, "rank": 0, "event": "save_begun", "step": 5},
        {"time": 2.0, "rank": 0, "event": "training_ended", "outcome": "finished", "reason": ""}]}


@pytest.mark.parametrize("failure", [SaveFailed(5, "full"), TrainingEnded(FAILED, "ValueError: x")])
def test_another_rank_writes_when_it_fails_with_what_came_before(tmp_path, failure):
    file = EventFile(str(tmp_path), 3)
    for step in range(event_file.KEPT + 10):
        file.handle(SaveBegun(step), float(step))
    assert lines_of(tmp_path) == {}
    file.handle(failure, 999.0)
    file.handle(SaveBegun(1000), 1000.0)
    file.close()
    (rows,) = lines_of(tmp_path).values()
    assert rows[0]["step"] == 11 and [row["event"] for row in rows[-3:]] == ["save_begun", failure.kind, "save_begun"]
    assert len(rows) == event_file.KEPT + 1 and {row["rank"] for row in rows} == {3}


def test_a_rank_that_does_not_fail_leaves_nothing(tmp_path):
    file = EventFile(str(tmp_path), 1)
    file.handle(SaveBegun(5), 0.0)
    file.handle(TrainingEnded(FINISHED), 1.0)
    file.close()
    file.handle(SaveFailed(5, "behind the end"), 2.0)
    assert lines_of(tmp_path) == {}


def test_beyond_the_limit_only_failures_and_the_end_are_written(tmp_path):
    file = EventFile(str(tmp_path), 0, limit=200)
    for step in range(10):
        file.handle(SaveBegun(step), 0.0)
    file.handle(SaveFailed(10, "full"), 1.0)
    for _ in range(10):
        file.handle(TrainingEnded(FINISHED), 2.0)
    file.close()
    (rows,) = lines_of(tmp_path).values()
    assert [row["event"] for row in rows][:4] == ["save_begun"] * 3 + ["save_failed"]
    (path,) = (tmp_path / FOLDER).iterdir()
    assert path.stat().st_size <= 400


def test_a_long_text_is_cut(tmp_path):
    file = EventFile(str(tmp_path), 0)
    file.handle(Notice("x" * 100_000 + "\n\u2028\ud800"), 0.0)
    file.close()
    (rows,) = lines_of(tmp_path).values()
    assert len(rows) == 1 and len(rows[0]["text"]) == event_file.TEXT_LIMIT


def test_the_oldest_files_are_removed_when_a_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(event_file, "MAX_FILES", 3)
    (tmp_path / FOLDER).mkdir()
    for day in range(1, 6):
        (tmp_path / FOLDER / f"2020010{day}T000000-rank_0-1.jsonl").touch()
    (tmp_path / FOLDER / "notes.txt").touch()
    file = EventFile(str(tmp_path), 0)
    file.handle(SaveBegun(1), 1795411320.0)
    file.close()
    left = sorted(os.listdir(tmp_path / FOLDER))
    assert [name[:15] for name in left] == ["20200104T000000", "20200105T000000", "20261123T052200", "notes.txt"]


def test_a_failure_of_all_ranks_keeps_the_files_of_earlier_runs(tmp_path, monkeypatch):
    """One of 8,192 ranks failed, and the others because of it: each has a file."""
    monkeypatch.setattr(event_file, "MAX_FILES", 3)
    (tmp_path / FOLDER).mkdir()
    names = [f"2020010{day}T000000-rank_0-1.jsonl" for day in range(1, 5)]
    failed = [f"20200103T0000{second:02d}-rank_{second}-1.jsonl" for second in range(10, 30)]
    for name in names + failed:
        (tmp_path / FOLDER / name).touch()
    file = EventFile(str(tmp_path), 0)
    file.handle(SaveBegun(1), 1795411320.0)
    file.close()
    left = sorted(os.listdir(tmp_path / FOLDER))
    assert left[:-1] == sorted([*names[2:], *failed[:event_file.MAX_FAILED]])


def test_a_folder_that_cannot_be_made_is_an_error_for_the_emitter(tmp_path):
    (tmp_path / FOLDER).touch()
    with pytest.raises(OSError):
        EventFile(str(tmp_path), 0).handle(SaveBegun(1), 0.0)


def test_a_disk_that_takes_half_of_a_line_is_an_error(tmp_path, monkeypatch):
    file = EventFile(str(tmp_path), 0)
    file.handle(SaveBegun(1), 0.0)
    write = os.write
    monkeypatch.setattr(event_file.os, "write", lambda where, data: write(where, data[:5]))
    with pytest.raises(OSError, match="5 of"):
        file.handle(SaveBegun(2), 0.0)
