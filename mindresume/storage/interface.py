"""The contract of a file system. Everything a checkpoint reads, writes, renames or removes goes
through a ``Storage``.

    storage = PosixStorage()
    storage.write("/ckpt/rank_0/.a.tmp", [b"header", memoryview(data)])    # durable when it returns
    storage.rename("/ckpt/rank_0/.a.tmp", "/ckpt/rank_0/a.safetensors")    # atomic
    storage.sync("/ckpt/rank_0")                                           # the new name is durable

``operations.publish`` does the three in this order: whatever dies when, a reader sees the final
name with all its bytes, or does not see it. ``create`` is for several threads that write one file
at once. Paths are strings; errors of the file system are ``OSError``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

# bytes: free space that the file system does not report counts as unlimited
UNKNOWN_SPACE = sys.maxsize


@dataclass(frozen=True)
class Status:
    """Describes a file or folder.

    Attributes:
        size: in bytes.
        mtime: last modification, in seconds since 1970.
        is_folder: also for a link to a folder.
        is_link: the folder is a symbolic link.
        changed: last change of the content, name or rights, in seconds since 1970; 0 if the storage
            does not tell. A file that was replaced by another one of the same ``mtime`` has another
            value.
        identity: of this file or folder among all that this machine sees, which no copy has; empty
            if the storage does not tell. Other machines may see another one.
    """

    size: int
    mtime: float
    is_folder: bool
    is_link: bool = False
    changed: float = 0.0
    identity: str = ""


class NewFile(Protocol):
    """A file that several threads write, each at any position. Its creator calls ``finish`` or
    ``abandon`` once."""

    def write_at(self, position: int, data: memoryview) -> None:
        """Writes all of ``data`` at ``position`` (bytes from the start), or raises OSError."""

    def finish(self) -> None:
        """Flushes the bytes to the device; the name needs ``Storage.sync``. On an error removes the
        file if it can."""

    def abandon(self) -> None:
        """Removes the file if it can. Raises no error."""


class Storage(Protocol):
    """Declares eleven operations, and for each what is atomic and what is durable when it returns.
    Several threads may call them at once.

    Attributes:
        width: number of operations that are worth running at the same time (see
            ``operations.parallel``).
    """

    width: int

    def list(self, folder: str) -> list[str]:
        """Returns the names in ``folder``, sorted; an empty list if the folder does not exist. On
        NFS the list may lag behind changes by other hosts. Raises OSError for any other failure:
        the content is then unknown, and must not be taken for empty."""

    def status(self, path: str) -> Status | None:
        """Returns the status of a file or folder; None if it does not exist."""

    def open(self, path: str) -> BinaryIO:
        """Opens a seekable file for reading. Raises FileNotFoundError if it does not exist. A
        committed file never changes while it is open."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        """Writes a new file and flushes its bytes to the device; its name needs ``sync``. Not
        atomic: a reader may see a part of the file, so ``path`` should be a temporary name.

        Args:
            path: of the new file.
            pieces: the bytes, in order.
            size: number of bytes to come, 0 if unknown. Where the file system can reserve space, a
                full disk or an exhausted quota is then an error before the first byte.

        Returns:
            The size of the file in bytes.

        Raises:
            OSError: The write failed. The file is removed if possible. A flush that failed is never
                retried.
        """

    def create(self, path: str, size: int) -> NewFile:
        """Creates a file of ``size`` bytes that is written in pieces. Reserves space, and fails,
        like ``write``."""

    def rename(self, old: str, new: str) -> None:
        """Renames atomically. Replaces a file ``new``, never a folder that has content. Durable
        after ``sync`` of the folder."""

    def copy_owner(self, source: str, path: str) -> None:
        """Gives the file ``path`` the owner, the group and the rights of ``source``, a file or
        folder, as far as this process may and the file system can. Raises no error."""

    def sync(self, folder: str) -> None:
        """Makes all names created, renamed or removed in ``folder`` so far durable, if the file
        system can flush a folder at all."""

    def remove(self, path: str) -> None:
        """Removes a file or an empty folder; does nothing if it does not exist. Raises OSError for
        a folder that is not empty."""

    def make_folder(self, path: str) -> None:
        """Creates a folder and its parents; their names are durable when this returns. Does nothing
        if the folder exists."""

    def free_space(self, folder: str) -> int:
        """Returns the number of bytes that can still be written below ``folder``, which need not
        exist yet; ``UNKNOWN_SPACE`` if the file system does not report it. Raises no error: the
        write itself will show whether it is possible."""
