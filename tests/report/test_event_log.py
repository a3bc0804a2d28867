"""Event files are found, and read without trusting them."""

import json
import os
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_logs import RUNS, ZERO, fail, record, two_attempts

from mindresume import events as ev
from mindresume.events.event_file import FOLDER, EventFile
from mindresume.report import log_reader
from mindresume.report.log_reader import (
    EventLog,
    Failure,
    RecordedEvent,
    failures_in,
    find_event_logs,
    parse_event,
    read_events,
)

SAVED = {"time": 5.0, "rank": 0, "event": "save_begun", "step": 7}
BEGUN = RecordedEvent(5.0, ev.SaveBegun(7))


def line(**changes):
    return json.dumps({**SAVED, **changes}).encode() + b"\n"


def written(path, *parts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(parts))
    return EventLog(str(path), 0)


def test_events_written_by_the_handler_are_read(tmp_path):
    recorded = two_attempts().recorded
    for events in recorded:
        record(tmp_path, 0, events)
    assert [list(read_events(log)) for log in find_event_logs([str(tmp_path)])] == recorded


def test_files_are_found_by_their_names_once_and_in_order(tmp_path):
    for name in (
        "20261121T200000-rank_0-9.jsonl",
        "20261121T190000.250-rank_12-9.jsonl",
        "notes.jsonl",
        "20261121T200000-rank_x-9.jsonl",
        "20261121T200000-rank_0-9.jsonl.swp",
    ):
        written(tmp_path / "output" / FOLDER / name)
    places = [tmp_path / "output", tmp_path / "output" / FOLDER, tmp_path / "gone"]
    found = find_event_logs(map(str, places))
    assert [(os.path.basename(log.path)[:15], log.rank) for log in found] == [
        ("20261121T190000", 12),
        ("20261121T200000", 0),
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"time": 5.0}',
        line(event="of_a_later_version"),
        line(step=-1),
        line(step=10**400),
        line(time="5"),
        line(time=-1),
        line(time=1e30),
        line(time=float("nan")),
        line()[:-9],
        b'{"time": 5, "time": 6}',
        b"[" * 100_000,
        line(extra=[[[0] * 40_000]]),
    ],
)
def test_an_invalid_line_is_skipped(tmp_path, text):
    assert parse_event(text.rstrip()) is None
    log = written(tmp_path / "x", text.rstrip() + b"\n", b"\xff" + line())  # its end is complete
    assert list(read_events(log))[-1:] == [BEGUN]


def test_fields_of_a_later_version_are_ignored():
    assert parse_event(line(colour="red").strip()) == BEGUN


@pytest.mark.parametrize("cut", range(1, len(line()), 7))
def test_a_torn_last_line_is_skipped_and_a_complete_one_after_a_torn_one_counts(tmp_path, cut):
    torn = line()[:cut]
    assert list(read_events(written(tmp_path / "x", line(), torn))) == [BEGUN]
    log = written(tmp_path / "x", torn, line(step=8), line(step=9))
    assert [event.step for _, event in read_events(log)] == [8, 9]


@pytest.mark.parametrize(
    "size", [3, log_reader.EVENT_LIMIT - 1, log_reader.EVENT_LIMIT, 3 * log_reader.EVENT_LIMIT + 5]
)
@pytest.mark.parametrize("filling", [b"\0", b"x"])
def test_holes_and_lines_that_are_too_long(tmp_path, size, filling):
    log = written(tmp_path / "x", line(), filling * size, line(step=8), line(step=9))
    steps = [event.step for _, event in read_events(log)]
    assert steps == ([7, 8, 9] if filling == b"\0" or size == 3 else [7, 9])


def test_memory_and_time_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "x"
    with open(path, "wb") as file:
        file.write(line())
        file.truncate(1 << 40)  # a hole of a terabyte
    assert list(read_events(EventLog(str(path), 0))) == [BEGUN]
    monkeypatch.setattr(log_reader, "FILE_LIMIT", 10 * len(line()))
    log = written(path, line() * 1000)
    assert len(list(read_events(log))) == 10
    monkeypatch.setattr(log_reader, "FILE_LIMIT", 1 << 40)
    written(path, b"x" * (32 << 20), b"\n", line())
    tracemalloc.start()
    assert list(read_events(log)) == [BEGUN]
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_long_texts_are_cut():
    found = parse_event(line(event="notice", text="x" * 100_000).strip())
    assert len(found.event.text) == 2000


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: os.symlink(path, path), lambda path: None]
)
def test_a_missing_file_has_no_events(tmp_path, make):
    path = str(tmp_path / "20261121T200000-rank_0-9.jsonl")
    make(path)
    assert list(read_events(EventLog(path, 0))) == []


@given(st.binary(max_size=300))
def test_no_content_is_an_error(content):
    for text in (
        content,
        b'{"time": 1.0, "event": ' + content,
        line().strip() + content,
        content + line().strip(),
    ):
        assert parse_event(text) is None or isinstance(parse_event(text), RecordedEvent)


def test_any_damage_to_a_file_is_no_error(tmp_path):
    path = record(tmp_path, 0, sum(two_attempts().recorded, []))
    whole, draw = path.read_bytes(), random.Random(5)
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 20)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        log = written(path, bytes(damaged))
        assert all(isinstance(found.event, ev.Event) for found in read_events(log))


def test_two_processes_in_one_file(tmp_path):
    """The same time, rank and process id, in two containers."""
    first, second = EventFile(str(tmp_path), 0), EventFile(str(tmp_path), 0)
    for step in (1, 2):
        first.handle(ev.SaveBegun(step), ZERO)
        second.handle(ev.SaveBegun(10 * step), ZERO)
    (log,) = find_event_logs([str(tmp_path)])
    assert [found.event.step for found in read_events(log)] == [1, 10, 2, 20]


def test_failures_of_other_ranks_by_time(tmp_path):
    fail(tmp_path, 1, 9, "CollectiveError: gone")
    fail(tmp_path, 2, 8, "SaveError: full", RUNS[3])
    saves = (ev.SaveFailed(5, "full"), ev.SaveFailed(None, "?"))
    record(tmp_path, 3, [RecordedEvent(ZERO + 4, event) for event in saves])
    fail(tmp_path, 0, 7, "of rank 0, which is in its own events")
    assert failures_in(find_event_logs([str(tmp_path)])) == [
        Failure(ZERO + 4, 3, "full", 5),
        Failure(ZERO + 8, 2, "SaveError: full", None, RUNS[3]),
        Failure(ZERO + 9, 1, "CollectiveError: gone"),
    ]
