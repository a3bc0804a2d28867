"""Reads bytes of a file from a position, without the position of its handle: several threads can share it."""
from __future__ import annotations

import os

from mindresume.errors import CorruptFileError


def read_into(handle: int, position: int, out: memoryview, name: str) -> None:
    """Fills ``out`` from byte ``position`` on. ``name``: of the file, whose header was read before. Raises CorruptFileError if
    the file ends before, OSError."""
    while out:
        found = os.preadv(handle, [out], position)
        if not found:
            raise CorruptFileError(name, f"the file ends at byte {position}, {len(out)} bytes are expected from there: truncated "
                                         f"since its header was read")
        position, out = position + found, out[found:]
