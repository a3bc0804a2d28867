"""Parts of ``iterations.py``: the model, its layouts, and the parameters of one rank in live cells,
as MindSpore and mindformers see them. mindformers' own functions are unchanged; replaced are their
sources of the graph's cuts (no network is compiled here), and the collectives for which MindSpore
has no CPU kernel."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from mindresume.model.layout import TensorLayout
from mindresume.model.layout import held as region_of
from mindresume.reshard.range_reader import view

ROOT = Path(__file__).resolve().parent.parent
sys.path += [path for path in (str(ROOT), str(ROOT / "st" / "programs")) if path not in sys.path]

import builtin_20 as builtin  # noqa: E402

PREFIX = "bench"
WIDTH = 1024
MATRICES = 18
NORMS = 2
Model = dict[str, tuple[tuple[int, ...], TensorLayout]]


def model(mib: int, data: int, tensor: int) -> Model:
    """Returns {name: (global shape, layout)} of ``mib`` MiB of float32: 20 weights and two moments
    of each, over ``data`` x ``tensor`` ranks. Half of the matrices are cut by rows, half by
    columns; two weights are uncut vectors."""
    matrix = (data, tensor)
    rows = max(round(mib * 2**20 / 3 / MATRICES / 4 / WIDTH / 16), 1) * 16
    weights: Model = {}
    for number in range(MATRICES):
        cut = (0, -1) if number % 2 == 0 else (-1, 0)
        weights[f"layers.{number}.weight"] = ((rows, WIDTH), TensorLayout(matrix, cut))
    for number in range(NORMS):
        weights[f"norms.{number}.weight"] = ((WIDTH,), TensorLayout(matrix, (-1,)))
    return {
        kind + name: row for kind in ("", "adam_m.", "adam_v.") for name, row in weights.items()
    }


def size_of(tensors: Model) -> int:
    """Bytes, every element once."""
    return sum(math.prod(shape) * 4 for shape, _ in tensors.values())


def held(tensors: Model) -> int:
    """Bytes of one rank."""
    return sum(math.prod(layout.local_shape(shape)) * 4 for shape, layout in tensors.values())


def whole(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).random(shape, np.float32)


def part(tensors: Model, name: str, rank: int) -> np.ndarray:
    """Returns the slice of a rank."""
    shape, layout = tensors[name]
    return np.ascontiguousarray(view(whole(name, shape), region_of(layout, rank, shape)))


def spec_of(tensors: Model) -> dict[str, dict[str, Any]]:
    """layouts.json of st/programs/builtin_20.py, with the optimizer's counter."""
    from st.builtin_versions import table

    shapes = {name: np.broadcast_to(np.float32(0), shape) for name, (shape, _) in tensors.items()}
    return table(
        {**shapes, "global_step": np.zeros(1, np.int32)},
        {name: layout for name, (_, layout) in tensors.items()},
    )


def cells_of(spec: Mapping[str, Any], tensors: Model, rank: int, values: bool) -> tuple[Any, Any]:
    """(network, optimizer with all parameters) of a rank; without ``values`` ones are in them."""
    import mindspore as ms

    arrays = {
        name: part(tensors, name, rank)
        if values
        else np.ones(layout.local_shape(shape), np.float32)
        for name, (shape, layout) in tensors.items()
    }
    arrays["global_step"] = np.full(1, 77, np.int32)
    network, optimizer = builtin.cells(
        spec, {name: ms.Tensor(array) for name, array in arrays.items()}
    )
    for parameter in optimizer.get_parameters():
        # the first access moves the bytes; training has done so long before
        parameter.asnumpy()
    return network, optimizer


class Strategies:
    """The strategy that MindSpore would return for the compiled network of a job, computed once: it
    costs the built-in nothing here."""

    def __init__(self, spec: Mapping[str, Any], ranks: int):
        self.of_rank = {rank: builtin.strategy_of(spec, rank) for rank in range(ranks)}

    @contextlib.contextmanager
    def patched(self, rank: int) -> Iterator[None]:
        """Makes all modules of mindformers use it, with a silent log."""
        logging.disable(logging.WARNING)
        answers = {
            "get_strategy_metadata": lambda *_, **__: self.of_rank,
            "get_current_strategy_metadata": lambda *_, **__: [self.of_rank[rank]],
        }
        with contextlib.ExitStack() as patches:
            for module in map(
                importlib.import_module, (f"mindformers.{name}" for name in builtin.MODULES)
            ):
                for name, answer in answers.items():
                    if hasattr(module, name):
                        patches.enter_context(mock.patch.object(module, name, answer))
            yield


def install_collectives() -> None:
    """Before mindformers is imported. Both are AllReduce of float32, which is what MindSpore's
    library on CPU has."""
    import mindspore.communication.comm_func as comm_func
    from mindspore import Tensor, ops

    from st.cpu_cluster import object_collectives

    object_collectives.install()

    def all_reduce(tensor: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        return ops.AllReduce()(Tensor(tensor.asnumpy().astype(np.float32))), None

    comm_func.all_reduce = functools.wraps(comm_func.all_reduce)(all_reduce)
