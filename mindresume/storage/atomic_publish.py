"""Publishes files atomically: a reader sees the final name with all its bytes, or does not see it."""
from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from mindresume.storage.interface import Storage


class UnknownOutcomeError(OSError):
    """The rename of a published file was attempted and its outcome is unknown: other processes may see the file although an error
    was reported. NFS can report an operation that took effect as failed."""


def publish(storage: Storage, path: str, pieces: Iterable[bytes | memoryview], tag: str, size: int = 0) -> int:
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
        raise _unknown_outcome(error, path) from error
    try:
        storage.sync(folder)
    except OSError as error:
        raise _unknown_outcome(error, path) from error
    return size


def _unknown_outcome(error: OSError, path: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(error.errno, error.strerror or str(error), error.filename or path)


def temporary_name(path: str, tag: str) -> str:
    """Returns a hidden name that contains ``tag``, in the folder of ``path``: a rename must not cross devices."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{tag}{TEMPORARY}")


TEMPORARY = ".mindresume-tmp"


def error_text(error: BaseException) -> str:
    """Returns the message of an error. For an OSError: path and reason, without the error number, and with the final name of a
    file instead of its temporary one."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    if error.filename is None:
        return error.strerror
    folder, name = os.path.split(os.fsdecode(error.filename))
    if name.endswith(TEMPORARY):
        name = name.removesuffix(TEMPORARY).rpartition(".")[0].removeprefix(".") or name
    return f"{os.path.join(folder, name)}: {error.strerror}"


def publish_json(storage: Storage, path: str, value: Any, tag: str) -> int:
    """Publishes a JSON document in one compact line, keys in the given order. Returns and raises like ``publish``."""
    return publish(storage, path, [json.dumps(value, separators=(",", ":")).encode()], tag)
