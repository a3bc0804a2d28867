import os

import pytest

from mindresume.errors import CorruptFileError
from mindresume.tensor_files.positioned_read import read_into


@pytest.fixture
def handle(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    found = os.open(tmp_path / "file", os.O_RDONLY)
    yield found
    os.close(found)


def test_bytes_are_read_from_a_position_in_as_many_calls_as_it_takes(handle, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, position: read(handle, [buffers[0][:2]], position))
    out = bytearray(5)
    read_into(handle, 3, memoryview(out), "file")
    assert out == b"34567"


def test_a_file_that_ends_before_is_truncated(handle):
    with pytest.raises(CorruptFileError, match="file: the file ends at byte 10, 2 bytes are expected from there: truncated"):
        read_into(handle, 8, memoryview(bytearray(4)), "file")
