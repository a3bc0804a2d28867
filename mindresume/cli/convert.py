"""``mindresume convert``"""
from __future__ import annotations

from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson
from mindresume.cli.conversions import DryRun, Dst, Engine, From, Memory, Src, Step, Workers, opened, run
from mindresume.errors import ConfigError
from mindresume.files import FORMATS
from mindresume.parallel_plan import ParallelPlan, is_plan, strategy_of
from mindresume.reshard.conversion import to_iteration, to_ranks
from mindresume.reshard.source import Source
from mindresume.reshard.strategies import own_strategy
from mindresume.reshard.target import is_counter
from mindresume.strategy import Strategy, read_strategy

SAME, ITERATION = "same", "iteration"
CHOICES = (*FORMATS, ITERATION)


@app.command()
def convert(src: Src, dst: Dst,
            to: Annotated[str, typer.Option("--to", metavar="STRATEGY|PLAN", help="How the new checkpoint is cut: a strategy "
                                            "file or folder (mindformers with only_save_strategy: True writes it), or a plan "
                                            "such as \"dp=2,tp=4,pp=2,opt=2\" (opt=all: as many pieces as replicas).")] = SAME,
            strategy: From = None, step: Step = None,
            fmt: Annotated[str | None, typer.Option("--format", metavar="|".join(CHOICES), help="safetensors and ckpt: rank "
                                                    "folders (Checkpoint 1.0) with such files; iteration: an iteration folder "
                                                    "(Checkpoint 2.0, always safetensors). Default: as SRC.")] = None,
            engine: Engine = "auto", workers: Workers = 2, memory: Memory = None, dry_run: DryRun = False, json: AsJson = False
            ) -> None:
    """Cuts a checkpoint for another parallel strategy, or turns it into the other format, or both.

    [bold]mindresume convert output/checkpoint new --to dp=4,opt=all[/bold]

    [bold]mindresume convert output/checkpoint new --to other/strategy --step 200 --format safetensors[/bold]

    [bold]mindresume convert output/checkpoint new --format iteration[/bold]      Checkpoint 1.0 to 2.0, cut as it is

    A plan takes from SRC which dimension of each tensor tensor parallelism cuts, and spreads layers evenly over pp; where that is
    not what the model does, give strategy files. Tensors are copied bit for bit. The result has records and layouts of its own.
    """
    with opened(src, step, strategy, dry_run) as source:
        fmt = fmt or (ITERATION if source.is_iteration else source.weights.format)
        if fmt not in CHOICES:
            raise ConfigError(f"--format is {fmt!r}; choose one of {', '.join(CHOICES)}")
        target = target_of(to, source)
        job = to_iteration(source, target) if fmt == ITERATION else to_ranks(source, target, fmt)
        run(job, dst, source.weights.format, engine, workers, memory, dry_run, json)


def target_of(to: str, source: Source) -> Strategy | None:
    """The strategy that ``--to`` names; None for one rank."""
    if to == SAME:
        return own_strategy(source.weights)
    if not is_plan(to):
        return read_strategy(to)
    tensors = {name: (tensor.shape, tensor.layout, tensor.stages) for name, tensor in source.weights.tensors.items()
               if not is_counter(tensor)}
    sizes = {tensor.layout.stage_size for tensor in source.weights.tensors.values() if tensor.layout}
    return strategy_of(ParallelPlan.parse(to), tensors, source.weights.world_size // max(sizes, default=1))
