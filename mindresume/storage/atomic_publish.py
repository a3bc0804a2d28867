"""Publishes a file: it appears under its name complete or not at all."""
from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from mindresume.storage.interface import Storage


class UnknownOutcomeError(OSError):
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


def _unsettled(error: OSError, path: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(error.errno, error.strerror or str(error), error.filename or path)


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
