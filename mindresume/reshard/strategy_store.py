"""Finds the strategy with which a checkpoint was saved, although the next job overwrites its files.

mindformers writes the strategy of every job to ``output/strategy`` and overwrites the one of the
job before. So before a training in another layout is compiled, that folder is renamed
(``set_aside``) to a name with a hash of its content, and a mark in it names the checkpoint that
needed it. When the same command starts again, ``strategy_for`` finds it there.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import xxhash

from mindresume.errors import RecordError, StrategyError
from mindresume.formats import OURS, Candidate, CheckpointDir
from mindresume.formats.records import RecordFolder
from mindresume.formats.strategy import Strategy, read_strategy
from mindresume.model.layout import TensorLayout
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.storage import Storage, publish_json, read_json
from mindresume.tensor_files import CHUNK

# in a folder that was set aside: identities of the checkpoints that need it
MARK = "used_for.json"
MAX_MARK = 64 << 20  # bytes: a checkpoint has 35 a rank


def identity_of(directory: CheckpointDir, candidate: Candidate) -> Any:
    """Returns a value for JSON that identifies one saved step: its records, or names, sizes and
    times of its files."""
    if candidate.records:
        return [candidate.run, candidate.step, *candidate.records]
    return [
        file_identity(directory.storage, directory.path(file.path))
        for _, files in sorted(candidate.files.items())
        for file in files
    ]


def file_identity(storage: Storage, path: str) -> list[Any]:
    """Returns folder, name, size and time of a file."""
    found = storage.status(path)
    return [
        os.path.basename(os.path.dirname(path)),
        os.path.basename(path),
        found.size if found else None,
        found.mtime if found else None,
    ]


def strategy_for(
    directory: CheckpointDir, candidate: Candidate, given: str | None
) -> Strategy | None:
    """Returns the strategy of the job that saved ``candidate``; None if it is not known.

    This is the strategy ``given``; else, for a checkpoint of mindformers, the one in the folder
    ``strategy`` beside it, where mindformers looks too (also for a file of one rank: it may be the
    only one left). If that folder was set aside for this very checkpoint, the strategy in the
    renamed folder is used.

    Raises:
        StrategyError: the files cannot be read.
    """
    path = _find_strategy(directory, candidate, given)
    return None if path is None else read_strategy(path, directory.storage)


def _find_strategy(directory: CheckpointDir, candidate: Candidate, given: str | None) -> str | None:
    if given is None and candidate.origin == OURS:
        return None
    path = (
        given or os.path.join(os.path.dirname(os.path.abspath(directory.root)), "strategy")
    ).rstrip("/")
    if kept := _kept(directory.storage, path):
        identity = identity_of(directory, candidate)
        for other in kept:
            if identity in _marked(directory.storage, other):
                return other
    return path if given or directory.storage.list(path) else None


def has_layouts(storage: Storage, candidate: Candidate) -> bool:
    """Returns whether the records of a checkpoint hold layouts. A job that was compiled from a
    cache can lack them."""
    if candidate.origin != OURS or candidate.records_dir is None:
        return False
    with suppress(RecordError, OSError):  # it is reported when the checkpoint is opened
        details = RecordFolder(storage, candidate.records_dir).details(min(candidate.files))
        return any(row.layout for row in details.tensors.values())
    return False


def own_strategy(weights: CheckpointView) -> Strategy | None:
    """Returns the strategy of the job that saved these weights; None if it was one rank.
    StrategyError for consolidated weights."""
    if weights.is_consolidated:
        raise StrategyError(
            f"{weights.name} holds consolidated weights, which have no layout of their own; say "
            "with --to which one the result gets"
        )
    if weights.world_size == 1:
        return None
    sizes = {tensor.layout.stage_size for tensor in weights.tensors.values() if tensor.layout}
    return strategy_of(weights, sizes.pop() if len(sizes) == 1 else weights.world_size)


def strategy_of(weights: CheckpointView, size: int, is_shared: bool = True) -> Strategy:
    """Returns the layouts of all tensors but counters, in stages of ``size`` ranks. ``is_shared``:
    a tensor of several stages is in each of them, else in the first one only."""
    stages: list[dict[str, TensorLayout]] = [{} for _ in range(weights.world_size // size)]
    for name, tensor in weights.tensors.items():
        if not tensor.is_counter:
            for first in (tensor.first, *(tensor.other_stages if is_shared else ())):
                stages[first // size][name] = tensor.layout or TensorLayout(
                    (size,), (-1,) * len(tensor.shape)
                )
    return Strategy(tuple(stages), weights.name)


@dataclass(frozen=True)
class StrategyLookup:
    """Finds the strategies of the jobs that saved, as ``strategy_for``. It reads each folder once:
    make a new one when the files may have changed."""

    storage: Storage
    given: str | None = None
    _known: dict[str, Strategy | None] = field(default_factory=dict)

    def __call__(self, root: str, candidate: Candidate) -> Strategy | None:
        """Returns the strategy of the job that saved a candidate; None if it is not known or cannot
        be read."""
        path = None
        with suppress(OSError):
            path = _find_strategy(CheckpointDir(self.storage, root), candidate, self.given)
        if path is not None and path not in self._known:
            self._known[path] = None
            with suppress(StrategyError, OSError):
                self._known[path] = read_strategy(path, self.storage)
        return self._known.get(path or "")


def set_aside(
    storage: Storage, folder: str, used: Strategy | None = None, identity: Any = None
) -> str:
    """Renames a folder of strategy files, which the compiler would overwrite.

    Args:
        used: the strategy that was read for a checkpoint. If it was read from this folder, a mark
            names the checkpoint.
        identity: identity of that checkpoint.
    Returns:
        The new name; empty if there is nothing to keep.
    """
    content, found = xxhash.xxh3_64(), False
    for name in storage.list(folder):
        path = os.path.join(folder, name)
        status = storage.status(path)
        if status is not None and not status.is_folder and name != MARK:
            found = True
            content.update(os.fsencode(name) + b"\0")
            with storage.open(path) as file:
                while chunk := file.read(CHUNK):
                    content.update(chunk)
    if not found:
        return ""
    kept = f"{folder}_{content.hexdigest()[:8]}"
    there = storage.status(kept) is not None  # with the same content
    if used is not None and os.path.realpath(used.source) == os.path.realpath(folder):
        # the mark first, so that a restart after a kill finds it
        place = kept if there else folder
        if identity not in _marked(storage, place):
            publish_json(
                storage, os.path.join(place, MARK), [*_marked(storage, place), identity], "mark"
            )
    if there:
        for name in storage.list(folder):
            storage.remove(os.path.join(folder, name))
    else:
        storage.rename(folder, kept)
        storage.make_folder(folder)
    storage.sync(os.path.dirname(os.path.abspath(folder)))
    return kept


def _kept(storage: Storage, folder: str) -> list[str]:
    """Returns the folders that ``set_aside`` made of ``folder``."""
    parent, name = os.path.split(os.path.abspath(folder))
    pattern = re.compile(re.escape(name) + "_[0-9a-f]{8}")
    return [
        os.path.join(parent, other) for other in storage.list(parent) if pattern.fullmatch(other)
    ]


def _marked(storage: Storage, kept: str) -> list[Any]:
    """Returns the identities of the checkpoints that need this folder."""
    try:
        found = read_json(storage, os.path.join(kept, MARK), MAX_MARK)
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []
