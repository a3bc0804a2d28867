"""The interface to an object store, which keeps checkpoints of jobs whose disks do not survive
them.

    store = RetryingStore(MoxingStore())                              # ModelArts: obs:// and s3://
    # everywhere else: any URL that fsspec has a driver for
    store = RetryingStore(FsspecStore("s3://bucket/x"))
    store.upload("/cache/a.safetensors", "s3://bucket/x/a.safetensors")
    store.list("s3://bucket/x")                                       # ["a.safetensors"]

An object store is not a file system: objects cannot be renamed or appended to, and folders exist
only as prefixes of names. Callers therefore never depend on a rename: a checkpoint of several
objects exists once the last of them, the manifest, is put.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from mindresume import runtime
from mindresume.errors import ConfigError, RemoteError

Result = TypeVar("Result")

TRIES = 4
PACKAGES = {
    "s3": "mindresume[s3]",
    "s3a": "mindresume[s3]",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    # object stores: {scheme of the URL: package for pip}
    "az": "adlfs",
    "oss": "ossfs",
}


class ObjectStore(Protocol):
    """Declares seven operations on the URLs of objects, or on prefixes of URLs. Several threads and
    processes may call them at once. Each raises RemoteError, which names the URL; the operation may
    have taken effect nevertheless.

    A PUT (``put``, ``upload``) is atomic: a reader sees the whole new object or the previous state.
    An object is found by its URL immediately after the PUT, and by ``list`` soon after.
    """

    def list(self, prefix: str) -> list[str]:
        """Returns the names of all objects below ``prefix``/, relative to it, sorted; empty only if
        certainly none exists. May contain the name of a folder that somebody created by hand. May
        lag behind recent puts and deletes."""

    def size(self, url: str) -> int | None:
        """Returns the size of an object in bytes, None if it does not exist."""

    def read(self, url: str) -> bytes:
        """Returns the content of a small object."""

    def put(self, url: str, data: bytes) -> None:
        """Puts a small object; replaces an existing one."""

    def upload(self, path: str, url: str) -> None:
        """Puts a local file, which must not change meanwhile, and checks the size of the object.
        Raises OSError if the local file cannot be read."""

    def download(self, url: str, path: str) -> None:
        """Writes an object to a new local file and flushes its content to the device (not its
        name). Removes the file on an error if it can. Not atomic: a reader may see a part of the
        file, so ``path`` should be a temporary name."""

    def delete(self, url: str) -> None:
        """Deletes an object; does nothing if it does not exist."""


class Driver(ObjectStore, Protocol):
    """An ``ObjectStore`` for ``RetryingStore``: each operation is tried once, and raises any error.
    It need not check sizes, flush or remove what it has written."""

    # errors after which nothing is tried again
    permanent: tuple[type[Exception], ...]

    def before_retry(self, what: str, url: str, number: int) -> None:
        """Prepares the try of this number, from 2. An error of it is one of the operation."""


class RetryingStore:
    """Repeats the operations of another ``ObjectStore`` up to ``TRIES`` times, with growing pauses,
    and checks the size of what was uploaded or downloaded.

    Args:
        driver: its errors can be of any type; all become RemoteErrors.
    """

    # seconds before the second try; each further pause is four times as long
    first_pause = 1.0

    def __init__(self, driver: Driver):
        self.driver = driver

    def list(self, prefix: str) -> list[str]:
        return self._tried("listed", prefix, self.driver.list)

    def size(self, url: str) -> int | None:
        return self._tried("looked at", url, self.driver.size)

    def read(self, url: str) -> bytes:
        return self._tried("read", url, self.driver.read)

    def put(self, url: str, data: bytes) -> None:
        self._tried("written", url, self.driver.put, data)

    def upload(self, path: str, url: str) -> None:
        # outside the retries: waiting does not bring back a missing file
        size = os.path.getsize(path)
        self._tried("uploaded", url, self._upload, path, size)

    def download(self, url: str, path: str) -> None:
        self._tried("downloaded", url, self._download, path)

    def delete(self, url: str) -> None:
        self._tried("deleted", url, self.driver.delete)

    def _upload(self, url: str, path: str, size: int) -> None:
        self.driver.upload(path, url)
        _check_size(size, self.driver.size(url), url)

    def _download(self, url: str, path: str) -> None:
        """Writes ``path``, checks its size, and flushes it. Removes the file on an error."""
        size = self.driver.size(url)
        try:
            self.driver.download(url, path)
            _check_size(size, os.path.getsize(path), url)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        except BaseException:
            # also KeyboardInterrupt: a half-written file must not stay
            with suppress(OSError):  # the first error is the one to report
                os.remove(path)
            raise

    def _tried(
        self, what: str, url: str, operation: Callable[..., Result], *arguments: object
    ) -> Result:
        """Returns ``operation(url, *arguments)``.

        Args:
            what: past participle for the message, such as "uploaded".

        Raises:
            RemoteError: The last try failed, or a permanent error occurred.
        """
        pause = self.first_pause
        for number in range(1, TRIES + 1):
            try:
                if number > 1:
                    self.driver.before_retry(what, url, number)
                return operation(url, *arguments)
            except Exception as error:
                # drivers raise plain Exceptions too, and they differ by version
                if number == TRIES or isinstance(error, self.driver.permanent):
                    tried = f", tried {number} times" if number > 1 else ""
                    raise RemoteError(
                        f"{url} could not be {what}{tried}: {type(error).__name__}: {error}. Check "
                        "that the bucket exists and that this job may read and write it"
                    ) from error
            runtime.sleep(pause)
            pause *= 4
        raise AssertionError("unreachable")


class MoxingStore:
    """The ``Driver`` of Huawei's moxing, which only ModelArts images contain. Its errors do not
    show whether they are temporary, so none is permanent.

    Args:
        file: ``moxing.file``; None imports it.
    """

    permanent: tuple[type[Exception], ...] = ()

    def __init__(self, file: Any = None):
        self._file = importlib.import_module("moxing").file if file is None else file

    def before_retry(self, what: str, url: str, number: int) -> None:
        if what == "listed":
            # moxing may fail to list a folder that does not exist, with an error like any other. So
            # create the folder: a second failure is then a real error and never means a bucket
            # without checkpoints.
            self._file.make_dirs(url)

    def list(self, prefix: str) -> list[str]:
        names = {name.rstrip("/") for name in self._file.list_directory(prefix, recursive=True)}
        folders = {parent for name in names for parent in _parents(name)}
        return sorted(names - folders - {""})

    def size(self, url: str) -> int | None:
        return int(self._file.get_size(url)) if self._file.exists(url) else None

    def read(self, url: str) -> bytes:
        return bytes(self._file.read(url, binary=True))

    def put(self, url: str, data: bytes) -> None:
        self._file.write(url, data, binary=True)

    def upload(self, path: str, url: str) -> None:
        self._file.copy(path, url)

    def download(self, url: str, path: str) -> None:
        self._file.copy(url, path)

    def delete(self, url: str) -> None:
        if self._file.exists(url):
            self._file.remove(url)


class FsspecStore:
    """The ``Driver`` of fsspec for the scheme of a URL. Endpoint and credentials come from fsspec's
    own configuration: files, environment, and its ``FSSPEC_S3_...`` variables.

    Object stores (``PACKAGES``) put atomically. Any other URL (``file://``, ``memory://``,
    ``sftp://``) is treated as a file system with folders: objects are written under a temporary
    name and moved.

    Args:
        url: any URL in the store; its scheme selects the driver, and user and host if the driver
            reads them from a URL.

    Raises:
        ConfigError: No driver for this scheme is known, or its package is not installed.
    """

    permanent: tuple[type[Exception], ...] = (
        FileNotFoundError,
        PermissionError,
        NotImplementedError,
    )

    def __init__(self, url: str):
        self._url, self._is_object_store = url, url.partition("://")[0] in PACKAGES
        self._driver = _driver_class(url)
        self._connected: tuple[int, Any] | None = None  # process id, file system of fsspec

    def before_retry(self, what: str, url: str, number: int) -> None:
        if number == TRIES:
            # the last try has new connections, and reads the credentials again
            self._connected = None

    def list(self, prefix: str) -> list[str]:
        fs, top = self._at(prefix)
        # one flat listing; FileNotFoundError: the bucket does not exist
        if self._is_object_store:
            names = fs.find(top)
        else:
            fs.makedirs(top, exist_ok=True)
            names = [
                f"{folder.rstrip('/')}/{name}"
                for folder, _, files in fs.walk(top, on_error="raise")
                for name in files
            ]
        return sorted(
            name[len(top) + 1 :].rstrip("/")
            for name in names
            if name.startswith(f"{top}/") and name != f"{top}/"
        )

    def size(self, url: str) -> int | None:
        fs, path = self._at(url)
        try:
            found = fs.info(path)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def read(self, url: str) -> bytes:
        fs, path = self._at(url)
        return bytes(fs.cat_file(path))

    def put(self, url: str, data: bytes) -> None:
        with self._new_object(url) as (fs, path):
            fs.pipe_file(path, data)

    def upload(self, path: str, url: str) -> None:
        with self._new_object(url) as (fs, target):
            fs.put_file(path, target)  # a large file in parts; visible once complete

    @contextmanager
    def _new_object(self, url: str) -> Iterator[tuple[Any, str]]:
        """Returns the file system and the path to write to; the object has its name in the end."""
        fs, path = self._at(url)
        if self._is_object_store:
            yield fs, path
            return
        folder, _, name = path.rpartition("/")
        part = f"{folder}/.{name}-{uuid.uuid4().hex[:8]}.part"
        fs.makedirs(folder, exist_ok=True)
        try:
            yield fs, part
            fs.mv(part, path)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                fs.rm_file(part)
            raise

    def download(self, url: str, path: str) -> None:
        fs, source = self._at(url)
        fs.get_file(source, path)

    def delete(self, url: str) -> None:
        fs, path = self._at(url)
        with suppress(FileNotFoundError):
            fs.rm_file(path)

    def _at(self, url: str) -> tuple[Any, str]:
        """Returns the fsspec file system of this process, with its cache of listings cleared, and
        the path of ``url`` in it."""
        connected = self._connected
        # after a fork its event loop would never run
        if connected is None or connected[0] != os.getpid():
            # Two threads may both get here: each uses its own connection, and one of them is kept.
            options = self._driver._get_kwargs_from_urls(self._url)
            if self._driver.async_impl:
                options |= {"loop": _event_loop(os.getpid()), "use_listings_cache": False}
            connected = self._connected = (
                os.getpid(),
                self._driver(**options, skip_instance_cache=True),
            )
        connected[1].invalidate_cache()
        return connected[1], connected[1]._strip_protocol(url).rstrip("/")


class _ThreadPerCall(ThreadPoolExecutor):
    """Runs each call in a thread of its own. An event loop resolves host names in its executor.
    Python's pools accept no work once the main thread has ended, but the last checkpoint of a
    failed training is uploaded after that."""

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
    """Returns the event loop of this process, which runs in a thread. ``process``: its id. fsspec's
    own loop is shared with other packages and stops resolving names when the main thread ends."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_ThreadPerCall(1))
    runtime.Thread(target=loop.run_forever, name="mindresume-objects", daemon=True).start()
    return loop


def _driver_class(url: str) -> Any:
    """Returns fsspec's file system class for ``url``. Raises ConfigError, which names the package
    to install."""
    scheme = url.partition("://")[0]
    install = f'pip install "{PACKAGES[scheme]}"' if scheme in PACKAGES else ""
    try:
        return importlib.import_module("fsspec").get_filesystem_class(scheme)
    except ImportError as error:
        raise ConfigError(
            f"{url} needs a Python package that cannot be imported ({error.__cause__ or error}); "
            f"install it: {install or error}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{url} is not the URL of an object store; expected one that begins with "
            f"{', '.join(f'{name}://' for name in PACKAGES)}, or that fsspec has another driver for"
        ) from error


def _check_size(expected: int | None, found: int | None, url: str) -> None:
    """Raises OSError unless both sizes (bytes) are equal. None means that the object does not
    exist."""
    if expected is None or found != expected:
        raise OSError(
            f"{url}: expected {'an object' if expected is None else f'{expected} bytes'}, arrived: "
            f"{'nothing' if found is None else f'{found} bytes'}"
        )


def _parents(name: str) -> list[str]:
    """Returns all folders in a name: "a" and "a/b" for "a/b/c"."""
    return [name[:index] for index, letter in enumerate(name) if letter == "/"]
