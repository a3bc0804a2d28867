"""Reads the live MindSpore network: parameters as numpy arrays, layouts, random states. Imports
mindspore late."""

from __future__ import annotations

import base64
import math
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from mindresume.errors import LoadError, SaveError
from mindresume.events import Emit, warning
from mindresume.formatting import listed
from mindresume.model.layout import Layouts, Shape, TensorLayout, is_scalar, ordinals, shares
from mindresume.tensor_files.header import DTYPES


def deferred(parameters: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns {name: value} of MindSpore tensors, parameters or plain numbers; bfloat16 becomes
    ml_dtypes.bfloat16. Each tensor is copied from its device only when its bytes are read, so that
    host memory never holds a second copy of the whole model. The values have dtype, shape and
    nbytes, and numpy accepts them.

    On CPU an array may share memory with the parameter: write it before the next step.

    Raises:
        SaveError: A parameter is no tensor (MapParameter).
    """
    return {name: DeviceTensor.of(name, value) for name, value in parameters}


class DeviceTensor:
    """Delays ``to_numpy(name, value)`` until numpy reads it."""

    __slots__ = ("name", "value", "dtype", "shape", "nbytes")

    def __init__(self, name: str, value: Any, dtype: np.dtype):
        self.name = name
        self.value = value
        self.dtype = dtype
        self.shape = tuple(value.shape)
        self.nbytes = math.prod(self.shape) * dtype.itemsize

    @classmethod
    def of(cls, name: str, value: Any) -> Any:
        """Returns a ``DeviceTensor``; or the array, if ``value`` is no tensor, is not initialised
        yet, or has a dtype that numpy does not know."""
        dtype = DTYPES.get(str(getattr(value, "dtype", "")).lower())
        if dtype is None or not hasattr(value, "asnumpy") or getattr(value, "has_init", False):
            return to_numpy(name, value)
        return cls(name, value, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(_host_array(self.value, self.dtype == ml_dtypes.bfloat16), dtype)


def to_numpy(name: str, value: Any) -> np.ndarray:
    """Returns the value as mindspore.save_checkpoint stores it: int becomes int64, float becomes
    float32, both 0-d."""
    if isinstance(value, str):
        return np.array(value)
    if isinstance(value, (bool, np.bool_)):
        return np.array(value, np.bool_)
    if isinstance(value, (int, np.integer)):
        return np.array(value, np.int64)
    if isinstance(value, (float, np.floating)):
        return np.array(value, np.float32)
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "asnumpy"):
        raise SaveError(f"parameter {name} is a {type(value).__name__}; only tensors can be saved")
    if hasattr(value, "init_data") and getattr(value, "has_init", False):
        value.init_data()
    return _host_array(value, "bfloat16" in str(value.dtype).lower())


def as_numpy(value: Any) -> np.ndarray:
    """Returns the array of a tensor, a number or an array."""
    return np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value)


def _host_array(value: Any, is_bfloat16: bool) -> np.ndarray:
    """Returns the array of a tensor that is initialised."""
    array = value.asnumpy()
    if is_bfloat16 and array.dtype != ml_dtypes.bfloat16:
        array = (
            array.view(ml_dtypes.bfloat16)
            if array.dtype.itemsize == 2
            else array.astype(ml_dtypes.bfloat16)
        )
    return array


def layouts(table: Mapping[str, Any] | None, shapes: Mapping[str, Shape], emit: Emit) -> Layouts:
    """Returns {name: (layout, global shape)} from ``network.parameter_layout_dict`` of a compiled
    network.

    Its rows: (device matrix, tensor map, slice before the optimizer shard, field, uniform split,
    optimizer group, full shape, ...). A graph from MindSpore's compile cache has no full shape; it
    follows from the slice. The number of optimizer shards follows from the sizes: full shape / cuts
    / size of the local part. A row that does not fit is skipped with a warning: its tensor can
    still be saved and loaded, but not re-cut.
    """
    found = {}
    for name, row in (table or {}).items():
        if name not in shapes:
            continue
        matrix = tuple(row[0])
        tensor_map = tuple(tuple(m) if isinstance(m, (list, tuple)) else m for m in row[1])
        held = math.prod(shapes[name])
        try:
            plain = TensorLayout(matrix, tensor_map)
            full = tuple(row[6]) or plain.global_shape(row[2])
            cuts = math.prod(matrix) // plain.replicas
            pieces = math.prod(full) // cuts // held if held else 1
            if row[5] and row[2] and not row[6] and held and pieces < 2:
                raise ValueError(
                    f"the optimizer cuts it over the group {row[5]}, and the number of pieces is "
                    "unknown"
                )
            layout = TensorLayout(matrix, tensor_map, pieces if pieces > 1 else 0)
            expected = layout.local_shape(full)
            if expected != shapes[name]:
                raise ValueError(f"it says {expected}, the parameter is {shapes[name]}")
            found[name] = (layout, full)
        except (ValueError, ZeroDivisionError) as error:
            emit(warning(f"{name}: its layout is not recorded: {error}"))
    return found


def strategy_layouts(
    table: Mapping[str, Any] | None,
    shapes: Mapping[str, Shape],
    emit: Emit,
    split: Layouts | None = None,
) -> Layouts:
    """Returns the same as ``layouts``, from one rank's part of
    ``mindspore.parallel.strategy.get_strategy_metadata``: {name: [Layout, dtype, global shape]}.
    Its tensor map contains the optimizer shard, and does not tell it from tensor parallelism.

    Args:
        split: result of ``layouts``, where the optimizer shard stands apart. It decides if each
            rank holds the same part by both. If they contradict each other, the layout is not
            known.
    """
    found, split = {}, split or {}
    for name, (layout, _, full) in (table or {}).items():
        if name not in shapes:
            continue
        row, full = layout.to_dict(), tuple(full)
        try:
            if row.get("interleaved_parallel"):
                raise ValueError("interleaved_parallel: it is unknown which rank holds which part")
            cuts = tuple(tuple(m) if isinstance(m, (list, tuple)) else m for m in row["tensor_map"])
            known = TensorLayout(tuple(row["device_matrix"]), cuts).normalized()
            held = known.local_shape(full)
            if name in split:
                folded, (known, whole) = known, split[name]
                if whole != full or ordinals(known, full) != ordinals(folded, full):
                    raise ValueError(
                        f"MindSpore describes it as {folded} of {full} and as {known} of {whole}"
                    )
            if held != shapes[name]:
                raise ValueError(f"it says {held}, the parameter is {shapes[name]}")
            found[name] = (known, full)
        except ValueError as error:
            emit(warning(f"{name}: its layout is not recorded: {error}"))
    return found


def is_parallel() -> bool:
    """Returns whether MindSpore's front end cuts parameters (semi-auto, auto or hybrid
    parallel)."""
    from mindspore import context

    return context.get_auto_parallel_context("parallel_mode") in (
        "semi_auto_parallel",
        "auto_parallel",
        "hybrid_parallel",
    )


def job_layouts(network: Any, shapes: Mapping[str, Shape], world_size: int, emit: Emit) -> Layouts:
    """Returns {name: (layout, global shape)} of this rank's parameters of a compiled network: from
    ``parameter_layout_dict``, compared with its strategy metadata, if this MindSpore has some and
    the network was compiled with ``enable_save_strategy_online``. With data parallelism alone every
    rank holds every parameter of more than one element whole."""
    if world_size == 1:
        return {}
    if not is_parallel():
        return {
            name: (TensorLayout((world_size,), (-1,) * len(shape)), shape)
            for name, shape in shapes.items()
            if not is_scalar(shape)
        }
    table = layouts(getattr(network, "parameter_layout_dict", None), shapes, emit)
    try:
        from mindspore.parallel.strategy import get_current_strategy_metadata

        of_ranks = get_current_strategy_metadata(network)
    except (ImportError, AttributeError, ValueError, RuntimeError):
        of_ranks = None
    metadata = (next(iter(of_ranks.values()), None) if of_ranks else None) or {}
    return {
        **{name: row for name, row in table.items() if name not in metadata},
        **strategy_layouts(metadata, shapes, emit, table),
    }


def own_share(
    tensors: Mapping[str, Any],
    tables: Layouts,
    rank: int,
) -> frozenset[str]:
    """Returns the names of the tensors with a layout that this rank writes, with redundancy
    removal."""
    if not tables:
        return frozenset()
    size = next(iter(tables.values()))[0].stage_size
    held = {
        name: (layout, full, tensors[name].dtype.itemsize)
        for name, (layout, full) in tables.items()
    }
    return shares(held, size)[rank % size]


def capture_random() -> dict[str, Any]:
    """Returns the state of the generators of Python, numpy and MindSpore in this process."""
    import mindspore as ms

    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    seed = ms.get_seed()
    return {
        "python": {
            "version": version,
            "internal": _pack(np.asarray(internal, np.uint64)),
            "gauss": gauss,
        },
        "numpy": {
            "kind": kind,
            "keys": _pack(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "mindspore": {
            "seed": None if seed is None else int(seed),
            "state": _pack(ms.get_rng_state().asnumpy()),
        },
    }


def restore_random(state: Mapping[str, Any]) -> list[str]:
    """Restores the generators whose state is in ``state``; returns their names.

    The counters inside some MindSpore kernels (DropoutGenMask and the like in a compiled graph)
    cannot be restored: these kernels draw from their seeds again.

    Raises:
        LoadError: ``state`` is not a valid random state.
    """
    import mindspore as ms

    restored = []
    try:
        if "python" in state:
            row = state["python"]
            internal = tuple(map(int, _unpack(row["internal"], np.uint64)))
            random.setstate((row["version"], internal, row["gauss"]))
            restored.append("python")
        if "numpy" in state:
            row = state["numpy"]
            keys, cached = _unpack(row["keys"], np.uint32), row["cached"]
            np.random.set_state((row["kind"], keys, row["position"], row["has_gauss"], cached))
            restored.append("numpy")
        if row := state.get("mindspore"):
            ms.set_rng_state(ms.Tensor(_unpack(row["state"], np.uint8)))
            restored.append("MindSpore's default generator")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise LoadError(
            f"the random state in the record cannot be restored: {type(error).__name__}: {error}"
        ) from error
    return restored


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _unpack(text: str, dtype: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()


# ---- comparison with what was loaded -------------------------------------------------------------

# Callbacks and loaders of others run after the load, and some load weights of their own:
# ``OnRequestExit`` and ``BackupAndRestore`` of MindSpore do so in ``on_train_begin``. So the
# parameters are compared at the first step.
#
# asnumpy() of a tensor in host memory copies nothing; of one on a device it copies the whole. Such
# a tensor is cut on the device, and only the parts are copied. One in host memory must not be cut
# by MindSpore, whose kernel first copies the whole parameter to the device, beside the memory that
# the graph takes for it.

# how the settings ``proof`` compare the weights
AUTO, FULL, OFF = "auto", "full", "off"
# bytes of a rank's weights up to which every one is compared by default: two passes take 0.2 s
LIMIT = 1 << 30
# a larger tensor is sampled: the beginnings of _ROWS equal rows, and its end
_WHOLE = 1 << 20
_BLOCK = 1 << 12
_ROWS = 63
# bytes that are copied from a device at a time
_PART = 1 << 26
# what callbacks run before the first step, and the classes whose methods do nothing
_BEGIN = re.compile("(on_)?(train_)?(epoch_|step_)?begin")
_BASES = "Callback.", "TrainerCallback."


@dataclass(frozen=True)
class LoadedWeights:
    """Holds {name: digest} of the tensors that this rank has loaded. Single numbers are left out:
    callbacks have reasons to set a learning rate, or the flag of a graceful exit, before the first
    step, and whoever loads other weights is noticed by the tensors.

    Attributes:
        whole: every byte is compared, not samples of the larger tensors.
        counts: (tensors compared by samples, bytes compared, bytes of all tensors).
    """

    digests: Mapping[str, str]
    whole: bool
    counts: tuple[int, int, int]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], proof: str = FULL) -> LoadedWeights:
        """Takes the digests of arrays. ``proof``: the setting; with ``off`` of none."""
        found = {name: array for name, array in arrays.items() if not is_scalar(array.shape)}
        size = sum(array.nbytes for array in found.values())
        whole = proof == FULL or proof == AUTO and (size <= LIMIT or _is_cpu())
        digests, sampled, compared = {}, 0, 0
        for name, array in found.items() if proof != OFF else ():
            digests[name], part = _digest(array, whole)
            sampled += part < array.nbytes
            compared += part
        return cls(digests, whole, (sampled, compared, size))

    def difference(self, parameters: Iterable[tuple[str, Any]], callbacks: Iterable[object]) -> str:
        """Returns which parameters are not what was loaded, and what others ran since; empty if all
        are. ``parameters``: (name, parameter), at least those that were loaded. ``callbacks``:
        those of the training."""
        altered = []
        for name, value in parameters:
            expected = self.digests.get(name)
            found = expected and self._found(name, value, expected)
            if found != expected:
                altered.append(f"{name} (xxh3 {expected}, found {found})")
        if not altered:
            return ""
        others = [
            f"{type(callback).__name__} ({', '.join(hooks)})"
            for callback in callbacks
            if not type(callback).__module__.startswith("mindresume.")
            and (hooks := _hooks(callback))
        ]
        return (
            f"{len(altered)} of {len(self.digests)} tensors are not what was loaded: "
            f"{listed(altered, 3)}. Something has replaced them between the load and the first "
            f"step; callbacks that ran in between: {', '.join(others) or 'none'}. The checkpoint "
            "is right. Remove the callback that loads weights of its own (OnRequestExit with "
            "save_ckpt: True and BackupAndRestore of MindSpore do), or the file that it loads"
        )

    def _found(self, name: str, value: Any, expected: str) -> str:
        """Returns the digest of a parameter. What was cut on a device may be in the order of the
        device, so a difference counts only in a copy of the whole."""
        most = _PART if self.whole else _WHOLE
        if getattr(value, "device", "CPU") != "CPU" and value.nbytes > most:
            try:
                if _digest(value, self.whole)[0] == expected:
                    return expected
            except (RuntimeError, TypeError, ValueError):
                pass
        return _digest(to_numpy(name, value), self.whole)[0]


def _is_cpu() -> bool:
    from mindspore import context

    return context.get_context("device_target") == "CPU"


def _digest(value: Any, whole: bool) -> tuple[str, int]:
    """Returns (digest, bytes in it) of an array, or of a tensor on a device, by the same places."""
    found, size = xxhash.xxh3_64(), 0
    flat = value.reshape(-1)
    count, item = flat.shape[0], flat.itemsize
    if whole or count * item <= _WHOLE:
        parts = (flat[at : at + _PART // item] for at in range(0, count, _PART // item))
    else:
        row, block = count // _ROWS, _BLOCK // item
        parts = iter((flat[: row * _ROWS].reshape(_ROWS, row)[:, :block], flat[-block:]))
    for part in parts:
        data = np.ascontiguousarray(to_numpy("", part)).reshape(-1).view(np.uint8)
        found.update(data)
        size += data.nbytes
    return found.hexdigest(), size


def _hooks(callback: object) -> list[str]:
    """Returns the methods of a callback of MindSpore or of the PyNative trainer that it runs
    before the first step."""
    return [
        name
        for name in dir(callback)
        if _BEGIN.fullmatch(name)
        and not getattr(getattr(callback, name), "__qualname__", "").startswith(_BASES)
    ]
