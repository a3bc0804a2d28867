"""A folder becomes one report: the ranks that are read, the notes about them, and the JSON
document."""

import json
import os
import time
from dataclasses import replace

import iteration_folders
from rank_folders import STORAGE, save, write_rank
from training_logs import RUNS, ZERO, Log, Training, check, fail, record, two_attempts

import mindresume
from mindresume import events as ev
from mindresume.events import FAILED
from mindresume.events.event_file import FOLDER
from mindresume.report.builder import build_report, defect_of, to_json
from mindresume.report.log_reader import RecordedEvent
from mindresume.resume.step_ledger import LedgerRun, StepLedger, StepRow


def made(folder, *more):
    return build_report(STORAGE, str(folder), str(folder / "checkpoint"), list(map(str, more)))


def info(folder, rank, log, name="log"):
    return log.write(folder / name / f"rank_{rank}" / "info.log")


def pipeline(at, first, last, value):
    log = Log().start(at).pipeline(at + 1)
    for step in range(first, last + 1):
        log.loss(at + 5 + step - first, step, value)
    return log


def test_the_log_of_one_rank_counts_once(tmp_path):
    for rank in range(4):
        info(tmp_path, rank, two_attempts())
        Log(printed=True).start(0).write(tmp_path / "msrun_log" / f"worker_{rank}.log")
    two_attempts().write_all(tmp_path)
    report = made(tmp_path)
    check(report, rank=0, loss_rank=None, steps_done=13, steps_lost=3, failures=1, notes=())
    # both logs of rank 0, both event files
    assert len(report.attempts) == 2 and len(report.read) == 4


def test_the_last_stage_of_each_attempt_if_the_number_of_ranks_changed(tmp_path):
    both = pipeline(0, 1, 5, 0.5)
    both.lines += pipeline(50, 4, 8, 0.5).lines
    info(tmp_path, 0, both)
    for rank, log in (
        (3, pipeline(0, 1, 5, 6.0)),
        (2, pipeline(0, 1, 5, 7.0)),
        (1, pipeline(50, 4, 8, 5.0)),
    ):
        info(tmp_path, rank, log)
    report = made(tmp_path)
    assert [set(attempt.losses.values) for attempt in report.attempts] == [{6.0}, {5.0}]
    assert report.loss_rank == 3 and len(report.read) == 3 and "1, 3" in report.notes[-1]


def test_a_missing_log_of_the_last_stage_is_reported(tmp_path):
    info(tmp_path, 0, pipeline(0, 1, 5, 0.5))
    assert "not the true one" in made(tmp_path).notes[-1]


def test_lost_steps_are_those_of_the_step_ledger(tmp_path):
    log = Training().start(0).fresh(1).run(2, RUNS[0]).loss(10, 10).loss(20, 20)
    log.start(40).resume(41, 10, RUNS[0]).run(42, RUNS[1]).loss(50, 20).write_all(tmp_path)
    info(tmp_path, 0, log)
    check(made(tmp_path), steps_done=30, steps_lost=10)
    for name, run, last in ((0, RUNS[0], 27), (1, RUNS[1], 21), (2, RUNS[2], 99)):
        ledger = StepLedger(str(tmp_path / FOLDER / f"{name}.steps"), LedgerRun(run))
        for step in range(1, last + 1):
            ledger.add(StepRow(step))
        ledger.close()
    (tmp_path / FOLDER / "3.steps").write_bytes(b"garbage")
    check(made(tmp_path), steps_done=38, steps_lost=17)


def test_missing_or_odd_input_is_reported(tmp_path):
    log = Training().loss(1, 1000).loss(2, 1010).loss(3, 1020, "nan")
    log.start(9).resume(10, 35, RUNS[0], after=17, scale=0.5).save(20, 25).write_all(tmp_path)
    Log().loss(1, 1000).loss(2, 1010).loss(3, 1020, "nan").write(
        tmp_path / "log" / "rank_0" / "info.log"
    )
    notes = " ".join(made(tmp_path).notes)
    for words in (
        "no event file of attempt 1",
        "no log of attempt 2",
        "begins within an attempt",
        "every 10 steps",
        "up to 9 more steps",
        "not finite",
        "The batch size changed",
    ):
        assert words in notes


def test_the_reason_comes_from_the_rank_that_failed_first(tmp_path):
    Training().start(0).fresh(1).run(2, RUNS[0]).steps(3, 1, 4).write_all(tmp_path)
    fail(tmp_path, 1, 9, "CollectiveError: rank 2 is gone")
    fail(tmp_path, 2, 8, "SaveError: full")
    (row,) = to_json(made(tmp_path))["attempts"]
    assert (row["outcome"], row["failed_rank"], row["reason"]) == (FAILED, 2, "SaveError: full")


def test_event_files_alone(tmp_path):
    for recorded in two_attempts().recorded:
        record(tmp_path, 0, recorded)
    report = made(tmp_path)
    check(report, rank=None, reached=10, failures=1)
    assert to_json(report)["goodput"] is None and "no log" in report.notes[0]


def test_a_log_of_another_time_zone_is_put_to_its_events(tmp_path):
    """The report is made on a machine elsewhere: the log has local times of the cluster, the events
    have the time since 1970."""
    away = 3 * 3600
    east = time.localtime(ZERO).tm_gmtoff + away
    training = two_attempts()
    for events in training.recorded:
        events[:] = [RecordedEvent(found.time - away, found.event) for found in events]
        at, started = events[0]
        events[0] = RecordedEvent(at, replace(started, utc_offset_seconds=east))
    training.write_all(tmp_path)
    report = made(tmp_path)
    assert report.seconds.productive == 10.0
    assert [round(row.started + away - ZERO, 3) for row in report.attempts] == [0, 40]


def test_logs_of_two_time_zones_are_reported(tmp_path):
    for number, offset in enumerate((86400, 72000)):
        record(
            tmp_path,
            0,
            [RecordedEvent(ZERO + 9 * number, ev.TrainingStarted("a", 1, 1, "x", offset))],
        )
    assert "+20 h, +24 h" in made(tmp_path).notes[-1]


def test_steps_that_the_next_start_would_do_again(tmp_path):
    save(tmp_path / "checkpoint", 5, world=1)
    Training().start(0).fresh(1).run(2, RUNS[0]).steps(3, 1, 8).write_all(tmp_path)
    # without the folder the checkpoints are unknown
    for name, risk, outcome in (("checkpoint", 3, FAILED), ("gone", None, "unknown")):
        report = build_report(STORAGE, str(tmp_path), str(tmp_path / name))
        check(report, steps_at_risk=risk, steps_lost=0)
        assert report.attempts[-1].outcome == outcome


def test_the_document_is_json_without_odd_numbers(tmp_path):
    info(tmp_path, 0, Log().start(0).loss(4, 1, "nan").loss(5, 2, "inf"))
    save(tmp_path / "checkpoint", 5)
    (row,) = json.loads(json.dumps(to_json(made(tmp_path)), allow_nan=False))["attempts"]
    assert row["loss"] == {"first": None, "last": None}
    assert row["saves"] is None  # unknown without events


def test_a_note_names_event_files_that_record_a_part_of_the_saves(tmp_path, monkeypatch):
    two_attempts().write_all(tmp_path)
    monkeypatch.setattr("mindresume.report.log_reader.LIMIT", 900)
    first, second = sorted((tmp_path / "mindresume_events").iterdir())
    assert first.stat().st_size > 450 and second.stat().st_size > 450
    (note,) = made(tmp_path).notes
    assert note.endswith("larger than is counted.") and f"({first.name}, {second.name})" in note
    monkeypatch.setattr("mindresume.report.log_reader.LIMIT", 1 << 24)
    assert made(tmp_path).notes == ()


def test_checkpoints_are_those_of_ls(tmp_path):
    root = tmp_path / "checkpoint"
    for step in (5, 10):
        save(root, step)
    os.truncate(next((root / "rank_2").glob("*-1_10.*")), 9)
    write_rank(root, 15, 0, 4)
    rows = made(tmp_path).checkpoints
    assert [(row.step, row.state) for row in rows] == [
        (15, "incomplete"),
        (10, "unusable"),
        (5, "complete"),
    ]
    assert "rank 2" in defect_of(rows[1]) and defect_of(rows[2]) == ""
    iteration_folders.save(tmp_path / "b" / "checkpoint", 20)
    for folder in (tmp_path, tmp_path / "b"):
        listed = mindresume.open(folder / "checkpoint").list().to_json()["checkpoints"]
        for row, info in zip(to_json(made(folder))["checkpoints"], listed, strict=True):
            row.pop("reason")
            assert row == {name: info[name] for name in row}
