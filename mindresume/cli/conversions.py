"""Implements ``mindresume convert``, ``merge`` and ``export-hf``, which share most of their
options, and the printed result."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindresume.cli import app
from mindresume.cli.common import (
    TIMEOUT,
    AsJson,
    Part,
    Timeout,
    print_json,
    problem_text,
    progress_bar,
    say,
    share_of_process,
)
from mindresume.errors import ConfigError
from mindresume.formatting import counted, size_text

if TYPE_CHECKING:
    from mindresume.api.conversion import ConversionResult

MAX_WORKERS = 256  # no disk is faster with more threads or processes

Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="auto, direct or mindspore. direct reads only the bytes that are needed and compares "
        "them with recorded checksums; mindspore calls mindspore.transform_checkpoints; auto takes "
        "mindspore for ckpt sources, where it can.",
    ),
]


def _shared(
    *,
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint: the folder that contains the rank folders (or the run folder), a "
            "rank folder, a folder of consolidated weights, or one file. It is only read.",
        ),
    ],
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="The folder to create. It appears when it is complete; a folder that "
            "holds something else is refused.",
        ),
    ],
    strategy: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STRATEGY",
            help="Strategy file or folder with which SRC was saved. Needed only if mindformers "
            "wrote it on several ranks and there is no folder 'strategy' beside it; checkpoints of "
            "mindresume contain their layouts.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", metavar="N", help="The step to use; default: the newest complete one."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=MAX_WORKERS,
            metavar="N",
            help="Threads of the direct engine, processes of the mindspore engine.",
        ),
    ] = 2,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory-limit",
            metavar="SIZE",
            help="Most memory for buffers of the direct engine, such as 64MiB or 4GiB. Default: "
            "12 MiB per worker.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be read and written.")
    ] = False,
    part: Part = None,
    timeout: Timeout = TIMEOUT,
    json: AsJson = False,
) -> None:
    """Has the options of all three commands. Source and target come first, the others last."""


class conversion_command:  # noqa: N801  a decorator
    """Registers a function as a command with the options of ``_shared`` beside its own. The
    function is called with all of them, as arguments of the API. ``verb``: what the progress bar
    says."""

    def __init__(self, name: str, verb: str):
        self._name, self._verb = name, verb

    def __call__(self, convert: Any) -> Any:
        def run(*, memory: Any, part: Any, timeout: Any, json: Any, **options: Any) -> None:
            share = share_of_process(part, timeout, options["dry_run"])
            is_quiet = json or options["dry_run"] or not share.prints
            with progress_bar(self._verb, is_quiet) as progress:
                result = convert(
                    **options,
                    memory_limit_bytes=None
                    if memory is None
                    else bytes_of(memory, "--memory-limit"),
                    progress=progress,
                    part=share.part,
                    timeout_seconds=share.timeout,
                )
            if share.prints:
                show(result, json)

        source, target, *common = inspect.signature(_shared, eval_str=True).parameters.values()
        *own, _ = inspect.signature(convert, eval_str=True).parameters.values()
        parameters = [source, target, *own, *common]
        run.__doc__ = convert.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(self._name)(run)
        return convert


@conversion_command("convert", "converting")
def convert(
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="LAYOUT",
            help='The new layout: a plan such as "dp=2,tp=4,pp=2,opt=2" (opt=all: as many shards '
            "as replicas), or a strategy file or folder (mindformers with only_save_strategy: True "
            "writes one).",
        ),
    ] = "same",
    fmt: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="safetensors or ckpt: rank folders (Checkpoint 1.0) with such files; iteration: "
            "an iteration folder (Checkpoint 2.0, always safetensors). Default: as SRC.",
        ),
    ] = None,
    engine: Engine = "auto",
    **options: Any,
) -> Any:
    """Cuts a checkpoint for another parallel strategy, converts it to another format, or both.

    [bold]mindresume convert output/checkpoint new --to dp=4,opt=all[/bold]

    [bold]mindresume convert output/checkpoint new --to other/strategy --step 200
    --format safetensors[/bold]

    [bold]mindresume convert output/checkpoint new --format iteration[/bold]      1.0 to 2.0

    A plan takes from SRC which dimension of each tensor tensor parallelism cuts, and distributes
    layers evenly over pp; if the model does otherwise, give strategy files. Tensors are copied bit
    for bit. The result has its own records and layouts.
    """
    from mindresume.api import conversion

    return conversion.convert(**options, to=to, format=fmt, engine=engine)


@conversion_command("merge", "converting")
def merge(
    *,
    hf: Annotated[
        bool,
        typer.Option(
            "--hf-index",
            help="Write model-00001-of-0000N.safetensors and model.safetensors.index.json, without "
            "counters; names and shapes stay those of MindSpore.",
        ),
    ] = False,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            "--drop",
            metavar="PATTERN",
            help='Leave out these tensors, such as "adam_*"; may be given several times.',
        ),
    ] = None,
    part_size: Annotated[
        str, typer.Option("--part-size", metavar="SIZE", help="Most bytes in one file.")
    ] = "3GiB",
    engine: Engine = "auto",
    **options: Any,
) -> Any:
    """Merges the slices of all ranks into consolidated weights, as MindSpore's unified_safetensors
    does.

    [bold]mindresume merge output/checkpoint merged[/bold]                       to resume from

    [bold]mindresume merge output/checkpoint weights --drop "adam_*"[/bold]      the weights alone

    Files: part0.safetensors ..., hyper_param.safetensors with the counters, param_name_map.json. A
    training resumes from them with load_checkpoint: DST, resume_training: True,
    auto_trans_ckpt: True.
    """
    from mindresume.api import conversion

    return conversion.merge(
        **options,
        hf_index=hf,
        drop=drop or (),
        part_size_bytes=bytes_of(part_size, "--part-size"),
        engine=engine,
    )


_CONTIGUOUS_HELP = (
    "The model was trained with {}. Only needed if the checkpoint does not record "
    "it: mindformers' own."
)


@conversion_command("export-hf", "exporting")
def export_hf(
    *,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE|DIR",
            help="The config.json of the Hugging Face model, or a folder with it: numbers of "
            "heads, layers and experts, which a checkpoint does not contain. It is copied into "
            "DST, with the dtype of the new weights.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="Dtype of the weights in DST: bfloat16, float32 or keep. float32 is rounded to "
            "the nearest bfloat16.",
        ),
    ] = "keep",
    max_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Most bytes in one file.")
    ] = "5GiB",
    contiguous_attention: Annotated[
        bool,
        typer.Option(
            "--contiguous-attention",
            help=_CONTIGUOUS_HELP.format("use_contiguous_weight_layout_attention: True"),
        ),
    ] = False,
    contiguous_mlp: Annotated[
        bool,
        typer.Option(
            "--contiguous-mlp",
            help=_CONTIGUOUS_HELP.format("use_interleaved_weight_layout_mlp: False"),
        ),
    ] = False,
    **options: Any,
) -> Any:
    """Writes the weights of a checkpoint as a Hugging Face folder for transformers: Qwen3,
    Qwen3-MoE, DeepSeek-V3, TeleChat3.

    [bold]mindresume export-hf output/checkpoint hf --config Qwen3-8B/config.json
    --dtype bfloat16[/bold]

    Names, shapes and order become those of Hugging Face: q_proj, k_proj and v_proj instead of
    linear_qkv, and so on. Counters and the optimizer state are left out. A checkpoint contains no
    tokenizer: copy its files yourself.
    """
    if config is None:
        raise ConfigError(
            "--config is missing: give the config.json of the Hugging Face model (or a folder with "
            "it), such as that of the initial weights. It has the numbers of heads, layers and "
            "experts; a checkpoint has not"
        )
    from mindresume.api import conversion

    return conversion.export_hf(
        **options,
        config=config,
        dtype=dtype,
        max_shard_size_bytes=bytes_of(max_size, "--max-shard-size"),
        contiguous_attention=contiguous_attention or None,
        contiguous_mlp=contiguous_mlp or None,
    )


def bytes_of(text: str, option: str) -> int:
    """Returns a size in bytes: ``"4GiB"`` is 4294967296. Raises ConfigError if it is invalid."""
    found = re.fullmatch(
        r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgt])(i?))?b?", text.strip().lower()
    )
    if found:
        unit = (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")
        if float(found[1]) * unit >= 1:
            return int(float(found[1]) * unit)
    raise ConfigError(f"{option} is {text[:80]!r}; expected a size such as 512MiB or 4GiB")


def show(result: ConversionResult, json: bool) -> None:
    """Prints what a conversion did, or would do."""
    if json:
        print_json(result.to_json())
        return
    for refused in result.refused:
        say(f"not usable: {problem_text(refused)}")
    say(
        f"{result.source}\n  -> {result.target}"
        + (f", {result.model_type}, {' and '.join(result.dtypes)}" if result.model_type else "")
    )
    say(
        f"  {counted(result.tensors, 'tensor')} in {counted(result.files, 'file')}, engine "
        f"{result.engine}"
    )
    if result.seconds is not None:
        rate = result.bytes_written / result.seconds if result.seconds else 0
        say(
            f"  {size_text(result.bytes_read)} read, {size_text(result.bytes_written)} written in "
            f"{result.seconds:.1f} s ({size_text(rate)}/s); {size_text(result.bytes_verified)} "
            "compared with recorded checksums"
        )
    else:
        say(
            f"  {size_text(result.bytes_to_read)} to read (over-read {result.over_read:.2f}), "
            f"{size_text(result.bytes_to_write)} to write, {size_text(result.memory_bytes)} of "
            "memory for buffers"
        )
        say(
            "  it exists already, nothing was done"
            if result.finished
            else "  dry run, nothing was written"
        )
    for note in result.notes:
        say(f"  note: {note}")
