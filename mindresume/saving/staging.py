"""Stages the copy of a save that a background writer works on: one buffer, made at the first save and used again for every other.

    staged = staging.pack(save)          # training thread: one copy of the bytes; the parameters may change afterwards
    save = Staging(fd=...).unpack(staged)         # the writer: arrays again, in the same memory, nothing copied
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

from mindresume.saving.sync_saver import Extra, Save
from mindresume.tensor_files.header import DTYPES, tensor_bytes

_ALIGN = 64                     # bytes: a cache line, and enough for every dtype


@dataclass(frozen=True)
class Slot:
    """An array in the buffer. ``offset`` in bytes."""
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Staged:
    """A save whose arrays are slots of a buffer of ``size`` bytes."""
    save: Save
    size: int


class Staging:
    """A buffer of staging memory. ``shared``: another process can map it, which is given ``fd``. ``size``: bytes of the
    buffer."""

    def __init__(self, shared: bool = False, fd: int = -1):
        self.fd = os.memfd_create("mindresume") if shared and fd < 0 else fd
        self.size = 0
        self._memory = np.empty(0, np.uint8)

    @staticmethod
    def needed(save: Save) -> int:
        """Returns the bytes of buffer for a save."""
        return sum(_padded(array.nbytes) for table in _tables(save) for array in table.values())

    def pack(self, save: Save) -> Staged:
        """Copies every array into the buffer, which grows if it must. Raises OSError or MemoryError if it cannot."""
        needed = self.needed(save)
        if needed > self.size:
            self._grow(needed)
        position = 0

        def stage(table: Mapping[str, np.ndarray]) -> dict[str, Any]:
            nonlocal position
            slots: dict[str, Any] = {}
            for name, array in table.items():
                if array.dtype.name not in DTYPES or not array.dtype.isnative:
                    slots[name] = array.copy()          # a text, or what the format will refuse by name
                    continue
                slot = slots[name] = Slot(array.dtype.name, tuple(array.shape), position)
                self._bytes(slot)[:] = np.frombuffer(tensor_bytes(array), np.uint8)     # bits, not values
                position += _padded(array.nbytes)
            return slots
        return Staged(_with_tables(save, [stage(table) for table in _tables(save)]), self.size)

    def unpack(self, staged: Staged) -> Save:
        """Returns the save with its arrays in the buffer. Raises ValueError if the memory was given back meanwhile: new memory
        would be zeros."""
        if staged.size > self.size:
            if self.fd < 0:
                raise ValueError("the copy of the save is gone: the training did not wait any longer for its writer")
            self._map(staged.size)
        return _with_tables(staged.save, [
            {name: self._view(slot) if isinstance(slot, Slot) else slot for name, slot in table.items()}
            for table in _tables(staged.save)])

    def close(self) -> None:
        """Gives the memory back as soon as no writer works on it any more."""
        self._memory, self.size = np.empty(0, np.uint8), 0
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def _grow(self, size: int) -> None:
        self._memory, self.size = np.empty(0, np.uint8), 0          # the old one goes before the new one comes
        if self.fd >= 0:
            os.ftruncate(self.fd, size)
        self._map(size)

    def _map(self, size: int) -> None:
        if self.fd >= 0:
            memory = mmap.mmap(self.fd, size)
        else:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError, AttributeError):     # fewer page faults at the first copy, where the kernel can
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory, self.size = np.frombuffer(memory, np.uint8), size

    def _view(self, slot: Slot) -> np.ndarray:
        return self._bytes(slot).view(DTYPES[slot.dtype]).reshape(slot.shape)

    def _bytes(self, slot: Slot) -> np.ndarray:
        return self._memory[slot.offset:slot.offset + math.prod(slot.shape) * DTYPES[slot.dtype].itemsize]


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _tables(save: Save) -> list[Mapping[str, Any]]:
    return [*(file.tensors for file in save.shard.files), *(extra.tensors for extra in save.extras)]


def _with_tables(save: Save, tables: list[dict[str, Any]]) -> Save:
    count = len(save.shard.files)
    files = [replace(file, tensors=table) for file, table in zip(save.shard.files, tables[:count], strict=True)]
    extras: list[Extra] = [replace(extra, tensors=table) for extra, table in zip(save.extras, tables[count:], strict=True)]
    return Save(replace(save.shard, files=tuple(files)), tuple(extras))
