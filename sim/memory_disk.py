"""Memory of a simulated host as a file system: it survives the death of processes, and is lost with the host.

Paths below ``SHM`` lead there (``Host.disk_of``). The functions of ``saving.memory_tier`` that ask the kernel have fakes here.
"""
from __future__ import annotations

import errno
from typing import Any

import numpy as np

from mindresume.events import TierSaved
from mindresume.saving.memory_tier import directory, mapped_file
from sim.cluster import current_cluster, current_process
from sim.disk import Disk, Folder, fail


class MappedFile:
    """A file whose bytes are overwritten in two operations: a process that dies between them leaves half of each."""

    def __init__(self, path: str, size: int):
        self.path, self.size = path, size
        self._disk = self._operate("create")
        if self._disk.find(path) is not None:
            fail(errno.EEXIST, path)
        self._file = self._disk.create(path, bytes(size), whole=True)
        self._content = bytearray(size)

    def resize(self, size: int) -> None:
        self._operate("resize")
        half = bytearray(b"\7" * (size // 2)) + self._content[size // 2:size]
        self._content, self.size = half + bytes(size - len(half)), size
        self._disk.fill(self._file, bytes(self._content), True, self.path)
        self._operate("copy")

    @property
    def data(self) -> np.ndarray:
        self._disk.fill(self._file, bytes(self._content), True, self.path)      # what was copied since the last call
        return np.frombuffer(self._content, np.uint8)

    def close(self) -> None:
        pass

    def _operate(self, name: str) -> Disk:
        code, _ = current_cluster().operate(current_process(), name, self.path)
        if code:
            fail(code, self.path)
        return current_process().host.disk_of(self.path)


def _is_simulated() -> bool:
    """Returns whether this process works on simulated disks. Tests run ranks as processes of a cluster on the real disk."""
    return bool(current_process().host.disk.root.entries)


def _mapped_file(path: str, size: int) -> Any:
    return MappedFile(path, size) if _is_simulated() else mapped_file.MappedFile(path, size)


def _make_tier(path: str) -> None:
    if not _is_simulated():
        directory.make_tier.__wrapped__(path)
        return
    disk, folder = current_process().host.disk_of(path), ""
    for name in filter(None, path.split("/")):
        folder += f"/{name}"
        if not isinstance(disk.find(folder), Folder):
            disk.make_folder(folder)


def _foreign_folder(path: str) -> str:
    return "" if _is_simulated() else directory.foreign_folder.__wrapped__(path)


def _memory_identity(tier: str) -> str:
    return current_process().host.name if _is_simulated() else directory.memory_identity.__wrapped__(tier)


ANSWERS = {mapped_file.mapped_file: _mapped_file, directory.make_tier: _make_tier, directory.foreign_folder: _foreign_folder,
           directory.memory_identity: _memory_identity}


def common_saves(job: Any) -> list[tuple[str, int]]:
    """Returns the saves in memory of a job that each of its ranks knows to be whole."""
    ranks = [process for process in job.ranks if process.own is not None and process.own.session is not None]
    if not ranks or len(ranks) < job.training.ranks:
        return []
    steps = [{event.step for _, event in process.events if isinstance(event, TierSaved)} for process in ranks]
    return [(ranks[0].own.target.run, step) for step in sorted(set.intersection(*steps))]

