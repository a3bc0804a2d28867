"""The one interface to the file system. Everything a checkpoint reads, writes, renames or removes goes through a ``Storage``.

    storage = PosixStorage()
    storage.write("/ckpt/rank_0/.a.tmp", [b"header", memoryview(data)])    # durable when it returns
    storage.rename("/ckpt/rank_0/.a.tmp", "/ckpt/rank_0/a.safetensors")    # atomic
    storage.sync("/ckpt/rank_0")                                           # the new name is durable

``publish`` does the three in order. A reader sees the final name with all its bytes or not at all, whatever dies when. ``create``
is for several threads that write one file at once. Paths are strings; errors of the file system are ``OSError``.
"""
from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeVar

from mindresume.bounded_json import parse_json

Item, Result = TypeVar("Item"), TypeVar("Result")


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

    def room(self, folder: str) -> int:
        """Returns the bytes that can still be written below ``folder`` (which need not exist yet); ``UNKNOWN_ROOM`` where the
        file system does not tell. Raises no error: whether anything can be written shows when it is."""


def open_regular(path: str) -> BinaryIO:
    """Opens a file for reading. A pipe would block until somebody writes into it, a device never ends: OSError for both."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))   # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", path)
    return file


class PosixStorage:
    """A local disk or a shared POSIX file system (NFS, Lustre, GPFS ...)."""
    width = 32                      # 25,000 operations of 2 ms each, for the records of 8,192 ranks, take 1.5 s

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def status(self, path: str) -> Status | None:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):        # a link to itself, a name no file can have
                return None
            raise
        folder = stat.S_ISDIR(found.st_mode)
        return Status(found.st_size, found.st_mtime, folder, folder and os.path.islink(path))

    def open(self, path: str) -> BinaryIO:
        return open_regular(path)

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        written = begun = 0
        try:
            with open(path, "wb", buffering=1 << 20) as file:
                if size:
                    _reserve(file.fileno(), path, size)
                for piece in pieces:
                    written += file.write(piece)
                    if written - begun >= _AHEAD:
                        _begin_flush(file.fileno(), begun, written)
                        begun = written
                file.flush()
                os.fsync(file.fileno())
        except BaseException:                  # also KeyboardInterrupt: a half-written file must not stay, then re-raise
            with suppress(OSError):            # the first error is the one to report
                os.remove(path)
            raise
        return written

    def create(self, path: str, size: int) -> NewFile:
        return _PosixFile(path, size)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def sync(self, folder: str) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in _NO_SUCH_OPERATION:
                raise
        finally:
            os.close(handle)

    def remove(self, path: str) -> None:
        try:
            os.remove(path)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            if not os.path.isdir(path) or os.path.islink(path):
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
                with suppress(OSError):         # who finds it takes its name for durable: the next attempt makes it anew
                    os.rmdir(folder)
                raise

    def room(self, folder: str) -> int:
        while folder and not os.path.isdir(folder) and os.path.dirname(folder) != folder:
            folder = os.path.dirname(folder)
        try:
            found = os.statvfs(folder or ".")
        except OSError:
            return UNKNOWN_ROOM
        if not (found.f_blocks and found.f_frsize):         # zeros: FUSE without statfs
            return UNKNOWN_ROOM
        return found.f_bavail * found.f_frsize


class _PosixFile:
    def __init__(self, path: str, size: int):
        self.path, self.size, self._begun = path, size, 0
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
        if position - self._begun >= _AHEAD:        # of two threads both may begin with the same bytes; it is only a hint
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


UNKNOWN_ROOM = sys.maxsize
_NO_SUCH_OPERATION = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_KEEP_SIZE = 1                  # linux/falloc.h: blocks are reserved, the file grows as it is written
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)         # anything else: it cannot reserve, which is no answer


def _reserve(handle: int, path: str, size: int) -> None:
    """Reserves blocks for ``size`` bytes: full disks and quotas show before anything is written."""
    code = _fallocate(handle, size)
    if code in _NO_ROOM:
        raise OSError(code, os.strerror(code), path)


def _fallocate(handle: int, size: int) -> int:
    """Returns 0 or the number of an error. The system call itself, because posix_fallocate writes into every block where the file
    system (NFS before 4.2) cannot reserve."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return errno.ENOSYS
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return ctypes.get_errno() if fallocate(handle, _KEEP_SIZE, 0, size) else 0


_AHEAD = 32 << 20               # bytes
_WRITE = 2                      # SYNC_FILE_RANGE_WRITE of linux/fs.h


def _begin_flush(handle: int, start: int, end: int) -> None:
    """Lets the device begin with these bytes while the next ones are still being hashed, so the flush at the end finds little
    left to do. Only a hint, and without waiting: an error of the device is kept by the kernel for that flush, which reports
    it."""
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        sync_file_range(handle, start, end - start, _WRITE)


def parallel(storage: Storage, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Returns ``[function(item) for item in items]``, as many at once as ``storage.width``; the first error is raised, and
    then what nobody has begun is left out. The calling thread takes part: where no other thread can be had (the interpreter is
    ending, the limit of processes is reached) it does everything. A pool would take no work at the end of the interpreter."""
    rows = list(items)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    lock, left = threading.Lock(), iter(range(len(rows)))

    def work() -> None:
        while True:
            with lock:
                number = None if errors else next(left, None)
            if number is None:
                return
            try:
                results[number] = function(rows[number])
            except BaseException as error:      # also ^C in the calling thread: the others end with what they have begun
                errors[number] = error
    helpers = []
    with suppress(RuntimeError):
        for _ in range(min(storage.width, len(rows)) - 1):
            helper = threading.Thread(target=work, daemon=True)
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        try:
            raise errors[min(errors)]
        finally:
            errors.clear()                      # no cycle of error, traceback and frame, which would keep files open
    return [results[number] for number in range(len(rows))]


class UnsettledError(OSError):
    """The rename of a file that is being published was attempted: its name may be there, and others may have seen it, whatever
    the error says. On NFS an operation that took effect can be reported as failed."""


def publish(storage: Storage, path: str, pieces: Iterable[bytes | memoryview], tag: str, size: int = 0) -> int:
    """Writes ``path`` so that it appears complete or not at all. ``tag`` keeps the temporary names of writers apart; ``size`` as
    for ``write``.

    Returns the size in bytes. UnsettledError if the rename or what follows it fails: ``path`` may be there. Any other OSError: it
    is as before.
    """
    folder = os.path.dirname(path)
    temporary = temporary_name(path, tag)
    try:
        size = storage.write(temporary, pieces, size)
    except OSError:
        with suppress(OSError):                 # the first error is the one to report
            storage.remove(temporary)
        raise
    try:
        storage.rename(temporary, path)
    except OSError as error:
        with suppress(OSError):
            storage.remove(temporary)
        raise _unsettled(error, path) from error
    try:
        storage.sync(folder)
    except OSError as error:
        raise _unsettled(error, path) from error
    return size


def _unsettled(error: OSError, path: str) -> UnsettledError:
    return UnsettledError(error.errno, error.strerror or str(error), error.filename or path)


def temporary_name(path: str, tag: str) -> str:
    """Returns a hidden name beside the final one (a rename must not cross devices), which has the ``tag``."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{tag}{TEMPORARY}")


TEMPORARY = ".mindresume-tmp"


def error_text(error: BaseException) -> str:
    """Returns what an error says; of one of the operating system the path and the reason, without its number and without the
    temporary name under which a file is written."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    if error.filename is None:
        return error.strerror
    folder, name = os.path.split(os.fsdecode(error.filename))
    if name.endswith(TEMPORARY):
        name = name.removesuffix(TEMPORARY).rpartition(".")[0].removeprefix(".") or name
    return f"{os.path.join(folder, name)}: {error.strerror}"


def publish_json(storage: Storage, path: str, value: Any, tag: str) -> int:
    """Publishes a JSON document (compact, one line, sorted as given), as ``publish``."""
    return publish(storage, path, [json.dumps(value, separators=(",", ":")).encode()], tag)


MOST_READ = 256 << 20           # bytes at once of any file that is no weights; a record has at most half of that


def read_bytes(storage: Storage, path: str, limit: int = MOST_READ) -> bytes:
    """Returns the whole of a small file. Raises OSError (EFBIG) if it has more than ``limit`` bytes: a sparse file costs
    nothing."""
    with storage.open(path) as file:
        found = file.read(limit + 1)
    if len(found) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", path)
    return found


def read_json(storage: Storage, path: str, limit: int = 1 << 20) -> Any:
    """Returns the JSON document in a small file. Raises OSError as ``read_bytes``, ValueError as ``parse_json``."""
    return parse_json(read_bytes(storage, path, limit))


def remove_tree(storage: Storage, folder: str) -> None:
    """Removes a folder and everything in it, folders in it first; links are removed, not followed."""
    paths = [os.path.join(folder, name) for name in storage.list(folder)]
    files = []
    for path, found in zip(paths, parallel(storage, storage.status, paths), strict=True):
        if found is not None and found.is_folder and not found.is_link:
            remove_tree(storage, path)
        else:
            files.append(path)
    parallel(storage, storage.remove, files)
    storage.remove(folder)
