"""Opens the checkpoint that a caller names: by a path, or as a ``Checkpoint`` of a catalog."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

from mindresume.api.checkpoint import Checkpoint
from mindresume.api.results import Problem, problem_of
from mindresume.errors import ConfigError
from mindresume.events.emitter import texts_into
from mindresume.formats.scan import is_root, locate
from mindresume.reshard.open_checkpoint import OpenCheckpoint, open_and_hold, open_checkpoint
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage

CheckpointLike: TypeAlias = "str | os.PathLike[str] | Checkpoint"


@contextmanager
def opened(
    subject: CheckpointLike,
    step: int | None = None,
    strategy: str | os.PathLike[str] | None = None,
    hold: bool = True,
) -> Iterator[OpenCheckpoint]:
    """Opens a checkpoint, and holds it until the end of the block.

    Args:
        subject: A path as for ``mindresume.open``, or a Checkpoint, which has its step and
            strategy.
        step: The step; None: the newest that can be opened.
        strategy: Strategy file or folder with which mindformers saved.
        hold: False: it is not held, and nothing is written.

    Raises:
        ConfigError: ``step`` or ``strategy`` is given beside a Checkpoint.
        FileNotFoundError: The path does not exist.
        MindResumeError: As for ``Checkpoint.tensors``.
    """
    if isinstance(subject, Checkpoint):
        if step is not None or strategy is not None:
            raise ConfigError(
                f"{subject!r} has a step and a strategy; leave out the arguments step and strategy"
            )
        yield subject.source()
        return
    storage, path = PosixStorage(), existing(subject)
    path, given = locate(storage, path), None if strategy is None else os.fspath(strategy)
    if not hold:
        yield open_checkpoint(storage, path, step, given)
        return
    notes: list[str] = []
    with open_and_hold(storage, path, step, given, texts_into(notes)) as source:
        yield replace(source, notes=(*source.notes, *notes))


def refused_of(source: OpenCheckpoint) -> tuple[Problem, ...]:
    """Returns the newer checkpoints that could not be used."""
    return tuple(problem_of(source.folder or "", refusal) for refusal in source.refused)


def existing(path: str | os.PathLike[str]) -> str:
    """Returns ``path`` as text. Raises FileNotFoundError if it does not exist."""
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist")
    return path


def is_strategy(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` is a strategy, or a folder of strategies. Weight files may end in
    .ckpt too, but their first byte differs."""
    status = storage.status(path)
    names = [path]
    if status is not None and status.is_folder:
        names = sorted(storage.list(path))
        if is_root(storage, path) or any(name.endswith(".safetensors") for name in names):
            return False
        names = [os.path.join(path, name) for name in names if not name.startswith(".")]
    for name in sorted(names, key=lambda name: name.endswith(".json")):
        if name.endswith(".ckpt"):
            with storage.open(name) as file:
                first = file.read(1)
            return (
                first in (b"\x08", b"\x12")
                or first != b"\n"
                and "strategy" in os.path.basename(name)
            )
        if name.endswith(".json"):
            return True
    return False
