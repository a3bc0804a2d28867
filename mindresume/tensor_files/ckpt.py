"""MindSpore's ckpt format: protocol buffers, parsed by hand so that only a few bytes around each
tensor are read.

    Checkpoint  { repeated Value value = 1;  bytes metadata = 1000; }      metadata: see below
    Value       { string tag = 1;  TensorProto tensor = 2;  MapTensorProto maptensor = 3; }
    TensorProto { repeated int64 dims = 1;  string tensor_type = 2;  bytes tensor_content = 3; }

A tensor of more than 512 MiB is split over consecutive Values with the same tag, each with the dims
of the whole tensor. The dims of a 0-d tensor are empty, those of a text ``[0]``; MindSpore's loader
takes ``[0]`` for 0-d (so it takes shape (0,) for 0-d, too). bfloat16 is stored in its own two
bytes.

A file truncated between two Values is a valid ckpt. Files of mindresume therefore end with a field
that MindSpore does not know and skips: the metadata as a JSON object, present even if empty.
MindSpore may append ``crc_num`` and 10 bytes, which are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

from mindresume.errors import CorruptFileError
from mindresume.tensor_files.header import (
    MAX_DIMENSIONS,
    MAX_HEADER,
    Header,
    TensorEntry,
    TensorSpec,
    checked_entry,
    parse_object,
    read_ranges,
)
from mindresume.typed import MAX_TENSORS

SLICE_BYTES = 512 << 20  # mindspore/train/serialization.py: SLICE_SIZE, in KiB there
METADATA_FIELD = 1000
CRC_MARK, CRC_BYTES = b"crc_num", 17
MAX_TEXT = 1 << 20  # bytes of a name; a longer one is damage and must not use up the memory
WINDOW = 8192  # bytes per read: several small tensors, or one header

NAMES = {
    "float64": "Float64",
    "float32": "Float32",
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "int64": "Int64",
    "int32": "Int32",
    "int16": "Int16",
    "int8": "Int8",
    "uint64": "UInt64",
    "uint32": "UInt32",
    "uint16": "UInt16",
    "uint8": "UInt8",
    "bool": "Bool",
}
WRITABLE = {**NAMES, "str": "str"}
_DTYPES = {tag: dtype for dtype, tag in NAMES.items()}
MAX_VARINT = 10  # bytes
_BITS = (1 << 64) - 1


class _Value(NamedTuple):
    """One Value of the file: a tensor or a part of one. ``content``: (absolute offset, bytes)."""

    name: str
    tag: str
    dims: tuple[int, ...]
    content: tuple[int, int]


def read_header(file: BinaryIO, path: str) -> Header:
    """Implements ``mindresume.tensor_files.read_header``."""
    scan = _Scanner(file, path)
    if not scan.size:
        raise CorruptFileError(path, "the file is empty")
    groups: dict[str, list[_Value]] = {}
    metadata = None
    position = 0
    last = None
    values = 0
    while position < scan.size and not scan.at_crc(position):
        number, start, end = scan.message(position, scan.size)
        if metadata is not None:
            raise scan.damage(position, "data after the metadata, which must end the file")
        if number == METADATA_FIELD:
            metadata = parse_object(scan.take(start, end - start, MAX_HEADER), path, "the metadata")
        elif number == 1:
            values += 1
            if values > MAX_TENSORS:
                raise scan.damage(position, f"more than {MAX_TENSORS} tensors or parts of tensors")
            value = _value(scan, start, end)
            if value.name in groups and value.name != last:
                raise scan.damage(position, f"tensor {value.name} occurs a second time", value.name)
            last = value.name
            groups.setdefault(last, []).append(value)
        else:
            raise scan.damage(position, f"field {number} is unknown in a checkpoint")
        position = end
    return Header(
        "ckpt",
        scan.size,
        metadata or {},
        {name: _join(path, values) for name, values in groups.items()},
    )


def _value(scan: _Scanner, position: int, limit: int) -> _Value:
    begin, fields = position, {}
    while position < limit:
        number, start, end = scan.message(position, limit)
        if number == 3:
            raise scan.damage(position, "a MapParameter (hash table) is not supported")
        if number not in (1, 2) or number in fields:
            raise scan.damage(position, f"field {number} is unknown or repeated in a Value")
        fields[number], position = (start, end), end
    if len(fields) < 2:
        raise scan.damage(begin, "a Value without name or without tensor")
    name = scan.text(*fields[1], MAX_TEXT)
    return _Value(name, *_tensor(scan, *fields[2], name))


def _tensor(
    scan: _Scanner, position: int, limit: int, name: str
) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    begin = position
    tag = None
    dims = []
    content = None
    while position < limit:
        number, wire, after = scan.key(position, limit)
        if number == 1 and wire == 0:
            size, end = scan.varint(after, limit)
            dims.append(size)
        elif number == 1 and wire == 2:
            # the packed form, which every parser must accept
            after, end = scan.span(after, limit)
            while after < end and len(dims) <= MAX_DIMENSIONS:
                size, after = scan.varint(after, end)
                dims.append(size)
        elif number == 2 and wire == 2 and tag is None:
            start, end = scan.span(after, limit)
            tag = scan.text(start, end, 64)
        elif number == 3 and wire == 2 and content is None:
            start, end = scan.span(after, limit)
            content = (start, end - start)
        else:
            raise scan.damage(
                position,
                f"field {number} of wire type {wire} is unknown or repeated in tensor {name}",
                name,
            )
        if len(dims) > MAX_DIMENSIONS or any(size >= 2**63 for size in dims):
            raise scan.damage(position, f"tensor {name} has an impossible shape {dims}", name)
        position = end
    if tag is None or content is None:
        raise scan.damage(
            begin, f"tensor {name} has no {'dtype' if tag is None else 'content'}", name
        )
    if tag not in _DTYPES and tag != "str":
        raise scan.damage(
            begin,
            f"tensor {name}: unknown dtype {tag!r}; known are {', '.join(_DTYPES)}, str",
            name,
        )
    return tag, tuple(dims), content


def _join(path: str, values: list[_Value]) -> TensorEntry:
    """Returns the entry of a tensor from all its parts. Raises CorruptFileError if they do not fit
    together."""
    name, tag, dims, _ = values[0]
    for value in values:
        if (value.tag, value.dims) != (tag, dims):
            raise CorruptFileError(
                path,
                f"the parts of tensor {name} differ: {tag} {dims} and {value.tag} {value.dims}",
                tensor=name,
            )
    ranges = tuple(value.content for value in values)
    nbytes = sum(count for _, count in ranges)
    if tag == "str":
        if nbytes % 4:
            raise CorruptFileError(
                path, f"text {name} has {nbytes} bytes, expected a multiple of 4", tensor=name
            )
        return TensorEntry("str", (), ranges)
    return checked_entry(path, name, _DTYPES[tag], () if dims == (0,) and nbytes else dims, ranges)


class _Scanner:
    """Reads the wire format at absolute offsets through a small window. Its methods raise
    CorruptFileError with the offset."""

    def __init__(self, file: BinaryIO, path: str):
        self.size = file.seek(0, 2)
        self._file = file
        self._path = path
        self._start = 0
        self._data = b""

    def damage(self, position: int, reason: str, tensor: str | None = None) -> CorruptFileError:
        return CorruptFileError(
            self._path, f"at byte {position} of {self.size}: {reason}"[:400], tensor=tensor
        )

    def at_crc(self, position: int) -> bool:
        """Returns whether only MindSpore's crc trailer is left."""
        return self.size - position == CRC_BYTES and self.take(position, len(CRC_MARK)) == CRC_MARK

    def take(self, position: int, count: int, most: int = WINDOW) -> bytes:
        """Returns ``count`` bytes; the caller has checked that they lie within the file."""
        if count > most:
            raise self.damage(position, f"a length of {count} bytes, expected at most {most}")
        if not self._start <= position <= position + count <= self._start + len(self._data):
            data = bytearray(min(max(count, WINDOW), self.size - position))
            read_ranges(self._file, [(position, len(data))], memoryview(data))
            self._start, self._data = position, bytes(data)
        return self._data[position - self._start : position - self._start + count]

    def text(self, start: int, end: int, most: int) -> str:
        try:
            return self.take(start, end - start, most).decode()
        except UnicodeDecodeError as error:
            raise self.damage(start, f"a name is not UTF-8: {error}") from error

    def varint(self, position: int, limit: int) -> tuple[int, int]:
        """Returns (value, position after it)."""
        try:
            value, count = decode_varint(self.take(position, min(MAX_VARINT, limit - position)))
            if value < 2**64:
                return value, position + count
        except ValueError:
            pass
        raise self.damage(
            position,
            f"a number that does not end before byte {limit}, or is too large: truncated, or "
            f"no ckpt file",
        )

    def key(self, position: int, limit: int) -> tuple[int, int, int]:
        """Returns (field number, wire type, position after them)."""
        key, after = self.varint(position, limit)
        return key >> 3, key & 7, after

    def span(self, position: int, limit: int) -> tuple[int, int]:
        """Returns (start, end) of a field that is preceded by its length."""
        length, start = self.varint(position, limit)
        if length > limit - start:
            raise self.damage(
                position,
                f"{length} bytes should follow, {limit - start} are left: truncated, or no "
                f"ckpt file",
            )
        return start, start + length

    def message(self, position: int, limit: int) -> tuple[int, int, int]:
        """Returns (field number, start, end) of a field that has a length."""
        number, wire, after = self.key(position, limit)
        if wire != 2:
            raise self.damage(
                position,
                f"field {number} has wire type {wire}, expected 2: no ckpt file, or an "
                f"encrypted one",
            )
        return number, *self.span(after, limit)


def parts_of(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> list[bytes | tuple[str, int, int]]:
    """Returns the parts of a new file, see ``safetensors.parts_of``; keeps the order of the
    tensors."""
    parts: list[bytes | tuple[str, int, int]] = []
    for name, spec in specs.items():
        if len(name.encode()) > MAX_TEXT:
            raise ValueError(
                f"a tensor name has {len(name.encode())} bytes, at most {MAX_TEXT} can be read back"
            )
        # one empty part of an empty tensor
        for start in range(0, max(spec.nbytes, 1), SLICE_BYTES):
            count = min(SLICE_BYTES, spec.nbytes - start)
            parts += [_head(name, WRITABLE[spec.dtype], spec.shape, count), (name, start, count)]
    raw = json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":")).encode()
    if raw[-CRC_BYTES:].startswith(CRC_MARK):
        # else MindSpore's loader would take the last 17 bytes for its crc and drop them
        raw += b" "
    if len(raw) > MAX_HEADER:
        raise ValueError(
            f"the metadata would have {len(raw)} bytes; at most {MAX_HEADER} can be read back"
        )
    return [*parts, encode_varint(METADATA_FIELD << 3 | 2) + encode_varint(len(raw)) + raw]


def _head(name: str, tag: str, shape: tuple[int, ...], count: int) -> bytes:
    """Returns the bytes of a Value up to its content, which has ``count`` bytes."""
    dims = (0,) if tag == "str" else shape
    inner = (
        b"".join(b"\x08" + encode_varint(size) for size in dims)
        + b"\x12"
        + _text(tag)
        + b"\x1a"
        + encode_varint(count)
    )
    value = b"\x0a" + _text(name) + b"\x12" + encode_varint(len(inner) + count) + inner
    return b"\x0a" + encode_varint(len(value) + count) + value


def _text(text: str) -> bytes:
    raw = text.encode()
    return encode_varint(len(raw)) + raw


# ---- varints of protobuf, as in strategy files, too; the protobuf package is not imported --------


def encode_varint(value: int) -> bytes:
    """Encodes an integer of 64 bits; a negative one takes ten bytes."""
    value &= _BITS
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes, position: int = 0) -> tuple[int, int]:
    """Returns the unsigned integer at ``position`` (up to 70 bits: the caller checks its range) and
    the position after it. Raises ValueError if it does not end within MAX_VARINT bytes, or ``data``
    ends first."""
    found = data[position : position + MAX_VARINT]
    # fast path: most numbers are tags and lengths of one byte
    if found and found[0] < 0x80:
        return found[0], position + 1
    value = shift = 0
    for byte in found:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position + shift // 7
    raise ValueError(f"a number does not end at byte {max(position + len(found) - 1, position)}")


def signed(value: int) -> int:
    """Returns the 64-bit two's complement integer whose unsigned form is ``value``."""
    return value if value < 1 << 63 else (value & _BITS) - (1 << 64)
