"""The interface to an object store, which keeps checkpoints of jobs whose disks do not survive them.

    store = MoxingStore()                                             # ModelArts: obs:// and s3://
    store = FsspecStore("s3://bucket/x")                              # everywhere else: any URL that fsspec has a driver for
    store.upload("/cache/a.safetensors", "s3://bucket/x/a.safetensors")
    store.list("s3://bucket/x")                                       # ["a.safetensors"]

An object store is not a file system: objects cannot be renamed or appended to, and folders exist only as prefixes of names.
Callers therefore never depend on a rename: a checkpoint of several objects exists once the last of them, the manifest, is put.
"""
from __future__ import annotations

import asyncio
import functools
import importlib
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from mindresume import runtime
from mindresume.errors import ConfigError, RemoteError

Result = TypeVar("Result")

TRIES = 4
FIRST_PAUSE = 1.0               # seconds before the second try; each further pause is four times as long
PACKAGES = {"s3": "mindresume[s3]", "s3a": "mindresume[s3]", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs",
            "az": "adlfs", "oss": "ossfs"}          # object stores: {scheme of the URL: package for pip}


class ObjectStore(Protocol):
    """Declares seven operations on the URLs of objects, or on prefixes of URLs. Several threads and processes may call them at
    once. Each raises RemoteError, which names the URL; the operation may have taken effect nevertheless.

    A PUT (``put``, ``upload``) is atomic: a reader sees the whole new object or the previous state. An object is found by its URL
    immediately after the PUT, and by ``list`` soon after.
    """

    def list(self, prefix: str) -> list[str]:
        """Returns the names of all objects below ``prefix``/, relative to it, sorted; empty only if certainly none exists. May
        contain the name of a folder that somebody created by hand. May lag behind recent puts and deletes."""

    def size(self, url: str) -> int | None:
        """Returns the size of an object in bytes, None if it does not exist."""

    def read(self, url: str) -> bytes:
        """Returns the content of a small object."""

    def put(self, url: str, data: bytes) -> None:
        """Puts a small object; replaces an existing one."""

    def upload(self, path: str, url: str) -> None:
        """Puts a local file, which must not change meanwhile, and checks the size of the object. Raises OSError if the local file
        cannot be read."""

    def download(self, url: str, path: str) -> None:
        """Writes an object to a new local file and flushes its content to the device (not its name). Removes the file on an
        error if it can. Not atomic: a reader may see a part of the file, so ``path`` should be a temporary name."""

    def delete(self, url: str) -> None:
        """Deletes an object; does nothing if it does not exist."""


class MoxingStore:
    """Implements ``ObjectStore`` with Huawei's moxing, which only ModelArts images contain. Its errors do not show whether they
    are temporary, so each operation is tried ``TRIES`` times.

    Args:
        file: ``moxing.file``; None imports it.
        sleep: waits a number of seconds between two tries.
    """

    def __init__(self, file: Any = None, sleep: Callable[[float], None] = runtime.sleep):
        self._file = importlib.import_module("moxing").file if file is None else file
        self._sleep = sleep

    def list(self, prefix: str) -> list[str]:
        failed = False

        def work() -> list[str]:
            nonlocal failed
            if failed:
                # moxing may fail to list a folder that does not exist, with an error like any other. So create the folder: a
                # second failure is then a real error and never means a bucket without checkpoints.
                self._file.make_dirs(prefix)
            failed = True
            names = {name.rstrip("/") for name in self._file.list_directory(prefix, recursive=True)}
            folders = {parent for name in names for parent in _parents(name)}
            return sorted(names - folders - {""})
        return self._retry("listed", prefix, work)

    def size(self, url: str) -> int | None:
        return self._retry("looked at", url, lambda: self._size(url))

    def _size(self, url: str) -> int | None:
        return int(self._file.get_size(url)) if self._file.exists(url) else None

    def read(self, url: str) -> bytes:
        return self._retry("read", url, lambda: bytes(self._file.read(url, binary=True)))

    def put(self, url: str, data: bytes) -> None:
        self._retry("written", url, lambda: self._file.write(url, data, binary=True))

    def upload(self, path: str, url: str) -> None:
        size = os.path.getsize(path)            # outside the retries: waiting does not bring back a missing file

        def work() -> None:
            self._file.copy(path, url)
            _check_size(size, self._size(url), url)
        self._retry("uploaded", url, work)

    def download(self, url: str, path: str) -> None:
        self._retry("downloaded", url, lambda: _download(lambda: self._file.copy(url, path), self._size(url), url, path))

    def delete(self, url: str) -> None:
        self._retry("deleted", url, lambda: self._file.exists(url) and self._file.remove(url))

    def _retry(self, what: str, url: str, work: Callable[[], Result]) -> Result:
        return retry(what, url, work, self._sleep)


class FsspecStore:
    """Implements ``ObjectStore`` with fsspec's driver for the scheme of a URL. Endpoint and credentials come from the driver's
    own configuration: files, environment, and fsspec's ``FSSPEC_S3_...`` variables.

    Object stores (``PACKAGES``) put atomically. Any other URL (``file://``, ``memory://``, ``sftp://``) is treated as a file
    system with folders: objects are written under a temporary name and moved.

    Args:
        url: any URL in the store; its scheme selects the driver, and user and host if the driver reads them from a URL.
        sleep: waits a number of seconds between two tries.

    Raises:
        ConfigError: No driver for this scheme is known, or its package is not installed.
    """

    _permanent = (FileNotFoundError, PermissionError, NotImplementedError)      # not tried again

    def __init__(self, url: str, sleep: Callable[[float], None] = runtime.sleep):
        self._scheme, self._url, self._sleep = url.partition("://")[0], url, sleep
        self._is_object_store = self._scheme in PACKAGES
        self._driver = _driver_class(url)
        self._connected: tuple[int, Any] | None = None          # process id, file system of fsspec

    def list(self, prefix: str) -> list[str]:
        def work() -> list[str]:
            fs, top = self._at(prefix)
            if self._is_object_store:           # one flat listing; FileNotFoundError: the bucket does not exist
                names = fs.find(top)
            else:
                fs.makedirs(top, exist_ok=True)
                names = [f"{folder.rstrip('/')}/{name}" for folder, _, files in fs.walk(top, on_error="raise") for name in files]
            return sorted(name[len(top) + 1:].rstrip("/") for name in names if name.startswith(f"{top}/") and name != f"{top}/")
        return self._retry("listed", prefix, work)

    def size(self, url: str) -> int | None:
        return self._retry("looked at", url, lambda: self._size(url))

    def _size(self, url: str) -> int | None:
        fs, path = self._at(url)
        try:
            found = fs.info(path)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def read(self, url: str) -> bytes:
        def work() -> bytes:
            fs, path = self._at(url)
            return bytes(fs.cat_file(path))
        return self._retry("read", url, work)

    def put(self, url: str, data: bytes) -> None:
        self._retry("written", url, lambda: self._put(url, lambda fs, path: fs.pipe_file(path, data)))

    def upload(self, path: str, url: str) -> None:
        size = os.path.getsize(path)

        def work() -> None:
            self._put(url, lambda fs, target: fs.put_file(path, target))        # a large file in parts; visible once complete
            _check_size(size, self._size(url), url)
        self._retry("uploaded", url, work)

    def _put(self, url: str, write: Callable[[Any, str], object]) -> None:
        fs, path = self._at(url)
        if self._is_object_store:
            write(fs, path)
            return
        folder, _, name = path.rpartition("/")
        part = f"{folder}/.{name}-{uuid.uuid4().hex[:8]}.part"
        fs.makedirs(folder, exist_ok=True)
        try:
            write(fs, part)
            fs.mv(part, path)
        except BaseException:
            with suppress(Exception):           # the first error is the one to report
                fs.rm_file(part)
            raise

    def download(self, url: str, path: str) -> None:
        def work() -> None:
            fs, source = self._at(url)
            _download(lambda: fs.get_file(source, path), self._size(url), url, path)
        self._retry("downloaded", url, work)

    def delete(self, url: str) -> None:
        def work() -> None:
            fs, path = self._at(url)
            with suppress(FileNotFoundError):
                fs.rm_file(path)
        self._retry("deleted", url, work)

    def _at(self, url: str) -> tuple[Any, str]:
        """Returns the fsspec file system of this process, with its cache of listings cleared, and the path of ``url`` in it."""
        connected = self._connected
        if connected is None or connected[0] != os.getpid():    # after a fork its event loop would never run
            # Two threads may both get here: each uses its own connection, and one of them is kept.
            options = self._driver._get_kwargs_from_urls(self._url)
            if self._driver.async_impl:
                options |= {"loop": _event_loop(os.getpid()), "use_listings_cache": False}
            connected = self._connected = os.getpid(), self._driver(**options, skip_instance_cache=True)
        connected[1].invalidate_cache()
        return connected[1], connected[1]._strip_protocol(url).rstrip("/")

    def _retry(self, what: str, url: str, work: Callable[[], Result]) -> Result:
        failed = 0

        def attempt() -> Result:
            nonlocal failed
            try:
                return work()
            except Exception:
                failed += 1
                if failed == TRIES - 1:
                    self._connected = None      # the last try has new connections, and reads the credentials again
                raise
        return retry(what, url, attempt, self._sleep, self._permanent)


class _ThreadPerCall(ThreadPoolExecutor):
    """Runs each call in a thread of its own. An event loop resolves host names in its executor. Python's pools accept no work
    once the main thread has ended, but the last checkpoint of a failed training is uploaded after that."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args, **options))
            except BaseException as error:
                future.set_exception(error)
        runtime.Thread(target=run, name="mindresume-resolve", daemon=True).start()
        return future


@functools.lru_cache(maxsize=1)
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process, which runs in a thread. ``process``: its id. fsspec's own loop is shared with other
    packages and stops resolving names when the main thread ends."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_ThreadPerCall(1))
    runtime.Thread(target=loop.run_forever, name="mindresume-objects", daemon=True).start()
    return loop


def _driver_class(url: str) -> Any:
    """Returns fsspec's file system class for ``url``. Raises ConfigError, which names the package to install."""
    scheme = url.partition("://")[0]
    install = f'pip install "{PACKAGES[scheme]}"' if scheme in PACKAGES else ""
    try:
        return importlib.import_module("fsspec").get_filesystem_class(scheme)
    except ImportError as error:
        raise ConfigError(f"{url} needs a Python package that cannot be imported ({error.__cause__ or error}); install it: "
                          f"{install or error}") from error
    except ValueError as error:
        raise ConfigError(f"{url} is not the URL of an object store; expected one that begins with "
                          f"{', '.join(f'{name}://' for name in PACKAGES)}, or that fsspec has another driver for") from error


def retry(what: str, url: str, work: Callable[[], Result], sleep: Callable[[float], None],
          permanent: tuple[type[Exception], ...] = ()) -> Result:
    """Calls ``work`` up to ``TRIES`` times, with growing pauses.

    Args:
        what: past participle for the message, such as "uploaded".
        url: the object concerned.
        work: the operation.
        sleep: waits a number of seconds.
        permanent: error types that are not tried again.

    Raises:
        RemoteError: The last try failed, or a permanent error occurred.
    """
    pause = FIRST_PAUSE
    for number in range(1, TRIES + 1):
        try:
            return work()
        except Exception as error:              # drivers raise plain Exceptions too, and they differ by version
            if number == TRIES or isinstance(error, permanent):
                tried = f", tried {number} times" if number > 1 else ""
                raise RemoteError(f"{url} could not be {what}{tried}: {type(error).__name__}: {error}. Check that the bucket "
                                  f"exists and that this job may read and write it") from error
        sleep(pause)
        pause *= 4
    raise AssertionError("unreachable")


def _download(copy: Callable[[], object], size: int | None, url: str, path: str) -> None:
    """Calls ``copy``, which writes ``path``, checks that the file has ``size`` bytes, and flushes it. Removes the file on an
    error."""
    try:
        copy()
        _check_size(size, os.path.getsize(path), url)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except BaseException:                       # also KeyboardInterrupt: a half-written file must not stay
        with suppress(OSError):                 # the first error is the one to report
            os.remove(path)
        raise


def _check_size(expected: int | None, found: int | None, url: str) -> None:
    """Raises OSError unless both sizes (bytes) are equal. None means that the object does not exist."""
    if expected is None or found != expected:
        raise OSError(f"{url}: expected {'an object' if expected is None else f'{expected} bytes'}, arrived: "
                      f"{'nothing' if found is None else f'{found} bytes'}")


def _parents(name: str) -> list[str]:
    """Returns all folders in a name: "a" and "a/b" for "a/b/c"."""
    return [name[:index] for index, letter in enumerate(name) if letter == "/"]
