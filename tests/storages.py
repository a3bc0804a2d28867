"""Storages for the tests: the real file system, with faults and with eyes."""
from __future__ import annotations

import errno
import os
from collections.abc import Callable

from mindresume.storage.posix import PosixStorage

OPERATIONS = ("list", "status", "open", "write", "create", "rename", "sync", "remove", "make_folder", "free_space")


def os_error(number: int, path: str = "") -> OSError:
    return OSError(number, os.strerror(number), path)


class Hooked(PosixStorage):
    """Calls ``before(operation, path)`` ahead of each operation; what it raises, the operation raises. The path of a rename is
    the new one."""

    def __init__(self, before: Callable[[str, str], object]):
        self.before = before


def _hooked(name: str):
    def method(self, path, *arguments):
        self.before(name, arguments[0] if name == "rename" else path)
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
