"""``mindresume export-hf``"""
from __future__ import annotations

import os
from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, print_json, say
from mindresume.cli.conversions import DryRun, Dst, From, Memory, Src, Step, Workers, bytes_of, carry_out, numbers, opened
from mindresume.errors import ConfigError
from mindresume.formats.huggingface import CONTIGUOUS, INTERLEAVED, model_of
from mindresume.formatting import size_text
from mindresume.reshard.copies import check_copies
from mindresume.reshard.direct import BUFFERS, Traffic
from mindresume.reshard.engine import tile_for, writer
from mindresume.reshard.huggingface import DTYPES, KEEP, Export, read_config, to_huggingface, verify_woven
from mindresume.reshard.reading import WOVEN
from mindresume.store.storage import PosixStorage

_CONTIGUOUS_HELP = "The model was trained with {}."


@app.command("export-hf")
def export_hf(src: Src, dst: Dst,
              config: Annotated[str | None, typer.Option("--config", metavar="FILE|DIR", help="The config.json of the Hugging "
                                                         "Face model, or a folder with it: how many heads, layers and experts "
                                                         "there are, which a checkpoint does not say. It is copied into DST, "
                                                         "with the dtype of the weights there.")] = None,
              dtype: Annotated[str, typer.Option("--dtype", metavar="|".join(DTYPES), help="Of the weights in DST. float32 "
                                                 "becomes bfloat16 by rounding to the nearest.")] = KEEP,
              part: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Of the tensors in one file.")] = "5GiB",
              contiguous_attention: Annotated[bool, typer.Option("--contiguous-attention", help=_CONTIGUOUS_HELP.format(
                  "use_contiguous_weight_layout_attention: True"))] = False,
              contiguous_mlp: Annotated[bool, typer.Option("--contiguous-mlp", help=_CONTIGUOUS_HELP.format(
                  "use_interleaved_weight_layout_mlp: False"))] = False,
              strategy: From = None, step: Step = None, workers: Workers = 2, memory: Memory = None, dry_run: DryRun = False,
              json: AsJson = False) -> None:
    """Writes the weights of a checkpoint as a Hugging Face folder, which transformers loads: Qwen3 and Qwen3-MoE.

    [bold]mindresume export-hf output/checkpoint hf --config Qwen3-8B/config.json --dtype bfloat16[/bold]

    Names, shapes and order become those of Hugging Face: q_proj, k_proj and v_proj instead of linear_qkv, and so on. Counters and
    the state of the optimizer stay away. The tokenizer is not part of a checkpoint: copy its files yourself.
    """
    if config is None:
        raise ConfigError("--config is missing: the config.json of the Hugging Face model (or a folder with it), which says how "
                          "many heads, layers and experts it has; a checkpoint does not. The one the training began with will do")
    storage = PosixStorage()
    document, path = read_config(storage, config)
    model = model_of(document, path, *(CONTIGUOUS if given else INTERLEAVED for given in (contiguous_attention, contiguous_mlp)))
    done = {"bytes_read": 0, "bytes_written": 0, "bytes_verified": 0, "seconds": 0.0}
    with opened(src, step, strategy, dry_run) as source:
        job = to_huggingface(source, model, dtype, bytes_of(part, "--max-shard-size"), document)
        notes = list(source.notes)
        conversion = Export(storage, job, dst, notes.append, config=document)
        limit = None if memory is None else bytes_of(memory, "--memory-limit") * BUFFERS // (BUFFERS + WOVEN)
        tile = tile_for(limit, workers)
        finished, traffic, plan = conversion.finished(), Traffic(), numbers(job)
        if not dry_run and not finished:
            check_copies(source.weights, read=True)
            done = carry_out(conversion, "exporting", json, traffic,
                             lambda: conversion.write(writer("direct", conversion, workers, tile, traffic, notes.append)),
                             check=lambda: verify_woven(job, traffic))
    value = {"source": source.what, "target": os.path.abspath(dst), "model_type": model.kind, "files": len(job.files),
             "tensors": plan["tensors"], "dtypes": sorted({t.dtype for t in job.source.weights.tensors.values()}),
             "bytes_to_write": plan["bytes_to_write"], "memory_bytes": (BUFFERS + WOVEN) * workers * tile, "notes": notes,
             "refused": [refusal.to_json() for refusal in source.refused], "dry_run": dry_run,
             "finished": finished or not dry_run, **done}
    if json:
        print_json(value)
        return
    for refusal in value["refused"]:
        say(f"not taken: step {refusal['step']}: {refusal['reason']}")
    say(f"{value['source']}\n  -> {value['target']}, {model.kind}, {' and '.join(value['dtypes'])}")
    say(f"  {value['tensors']} tensors, {size_text(value['bytes_to_write'])} in {value['files']} files")
    if finished:
        say("  it is there already, nothing was done")
    elif dry_run:
        say("  this is a dry run, nothing was written")
    else:
        say(f"  {size_text(value['bytes_read'])} read, {size_text(value['bytes_written'])} written in "
            f"{value['seconds']:.1f} s; {size_text(value['bytes_verified'])} compared with recorded checksums")
    for note in notes:
        say(f"  note: {note}")
