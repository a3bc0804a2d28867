"""Loads and saves Checkpoint 2.0 folders by ``load_checkpoint`` and ``save_checkpoint`` of the
installed mindformers, 1.8.0 or 1.9.0, and says what arrived.

Each line of standard input is a request in JSON, {"do": "read" or "write", and the arguments of
that function}; the answer is a line {"result": what it returned}, or {"error": text}.

Nothing of mindresume is in here, and no cluster: each rank is simulated in turn. What is replaced
is where a process learns its rank and how the compiled graph cuts the parameters; all that reads
and writes the folder is the real one.

    layouts          {name: {"dtype", "global_shape", "optimizer": bool, "layout": null or
                             {"device_matrix", "tensor_map", "rank_list"}}}
    result of read   {"mindformers", "folder", "error": null or text, "common": {...} or text,
                      "ranks": {"0": {"tensors": {name: {"sha256", "shape", "dtype"}}, "not_loaded":
                      [name]}}}

``layout`` null: every rank has it whole and the graph says nothing about it, as of global_step.
``not_loaded``: parameters that keep what they had before. sha256: of the little-endian bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

MODULES = (
    "tools.utils",
    "utils.parallel_utils",
    "utils.file_utils",
    "checkpoint.checkpoint",
    "checkpoint.sharded_tensor",
    "checkpoint.fully_parallel",
    "checkpoint.reshard",
    "checkpoint.broadcast",
    "checkpoint.metadata",
)
ALIASES = "abcdefghijklmnopqrstuvwxyz"


def strategy_of(spec: Mapping[str, Any], rank: int) -> dict[str, list[Any]]:
    """Returns {name: [Layout, dtype, global shape]} of ``rank``, as MindSpore does after the graph
    is compiled."""
    import mindspore as ms
    from mindspore.parallel import Layout

    found = {}
    for name, row in spec.items():
        layout = row["layout"]
        if layout is None or rank not in layout["rank_list"]:
            continue
        names = tuple(ALIASES[: len(layout["device_matrix"])])

        def alias(axis: Any, names: tuple[str, ...] = names) -> Any:
            if isinstance(axis, list):
                return tuple(map(alias, axis))
            return "None" if axis == -1 else names[len(names) - 1 - axis]

        made = Layout(tuple(layout["device_matrix"]), names, layout["rank_list"])
        found[name] = [
            made(*map(alias, layout["tensor_map"])),
            getattr(ms, row["dtype"]),
            tuple(row["global_shape"]),
        ]
    return found


def local_slices(row: Mapping[str, Any], rank: int) -> tuple[slice, ...]:
    """Returns the slice of the global tensor on ``rank``, as mindformers computes it."""
    from mindformers.checkpoint.reshard import infer_slice_area_by_rank

    layout = row["layout"]
    if layout is None:
        return tuple(slice(0, size) for size in row["global_shape"])
    area = infer_slice_area_by_rank(
        tuple(layout["device_matrix"]),
        layout["tensor_map"],
        layout["rank_list"].index(rank),
        tuple(row["global_shape"]),
    )
    return tuple(slice(*part) for part in area)


def held(row: Mapping[str, Any], rank: int) -> bool:
    """Returns whether ``rank`` has a slice of the tensor; it has none of another pipeline stage."""
    return row["layout"] is None or rank in row["layout"]["rank_list"]


def cells(spec: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns a network with the parameters ``values``, {name: Tensor}, and an optimizer with its
    own and those of the network."""
    from mindspore import Parameter
    from mindspore.nn import Cell

    class Holder(Cell):
        """Parameters under their full names; as a model it leaves names as they are (1.8.0 asks for
        both methods)."""

        def convert_name(self, name: str) -> str:
            return name

        def convert_concat_name(self, name: str) -> str:
            return name

    network, optimizer = Holder(), Holder()
    for name, value in values.items():
        parameter = Parameter(value, name=name, requires_grad=False)
        optimizer.insert_param_to_cell(name, parameter, check_name_contain_dot=False)
        if not spec[name]["optimizer"]:
            network.insert_param_to_cell(name, parameter, check_name_contain_dot=False)
    return network, optimizer


@contextlib.contextmanager
def as_rank(rank: int, ranks: int, spec: Mapping[str, Any]) -> Iterator[None]:
    """Makes this process ``rank`` of ``ranks`` everywhere in mindformers; barriers do not wait, and
    ``spec`` replaces the strategy of the graph."""
    answers = {
        "get_real_rank": lambda: rank,
        "get_rank": lambda: rank,
        "get_real_group_size": lambda: ranks,
        "get_group_size": lambda: ranks,
        "barrier_world": lambda action=None: None,
        "get_current_strategy_metadata": lambda *_, **__: [strategy_of(spec, rank)],
        "get_strategy_metadata": lambda *_, **__: {
            other: strategy_of(spec, other) for other in range(ranks)
        },
    }
    with contextlib.ExitStack() as patches:
        for module in map(importlib.import_module, (f"mindformers.{name}" for name in MODULES)):
            for name, answer in answers.items():
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, answer))
        yield


def described(parameter: Any) -> dict[str, Any]:
    """Hash, shape and type of what is in a parameter."""
    array = parameter.asnumpy()
    return {
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).lower(),
    }


def load_rank(folder: str, spec: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Returns the state of one rank after ``load_checkpoint``, see the top."""
    import mindspore as ms
    import numpy as np
    from mindformers.checkpoint import checkpoint

    local = {name: row for name, row in spec.items() if held(row, rank)}
    shapes = {
        name: [part.stop - part.start for part in local_slices(row, rank)]
        for name, row in local.items()
    }
    values = {
        name: ms.Tensor(np.full(shapes[name], 77), getattr(ms, row["dtype"]))
        for name, row in local.items()
    }
    network, optimizer = cells(spec, values)
    arrived = set()

    def load_param_into_net(net: Any, state: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        missed, left = ms.load_param_into_net(net, state, *args, **options)
        arrived.update(
            set(state) & {parameter.name for parameter in net.get_parameters()} - set(missed)
        )
        return missed, left

    with (
        as_rank(rank, ranks, spec),
        mock.patch.object(checkpoint, "load_param_into_net", load_param_into_net),
    ):
        checkpoint.load_checkpoint(folder, network, optimizer)
    parameters = optimizer.parameters_dict()
    return {
        "tensors": {name: described(parameters[name]) for name in sorted(local)},
        "not_loaded": sorted(set(local) - arrived),
    }


def common_of(folder: str) -> dict[str, Any] | str:
    """common.json as the trainer reads it before anything else in a resume; the error's text if it
    cannot."""
    from mindformers.checkpoint.checkpoint import CommonInfo

    try:
        return dict(vars(CommonInfo.load_common(os.path.join(folder, "common.json"))))
    except (TypeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def read(folder: str, layouts: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Loads a folder on each rank."""
    import mindformers
    from mindformers.checkpoint.checkpoint import get_checkpoint_path

    answer: dict[str, Any] = {
        "mindformers": mindformers.__version__,
        "folder": None,
        "error": None,
        "common": None,
        "ranks": {},
    }
    try:
        answer["folder"] = get_checkpoint_path(folder)
        answer["common"] = common_of(answer["folder"])
        for rank in range(ranks):
            answer["ranks"][str(rank)] = load_rank(folder, layouts, rank, ranks)
    except Exception as error:  # what mindformers raises is the answer
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


def save_rank(
    spec: Mapping[str, Any], whole: Mapping[str, Any], rank: int, ranks: int, how: Mapping[str, Any]
) -> None:
    """Saves as one rank of the job. As in a real job the network has the parameters of all pipeline
    stages, and MindSpore writes only those of this rank."""
    import mindspore as ms
    from mindformers.checkpoint import checkpoint, fully_parallel
    from mindformers.checkpoint.sharded_tensor import get_all_sharded_tensor

    here = {name for name, row in spec.items() if held(row, rank)}
    local = {
        name: ms.Tensor(
            whole[name].asnumpy()[local_slices(row, rank)] if name in here else [0],
            getattr(ms, row["dtype"]),
        )
        for name, row in spec.items()
    }
    network, optimizer = cells(spec, local)
    step = how["iteration"]
    common = checkpoint.CommonInfo(
        step_num=step, global_step=step, epoch_num=1, global_batch_size=8
    )

    def save_of_this_rank(*given: Any, choice_func: Any = None, **options: Any) -> None:
        ms.save_checkpoint(
            *given,
            choice_func=lambda name: name in here and (not choice_func or choice_func(name)),
            **options,
        )

    with (
        as_rank(rank, ranks, spec),
        mock.patch.object(checkpoint, "ms_save_checkpoint", save_of_this_rank),
        mock.patch.object(fully_parallel, "save_checkpoint", save_of_this_rank),
    ):
        checkpoint.save_checkpoint(
            iteration=step,
            network=network,
            optimizer=optimizer,
            common_info=common,
            keep_max_num=5,
            user_prefix="qwen3",
            save_checkpoint_path=how["root"],
            sharded_tensor_metas=get_all_sharded_tensor(optimizer, None) if ranks > 1 else None,
            remove_redundancy=how["remove_redundancy"],
        )


def write(values: str, layouts: Mapping[str, Any], ranks: int, **how: Any) -> None:
    """Saves on each rank its part of the whole tensors in the file ``values``. ``how``: root,
    iteration, remove_redundancy."""
    import mindspore as ms

    whole = ms.load_checkpoint(values, format="safetensors")
    os.makedirs(how["root"], exist_ok=True)
    for rank in range(ranks):
        save_rank(layouts, whole, rank, ranks, how)


def main() -> None:
    """Answers all requests. Output of mindformers goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": {"read": read, "write": write}[request.pop("do")](**request)}
        except (Exception, SystemExit) as error:  # whoever asked has to know it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
