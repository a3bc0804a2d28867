"""Implements ``mindresume merge``."""
from __future__ import annotations

from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, progress_bar
from mindresume.cli.conversions import DryRun, Dst, Engine, From, Memory, Src, Step, Workers, bytes_of, memory_of, show
from mindresume.cli.launch import TIMEOUT, Timeout, launched_group


@app.command()
def merge(src: Src, dst: Dst, strategy: From = None, step: Step = None,
          hf: Annotated[bool, typer.Option("--hf-index", help="Write model-00001-of-0000N.safetensors and "
                                           "model.safetensors.index.json, without counters; names and shapes stay those of "
                                           "MindSpore.")] = False,
          drop: Annotated[list[str] | None, typer.Option("--drop", metavar="PATTERN", help="Leave out these tensors, such as "
                                                         "\"adam_*\"; may be given several times.")] = None,
          part: Annotated[str, typer.Option("--part-size", metavar="SIZE", help="Most bytes in one file.")] = "3GiB",
          engine: Engine = "auto", workers: Workers = 2, memory: Memory = None, dry_run: DryRun = False,
          timeout: Timeout = TIMEOUT, json: AsJson = False) -> None:
    """Merges the slices of all ranks into consolidated weights, as MindSpore's unified_safetensors does.

    [bold]mindresume merge output/checkpoint merged[/bold]                       to resume from it, or to convert it again

    [bold]mindresume merge output/checkpoint weights --drop "adam_*"[/bold]      the weights alone

    Files: part0.safetensors ..., hyper_param.safetensors with the counters, param_name_map.json. A training resumes from them
    with load_checkpoint: DST, resume_training: True, auto_trans_ckpt: True.
    """
    from mindresume.api import conversion
    with launched_group(dst, "merge", timeout, dry_run) as group:
        with progress_bar("converting", json or dry_run or group.rank > 0) as progress:
            result = conversion.merge(src, dst, step=step, strategy=strategy, hf_index=hf, drop=drop or (),
                                      part_size_bytes=bytes_of(part, "--part-size"), engine=engine, workers=workers,
                                      memory_limit_bytes=memory_of(memory), dry_run=dry_run, progress=progress, group=group)
        if group.rank == 0:
            show(result, json)
