"""A file that is read once gives the same arrays and the same checksum as two readings."""
import io

import ml_dtypes
import numpy as np
import pytest

from mindresume.errors import CorruptFileError
from mindresume.tensor_files import encode, read_header, read_tensor, whole_file
from mindresume.tensor_files.checksum import file_checksum
from mindresume.tensor_files.whole_file import read_whole

TENSORS = {"weight": np.arange(5000, dtype=np.float32).reshape(50, 100), "step": np.array(7, np.int32),
           "empty": np.zeros((0, 3), np.float16), "other_empty": np.zeros((0, 3), np.float16),
           "half": np.arange(333, dtype=np.float32).astype(ml_dtypes.bfloat16)}


@pytest.fixture(params=["safetensors", "ckpt"])
def path(request, tmp_path):
    tensors = {**TENSORS, **({"note": np.array("text")} if request.param == "ckpt" else {})}
    path = tmp_path / f"file.{request.param}"
    path.write_bytes(b"".join(piece for _, piece in encode(request.param, tensors, {"run": "7"})))
    return str(path)


@pytest.mark.parametrize("chunk", [7, 1024, 4 << 20])
def test_arrays_and_checksum(path, monkeypatch, chunk):
    monkeypatch.setattr(whole_file, "CHUNK", chunk)
    counts = []
    with open(path, "rb") as file:
        header = read_header(file, path)
        arrays, checksum = read_whole(file, header, counts.append)
        assert (checksum, sum(counts)) == file_checksum(file)
        for name in TENSORS:
            found, expected = arrays[header.tensors[name]], read_tensor(file, header.tensors[name])
            assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
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
