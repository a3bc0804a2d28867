"""Loads a Checkpoint 2.0 folder by ``load_checkpoint`` of the installed mindformers, 1.8.0 or
1.9.0, and says what arrived.

    python builtin_20_read.py FOLDER --layouts layouts.json --ranks 4 --out read.json [--optimizer]
    # command lines of builtin_20_read and builtin_20_write, one JSON list a line
    python builtin_20_read.py --serve

Nothing of mindresume is in here, and no cluster: each rank is simulated in turn. What is replaced
is where a process learns its rank and how the compiled graph cuts the parameters; all that reads
the folder is the real one.

    layouts.json     {name: {"dtype", "global_shape", "optimizer": bool, "layout": null or
                             {"device_matrix", "tensor_map", "rank_list"}}}
    read.json        {"mindformers", "folder", "error": null or text, "common": {...} or text,
                      "ranks": {"0": {"tensors": {name: {"sha256", "shape", "dtype"}}, "not_loaded":
                      [name], "unused": [name]}}}

``layout`` null: every rank has it whole and the graph says nothing about it, as of global_step.
``not_loaded``: parameters that keep what they had before. ``unused``: tensors that were read and
belong to no parameter. sha256: of the little-endian bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
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


def load_rank(
    folder: str, spec: Mapping[str, Any], rank: int, ranks: int, with_optimizer: bool
) -> dict[str, Any]:
    """Returns the state of one rank after ``load_checkpoint``, see the top."""
    import mindspore as ms
    import numpy as np
    from mindformers.checkpoint import checkpoint

    local = {
        name: row
        for name, row in spec.items()
        if held(row, rank) and (with_optimizer or not row["optimizer"])
    }
    shapes = {
        name: [part.stop - part.start for part in local_slices(row, rank)]
        for name, row in local.items()
    }
    values = {
        name: ms.Tensor(np.full(shapes[name], 77), getattr(ms, row["dtype"]))
        for name, row in local.items()
    }
    network, optimizer = cells(spec, values)
    arrived, unused = set(), set()

    def load_param_into_net(net: Any, state: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        missed, left = ms.load_param_into_net(net, state, *args, **options)
        arrived.update(
            set(state) & {parameter.name for parameter in net.get_parameters()} - set(missed)
        )
        unused.update(left)
        return missed, left

    with (
        as_rank(rank, ranks, spec),
        mock.patch.object(checkpoint, "load_param_into_net", load_param_into_net),
    ):
        checkpoint.load_checkpoint(folder, network, optimizer if with_optimizer else None)
    parameters = optimizer.parameters_dict()
    return {
        "tensors": {name: described(parameters[name]) for name in sorted(local)},
        "not_loaded": sorted(set(local) - arrived),
        "unused": sorted(unused),
    }


def common_of(folder: str) -> dict[str, Any] | str:
    """common.json as the trainer reads it before anything else in a resume; the error's text if it
    cannot."""
    from mindformers.checkpoint.checkpoint import CommonInfo

    try:
        return dict(vars(CommonInfo.load_common(os.path.join(folder, "common.json"))))
    except (TypeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def read(arguments: list[str]) -> None:
    """One command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--layouts", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--optimizer", action="store_true")
    args = parser.parse_args(arguments)
    import mindformers
    from mindformers.checkpoint.checkpoint import get_checkpoint_path

    spec = json.loads(args.layouts.read_text(encoding="utf-8"))
    answer: dict[str, Any] = {
        "mindformers": mindformers.__version__,
        "folder": None,
        "error": None,
        "common": None,
        "ranks": {},
    }
    try:
        answer["folder"] = get_checkpoint_path(args.folder)
        answer["common"] = common_of(answer["folder"])
        for rank in range(args.ranks):
            answer["ranks"][str(rank)] = load_rank(
                args.folder, spec, rank, args.ranks, args.optimizer
            )
    except Exception as error:  # what mindformers raises is the answer
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    args.out.write_text(json.dumps(answer), encoding="utf-8")


def serve() -> None:
    """Answers each line of standard input, a JSON list "read" or "write" and its arguments, with a
    line "done" or the error. Output of mindformers goes to standard error."""
    import builtin_20_write

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    commands = {"read": read, "write": builtin_20_write.write}
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            commands[command](arguments)
            answer = "done"
        except (Exception, SystemExit) as error:  # whoever asked has to know it
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    sys.modules["builtin_20_read"] = sys.modules["__main__"]
    serve() if sys.argv[1:] == ["--serve"] else read(sys.argv[1:])
