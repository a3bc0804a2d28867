"""Code shared by both file formats: file headers, checks of single tensors, and exact reading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from mindresume.errors import CorruptFileError
from mindresume.typed import MAX_KEYS, MAX_VALUES, parse_json

# bytes: fits the CPU cache, and is large enough for one system call per piece
CHUNK = 4 << 20
MAX_HEADER = 100_000_000  # bytes of JSON; the limit of the safetensors library
MAX_DIMENSIONS = 32  # numpy's limit

DTYPES: Mapping[str, np.dtype] = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            np.float64,
            np.float32,
            np.float16,
            np.int64,
            np.int32,
            np.int16,
            np.int8,
            np.uint64,
            np.uint32,
            np.uint16,
            np.uint8,
            np.bool_,
            ml_dtypes.bfloat16,
            ml_dtypes.float8_e4m3fn,
            ml_dtypes.float8_e5m2,
        ),
    )
}


class TensorEntry(NamedTuple):
    """The position of one tensor in a file. ``ranges``: (absolute offset, bytes) in order; more
    than one only in a ckpt."""

    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(count for _, count in self.ranges)


class TensorSpec(NamedTuple):
    """Describes a tensor to be written. ``dtype``: a numpy name, or ``str`` (only in a ckpt;
    ``nbytes`` are 4 for each character)."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The content of a file header. ``size``: bytes of the whole file; ``tensors``: in the order of
    the file."""

    format: str
    size: int
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]


def checked_entry(
    path: str, name: str, dtype: str, shape: tuple[int, ...], ranges: Iterable[tuple[int, int]]
) -> TensorEntry:
    """Makes the entry of a tensor. Raises CorruptFileError unless numpy can hold the shape, and the
    ranges have as many bytes as shape and dtype need."""
    entry, itemsize = TensorEntry(dtype, shape, tuple(ranges)), DTYPES[dtype].itemsize
    # numpy refuses (0, 2**62) too, so the factors other than 0 must fit by themselves
    if len(shape) > MAX_DIMENSIONS or math.prod(size for size in shape if size) * itemsize >= 2**63:
        raise CorruptFileError(
            path, f"tensor {name} has an impossible shape {shape}"[:400], tensor=name
        )
    expected = math.prod(shape) * itemsize
    found = sum(count for _, count in entry.ranges)
    if found != expected:
        raise CorruptFileError(
            path,
            f"tensor {name}: {dtype} of shape {shape} needs {expected} bytes, the file has {found}",
            tensor=name,
        )
    return entry


def parse_object(
    data: bytes, path: str, what: str, values: int = MAX_VALUES, keys: int = MAX_KEYS
) -> dict[str, Any]:
    """Parses the JSON object in ``data``. Raises CorruptFileError if it is not one, repeats a key
    at any depth, or has more than ``values`` values or ``keys`` keys. ``what``: names it in the
    error."""
    try:
        value = parse_json(data, values, keys=keys)
    except ValueError as error:
        raise CorruptFileError(
            path, f"{what} is not JSON that can be read: {error}"[:400]
        ) from error
    if not isinstance(value, dict):
        raise CorruptFileError(path, f"{what} is {type(value).__name__}, expected a JSON object")
    return value


def read_ranges(file: BinaryIO, ranges: Sequence[tuple[int, int]], out: memoryview) -> None:
    """Reads the ranges one after the other into ``out``, which has as many bytes. Raises
    CorruptFileError if the file ends first."""
    done = 0
    for start, count in ranges:
        file.seek(start)
        end = done + count
        while done < end:
            found = file.readinto(out[done:end])  # one call returns at most 2 GiB
            if not found:
                raise CorruptFileError(
                    file_name(file),
                    f"the file ends at byte {file.tell()}, expected bytes "
                    f"{start} to {start + count}: truncated while it was read",
                )
            done += found


def file_name(file: BinaryIO) -> str:
    """Returns the path of an open file, for messages."""
    return str(getattr(file, "name", "<file in memory>"))
