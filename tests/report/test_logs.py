"""Lines of a log become events: both formats, torn lines, and what is none."""
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logfiles import RUNS, ZERO, Log, two_lives

from mindresume.report import logs
from mindresume.report.logs import Clock, Event, events_of, last_words, merged, parse
from mindresume.report.sources import LogFile


def event(log):
    found, = parse(log.lines[-1], Clock())
    return found


def said(text):
    return event(Log().ours(3, text))


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_a_loss_line(printed, sink):
    assert event(Log(printed).loss(61.25, 23, 4.25, 0.5, size=10, sink=sink)) == Event(ZERO + 61.25, logs.LOSS, 23, 4.25, 0.5)


@pytest.mark.parametrize("text, value", [("inf", math.inf), ("-inf", -math.inf), ("-0.500000", -0.5)])
def test_a_loss_that_is_unusual(text, value):
    assert event(Log().loss(1, 1, text)).value == value


def test_a_loss_that_is_no_number_is_an_event():
    assert math.isnan(event(Log().loss(1, 1, "nan")).value)


@pytest.mark.parametrize("text, expected", [
    ("saved step 15, 12.4 MiB in 0.10 s", Event(ZERO + 3, logs.SAVED, 15, 0.1)),
    ("step 15 committed: 4 ranks, 12.4 MiB", Event(ZERO + 3, logs.COMMITTED, 15)),
    ("step 15 was complete already and is committed now", Event(ZERO + 3, logs.LATE, 15)),
    ("step 15 is being saved as net_rank_0-2_5.safetensors; training stopped for 0.012 s",
     Event(ZERO + 3, logs.SAVING, 15, 0.012)),
    ("step 15 was not saved on rank 0: No space left (2 failed in a row)",
     Event(ZERO + 3, logs.FAILED, 15, text="rank 0: No space left (2 failed in a row)")),
    ("step 15 may not be saved on rank 0: the process that wrote it died (exit status -9). It counts if its record is there (1 "
     "failed in a row)",
     Event(ZERO + 3, logs.FAILED, 15, text="rank 0: the process that wrote it died (exit status -9). It counts if its record is "
                                           "there (1 failed in a row)")),
    ("step 15 is not saved: the save before is still being written (1 skipped so far)",
     Event(ZERO + 3, logs.SKIPPED, 15, text="the save before is still being written (1 skipped so far)")),
    ("step 15 is given up: not all ranks have saved it, and all have saved step 20",
     Event(ZERO + 3, logs.UNCOMMITTED, 15, text="is given up: not all ranks have saved it, and all have saved step 20")),
    ("not resuming from step 5: the save never completed", Event(ZERO + 3, logs.REFUSED, 5, text="the save never completed")),
    ("not resuming from step ?: no header [rank_0/x]", Event(ZERO + 3, logs.REFUSED, None, text="no header [rank_0/x]")),
    ("resume from step 25, epoch 3, x, run 0001-152e34b4, 4 ranks, every byte checked",
     Event(ZERO + 3, logs.RESUME, 25, text="epoch 3, x, run 0001-152e34b4, 4 ranks, every byte checked")),
    ("resume from complete weights", Event(ZERO + 3, logs.RESUME, text="complete weights")),
    ("continues after step 25 (epoch 2 done), global batch size 8, loss scale 1.0", Event(ZERO + 3, logs.CONTINUES, 25)),
    ("continues after step 17 (epoch 3 done), global batch size 16, loss scale None; steps scaled by 0.5 from 35",
     Event(ZERO + 3, logs.CONTINUES, 17, 35.0)),
    ("run 0001-15c09fda saves to /x as net-...", Event(ZERO + 3, logs.RUN, text="0001-15c09fda")),
    ("SIGTERM: the training saves step 20 and ends", Event(ZERO + 3, logs.LEAVING, 20)),
    ("left because of SIGTERM; start the same command again to go on", Event(ZERO + 3, logs.LEFT, text="SIGTERM")),
    ("the training is complete: step 40 is the end", Event(ZERO + 3, logs.COMPLETE, text="step 40 is the end")),
    ("removed step 5: kept the last 3", Event(ZERO + 3, logs.SAID, text="removed step 5: kept the last 3")),
])
def test_what_mindresume_says(text, expected):
    assert said(text) == expected


@pytest.mark.parametrize("text", ["saved step 15, 12.4 MiB in 0", "step 15 commi", "resume from st"])
def test_what_is_torn_says_nothing_of_a_step(text):
    assert said(text).step is None


def test_other_lines_are_no_events():
    text = Log().line(1, "set output path to '/x'").line(1, "  77.5% |███   | 117.0 samples/s/p  0:00:00 }").lines
    text += ["", "swap:[ParallelConfig]", "mindresume: saved step 5, 1 MiB in 1.00 s",
             "[INFO] 2026-13-41 20:00:00,000 [x] work: mindresume: fresh start: y"]
    assert [parse(line, Clock()) for line in text] == [[]] * 6


@pytest.mark.parametrize("torn", [Log().loss(5, 3), Log().ours(5, "saved step 3, 1.0 MiB in 1.00 s"), Log(True).save(5, 3)])
def test_a_line_glued_to_a_torn_one_is_an_event_of_its_own(torn):
    line, clock = torn.lines[-1], Clock()
    whole, = parse(line, clock)
    for cut in range(1, len(line) + 1):
        for other in (Log().start(90).lines[0], Log().loss(90, 4).lines[0], Log(True).save(90, 4).lines[0]):
            *before, last = parse(line[:cut] + other, clock)
            assert [last] == parse(other, clock)
            assert [event.time for event in before] in ([], [whole.time])
    assert parse(line + Log().start(90).lines[0], clock) == [whole, Event(ZERO + 90, logs.START)]


def test_a_log_cut_anywhere_gives_the_events_before(tmp_path):
    text = two_lives().text.encode()
    log = LogFile(0, (str(tmp_path / "info.log"),))
    (tmp_path / "info.log").write_bytes(text)
    whole = list(events_of(log))
    for cut in range(0, len(text), 37):
        (tmp_path / "info.log").write_bytes(text[:cut])
        part = list(events_of(log))
        assert part[:-1] == whole[:max(len(part) - 1, 0)]               # what the last line lost can be one of its words
        assert len(part) <= len(whole)


@given(st.binary(max_size=400))
def test_no_content_is_an_error(content):
    head = Log().line(1, "").lines[0].encode()
    for text in (content, head + content, head + b"mindresume: " + content, head + b"{ Epoch:[" + content):
        assert isinstance(parse(text.decode("utf-8", "replace"), Clock()), list)


def test_a_line_without_an_end_is_not_kept(tmp_path):
    path = tmp_path / "info.log"
    path.write_bytes(b"\0" * (3 * logs.LINE_LIMIT) + b"\n" + Log().start(7).text.encode())
    assert [found.time for found in events_of(LogFile(0, (str(path),)))] == [ZERO + 7]


def test_pieces_come_in_order_and_one_may_vanish(tmp_path):
    first, second = Log().start(1).write(tmp_path / "info.log.1"), Log().over(9).write(tmp_path / "info.log")
    found = events_of(LogFile(0, (str(first), str(tmp_path / "gone"), str(second))))
    assert [event.kind for event in found] == [logs.START, logs.OVER]


def test_what_a_worker_prints_and_logs_is_there_once(tmp_path):
    logged, printed = two_lives().write(tmp_path / "info.log"), two_lives(printed=True).write(tmp_path / "worker_0.log")
    files = [LogFile(0, (str(logged),)), LogFile(0, (str(printed),), worker=True)]
    assert list(merged(files)) == list(events_of(files[0]))


def test_logs_of_several_folders_are_one_by_time(tmp_path):
    old = Log().start(0).run(2, RUNS[0]).over(9).write(tmp_path / "old")
    new = Log().start(20).run(22, RUNS[1]).write(tmp_path / "new")
    times = [event.time - ZERO for event in merged([LogFile(0, (str(new),)), LogFile(0, (str(old),))])]
    assert times == [0, 2, 9, 20, 22]


def test_last_words_of_a_worker(tmp_path):
    path = Log(printed=True).start(0).loss(12.5, 1).write(tmp_path / "worker_2.log")
    log = LogFile(2, (str(path),), worker=True)
    assert last_words(log) is None
    with open(path, "a") as file:
        file.write("Traceback (most recent call last):\nrun_mindformer.py: failed on rank 2: SaveError: full\n")
    assert last_words(log) == Event(ZERO + 12.5, logs.ERROR, text="failed on rank 2: SaveError: full")
    assert last_words(LogFile(2, (str(tmp_path / "gone"),), worker=True)) is None
