"""The step ledger: what is written is read, a ring, and what a reader does with bad bytes."""

import io
import math
import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.errors import RecordError
from mindresume.events import Notice
from mindresume.events.event_file import FOLDER, LEDGER, MAX_LEDGERS, EventFile
from mindresume.resume import step_ledger
from mindresume.resume.step_ledger import (
    LedgerRun,
    StepLedger,
    StepRow,
    encode_row,
    ledger_path,
)

RUN = LedgerRun("0002-00000000", "0001-00000000", 4, 8, "layout", "release", True, "float32")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run.steps")


def read_ledger(path):
    with open(path, "rb") as file:
        return step_ledger.read_ledger(file, path)


def write(path, rows, capacity=8, run=RUN):
    ledger = StepLedger(path, run, capacity)
    for row in rows:
        ledger.add(row)
    return ledger


def test_rows_are_read_while_they_are_written(path):
    rows = [
        StepRow(5, 1, 40, 2**64 - 1, 1e-4, 1.0, 2.5),
        StepRow(6, loss=math.inf),
        StepRow(7),
    ]
    ledger = write(path, rows)
    found = read_ledger(path)
    assert found.run == RUN and list(found.rows.values()) == rows
    ledger.add(StepRow(8, loss=math.nan))
    assert math.isnan(read_ledger(path).rows[8].loss)
    ledger.close()


def test_the_ring_keeps_the_newest_rows(path):
    write(path, map(StepRow, range(5, 18)), capacity=8)
    assert list(read_ledger(path).rows) == list(range(10, 18))


def test_rows_that_the_run_cannot_have_made_are_skipped(path):
    write(path, [StepRow(4), StepRow(5)])
    assert list(read_ledger(path).rows) == [5]


def test_an_existing_file_is_not_written_over(path):
    write(path, [StepRow(5)])
    with pytest.raises(FileExistsError):
        StepLedger(path, RUN)
    assert list(read_ledger(path).rows) == [5]


@pytest.mark.parametrize("cut", [1, 63, 65])
def test_a_row_that_was_cut_is_skipped(path, cut):
    write(path, map(StepRow, (5, 6, 7)))
    os.truncate(path, os.path.getsize(path) - cut)
    assert list(read_ledger(path).rows) == ([5, 6] if cut < 64 else [5])


def test_a_row_with_a_flipped_bit_is_skipped(path):
    write(path, map(StepRow, (5, 6, 7)))
    with open(path, "r+b") as file:
        file.seek(4096 + 64 + 3)
        file.write(b"\x40")
    assert list(read_ledger(path).rows) == [5, 7]


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", "no step ledger"),
        (b"{}", "no step ledger"),
        (b"MRSTEPS2" + b"\0" * 4088, "newer version"),
        (b"MRSTEPS1" + b"\0" * 4088, "header"),
        (b"MRSTEPS1" + b'{"run_id": 3}'.ljust(4088, b"\0"), "run_id"),
    ],
)
def test_what_is_no_ledger_is_refused(path, content, problem):
    with open(path, "wb") as file:
        file.write(content)
    with pytest.raises(RecordError, match=problem):
        read_ledger(path)


@given(rows=st.binary(max_size=400), header=st.binary(max_size=80))
def test_garbage_is_refused_or_gives_no_rows(rows, header):
    file = io.BytesIO((b"MRSTEPS1" + header).ljust(4096, b"\0") + rows)
    with suppress(RecordError):
        assert step_ledger.read_ledger(file, "garbage").rows == {}


def test_the_ledgers_of_the_newest_runs_stay(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir()
    for number in range(MAX_LEDGERS + 3):
        (folder / f"{number:03d}-rank_0-1{LEDGER}").touch()
    EventFile(str(tmp_path), 0).handle(Notice("begins"), 0.0)
    assert sorted(path.name[:3] for path in folder.glob(f"*{LEDGER}")) == [
        f"{number:03d}" for number in range(4, MAX_LEDGERS + 3)
    ]


def test_a_row_has_64_bytes_and_the_file_is_named_as_that_of_the_events(tmp_path):
    assert len(encode_row(StepRow(1))) == 64
    path = ledger_path(str(tmp_path))
    assert os.path.dirname(path) == str(tmp_path)
    assert f"-rank_0-{os.getpid()}.steps" in path
