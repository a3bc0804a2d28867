"""Plans a conversion: which files the target has, in which groups they are written, and what identifies the result.

    plan = to_ranks(source, strategy, "safetensors")        # rank folders, for another job
    plan = to_iteration(source, strategy)                   # an iteration folder of Checkpoint 2.0
    plan = to_consolidated(source, MINDSPORE)                   # consolidated weights in parts
"""
from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from mindresume.errors import ConfigError
from mindresume.formats.consolidated import MINDSPORE
from mindresume.formats.iterations import MODEL, OPTIMIZER, WeightFile, iteration_name, parse_weight_file
from mindresume.formats.rank_folders import FileName, folder_name, label
from mindresume.formats.strategy import Strategy
from mindresume.model.manifest import FOLDER as RECORDS
from mindresume.model.manifest import attempt_name, run_name
from mindresume.model.training_state import TrainingState
from mindresume.reshard.checkpoint_view import Tensor
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.reshard.target_files import (
    IN_COMMON,
    METADATA,
    PART_BYTES,
    TargetFile,
    consolidated_files,
    holdings,
    model_names,
    rank_files,
)
from mindresume.tensor_files import FilePlan, encode, read_header


@dataclass(frozen=True)
class ConversionPlan:
    """The files that a conversion writes.

    Args:
        files: paths relative to the target.
        groups: indices of files that are written together.
        fingerprint: 32 hex digits of everything that determines the bytes.
        shards: indices of the files of each rank; empty for consolidated weights.
        iteration_dir: the unfinished iteration folder that holds the files; else empty.
        strategy: None for one rank and for consolidated weights.
        documents: (name, JSON value) of the index and the configuration of consolidated weights.
        model_type: of Hugging Face, if the tensors have its names.
    """
    source: OpenCheckpoint
    files: tuple[TargetFile, ...]
    groups: tuple[tuple[int, ...], ...]
    fingerprint: str
    shards: tuple[tuple[int, ...], ...] = ()
    iteration_dir: str = ""
    strategy: Strategy | None = None
    documents: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    model_type: str | None = None

    @property
    def run(self) -> str:
        """Run id in the records of the target."""
        return run_name(1, self.fingerprint[:8])

    def path(self, number: int) -> str:
        """Returns the path of a file in the finished target."""
        path = self.files[number].path
        return f"{iteration_name(self.source.state.step)}{path.removeprefix(self.iteration_dir)}" if self.iteration_dir else path

    def size(self, groups: Iterable[tuple[int, ...]] | None = None) -> int:
        """Returns the bytes of the files of these groups, by default of all."""
        return sum(plan.size for plan in self._file_plans(groups))

    def tensor_bytes(self, groups: Iterable[tuple[int, ...]] | None = None) -> int:
        """Returns the bytes of the tensors in these files."""
        return sum(count for plan in self._file_plans(groups) for rows in plan.tensors.values() for _, _, count in rows)

    def _file_plans(self, groups: Iterable[tuple[int, ...]] | None) -> Iterator[FilePlan]:
        tensors = self.source.weights.tensors
        return (self.files[i].plan_file(tensors) for group in (self.groups if groups is None else groups) for i in group)


def to_ranks(source: OpenCheckpoint, strategy: Strategy | None, fmt: str, ranks_per_group: int | None = None) -> ConversionPlan:
    """Plans rank folders for another job.

    Args:
        strategy: of that job; None: one rank.
        ranks_per_group: number of ranks whose files are written together; by default a pipeline stage, whose ranks need the same
            bytes.
    Raises:
        StrategyError, ConfigError: see ``rank_files``.
    """
    source = with_counters(source)
    fingerprint = _fingerprint(source, ["ranks", _content(strategy), fmt])
    metadata = {**METADATA, "remove_redundancy": "False"} if fmt == "safetensors" else {}
    if source.state is not None:
        metadata |= label(run_name(1, fingerprint[:8]), source.state.step)
    strategy = _fitted(strategy, source)
    files = rank_files(source.weights, strategy, lambda rank: f"{folder_name(rank)}/{file_name(source, rank, fmt)}", fmt,
                       metadata)
    return _of_ranks(ConversionPlan(source, tuple(files), (), fingerprint, strategy=strategy), 1, ranks_per_group)


def to_iteration(source: OpenCheckpoint, strategy: Strategy | None, ranks_per_group: int | None = None) -> ConversionPlan:
    """Plans an iteration folder of Checkpoint 2.0 with its tracker: of each rank the network's weights and the rest, without the
    counters, which are in ``common.json``. ``strategy`` None: of one rank; ``ranks_per_group``: as for ``to_ranks``. Raises
    ConfigError for weights without a step, and the errors of ``holdings``."""
    if source.state is None:
        raise ConfigError(f"{source.what}: nothing there says which step it is; an iteration folder is named after one")
    fingerprint = _fingerprint(source, ["iteration", _content(strategy)])
    run = run_name(1, fingerprint[:8])
    iteration_dir = f"{RECORDS}/{attempt_name(source.state.step, run)}"
    strategy = _fitted(strategy, source)
    metadata = {**METADATA, "remove_redundancy": "False", **label(run, source.state.step)}
    of_network = model_names(source.weights.tensors)
    all_holdings, files = holdings(source.weights, strategy), []
    for rank, holds in enumerate(all_holdings):
        for kind in (MODEL, OPTIMIZER):
            path = f"{iteration_dir}/{WeightFile(prefix_of(source), kind, rank, len(all_holdings))}"
            files.append(TargetFile(path, "safetensors", {name: region for name, region in holds.items() if name not in IN_COMMON
                                                          and (name in of_network) is (kind == MODEL)}, metadata))
    plan = ConversionPlan(source, tuple(files), (), fingerprint, iteration_dir=iteration_dir, strategy=strategy)
    return _of_ranks(plan, 2, ranks_per_group)


def _of_ranks(plan: ConversionPlan, per_rank: int, ranks_per_group: int | None) -> ConversionPlan:
    """Adds the groups and the files of each rank, which has ``per_rank`` of them."""
    size, count = per_rank * (ranks_per_group or (plan.strategy.stage_size if plan.strategy else 1)), len(plan.files)
    return replace(plan, groups=tuple(tuple(range(first, min(first + size, count))) for first in range(0, count, size)),
                   shards=tuple(tuple(range(first, first + per_rank)) for first in range(0, count, per_rank)))


def _fitted(strategy: Strategy | None, source: OpenCheckpoint) -> Strategy | None:
    """Returns the strategy with as many dimensions of each layout as the tensor has."""
    return strategy and strategy.fit_dimensions({name: len(tensor.shape) for name, tensor in source.weights.tensors.items()})


def ranks_in_group(strategy: Strategy | None, processes: int) -> int:
    """Returns how many ranks' files a group holds, so that ``processes`` have about as much to write; at most those of a pipeline
    stage, whose ranks need the same bytes."""
    if strategy is None:
        return 1
    each = -(-strategy.world_size // processes)
    return -(-each // -(-each // strategy.stage_size))


def _content(strategy: Strategy | None) -> Any:
    """Returns the strategy as JSON, without the path that it was read from."""
    return strategy.to_json() | {"source": ""} if strategy else None


def prefix_of(source: OpenCheckpoint) -> str:
    """Returns the prefix of the source's file names, as the user chose it; ``checkpoint`` if there is none."""
    if source.name is not None:
        return source.name.prefix
    file = parse_weight_file(os.path.basename(source.candidate.first.path)) if source.candidate else None
    return (file.prefix if file else None) or "checkpoint"


def to_consolidated(source: OpenCheckpoint, kind: str, part_bytes: int = PART_BYTES,
                    drop: tuple[str, ...] = ()) -> ConversionPlan:
    """Plans consolidated weights of ``kind`` MINDSPORE or HUGGINGFACE, in parts. ConfigError: see ``consolidated_files``."""
    source = with_counters(source) if kind == MINDSPORE else source
    files, index = consolidated_files(source.weights, kind, part_bytes, drop)
    fingerprint = _fingerprint(source, ["complete", kind, part_bytes, sorted(drop)])
    return ConversionPlan(source, tuple(files), tuple((i,) for i in range(len(files))), fingerprint,
                          documents=(index,))


def file_name(source: OpenCheckpoint, rank: int, fmt: str) -> str:
    """Returns the source's file name for another rank; without a step, the name that MindSpore's transform gives
    (``checkpoint_3.ckpt``)."""
    if source.name is not None:
        return str(source.name._replace(rank=rank, suffix=0, format=fmt))
    if source.state is not None:
        return str(FileName(prefix_of(source), rank, 0, source.state.epoch, source.state.step_in_epoch, fmt))
    return f"checkpoint_{rank}.{fmt}"


def _fingerprint(source: OpenCheckpoint, wanted: Any) -> str:
    """Returns a checksum of the identity of the source, of its layouts, and of what is wanted."""
    layouts = [[name, tensor.dtype, tensor.shape, tensor.layout.to_json() if tensor.layout else None, tensor.first]
               for name, tensor in sorted(source.weights.tensors.items())]
    value = json.dumps([source.identity, layouts, wanted], sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(value.encode())


# ---- counters as tensors: Checkpoint 1.0 keeps them so in every file, an iteration folder elsewhere -----------------

def with_counters(source: OpenCheckpoint) -> OpenCheckpoint:
    """Returns ``source``; if it is an iteration folder, with the counters of its ``common.json`` added as tensors. They are in a
    file in memory, because readers read ranges of files."""
    if not source.is_iteration or source.state is None:
        return source
    weights = source.weights
    arrays = {name: array for name, array in counters_of(source.state).items() if name not in weights.tensors}
    content = b"".join(data for _, data in encode("safetensors", arrays, {}))
    memory, header = _Memory(content), read_header(io.BytesIO(content), "counters.safetensors")
    tensors = {**weights.tensors, **{name: Tensor(name, entry.dtype, entry.shape) for name, entry in header.tensors.items()}}
    return replace(source, weights=replace(
        weights, tensors=tensors, headers={**weights.headers, memory.path: header}, memory=memory,
        places={**weights.places, **{name: {0: memory.path} for name in arrays}}))


def counters_of(state: TrainingState) -> dict[str, np.ndarray]:
    """Returns the counters that mindformers appends to each file (core/callback/callback.py:save_checkpoint). Leaves out counters
    that are not known."""
    found: dict[str, np.ndarray] = {"epoch_num": np.array(state.epoch, np.int64), "step_num": np.array(state.step, np.int64),
                                    "global_step": np.array([state.global_step], np.int32)}
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
