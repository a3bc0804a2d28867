"""The safetensors format: the length of the header (8 bytes, little-endian), the header in JSON,
the bytes of the tensors.

``{"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin,
end]}, ...}``; offsets count from the end of the header, and the tensors cover everything from there
to the end of the file, without gap or overlap. The size therefore reveals any truncation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, BinaryIO

from mindresume.errors import CorruptFileError
from mindresume.tensor_files.header import (
    DTYPES,
    MAX_HEADER,
    Header,
    TensorEntry,
    TensorSpec,
    checked_entry,
    parse_object,
    read_ranges,
)
from mindresume.typed import is_count

METADATA = "__metadata__"
NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
WRITABLE = NAMES
_DTYPES = {tag: dtype for dtype, tag in NAMES.items()}


def read_header(file: BinaryIO, path: str) -> Header:
    """Implements ``mindresume.tensor_files.read_header``."""
    size = file.seek(0, 2)
    if size < 8:
        raise CorruptFileError(path, f"a safetensors file has at least 8 bytes, found {size}")
    prefix = bytearray(8)
    read_ranges(file, [(0, 8)], memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER or 8 + length > size:
        raise CorruptFileError(
            path,
            f"the header should have {length} bytes; the file has {size - 8} after its first "
            f"8, and the limit is {MAX_HEADER}: truncated, or not a safetensors file",
        )
    raw = bytearray(length)
    read_ranges(file, [(8, length)], memoryview(raw))
    if raw[:1] != b"{":
        raise CorruptFileError(
            path,
            f"the header begins with {bytes(raw[:8])!r}, expected '{{': not a safetensors file",
        )
    table = parse_object(bytes(raw), path, "the header")
    metadata = table.pop(METADATA, {})
    return Header("safetensors", size, metadata, _entries(table, path, 8 + length, size))


def _entries(table: dict[str, Any], path: str, start: int, size: int) -> dict[str, TensorEntry]:
    """Returns the entries of ``table``, in the order of the file. ``start``: where the first tensor
    begins; ``size``: of the file. Raises CorruptFileError for a wrong entry, a gap or an
    overlap."""
    rows = []
    for name, row in table.items():
        if (
            not isinstance(row, dict)
            or set(row) != {"dtype", "shape", "data_offsets"}
            or not isinstance(row["shape"], list)
            or not isinstance(row["data_offsets"], list)
            or len(row["data_offsets"]) != 2
            or not all(map(is_count, row["shape"] + row["data_offsets"]))
            or row["data_offsets"][0] > row["data_offsets"][1]
        ):
            raise CorruptFileError(
                path,
                f"tensor {name} should have dtype, shape and data_offsets [begin, end], found "
                f"{row!r}"[:400],
                tensor=name,
            )
        tag = row["dtype"]
        if not isinstance(tag, str) or tag not in _DTYPES:
            raise CorruptFileError(
                path,
                f"tensor {name}: unknown dtype {tag!r}; known are {', '.join(_DTYPES)}"[:400],
                tensor=name,
            )
        begin, end = row["data_offsets"]
        place, shape = (start + begin, end - begin), tuple(row["shape"])
        rows.append((place, name, checked_entry(path, name, _DTYPES[tag], shape, [place])))
    rows.sort(key=itemgetter(0, 1))
    position = start
    for (offset, count), name, _ in rows:
        if offset != position:
            raise CorruptFileError(
                path,
                f"tensor {name} should begin at byte {position}, where the one before ends, "
                f"but begins at {offset}: a gap or an overlap",
                tensor=name,
            )
        position += count
    if position != size:
        kind = "truncated" if size < position else "data was appended"
        raise CorruptFileError(
            path, f"its header describes a file of {position} bytes, found {size}: {kind}"
        )
    return {name: entry for _, name, entry in rows}


def parts_of(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> list[bytes | tuple[str, int, int]]:
    """Returns the parts of a new file in order: literal bytes, or (tensor name, first byte of the
    tensor, bytes). Orders tensors by width of dtype, widest first, then by name, so that each is
    aligned."""
    if METADATA in specs:
        raise ValueError(f"{METADATA} cannot be the name of a tensor in a safetensors file")
    if set(specs) & set(metadata):
        # MindSpore's loader takes metadata of that name for the dtype of the tensor
        raise ValueError(
            f"{min(set(specs) & set(metadata))} cannot be both a tensor and a key of the metadata: "
            f"MindSpore could not load the file"
        )
    rows: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    order = [
        name
        for _, name in sorted((-DTYPES[spec.dtype].itemsize, name) for name, spec in specs.items())
    ]
    position = 0
    for name in order:
        dtype, shape, nbytes = specs[name]
        rows[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    head = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > MAX_HEADER:
        raise ValueError(
            f"the header of {len(specs)} tensors would have {len(head)} bytes; safetensors allows "
            f"{MAX_HEADER}"
        )
    return [
        len(head).to_bytes(8, "little") + head,
        *((name, 0, specs[name].nbytes) for name in order),
    ]
