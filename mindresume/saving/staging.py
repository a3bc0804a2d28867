"""Stages a save for a background writer: a copy of its arrays in one buffer, which all saves use
again.

staged = staging.pack(save)  # training thread: copies the arrays, which may change afterwards
save = Staging(fd=...).unpack(staged)         # writer: arrays in the same memory, without a copy
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindresume import runtime
from mindresume.coordination import host_memory
from mindresume.saving.shard_writer import ExtraWeights, Save
from mindresume.tensor_files import tensor_bytes
from mindresume.tensor_files.header import DTYPES

_ALIGN = 64  # bytes: a cache line, and enough for every dtype


@dataclass(frozen=True)
class Slot:
    """An array in the buffer. ``offset`` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class StagingLimits:
    """The memory that a copy may take.

    Attributes:
        budget: bytes of staging memory; 0: as much as a save needs.
        share: bytes that this rank may take of the memory of its host or container.
    """

    budget: int = 0
    share: int = host_memory.UNKNOWN

    def why_not(self, needed: int, size: int) -> str | None:
        """Returns why a save of ``needed`` bytes cannot be staged, None if it can. A buffer of
        ``size`` bytes exists already, and is used in any case: it takes no more memory."""
        if needed <= size:
            return None
        more, left = needed - size, host_memory.left()
        limits = [
            (needed, self.budget or host_memory.UNKNOWN, "the budget (mindresume.staging_gib) is"),
            (
                needed,
                self.share,
                "the share of this rank in what the host, or its container, had left at the start "
                "is",
            ),
            (
                more,
                left,
                f"{more / 2**20:.0f} MiB more than it has, and the host, or its container, has "
                "left",
            ),
        ]
        return next(
            (
                f"it needs {needed / 2**20:.0f} MiB of staging memory; {what} {limit / 2**20:.0f} "
                "MiB"
                for wanted, limit, what in limits
                if wanted > limit
            ),
            None,
        )


@dataclass(frozen=True)
class Staged:
    """A save whose arrays are slots of a buffer of ``size`` bytes."""

    save: Save
    size: int


class Staging:
    """A buffer of staging memory. ``shared``: another process maps it by ``fd``. ``size``: bytes of
    the buffer."""

    def __init__(self, shared: bool = False, fd: int = -1):
        self.fd = os.memfd_create("mindresume") if shared and fd < 0 else fd
        self.size = 0
        self._memory = np.empty(0, np.uint8)

    @staticmethod
    def needed(save: Save) -> int:
        """Returns the bytes of buffer for a save."""
        return sum(_padded(array.nbytes) for table in _tables(save) for array in table.values())

    def pack(self, save: Save) -> Staged:
        """Copies every array into the buffer, which grows if needed. Raises OSError or MemoryError
        if it cannot."""
        needed = self.needed(save)
        if needed > self.size:
            self._grow(needed)
        position, tables = 0, []
        for table in _tables(save):
            slots: dict[str, Any] = {}
            tables.append(slots)
            for name, array in table.items():
                if array.dtype.name not in DTYPES or not array.dtype.isnative:
                    # a text, or a dtype that the format will refuse
                    slots[name] = array.copy()
                    continue
                slot = slots[name] = Slot(array.dtype.name, tuple(array.shape), position)
                # bits, not values
                self._bytes(slot)[:] = np.frombuffer(tensor_bytes(array), np.uint8)
                position += _padded(array.nbytes)
        return Staged(_with_tables(save, tables), self.size)

    def unpack(self, staged: Staged) -> Save:
        """Returns the save with its arrays in the buffer. Raises ValueError if the buffer was
        released: new memory would be zeros."""
        if staged.size > self.size:
            if self.fd < 0:
                raise ValueError(
                    "the staging buffer was released: the training no longer waited for the writer"
                )
            self._map(staged.size)
        return _with_tables(
            staged.save,
            [
                {
                    name: self._bytes(slot).view(DTYPES[slot.dtype]).reshape(slot.shape)
                    if isinstance(slot, Slot)
                    else slot
                    for name, slot in table.items()
                }
                for table in _tables(staged.save)
            ],
        )

    def close(self) -> None:
        """Releases the memory; a writer that uses it keeps it until it is done."""
        self._memory, self.size = np.empty(0, np.uint8), 0
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def _grow(self, size: int) -> None:
        self._memory, self.size = np.empty(0, np.uint8), 0  # releases the old memory first
        if self.fd >= 0:
            os.ftruncate(self.fd, size)
        self._map(size)

    def _map(self, size: int) -> None:
        if self.fd >= 0:
            self._memory = map_memory(self.fd, size, mmap.MAP_SHARED)
        else:
            # fewer page faults at the first copy, if the kernel supports it
            self._memory = map_memory(
                -1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, "MADV_HUGEPAGE"
            )
        self.size = size

    def _bytes(self, slot: Slot) -> np.ndarray:
        return self._memory[
            slot.offset : slot.offset + math.prod(slot.shape) * DTYPES[slot.dtype].itemsize
        ]


def map_memory(fd: int, size: int, flags: int, advice: str = "") -> np.ndarray:
    """Returns ``size`` bytes of memory: those of the open file ``fd``, or new ones (-1).
    ``advice``: a name of ``mmap`` for ``madvise``, which a kernel need not support. Raises
    OSError."""
    memory = mmap.mmap(fd, size, flags=flags)
    with suppress(OSError, AttributeError):
        if advice:
            memory.madvise(getattr(mmap, advice))
    return np.frombuffer(memory, np.uint8)


@runtime.asks_machine
def staging_buffer(shared: bool = False) -> Staging:
    """Returns a new buffer. ``shared``: another process can open it."""
    return Staging(shared)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _tables(save: Save) -> list[Mapping[str, Any]]:
    return [*(file.tensors for file in save.shard.files), *(extra.tensors for extra in save.extras)]


def _with_tables(save: Save, tables: list[dict[str, Any]]) -> Save:
    count = len(save.shard.files)
    files = [
        replace(file, tensors=table)
        for file, table in zip(save.shard.files, tables[:count], strict=True)
    ]
    extras: list[ExtraWeights] = [
        replace(extra, tensors=table)
        for extra, table in zip(save.extras, tables[count:], strict=True)
    ]
    return replace(save, shard=replace(save.shard, files=tuple(files)), extras=tuple(extras))
