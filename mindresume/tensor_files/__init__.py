"""Reads and writes one file of tensors, in safetensors or MindSpore's ckpt format.

    with open(path, "rb") as file:
        header = read_header(file, path)  # every name, dtype, shape and byte range, checked
        weight = read_tensor(file, header.tensors["embedding.weight"])
        step = read_scalar(file, header, "step_num")
    for name, piece in encode("ckpt", {"embedding.weight": weight}, {"run": "7"}):
        out.write(piece)

The checksums (xxh3_128, in hex) of a file and of each tensor in it are computed while the bytes are
written or read. The checksum of a tensor covers its bytes in C order, little-endian: it is the same
in both formats and in memory.

    sums = Checksums()
    for piece in checksummed(encode("safetensors", tensors, {}), sums):
        out.write(piece)
    assert sums.file == file_checksum(open(path, "rb"))[0]

dtypes have numpy's names (``float32``, ``bfloat16``, ``bool``); ckpt also has ``str``, a text.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_128

from mindresume.errors import CorruptFileError
from mindresume.tensor_files import ckpt, safetensors
from mindresume.tensor_files.header import (
    CHUNK,
    DTYPES,
    Header,
    TensorEntry,
    TensorSpec,
    file_name,
    read_ranges,
)
from mindresume.typed import MAX_TENSORS

Progress = Callable[[int], None]  # receives the number of bytes since its last call
_FORMATS: Mapping[str, ModuleType] = {"safetensors": safetensors, "ckpt": ckpt}
# threads: a copy out of a tmpfs is slower than a copy within memory, because its pages are small
_READERS = 2
# bytes of new memory that arrays share: it is released when the last of them is
ARENA = 64 << 20
_SMALL = 4 << 20  # bytes: less is not worth a mapping of its own
_ALIGNED = 64  # bytes: a line of the CPU's cache
_MAX_SCALAR = 1 << 20  # bytes of a text; a tensor of terabytes may claim to be one


def format_of(path: str | os.PathLike[str]) -> str:
    """Returns ``"safetensors"`` or ``"ckpt"`` by the extension. Raises ValueError for any other
    extension."""
    extension = os.path.splitext(os.fspath(path))[1].removeprefix(".")
    if extension not in _FORMATS:
        raise ValueError(
            f"{os.fspath(path)}: extension {extension!r} is not one of {', '.join(_FORMATS)}"
        )
    return extension


def read_header(file: BinaryIO, path: str) -> Header:
    """Reads names, dtypes, shapes and byte ranges of all tensors, in the order of the file, but no
    tensor.

    Args:
        file: opened in binary mode, seekable.
        path: decides the format, and is named in errors.

    Raises:
        CorruptFileError: The file is incomplete or inconsistent. Not detected: altered tensor
            bytes, and a ckpt written by MindSpore that was truncated exactly between two tensors
            (one written by ``encode`` then lacks its metadata).
    """
    header: Header = _FORMATS[format_of(path)].read_header(file, path)
    if not isinstance(header.metadata, dict) or not all(
        isinstance(text, str) for text in header.metadata.values()
    ):
        raise CorruptFileError(
            path, f"the metadata does not map strings to strings: {header.metadata!r}"[:400]
        )
    return header


def read_tensor(file: BinaryIO, entry: TensorEntry) -> np.ndarray:
    """Returns a new C-contiguous array of the entry's shape and dtype (0-d if the shape is empty);
    a 0-d text array for a ``str`` entry. Raises CorruptFileError if the file ends before the tensor
    does."""
    raw = np.empty(entry.nbytes, np.uint8)
    read_ranges(file, entry.ranges, memoryview(raw))
    if entry.dtype == "str":
        try:
            return np.array(raw.tobytes().decode("utf-32-le"))
        except UnicodeDecodeError as error:
            raise CorruptFileError(file_name(file), f"a text is not UTF-32: {error}") from error
    return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


def read_scalar(file: BinaryIO, header: Header, name: str) -> int | float | str | None:
    """Returns the value of a text, or of a tensor with one element (of any number of dimensions);
    None if there is no tensor of that name. Raises CorruptFileError, before reading the tensor, if
    it has another number of elements, or a text has more than 1 MiB."""
    entry = header.tensors.get(name)
    if entry is None:
        return None
    if math.prod(entry.shape) != 1 or entry.nbytes > _MAX_SCALAR:
        raise CorruptFileError(
            file_name(file),
            f"expected one number in {name}, found shape {entry.shape}, {entry.nbytes} bytes",
            tensor=name,
        )
    return read_tensor(file, entry).item()


class FilePart(NamedTuple):
    """The content of a new file at ``offset``: the literal bytes ``data`` if ``name`` is None, else
    ``count`` bytes of that tensor from its byte ``start``."""

    offset: int
    name: str | None
    data: bytes
    start: int
    count: int


@dataclass(frozen=True)
class FilePlan:
    """The layout of a new file of ``size`` bytes: its parts in order, without gaps."""

    format: str
    size: int
    parts: tuple[FilePart, ...]

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """Returns {name: ((offset in the file, first byte of the tensor, bytes), ...)} in the order
        of the file."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for part in self.parts:
            if part.name is not None:
                found.setdefault(part.name, []).append((part.offset, part.start, part.count))
        return {name: tuple(rows) for name, rows in found.items()}


def tensor_spec(name: str, array: np.ndarray) -> TensorSpec:
    """Describes an array. Raises ValueError for a big-endian array, whose bytes are not those of a
    file."""
    if array.dtype.kind == "U" and array.shape == ():
        text = array.item()
        # a lone surrogate is an error now, not when the file is read
        text.encode()
        return TensorSpec("str", (), 4 * max(len(text), 1))
    if array.dtype.str.startswith(">"):
        raise ValueError(
            f"tensor {name} is big-endian ({array.dtype.str}); convert it with "
            f"array.astype(array.dtype.newbyteorder('<'))"
        )
    return TensorSpec(_dtype_name(array.dtype), tuple(array.shape), array.nbytes)


@cache
def _dtype_name(dtype: np.dtype) -> str:
    # compares names: MindSpore's own bfloat16 is another type than that of ml_dtypes, with the same
    # bytes
    return dtype.name if dtype.name in DTYPES else str(dtype)


def tensor_bytes(array: np.ndarray) -> memoryview:
    """Returns the bytes in C order: a view if the array is contiguous, else of a copy."""
    if array.dtype.kind == "U":
        array = np.array(array.item(), "<U")  # the dtype may be longer than the text
    # not ascontiguousarray, which makes a 0-d array 1-d; uint8, as ml_dtypes do not support the
    # buffer protocol
    return memoryview(np.asarray(array, order="C").reshape(-1).view(np.uint8))


def encode(
    fmt: str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> Iterator[tuple[str | None, memoryview]]:
    """Yields the pieces of the file in order, each with the name of the tensor whose bytes it holds
    (None: header bytes).

    Pieces have at most ``CHUNK`` bytes, so that a piece is still in the CPU cache when it is hashed
    and then written. They are views of the arrays: contiguous arrays are not copied, others are
    copied one at a time. An empty tensor has one empty piece. Arrays must not change until the last
    piece is consumed. Raises ValueError, at the call and before the first piece, for a dtype,
    byte order, name or metadata that cannot be written.
    """
    return encode_plan(plan_arrays(fmt, tensors, metadata), tensors)


def plan_arrays(
    fmt: str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> FilePlan:
    """Returns the layout of the file that ``encode`` makes of these arguments. Raises ValueError
    like ``encode``."""
    return plan_file(
        fmt, {name: tensor_spec(name, array) for name, array in tensors.items()}, metadata
    )


def plan_file(fmt: str, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FilePlan:
    """Returns the layout of the file that ``encode`` makes of such tensors, without their bytes. A
    safetensors file has wide dtypes first, then names in order; a ckpt keeps the order of
    ``specs``. Raises ValueError like ``encode``."""
    if len(specs) > MAX_TENSORS:
        raise ValueError(f"a file of {len(specs)} tensors; at most {MAX_TENSORS} can be read back")
    known = _FORMATS[fmt].WRITABLE
    for name, spec in specs.items():
        if spec.dtype not in known:
            raise ValueError(
                f"tensor {name}: {fmt} cannot hold dtype {spec.dtype}; it holds {', '.join(known)}"
            )
    parts, position = [], 0
    for part in _FORMATS[fmt].parts_of(specs, metadata):
        name, data, start, count = (
            (None, part, 0, len(part)) if isinstance(part, bytes) else (part[0], b"", *part[1:])
        )
        parts.append(FilePart(position, name, data, start, count))
        position += count
    return FilePlan(fmt, position, tuple(parts))


def encode_plan(
    plan: FilePlan, tensors: Mapping[str, np.ndarray]
) -> Iterator[tuple[str | None, memoryview]]:
    """Yields the pieces of the file of ``plan``, see ``encode``."""
    name, data = None, memoryview(b"")
    for part in plan.parts:
        # at most one array is copied at a time
        if part.name is not None and part.name != name:
            name, data = part.name, tensor_bytes(tensors[part.name])
        whole = (
            memoryview(part.data)
            if part.name is None
            else data[part.start : part.start + part.count]
        )
        yield from pieces_of(part, whole)


def pieces_of(part: FilePart, data: memoryview) -> Iterator[tuple[str | None, memoryview]]:
    """Yields the pieces of one part of a file, see ``encode``. ``data``: its bytes."""
    for start in range(0, max(len(data), 1), CHUNK):  # a checksum needs a piece, be it empty
        yield part.name, data[start : start + CHUNK]


# ---- checksums -----------------------------------------------------------------------------------


@dataclass
class Checksums:
    """Checksum of the whole ``file``, its ``size`` in bytes, and checksums of its ``tensors`` by
    name."""

    file: str = ""
    size: int = 0
    tensors: dict[str, str] = field(default_factory=dict)


def checksummed(
    pieces: Iterable[tuple[str | None, memoryview]],
    result: Checksums,
    progress: Progress | None = None,
) -> Iterator[memoryview]:
    """Passes on the pieces of ``encode`` and fills ``result``, which is complete once the iterator
    is exhausted. ``progress`` receives the bytes of each piece when the next one is requested.

    Raises ValueError if the pieces of a tensor are not contiguous.
    """
    whole = xxh3_128()
    current = None
    tensor = xxh3_128()
    result.file = ""
    result.size = 0
    result.tensors = {}
    for name, piece in pieces:
        if name is not None:  # header bytes between two parts of one tensor do not end it
            if name != current:
                if name in result.tensors:
                    raise ValueError(f"the pieces of tensor {name} are not contiguous")
                if current is not None:
                    result.tensors[current] = tensor.hexdigest()
                current, tensor = name, xxh3_128()
            tensor.update(piece)
        whole.update(piece)
        result.size += len(piece)
        yield piece
        if progress is not None:
            progress(len(piece))
    if current is not None:
        result.tensors[current] = tensor.hexdigest()
    result.file = whole.hexdigest()


def array_checksum(array: np.ndarray) -> str:
    """Returns the checksum of a tensor in memory, which equals that of its bytes in a file.
    ``array``: any shape; copied if it is not in C order."""
    return xxh3_128(tensor_bytes(array)).hexdigest()


def file_checksum(file: BinaryIO, progress: Progress | None = None) -> tuple[str, int]:
    """Returns checksum and size in bytes of the whole file, whatever its current position."""
    whole = xxh3_128()
    size = 0
    buffer = memoryview(bytearray(CHUNK))
    file.seek(0)
    while found := file.readinto(buffer):
        whole.update(buffer[:found])
        size += found
        if progress:
            progress(found)
    return whole.hexdigest(), size


def tensor_checksum(file: BinaryIO, entry: TensorEntry, buffer: memoryview | None = None) -> str:
    """Returns the checksum of one tensor; ``buffer`` is overwritten. Raises CorruptFileError if the
    file ends before the tensor does."""
    tensor = xxh3_128()
    buffer = memoryview(bytearray(min(CHUNK, entry.nbytes))) if buffer is None else buffer
    for start, count in entry.ranges:
        for position in range(start, start + count, max(len(buffer), 1)):
            piece = buffer[: start + count - position]
            read_ranges(file, [(position, len(piece))], piece)
            tensor.update(piece)
    return tensor.hexdigest()


def damaged_tensors(file: BinaryIO, path: str, expected: Mapping[str, str]) -> list[str]:
    """Returns the names of the tensors that are missing or have another checksum, in the order of
    ``expected``. Raises CorruptFileError if the header cannot be read: single tensors cannot be
    checked then."""
    tensors, buffer = read_header(file, path).tensors, memoryview(bytearray(CHUNK))
    # in the order of the file, to read it forwards
    found = {
        name: tensor_checksum(file, entry, buffer)
        for name, entry in tensors.items()
        if name in expected
    }
    return [name for name in expected if found.get(name) != expected[name]]


# ---- whole files, straight into new memory -------------------------------------------------------

Name = TypeVar("Name", bound=Hashable)


def read_whole(
    file: BinaryIO, header: Header, progress: Progress | None = None
) -> tuple[dict[TensorEntry, np.ndarray], str]:
    """Reads every byte of a file. Faster than ``file_checksum`` and ``read_tensor`` after each
    other: no byte is copied twice, and while one piece is hashed the next ones are being read.

    Args:
        file: a file of the operating system.
        header: of this file.
    Returns:
        A new array for each tensor except texts, and the checksum of the file.
    Raises:
        CorruptFileError: The file is shorter than its header says.
        MemoryError: before anything is read.
    """
    entries = [entry for entry in header.tensors.values() if entry.dtype in DTYPES]
    memory = new_memory({entry: entry.nbytes for entry in entries})
    handle = file.fileno()
    name = file_name(file)
    whole = xxh3_128()

    def read(piece: tuple[int, memoryview]) -> memoryview:
        position, out = piece
        read_into(handle, position, out, name)
        return out

    with ThreadPoolExecutor(_READERS) as pool:
        for data in pool.map(read, _pieces(header.size, memory)):
            whole.update(data)
            if progress:
                progress(len(data))
    return {
        entry: raw.view(DTYPES[entry.dtype]).reshape(entry.shape) for entry, raw in memory.items()
    }, whole.hexdigest()


def _pieces(
    size: int, memory: Mapping[TensorEntry, np.ndarray]
) -> Iterator[tuple[int, memoryview]]:
    """Yields (position, where its bytes go) for the whole file, in order. Bytes of no tensor go
    into memory of their own."""
    rows = []
    for entry, raw in memory.items():
        done = 0
        for start, count in entry.ranges:
            rows.append((start, memoryview(raw)[done : done + count]))
            done += count
    position = 0
    for start, out in [*sorted(rows, key=lambda row: row[0]), (size, memoryview(b""))]:
        between = memoryview(bytearray(max(start - position, 0)))
        for part in (between, out):
            for first in range(0, len(part), CHUNK):
                piece = part[first : first + CHUNK]
                yield position, piece
                position += len(piece)


def new_memory(sizes: Mapping[Name, int]) -> dict[Name, np.ndarray]:
    """Returns {name: uninitialised bytes}. Arrays that follow each other lie in one arena of huge
    pages: in arrays of their own, the first touch of their last pages, 4 KiB each, costs a fifth of
    the read. Raises MemoryError."""
    memory: dict[Name, np.ndarray] = {}
    places: dict[Name, range] = {}
    used = 0
    for name, size in sizes.items():
        if places and used + size > ARENA:
            memory |= _arena(places, used)
            places, used = {}, 0
        places[name] = range(used, used + size)
        used += size + -size % _ALIGNED
    return memory | _arena(places, used)


def _arena(places: Mapping[Name, range], size: int) -> dict[Name, np.ndarray]:
    """Returns arrays at these places of one arena."""
    if size < _SMALL:
        memory = np.empty(size, np.uint8)
    else:
        try:
            mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for {size} bytes of tensors: {error}") from error
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(mapped, np.uint8)
    return {name: memory[place.start : place.stop] for name, place in places.items()}


def read_into(handle: int, position: int, out: memoryview, name: str) -> None:
    """Fills ``out`` from byte ``position`` on, without the position of the handle, which threads
    can share. ``name``: of the file, whose header was read before. Raises CorruptFileError if the
    file ends before, OSError."""
    while out:
        found = os.preadv(handle, [out], position)
        if not found:
            raise CorruptFileError(
                name,
                f"the file ends at byte {position}, {len(out)} bytes are expected from there: "
                "truncated since its header was read",
            )
        position, out = position + found, out[found:]
