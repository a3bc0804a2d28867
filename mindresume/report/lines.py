"""Reads text files with lines of any length, and with the holes that a loss of power leaves. The caller bounds the memory."""
from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO


def pieces_of(file: BinaryIO, limit: int, total: int | None = None) -> Iterator[bytes]:
    """Yields each line with its end; a line longer than ``limit`` bytes in pieces of that size. Skips any number of zero bytes
    before a line. Stops after ``total`` bytes of content (None: at the end of the file)."""
    read = 0
    while (total is None or read < total) and (piece := file.readline(limit)):
        read += len(piece)
        if piece.startswith(b"\0"):
            is_cut = len(piece) == limit and not piece.endswith(b"\n")
            piece = piece.lstrip(b"\0")
            if is_cut and not piece:
                _skip_hole(file)
            elif is_cut:                    # reads the rest of the line that begins in this piece
                piece += file.readline(limit - len(piece))
        if piece:
            yield piece


def _skip_hole(file: BinaryIO) -> None:
    """Seeks to the next written bytes: a host that loses its power leaves holes of any size."""
    descriptor = file.fileno()
    place = os.lseek(descriptor, 0, os.SEEK_CUR)            # the position of the descriptor: buffered bytes lie before it
    try:
        data = os.lseek(descriptor, file.tell(), os.SEEK_DATA)
    except OSError:                         # nothing follows, or this file system does not support it
        file.seek(0, os.SEEK_END)
        return
    os.lseek(descriptor, place, os.SEEK_SET)                # the position that the buffer expects
    file.seek(data)
