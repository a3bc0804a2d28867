"""Tests, before a training begins, whether a directory can hold checkpoints."""
from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mindresume import runtime
from mindresume.errors import SaveError
from mindresume.model.manifest import FOLDER, PROBE, is_probe
from mindresume.storage.interface import Storage
from mindresume.storage.operations import read_bytes, remove_stale


def check_directory(storage: Storage, root: str) -> None:
    """Runs every operation of a save once, with a small file. Raises SaveError that names the operation that failed or had
    another effect. Removes old probe files of dead jobs."""
    folder = os.path.join(root, FOLDER)
    first, second = (os.path.join(folder, f"{PROBE}{runtime.token_hex(4)}") for _ in range(2))

    def contains(path: str, content: bytes) -> None:
        found = read_bytes(storage, path, 1 << 10)
        if found != content:
            raise SaveError(f"{root} cannot hold checkpoints: {path} reads {found!r} after {content!r} was written there")

    def listed(names: dict[str, bool]) -> set[str]:
        there = set(storage.list(folder))
        for path, expected in names.items():
            if (os.path.basename(path) in there) != expected:
                raise SaveError(f"{root} cannot hold checkpoints: {path} is {'not ' if expected else 'still '}listed after it "
                                f"was {'made' if expected else 'renamed or removed'}")
        return there

    def remove_old(names: set[str]) -> None:
        remove_stale(storage, [os.path.join(folder, name) for name in names if is_probe(name)], first)

    def flush_above() -> None:
        storage.sync(root)
        with suppress(PermissionError):         # not our folder: ``root`` existed before, and its name is durable
            storage.sync(os.path.dirname(os.path.abspath(root)))
    operations: list[tuple[str, Callable[[], Any]]] = [
        ("making a folder", lambda: storage.make_folder(folder)),
        ("flushing the folders above", flush_above),
        ("writing and flushing a file", lambda: (storage.write(first, [b"one"], 3), storage.write(second, [b"two"], 3))),
        ("reading it back", lambda: contains(first, b"one")),
        ("renaming a file over another one", lambda: storage.rename(second, first)),
        ("flushing the folder", lambda: storage.sync(folder)),
        ("reading the renamed file", lambda: contains(first, b"two")),
        ("listing the folder", lambda: remove_old(listed({first: True, second: False}))),
        ("removing a file", lambda: storage.remove(first)),
        ("listing the folder again", lambda: listed({first: False}))]
    try:
        for what, operation in operations:
            try:
                operation()
            except OSError as error:
                raise SaveError(f"{root} cannot hold checkpoints: {what} failed: {error.strerror or error} "
                                f"({error.filename or folder}). Give the job an output_dir on a disk that can be written to and "
                                f"has atomic rename") from error
    finally:
        for path in (first, second):
            with suppress(OSError):
                storage.remove(path)
