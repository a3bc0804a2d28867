"""One file per run, written by rank 0 and by failing ranks; bounded in size and number."""

import errno
import json
import os
import resource
from pathlib import Path

import pytest
from training_logs import events_in

from mindresume.events import (
    FAILED,
    FINISHED,
    Notice,
    SaveBegun,
    SaveFailed,
    TrainingEnded,
    WorkProgress,
    event_file,
)
from mindresume.events.event_file import FOLDER, EventFile


def lines_of(folder):
    return (
        {
            name: [json.loads(line) for line in (folder / FOLDER / name).read_text().splitlines()]
            for name in sorted(os.listdir(folder / FOLDER))
        }
        if (folder / FOLDER).exists()
        else {}
    )


def test_rank_0_writes_all_but_progress(tmp_path):
    ended = TrainingEnded(FINISHED)
    handled(EventFile(str(tmp_path), 0), SaveBegun(5), WorkProgress("saving", 1, 2, 3.0), ended)
    assert lines_of(tmp_path) == {
        f"19700101T000000.000-rank_0-{os.getpid()}.jsonl": [
            {"time": 0.0, "rank": 0, **SaveBegun(5).to_json()},
            {"time": 2.0, "rank": 0, **ended.to_json()},
        ]
    }


@pytest.mark.parametrize("failure", [SaveFailed(5, "full"), TrainingEnded(FAILED, "ValueError: x")])
def test_another_rank_writes_its_earlier_events_when_it_fails(tmp_path, failure):
    file = EventFile(str(tmp_path), 3)
    for step in range(event_file.KEPT + 10):
        file.handle(SaveBegun(step), float(step))
    assert lines_of(tmp_path) == {}
    handled(file, failure, SaveBegun(1000))
    (rows,) = lines_of(tmp_path).values()
    kinds = [row["event"] for row in rows[-3:]]
    assert rows[0]["step"] == 11 and kinds == ["save_begun", failure.kind, "save_begun"]
    assert len(rows) == event_file.KEPT + 1 and {row["rank"] for row in rows} == {3}


def test_a_rank_that_does_not_fail_leaves_nothing(tmp_path):
    file = handled(EventFile(str(tmp_path), 1), SaveBegun(5), TrainingEnded(FINISHED))
    file.handle(SaveFailed(5, "behind the end"), 2.0)
    assert lines_of(tmp_path) == {}


def test_beyond_the_limit_only_failures_and_the_end_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(event_file, "LIMIT", 200)
    begun = [SaveBegun(step) for step in range(10)]
    ended = [TrainingEnded(FINISHED)] * 10
    file = EventFile(str(tmp_path), 0)
    handled(file, *begun, SaveFailed(10, "full"), *ended)
    (rows,) = lines_of(tmp_path).values()
    assert [row["event"] for row in rows][:4] == ["save_begun"] * 3 + ["save_failed"]
    assert os.path.getsize(file.path) <= 400


def test_a_long_text_is_cut(tmp_path):
    handled(EventFile(str(tmp_path), 0), Notice("x" * 100_000 + "\n\u2028\ud800"))
    ((row,),) = lines_of(tmp_path).values()
    assert len(row["text"]) == event_file.TEXT_LIMIT


def test_the_oldest_files_are_removed_when_a_run_starts(tmp_path, monkeypatch):
    """One of 8,192 ranks failed, and the others because of it: each has a file."""
    monkeypatch.setattr(event_file, "MAX_FILES", 3)
    names = [f"2020010{day}T000000-rank_0-1.jsonl" for day in range(1, 5)]
    failed = [f"20200103T0000{second:02d}-rank_{second}-1.jsonl" for second in range(10, 30)]
    kept = [*names[2:], *failed[: event_file.MAX_FAILED], "notes.txt"]
    assert begun(tmp_path, [*names, *failed, "notes.txt"]) == sorted(kept)


# ---- a disk that fails ---------------------------------------------------------------------------


class Log:
    """A training's events: the file and what else its emitter passes on."""

    def __init__(self, folder, rank=0):
        self.folder, self.notices, self.time = folder, [], 0.0
        self.file = EventFile(str(folder), rank, self.emit)

    def emit(self, event):
        for handler in (self, self.file):
            handler.handle(event, self.time)

    def handle(self, event, time_s):
        if isinstance(event, Notice):
            self.notices.append(event.level)

    def close(self):
        pass

    def read(self, *kinds):
        """What the report reads, in order."""
        return events_in(self.folder, *kinds)

    def steps(self):
        return [event.step for event in self.read(SaveBegun)]


class Disk:
    """In the place of ``os`` in the module: the next writes fail as ``faults`` say, one each. None:
    no fault; a number: only so many bytes are written; an error: raised."""

    def __init__(self, monkeypatch):
        self.faults = []
        self._write = os.write
        monkeypatch.setattr(event_file.os, "write", self.write)

    def write(self, where, data):
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, OSError):
            raise fault
        return self._write(where, data if fault is None else data[:fault])


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fault", [OSError(errno.EIO, os.strerror(errno.EIO)), 0, 20])
def test_after_a_write_that_fails_the_later_events_are_written(tmp_path, monkeypatch, fault):
    disk, log = Disk(monkeypatch), Log(tmp_path)
    log.emit(SaveBegun(1))
    disk.faults = [fault]
    for event in (SaveBegun(2), SaveBegun(3), SaveFailed(4, "no room")):
        log.emit(event)
    assert log.steps() == [1, 3] and log.read(SaveFailed) == [SaveFailed(4, "no room")]
    assert log.notices == ["warning", "info"]


@pytest.mark.parametrize("fault", [FULL, 20])
def test_while_the_disk_is_full_exactly_those_events_are_missing_and_one_warning_says_so(
    tmp_path, monkeypatch, fault
):
    disk, log = Disk(monkeypatch), Log(tmp_path)
    # 100 events fail, and the warning; then every other write for 20 minutes
    disk.faults = [None, *[fault] * 101]
    for step in range(1, 102):
        log.emit(SaveBegun(step))
    assert log.notices == ["warning"] and not disk.faults
    for step in (102, 103):
        log.emit(SaveBegun(step))
    assert log.steps() == [1, 102, 103] and log.notices == ["warning", "info"]
    for log.time in range(60, 1200, 60):
        disk.faults = [FULL, None]
        for _ in range(3):
            log.emit(SaveBegun(int(log.time)))
    assert log.notices == ["warning", "info"] * 2
    assert {600, 1140} <= set(log.steps())


@pytest.mark.parametrize("fault", [FULL, 20])
def test_the_failure_of_another_rank_is_recorded_when_there_is_room_again(
    tmp_path, monkeypatch, fault
):
    """The same full disk lets a save fail and the line about it."""
    disk, log = Disk(monkeypatch), Log(tmp_path, rank=3)
    log.emit(SaveBegun(5))
    # of the failure, and of the warning
    disk.faults = [fault, fault]
    log.emit(SaveFailed(5, "no room"))
    log.emit(SaveBegun(10))
    log.emit(TrainingEnded(FAILED, "no room"))
    assert log.read()[-1] == TrainingEnded(FAILED, "no room") and log.steps() == [10]


def test_a_folder_that_cannot_be_made_is_tried_again_and_no_event_is_lost(tmp_path):
    log = Log(tmp_path, rank=3)
    (tmp_path / FOLDER).touch()
    log.emit(SaveBegun(5))
    log.emit(SaveFailed(5, "no room"))
    assert log.notices == ["warning"]
    (tmp_path / FOLDER).unlink()
    log.emit(SaveBegun(10))
    assert log.steps() == [5, 10] and log.read(SaveFailed) == [SaveFailed(5, "no room")]
    assert log.notices == ["warning", "info"]


def test_a_line_that_the_system_itself_cuts(tmp_path):
    """A limit on the size of files acts as a full disk: a short write, then an error."""
    log = Log(tmp_path)
    log.emit(SaveBegun(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(log.file.path) + 20, before[1]))
    try:
        for step in (2, 3):
            log.emit(SaveBegun(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.emit(SaveBegun(4))
    assert log.steps() == [1, 4] and log.notices == ["warning", "info"]


def test_the_limit_counts_torn_lines_too(tmp_path, monkeypatch):
    monkeypatch.setattr(event_file, "LIMIT", 1000)
    disk, log = Disk(monkeypatch), Log(tmp_path)
    for step in range(100):
        disk.faults = [20]
        log.emit(SaveBegun(step))
        log.emit(SaveFailed(step, "no room"))
    log.emit(TrainingEnded(FINISHED))
    assert 1800 < os.path.getsize(log.file.path) <= 2000


def begun(folder, names):
    """Returns the names that are left after the first event of a new run."""
    for name in names:
        (folder / FOLDER).mkdir(exist_ok=True)
        (folder / FOLDER / name).touch()
    file = EventFile(str(folder), 0)
    file.handle(SaveBegun(1), 1795411320.0)
    file.close()
    *left, new = sorted(os.listdir(folder / FOLDER), key=lambda name: name == Path(file.path).name)
    assert new.startswith("20261123T052200")
    return sorted(left)


def handled(file, *events):
    for at, event in enumerate(events):
        file.handle(event, float(at))
    file.close()
    return file
