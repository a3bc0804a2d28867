"""Lines of mindformers' log are parsed: both formats, torn lines, and what is none."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_logs import ZERO, Log, two_attempts

from mindresume.report import log_parser
from mindresume.report.log_parser import LogFile, LogLine, lines_of, merged, parse


def one(log):
    (found,) = parse(log.lines[-1])
    return found


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_a_loss_line(printed, sink):
    assert one(Log(printed).loss(61.25, 23, 4.25, 0.5, size=10, sink=sink)) == LogLine(
        ZERO + 61.25, log_parser.LOSS, 23, 4.25, 0.5
    )


@pytest.mark.parametrize(
    "text, value",
    [("inf", math.inf), ("-inf", -math.inf), ("-0.500000", -0.5), ("nan", math.nan)],
)
def test_a_loss_that_is_unusual(text, value):
    assert one(Log().loss(1, 1, text)).loss == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("counts", ["", "consumed_samples: 184, global_batch_size: 8, "])
@pytest.mark.parametrize(
    "text, value", [("  4.250000", 4.25), ("       inf", math.inf), (" -0.500000", -0.5)]
)
def test_a_loss_line_of_the_pynative_trainer(counts, text, value):
    log = Log().line(
        1,
        f"{{ step:[   23/   45], {counts}loss: {text}, per_step_time:    500ms, lr: 9.987942e-04, "
        f"grad_norm:   0.590214, throughput:   0.00T }}",
    )
    assert one(log) == LogLine(ZERO + 1, log_parser.LOSS, 23, value, 0.5)
    torn = log.lines[-1][: log.lines[-1].index("per_step")]
    assert parse(torn) == [] and len(parse(torn + log.lines[-1])) == 1


@pytest.mark.parametrize(
    "log, kind",
    [
        (Log().start(3), log_parser.START),
        (Log().over(3), log_parser.OVER),
        (Log().pipeline(3), log_parser.LAST_CARD),
    ],
)
def test_the_other_lines_of_mindformers(log, kind):
    assert one(log) == LogLine(ZERO + 3, kind)


def test_other_lines_are_ignored():
    text = (
        Log()
        .line(1, "set output path to '/x'")
        .line(1, "  77.5% |███   | 117.0 samples/s/p  0:00:00 }")
        .lines
    )
    text += (
        Log()
        .line(1, "mindresume: step 5 committed: 8 ranks, 40.0 GiB")
        .line(1, "mindresume: fresh start: x")
        .lines
    )
    text += [
        "",
        "swap:[ParallelConfig]",
        ".Init Config.",
        "[INFO] 2026-13-41 20:00:00,000 [x] work: .Init Config.",
    ]
    assert [parse(line) for line in text] == [[]] * 8


@pytest.mark.parametrize("offset", [0, 3600, -19800])
def test_the_log_of_another_time_zone(offset):
    at = time.strptime("2026-07-01 12:30", "%Y-%m-%d %H:%M")
    line = "[INFO] 2026-07-01 12:30:15,250 [x] work: .Init Config."
    assert parse(line, offset) == [LogLine(1782909015.25 - offset, log_parser.START)]
    assert parse(line) == [LogLine(time.mktime(at) + 15.25, log_parser.START)]


@pytest.mark.parametrize("torn", [Log().loss(5, 3), Log().over(5), Log(True).loss(5, 3)])
def test_a_line_joined_to_a_torn_one_counts(torn):
    line = torn.lines[-1]
    (whole,) = parse(line)
    for cut in range(1, len(line) + 1):
        for other in (
            Log().start(90).lines[0],
            Log().loss(90, 4).lines[0],
            Log(True).loss(90, 4).lines[0],
        ):
            *before, last = parse(line[:cut] + other)
            assert [last] == parse(other)
            assert [found.time for found in before] in ([], [whole.time])
    assert parse(line + Log().start(90).lines[0]) == [whole, LogLine(ZERO + 90, log_parser.START)]


def test_a_log_cut_anywhere_gives_the_lines_before(tmp_path):
    text = two_attempts().text.encode()
    log = LogFile(0, (str(tmp_path / "info.log"),))
    (tmp_path / "info.log").write_bytes(text)
    whole = list(lines_of(log))
    for cut in range(0, len(text), 37):
        (tmp_path / "info.log").write_bytes(text[:cut])
        part = list(lines_of(log))
        assert part == whole[: len(part)]


@given(st.binary(max_size=400))
def test_no_content_is_an_error(content):
    head = Log().line(1, "").lines[0].encode()
    for text in (content, head + content, head + b"{ Epoch:[" + content):
        assert isinstance(parse(text.decode("utf-8", "replace")), list)


def test_a_hole_in_the_log(tmp_path):
    path = tmp_path / "info.log"
    path.write_bytes(
        Log().start(6).text.encode()
        + b"\0" * (3 * log_parser.LINE_LIMIT)
        + Log().over(7).text.encode()
    )
    assert [found.time for found in lines_of(LogFile(0, (str(path),)))] == [ZERO + 6, ZERO + 7]


def test_rotated_files_are_read_in_order_and_one_may_vanish(tmp_path):
    first, second = (
        Log().start(1).write(tmp_path / "info.log.1"),
        Log().over(9).write(tmp_path / "info.log"),
    )
    found = lines_of(LogFile(0, (str(first), str(tmp_path / "gone"), str(second))))
    assert [line.kind for line in found] == [log_parser.START, log_parser.OVER]


def test_lines_both_printed_and_logged_count_once(tmp_path):
    logged, printed = two_attempts(), Log(printed=True).start(0).loss(12, 1, 5.99, 10)
    paths = logged.write(tmp_path / "info.log"), printed.write(tmp_path / "worker_0.log")
    files = [LogFile(0, (str(path),)) for path in paths]
    assert list(merged(files)) == list(lines_of(files[0]))


def test_logs_of_several_folders_are_one_by_time(tmp_path):
    old = Log().start(0).over(9).write(tmp_path / "old")
    new = Log().start(20).loss(22, 1).write(tmp_path / "new")
    times = [
        line.time - ZERO for line in merged([LogFile(0, (str(new),)), LogFile(0, (str(old),))])
    ]
    assert times == [0, 9, 20, 22]
