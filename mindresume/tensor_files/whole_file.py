"""Reads a whole file of tensors once: its arrays and its checksum come from the same bytes.

    arrays, checksum = read_whole(file, header)         # {TensorEntry: array}

This is faster than ``file_checksum`` and ``read_tensor`` after each other: no byte is copied twice, and while one piece is hashed
the next ones are being read.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import numpy as np
from xxhash import xxh3_128

from mindresume.tensor_files.arenas import new_memory
from mindresume.tensor_files.checksum import Progress
from mindresume.tensor_files.header import CHUNK, DTYPES, Header, TensorEntry, file_name
from mindresume.tensor_files.positioned_read import read_into

_READERS = 2                # threads: a copy out of a tmpfs is slower than a copy within memory, because its pages are small


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
