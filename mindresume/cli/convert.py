"""Implements ``mindresume convert``."""
from __future__ import annotations

from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, progress_bar
from mindresume.cli.conversions import DryRun, Dst, Engine, From, Memory, Src, Step, Workers, memory_of, show
from mindresume.cli.launch import TIMEOUT, Timeout, launched_group

CHOICES = ("safetensors", "ckpt", "iteration")


@app.command()
def convert(src: Src, dst: Dst,
            to: Annotated[str, typer.Option("--to", metavar="STRATEGY|PLAN", help="The new layout: a strategy file or folder "
                                            "(mindformers with only_save_strategy: True writes one), or a plan "
                                            "such as \"dp=2,tp=4,pp=2,opt=2\" (opt=all: as many pieces as replicas).")] = "same",
            strategy: From = None, step: Step = None,
            fmt: Annotated[str | None, typer.Option("--format", metavar="|".join(CHOICES), help="safetensors and ckpt: rank "
                                                    "folders (Checkpoint 1.0) with such files; iteration: an iteration folder "
                                                    "(Checkpoint 2.0, always safetensors). Default: as SRC.")] = None,
            engine: Engine = "auto", workers: Workers = 2, memory: Memory = None, dry_run: DryRun = False,
            timeout: Timeout = TIMEOUT, json: AsJson = False) -> None:
    """Cuts a checkpoint for another parallel strategy, converts it to another format, or both.

    [bold]mindresume convert output/checkpoint new --to dp=4,opt=all[/bold]

    [bold]mindresume convert output/checkpoint new --to other/strategy --step 200 --format safetensors[/bold]

    [bold]mindresume convert output/checkpoint new --format iteration[/bold]      Checkpoint 1.0 to 2.0, same layout

    A plan takes from SRC which dimension of each tensor tensor parallelism cuts, and distributes layers evenly over pp; if the
    model does otherwise, give strategy files. Tensors are copied bit for bit. The result has its own records and layouts.
    """
    from mindresume.api import conversion
    with launched_group(dst, "convert", timeout, dry_run) as group:
        with progress_bar("converting", json or dry_run or group.rank > 0) as progress:
            result = conversion.convert(
                src, dst, to=to, step=step, strategy=strategy, format=fmt, engine=engine, workers=workers,
                memory_limit_bytes=memory_of(memory), dry_run=dry_run, progress=progress, group=group)
        if group.rank == 0:
            show(result, json)
