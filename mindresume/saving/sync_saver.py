"""Saves steps on one rank: the weights for a resume, the files beside them, and rank 0's commit.

    saver = SyncSaver(SaveJob(target, committer))   # or background.AsyncSaver(...): the same five methods
    saver.save(Save(shard, extras))                 # every save
    for outcome in saver.poll(): ...                # every step: the outcomes of saves, errors included
    saver.finish(deadline)                          # the end of the training: everything written, committed, or named
"""
from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mindresume.errors import LeaseHeldError, OutOfSpaceError, SaveError
from mindresume.events import Emit, ignore, warning
from mindresume.events.progress import ProgressReporter
from mindresume.formats.rank_folder_naming import parse_name
from mindresume.saving.committer import Committer
from mindresume.saving.shard_writer import SaveTarget, Shard, write_shard
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
from mindresume.tensor_files import encode


@dataclass(frozen=True)
class Extra:
    """Weights alone, for inference: ``checkpoint_network`` and ``checkpoint_trainable``. They have no records, and no resume
    takes them. ``kind``: "network" or "trainable_params", a part of the name. ``keep``: so many stay in ``folder``; 0: all."""
    folder: str
    name: str
    kind: str
    format: str
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    keep: int = 0


@dataclass(frozen=True)
class Save:
    """All that one rank writes at one step."""
    shard: Shard
    extras: tuple[Extra, ...] = ()

    @property
    def step(self) -> int:
        return self.shard.state.step


@dataclass(frozen=True)
class Outcome:
    """The outcome of a save. ``saved``: this rank's part of the checkpoint is written, recorded and durable. ``error`` may still
    name a file beside it. ``size`` in bytes of the weights, ``seconds`` of writing."""
    step: int
    saved: bool
    error: SaveError | None = None
    size: int = 0
    seconds: float = 0.0


class Saver(Protocol):
    """Saves steps. Errors of a save are outcomes; LeaseHeldError is raised, as no later save can succeed."""

    def save(self, save: Save) -> None:
        """Takes what is to be saved; the arrays may change as soon as it returns."""

    def busy(self) -> bool:
        """Returns whether ``save`` would have to wait."""

    def poll(self) -> list[Outcome]:
        """Returns the outcomes of saves since the last call. Commits what other ranks have completed. Does not wait."""

    def wait(self, deadline: float) -> list[Outcome]:
        """Returns outcomes as ``poll``, after everything taken so far is written; waits at most ``deadline`` seconds."""

    def finish(self, deadline: float, patience: float | None = None) -> list[Outcome]:
        """Returns outcomes as ``wait``; rank 0 waits for the records of all ranks, at most ``patience`` seconds (None:
        ``deadline``). Called once, at the end."""


class SaveJob:
    """Does the work of a save, in whichever thread or process. ``committer``: on rank 0. ``emit``: receives the progress of a
    long save."""

    def __init__(self, place: SaveTarget, committer: Committer | None = None, emit: Emit = ignore):
        self.place, self.committer, self.emit = place, committer, emit

    def begin(self) -> None:
        """Commits, on rank 0, what earlier writers completed but did not commit. A file system in trouble is a Notice: the next
        writer will do it, and until then such a checkpoint counts all the same."""
        if self.committer is None:
            return
        try:
            self.committer.adopt()
        except OSError as error:
            self.committer.emit(warning(f"what earlier runs completed is not committed now: {error}"))

    def write(self, save: Save) -> Outcome:
        """Writes this rank's part of a save. Raises LeaseHeldError; every other SaveError is in the outcome."""
        started = time.monotonic()
        try:
            written = write_shard(self.place, save.shard, gauge=ProgressReporter(
                f"saving step {save.step}", self.emit))
        except LeaseHeldError:
            raise
        except SaveError as error:
            self._make_room(error, save.step)
            return Outcome(save.step, False, error)
        size, beside = sum(file.size or 0 for file in written.record.files), None
        try:
            for extra in save.extras:
                write_extra(self.place.storage, extra, self.place.run)
        except SaveError as error:
            beside = error
        # Rank 0 does not commit what it could not flush itself, or it would remove older ones for it.
        return Outcome(save.step, written.doubt is None, written.doubt or beside, size, time.monotonic() - started)

    def _make_room(self, error: SaveError, step: int) -> None:
        if self.committer is not None and isinstance(error, OutOfSpaceError):
            try:
                self.committer.make_room(step)
            except OSError as trouble:
                self.committer.emit(warning(f"no room could be made: {trouble}"))

    def commit(self, outcome: Outcome) -> None:
        if self.committer is not None and outcome.saved:
            self.committer.saved(outcome.step)

    def poll(self) -> None:
        if self.committer is not None and self.committer.pending:
            self.committer.poll()

    def finish(self, deadline: float) -> None:
        if self.committer is not None:
            self.committer.finish(deadline)


class SyncSaver:
    """Saves in the calling thread, before ``save`` returns."""

    def __init__(self, work: SaveJob):
        self.work = work
        self._outcomes: list[Outcome] = []

    def save(self, save: Save) -> None:
        outcome = self.work.write(save)
        self._outcomes.append(outcome)
        self.work.commit(outcome)

    def busy(self) -> bool:
        return False

    def poll(self) -> list[Outcome]:
        self.work.poll()
        return self.wait(0)

    def wait(self, deadline: float) -> list[Outcome]:
        found, self._outcomes = self._outcomes, []
        return found

    def finish(self, deadline: float, patience: float | None = None) -> list[Outcome]:
        self.work.finish(deadline if patience is None else patience)
        return self.wait(0)


def write_extra(storage: Storage, extra: Extra, tag: str) -> None:
    """Writes a file that appears complete or not at all; then removes the oldest beyond ``keep``. Raises SaveError that names
    it."""
    path = os.path.join(extra.folder, extra.name)
    try:
        storage.make_folder(extra.folder)
        publish(storage, path, (piece for _, piece in encode(extra.format, extra.tensors, extra.metadata)), tag)
        ours = [entry for entry in storage.list(extra.folder) if f"-{extra.kind}-" in entry and _position(entry, extra)]
        oldest_first = sorted(ours, key=lambda entry: _position(entry, extra))
        for entry in oldest_first[:-extra.keep] if extra.keep else []:
            storage.remove(os.path.join(extra.folder, entry))
    except (OSError, ValueError) as error:
        raise SaveError(f"{path} was not written: {getattr(error, 'strerror', None) or error}") from error


def _position(entry: str, extra: Extra) -> tuple[int, int, int] | None:
    """Returns (suffix, epoch, step) of ``{stem}-{kind}-{epoch}_{step}.{fmt}``, None for another name."""
    parsed = parse_name(entry.replace(f"-{extra.kind}-", "-", 1))
    return (parsed.suffix, parsed.epoch, parsed.step) if parsed and parsed.format == extra.format else None
