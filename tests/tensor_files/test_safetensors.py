import json
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load, save
from tensor_files import contents
from tensor_files.contents import described

from mindresume.errors import CorruptFileError
from mindresume.tensor_files import encode

RANDOM = np.random.default_rng(0)


def random_array(dtype, shape):
    raw = np.frombuffer(
        RANDOM.bytes(np.dtype(dtype).itemsize * int(np.prod(shape, dtype=int))), np.uint8
    )
    return (raw & 1 if dtype == "?" else raw).view(dtype).reshape(shape)


TENSORS = {
    f"{np.dtype(dtype).name}.{len(shape)}": random_array(dtype, shape)
    for shape in ((), (0, 2), (3, 5))
    for dtype in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")
}


content = partial(contents.content, "safetensors")
read_all = partial(contents.read_all, fmt="safetensors")


def file_of(table, data=b"", pad=True):
    """Returns a file with any header: an object, or the bytes of one."""
    head = table if isinstance(table, bytes) else json.dumps(table).encode()
    head += b" " * (-len(head) % 8 if pad else 0)
    return len(head).to_bytes(8, "little") + head + data


def row(begin, end, shape=None, dtype="U8"):
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def test_the_real_library_reads_ours(tmp_path):
    data, path = content(TENSORS, {"format": "ms", "clé": "ü"}), tmp_path / "x.safetensors"
    assert described(load(data)) == described(TENSORS)
    path.write_bytes(data)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "ms", "clé": "ü"}


def test_we_read_what_the_real_library_writes():
    for metadata in (None, {"format": "ms", "remove_redundancy": "True"}):
        header, found = read_all(save(TENSORS, metadata))
        assert described(found) == described(TENSORS)
        assert header.metadata == (metadata or {})


def test_our_files_are_byte_for_byte_those_of_the_real_library():
    tensors = {
        "b": np.arange(3, dtype=np.int8),
        "a": np.arange(4, dtype=np.float32),
        "c": np.ones((2, 2), np.int64),
    }
    assert content(tensors) == save(tensors)


@pytest.mark.parametrize(
    "dtype, tag",
    [
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e5m2, "F8_E5M2"),
    ],
)
def test_narrow_floats_keep_every_bit_pattern(dtype, tag):
    width = np.dtype(dtype).itemsize
    array = np.arange(256**width, dtype=f"u{width}").view(dtype)
    data = content({"w": array})
    described_row = dict(safetensors.deserialize(data))["w"]
    assert (described_row["dtype"], bytes(described_row["data"])) == (tag, array.tobytes())
    found = read_all(data)[1]["w"]
    assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes())


def test_every_tensor_is_aligned():
    header = read_all(content(TENSORS, {"a": "b" * 5}))[0]
    assert all(
        entry.ranges[0][0] % np.dtype(entry.dtype).itemsize == 0
        for entry in header.tensors.values()
    )
    assert min(entry.ranges[0][0] for entry in header.tensors.values()) % 8 == 0


def test_a_file_without_tensors():
    assert read_all(content({}))[1] == {} == load(content({}))


@pytest.mark.parametrize(
    "tensors, metadata, says",
    [
        ({"__metadata__": np.zeros(1)}, {}, "cannot be the name of a tensor"),
        (
            {"step": np.zeros(1)},
            {"step": "7"},
            "step cannot be both a tensor and a key of the metadata",
        ),
        ({"text": np.array("x")}, {}, "cannot hold dtype str"),
    ],
)
def test_tensors_that_mindspore_or_the_library_cannot_load_are_not_written(tensors, metadata, says):
    with pytest.raises(ValueError, match=says):
        encode("safetensors", tensors, metadata)


HOSTILE = {
    "empty file": (b"", "at least 8 bytes, found 0"),
    "header over the limit": (
        (100_000_001).to_bytes(8, "little") + b"{}",
        "the limit is 100000000",
    ),
    "header longer than the file": (
        (3).to_bytes(8, "little") + b"{}",
        "should have 3 bytes; the file has 2",
    ),
    "leading space": (file_of(b" {}"), "the header begins with"),
    "not JSON": (file_of(b"{'a': 1}"), "not JSON"),
    "duplicate tensor": (
        file_of(
            b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
            b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
            b"x",
        ),
        "'a' occurs twice",
    ),
    "metadata not text": (file_of({"__metadata__": {"a": 1}}), "strings to strings"),
    "tensor no object": (file_of({"a": 1}), "should have dtype, shape and data_offsets"),
    "key missing": (
        file_of({"a": {"dtype": "U8", "shape": []}}),
        "should have dtype, shape and data_offsets",
    ),
    "unknown dtype": (file_of({"a": row(0, 1, dtype="F4")}, b"x"), "unknown dtype 'F4'"),
    "negative size": (file_of({"a": row(0, 1, [-1])}, b"x"), "should have dtype, shape"),
    "offsets backwards": (
        file_of({"a": row(1, 0, [1])}, b"x"),
        "data_offsets \\[begin, end\\], found",
    ),
    "too few bytes for the shape": (
        file_of({"a": row(0, 4, [2], "F32")}, b"xxxx"),
        "needs 8 bytes, the file has 4",
    ),
    "product overflows beside a zero": (
        file_of({"a": row(0, 0, [0, 2**62, 2**62])}),
        "impossible shape",
    ),
    "too many dimensions": (file_of({"a": row(0, 1, [1] * 33)}, b"x"), "impossible shape"),
    "overlap": (
        file_of({"a": row(0, 4), "b": row(2, 6)}, b"x" * 6),
        "b should begin at byte .* a gap or an overlap",
    ),
    "gap": (
        file_of({"a": row(0, 4), "b": row(5, 6)}, b"x" * 6),
        "b should begin at byte .* a gap or an overlap",
    ),
    "one byte missing": (
        file_of({"a": row(0, 4)}, b"xxx"),
        "describes a file of 76 bytes, found 75: truncated",
    ),
    "one byte too many": (
        file_of({"a": row(0, 4)}, b"xxxxx"),
        "describes a file of 76 bytes, found 77: data was",
    ),
}


@pytest.mark.parametrize("data, says", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files(data, says):
    with pytest.raises(CorruptFileError, match=says) as error:
        read_all(data)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"a": row(0, 3)},
        {"b": row(3, 3, [0]), "a": row(0, 3), "c": row(3, 3, [2, 0], "F32")},
    ],
)
def test_sound_files_of_others_are_read(table):
    data = file_of(
        table, b"x" * max((r["data_offsets"][1] for r in table.values()), default=0), pad=False
    )
    assert sorted(read_all(data)[1]) == sorted(table) == sorted(load(data))
