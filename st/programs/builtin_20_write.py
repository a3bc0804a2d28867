"""Writes a Checkpoint 2.0 folder by ``save_checkpoint`` of the installed mindformers, 1.8.0 or
1.9.0.

    python builtin_20_write.py ROOT --iteration 10 --values whole.safetensors --layouts layouts.json --ranks 4
                               [--optimizer] [--remove-redundancy] [--prefix qwen3] [--keep 5]
                               [--common '{"step_num": 10}']

One process, or several ranks one after another, see builtin_20_read.py for how and for
layouts.json. ``values``: the whole tensors, of which every rank gets its part. Saving is
synchronous.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from builtin_20_read import as_rank, cells, held, local_slices


def save_rank(
    args: argparse.Namespace, spec: Mapping[str, Any], whole: Mapping[str, Any], rank: int
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
    common = checkpoint.CommonInfo(
        **{"step_num": args.iteration, "global_step": args.iteration, **json.loads(args.common)}
    )

    def save_of_this_rank(*given: Any, choice_func: Any = None, **options: Any) -> None:
        ms.save_checkpoint(
            *given,
            choice_func=lambda name: name in here and (not choice_func or choice_func(name)),
            **options,
        )

    with (
        as_rank(rank, args.ranks, spec),
        mock.patch.object(checkpoint, "ms_save_checkpoint", save_of_this_rank),
        mock.patch.object(fully_parallel, "save_checkpoint", save_of_this_rank),
    ):
        names = set(network.parameters_dict())
        metas = (
            get_all_sharded_tensor(optimizer, None if args.optimizer else names.__contains__)
            if args.ranks > 1
            else None
        )
        checkpoint.save_checkpoint(
            iteration=args.iteration,
            network=network,
            optimizer=optimizer if args.optimizer else None,
            common_info=common,
            keep_max_num=args.keep,
            user_prefix=args.prefix,
            save_checkpoint_path=str(args.root),
            sharded_tensor_metas=metas,
            remove_redundancy=args.remove_redundancy,
        )


def write(arguments: list[str]) -> None:
    """One command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--values", type=Path, required=True)
    parser.add_argument("--layouts", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--optimizer", action="store_true")
    parser.add_argument("--remove-redundancy", action="store_true")
    parser.add_argument("--prefix")
    parser.add_argument("--keep", type=int, default=5)
    parser.add_argument(
        "--common",
        default='{"epoch_num": 1, "global_batch_size": 8}',
        help="more fields of common.json",
    )
    args = parser.parse_args(arguments)
    import mindspore as ms

    spec = json.loads(args.layouts.read_text(encoding="utf-8"))
    whole = ms.load_checkpoint(str(args.values), format="safetensors")
    args.root.mkdir(parents=True, exist_ok=True)
    for rank in range(args.ranks):
        save_rank(args, spec, whole, rank)


if __name__ == "__main__":
    write(sys.argv[1:])
