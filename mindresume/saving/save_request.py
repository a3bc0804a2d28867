"""Describes a training to the ``CheckpointManager``: where and when it saves, and at each step what is to be saved.

    class Mine(Step):
        def collect(self) -> Save: ...
    manager.step_end(Mine(20))
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mindresume.saving.shard_writer import Shard
from mindresume.saving.sync_saver import Save


@dataclass(frozen=True)
class SaveOptions:
    """Where and when a training saves. ``root``: the folder of checkpoints. ``prefix``: of the names of files. ``every_steps``:
    saves fall on its absolute multiples; without it ``every_seconds`` counts, and without both only the end is saved.
    ``async_save``: "thread" or "process" saves behind the training, True is "thread". ``iterations``: Checkpoint 2.0.
    ``shown``: the folder as the log calls it."""
    root: str
    prefix: str
    every_steps: int | None = None
    every_seconds: float | None = None
    async_save: bool | str = False
    iterations: bool = False
    shown: str = ""


class Saves(Protocol):
    """The part of a ``CheckpointManager`` that a step may use."""

    def save(self, step: Step, force: bool = False) -> None: ...


class Step:
    """A training at the end of a step, as it is to be saved. A subclass defines at least ``collect``. ``number``: of the step,
    since the training began, over all resumes."""

    def __init__(self, number: int):
        self.number = number

    def collect(self) -> Save:
        """Returns everything that this rank writes. Called on all ranks, because it can be an exchange."""
        raise NotImplementedError

    def record(self, save: Save, name: str) -> None:
        """Called with what was collected, before the saver has it. Raises SaveError if the save failed."""

    def taken(self, save: Save, name: str) -> None:
        """Called when the saver has it, under ``name``."""

    def save(self, manager: Saves, force: bool) -> None:
        """Saves the step if it is due; with ``force`` in any case, unless it is saved already."""
        manager.save(self, force)

    def rescue(self) -> Shard:
        """Returns all that this rank holds when other ranks are lost, without any exchange."""
        return self.collect().shard

    def exchanges(self) -> bool:
        """Returns whether collecting waits for other ranks."""
        return False
