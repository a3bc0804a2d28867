"""Lines of mindformers' log are parsed: both formats, torn lines, and what is none."""

import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_logs import ZERO, Log, two_attempts

from mindresume.report import log_reader
from mindresume.report.log_reader import (
    LogFile,
    LogLine,
    find_logs,
    lines_of,
    merged,
    parse,
    pieces_of,
)


def one(log):
    (found,) = parse(log.lines[-1])
    return found


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_a_loss_line(printed, sink):
    assert one(Log(printed).loss(61.25, 23, 4.25, 0.5, size=10, sink=sink)) == LogLine(
        ZERO + 61.25, log_reader.LOSS, 23, 4.25, 0.5
    )


@pytest.mark.parametrize(
    "text, value",
    [("inf", math.inf), ("-inf", -math.inf), ("-0.500000", -0.5), ("nan", math.nan)],
)
def test_a_loss_that_is_unusual(text, value):
    assert one(Log().loss(1, 1, text)).loss == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("counts", ["", "consumed_samples: 184, global_batch_size: 8, "])
def test_a_loss_line_of_the_pynative_trainer(counts):
    log = Log().line(
        1,
        f"{{ step:[   23/   45], {counts}loss:  -0.500000, per_step_time:    500ms, lr: 9.987e-04, "
        f"grad_norm:   0.590214, throughput:   0.00T }}",
    )
    assert one(log) == LogLine(ZERO + 1, log_reader.LOSS, 23, -0.5, 0.5)
    torn = log.lines[-1][: log.lines[-1].index("per_step")]
    assert parse(torn) == [] and len(parse(torn + log.lines[-1])) == 1


@pytest.mark.parametrize(
    "log, kind",
    [
        (Log().start(3), log_reader.START),
        (Log().over(3), log_reader.OVER),
        (Log().pipeline(3), log_reader.LAST_CARD),
    ],
)
def test_the_other_lines_of_mindformers(log, kind):
    assert one(log) == LogLine(ZERO + 3, kind)


def test_other_lines_are_ignored():
    log = Log().line(1, "set output path to '/x'").line(1, "mindresume: fresh start: x")
    log.line(1, "  77.5% |███   | 117.0 samples/s/p  0:00:00 }")
    for line in (
        *log.lines,
        "",
        ".Init Config.",
        "[INFO] 2026-13-41 20:00:00,000 [x] work: .Init Config.",
    ):
        assert parse(line) == []


@pytest.mark.parametrize("offset", [0, 3600, -19800])
def test_the_log_of_another_time_zone(offset):
    at = time.strptime("2026-07-01 12:30", "%Y-%m-%d %H:%M")
    line = "[INFO] 2026-07-01 12:30:15,250 [x] work: .Init Config."
    assert parse(line, offset) == [LogLine(1782909015.25 - offset, log_reader.START)]
    assert parse(line) == [LogLine(time.mktime(at) + 15.25, log_reader.START)]


@pytest.mark.parametrize("torn", [Log().loss(5, 3), Log().over(5), Log(True).loss(5, 3)])
def test_a_line_joined_to_a_torn_one_counts(torn):
    (line,) = torn.lines
    (whole,) = parse(line)
    for log in (Log().start(90), Log().loss(90, 4), Log(True).loss(90, 4)):
        (other,) = log.lines
        for cut in range(1, len(line) + 1):
            *before, last = parse(line[:cut] + other)
            assert [last] == parse(other)
            assert [found.time for found in before] in ([], [whole.time])
        assert parse(line + other) == [whole, *parse(other)]


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
    path, hole = tmp_path / "info.log", b"\0" * (3 * log_reader.LINE_LIMIT)
    path.write_bytes(Log().start(6).text.encode() + hole + Log().over(7).text.encode())
    assert [found.time for found in lines_of(LogFile(0, (str(path),)))] == [ZERO + 6, ZERO + 7]


def test_rotated_files_are_read_in_order_and_one_may_vanish(tmp_path):
    first = Log().start(1).write(tmp_path / "info.log.1")
    second = Log().over(9).write(tmp_path / "info.log")
    found = lines_of(LogFile(0, (str(first), str(tmp_path / "gone"), str(second))))
    assert [line.kind for line in found] == [log_reader.START, log_reader.OVER]


LIMIT = 1 << 14  # as long as what Python buffers, or longer


def pieces(path, *parts, total=None):
    path.write_bytes(b"".join(parts))
    with open(path, "rb") as file:
        return list(pieces_of(file, LIMIT, total))


@pytest.mark.parametrize("size", [1, 100, LIMIT - 3, LIMIT, LIMIT + 1, 5 * LIMIT + 7, 1 << 20])
def test_zero_bytes_before_a_line_are_skipped_and_no_line_is_repeated(tmp_path, size):
    lines = [b"%d\n" % number for number in range(10_000)]
    assert pieces(tmp_path / "x", b"first\n", bytes(size), *lines) == [b"first\n", *lines]


def test_a_hole_of_any_size(tmp_path):
    path = tmp_path / "x"
    for end, wanted in ((b"last\n", [b"first\n", b"last\n"]), (b"", [b"first\n"])):
        with open(path, "wb") as file:
            file.write(b"first\n")
            file.truncate(1 << 40)
            file.seek(1 << 40)
            file.write(end)
        with open(path, "rb") as file:
            assert list(pieces_of(file, LIMIT)) == wanted


def test_a_long_line_is_split_and_the_last_newline_may_be_missing(tmp_path):
    found = pieces(tmp_path / "x", b"x" * (2 * LIMIT + 5), b"\nend")
    assert [len(piece) for piece in found] == [LIMIT, LIMIT, 6, 3]


def test_no_more_than_a_total_is_read(tmp_path):
    assert pieces(tmp_path / "x", b"12345\n" * 100, total=13) == [b"12345\n"] * 3


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def logs_in(*folders):
    return [
        (log.rank, [Path(piece).name for piece in log.pieces])
        for log in find_logs(map(str, folders))
    ]


def test_rotated_files_are_one_log_the_oldest_first(tmp_path):
    put(
        tmp_path,
        *(f"log/rank_0/info.log{end}" for end in ("", ".1", ".2", ".10", ".gz")),
        "log/rank_0/error.log",
    )
    assert logs_in(tmp_path) == [(0, ["info.log.10", "info.log.2", "info.log.1", "info.log"])]


def test_all_folders_with_a_suffix_and_all_ranks(tmp_path):
    put(
        tmp_path,
        "log/rank_1/info.log",
        "log_second/rank_0/info.log",
        "msrun_log_second/worker_0.log",
        "msrun_log/worker_12.log",
        "msrun_log/scheduler.log",
        "logs/rank_5/info.log",
        "log/rank_x/info.log",
    )
    assert logs_in(tmp_path, tmp_path / "gone") == [
        (0, ["info.log"]),
        (0, ["worker_0.log"]),
        (1, ["info.log"]),
        (12, ["worker_12.log"]),
    ]


def test_a_folder_of_logs_itself_and_nothing_twice(tmp_path):
    put(tmp_path, "elsewhere/rank_0/info.log", "log/rank_0/info.log", "elsewhere/worker_0.log")
    assert len(logs_in(tmp_path, tmp_path / "elsewhere", tmp_path / "log", tmp_path)) == 3


def test_logs_of_several_folders_are_one_by_time_and_lines_count_once(tmp_path):
    """A worker prints what it also logs."""
    logged = LogFile(0, (str(two_attempts().write(tmp_path / "info.log")),))
    printed = Log(printed=True).start(0).loss(12, 1, 5.99, 10).over(99)
    files = [LogFile(0, (str(printed.write(tmp_path / "worker_0.log")),)), logged]
    *lines, last = merged(files)
    assert lines == list(lines_of(logged)) and last.time == ZERO + 99
