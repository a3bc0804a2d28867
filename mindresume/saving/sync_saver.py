"""Saves steps on one rank: the shard for a resume, weights for inference, and rank 0's commit.

    saver = SyncSaver(SaveJob(target, committer))   # or AsyncSaver(...): the same five methods
    saver.save(Save(shard, extras))
    for outcome in saver.poll(): ...                # after each step: outcomes of saves, errors included
    saver.finish(timeout)                           # at the end: everything is written and committed, or named in an outcome
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mindresume import runtime
from mindresume.coordination.lease import ended
from mindresume.coordination.read_locks import ReadLocks
from mindresume.errors import LeaseHeldError, OutOfSpaceError, SaveError
from mindresume.events import Emit, ignore, warning
from mindresume.events.progress import ProgressReporter
from mindresume.formats.rank_folder_naming import parse_name
from mindresume.saving.committer import Committer
from mindresume.saving.retention import Policy
from mindresume.saving.shard_writer import SaveTarget, Shard, write_shard
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
from mindresume.tensor_files import encode


@dataclass(frozen=True)
class ExtraWeights:
    """Weights for inference: ``checkpoint_network`` and ``checkpoint_trainable``. They have no records, and no resume uses them.
    ``kind``: "network" or "trainable_params", part of the name. ``keep``: how many stay in ``folder``; 0: all."""
    folder: str
    name: str
    kind: str
    format: str
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    keep: int = 0


@dataclass(frozen=True)
class Save:
    """Everything that one rank writes at one step."""
    shard: Shard
    extras: tuple[ExtraWeights, ...] = ()

    @property
    def step(self) -> int:
        return self.shard.state.step


@dataclass(frozen=True)
class Outcome:
    """The outcome of a save. ``saved``: this rank's shard is written, recorded and durable; ``error`` may still name a file of
    extra weights. ``size``: bytes of the shard. ``seconds``: of writing."""
    step: int
    saved: bool
    error: SaveError | None = None
    size: int = 0
    seconds: float = 0.0


class Saver(Protocol):
    """Saves steps. Errors of a save are in its outcome. Raises LeaseHeldError, because no later save can succeed."""

    def save(self, save: Save) -> None:
        """Saves, now or in the background. The arrays may change as soon as it returns."""

    def busy(self) -> bool:
        """Returns whether ``save`` would have to wait."""

    def poll(self) -> list[Outcome]:
        """Returns the outcomes since the last call. Commits steps that other ranks have completed. Does not wait."""

    def wait(self, timeout: float) -> list[Outcome]:
        """Returns outcomes like ``poll``, after every save so far is written, or after ``timeout`` seconds."""

    def finish(self, timeout: float, record_timeout: float | None = None) -> list[Outcome]:
        """Returns outcomes like ``wait``. Rank 0 waits for the records of all ranks, at most ``record_timeout`` seconds (None:
        ``timeout``). Called once, at the end."""


class SaveJob:
    """Writes and commits saves, in the thread or process that calls it. ``committer``: on rank 0. ``emit``: receives the progress
    of a long save."""

    def __init__(self, target: SaveTarget, committer: Committer | None = None, emit: Emit = ignore):
        self.target, self.committer, self.emit = target, committer, emit

    def begin(self) -> None:
        """Commits, on rank 0, what earlier writers completed but did not commit. If the file system fails, emits a warning: the
        next writer commits it, and until then such a checkpoint counts all the same."""
        if self.committer is None:
            return
        try:
            self.committer.recover()
        except OSError as error:
            self.committer.emit(warning(f"complete saves of earlier runs are not committed now: {error}"))

    def write(self, save: Save) -> Outcome:
        """Writes this rank's shard and extra weights. Raises LeaseHeldError; any other SaveError is in the outcome."""
        started = runtime.monotonic()
        try:
            written = write_shard(self.target, save.shard, progress=ProgressReporter(
                f"saving step {save.step}", self.emit))
        except LeaseHeldError:
            raise
        except SaveError as error:
            self._reclaim_space(error, save.step)
            return Outcome(save.step, False, error)
        size, beside = sum(file.size or 0 for file in written.record.files), None
        try:
            for extra in save.extras:
                write_extra_weights(self.target.storage, extra, self.target.run)
        except SaveError as error:
            beside = error
        # Rank 0 does not commit what it could not flush: the commit would remove older checkpoints.
        return Outcome(save.step, written.durability_error is None, written.durability_error or beside, size, runtime.monotonic()
                       - started)

    def _reclaim_space(self, error: SaveError, step: int) -> None:
        if self.committer is not None and isinstance(error, OutOfSpaceError):
            try:
                self.committer.reclaim_space(step)
            except OSError as trouble:
                self.committer.emit(warning(f"no space could be freed: {trouble}"))

    def commit(self, outcome: Outcome) -> None:
        if self.committer is not None and outcome.saved:
            self.committer.saved(outcome.step)

    def poll(self) -> None:
        if self.committer is not None and self.committer.pending:
            self.committer.poll()

    def finish(self, timeout: float) -> None:
        if self.committer is not None:
            self.committer.finish(timeout)


def save_job_for(target: SaveTarget, policy: Policy | None, emit: Emit = ignore) -> SaveJob:
    """Returns the job that saves to ``target``. ``policy``: of retention, on rank 0, which commits and prunes; None on other
    ranks."""
    if policy is None:
        return SaveJob(target, None, emit)
    return SaveJob(target, Committer(target, policy, emit, read_locks=ReadLocks(target.storage, target.root),
                                     ended=lambda run: ended(target.storage, target.root)(run)), emit)


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

    def wait(self, timeout: float) -> list[Outcome]:
        found, self._outcomes = self._outcomes, []
        return found

    def finish(self, timeout: float, record_timeout: float | None = None) -> list[Outcome]:
        self.work.finish(timeout if record_timeout is None else record_timeout)
        return self.wait(0)


def write_extra_weights(storage: Storage, extra: ExtraWeights, tag: str) -> None:
    """Publishes the file, then removes the oldest beyond ``keep``. Raises SaveError that names the file."""
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


def _position(entry: str, extra: ExtraWeights) -> tuple[int, int, int] | None:
    """Returns (suffix, epoch, step) of ``{stem}-{kind}-{epoch}_{step}.{fmt}``, None for another name."""
    parsed = parse_name(entry.replace(f"-{extra.kind}-", "-", 1))
    return (parsed.suffix, parsed.epoch, parsed.step) if parsed and parsed.format == extra.format else None
