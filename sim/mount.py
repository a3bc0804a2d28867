"""A ``Storage``: the file system of a simulated cluster as one process on one host sees it.

Each call is one operation of the scheduler (a write is two: half of the bytes, then all). The
schedule may inject a fault there: an error before or after the effect, or the death of the process,
its host or the server. A host caches listings and absent names for ``lag`` seconds, as an NFS
client does, unless it changed the folder itself.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

from mindresume.storage import UNKNOWN_SPACE, NewFile, Status
from sim.cluster import Cluster, Process
from sim.disk import UNLIMITED, Disk, File, Folder, fail


class Mount:
    """Implements ``Storage``. ``width`` 1: a process does one operation at a time, so that
    operation numbers are reproducible."""

    width = 1

    def __init__(self, cluster: Cluster, process: Process):
        self.cluster = cluster
        self.process = process
        self.host = process.host

    # ---- reading ---------------------------------------------------------------------------------

    def list(self, folder: str) -> list[str]:
        return self._do("list", folder, lambda disk: list(self.host.names(disk, folder)))

    def status(self, path: str) -> Status | None:
        def act(disk: Disk) -> Status | None:
            node = self._lookup(disk, path)
            if node is None:
                return None
            if isinstance(node, Folder):
                return Status(4096, node.mtime, True, identity=str(node.inode))
            return Status(len(node.data), node.mtime, False, identity=str(node.inode))

        return self._do("status", path, act)

    def open(self, path: str) -> BinaryIO:
        def act(disk: Disk) -> BinaryIO:
            node = self._lookup(disk, path)
            if node is None:
                fail(errno.ENOENT, path)
            if isinstance(node, Folder):
                fail(errno.EISDIR, path)
            return (
                _UnreadableFile(node.data, path)
                if self.cluster.is_unreadable(path)
                else io.BytesIO(node.data)
            )

        return self._do("open", path, act)

    def free_space(self, folder: str) -> int:
        return self._do(
            "free_space",
            folder,
            lambda disk: UNKNOWN_SPACE if disk.room > UNLIMITED // 2 else disk.room,
            fails=False,
        )

    def _lookup(self, disk: Disk, path: str) -> File | Folder | None:
        return self.host.look(disk, path)

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        made = self.create(path, size, name="write")
        try:
            data = b"".join(pieces)
            made.write_at(0, memoryview(data))
            made.finish()
        except BaseException:
            made.abandon()
            raise
        return len(data)

    def create(self, path: str, size: int, name: str = "create") -> _NewFile:
        def act(disk: Disk) -> _NewFile:
            pieces = name == "create"  # a file of known size must be new
            if pieces and disk.find(path) is not None:
                fail(errno.EEXIST, path)
            if size > disk.room:
                fail(errno.ENOSPC, path)
            file = disk.create(path, bytes(size) if pieces else b"", whole=False)
            self.host.changes(disk, path)
            return _NewFile(self, path, file)

        return self._do(name, path, act)

    def rename(self, old: str, new: str) -> None:
        def act(disk: Disk) -> None:
            disk.rename(old, new)
            self.host.moves(disk, old, new)
            self.cluster.renamed(self.process, old, new)

        self._do("rename", new, act, also=old)

    def copy_owner(self, source: str, path: str) -> None:
        """Does nothing: all simulated processes are of one user."""

    def sync(self, folder: str) -> None:
        self._do("sync", folder, lambda disk: disk.sync(folder))

    def remove(self, path: str) -> None:
        def act(disk: Disk) -> None:
            with suppress(FileNotFoundError, NotADirectoryError):
                disk.remove(path)
            self.host.changes(disk, path)

        self._do("remove", path, act)

    def make_folder(self, path: str) -> None:
        missing = []
        while path not in ("", "/") and not isinstance(self.host.disk_of(path).find(path), Folder):
            missing.append(path)
            path = os.path.dirname(path)
        if not missing:
            self._do("make_folder", path, lambda disk: None)
        for folder in reversed(missing):

            def act(disk: Disk, folder: str = folder) -> None:
                disk.make_folder(folder)
                # contract of Storage: a new folder is durable
                disk.sync(os.path.dirname(folder))
                self.host.changes(disk, folder)

            self._do("make_folder", folder, act)

    # ---- one operation ---------------------------------------------------------------------------

    def _do(
        self, name: str, path: str, act: Callable[[Disk], Any], also: str = "", fails: bool = True
    ) -> Any:
        disk = self.host.disk_of(path)
        code, after = self.cluster.operate(self.process, name, path, also)
        disk.now = self.cluster.server_time()
        if code and not after and fails:
            fail(code, path)
        found = act(disk)
        if code and fails:
            fail(code, path)
        return found


class _UnreadableFile(io.BytesIO):
    """An open file whose bytes cannot be read."""

    def __init__(self, data: bytes, path: str):
        super().__init__(data)
        self.path = path

    def _fail(self, *_: Any) -> NoReturn:
        fail(errno.EIO, self.path)

    read = readinto = readline = _fail


class _NewFile(NewFile):
    """A file that is being written. Of each piece, the first half is visible before the rest;
    ``finish`` flushes it."""

    def __init__(self, mount: Mount, path: str, file: File):
        self.mount = mount
        self.path = path
        self.file = file
        self._content = bytearray(file.data)
        self._open = True

    def write_at(self, position: int, data: memoryview) -> None:
        self._put(position, data[: len(data) // 2])
        self.mount.host.disk_of(self.path).fill(self.file, bytes(self._content), False, self.path)
        self._put(position, data)

    def _put(self, position: int, data: memoryview) -> None:
        missing = position + len(data) - len(self._content)
        if missing > 0:
            self._content += bytes(missing)
        self._content[position : position + len(data)] = data

    def finish(self) -> None:
        try:
            self.mount._do(
                "flush",
                self.path,
                lambda disk: disk.fill(self.file, bytes(self._content), True, self.path),
            )
        except BaseException:
            self.abandon()
            raise
        self._open = False

    def abandon(self) -> None:
        if self._open:
            self._open = False
            if not self.mount.process.dead:
                with suppress(OSError):
                    self.mount.remove(self.path)
