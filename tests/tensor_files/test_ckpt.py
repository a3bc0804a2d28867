"""MindSpore itself is the reference here; the only tests of this folder that import it."""

import io
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from tensor_files import contents
from tensor_files.contents import described

from mindresume.errors import CorruptFileError
from mindresume.tensor_files import ckpt, plan_arrays, read_header, read_scalar
from mindresume.tensor_files.ckpt import decode_varint, encode_varint, signed

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1"]
RANDOM = np.random.default_rng(0)
TENSORS = {
    f"{np.dtype(d).name}.{len(shape)}": np.frombuffer(
        RANDOM.bytes(np.dtype(d).itemsize * int(np.prod(shape, dtype=int))), d
    ).reshape(shape)
    for d in DTYPES
    for shape in ((), (1,), (3, 5))
}
TENSORS |= {
    "bool": np.array([[True], [False]]),
    "bf16": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
    "bf16.0": np.array(1.5, ml_dtypes.bfloat16),
    "ünicode": np.array(3),
}


content = partial(contents.content, "ckpt")
read_all = partial(contents.read_all, fmt="ckpt")


@pytest.fixture(scope="module")
def ms():
    import mindspore

    return mindspore


def loaded(ms, path, data, **options):
    """{name: array or text} as MindSpore's loader sees the file."""
    path.write_bytes(data)
    found = ms.load_checkpoint(str(path), **options)
    return {
        name: value if isinstance(value, str) else value.asnumpy() for name, value in found.items()
    }


def saved(ms, path, tensors, **options):
    """Returns the file as MindSpore writes it."""
    ms.save_checkpoint(
        [
            {"name": name, "data": ms.Tensor.from_numpy(array.copy())}
            for name, array in tensors.items()
        ],
        str(path),
        **options,
    )
    return path.read_bytes()


def field(number, data):
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


def tensor(dims=b"\x08\x02", dtype=b"UInt8", data=b"ab"):
    return dims + field(2, dtype) + field(3, data)


def value(name=b"w", inner=None):
    return field(1, field(1, name) + field(2, tensor() if inner is None else inner))


@pytest.mark.parametrize("slice_bytes", [512 << 20, 16])
def test_mindspore_reads_ours(ms, tmp_path, monkeypatch, slice_bytes):
    monkeypatch.setattr(ckpt, "SLICE_BYTES", slice_bytes)
    tensors = {
        name: array for name, array in TENSORS.items() if slice_bytes > 16 or array.nbytes < 1000
    }
    found = loaded(ms, tmp_path / "x.ckpt", content(tensors, {"run": "7", "clé": "ü"}))
    assert described(found) == described(tensors) and list(found) == list(tensors)


@pytest.mark.parametrize("kind", ["plain", "sliced", "crc"])
def test_we_read_what_mindspore_writes(ms, tmp_path, monkeypatch, kind):
    import mindspore.train.serialization as serialization

    monkeypatch.setattr(
        serialization, "SLICE_SIZE", 1 if kind == "sliced" else serialization.SLICE_SIZE
    )
    data = saved(ms, tmp_path / "x.ckpt", TENSORS, crc_check=kind == "crc")
    header, found = read_all(data)
    assert described(found) == described(TENSORS) and list(found) == list(TENSORS)
    assert (header.metadata, header.size) == ({}, len(data))
    assert len(header.tensors["bf16"].ranges) == (128 if kind == "sliced" else 1)
    assert data[-17:].startswith(b"crc_num") == (kind == "crc")


def test_bytes_before_the_metadata_are_those_of_mindspore(ms, tmp_path, monkeypatch):
    import mindspore.train.serialization as serialization

    theirs = saved(ms, tmp_path / "x.ckpt", TENSORS)
    assert content(TENSORS) == theirs + field(1000, b"{}")
    monkeypatch.setattr(serialization, "SLICE_SIZE", 1)
    monkeypatch.setattr(ckpt, "SLICE_BYTES", 1024)
    assert content(TENSORS).startswith(saved(ms, tmp_path / "y.ckpt", TENSORS))


def test_the_slice_size_is_mindspores(ms):
    import mindspore.train.serialization as serialization

    assert ckpt.SLICE_BYTES == 1024 * serialization.SLICE_SIZE


def test_texts_and_scalars_of_append_dict(ms, tmp_path):
    values = {"epoch_num": 3, "loss": 1.25, "flag": True, "text": "hällo \U0001f30d", "none": ""}
    saved(ms, tmp_path / "x.ckpt", {"w": np.zeros(2)}, append_dict=dict(values))
    with open(tmp_path / "x.ckpt", "rb") as file:
        header = read_header(file, file.name)
        assert {name: read_scalar(file, header, name) for name in values} == values
    assert (header.tensors["text"].dtype, header.tensors["text"].shape) == ("str", ())
    texts = {
        "text": np.array("hällo"),
        "none": np.array(""),
        "wide": np.array("a", "U9"),
        "big": np.array("b", ">U1"),
    }
    expected = {"text": "hällo", "none": "", "wide": "a", "big": "b"}
    assert loaded(ms, tmp_path / "y.ckpt", content(texts)) == expected
    assert {name: array.item() for name, array in read_all(content(texts))[1].items()} == expected
    assert plan_arrays("ckpt", texts, {}).size == len(content(texts))


def test_empty_tensors(ms, tmp_path):
    empty = {"a": np.zeros((0, 3), np.float32), "b": np.zeros((3, 0), np.int64)}
    assert described(loaded(ms, tmp_path / "x.ckpt", content(empty))) == described(empty)
    assert described(read_all(content({**empty, "c": np.zeros(0)}))[1]) == described(
        {**empty, "c": np.zeros(0)}
    )


def test_metadata_that_looks_like_a_crc_is_not_cut_off_by_mindspore(ms, tmp_path):
    # with the closing "} exactly the form of the trailer
    metadata = {"a": "crc_num" + "x" * 8}
    data = content({"w": np.arange(3)}, metadata)
    assert read_all(data)[0].metadata == metadata
    assert described(loaded(ms, tmp_path / "x.ckpt", data, crc_check=True)) == described(
        {"w": np.arange(3)}
    )
    assert not data[-17:].startswith(b"crc_num")


def test_content_that_looks_like_a_crc_is_read_in_full():
    raw = np.frombuffer(b"crc_num0123456789", np.uint8)
    data = content({"w": raw}).removesuffix(field(1000, b"{}"))
    assert data[-17:] == raw.tobytes()
    assert described(read_all(data)[1]) == described({"w": raw})


def test_both_encodings_of_dims_are_read():
    for dims in (b"\x08\x02\x08\x01", field(1, b"\x02\x01")):
        assert read_all(value(inner=tensor(dims)))[0].tensors["w"].shape == (2, 1)
    for dims in (b"", b"\x08\x00", field(1, b"")):
        entry = read_all(value(inner=tensor(dims, data=b"a")))[0].tensors["w"]
        assert (entry.shape, entry.nbytes) == ((), 1)


def test_the_header_of_a_large_file_is_read_without_its_tensors():
    class Counting(io.BytesIO):
        calls, count = 0, 0

        def readinto(self, buffer):
            self.calls, self.count = self.calls + 1, self.count + len(buffer)
            return super().readinto(buffer)

    tensors = {f"large.{i}": np.zeros(1 << 20, np.uint8) for i in range(8)} | {
        f"small.{i}": np.zeros(4, np.float32) for i in range(1000)
    }
    file = Counting(content(tensors, {"run": "7"}))
    header = read_header(file, "x.ckpt")
    assert list(header.tensors) == list(tensors) and header.metadata == {"run": "7"}
    assert file.calls < 40 and file.count < 40 * ckpt.WINDOW  # 1,008 tensors, 8 MiB


HOSTILE = {
    "empty file": (b"", "the file is empty"),
    "wire type 0": (b"\x08\x01", "at byte 0 of 2: field 1 has wire type 0"),
    "field 2 on top": (field(2, b"x"), "field 2 is unknown"),
    "number of 65 bits": (b"\x0a" + b"\xff" * 9 + b"\x02", "a number that does not end"),
    "length huge": (b"\x0a" + encode_varint(2**63), "bytes should follow, 0 are left"),
    "name only": (field(1, field(1, b"w")), "without name or without tensor"),
    "map parameter": (field(1, field(1, b"w") + field(3, b"")), "MapParameter"),
    "name twice": (
        field(1, field(1, b"w") + field(1, b"w") + field(2, tensor())),
        "field 1 is unknown or repeated",
    ),
    "unknown field in a value": (field(1, field(4, b"w")), "field 4 is unknown"),
    "name not UTF-8": (value(b"\xff"), "not UTF-8"),
    "name enormous": (value(b"x" * (1 << 20 | 1)), "1048577 bytes, expected at most"),
    "content beyond its tensor": (
        value(inner=b"\x12\x05UInt8\x1a\x03") + b"abc",
        "3 bytes should follow, 0",
    ),
    "no content": (value(inner=field(2, b"UInt8")), "tensor w has no content"),
    "empty tensor message": (value(inner=b""), "tensor w has no dtype"),
    "dtype twice": (
        value(inner=tensor() + field(2, b"Int8")),
        "field 2 of wire type 2 is unknown or repeated",
    ),
    "unknown field in a tensor": (
        value(inner=tensor() + b"\x20\x01"),
        "field 4 of wire type 0 is unknown",
    ),
    "dims of 4 bytes": (value(inner=tensor(b"\x0d" + bytes(4))), "field 1 of wire type 5"),
    "unknown dtype": (value(inner=tensor(dtype=b"Int4")), "unknown dtype 'Int4'"),
    "too many dims": (value(inner=tensor(b"\x08\x01" * 33)), "impossible shape"),
    "product overflows": (
        value(inner=tensor(b"\x08\x00" + (b"\x08" + encode_varint(2**62)) * 2)),
        "impossible shape",
    ),
    "too few bytes": (
        value(inner=tensor(b"\x08\x03")),
        "w: uint8 of shape \\(3,\\) needs 3 bytes, the file has 2",
    ),
    "text of 5 bytes": (value(inner=tensor(b"", b"str", b"a\0\0\0b")), "text w has 5 bytes"),
    "text that is none": (value(inner=tensor(b"", b"str", b"\xff" * 4)), "not UTF-32"),
    "parts apart": (value() + value(b"v") + value(), "tensor w occurs a second time"),
    "parts of two shapes": (
        value() + value(inner=tensor(b"\x08\x04")),
        "the parts of tensor w differ",
    ),
    "tensor after the metadata": (field(1000, b"{}") + value(), "data after the metadata"),
    "metadata no JSON": (field(1000, b"{"), "the metadata is not JSON"),
    "metadata not text": (field(1000, b'{"a": 1}'), "strings to strings"),
    "crc cut": (value() + b"crc_num" + bytes(9), "wire type 3"),
}


@pytest.mark.parametrize("data, says", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files(data, says):
    with pytest.raises(CorruptFileError, match=says) as error:
        read_all(data)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "value, data",
    [
        (128, b"\x80\x01"),
        (2**64 - 1, b"\xff" * 9 + b"\x01"),
        (-1, b"\xff" * 9 + b"\x01"),
    ],
)
def test_encoding_and_decoding(value, data):
    assert encode_varint(value) == data
    assert decode_varint(b"x" + data + b"y", 1) == (value % 2**64, 1 + len(data))
    assert signed(value % 2**64) == (-1 if value in (-1, 2**64 - 1) else value)


@pytest.mark.parametrize(
    "data, position", [(b"", 0), (b"\x80", 0), (b"\xff" * 20, 0), (b"\x01", 1)]
)
def test_a_number_without_an_end(data, position):
    with pytest.raises(ValueError, match="does not end"):
        decode_varint(data, position)
