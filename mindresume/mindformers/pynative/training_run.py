"""Holds what mindresume knows of one training of the PyNative trainer: its configuration, and how its data is read.

The trainer reads items from its data set: a step reads one item of the global batch size, since mindformers 2.1.0 one item for
each micro-batch. At the end of a pass it makes a new iterator, whose first item is that of the first pass. So a resume skips
items only in its first iterator; mindformers alone would skip them again in each later pass.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindresume.mindformers import adapter
from mindresume.mindformers.training_context import TrainingContext
from mindresume.model.data_position import DataPosition


class Configuration(dict):
    """Provides the configuration of the PyNative trainer under the names that the graph trainer uses."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def configuration_of(trainer: Any) -> Configuration:
    """Returns the configuration of a trainer. Keys that mindformers does not know, such as ``mindresume``, are kept."""
    config = Configuration(trainer.config.to_dict())
    checkpoint = config.get("checkpoint") or {}
    saves = checkpoint.get("enable_save", True) and checkpoint.get("save_path") and not checkpoint.get("save_trainable_only")
    config["seed"] = (config.get("training") or {}).get("seed")         # of the order of a shuffled data set
    config["output_dir"] = adapter.output_root()
    config["callbacks"] = [*(config.get("callbacks") or ()),
                           *([{"type": adapter.ALIAS, "directory": checkpoint["save_path"]}] if saves else [])]
    return config


@dataclass
class TrainingRun:
    """Holds one training.

    Attributes:
        skip: items of the data set to skip in the first pass.
        is_loaded: the checkpoint is loaded; mindformers 2.0.0 asks for it once for each pipeline stage.
        iterators: number of iterators made since the training began.
    """
    trainer: Any
    config: Configuration
    context: TrainingContext
    skip: int = 0
    is_loaded: bool = False
    iterators: int = field(default=0)

    @property
    def item_samples(self) -> int:
        """Returns the samples that all ranks together read with one item of the data set each."""
        return getattr(self.trainer, "_base_units", 0) or self.trainer.global_batch_size

    @property
    def items(self) -> int | None:
        """Returns the number of items in a pass; None if the trainer has no data set of its own."""
        return self.trainer.train_epoch_step if self.trainer.train_dataset is not None else None

    @property
    def steps_per_pass(self) -> int:
        """Returns the whole steps in a pass, at least 1."""
        return max(1, (self.items or self.trainer.train_epoch_step) * self.item_samples // self.trainer.global_batch_size)

    def data_at(self, step: int) -> tuple[int | None, DataPosition | None]:
        """Returns (samples that the training has read, position in the data) after ``step``; None where it is unknown."""
        origin = self.context.progress.origin
        if not self.items or origin.consumed is None:
            return None, None
        counted = getattr(self.trainer.state, "consumed_samples", None)      # since 2.1.0; the batch size can change in a run
        samples = (step - origin.step) * self.trainer.global_batch_size if counted is None else counted - origin.consumed
        return origin.consumed + samples, origin.position.after(samples // self.item_samples, self.items, self.item_samples)

    @property
    def samples_in_common(self) -> bool:
        """Returns whether mindformers knows the key ``consumed_samples`` of ``common.json`` (since 2.1.0)."""
        return hasattr(self.trainer.state, "consumed_samples")

    @property
    def is_balanced(self) -> bool:
        """Returns whether mindformers distributes the samples among the ranks by their length (since 2.1.0). It then finds its
        position itself."""
        return bool(getattr(self.trainer, "_uses_data_balance", bool)())

    def begin_pass(self, dataset: Any) -> None:
        """Sets where the next iterator of ``dataset`` begins. Called before the trainer makes it."""
        if dataset is self.trainer.train_dataset:
            self.iterators += 1
            if self.skip:
                dataset.set_init_step(self.skip if self.iterators == 1 else 0)
