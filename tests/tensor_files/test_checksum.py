import io

import ml_dtypes
import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from mindresume.errors import CorruptFileError
from mindresume.model.manifest import FORMATS
from mindresume.tensor_files import (
    CHUNK,
    Checksums,
    TensorEntry,
    array_checksum,
    checksummed,
    ckpt,
    damaged_tensors,
    encode,
    file_checksum,
    read_header,
    tensor_checksum,
)

TENSORS = {
    "weight": np.arange(3 * CHUNK // 8, dtype=np.float64).reshape(3, -1),
    "view": np.arange(6.0).reshape(2, 3).T,
    "half": np.ones(5, ml_dtypes.bfloat16),
    "step": np.array(3),
    "empty": np.zeros((0, 2)),
}


def written(fmt, tensors=None):
    """(bytes of the file, its checksums)"""
    sums = Checksums(file="of before", size=1, tensors={"of before": ""})
    return b"".join(checksummed(encode(fmt, tensors or TENSORS, {"a": "b"}), sums)), sums


@pytest.mark.parametrize("fmt", FORMATS)
def test_checksums_while_writing_match_the_bytes(fmt):
    data, sums = written(fmt)
    assert (sums.file, sums.size) == (xxh3_128_hexdigest(data), len(data))
    assert sums.tensors == {
        name: xxh3_128_hexdigest(array.tobytes()) for name, array in TENSORS.items()
    }


def test_a_tensor_has_one_checksum_in_both_formats_however_it_is_split(monkeypatch):
    monkeypatch.setattr(ckpt, "SLICE_BYTES", CHUNK // 3)
    data, sums = written("ckpt")
    assert sums.tensors == written("safetensors")[1].tensors
    entry = read_header(io.BytesIO(data), "x.ckpt").tensors["weight"]
    assert (
        len(entry.ranges) == 10
        and tensor_checksum(io.BytesIO(data), entry) == sums.tensors["weight"]
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_read_back(fmt):
    data, sums = written(fmt)
    file, seen = io.BytesIO(data), []
    file.seek(77)
    assert file_checksum(file, seen.append) == (sums.file, sums.size)
    assert sum(seen) == len(data) and max(seen) <= CHUNK
    entries = read_header(file, f"x.{fmt}").tensors
    assert {name: tensor_checksum(file, entry) for name, entry in entries.items()} == sums.tensors
    assert damaged_tensors(file, f"x.{fmt}", sums.tensors) == []


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ["weight", "view", "half", "step"])
def test_one_flipped_bit_names_its_tensor(fmt, name):
    data, sums = written(fmt)
    data, entry = bytearray(data), read_header(io.BytesIO(data), f"x.{fmt}").tensors[name]
    data[sum(entry.ranges[-1]) - 1] ^= 1
    assert damaged_tensors(io.BytesIO(data), f"x.{fmt}", sums.tensors) == [name]
    assert file_checksum(io.BytesIO(data))[0] != sums.file


def test_absent_tensors_are_damaged_and_unexpected_ones_are_not():
    data, sums = written("ckpt", {"a": np.zeros(3), "b": np.ones(3)})
    assert damaged_tensors(io.BytesIO(data), "x.ckpt", {"z": "0", "b": sums.tensors["b"]}) == ["z"]


def test_a_truncated_file_is_an_error():
    data, sums = written("safetensors")
    with pytest.raises(CorruptFileError, match="truncated"):
        damaged_tensors(io.BytesIO(data[:-1]), "x.safetensors", sums.tensors)
    with pytest.raises(CorruptFileError, match="truncated while it was read"):
        tensor_checksum(io.BytesIO(bytes(9)), TensorEntry("uint8", (4,), ((8, 4),)))


def test_pieces_of_a_tensor_must_be_contiguous():
    pieces = [("a", memoryview(b"1")), ("b", memoryview(b"2")), ("a", memoryview(b"3"))]
    with pytest.raises(ValueError, match="tensor a are not contiguous"):
        list(checksummed(pieces, Checksums()))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.array(7, np.int64),
        np.zeros((0, 3), np.float16),
    ],
)
def test_a_tensor_in_memory_has_the_checksum_of_its_bytes_in_the_file(array):
    result = Checksums()
    for _ in checksummed(encode("safetensors", {"w": array}, {}), result):
        pass
    assert array_checksum(array) == result.tensors["w"]
