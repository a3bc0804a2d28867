"""Plans the files of a conversion, and which region of which tensor each holds: for the ranks of another job, or consolidated
weights.

    files = rank_files(weights, strategy, name=lambda rank: f"rank_{rank}/...", fmt="safetensors")
    files, index = consolidated_files(weights, HUGGINGFACE, part_bytes=3 << 30)
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from mindresume.errors import ConfigError, StrategyError
from mindresume.formats.consolidated import HYPER, MINDSPORE, index_document, is_hyper, part_name, split
from mindresume.formats.strategy import Strategy
from mindresume.formats.weight_files import SCALARS
from mindresume.formatting import listed
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor
from mindresume.reshard.geometry import Region, elements, held, shape_of, whole
from mindresume.reshard.tensor_checks import check_order, missing_parameters, prefix_splits
from mindresume.tensor_files import FilePlan, TensorSpec, plan_file
from mindresume.tensor_files.header import DTYPES

PART_BYTES = 3 << 30                # bytes of a part of consolidated weights, as of MindSpore's unified_safetensors
METADATA = {"format": "ms"}
IN_COMMON = frozenset(SCALARS) - {"global_step"}       # global_step is a parameter of the optimizer


@dataclass(frozen=True)
class TargetFile:
    """Describes a file to write. ``holds``: {tensor: region}; ``metadata``: of the file."""
    path: str
    format: str
    holds: Mapping[str, Region]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def plan_file(self, tensors: Mapping[str, Tensor]) -> FilePlan:
        """Returns the layout of the file in bytes. ValueError for a dtype or name that the format cannot hold."""
        specs = {}
        for name in in_order(self.holds, tensors):
            shape, dtype = shape_of(self.holds[name]), tensors[name].dtype
            specs[name] = TensorSpec(dtype, shape, elements(self.holds[name]) * DTYPES[dtype].itemsize)
        return plan_file(self.format, specs, self.metadata)


def in_order(names: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns names in the one order of all target files: wide dtypes first, then by name, as in a safetensors file."""
    return sorted(names, key=lambda name: (-DTYPES[tensors[name].dtype].itemsize, name))


def holdings(weights: CheckpointView, strategy: Strategy | None) -> list[dict[str, Region]]:
    """Returns {tensor: region} for each rank of the target. ``strategy`` None: one rank that holds everything. StrategyError
    names a tensor that no stage holds, that the weights lack, or whose shape does not divide. ConfigError: ``check_order``."""
    tensors = weights.tensors
    counters = {name: whole(tensor.shape) for name, tensor in tensors.items() if tensor.is_counter}
    if strategy is None:
        for name in tensors:
            check_order(weights, name, None)
        return [{name: whole(tensor.shape) for name, tensor in tensors.items()}]
    strategy = strategy.fit_dimensions({name: len(tensor.shape) for name, tensor in tensors.items()})
    check_names(weights, strategy)
    found: list[dict[str, Region]] = []
    for rank in range(strategy.world_size):
        held_here = dict(counters)
        for name, layout in strategy.of_rank(rank).items():
            if name in tensors:
                check_order(weights, name, layout)
                try:
                    held_here[name] = held(layout, rank % strategy.stage_size, tensors[name].shape)
                except ValueError as error:
                    raise StrategyError(f"{strategy.source}: {name}: {error}") from error
        found.append(held_here)
    return found


def check_names(weights: CheckpointView, strategy: Strategy) -> None:
    """Raises StrategyError if a tensor would be lost, or is missing (``missing_parameters``)."""
    named = {name for stage in strategy.stages for name in stage}
    lost = [name for name, tensor in weights.tensors.items() if name not in named and not tensor.is_counter]
    if lost:
        raise StrategyError(f"{strategy.source}: {len(lost)} tensors of {weights.name} are in no stage of the target "
                            f"({len(strategy.stages)} stages of {strategy.stage_size} ranks), for example {listed(lost, 3)}. Is "
                            f"it the strategy of the same model, with all its stages?")
    absent = missing_parameters(named, weights.tensors)
    if absent:
        raise StrategyError(f"{strategy.source}: the target needs {len(absent)} tensors that {weights.name} does not have, for "
                            f"example {listed(absent, 3)}. Is it the strategy of the same model?")


def _is_no_parameter(name: str, layout_known: bool, elements: int) -> bool:
    return name in SCALARS or (not layout_known and elements == 1 and "." not in name)


def rank_files(weights: CheckpointView, strategy: Strategy | None, path: Callable[[int], str], fmt: str,
               metadata: Mapping[str, str] = METADATA) -> list[TargetFile]:
    """Returns one file per rank. Raises StrategyError as ``holdings``, and ConfigError for a dtype that the format cannot
    hold."""
    files = [TargetFile(path(rank), fmt, holds, metadata) for rank, holds in enumerate(holdings(weights, strategy))]
    for file in {tuple(file.holds): file for file in files}.values():
        try:
            file.plan_file(weights.tensors)
        except ValueError as error:
            raise ConfigError(f"{weights.name} cannot be written as {fmt}: {error}") from error
    return files


def model_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """Returns the tensors of the network: no counters, and no optimizer states (named ``adam_m.`` and the name of a
    parameter)."""
    return {name for name, tensor in tensors.items() if not tensor.is_counter and name not in SCALARS
            and not any(rest in tensors for _, rest in prefix_splits(name))}


def consolidated_files(weights: CheckpointView, kind: str, part_bytes: int = PART_BYTES, drop: tuple[str, ...] = ()
                   ) -> tuple[list[TargetFile], tuple[str, dict[str, Any]]]:
    """Returns the files of consolidated weights, and the index as (file name, JSON value). ``drop``: patterns of names to leave
    out; HUGGINGFACE also leaves out counters: single numbers that no strategy names, and without a dot in the name. ConfigError
    if nothing is left, and as ``check_order``."""
    tensors = {name: tensor for name, tensor in weights.tensors.items() if not any(fnmatchcase(name, p) for p in drop)}
    for name in tensors:
        check_order(weights, name, None)
    hyper = [name for name, tensor in tensors.items() if (is_hyper if kind == MINDSPORE else _is_no_parameter)(
        name, tensor.layout is not None or not tensor.is_counter, math.prod(tensor.shape))]
    apart = set(hyper)
    names = in_order([name for name in tensors if name not in apart], tensors)
    if not names:
        raise ConfigError(f"{weights.name}: of {len(weights.tensors)} tensors none is left to be written"
                          + (f" after {', '.join(drop)}" if drop else ""))
    sizes = {name: tensors[name].nbytes for name in names}
    parts = split(sizes, part_bytes)
    paths = [part_name(i, len(parts), kind) for i in range(len(parts))]
    weight_map = {name: path for path, part in zip(paths, parts, strict=True) for name in part}
    files = [TargetFile(path, "safetensors", {name: whole(tensors[name].shape) for name in part},
                        METADATA if kind == MINDSPORE else {"format": "np"})
             for path, part in zip(paths, parts, strict=True)]
    if kind == MINDSPORE and hyper:
        files.append(TargetFile(HYPER, "safetensors", {name: whole(tensors[name].shape) for name in hyper}, METADATA))
    return files, index_document(kind, weight_map, sum(sizes.values()))


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Region]:
    """Returns the whole region of each tensor."""
    return {name: whole(tensor.shape) for name, tensor in tensors.items()}
