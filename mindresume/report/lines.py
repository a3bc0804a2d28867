"""Reads text files whose lines can be of any length, with the holes that a loss of power leaves. Memory is bounded by the
caller."""
from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO


def pieces_of(file: BinaryIO, limit: int, total: int | None = None) -> Iterator[bytes]:
    """Yields each line with its end; a line longer than ``limit`` bytes in pieces of that size. Zero bytes before a line are
    left out, however many they are. Stops after ``total`` bytes that were written (None: at the end of the file)."""
    read = 0
    while (total is None or read < total) and (piece := file.readline(limit)):
        read += len(piece)
        if piece.startswith(b"\0"):
            is_cut = len(piece) == limit and not piece.endswith(b"\n")
            piece = piece.lstrip(b"\0")
            if is_cut and not piece:
                _skip_hole(file)
            elif is_cut:                    # the line that begins within this piece, whole
                piece += file.readline(limit - len(piece))
        if piece:
            yield piece


def _skip_hole(file: BinaryIO) -> None:
    """Moves to where the next bytes were written: a host that lost its power leaves holes, which can be of any size."""
    descriptor = file.fileno()
    place = os.lseek(descriptor, 0, os.SEEK_CUR)            # of the descriptor: what is buffered lies before it
    try:
        data = os.lseek(descriptor, file.tell(), os.SEEK_DATA)
    except OSError:                         # nothing was written behind it, or this file system cannot tell
        file.seek(0, os.SEEK_END)
        return
    os.lseek(descriptor, place, os.SEEK_SET)                # where the buffer expects it
    file.seek(data)
