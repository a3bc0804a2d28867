"""Computes checksums (xxh3_128, in hex) of a file and of each tensor in it while the bytes are written or read.

    sums = Checksums()
    for piece in checksummed(encode("safetensors", tensors, {}), sums):
        out.write(piece)
    assert sums.file == file_checksum(open(path, "rb"))[0]

The checksum of a tensor covers its bytes in C order, little-endian: it is the same in both formats and in memory.
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

Progress = Callable[[int], None]    # receives the number of bytes read since its last call


@dataclass
class Checksums:
    """Checksum of the whole ``file``, its ``size`` in bytes, and checksums of its ``tensors`` by name."""
    file: str = ""
    size: int = 0
    tensors: dict[str, str] = field(default_factory=dict)


def checksummed(pieces: Iterable[tuple[str | None, memoryview]], result: Checksums) -> Iterator[memoryview]:
    """Passes on the pieces of ``encode`` and fills ``result``, which is complete once the iterator is exhausted.

    Raises ValueError if the pieces of a tensor are not contiguous.
    """
    whole, current, tensor = xxh3_128(), None, xxh3_128()
    result.file, result.size, result.tensors = "", 0, {}
    for name, piece in pieces:
        if name is not None:        # header bytes between two parts of one tensor do not end it
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
    if current is not None:
        result.tensors[current] = tensor.hexdigest()
    result.file = whole.hexdigest()


def array_checksum(array: np.ndarray) -> str:
    """Returns the checksum of a tensor in memory, which equals that of its bytes in a file. ``array``: any shape; copied if it is
    not in C order."""
    return xxh3_128(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


def file_checksum(file: BinaryIO, progress: Progress | None = None) -> tuple[str, int]:
    """Returns checksum and size in bytes of the whole file, whatever its current position."""
    whole, size, buffer = xxh3_128(), 0, memoryview(bytearray(CHUNK))
    file.seek(0)
    while found := file.readinto(buffer):
        whole.update(buffer[:found])
        size += found
        if progress:
            progress(found)
    return whole.hexdigest(), size


def tensor_checksum(file: BinaryIO, entry: TensorEntry) -> str:
    """Returns the checksum of one tensor. Raises CorruptFileError if the file ends before the tensor does."""
    return _tensor_checksum(file, entry, memoryview(bytearray(min(CHUNK, entry.nbytes))), None)


def damaged_tensors(file: BinaryIO, path: str, expected: Mapping[str, str], progress: Progress | None = None
                    ) -> list[str]:
    """Returns the names of the tensors that are missing or have another checksum, in the order of ``expected``. Raises
    CorruptFileError if the header cannot be read: single tensors cannot be checked then."""
    tensors, buffer = read_header(file, path).tensors, memoryview(bytearray(CHUNK))
    found = {name: _tensor_checksum(file, entry, buffer, progress)          # in the order of the file, to read it forwards
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
                                                      f"{start + count}: truncated since its header was read")
            tensor.update(buffer[:found])
            left -= found
            if progress:
                progress(found)
    return tensor.hexdigest()
