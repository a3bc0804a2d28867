"""A file that is read once gives the same arrays and the same checksum as two readings."""

import io
import os

import ml_dtypes
import numpy as np
import pytest

from mindresume import tensor_files
from mindresume.errors import CorruptFileError
from mindresume.tensor_files import (
    encode,
    file_checksum,
    read_header,
    read_into,
    read_tensor,
    read_whole,
)

TENSORS = {
    "weight": np.arange(5000, dtype=np.float32).reshape(50, 100),
    "step": np.array(7, np.int32),
    "empty": np.zeros((0, 3), np.float16),
    "other_empty": np.zeros((0, 3), np.float16),
    "half": np.arange(333, dtype=np.float32).astype(ml_dtypes.bfloat16),
}


@pytest.fixture(params=["safetensors", "ckpt"])
def path(request, tmp_path):
    tensors = {**TENSORS, **({"note": np.array("text")} if request.param == "ckpt" else {})}
    path = tmp_path / f"file.{request.param}"
    path.write_bytes(b"".join(piece for _, piece in encode(request.param, tensors, {"run": "7"})))
    return str(path)


@pytest.mark.parametrize("chunk", [7, 1024, 4 << 20])
def test_arrays_and_checksum(path, monkeypatch, chunk):
    monkeypatch.setattr(tensor_files, "CHUNK", chunk)
    counts = []
    with open(path, "rb") as file:
        header = read_header(file, path)
        arrays, checksum = read_whole(file, header, counts.append)
        assert (checksum, sum(counts)) == file_checksum(file)
        for name in TENSORS:
            found, expected = arrays[header.tensors[name]], read_tensor(file, header.tensors[name])
            assert (found.dtype, found.shape, found.tobytes()) == (
                expected.dtype,
                expected.shape,
                expected.tobytes(),
            )
            assert found.flags.writeable and found.flags.c_contiguous


def test_a_file_that_became_shorter(path):
    with open(path, "r+b") as file:
        header = read_header(file, path)
        file.truncate(header.size - 1)
        with pytest.raises(CorruptFileError, match="truncated"):
            read_whole(file, header)


def test_only_files_of_the_operating_system(path):
    with open(path, "rb") as file:
        header, memory = read_header(file, path), io.BytesIO(file.read())
    with pytest.raises(OSError):
        read_whole(memory, header)


def test_arrays_that_follow_each_other_share_arenas(monkeypatch):
    monkeypatch.setattr(tensor_files, "ARENA", 10_000)
    monkeypatch.setattr(tensor_files, "_SMALL", 9_000)
    found = tensor_files.new_memory(
        {"a": 4_000, "b": 4_001, "empty": 0, "large": 50_000, "c": 9_990, "d": 1}
    )
    assert {name: array.nbytes for name, array in found.items()} == {
        "a": 4_000,
        "b": 4_001,
        "empty": 0,
        "large": 50_000,
        "c": 9_990,
        "d": 1,
    }
    for number, array in enumerate(found.values()):
        assert array.flags.writeable and array.ctypes.data % 16 == 0
        array[:] = number
    # they do not overlap
    assert all((array == number).all() for number, array in enumerate(found.values()))
    assert np.shares_memory(found["a"].base, found["b"].base)
    assert not np.shares_memory(found["b"].base, found["large"].base)


@pytest.fixture
def handle(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    found = os.open(tmp_path / "file", os.O_RDONLY)
    yield found
    os.close(found)


def test_bytes_are_read_from_a_position_in_as_many_calls_as_it_takes(handle, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda handle, buffers, position: read(handle, [buffers[0][:2]], position)
    )
    out = bytearray(5)
    read_into(handle, 3, memoryview(out), "file")
    assert out == b"34567"


def test_a_file_that_ends_before_is_truncated(handle):
    with pytest.raises(
        CorruptFileError,
        match="file: the file ends at byte 10, 2 bytes are expected from there: truncated",
    ):
        read_into(handle, 8, memoryview(bytearray(4)), "file")
