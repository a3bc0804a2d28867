"""Properties of both formats: round trips, sizes, pieces, refusals, and a single error type for
damaged files."""

import io

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_files.contents import content, described, read_all

from mindresume.errors import CorruptFileError
from mindresume.model.manifest import FORMATS
from mindresume.tensor_files import (
    CHUNK,
    TensorEntry,
    TensorSpec,
    encode,
    format_of,
    plan_arrays,
    plan_file,
    read_header,
    read_scalar,
    read_tensor,
)
from mindresume.typed import MAX_TENSORS

COMMON = [
    np.dtype(dtype)
    for dtype in (
        "f8",
        "f4",
        "f2",
        "i8",
        "i4",
        "i2",
        "i1",
        "u8",
        "u4",
        "u2",
        "u1",
        "?",
        ml_dtypes.bfloat16,
    )
]
FLOAT8 = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
TENSORS = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.ones((3,), ml_dtypes.bfloat16),
    "step_num": np.array(7, np.int32),
    "flag": np.array([True, False]),
    "empty": np.zeros((0, 3), np.int64),
}


@st.composite
def arrays(draw, dtypes):
    """Draws any bit pattern, so NaN payloads too; contiguous, transposed, strided or read-only."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 4), max_size=4).map(tuple))
    nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8)
    array = (raw & 1 if dtype == np.bool_ else raw).view(dtype).reshape(shape)
    kind = draw(st.sampled_from(["plain", "transposed", "strided", "reversed"]))
    if kind == "transposed":
        return array.T
    if kind == "strided" and shape:
        return array[::2]
    return array[..., ::-1] if kind == "reversed" and shape else array


def files():
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    texts = st.dictionaries(names.map("key {}".format), names, max_size=3)
    dtypes = {"safetensors": COMMON + FLOAT8, "ckpt": COMMON}
    return st.sampled_from(FORMATS).flatmap(
        lambda fmt: st.tuples(
            st.just(fmt), st.dictionaries(names, arrays(dtypes[fmt]), max_size=5), texts
        )
    )


@settings(max_examples=150)
@given(files())
def test_round_trip_is_bit_exact(case):
    fmt, tensors, metadata = case
    data = content(fmt, tensors, metadata)
    header, found = read_all(data, fmt)
    assert described(found) == described(tensors)
    assert (header.format, header.size, header.metadata) == (fmt, len(data), metadata)
    assert plan_arrays(fmt, tensors, metadata).size == len(data)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in found.values())


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_contiguous_tensor_is_not_copied_and_is_written_in_chunks(fmt):
    big, view = np.zeros(CHUNK + 8, np.uint8), np.arange(6.0).reshape(2, 3).T
    pieces = list(encode(fmt, {"big": big, "view": view, "empty": np.zeros((2, 0))}, {}))
    assert [(name, len(piece)) for name, piece in pieces if name == "big"] == [
        ("big", CHUNK),
        ("big", 8),
    ]
    assert [len(piece) for name, piece in pieces if name == "empty"] == [0]
    assert all(np.shares_memory(np.asarray(piece), big) for name, piece in pieces if name == "big")
    assert b"".join(piece for name, piece in pieces if name == "view") == view.tobytes()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "array, says",
    [
        (np.zeros(2, ">f4"), "w is big-endian"),
        (np.zeros(2, np.complex64), "w: .* cannot hold dtype complex64"),
        (np.array(["x"]), "w: .* dtype <U1"),
    ],
)
def test_unsupported_arrays_are_refused_at_the_call(fmt, array, says):
    for function in (encode, plan_arrays):
        with pytest.raises(ValueError, match=says):
            function(fmt, {"w": array}, {})


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "tensors, metadata",
    [
        ({}, {"a": "\ud800"}),
        ({"\ud800": np.zeros(1)}, {}),
    ],
)
def test_names_and_metadata_are_text(fmt, tensors, metadata):
    with pytest.raises(ValueError):
        encode(fmt, tensors, metadata)


def test_the_extension_is_the_format():
    assert [format_of(name) for name in ("a/b.c.safetensors", "x.ckpt")] == ["safetensors", "ckpt"]
    for function in (format_of, lambda path: read_header(io.BytesIO(), path)):
        with pytest.raises(
            ValueError, match="weights.bin: extension 'bin' is not one of safetensors, ckpt"
        ):
            function("weights.bin")


@pytest.mark.parametrize("fmt", FORMATS)
def test_scalars(fmt):
    file = io.BytesIO(
        content(
            fmt,
            {
                "zero_d": np.array(7, np.int64),
                "one_d": np.array([65536.0], np.float32),
                "half": np.array([[1.5]], ml_dtypes.bfloat16),
                "two": np.zeros(2),
                "none": np.zeros(0),
            },
        )
    )
    header = read_header(file, f"x.{fmt}")
    values = [read_scalar(file, header, name) for name in ("zero_d", "one_d", "half", "absent")]
    assert values == [7, 65536.0, 1.5, None] and [type(value) for value in values[:3]] == [
        int,
        float,
        float,
    ]
    for name in ("two", "none"):
        with pytest.raises(CorruptFileError, match=f"expected one number in {name}, found shape"):
            read_scalar(file, header, name)


def test_a_file_that_shrank_after_its_header_was_read_is_damaged(tmp_path):
    path = tmp_path / "short.safetensors"
    path.write_bytes(bytes(15))
    says = "short.safetensors: the file ends at byte 15"
    with open(path, "rb") as file, pytest.raises(CorruptFileError, match=says) as error:
        read_tensor(file, TensorEntry("uint8", (8,), ((8, 8),)))
    assert error.value.path == str(path)


@pytest.mark.parametrize("fmt", FORMATS)
def test_truncation_at_any_byte(fmt):
    """safetensors: every cut is refused. ckpt: every cut but those between two Values, seen by the
    metadata."""
    data = content(fmt, TENSORS, {"run": "1"})
    read = {}
    for size in range(len(data)):
        try:
            header, found = read_all(data[:size], fmt)
        except CorruptFileError as error:
            assert error.path == f"x.{fmt}"
        else:
            read[size] = header.metadata, described(found)
    whole = list(described(TENSORS).items())
    expected = (
        []
        if fmt == "safetensors"
        else [({}, dict(whole[:count])) for count in range(1, len(whole) + 1)]
    )
    assert list(read.values()) == expected


@pytest.mark.parametrize("fmt", FORMATS)
def test_appended_bytes_are_refused(fmt):
    data = content(fmt, TENSORS, {"run": "1"})
    for more in (b"\0", data, b"crc_num" + bytes(9), b"\x0a\x00"):
        with pytest.raises(CorruptFileError):
            read_all(data + more, fmt)


@settings(max_examples=400)
@given(st.sampled_from(FORMATS), st.data())
def test_altered_bytes_raise_only_corrupt_file_error(fmt, data):
    raw = bytearray(content(fmt, TENSORS, {"run": "1"}))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        header, found = read_all(bytes(raw), fmt)
    except CorruptFileError:
        return
    # a name, a byte of content or a dtype of the same size may differ; but the tensors lie apart,
    # within the file
    ends = sorted(
        (start, start + count) for entry in header.tensors.values() for start, count in entry.ranges
    )
    assert all(first[1] <= second[0] for first, second in zip(ends, ends[1:], strict=False))
    assert not ends or ends[-1][1] <= header.size
    assert all(array.nbytes == header.tensors[name].nbytes for name, array in found.items())


@settings(max_examples=300)
@given(st.sampled_from(FORMATS), st.binary(max_size=80))
def test_random_bytes_raise_only_corrupt_file_error(fmt, data):
    for raw in (data, len(data).to_bytes(8, "little") + data, b"\x0a" + bytes([len(data)]) + data):
        try:
            read_all(raw, fmt)
        except CorruptFileError as error:
            assert str(error).startswith(f"x.{fmt}: ")


def test_a_header_of_millions_of_names_is_refused_before_it_is_parsed():
    head = b"{" + b",".join([b'"%07d":{}' % number for number in range(3_000_000)]) + b"}"
    with pytest.raises(
        CorruptFileError, match="the header is not JSON that can be read: it has some 3000000 keys"
    ):
        read_header(io.BytesIO(len(head).to_bytes(8, "little") + head), "a.safetensors")


def test_a_ckpt_of_millions_of_values_is_refused_while_it_is_read(monkeypatch):
    data = content("ckpt", {f"w{number}": np.ones(1, np.float32) for number in range(5)})
    monkeypatch.setattr("mindresume.tensor_files.ckpt.MAX_TENSORS", 4)
    with pytest.raises(CorruptFileError, match="more than 4 tensors or parts of tensors"):
        read_header(io.BytesIO(data), "a.ckpt")


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_file_that_could_not_be_read_back_is_not_planned(fmt):
    spec = TensorSpec("float32", (), 4)
    with pytest.raises(
        ValueError,
        match=f"a file of {MAX_TENSORS + 1} tensors; at most {MAX_TENSORS} can be read back",
    ):
        plan_file(fmt, dict.fromkeys(map(str, range(MAX_TENSORS + 1)), spec), {})
