"""Interfaces to the file system and to object stores; no module here knows what a checkpoint is.
This one has the contract of a file system, and functions that work on any ``Storage``: parallel
calls, small files, atomic publishing, removal of a folder tree and of stale files.

    storage = PosixStorage()
    storage.write("/ckpt/rank_0/.a.tmp", [b"header", memoryview(data)])    # durable when it returns
    storage.rename("/ckpt/rank_0/.a.tmp", "/ckpt/rank_0/a.safetensors")    # atomic
    storage.sync("/ckpt/rank_0")                                           # the new name is durable

``publish`` does the three in this order: whatever dies when, a reader sees the final name with all
its bytes, or does not see it. ``create`` is for several threads that write one file at once. Paths
are strings; errors of the file system are ``OSError``.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Protocol, TypeVar

from mindresume import runtime
from mindresume.errors import RecordError
from mindresume.typed import decode, parse_json

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
            ``parallel``).
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


# ---- functions on any storage --------------------------------------------------------------------

Item = TypeVar("Item")
Result = TypeVar("Result")
_TICK = 0.2  # seconds between two questions whether to go on waiting


def parallel(
    storage: Storage, function: Callable[[Item], Result], items: Iterable[Item]
) -> list[Result]:
    """Returns ``[function(item) for item in items]``, computed by up to ``storage.width`` threads.

    Raises the first error; items that no thread has started by then are skipped. The calling thread
    works too, and does everything if no other thread can be started: at the end of the interpreter,
    where a pool would accept no work, or at the limit of processes.
    """
    rows = list(items)
    if len(rows) < 2:
        return list(map(function, rows))
    numbers, lock = iter(range(len(rows))), runtime.Lock()
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        """Works on items until none is left, or one has failed."""
        while True:
            with lock:
                number = None if errors else next(numbers, None)
            if number is None:
                return
            try:
                results[number] = function(rows[number])
            except BaseException as error:
                # also ^C in the calling thread: the others finish their current item
                errors[number] = error

    helpers = []
    with suppress(RuntimeError):
        for _ in range(min(storage.width, len(rows)) - 1):
            helper = runtime.Thread(target=work, daemon=True)
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        try:
            raise errors[min(errors)]
        finally:
            # breaks the cycle error - traceback - frame, which would keep files open
            errors.clear()
    return [results[number] for number in range(len(rows))]


class Hurry(Protocol):
    def is_hurried(self) -> bool:
        """Returns whether nothing is waited for any more. Asked several times a second."""


def call_within(
    seconds: float,
    default: Result,
    work: Callable[..., Result],
    *arguments: Any,
    hurry: Hurry | None = None,
) -> Result:
    """Returns ``work(*arguments)``, which uses a disk that can hang for ever; ``default`` if that
    takes longer than ``seconds``, if ``hurry`` says so, or if no thread can be started. ``work``
    goes on in its thread. It must not raise."""
    results: list[Result] = []

    def run() -> None:
        results.append(work(*arguments))

    thread = runtime.Thread(target=run, name="mindresume-bounded", daemon=True)
    until = runtime.monotonic() + seconds
    with suppress(RuntimeError):  # the limit of threads is reached
        thread.start()
        thread.join(seconds if hurry is None else _TICK)
        while (
            hurry is not None
            and thread.is_alive()
            and not hurry.is_hurried()
            and runtime.monotonic() < until
        ):
            thread.join(_TICK)
    return results[0] if results else default


# bytes of any file other than weights; a record has at most half of that
MAX_SMALL_FILE = 256 << 20


def read_bytes(storage: Storage, path: str, limit: int = MAX_SMALL_FILE) -> bytes:
    """Returns the content of a small file. Raises OSError (EFBIG) if it has more than ``limit``
    bytes: a sparse file of any size takes no space on disk."""
    with storage.open(path) as file:
        found = file.read(limit + 1)
    if len(found) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", path)
    return found


def read_json(storage: Storage, path: str, limit: int = 1 << 20) -> Any:
    """Returns the JSON document in a small file. Raises OSError like ``read_bytes`` and ValueError
    like ``parse_json``."""
    return parse_json(read_bytes(storage, path, limit))


def read_document(storage: Storage, path: str, kind: type[Result]) -> Result | None:
    """Returns the JSON document in a small file as a dataclass; None if it cannot be read, or has
    another form."""
    with suppress(OSError, ValueError, RecordError):
        return decode(kind, read_json(storage, path), os.path.basename(path))
    return None


# ---- published files: a reader sees the final name with all its bytes, or does not see it --------

TEMPORARY = ".mindresume-tmp"


class UnknownOutcomeError(OSError):
    """The rename of a published file was attempted and its outcome is unknown: other processes may
    see the file although an error was reported. NFS can report an operation that took effect as
    failed."""


def publish(
    storage: Storage, path: str, pieces: Iterable[bytes | memoryview], tag: str, size: int = 0
) -> int:
    """Writes ``path`` atomically: temporary file, flush, rename, sync of the folder.

    Args:
        storage: where to write.
        path: the final name.
        pieces: the bytes, in order.
        tag: part of the temporary name; keeps the files of several writers apart.
        size: number of bytes to come, as for ``Storage.write``.

    Returns:
        The size in bytes.

    Raises:
        UnknownOutcomeError: The rename or the sync after it failed; ``path`` may be the new file.
        OSError: The write failed; ``path`` is unchanged.
    """
    temporary = temporary_name(path, tag)
    try:
        size = storage.write(temporary, pieces, size)
    except OSError:
        with suppress(OSError):  # the first error is the one to report
            storage.remove(temporary)
        raise
    try:
        storage.rename(temporary, path)
    except OSError as error:
        with suppress(OSError):
            storage.remove(temporary)
        raise _unknown_outcome(error, path) from error
    try:
        storage.sync(os.path.dirname(path))
    except OSError as error:
        raise _unknown_outcome(error, path) from error
    return size


def _unknown_outcome(error: OSError, path: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(error.errno, error.strerror or str(error), error.filename or path)


def temporary_name(path: str, tag: str) -> str:
    """Returns a hidden name that contains ``tag``, in the folder of ``path``: a rename must not
    cross devices."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{tag}{TEMPORARY}")


def error_text(error: BaseException) -> str:
    """Returns the message of an error. For an OSError: path and reason, without the error number,
    and with the final name of a file instead of its temporary one."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    if error.filename is None:
        return error.strerror
    folder, name = os.path.split(os.fsdecode(error.filename))
    if name.endswith(TEMPORARY):
        name = name.removesuffix(TEMPORARY).rpartition(".")[0].removeprefix(".") or name
    return f"{os.path.join(folder, name)}: {error.strerror}"


def publish_json(storage: Storage, path: str, value: Any, tag: str) -> int:
    """Publishes a JSON document in one compact line, keys in the given order. Returns and raises
    like ``publish``."""
    return publish(storage, path, [json.dumps(value, separators=(",", ":")).encode()], tag)


# ---- links and removal ---------------------------------------------------------------------------


def leads_through_a_link(storage: Storage, root: str, path: str) -> bool:
    """Returns whether a folder between ``root`` and ``path``, or ``path`` itself, is a symbolic
    link."""
    parts = os.path.relpath(path, root).split("/")
    found = [
        storage.status(os.path.join(root, *parts[:count])) for count in range(1, len(parts) + 1)
    ]
    return any(status is not None and status.is_link for status in found)


def remove_tree(storage: Storage, folder: str) -> None:
    """Removes a folder and everything in it, subfolders first. Removes symbolic links without
    following them."""
    paths = [os.path.join(folder, name) for name in storage.list(folder)]
    files = []
    for path, found in zip(paths, parallel(storage, storage.status, paths), strict=True):
        if found is not None and found.is_folder and not found.is_link:
            remove_tree(storage, path)
        else:
            files.append(path)
    parallel(storage, storage.remove, files)
    storage.remove(folder)


STALE_SECONDS = 3600.0  # no process needs such a file for longer


def remove_stale(storage: Storage, paths: Iterable[str], fresh: str) -> None:
    """Removes small temporary files of processes that died: each of ``paths`` that is more than
    ``STALE_SECONDS`` older than ``fresh``, a file that was just written. Their names hold no run
    that could be checked for its end, so their age decides. Compares times of the file system only,
    as clocks of hosts differ. Raises no error: the next job tries again."""
    others = [path for path in paths if path != fresh]
    with suppress(OSError):
        now = storage.status(fresh) if others else None
        if now is None:
            return
        parallel(storage, partial(_remove_older, storage, now.mtime - STALE_SECONDS), others)


def _remove_older(storage: Storage, oldest: float, path: str) -> None:
    with suppress(OSError):  # a file that cannot be removed does no harm
        found = storage.status(path)
        if found is not None and not found.is_folder and found.mtime < oldest:
            storage.remove(path)
