"""Tests, before a training begins, whether a directory can hold checkpoints."""
from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mindresume import runtime
from mindresume.errors import SaveError
from mindresume.formats.checkpoint_dir import CheckpointDir
from mindresume.model.manifest import FOLDER, PROBE, is_probe
from mindresume.storage.operations import read_bytes, remove_stale


def check_directory(directory: CheckpointDir) -> None:
    """Runs every operation of a save once, with a small file. Raises SaveError that names the operation that failed or had
    another effect. Removes old probe files of dead jobs."""
    folder = directory.path(FOLDER)
    first, second = (os.path.join(folder, f"{PROBE}{runtime.token_hex(4)}") for _ in range(2))

    def contains(path: str, content: bytes) -> None:
        found = read_bytes(directory.storage, path, 1 << 10)
        if found != content:
            raise SaveError(f"{directory.root} cannot hold checkpoints: {path} reads {found!r} after {content!r} was "
                            f"written there")

    def listed(names: dict[str, bool]) -> set[str]:
        there = set(directory.storage.list(folder))
        for path, expected in names.items():
            if (os.path.basename(path) in there) != expected:
                raise SaveError(f"{directory.root} cannot hold checkpoints: {path} is {'not ' if expected else 'still '}listed "
                                f"after it was {'made' if expected else 'renamed or removed'}")
        return there

    def remove_old(names: set[str]) -> None:
        remove_stale(directory.storage, [os.path.join(folder, name) for name in names if is_probe(name)], first)

    def flush_above() -> None:
        directory.storage.sync(directory.root)
        with suppress(PermissionError):         # not our folder: ``root`` existed before, and its name is durable
            directory.storage.sync(os.path.dirname(os.path.abspath(directory.root)))
    operations: list[tuple[str, Callable[[], Any]]] = [
        ("making a folder", lambda: directory.storage.make_folder(folder)),
        ("flushing the folders above", flush_above),
        ("writing and flushing a file", lambda: (directory.storage.write(first, [b"one"], 3),
                                                 directory.storage.write(second, [b"two"], 3))),
        ("reading it back", lambda: contains(first, b"one")),
        ("renaming a file over another one", lambda: directory.storage.rename(second, first)),
        ("flushing the folder", lambda: directory.storage.sync(folder)),
        ("reading the renamed file", lambda: contains(first, b"two")),
        ("listing the folder", lambda: remove_old(listed({first: True, second: False}))),
        ("removing a file", lambda: directory.storage.remove(first)),
        ("listing the folder again", lambda: listed({first: False}))]
    try:
        for what, operation in operations:
            try:
                operation()
            except OSError as error:
                raise SaveError(f"{directory.root} cannot hold checkpoints: {what} failed: {error.strerror or error} "
                                f"({error.filename or folder}). Give the job an output_dir on a disk that can be written to and "
                                f"has atomic rename") from error
    finally:
        for path in (first, second):
            with suppress(OSError):
                directory.storage.remove(path)
