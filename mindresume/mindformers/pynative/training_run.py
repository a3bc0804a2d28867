"""Holds what mindresume knows of one training of the PyNative trainer: its configuration, and how
its data is read; reads and sets its parameters and counters.

The trainer reads items from its data set: a step reads one item of the global batch size, since
mindformers 2.1.0 one item for each micro-batch. At the end of a pass it makes a new iterator, whose
first item is that of the first pass. So a resume skips items only in its first iterator;
mindformers alone would skip them again in each later pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mindresume.errors import LoadError
from mindresume.mindformers import adapter
from mindresume.mindformers import network_state as live
from mindresume.mindformers.training_context import TrainingContext
from mindresume.model.layout import Layouts
from mindresume.model.training_state import DataPosition, Scalar, is_scalar, is_transient
from mindresume.reshard.region_load import Shapes


class Configuration(dict):
    """Provides the configuration of the PyNative trainer under the names that the graph trainer
    uses."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def configuration_of(trainer: Any) -> Configuration:
    """Returns the configuration of a trainer. Keys that mindformers does not know, such as
    ``mindresume``, are kept."""
    config = Configuration(trainer.config.to_dict())
    checkpoint = config.get("checkpoint") or {}
    saves = (
        checkpoint.get("enable_save", True)
        and checkpoint.get("save_path")
        and not checkpoint.get("save_trainable_only")
    )
    # of the order of a shuffled data set
    config["seed"] = (config.get("training") or {}).get("seed")
    config["output_dir"] = adapter.output_root()
    config["callbacks"] = [
        *(config.get("callbacks") or ()),
        *([{"type": adapter.ALIAS, "directory": checkpoint["save_path"]}] if saves else []),
    ]
    return config


@dataclass
class TrainingRun:
    """Holds one training.

    Attributes:
        skip: items of the data set to skip in the first pass.
        is_loaded: the checkpoint is loaded; mindformers 2.0.0 asks for it once for each pipeline
            stage.
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
        return max(
            1,
            (self.items or self.trainer.train_epoch_step)
            * self.item_samples
            // self.trainer.global_batch_size,
        )

    def data_at(self, step: int) -> tuple[int | None, DataPosition | None]:
        """Returns (samples that the training has read, position in the data) after ``step``; None
        where it is unknown."""
        origin = self.context.progress.origin
        if not self.items or origin.consumed is None:
            return None, None
        # since 2.1.0; the batch size can change in a run
        counted = getattr(self.trainer.state, "consumed_samples", None)
        samples = (
            (step - origin.initial_step) * self.trainer.global_batch_size
            if counted is None
            else counted - origin.consumed
        )
        return origin.consumed + samples, origin.position.after(
            samples // self.item_samples, self.items, self.item_samples
        )

    @property
    def samples_in_common(self) -> bool:
        """Returns whether mindformers knows the key ``consumed_samples`` of ``common.json`` (since
        2.1.0)."""
        return hasattr(self.trainer.state, "consumed_samples")

    @property
    def is_balanced(self) -> bool:
        """Returns whether mindformers distributes the samples among the ranks by their length
        (since 2.1.0). It then finds its position itself."""
        return bool(getattr(self.trainer, "_uses_data_balance", bool)())

    def begin_pass(self, dataset: Any) -> None:
        """Sets where the next iterator of ``dataset`` begins. Called before the trainer makes
        it."""
        if dataset is self.trainer.train_dataset:
            self.iterators += 1
            if self.skip:
                dataset.set_init_step(self.skip if self.iterators == 1 else 0)


# ---- parameters ----------------------------------------------------------------------------------

# float32 copies that the optimizer keeps of parameters of a lower precision
MASTER = "main_param."
COUNTER = "global_step"


def cells_of(model: Any, optimizer: Any = None) -> list[Any]:
    """Returns the models of this rank (since mindformers 2.0.0 a list of pipeline stages, before
    one cell), and the optimizer if there is one."""
    stages = list(model) if isinstance(model, (list, tuple)) else [model]
    return stages if optimizer is None else [*stages, optimizer]


def model_parameters(model: Any) -> dict[str, Any]:
    """Returns {name: parameter} of all models of this rank, without those that exist only within a
    step."""
    return {
        name: parameter
        for stage in cells_of(model)
        for name, parameter in stage.parameters_dict().items()
        if not is_transient(name)
    }


def optimizer_parameters(optimizer: Any, model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: parameter} of the optimizer alone. Its ``parameters_dict`` contains those of
    the model, too."""
    if optimizer is None:
        return {}
    return {
        name: parameter
        for name, parameter in optimizer.parameters_dict().items()
        if name not in model and not is_transient(name)
    }


def all_parameters(model: Any, optimizer: Any) -> dict[str, Any]:
    """Returns {name: parameter} of the models of this rank and of the optimizer, if there is
    one."""
    of_model = model_parameters(model)
    return {**of_model, **optimizer_parameters(optimizer, of_model)}


def local(parameter: Any) -> Any:
    """Returns the part of a parameter that this rank holds: ``to_local()`` of a DTensor of
    hyper_parallel, else all of it."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def shapes_of(parameters: Mapping[str, Any]) -> Shapes:
    """Returns {name: (shape, dtype)} of the parts that this rank holds."""
    found = {}
    for name, parameter in parameters.items():
        part = local(parameter)
        found[name] = tuple(part.shape), str(part.dtype).lower()
    return found


def tensors_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: array}; each is copied from its device when its bytes are read."""
    return live.deferred((name, local(parameter)) for name, parameter in parameters.items())


def layouts_of(model: Any, optimizer: Any, shapes: Shapes, context: TrainingContext) -> Layouts:
    """Returns {name: (layout, global shape)} of the parameters ``shapes`` of this rank. All ranks
    call it: in mindformers 2.0.0 it is a collective. One process has no layouts."""
    if context.group.size == 1:
        return {}
    table = {
        name: row
        for cell in cells_of(model, optimizer)
        for name, row in adapter.pynative_layouts(cell).items()
    }
    return live.strategy_layouts(
        {name: row for name, row in table.items() if row[0] is not None},
        {name: shape for name, (shape, _) in shapes.items()},
        context.emit,
    )


def restore_parameters(model: Any, optimizer: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Assigns arrays to the parameters of these names, as mindformers does
    (checkpoint/checkpoint.py, load_parameters).

    Raises:
        LoadError: A parameter did not take its array.
    """
    left = set(arrays)
    for cell in cells_of(model, optimizer):
        names = left & set(cell.parameters_dict())
        _, not_taken = adapter.load_into(cell, {name: arrays[name] for name in names})
        left -= names.difference(not_taken)
    if left:
        raise LoadError(f"{len(left)} parameters got no value, for example {min(left)}")


def refresh_masters(optimizer: Any, loaded: Iterable[str]) -> None:
    """Copies the loaded parameters of the model into the optimizer's float32 copies, if the
    checkpoint had none of these."""
    if hasattr(optimizer, "reload_main_params_from_model") and not any(
        name.startswith(MASTER) for name in loaded
    ):
        optimizer.reload_main_params_from_model()


# ---- what the trainer counts besides steps and samples -------------------------------------------

# These are the fields of ``TrainerState`` that neither the configuration nor other counters give,
# also those of later releases: in 1.9.0 and 2.0.0 ``total_flops``, ``best_metric`` and
# ``best_model_checkpoint``; since 2.1.0 also ``skipped_steps``. And of the trainer itself how many
# steps in a row were skipped, because ``max_consecutive_skipped_steps`` of them end a training.
# Fields from the configuration, and those that are restored together with step, samples and loss
# scale.
_OTHERS = frozenset(
    {
        "epoch",
        "global_step",
        "max_steps",
        "eval_steps",
        "save_steps",
        "epoch_step",
        "global_batch_size",
        "num_accumulation_steps",
        "consumed_samples",
        "loss_scale",
        "is_train_begin",
        "is_train_end",
    }
)
# {name: attribute of the trainer}
_IN_A_ROW = {"consecutive_skipped_steps": "_consecutive_skipped_steps"}


def saved_fields(trainer: Any) -> dict[str, Scalar]:
    """Returns the value of each field by name. Values other than None, flags, texts and finite
    numbers are left out."""
    state, found = trainer.state, {}
    for name in _names(state):
        found[name] = getattr(state, name)
    for name, attribute in _IN_A_ROW.items():
        if hasattr(trainer, attribute):
            found[name] = getattr(trainer, attribute)
    values = (
        (name, value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value)
        for name, value in found.items()
    )
    return {name: value for name, value in values if is_scalar(value)}


def restore_fields(trainer: Any, values: Mapping[str, Scalar]) -> None:
    """Sets the fields that the trainer of this release has."""
    names = set(_names(trainer.state))
    for name, value in values.items():
        if name in names:
            setattr(trainer.state, name, value)
        elif name in _IN_A_ROW and hasattr(trainer, _IN_A_ROW[name]):
            setattr(trainer, _IN_A_ROW[name], value)


def _names(state: Any) -> list[str]:
    return [field.name for field in fields(state) if field.name not in _OTHERS]
