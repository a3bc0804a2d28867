"""Reads many bytes of a file straight into new memory; several threads can share its handle.

    arrays, checksum = read_whole(file, header)                         # {TensorEntry: array}; both from the same bytes
    memory = new_memory({"embedding.weight": 4096, "step": 4})          # {name: uninitialised bytes}
    read_into(handle, position, memory["step"], "file")                 # without the position of the handle

``read_whole`` is faster than ``file_checksum`` and ``read_tensor`` after each other: no byte is copied twice, and while one piece
is hashed the next ones are being read.
"""
from __future__ import annotations

import mmap
import os
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO, TypeVar

import numpy as np
from xxhash import xxh3_128

from mindresume.errors import CorruptFileError
from mindresume.tensor_files import Progress
from mindresume.tensor_files.header import CHUNK, DTYPES, Header, TensorEntry, file_name

_READERS = 2                # threads: a copy out of a tmpfs is slower than a copy within memory, because its pages are small
ARENA = 64 << 20            # bytes of new memory that arrays share: it is released when the last of them is
_SMALL = 4 << 20            # bytes: less is not worth a mapping of its own
_ALIGNED = 64               # bytes: a line of the CPU's cache
Name = TypeVar("Name", bound=Hashable)


def read_whole(file: BinaryIO, header: Header, progress: Progress | None = None) -> tuple[dict[TensorEntry, np.ndarray], str]:
    """Reads every byte of a file.

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
    handle, name, whole = file.fileno(), file_name(file), xxh3_128()

    def read(piece: tuple[int, memoryview]) -> memoryview:
        position, out = piece
        read_into(handle, position, out, name)
        return out
    with ThreadPoolExecutor(_READERS) as pool:
        for data in pool.map(read, _pieces(header.size, memory)):
            whole.update(data)
            if progress:
                progress(len(data))
    return {entry: raw.view(DTYPES[entry.dtype]).reshape(entry.shape) for entry, raw in memory.items()}, whole.hexdigest()


def _pieces(size: int, memory: Mapping[TensorEntry, np.ndarray]) -> Iterator[tuple[int, memoryview]]:
    """Yields (position, where its bytes go) for the whole file, in order. Bytes of no tensor go into memory of their own."""
    rows = []
    for entry, raw in memory.items():
        done = 0
        for start, count in entry.ranges:
            rows.append((start, memoryview(raw)[done:done + count]))
            done += count
    position = 0
    for start, out in [*sorted(rows, key=lambda row: row[0]), (size, memoryview(b""))]:
        between = memoryview(bytearray(max(start - position, 0)))
        for part in (between, out):
            for first in range(0, len(part), CHUNK):
                piece = part[first:first + CHUNK]
                yield position, piece
                position += len(piece)


def new_memory(sizes: Mapping[Name, int]) -> dict[Name, np.ndarray]:
    """Returns {name: uninitialised bytes}. Arrays that follow each other lie in one arena of huge pages: in arrays of their own,
    the first touch of their last pages, 4 KiB each, costs a fifth of the read. Raises MemoryError."""
    return {name: array for chunk in _arenas(sizes) for name, array in chunk.items()}


def _arenas(sizes: Mapping[Name, int]) -> Iterator[dict[Name, np.ndarray]]:
    """Yields the arrays of one arena after the other."""
    chunk: dict[Name, range] = {}
    used = 0
    for name, size in sizes.items():
        if chunk and used + size > ARENA:
            yield _arena(chunk, used)
            chunk, used = {}, 0
        chunk[name] = range(used, used + size)
        used += size + -size % _ALIGNED
    if chunk:
        yield _arena(chunk, used)


def _arena(chunk: Mapping[Name, range], size: int) -> dict[Name, np.ndarray]:
    if size < _SMALL:
        memory = np.empty(size, np.uint8)
    else:
        try:
            mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for {size} bytes of tensors: {error}") from error
        with suppress(OSError):                 # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(mapped, np.uint8)
    return {name: memory[part.start:part.stop] for name, part in chunk.items()}


def read_into(handle: int, position: int, out: memoryview, name: str) -> None:
    """Fills ``out`` from byte ``position`` on. ``name``: of the file, whose header was read before. Raises CorruptFileError if
    the file ends before, OSError."""
    while out:
        found = os.preadv(handle, [out], position)
        if not found:
            raise CorruptFileError(name, f"the file ends at byte {position}, {len(out)} bytes are expected from there: truncated "
                                         f"since its header was read")
        position, out = position + found, out[found:]
