"""Implements ``Storage`` for a local disk or a shared POSIX file system (NFS, Lustre, GPFS, ...),
and tells whether all nodes see a folder, from SHARED_PATHS and the type of its file system.

mindformers asks the second before a conversion and where it saves (utils/file_utils.py,
is_publicly_accessible_path). mindformers compares string prefixes, so ``/data`` also matches
``/data01``, and it knows only NFS. Saving and resuming do not rely on it: there the ranks look for
a probe file (``coordination.storage_topology``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from mindresume import runtime
from mindresume.storage import UNKNOWN_SPACE, NewFile, Status


class PosixStorage:
    """Implements ``Storage`` with the calls of the operating system."""

    # the records of 8,192 ranks need 25,000 operations; at 2 ms each, 32 at a time take 1.5 s
    width = 32

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def status(self, path: str) -> Status | None:
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
        folder = stat.S_ISDIR(found.st_mode)
        return Status(
            found.st_size,
            found.st_mtime,
            folder,
            folder and os.path.islink(path),
            found.st_ctime,
            f"{found.st_dev}/{found.st_ino}",
        )

    def open(self, path: str) -> BinaryIO:
        """Implements ``Storage.open``. Raises OSError for a pipe, whose open would block until
        somebody writes into it, and for a device, which may never end."""
        try:
            file = open(  # noqa: SIM115
                path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
            )
        except OSError as error:
            if error.errno in _ABSENT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            raise
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "is not a regular file", path)
        return file

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        written = begun = 0
        try:
            with open(path, "wb", buffering=1 << 20) as file:
                if size:
                    _reserve(file.fileno(), path, size)
                for piece in pieces:
                    written += file.write(piece)
                    if written - begun >= _FLUSH_EVERY:
                        _begin_flush(file.fileno(), begun, written)
                        begun = written
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            # also KeyboardInterrupt: a half-written file must not stay
            with suppress(OSError):  # the first error is the one to report
                os.remove(path)
            raise
        return written

    def create(self, path: str, size: int) -> NewFile:
        return _PosixFile(path, size)

    def rename(self, old: str, new: str) -> None:
        try:
            os.replace(old, new)
        except OSError as error:
            if error.errno == errno.EXDEV and os.path.isdir(old):
                raise OSError(errno.EXDEV, _OF_AN_IMAGE, old) from error
            raise

    def copy_owner(self, source: str, path: str) -> None:
        with suppress(OSError):
            found = os.stat(source)
            os.chmod(path, found.st_mode & 0o666)  # of a folder without the right to enter it
            os.chown(path, found.st_uid, found.st_gid)

    def sync(self, folder: str) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(handle)

    def remove(self, path: str) -> None:
        try:
            os.remove(path)
        except OSError as error:
            if error.errno in _ABSENT:
                return
            if (
                not isinstance(error, (IsADirectoryError, PermissionError))
                or not os.path.isdir(path)
                or os.path.islink(path)
            ):
                raise
            try:
                os.rmdir(path)
            except FileNotFoundError:
                return

    def make_folder(self, path: str) -> None:
        missing = []
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            os.makedirs(folder, exist_ok=True)
            try:
                self.sync(os.path.dirname(folder) or ".")
            except OSError:
                # a later call would take an existing folder for durable
                with suppress(OSError):
                    os.rmdir(folder)
                raise

    def free_space(self, folder: str) -> int:
        while folder and not os.path.isdir(folder) and os.path.dirname(folder) != folder:
            folder = os.path.dirname(folder)
        try:
            found = os.statvfs(folder or ".")
        except OSError:
            return UNKNOWN_SPACE
        # FUSE file systems without statfs report zeros
        if not (found.f_blocks and found.f_frsize):
            return UNKNOWN_SPACE
        return found.f_bavail * found.f_frsize


class _PosixFile:
    """Implements ``NewFile`` with positional writes."""

    def __init__(self, path: str, size: int):
        self.path = path
        self.size = size
        self._begun = 0
        self._handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            if size:
                _reserve(self._handle, path, size)
                os.truncate(self._handle, size)
        except BaseException:
            self.abandon()
            raise

    def write_at(self, position: int, data: memoryview) -> None:
        while data:
            done = os.pwrite(self._handle, data, position)
            position, data = position + done, data[done:]
        # a race between two threads only repeats the hint
        if position - self._begun >= _FLUSH_EVERY:
            begun, self._begun = self._begun, position
            _begin_flush(self._handle, begun, position)

    def finish(self) -> None:
        try:
            os.fsync(self._handle)
        except BaseException:
            self.abandon()
            raise
        handle, self._handle = self._handle, -1
        os.close(handle)

    def abandon(self) -> None:
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            with suppress(OSError):
                os.close(handle)
            with suppress(OSError):
                os.remove(self.path)


_LIBC = ctypes.CDLL(None, use_errno=True)
_OF_AN_IMAGE = (
    "this folder cannot be renamed: it comes from the image of the container (overlayfs), or a "
    "file system is mounted there; keep checkpoints and outputs on a mounted volume, or copy the "
    "folder and remove it"
)
# no such file: a file or a link to itself stands where a folder should, or the name is too long for
# any file
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_FALLOC_FL_KEEP_SIZE = 1  # linux/falloc.h: reserves blocks; the file grows as it is written
# anything else: it cannot reserve, which is no answer
_CANNOT_HOLD = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _reserve(handle: int, path: str, size: int) -> None:
    """Reserves blocks for ``size`` bytes, so that a full disk or an exhausted quota is an error
    before anything is written. posix_fallocate will not do: it writes into every block where the
    file system cannot reserve (NFS before 4.2)."""
    if hasattr(_LIBC, "fallocate") and _LIBC.fallocate(
        handle, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size)
    ):
        code = ctypes.get_errno()
        if code in _CANNOT_HOLD:
            raise OSError(code, os.strerror(code), path)


_FLUSH_EVERY = 32 << 20  # bytes
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def _begin_flush(handle: int, start: int, end: int) -> None:
    """Starts writing these bytes back while the next ones are hashed, so that the final fsync has
    little left to do. Only a hint, and it does not wait: the kernel keeps an error of the device
    for that fsync, which reports it."""
    if hasattr(_LIBC, "sync_file_range"):
        _LIBC.sync_file_range(
            handle, ctypes.c_int64(start), ctypes.c_int64(end - start), _SYNC_FILE_RANGE_WRITE
        )


# ---- which file systems all nodes see ------------------------------------------------------------


# Network file systems. A FUSE file system is named fuse.NAME; dpc is the client of OceanStor and
# SFS Turbo.
SHARED_TYPES = frozenset(
    (
        "nfs",
        "nfs4",
        "dpc",
        "lustre",
        "gpfs",
        "mmfs",
        "beegfs",
        "ceph",
        "cephfs",
        "ceph-fuse",
        "glusterfs",
        "sshfs",
        "juicefs",
        "cifs",
        "smb3",
        "smbfs",
        "ocfs2",
        "gfs2",
        "orangefs",
        "pvfs2",
        "panfs",
        "wekafs",
        "quobyte",
        "mfs",
        "afs",
        "curvefs",
        "cubefs",
        "alluxio-fuse",
        "obsfs",
        "s3fs",
    )
)
LOCAL_TYPES = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay")
)
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
        point: the mount point.
        kind: type as the kernel names it, such as nfs4 or fuse.ceph.
    """

    point: str
    kind: str


def mounts(table: str = "/proc/self/mounts") -> list[Mount]:
    """Returns the mounted file systems, in mount order: a later one hides an earlier one at the
    same point. Empty if ``table`` cannot be read."""
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.split(" ") for line in file]
    except OSError:
        return []
    return [
        Mount(_OCTAL.sub(lambda found: chr(int(found[1], 8)), row[1]), row[2])
        for row in rows
        if len(row) > 2
    ]


def within(path: str, folder: str) -> bool:
    """Returns whether ``path`` is ``folder`` or lies in it. Both must be absolute. Compares whole
    components: /data01 is not in /data."""
    return os.path.commonpath([path, folder]) == folder


def is_shared(path: str, shared_paths: str = "") -> bool:
    """Returns whether all nodes see ``path``.

    Args:
        path: relative paths and symbolic links are resolved.
        shared_paths: the value of SHARED_PATHS: folders separated by commas.
    """
    path = os.path.realpath(path)
    named = [
        os.path.realpath(folder.strip()) for folder in shared_paths.split(",") if folder.strip()
    ]
    if any(within(path, folder) for folder in named):
        return True
    return filesystem_type(path) in SHARED_TYPES


def filesystem_type(path: str) -> str:
    """Returns the type of the file system that holds ``path``, lower case, without "fuse."; empty
    if unknown. The deepest mount point decides. ``path`` must be absolute and resolved."""
    holding = [
        (len(point), number, mount.kind)
        for number, mount in enumerate(mounts())
        if os.path.isabs(point := os.path.normpath(mount.point)) and within(path, point)
    ]
    kind = max(holding)[2] if holding else ""
    return kind.lower().removeprefix("fuse.")


@runtime.asks_machine
def is_local(path: str) -> bool:
    """Returns whether ``path`` certainly lies on a disk or in memory of this host, where a change
    is visible at once."""
    return filesystem_type(os.path.realpath(path)) in LOCAL_TYPES
