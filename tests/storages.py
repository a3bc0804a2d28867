"""Storages for the tests: the real file system, with faults and with eyes."""

import errno
import os
from collections.abc import Callable

from fakes import moxing

from mindresume.storage.object_store import MoxingStore, RetryingStore
from mindresume.storage.posix import PosixStorage

OPERATIONS = (
    "list",
    "status",
    "open",
    "write",
    "create",
    "rename",
    "sync",
    "remove",
    "make_folder",
    "free_space",
)


def os_error(number: int, path: str = "") -> OSError:
    return OSError(number, os.strerror(number), path)


class Hooked(PosixStorage):
    """Notes each operation in ``asked``, and calls ``before(operation, path)`` ahead of it; what
    that raises, the operation raises. The path of a rename is the new one."""

    def __init__(self, before: Callable[[str, str], object] = lambda operation, path: None):
        self.before, self.asked = before, []


def _hooked(name: str):
    def method(self, path, *arguments):
        self.asked.append((name, arguments[0] if name == "rename" else path))
        self.before(*self.asked[-1])
        return getattr(PosixStorage, name)(self, path, *arguments)

    return method


for _name in OPERATIONS:
    setattr(Hooked, _name, _hooked(_name))


def failing(name: str, *operations: str, number: int = errno.ESTALE) -> Hooked:
    """Returns a storage on which these operations fail for files whose names contain ``name``."""

    def before(operation: str, path: str) -> None:
        if operation in operations and name in os.path.basename(path):
            raise os_error(number, path)

    return Hooked(before)


def retrying(driver):
    """Returns an object store that tries again at once."""
    store = RetryingStore(driver)
    store.first_pause = 0.0
    return store


def moxing_store():
    """Returns the store of the fake moxing."""
    return retrying(MoxingStore(moxing.file))


class ListedLate(Hooked):
    """Does not list these names in one folder yet: other hosts have created them. ``trouble``: a
    path that cannot be looked at."""

    def __init__(self, folder, *names: str, trouble: str | None = None):
        super().__init__(self._ask)
        self.folder, self.names, self.trouble = str(folder), names, trouble

    def _ask(self, operation: str, path: str) -> None:
        if operation == "status" and path == self.trouble:
            raise os_error(errno.EIO, path)

    def list(self, folder):
        found = super().list(folder)
        return (
            [name for name in found if name not in self.names] if folder == self.folder else found
        )


class DiesInAFile(PosixStorage):
    """Ends this process once a file has its full size, and none of its bytes."""

    def __init__(self, status: int):
        self.exit_status = status

    def create(self, path, size):
        super().create(path, size)
        os._exit(self.exit_status)
