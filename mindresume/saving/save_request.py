"""Describes a training to the ``CheckpointManager``: where and when it saves, and at each step the state to save.

    class ArraysRequest(SaveRequest):
        def collect(self) -> Save: ...
    manager.step_end(ArraysRequest(20))
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mindresume.saving.shard_writer import Shard
from mindresume.saving.sync_saver import Save


@dataclass(frozen=True)
class SaveOptions:
    """Where and when a training saves.

    Attributes:
        root: the checkpoint directory.
        prefix: of the names of files.
        every_steps: saves fall on absolute multiples of it. Without it ``every_seconds`` counts; without both only the last step
            is saved.
        async_save: "thread" or "process" saves in the background; True is "thread".
        iterations: Checkpoint 2.0.
        shown: the directory as the log names it.
        samples_in_common: the readers of ``common.json`` know the key ``consumed_samples``.
    """
    root: str
    prefix: str
    every_steps: int | None = None
    every_seconds: float | None = None
    async_save: bool | str = False
    iterations: bool = False
    shown: str = ""
    samples_in_common: bool = False


class SupportsSave(Protocol):
    """The method of a ``CheckpointManager`` that a request may call."""

    def save(self, request: SaveRequest, force: bool = False) -> None: ...


class SaveRequest:
    """The state of a training at the end of a step. A subclass defines at least ``collect``.

    Args:
        step: counted from the beginning of the training, over all resumes.
    """

    def __init__(self, step: int):
        self.step = step

    def collect(self) -> Save:
        """Returns everything that this rank writes. All ranks call it, because it can be a collective."""
        raise NotImplementedError

    def on_collected(self, save: Save, name: str) -> None:
        """Called with the collected state, before the saver gets it. Raises SaveError to make the save fail."""

    def on_submitted(self, save: Save, name: str) -> None:
        """Called after the saver got it, under ``name``."""

    def save(self, manager: SupportsSave, force: bool) -> None:
        """Saves the step if it is due; with ``force`` in any case, unless it is saved already."""
        manager.save(self, force)

    def collect_local(self) -> Shard:
        """Returns all that this rank holds after other ranks were lost, without collectives."""
        return self.collect().shard

    def needs_collectives(self) -> bool:
        """Returns whether ``collect`` waits for other ranks."""
        return False
