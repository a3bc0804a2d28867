"""Matches the parameters of a network with tensors of a checkpoint of weights alone: their names and dtypes."""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mindresume.errors import LoadError
from mindresume.events import Emit, Notice, warning
from mindresume.formatting import counted, listed
from mindresume.reshard.region_load import LoadTarget
from mindresume.tensor_files.header import DTYPES

_FLOATS, _INTS = ("float16", "float32", "float64", "bfloat16"), ("int8", "int16", "int32", "int64")
# first part of the names of the states of the optimizers of MindSpore and mindformers (nn/optim, mint/optim, core/optim)
_STATES = frozenset(("adam_m", "adam_v", "lamb_m", "lamb_v", "muon_m", "momentum_buf", "moments", "moment", "moment1", "moment2",
                     "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "accum", "accum_update", "mean_grad", "mean_square",
                     "step_size", "vhat"))
_ADAPTERS = ("lora", "mindpet_delta")           # in the names of parameters that mindformers adds for pet_config


def new_adapters(wanted: Collection[str], stored: Collection[str]) -> set[str]:
    """Returns the parameters that mindformers adds for ``pet_config``, if the checkpoint, saved from the network alone, has none
    of them: they may be missing at the begin of a training."""
    return set() if any(map(_is_adapter, stored)) else {name for name in wanted if _is_adapter(name)}


def _is_adapter(name: str) -> bool:
    return any(word in name for word in _ADAPTERS)


def renamed(target: LoadTarget, stored: Mapping[str, Any], what: str, emit: Emit) -> LoadTarget:
    """Returns a target with the names of the checkpoint, by the rules of MindSpore and mindformers: tk_delta for mindpet_delta,
    and one common prefix of all parameters that are not found, but none of optimizer states. Its dtypes are those of the
    checkpoint, where ``convert`` converts them.

    Args:
        target: with the names and dtypes of the parameters.
        stored: the tensors of the checkpoint ``what``.
    Raises:
        LoadError: No parameter is in the checkpoint.
    """
    old = {name.replace("tk_delta", "mindpet_delta"): name for name in stored if "tk_delta" in name}
    names = {name: old[name] for name in target.shapes if name not in stored and name in old}
    unknown = [name for name in target.missing(stored) if name not in names]
    if unknown:
        ends = (name for name in stored if name.endswith(f".{unknown[0]}"))
        prefixes = [prefix for prefix in (name.removesuffix(unknown[0]) for name in ends)
                    if prefix.partition(".")[0] not in _STATES and all(prefix + name in stored for name in unknown)]
        if len(prefixes) == 1:
            emit(warning(f"{what} has {len(unknown)} parameters under another name, with the prefix {prefixes[0]}"))
            names |= {name: prefixes[0] + name for name in unknown}
    if not names and not any(name in stored for name in target.shapes):
        raise LoadError(f"{what} holds none of the {len(target.shapes)} parameters of the network, expected names such as "
                        f"{listed(sorted(target.shapes), 3)}; it holds {listed(sorted(stored), 3) or 'nothing'}. If these are "
                        f"weights of another model or framework, convert them first, or give another load_checkpoint")
    shapes, dtypes = {}, {}
    for parameter, (shape, dtype) in target.shapes.items():
        name = names.get(parameter, parameter)
        if name in stored and stored[name].dtype != dtype and _converts(stored[name].dtype, dtype):
            dtypes[name], dtype = dtype, stored[name].dtype
        shapes[name] = shape, dtype
    return replace(target, shapes=shapes, optional={names.get(name, name) for name in target.optional},
                   names={name: parameter for parameter, name in names.items()}, dtypes=dtypes)


def convert(arrays: dict[str, np.ndarray], target: LoadTarget, emit: Emit) -> None:
    """Converts the arrays to the dtypes of the parameters. Raises LoadError if a value would become infinite, or an integer would
    change."""
    kinds: Counter[str] = Counter()
    for name, dtype in target.dtypes.items():
        if name not in arrays:
            continue
        array = arrays[name]
        with np.errstate(over="ignore", invalid="ignore"):
            converted = array.astype(DTYPES[dtype])
        if not np.array_equal(converted, array) if dtype in _INTS else np.any(np.isinf(converted) & ~np.isinf(array)):
            raise LoadError(f"{target.parameter(name)} is {array.dtype.name} in the checkpoint and has values that {dtype}, the "
                            f"dtype of the parameter, cannot hold; set param_init_type of the model to {array.dtype.name}")
        kinds[f"{array.dtype.name} to {dtype}"] += 1
        arrays[name] = converted
    for kind, count in kinds.items():
        emit(Notice(f"converted {counted(count, 'tensor')} from {kind}, the dtype of the network"))


def _converts(stored: str, wanted: str) -> bool:
    """Returns whether mindformers converts between these dtypes (mindspore _type_convert)."""
    return any({stored, wanted} <= set(kind) for kind in (_FLOATS, _INTS))
