"""The one interface to the file system. Everything a checkpoint reads, writes, renames or removes goes through a ``Storage``.

    storage = PosixStorage()
    storage.write("/ckpt/rank_0/.a.tmp", [b"header", memoryview(data)])    # durable when it returns
    storage.rename("/ckpt/rank_0/.a.tmp", "/ckpt/rank_0/a.safetensors")    # atomic
    storage.sync("/ckpt/rank_0")                                           # the new name is durable

``publish`` does the three in order. A reader sees the final name with all its bytes or not at all, whatever dies when. ``create``
is for several threads that write one file at once. Paths are strings; errors of the file system are ``OSError``.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

UNKNOWN_SPACE = sys.maxsize


@dataclass(frozen=True)
class Status:
    """``size`` in bytes, ``mtime`` in seconds since 1970. ``is_link``: a folder that really lies elsewhere."""
    size: int
    mtime: float
    is_folder: bool
    is_link: bool = False


class NewFile(Protocol):
    """A file that is being written, by several threads at any position. Its creator calls one of the last two methods."""

    def write_at(self, position: int, data: memoryview) -> None:
        """Writes all of ``data``, or raises OSError."""

    def finish(self) -> None:
        """Makes its bytes durable (its name is not). On an error it is removed if it can be."""

    def abandon(self) -> None:
        """Removes it if it can be; raises no error."""


class Storage(Protocol):
    """Ten operations. What is atomic and what is durable when each returns. All of them may be called by several threads at
    once; ``width`` of them is what makes sense (``parallel``)."""
    width: int

    def list(self, folder: str) -> list[str]:
        """Returns the names in ``folder``, sorted; empty if there is no such folder. May lag behind other hosts on NFS. Raises
        OSError for any other reason: then its content is not known, and it must not be taken for empty."""

    def status(self, path: str) -> Status | None:
        """Returns the status of a file or folder, None if there is none."""

    def open(self, path: str) -> BinaryIO:
        """Opens a seekable file for reading. Raises FileNotFoundError if absent. Committed files never change under a reader."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        """Writes a new file with these bytes, flushed to the device when this returns (its name is not: see ``sync``). Returns
        its size. On any error the file is removed if it can be, and the error is raised; a flush that failed is never tried
        again. Not atomic: a reader may see part of it, so ``path`` is a temporary name. ``size``: bytes that will come; a full
        disk or an exhausted quota is then an error before the first byte, where the file system can reserve space."""

    def create(self, path: str, size: int) -> NewFile:
        """Creates a file of ``size`` bytes to be written in pieces; otherwise as ``write``."""

    def rename(self, old: str, new: str) -> None:
        """Renames atomically; replaces a file ``new``, never a folder with content. Durable after ``sync`` of the folder."""

    def sync(self, folder: str) -> None:
        """Makes names created, renamed or removed in ``folder`` so far durable (where the file system flushes folders at all)."""

    def remove(self, path: str) -> None:
        """Removes a file or an empty folder; no error if it is gone already. OSError if a folder is not empty."""

    def make_folder(self, path: str) -> None:
        """Creates a folder and its parents; the new names are durable when this returns. No error if it is there."""

    def free_space(self, folder: str) -> int:
        """Returns the bytes that can still be written below ``folder`` (which need not exist yet); ``UNKNOWN_SPACE`` where the
        file system does not tell. Raises no error: whether anything can be written shows when it is."""
