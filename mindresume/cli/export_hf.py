"""Implements ``mindresume export-hf``."""
from __future__ import annotations

from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, progress_bar
from mindresume.cli.conversions import DryRun, Dst, From, Memory, Src, Step, Workers, bytes_of, memory_of, show
from mindresume.cli.launch import TIMEOUT, Timeout, launched_group
from mindresume.errors import ConfigError

DTYPES = ("bfloat16", "float32", "keep")
_CONTIGUOUS_HELP = "The model was trained with {}. Only needed if the checkpoint does not record it: mindformers' own."


@app.command("export-hf")
def export_hf(src: Src, dst: Dst,
              config: Annotated[str | None, typer.Option("--config", metavar="FILE|DIR", help="The config.json of the Hugging "
                                                         "Face model, or a folder with it: numbers of heads, layers and "
                                                         "experts, which a checkpoint does not contain. It is copied into DST, "
                                                         "with the dtype of the new weights.")] = None,
              dtype: Annotated[str, typer.Option("--dtype", metavar="|".join(DTYPES), help="Dtype of the weights in DST. "
                                                 "float32 is rounded to the nearest bfloat16.")] = "keep",
              part: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Most bytes in one file.")] = "5GiB",
              contiguous_attention: Annotated[bool, typer.Option("--contiguous-attention", help=_CONTIGUOUS_HELP.format(
                  "use_contiguous_weight_layout_attention: True"))] = False,
              contiguous_mlp: Annotated[bool, typer.Option("--contiguous-mlp", help=_CONTIGUOUS_HELP.format(
                  "use_interleaved_weight_layout_mlp: False"))] = False,
              strategy: From = None, step: Step = None, workers: Workers = 2, memory: Memory = None, dry_run: DryRun = False,
              timeout: Timeout = TIMEOUT, json: AsJson = False) -> None:
    """Writes the weights of a checkpoint as a Hugging Face folder for transformers: Qwen3, Qwen3-MoE, DeepSeek-V3, TeleChat3.

    [bold]mindresume export-hf output/checkpoint hf --config Qwen3-8B/config.json --dtype bfloat16[/bold]

    Names, shapes and order become those of Hugging Face: q_proj, k_proj and v_proj instead of linear_qkv, and so on. Counters and
    the optimizer state are left out. A checkpoint contains no tokenizer: copy its files yourself.
    """
    if config is None:
        raise ConfigError("--config is missing: give the config.json of the Hugging Face model (or a folder with it), such as "
                          "that of the initial weights. It has the numbers of heads, layers and experts; a checkpoint has not")
    from mindresume.api import conversion
    with launched_group(dst, "export-hf", timeout, dry_run) as group:
        with progress_bar("exporting", json or dry_run or group.rank > 0) as progress:
            result = conversion.export_hf(
                src, dst, config=config, dtype=dtype, max_shard_size_bytes=bytes_of(part, "--max-shard-size"),
                contiguous_attention=contiguous_attention or None, contiguous_mlp=contiguous_mlp or None, step=step,
                strategy=strategy, workers=workers, memory_limit_bytes=memory_of(memory), dry_run=dry_run, progress=progress,
                group=group)
        if group.rank == 0:
            show(result, json)
