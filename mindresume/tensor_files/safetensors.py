"""The safetensors format: the length of the header (8 bytes, little-endian), the header in JSON, the bytes of the tensors.

``{"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}``; offsets count from
the end of the header, and the tensors cover everything from there to the end of the file, without gap or overlap. The size
therefore reveals any truncation.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

from mindresume.errors import CorruptFileError
from mindresume.tensor_files.header import (
    DTYPES,
    MAX_HEADER,
    FilePlan,
    Header,
    TensorEntry,
    TensorSpec,
    check_count,
    checked_dtype,
    checked_entry,
    checked_metadata,
    dump_json,
    is_size,
    make_file_plan,
    parse_metadata,
    parse_object,
    read_ranges,
)

METADATA = "__metadata__"
NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
         "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
         "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_DTYPES = {tag: dtype for dtype, tag in NAMES.items()}


def read_header(file: BinaryIO, path: str) -> Header:
    """Implements ``mindresume.tensor_files.read_header``."""
    size = file.seek(0, 2)
    if size < 8:
        raise CorruptFileError(path, f"a safetensors file has at least 8 bytes, found {size}")
    length = int.from_bytes(_read(file, 0, 8), "little")
    if length > MAX_HEADER or 8 + length > size:
        raise CorruptFileError(path, f"the header should have {length} bytes; the file has {size - 8} after its first "
                                     f"8, and the limit is {MAX_HEADER}: truncated, or not a safetensors file")
    raw = _read(file, 8, length)
    if raw[:1] != b"{":
        raise CorruptFileError(path, f"the header begins with {raw[:8]!r}, expected '{{': not a safetensors file")
    table = parse_object(raw, path, "the header")
    metadata = parse_metadata(table.pop(METADATA, {}), path)
    return Header("safetensors", size, metadata, _entries(table, path, 8 + length, size))


def _entries(table: dict[str, Any], path: str, start: int, size: int) -> dict[str, TensorEntry]:
    entries = [(name, _entry(path, name, row, start)) for name, row in table.items()]
    entries.sort(key=lambda item: (item[1].ranges[0], item[0]))
    position = start
    for name, entry in entries:
        offset, count = entry.ranges[0]
        if offset != position:
            raise CorruptFileError(path, f"tensor {name} should begin at byte {position}, where the one before ends, "
                                         f"but begins at {offset}: a gap or an overlap", tensor=name)
        position += count
    if position != size:
        kind = "truncated" if size < position else "data was appended"
        raise CorruptFileError(path, f"its header describes a file of {position} bytes, found {size}: {kind}")
    return dict(entries)


def _entry(path: str, name: str, row: Any, start: int) -> TensorEntry:
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise CorruptFileError(path, f"tensor {name} should have dtype, shape and data_offsets, found {row!r}"[:400],
                               tensor=name)
    tag, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(tag, str) or tag not in _DTYPES:
        raise CorruptFileError(path, f"tensor {name}: unknown dtype {tag!r}; known are {', '.join(_DTYPES)}"[:400],
                               tensor=name)
    if not isinstance(shape, list) or not all(map(is_size, shape)):
        raise CorruptFileError(path, f"tensor {name}: the shape is {shape!r}, expected a list of sizes"[:400], tensor=name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)) or offsets[0] > offsets[1]:
        raise CorruptFileError(path, f"tensor {name}: data_offsets are not [begin, end]: {offsets!r}"[:400],
                               tensor=name)
    begin, end = offsets
    return checked_entry(path, name, _DTYPES[tag], tuple(shape), [(start + begin, end - begin)])


def _read(file: BinaryIO, start: int, count: int) -> bytes:
    out = bytearray(count)
    read_ranges(file, [(start, count)], memoryview(out))
    return bytes(out)


def plan_file(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FilePlan:
    """Implements ``mindresume.tensor_files.plan_file``. Orders tensors by width of dtype, widest first, then by name, so that
    each is aligned."""
    check_count(len(specs))
    rows: dict[str, Any] = {METADATA: checked_metadata(metadata)} if metadata else {}
    if METADATA in specs:
        raise ValueError(f"{METADATA} cannot be the name of a tensor in a safetensors file")
    if set(specs) & set(metadata):
        # MindSpore's loader takes metadata of that name for the dtype of the tensor
        raise ValueError(f"{min(set(specs) & set(metadata))} cannot be both a tensor and a key of the metadata: "
                         f"MindSpore could not load the file")
    dtypes = {name: checked_dtype("safetensors", name, spec, NAMES) for name, spec in specs.items()}
    order, position = sorted(specs, key=lambda name: (-DTYPES[dtypes[name]].itemsize, name)), 0
    for name in order:
        end = position + specs[name].nbytes
        rows[name] = {"dtype": NAMES[dtypes[name]], "shape": list(specs[name].shape), "data_offsets": [position, end]}
        position = end
    head = dump_json(rows)
    head += b" " * (-len(head) % 8)
    if len(head) > MAX_HEADER:
        raise ValueError(f"the header of {len(specs)} tensors would have {len(head)} bytes; safetensors allows "
                         f"{MAX_HEADER}")
    return make_file_plan("safetensors", [len(head).to_bytes(8, "little") + head,
                                          *((name, 0, specs[name].nbytes) for name in order)])
