"""Checksums (xxh3_128, hexadecimal) of a file and of each tensor in it, taken while the bytes pass by.

    sums = Checksums()
    for piece in checksummed(encode("safetensors", tensors, {}), sums):
        out.write(piece)
    assert sums.file == file_checksum(open(path, "rb"))[0]

A tensor's checksum is over its bytes in C order, little-endian: the same in either format and in memory.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from xxhash import xxh3_128

from mindresume.errors import CorruptFileError
from mindresume.tensor_files import CHUNK, TensorEntry, read_header
from mindresume.tensor_files.header import file_name

Progress = Callable[[int], None]    # is given the number of bytes read since its last call


@dataclass
class Checksums:
    """``file`` and ``size`` (bytes) of the whole file, and ``tensors`` by name."""
    file: str = ""
    size: int = 0
    tensors: dict[str, str] = field(default_factory=dict)


def checksummed(pieces: Iterable[tuple[str | None, memoryview]], result: Checksums) -> Iterator[memoryview]:
    """Passes the pieces of ``encode`` on and fills ``result``, which is complete once the iterator is exhausted.

    ValueError if the pieces of one tensor do not follow each other."""
    whole, current, tensor = xxh3_128(), None, xxh3_128()
    result.file, result.size, result.tensors = "", 0, {}
    for name, piece in pieces:
        if name is not None:        # header bytes between two parts of one tensor do not end it
            if name != current:
                if name in result.tensors:
                    raise ValueError(f"the pieces of tensor {name} do not follow each other")
                if current is not None:
                    result.tensors[current] = tensor.hexdigest()
                current, tensor = name, xxh3_128()
            tensor.update(piece)
        whole.update(piece)
        result.size += len(piece)
        yield piece
    if current is not None:
        result.tensors[current] = tensor.hexdigest()
    result.file = whole.hexdigest()


def array_checksum(array: np.ndarray) -> str:
    """Checksum of a tensor in memory, equal to that of its bytes in a file. ``array``: any shape; copied if not in C order."""
    return xxh3_128(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


def file_checksum(file: BinaryIO, progress: Progress | None = None) -> tuple[str, int]:
    """Checksum and size in bytes of the whole file, from its first byte wherever it stands."""
    whole, size, buffer = xxh3_128(), 0, memoryview(bytearray(CHUNK))
    file.seek(0)
    while found := file.readinto(buffer):
        whole.update(buffer[:found])
        size += found
        if progress:
            progress(found)
    return whole.hexdigest(), size


def tensor_checksum(file: BinaryIO, entry: TensorEntry) -> str:
    """CorruptFileError if the file ends before the tensor does."""
    return _tensor_checksum(file, entry, memoryview(bytearray(min(CHUNK, entry.nbytes))), None)


def damaged_tensors(file: BinaryIO, path: str, expected: Mapping[str, str], progress: Progress | None = None
                    ) -> list[str]:
    """Names, in the order of ``expected``, of the tensors that are absent or have another checksum.
    CorruptFileError if the header cannot be read: then nothing can be said of single tensors."""
    tensors, buffer = read_header(file, path).tensors, memoryview(bytearray(CHUNK))
    found = {name: _tensor_checksum(file, entry, buffer, progress)          # in the order of the file: no seeking back
             for name, entry in tensors.items() if name in expected}
    return [name for name in expected if found.get(name) != expected[name]]


def _tensor_checksum(file: BinaryIO, entry: TensorEntry, buffer: memoryview, progress: Progress | None) -> str:
    tensor = xxh3_128()
    for start, count in entry.ranges:
        file.seek(start)
        left = count
        while left:
            found = file.readinto(buffer[:left])
            if not found:
                raise CorruptFileError(file_name(file), f"the file ends {left} bytes before the end of a tensor, byte "
                                                      f"{start + count}: cut short since its header was read")
            tensor.update(buffer[:found])
            left -= found
            if progress:
                progress(found)
    return tensor.hexdigest()
