"""Converts checkpoints to another layout or format: cut for another parallel strategy, merged, or
with the names of Hugging Face.

    mindresume.convert("output/checkpoint", "new", to="dp=4,tp=2")
    mindresume.merge("output/checkpoint", "merged", drop=["adam_*"])
    mindresume.export_hf("output/checkpoint", "hf", config="Qwen3-8B/config.json", dtype="bfloat16")

The source is only read, and held meanwhile. The target appears completely or not at all. Any
failure, including Ctrl-C, leaves nothing behind, but of part K of N what is finished; after a kill,
the same call continues with what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from mindresume import runtime
from mindresume.api.checkpoint import CheckpointLike, check_part, opened, refused_of
from mindresume.api.results import Problem, Result
from mindresume.errors import ConfigError
from mindresume.events import SILENT, Progress, texts_into
from mindresume.formats.consolidated import HUGGINGFACE, MINDSPORE
from mindresume.formats.huggingface import model_from_config
from mindresume.formats.parallel_plan import ParallelPlan, is_plan, strategy_from_plan
from mindresume.formats.strategy import Strategy, read_strategy
from mindresume.model.manifest import FORMATS
from mindresume.reshard.checkpoint_view import computed_slices
from mindresume.reshard.conversion_plan import (
    PART_BYTES,
    ConversionPlan,
    ranks_in_group,
    to_consolidated,
    to_iteration,
    to_ranks,
)
from mindresume.reshard.converter import Conversion, Share
from mindresume.reshard.direct_engine import (
    AUTO,
    BUFFERS,
    BY_MINDSPORE,
    DIRECT,
    ENGINES,
    Engine,
    engine_for,
    tile_for,
)
from mindresume.reshard.huggingface import KEEP, orders_in, read_config, to_huggingface
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.reshard.range_reader import COMPOSED_MEMORY
from mindresume.reshard.strategy_store import own_strategy
from mindresume.reshard.translated_view import TranslatedView
from mindresume.storage.posix import PosixStorage

if TYPE_CHECKING:
    from typing_extensions import Unpack

SAME, ITERATION = "same", "iteration"
TARGET_FORMATS = (*FORMATS, ITERATION)
MAX_SHARD_BYTES = 5 << 30  # the default of transformers' save_pretrained

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class PlannedConversion(Result):
    """Describes what a conversion writes, and what that costs.

    Attributes:
        source: Path, step and number of ranks of the source.
        target: Path of the new folder.
        engine: "direct" or "mindspore".
        files: Number of weight files in the target.
        tensors: Number of tensors in the target.
        dtypes: Their dtypes, sorted.
        model_type: Such as "qwen3", for an export to Hugging Face; None otherwise.
        bytes_needed: Bytes of the source's tensors that are needed, each counted once.
        bytes_to_read: The same, counted once for each group of files that needs them.
        bytes_to_write: Bytes of the target's tensors.
        over_read: ``bytes_to_read / bytes_needed``.
        memory_bytes: Most memory for buffers.
    """

    source: str
    target: str
    engine: str
    files: int
    tensors: int
    dtypes: tuple[str, ...]
    model_type: str | None
    bytes_needed: int
    bytes_to_read: int
    bytes_to_write: int
    over_read: float
    memory_bytes: int


@dataclass(frozen=True)
class ConversionResult(PlannedConversion):
    """Describes what was converted, or would be: the plan with its attributes, and what was done.

    Attributes:
        dry_run: Whether nothing was written because that was requested.
        finished: Whether the complete target exists; it may have existed before.
        bytes_read: Bytes of tensors that this call read; 0 if the target existed.
        bytes_written: Bytes of tensors that this call wrote.
        bytes_verified: How many of ``bytes_read`` were compared with recorded checksums.
        seconds: Duration; None if nothing was done.
        refused: Newer checkpoints of the source that could not be used.
        notes: What was assumed, ignored or done, as sentences.
    """

    dry_run: bool
    finished: bool
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_verified: int = 0
    seconds: float | None = None
    refused: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


class ConversionOptions(TypedDict, total=False):
    """Gives the options that ``convert``, ``merge`` and ``export_hf`` share.

    Attributes:
        step: The step of the source; None: the newest that can be opened.
        strategy: Strategy file or folder with which the source was saved, if mindformers wrote it
            on several ranks.
        workers: Threads of the direct engine, processes of the other one; 2 without it.
        memory_limit_bytes: Most memory for buffers of the direct engine; None: 12 MiB per worker,
            for ``export_hf`` about 56 MiB.
        dry_run: Whether to write nothing, and only return what would be done.
        progress: Receives the numbers of bytes to write, and of bytes written.
        part: (K, N): this call writes the K-th of N shares of the files, K from 1; other calls, in
            other processes and on other nodes that see the same folders, write the other ones.
            Whoever completes them commits.
        timeout_seconds: How long to wait for the other parts without a sign of them; 0: this call
            does not wait for them.
    """

    step: int | None
    strategy: Path | None
    workers: int
    memory_limit_bytes: int | None
    dry_run: bool
    progress: Progress
    part: tuple[int, int]
    timeout_seconds: float


def convert(
    src: CheckpointLike,
    dst: Path,
    *,
    to: Path = SAME,
    format: str | None = None,
    engine: str = "auto",
    **options: Unpack[ConversionOptions],
) -> ConversionResult:
    """Cuts a checkpoint for another parallel strategy, converts it to another format, or both.
    Tensors are copied bit for bit.

    Args:
        src: Path of a checkpoint, or a Checkpoint of a catalog.
        dst: The folder to create; it must not exist, or be empty.
        to: The new layout: a plan such as "dp=2,tp=4,pp=2,opt=2" (``opt=all``: as many shards as
            replicas), the path of a strategy file or folder (mindformers with
            ``only_save_strategy: True`` writes one), or "same". A plan takes from ``src`` which
            dimension of each tensor tensor parallelism cuts, and distributes layers evenly over pp.
        format: "safetensors" or "ckpt": rank folders (Checkpoint 1.0) with such files; "iteration":
            an iteration folder (Checkpoint 2.0). None: as ``src``.
        engine: "direct" reads only the bytes that are needed and compares them with recorded
            checksums; "mindspore" calls ``mindspore.transform_checkpoints``; "auto": mindspore for
            ckpt sources, where it can.
        **options: ``step``, ``strategy``, ``workers``, ``memory_limit_bytes``, ``dry_run``,
            ``progress``, ``part`` and ``timeout_seconds``, as ``ConversionOptions`` describes them.

    Returns:
        A ConversionResult. If the target is already this conversion, nothing is done.

    Raises:
        ConfigError: An argument is wrong, ``to`` does not fit, or ``dst`` holds something else.
        StrategyError: The layout of ``src`` is unknown, or ``to`` does not fit its tensors.
        CorruptFileError: A byte of ``src`` differs from what was written.
        OutOfSpaceError: The disk has too little space for ``dst``.
        SaveError: ``dst`` could not be written, or the same conversion is running.
        EngineError: MindSpore's engine was requested, and failed.
        ProcessLostError: Another part gave no sign for ``timeout_seconds``, or failed.
        MindResumeError: As for ``Checkpoint.tensors``.
    """
    request = _Request(os.fspath(dst), engine, **options)
    with request.opened(src) as source:
        format = format or (ITERATION if source.is_iteration else source.weights.format)
        if format not in TARGET_FORMATS:
            raise ConfigError(f"format is {format!r}; choose one of {', '.join(TARGET_FORMATS)}")
        strategy, processes = _new_strategy(os.fspath(to), source), request.part[1]
        each = ranks_in_group(strategy, processes) if processes > 1 else None
        plan = (
            to_iteration(source, strategy, each)
            if format == ITERATION
            else to_ranks(source, strategy, format, each)
        )
        return _carry_out(plan, request)


def merge(
    src: CheckpointLike,
    dst: Path,
    *,
    hf_index: bool = False,
    drop: Sequence[str] = (),
    part_size_bytes: int = PART_BYTES,
    engine: str = "auto",
    **options: Unpack[ConversionOptions],
) -> ConversionResult:
    """Merges the slices of all ranks into consolidated weights, as MindSpore's
    ``unified_safetensors`` does.

    Args:
        src: As for ``convert``.
        dst: As for ``convert``. Files: part0.safetensors ..., hyper_param.safetensors with the
            counters, param_name_map.json.
        hf_index: Whether to write model-00001-of-0000N.safetensors and
            model.safetensors.index.json, without counters. Names and shapes stay those of
            MindSpore.
        drop: Patterns (as of ``fnmatch``) of tensors to leave out, such as "adam_*".
        part_size_bytes: Most bytes of tensors in one file.
        engine: As for ``convert``.
        **options: As for ``convert``.

    Returns:
        A ConversionResult.

    Raises:
        MindResumeError: As for ``convert``.
    """
    request = _Request(os.fspath(dst), engine, **options)
    with request.opened(src) as source:
        plan = to_consolidated(
            source, HUGGINGFACE if hf_index else MINDSPORE, part_size_bytes, tuple(drop)
        )
        return _carry_out(plan, request)


def export_hf(
    src: CheckpointLike,
    dst: Path,
    *,
    config: Path,
    dtype: str = KEEP,
    max_shard_size_bytes: int = MAX_SHARD_BYTES,
    contiguous_attention: bool | None = None,
    contiguous_mlp: bool | None = None,
    **options: Unpack[ConversionOptions],
) -> ConversionResult:
    """Writes the weights of a checkpoint as a Hugging Face folder: Qwen3, Qwen3-MoE, DeepSeek-V3,
    TeleChat3.

    Names, shapes and order become those of Hugging Face: q_proj, k_proj and v_proj instead of
    linear_qkv, and so on. Counters and the optimizer state are left out. A checkpoint contains no
    tokenizer.

    Args:
        src: As for ``convert``.
        dst: As for ``convert``.
        config: The config.json of the Hugging Face model, or a folder with it: numbers of heads,
            layers and experts. It is copied into ``dst``, with the dtype of the new weights.
        dtype: "bfloat16", "float32" or "keep". float32 is rounded to bfloat16 to the nearest, ties
            to even.
        max_shard_size_bytes: Most bytes of tensors in one file.
        contiguous_attention: Whether the model was trained with
            ``use_contiguous_weight_layout_attention: True``. None: as the checkpoint records it;
            False if it does not.
        contiguous_mlp: Whether the model was trained with ``use_interleaved_weight_layout_mlp:
            False``. None: as above.
        **options: As for ``convert``.

    Returns:
        A ConversionResult with ``model_type``.

    Raises:
        LoadError: A tensor that the model needs is missing or has another shape, or no rule applies
            to a tensor.
        ConfigError: ``config`` is missing, or its model has no rules; or the checkpoint records
            another order.
        MindResumeError: As for ``convert``.
    """
    request = _Request(os.fspath(dst), DIRECT, **options)
    document, path = read_config(PosixStorage(), os.fspath(config))
    model_from_config(document, path)  # refuses it before the checkpoint is opened
    with request.opened(src) as source:
        model = model_from_config(
            document, path, *orders_in(source, contiguous_attention, contiguous_mlp)
        )
        return _carry_out(
            to_huggingface(source, model, dtype, max_shard_size_bytes, document), request
        )


def _new_strategy(to: str, source: OpenCheckpoint) -> Strategy | None:
    """Returns the strategy that ``to`` names; None for one rank."""
    if to == SAME:
        return own_strategy(source.weights)
    if not is_plan(to):
        return read_strategy(to)
    tensors = {
        name: (tensor.shape, tensor.layout, tensor.stages)
        for name, tensor in source.weights.tensors.items()
        if not tensor.is_counter
    }
    plan = ParallelPlan.parse(to)
    if (
        plan.tp > 1
        and not source.weights.split
        and any(computed_slices(layout) > 1 for _, layout, _ in tensors.values())
    ):
        raise ConfigError(
            f"{source.what}: its layouts do not tell shards over data parallelism from tensor "
            f"parallelism, so it is not known what {to} has to cut. Give the strategy of the "
            f"target: a strategy file or folder, or {SAME}"
        )
    sizes = {
        tensor.layout.stage_size for tensor in source.weights.tensors.values() if tensor.layout
    }
    return strategy_from_plan(plan, tensors, source.weights.world_size // max(sizes, default=1))


@dataclass(frozen=True)
class _Request:
    """How a conversion is carried out, whatever it writes."""

    target: str
    engine: str
    step: int | None = None
    strategy: Path | None = None
    workers: int = 2
    memory_limit_bytes: int | None = None
    dry_run: bool = False
    progress: Progress = SILENT
    part: tuple[int, int] = (1, 1)
    timeout_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_part(self.part)

    def opened(self, src: CheckpointLike) -> AbstractContextManager[OpenCheckpoint]:
        """Opens the source, and holds it unless nothing is written."""
        return opened(src, self.step, self.strategy, hold=not self.dry_run)


def _carry_out(plan: ConversionPlan, request: _Request) -> ConversionResult:
    """Writes the files of a plan and commits them, unless it is a dry run or the target exists
    already.

    The source is open, and the regions of all target files are planned. Then: the target is this
        conversion already, or free ─▶
    read and compare what the engine cannot compare ─▶ read, verify, write group by group ─▶ records
        and manifest, or index ─▶
    rename (``Conversion``).
    """
    source, target = plan.source, os.path.abspath(request.target)
    share = Share(*request.part, request.timeout_seconds)
    if request.engine not in ENGINES:
        raise ConfigError(f"engine is {request.engine!r}; choose one of {', '.join(ENGINES)}")
    if share.count > 1 and request.engine == BY_MINDSPORE:
        raise ConfigError(
            f"engine is mindspore, which does not share its work among {share.count} processes; "
            "leave it away, or start one process"
        )
    # tensors that are composed of others need more memory than tiles
    buffers = BUFFERS + (COMPOSED_MEMORY if isinstance(source.weights, TranslatedView) else 0)
    limit = request.memory_limit_bytes
    tile = tile_for(None if limit is None else limit * BUFFERS // buffers, request.workers)
    notes = [*source.notes]
    engine = Engine(
        engine_for(request.engine, source.weights.format) if share.count == 1 else DIRECT,
        request.workers,
        tile,
        emit=texts_into(notes),
        falls_back=request.engine == AUTO,
    )
    conversion = Conversion(PosixStorage(), plan, request.target, texts_into(notes), share=share)
    tensors = source.weights.tensors
    groups = [
        {name for number in group for name in plan.files[number].holds} for group in plan.groups
    ]
    names = set[str]().union(*groups)
    needed = sum(tensors[name].nbytes for name in names)
    to_read = sum(tensors[name].nbytes for group in groups for name in group)
    result = ConversionResult(
        source.what,
        target,
        engine.name,
        len(plan.files),
        len(names),
        tuple(sorted({tensors[name].dtype for name in names})),
        plan.model_type,
        needed,
        to_read,
        plan.tensor_bytes(range(len(plan.groups))),
        round(to_read / needed, 4) if needed else 1.0,
        buffers * request.workers * tile,
        request.dry_run,
        conversion.finished(),
        refused=refused_of(source),
    )
    if request.dry_run or result.finished:
        return replace(result, notes=tuple(notes))
    started = runtime.monotonic()
    request.progress.expect(plan.tensor_bytes(share.groups(plan)))
    engine.traffic.progress = request.progress.advance
    finished = conversion.run(engine, checks_source=True)
    if not finished:
        notes.append(f"{share} is written; {target} appears when the other parts are, too")
    return replace(
        result,
        engine=engine.name,
        finished=finished,
        bytes_read=engine.traffic.read,
        bytes_written=engine.traffic.written,
        bytes_verified=engine.traffic.verified,
        seconds=round(runtime.monotonic() - started, 3),
        notes=tuple(notes),
    )
