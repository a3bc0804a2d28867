"""``mindresume merge``"""
from __future__ import annotations

from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson
from mindresume.cli.conversions import DryRun, Dst, Engine, From, Memory, Src, Step, Workers, bytes_of, opened, run
from mindresume.formats.complete import HUGGINGFACE, MINDSPORE
from mindresume.reshard.conversion import to_complete


@app.command()
def merge(src: Src, dst: Dst, strategy: From = None, step: Step = None,
          hf: Annotated[bool, typer.Option("--hf-index", help="model-00001-of-0000N.safetensors and "
                                           "model.safetensors.index.json, without counters; names and shapes stay those of "
                                           "MindSpore.")] = False,
          drop: Annotated[list[str] | None, typer.Option("--drop", metavar="PATTERN", help="Tensors that stay away, such as "
                                                         "\"adam_*\"; may be given several times.")] = None,
          part: Annotated[str, typer.Option("--part-size", metavar="SIZE", help="Of the tensors in one file.")] = "3GiB",
          engine: Engine = "auto", workers: Workers = 2, memory: Memory = None, dry_run: DryRun = False, json: AsJson = False
          ) -> None:
    """Puts the slices of all ranks together: complete weights, as MindSpore's unified_safetensors makes them.

    [bold]mindresume merge output/checkpoint merged[/bold]                       to resume from it, or to convert it again

    [bold]mindresume merge output/checkpoint weights --drop "adam_*"[/bold]      the weights alone

    Files: part0.safetensors ..., hyper_param.safetensors with the counters, param_name_map.json. A training resumes from them
    with load_checkpoint: DST, resume_training: True, auto_trans_ckpt: True.
    """
    with opened(src, step, strategy, dry_run) as source:
        job = to_complete(source, HUGGINGFACE if hf else MINDSPORE, bytes_of(part, "--part-size"), tuple(drop or ()))
        run(job, dst, source.weights.format, engine, workers, memory, dry_run, json)
