"""The one seam to an object store, where the checkpoints of a platform whose disks vanish with the job are kept.

    store = MoxingStore()                                             # ModelArts: obs:// and s3://
    store.upload("/cache/a.safetensors", "obs://bucket/x/a.safetensors")
    store.list("obs://bucket/x")                                      # ["a.safetensors"]

An object store is no file system: nothing can be renamed or appended to, there are no folders but in the names of objects. So
nothing here is built on names that change; what makes several objects one thing is the one that is put last.
"""
from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from mindresume.errors import RemoteError

Result = TypeVar("Result")

TRIES = 4
FIRST_PAUSE = 1.0               # seconds before the second try; each later one waits four times as long


class ObjectStore(Protocol):
    """Seven operations on urls of objects, or of what their names begin with. Several threads and processes may call them at
    once. RemoteError for whatever fails: it names the url; what was asked for may have happened all the same.

    A PUT (``put``, ``upload``) is atomic: a reader sees the object with all its bytes, or as it was before. What was put is
    found by its url at once, and by ``list`` soon."""

    def list(self, prefix: str) -> list[str]:
        """Names of all objects below ``prefix``/, relative to it, sorted; empty only if it is certain that there are none. A
        folder that somebody created by hand may be among them, as its name. May lag behind what was put or deleted just now."""

    def size(self, url: str) -> int | None:
        """Bytes of an object, None if there is none."""

    def read(self, url: str) -> bytes:
        """The whole of a small object."""

    def put(self, url: str, data: bytes) -> None:
        """A small object; replaces one that is there."""

    def upload(self, path: str, url: str) -> None:
        """A local file that does not change meanwhile; OSError if it cannot be looked at. Its size has been checked there when
        this returns."""

    def download(self, url: str, path: str) -> None:
        """To a new local file, flushed to the device when this returns (its name is not). On an error it is removed if it
        can be. Not atomic: a reader may see part of it, so ``path`` is a temporary name."""

    def delete(self, url: str) -> None:
        """No error if it is gone."""


class MoxingStore:
    """Huawei's moxing, which only images of ModelArts have. Its errors are of many kinds, some of which pass: each operation is
    tried ``TRIES`` times. ``file``: ``moxing.file``."""

    def __init__(self, file: Any = None, sleep: Callable[[float], None] = time.sleep):
        self._file = importlib.import_module("moxing").file if file is None else file
        self._sleep = sleep

    def list(self, prefix: str) -> list[str]:
        failed = False

        def work() -> list[str]:
            nonlocal failed
            if failed:
                # Of a folder that is not there moxing may have no listing, and nothing tells that error from another one. So the
                # folder is made: what still cannot be listed then is an error, never a bucket without checkpoints.
                self._file.make_dirs(prefix)
            failed = True
            names = {name.rstrip("/") for name in self._file.list_directory(prefix, recursive=True)}
            folders = {parent for name in names for parent in _parents(name)}
            return sorted(names - folders - {""})
        return self._tried("listed", prefix, work)

    def size(self, url: str) -> int | None:
        return self._tried("looked at", url, lambda: self._size(url))

    def _size(self, url: str) -> int | None:
        return int(self._file.get_size(url)) if self._file.exists(url) else None

    def read(self, url: str) -> bytes:
        return self._tried("read", url, lambda: bytes(self._file.read(url, binary=True)))

    def put(self, url: str, data: bytes) -> None:
        self._tried("written", url, lambda: self._file.write(url, data, binary=True))

    def upload(self, path: str, url: str) -> None:
        size = os.path.getsize(path)            # what is not there does not come by waiting

        def work() -> None:
            self._file.copy(path, url)
            self._expect(size, self._size(url), url)
        self._tried("uploaded", url, work)

    def download(self, url: str, path: str) -> None:
        def work() -> None:
            try:
                size = self._size(url)
                self._file.copy(url, path)
                self._expect(size, os.path.getsize(path), url)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            except BaseException:               # also KeyboardInterrupt: half of a file must not stay
                with suppress(OSError):         # the first error is the one to report
                    os.remove(path)
                raise
        self._tried("downloaded", url, work)

    def delete(self, url: str) -> None:
        self._tried("deleted", url, lambda: self._file.exists(url) and self._file.remove(url))

    @staticmethod
    def _expect(expected: int | None, found: int | None, url: str) -> None:
        if expected is None or found != expected:
            raise OSError(f"{url}: expected {'an object' if expected is None else f'{expected} bytes'}, arrived: "
                          f"{'nothing' if found is None else f'{found} bytes'}")

    def _tried(self, what: str, url: str, work: Callable[[], Result]) -> Result:
        pause = FIRST_PAUSE
        for left in reversed(range(TRIES)):
            try:
                return work()
            except Exception as error:          # moxing's own are plain Exceptions, and not the same in all versions
                if not left:
                    raise RemoteError(f"{url} could not be {what}, tried {TRIES} times: {type(error).__name__}: {error}. Look "
                                      f"whether the bucket is there, and whether this job may read and write it") from error
            self._sleep(pause)
            pause *= 4
        raise AssertionError("unreachable")


def _parents(name: str) -> list[str]:
    """"a/b" and "a" of "a/b/c"."""
    return [name[:index] for index, letter in enumerate(name) if letter == "/"]
