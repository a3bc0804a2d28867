"""Reads and sets the parameters of a PyNative training: a model, or the list of its pipeline stages, and an optimizer."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mindresume.errors import LoadError
from mindresume.mindformers import adapter
from mindresume.mindformers import network_state as live
from mindresume.model.layout import TensorLayout
from mindresume.model.training_state import is_transient

MASTER = "main_param."              # float32 copies that the optimizer keeps of parameters of a lower precision
COUNTER = "global_step"

Layouts = Mapping[str, tuple[TensorLayout, tuple[int, ...]]]


def stages_of(model: Any) -> list[Any]:
    """Returns the models of this rank: since mindformers 2.0.0 a list of pipeline stages, before one cell."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def model_parameters(model: Any) -> dict[str, Any]:
    """Returns {name: parameter} of all models of this rank, without those that exist only within a step."""
    return {name: parameter for stage in stages_of(model) for name, parameter in stage.parameters_dict().items()
            if not is_transient(name)}


def optimizer_parameters(optimizer: Any, model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: parameter} of the optimizer alone. Its ``parameters_dict`` contains those of the model, too."""
    if optimizer is None:
        return {}
    return {name: parameter for name, parameter in optimizer.parameters_dict().items()
            if name not in model and not is_transient(name)}


def local(parameter: Any) -> Any:
    """Returns the part of a parameter that this rank holds: ``to_local()`` of a DTensor of hyper_parallel, else all of it."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def shapes_of(parameters: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns {name: (shape, dtype)} of the parts that this rank holds."""
    found = {}
    for name, parameter in parameters.items():
        part = local(parameter)
        found[name] = tuple(part.shape), str(part.dtype).lower()
    return found


def tensors_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: array}; each is copied from its device when its bytes are read."""
    return live.deferred((name, local(parameter)) for name, parameter in parameters.items())


def layouts_of(model: Any, optimizer: Any, shapes: Mapping[str, tuple[int, ...]], world_size: int, warn: Callable[[str], None]
               ) -> Layouts:
    """Returns {name: (layout, global shape)} of the parameters ``shapes`` of this rank. All ranks call it: in mindformers 2.0.0
    it is a collective. One process has no layouts."""
    if world_size == 1:
        return {}
    cells = [*stages_of(model), *([optimizer] if optimizer is not None else [])]
    table = {name: row for cell in cells for name, row in adapter.pynative_layouts(cell).items()}
    return live.strategy_layouts({name: row for name, row in table.items() if row[0] is not None}, shapes, warn)


def restore(model: Any, optimizer: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Assigns arrays to the parameters of these names, as mindformers does (checkpoint/checkpoint.py, load_parameters).

    Raises:
        LoadError: A parameter did not take its array.
    """
    cells = [*stages_of(model), *([optimizer] if optimizer is not None else [])]
    left = set(arrays)
    for cell in cells:
        names = left & set(cell.parameters_dict())
        missed = adapter.load_by_name(cell, {name: arrays[name] for name in names})
        left -= names - set(missed)
    if left:
        raise LoadError(f"{len(left)} parameters got no value, for example {min(left)}")


def refresh_masters(optimizer: Any, loaded: Iterable[str]) -> None:
    """Copies the loaded parameters of the model into the optimizer's float32 copies, if the checkpoint had none of these."""
    if hasattr(optimizer, "reload_main_params_from_model") and not any(name.startswith(MASTER) for name in loaded):
        optimizer.reload_main_params_from_model()
