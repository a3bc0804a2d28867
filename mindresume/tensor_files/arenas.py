"""Allocates memory for many arrays that are about to be filled.

    memory = new_memory({"embedding.weight": 4096, "step": 4})          # {name: uninitialised bytes}
"""
from __future__ import annotations

import mmap
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from typing import TypeVar

import numpy as np

ARENA = 64 << 20            # bytes of new memory that arrays share: it is released when the last of them is
_SMALL = 4 << 20            # bytes: less is not worth a mapping of its own
_ALIGNED = 64               # bytes: a line of the CPU's cache
Name = TypeVar("Name", bound=Hashable)


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
