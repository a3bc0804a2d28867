"""Functions that work on any ``Storage``: parallel calls, small files, removal of a folder tree and of stale files."""
from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from mindresume import runtime
from mindresume.storage.interface import Storage
from mindresume.typed import parse_json

Item = TypeVar("Item")
Result = TypeVar("Result")
_TICK = 0.2                     # seconds between two questions whether to go on waiting


def parallel(storage: Storage, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Returns ``[function(item) for item in items]``, computed by up to ``storage.width`` threads.

    Raises the first error; items that no thread has started by then are skipped. The calling thread works too, and does
    everything if no other thread can be started: at the end of the interpreter, where a pool would accept no work, or at the
    limit of processes.
    """
    rows = list(items)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    lock, left = runtime.Lock(), iter(range(len(rows)))

    def work() -> None:
        while True:
            with lock:
                number = None if errors else next(left, None)
            if number is None:
                return
            try:
                results[number] = function(rows[number])
            except BaseException as error:      # also ^C in the calling thread: the others finish their current item
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
            errors.clear()                      # breaks the cycle error - traceback - frame, which would keep files open
    return [results[number] for number in range(len(rows))]


class Hurry(Protocol):
    def is_hurried(self) -> bool:
        """Returns whether nothing is waited for any more. Asked several times a second."""


def call_within(seconds: float, default: Result, work: Callable[..., Result], *arguments: Any, hurry: Hurry | None = None
                ) -> Result:
    """Returns ``work(*arguments)``, which uses a disk that can hang for ever; ``default`` if that takes longer than ``seconds``,
    if ``hurry`` says so, or if no thread can be started. ``work`` goes on in its thread. It must not raise."""
    results: list[Result] = []

    def run() -> None:
        results.append(work(*arguments))
    thread = runtime.Thread(target=run, name="mindresume-bounded", daemon=True)
    until = runtime.monotonic() + seconds
    with suppress(RuntimeError):                # the limit of threads is reached
        thread.start()
        thread.join(seconds if hurry is None else _TICK)
        while hurry is not None and thread.is_alive() and not hurry.is_hurried() and runtime.monotonic() < until:
            thread.join(_TICK)
    return results[0] if results else default


MAX_SMALL_FILE = 256 << 20      # bytes of any file other than weights; a record has at most half of that


def read_bytes(storage: Storage, path: str, limit: int = MAX_SMALL_FILE) -> bytes:
    """Returns the content of a small file. Raises OSError (EFBIG) if it has more than ``limit`` bytes: a sparse file of any size
    takes no space on disk."""
    with storage.open(path) as file:
        found = file.read(limit + 1)
    if len(found) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", path)
    return found


def read_json(storage: Storage, path: str, limit: int = 1 << 20) -> Any:
    """Returns the JSON document in a small file. Raises OSError like ``read_bytes`` and ValueError like ``parse_json``."""
    return parse_json(read_bytes(storage, path, limit))


def leads_through_a_link(storage: Storage, root: str, path: str) -> bool:
    """Returns whether a folder between ``root`` and ``path``, or ``path`` itself, is a symbolic link."""
    parts = os.path.relpath(path, root).split("/")
    found = [storage.status(os.path.join(root, *parts[:count])) for count in range(1, len(parts) + 1)]
    return any(status is not None and status.is_link for status in found)


def remove_tree(storage: Storage, folder: str) -> None:
    """Removes a folder and everything in it, subfolders first. Removes symbolic links without following them."""
    paths = [os.path.join(folder, name) for name in storage.list(folder)]
    files = []
    for path, found in zip(paths, parallel(storage, storage.status, paths), strict=True):
        if found is not None and found.is_folder and not found.is_link:
            remove_tree(storage, path)
        else:
            files.append(path)
    parallel(storage, storage.remove, files)
    storage.remove(folder)


STALE_SECONDS = 3600.0          # no process needs such a file for longer


def remove_stale(storage: Storage, paths: Iterable[str], fresh: str) -> None:
    """Removes small temporary files of processes that died: each of ``paths`` that is more than ``STALE_SECONDS`` older than
    ``fresh``, a file that was just written. Their names hold no run that could be checked for its end, so their age decides.
    Compares times of the file system only, as clocks of hosts differ. Raises no error: the next job tries again."""
    others = [path for path in paths if path != fresh]
    with suppress(OSError):
        now = storage.status(fresh) if others else None
        if now is None:
            return
        oldest = now.mtime - STALE_SECONDS

        def remove(path: str) -> None:
            with suppress(OSError):             # a file that cannot be removed does no harm
                found = storage.status(path)
                if found is not None and not found.is_folder and found.mtime < oldest:
                    storage.remove(path)
        parallel(storage, remove, others)
