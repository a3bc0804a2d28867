"""Plans a conversion: which files the target has, which region of which tensor each holds, in which
groups they are written, and what identifies the result.

    plan = to_ranks(source, strategy, "safetensors")        # rank folders, for another job
    plan = to_iteration(source, strategy)                   # an iteration folder of Checkpoint 2.0
    plan = to_consolidated(source, MINDSPORE)               # consolidated weights in parts
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from mindresume.errors import ConfigError, StrategyError
from mindresume.formats.consolidated import (
    HYPER,
    MINDSPORE,
    index_document,
    is_hyper,
    part_name,
    split,
)
from mindresume.formats.iterations import MODEL, OPTIMIZER, WeightFile, parse_weight_file
from mindresume.formats.rank_folders import FileName, folder_name, label
from mindresume.formats.strategy import Strategy
from mindresume.formats.weight_files import SCALARS
from mindresume.formatting import listed
from mindresume.model.layout import Region, elements, held, shape_of, whole
from mindresume.model.manifest import FOLDER as RECORDS
from mindresume.model.manifest import attempt_name, run_name
from mindresume.model.training_state import TrainingState
from mindresume.reshard.checkpoint_view import (
    CheckpointView,
    Tensor,
    check_order,
    missing_parameters,
    model_names,
)
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.tensor_files import FilePlan, TensorSpec, encode, plan_file, read_header
from mindresume.tensor_files.header import DTYPES

# bytes of a part of consolidated weights, as of MindSpore's unified_safetensors
PART_BYTES = 3 << 30
METADATA = {"format": "ms"}
IN_COMMON = frozenset(SCALARS) - {"global_step"}  # global_step is a parameter of the optimizer


@dataclass(frozen=True)
class TargetFile:
    """Describes a file to write. ``holds``: {tensor: region}; ``metadata``: of the file."""

    path: str
    format: str
    holds: Mapping[str, Region]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def plan_file(self, tensors: Mapping[str, Tensor]) -> FilePlan:
        """Returns the layout of the file in bytes. ValueError for a dtype or name that the format
        cannot hold."""
        specs = {}
        for name in in_order(self.holds, tensors):
            shape, dtype = shape_of(self.holds[name]), tensors[name].dtype
            specs[name] = TensorSpec(
                dtype, shape, elements(self.holds[name]) * DTYPES[dtype].itemsize
            )
        return plan_file(self.format, specs, self.metadata)


def in_order(names: Iterable[str], tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns names in the one order of all target files: wide dtypes first, then by name, as in a
    safetensors file."""
    return [
        name for _, name in sorted((-DTYPES[tensors[name].dtype].itemsize, name) for name in names)
    ]


@dataclass(frozen=True)
class ConversionPlan:
    """The files that a conversion writes.

    Args:
        files: paths relative to the target.
        fingerprint: 32 hex digits of everything that determines the bytes.
        files_per_rank: of rank folders and iteration folders, whose files are in the order of the
            ranks; 0 for consolidated weights.
        group_size: number of files that are written together.
        iteration_dir: the unfinished iteration folder that holds the files; else empty.
        strategy: None for one rank and for consolidated weights.
        documents: (name, JSON value) of the index and the configuration of consolidated weights.
        model_type: of Hugging Face, if the tensors have its names.
    """

    source: OpenCheckpoint
    files: tuple[TargetFile, ...]
    fingerprint: str
    files_per_rank: int = 0
    group_size: int = 1
    iteration_dir: str = ""
    strategy: Strategy | None = None
    documents: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    model_type: str | None = None

    @cached_property
    def groups(self) -> list[range]:
        """Indices of files that are written together."""
        return _split(len(self.files), self.group_size)

    @property
    def shards(self) -> list[range]:
        """Indices of the files of each rank; none for consolidated weights."""
        return _split(len(self.files), self.files_per_rank) if self.files_per_rank else []

    @property
    def run(self) -> str:
        """Run id in the records of the target."""
        return run_name(1, self.fingerprint[:8])

    def files_of(self, groups: Iterable[int]) -> list[TargetFile]:
        """Returns the files of the groups with these numbers."""
        return [self.files[i] for number in groups for i in self.groups[number]]

    def size(self, groups: Iterable[int]) -> int:
        """Returns the bytes of the files of these groups."""
        tensors = self.source.weights.tensors
        return sum(file.plan_file(tensors).size for file in self.files_of(groups))

    def tensor_bytes(self, groups: Iterable[int]) -> int:
        """Returns the bytes of the tensors in these files."""
        tensors = self.source.weights.tensors
        return sum(
            elements(region) * DTYPES[tensors[name].dtype].itemsize
            for file in self.files_of(groups)
            for name, region in file.holds.items()
        )


def _split(count: int, size: int) -> list[range]:
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def to_ranks(
    source: OpenCheckpoint, strategy: Strategy | None, fmt: str, ranks_per_group: int | None = None
) -> ConversionPlan:
    """Plans rank folders for another job.

    Args:
        strategy: of that job; None: one rank.
        ranks_per_group: number of ranks whose files are written together; by default a pipeline
            stage, whose ranks need the same bytes.
    Raises:
        StrategyError, ConfigError: see ``rank_files``.
    """
    source = with_counters(source)
    fingerprint = _fingerprint(source, "ranks", strategy, fmt)
    metadata = {**METADATA, "remove_redundancy": "False"} if fmt == "safetensors" else {}
    if source.state is not None:
        metadata |= label(run_name(1, fingerprint[:8]), source.state.step)
    strategy = fitted(strategy, source.weights)
    name = source.name
    if name is None and source.state is not None:
        name = FileName(
            prefix_of(source), 0, 0, source.state.epoch, source.state.step_in_epoch, fmt
        )
    # without a step the name that MindSpore's transform gives
    names = [
        f"checkpoint_{rank}.{fmt}"
        if name is None
        else str(name._replace(rank=rank, suffix=0, format=fmt))
        for rank in range(strategy.world_size if strategy else 1)
    ]
    paths = [f"{folder_name(rank)}/{file}" for rank, file in enumerate(names)]
    files = rank_files(source.weights, strategy, paths, fmt, metadata)
    size = ranks_per_group or (strategy.stage_size if strategy else 1)
    return ConversionPlan(source, tuple(files), fingerprint, 1, size, strategy=strategy)


def to_iteration(
    source: OpenCheckpoint, strategy: Strategy | None, ranks_per_group: int | None = None
) -> ConversionPlan:
    """Plans an iteration folder of Checkpoint 2.0 with its tracker: of each rank the network's
    weights and the rest, without the counters, which are in ``common.json``. ``strategy`` None: of
    one rank; ``ranks_per_group``: as for ``to_ranks``. Raises ConfigError for weights without a
    step, and the errors of ``holdings``."""
    if source.state is None:
        raise ConfigError(
            f"{source.what}: nothing there says which step it is; an iteration folder is named "
            "after one"
        )
    fingerprint = _fingerprint(source, "iteration", strategy)
    run = run_name(1, fingerprint[:8])
    iteration_dir = f"{RECORDS}/{attempt_name(source.state.step, run)}"
    strategy = fitted(strategy, source.weights)
    metadata = {**METADATA, "remove_redundancy": "False", **label(run, source.state.step)}
    of_network = model_names(source.weights.tensors)
    all_holdings, files = holdings(source.weights, strategy), []
    for rank, holds in enumerate(all_holdings):
        for kind in (MODEL, OPTIMIZER):
            path = f"{iteration_dir}/{WeightFile(prefix_of(source), kind, rank, len(all_holdings))}"
            files.append(
                TargetFile(
                    path,
                    "safetensors",
                    {
                        name: region
                        for name, region in holds.items()
                        if name not in IN_COMMON and (name in of_network) is (kind == MODEL)
                    },
                    metadata,
                )
            )
    size = 2 * (ranks_per_group or (strategy.stage_size if strategy else 1))
    return ConversionPlan(source, tuple(files), fingerprint, 2, size, iteration_dir, strategy)


def ranks_in_group(strategy: Strategy | None, processes: int) -> int:
    """Returns how many ranks' files a group holds, so that ``processes`` have about as much to
    write; at most those of a pipeline stage, whose ranks need the same bytes."""
    if strategy is None:
        return 1
    each = -(-strategy.world_size // processes)
    return -(-each // -(-each // strategy.stage_size))


def to_consolidated(
    source: OpenCheckpoint, kind: str, part_bytes: int = PART_BYTES, drop: tuple[str, ...] = ()
) -> ConversionPlan:
    """Plans consolidated weights of ``kind`` MINDSPORE or HUGGINGFACE, in parts. ConfigError: see
    ``consolidated_files``."""
    source = with_counters(source) if kind == MINDSPORE else source
    files, index = consolidated_files(source.weights, kind, part_bytes, drop)
    fingerprint = _fingerprint(source, "complete", kind, part_bytes, sorted(drop))
    return ConversionPlan(source, tuple(files), fingerprint, documents=(index,))


def prefix_of(source: OpenCheckpoint) -> str:
    """Returns the prefix of the source's file names, as the user chose it; ``checkpoint`` if there
    is none."""
    if source.name is not None:
        return source.name.prefix
    file = (
        parse_weight_file(os.path.basename(source.candidate.first.path))
        if source.candidate
        else None
    )
    return (file.prefix if file else None) or "checkpoint"


def _fingerprint(source: OpenCheckpoint, *wanted: Any) -> str:
    """Returns a checksum of the identity of the source, of its layouts, and of what is wanted; a
    strategy counts without the path that it was read from."""
    layouts = [
        [
            name,
            tensor.dtype,
            tensor.shape,
            tensor.layout.to_json() if tensor.layout else None,
            tensor.first,
        ]
        for name, tensor in sorted(source.weights.tensors.items())
    ]
    content = [
        item.to_json() | {"source": ""} if isinstance(item, Strategy) else item for item in wanted
    ]
    value = json.dumps([source.identity, layouts, content], sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(value.encode())


# ---- which region of which tensor each file holds ------------------------------------------------


def fitted(strategy: Strategy | None, weights: CheckpointView) -> Strategy | None:
    """Returns the strategy with as many dimensions of each layout as the tensor has. Raises
    StrategyError if a layout does not fit."""
    return strategy and strategy.fit_dimensions(
        {name: len(tensor.shape) for name, tensor in weights.tensors.items()}
    )


def holdings(weights: CheckpointView, strategy: Strategy | None) -> list[dict[str, Region]]:
    """Returns {tensor: region} for each rank of the target.

    Args:
        strategy: has as many dimensions as the tensors (``fitted``); None: one rank that holds
            everything.
    Raises:
        StrategyError: names a tensor that no stage holds, so that it would be lost, that the
            weights lack (``missing_parameters``), or whose shape does not divide.
        ConfigError: see ``check_order``.
    """
    tensors = weights.tensors
    if strategy is None:
        check_order(weights, dict.fromkeys(tensors))
        return [whole_tensors(tensors)]
    named = {name for stage in strategy.stages for name in stage}
    lost = [name for name, tensor in tensors.items() if name not in named and not tensor.is_counter]
    if lost:
        raise StrategyError(
            f"{strategy.source}: {len(lost)} tensors of {weights.name} are in no stage of the "
            f"target ({len(strategy.stages)} stages of {strategy.stage_size} ranks), for example "
            f"{listed(lost, 3)}. Is it the strategy of the same model, with all its stages?"
        )
    absent = missing_parameters(named, tensors)
    if absent:
        raise StrategyError(
            f"{strategy.source}: the target needs {len(absent)} tensors that {weights.name} does "
            f"not have, for example {listed(absent, 3)}. Is it the strategy of the same model?"
        )
    for stage in strategy.stages:
        check_order(weights, {name: layout for name, layout in stage.items() if name in tensors})
    counters = {name: whole(tensor.shape) for name, tensor in tensors.items() if tensor.is_counter}
    found: list[dict[str, Region]] = []
    for rank in range(strategy.world_size):
        held_here = dict(counters)
        for name, layout in strategy.of_rank(rank).items():
            if name in tensors:
                try:
                    held_here[name] = held(layout, rank % strategy.stage_size, tensors[name].shape)
                except ValueError as error:
                    raise StrategyError(f"{strategy.source}: {name}: {error}") from error
        found.append(held_here)
    return found


def rank_files(
    weights: CheckpointView,
    strategy: Strategy | None,
    paths: Sequence[str],
    fmt: str,
    metadata: Mapping[str, str] = METADATA,
) -> list[TargetFile]:
    """Returns one file per rank. Raises StrategyError as ``holdings``, and ConfigError for a dtype
    that the format cannot hold."""
    files = [
        TargetFile(path, fmt, holds, metadata)
        for path, holds in zip(paths, holdings(weights, strategy), strict=True)
    ]
    for file in {tuple(file.holds): file for file in files}.values():
        try:
            file.plan_file(weights.tensors)
        except ValueError as error:
            raise ConfigError(f"{weights.name} cannot be written as {fmt}: {error}") from error
    return files


def consolidated_files(
    weights: CheckpointView, kind: str, part_bytes: int = PART_BYTES, drop: tuple[str, ...] = ()
) -> tuple[list[TargetFile], tuple[str, dict[str, Any]]]:
    """Returns the files of consolidated weights, and the index as (file name, JSON value).
    ``drop``: patterns of names to leave out; HUGGINGFACE also leaves out counters: single numbers
    that no strategy names, and without a dot in the name. ConfigError if nothing is left, and as
    ``check_order``."""
    tensors = {
        name: tensor
        for name, tensor in weights.tensors.items()
        if not any(fnmatchcase(name, p) for p in drop)
    }
    check_order(weights, dict.fromkeys(tensors))
    hyper = [
        name
        for name, tensor in tensors.items()
        if (is_hyper if kind == MINDSPORE else _is_no_parameter)(
            name, tensor.layout is not None or not tensor.is_counter, math.prod(tensor.shape)
        )
    ]
    apart = set(hyper)
    names = in_order([name for name in tensors if name not in apart], tensors)
    if not names:
        raise ConfigError(
            f"{weights.name}: of {len(weights.tensors)} tensors none is left to be written"
            + (f" after {', '.join(drop)}" if drop else "")
        )
    sizes = {name: tensors[name].nbytes for name in names}
    parts = split(sizes, part_bytes)
    paths = [part_name(i, len(parts), kind) for i in range(len(parts))]
    weight_map = {name: path for path, part in zip(paths, parts, strict=True) for name in part}
    files = [
        TargetFile(
            path,
            "safetensors",
            {name: whole(tensors[name].shape) for name in part},
            METADATA if kind == MINDSPORE else {"format": "np"},
        )
        for path, part in zip(paths, parts, strict=True)
    ]
    if kind == MINDSPORE and hyper:
        files.append(
            TargetFile(
                HYPER, "safetensors", {name: whole(tensors[name].shape) for name in hyper}, METADATA
            )
        )
    return files, index_document(kind, weight_map, sum(sizes.values()))


def _is_no_parameter(name: str, layout_known: bool, elements: int) -> bool:
    return name in SCALARS or (not layout_known and elements == 1 and "." not in name)


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Region]:
    """Returns the whole region of each tensor."""
    return {name: whole(tensor.shape) for name, tensor in tensors.items()}


# ---- counters as tensors: Checkpoint 1.0 keeps them so in every file, an iteration folder elsewher


def with_counters(source: OpenCheckpoint) -> OpenCheckpoint:
    """Returns ``source``; if it is an iteration folder, with the counters of its ``common.json``
    added as tensors. They are in a file in memory, because readers read ranges of files."""
    if not source.is_iteration or source.state is None:
        return source
    weights = source.weights
    arrays = {
        name: array
        for name, array in counters_of(source.state).items()
        if name not in weights.tensors
    }
    content = b"".join(data for _, data in encode("safetensors", arrays, {}))
    memory, header = _Memory(content), read_header(io.BytesIO(content), "counters.safetensors")
    tensors = {
        **weights.tensors,
        **{name: Tensor(name, entry.dtype, entry.shape) for name, entry in header.tensors.items()},
    }
    return replace(
        source,
        weights=replace(
            weights,
            tensors=tensors,
            headers={**weights.headers, memory.path: header},
            memory=memory,
            places={**weights.places, **{name: {0: memory.path} for name in arrays}},
        ),
    )


def counters_of(state: TrainingState) -> dict[str, np.ndarray]:
    """Returns the counters that mindformers appends to each file
    (core/callback/callback.py:save_checkpoint). Leaves out counters that are not known."""
    found: dict[str, np.ndarray] = {
        "epoch_num": np.array(state.epoch, np.int64),
        "step_num": np.array(state.step, np.int64),
        "global_step": np.array([state.global_step], np.int32),
    }
    if state.loss_scale is not None:
        found["loss_scale"] = np.array(state.loss_scale, np.float32)
    if state.global_batch_size is not None:
        found["global_batch_size"] = np.array(state.global_batch_size, np.int64)
    return found


class _Memory:
    """Holds an anonymous file in memory, and closes it when the object is deleted."""

    def __init__(self, content: bytes):
        self._handle = os.memfd_create("counters")
        os.write(self._handle, content)
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"

    def __del__(self) -> None:
        os.close(self._handle)
