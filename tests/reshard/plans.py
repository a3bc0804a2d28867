"""Models under parallel plans, in plain numpy: which part of each tensor every rank holds, and
checkpoints written accordingly.

The reference of the tests of resharding: parts are found by splitting along the coordinates of a
rank in the device matrix. Nothing of it comes from ``mindresume.model.layout``, of which only the
three fields of a layout are used.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes
import numpy as np
from rank_folders import (
    PER_EPOCH,
    RUN,
    counters,
    dir_at,
    name_of,
    path_of,
    state_of,
    target_of,
    tensors_in,
)

from mindresume.formats import Candidate
from mindresume.formats.consolidated import (
    HYPER,
    index_document,
    part_name,
    split,
)
from mindresume.formats.scan import scan
from mindresume.formats.strategy import Strategy
from mindresume.model.layout import TensorLayout
from mindresume.saving.committer import Committer
from mindresume.saving.shard_writer import rank_shard, write_shard
from mindresume.tensor_files import encode
from tests.strategy_files import write_strategy

STEP = PER_EPOCH + 5
# mindformers puts them into every file, no strategy names them
COUNTERS = counters(STEP)
Tensors = Mapping[str, np.ndarray]


class Spec(NamedTuple):
    """``cut``: dimension sharded by tensor parallelism, None = replicated. ``place``: layer,
    "first", "last" or "ends", which is both."""

    shape: tuple[int, ...]
    cut: int | None
    place: int | str
    dtype: str = "float32"


def transformer(layers: int = 4, hidden: int = 8, vocabulary: int = 16) -> dict[str, Spec]:
    """Returns a small decoder with its optimizer states: rows, columns and 3-d experts cut,
    vectors, replicated and empty ones."""
    h = hidden
    found = {"embedding.weight": Spec((vocabulary, h), 0, "first", "bfloat16")}
    for i in range(layers):
        at = f"layers.{i}."
        found |= {
            at + "qkv.weight": Spec((3 * h, h), 0, i),
            at + "proj.weight": Spec((h, h), 1, i, "bfloat16"),
            at + "norm.weight": Spec((h,), None, i),
            at + "up.bias": Spec((2 * h,), 0, i, "float16"),
        }
        if i < 3:
            found[at + "experts.weight"] = Spec((8, 8, 8), i, i, "float16")
    found |= {
        "layers.0.table": Spec((8, 3), 0, 0, "int8"),
        "layers.1.ids": Spec((16,), 0, 1, "int64"),
        "layers.1.mask": Spec((8, 8), 1, 1, "bool"),
        "layers.1.none": Spec((8, 0), 0, 1),
        "layers.1.count": Spec((8,), 0, 1, "int32"),
        "norm.weight": Spec((h,), None, "last"),
        "head.weight": Spec((vocabulary, h), 0, "last"),
    }
    trained = [
        name for name in found if name.endswith(("qkv.weight", "norm.weight", "1.experts.weight"))
    ]
    states = [prefix + name for name in trained for prefix in ("adam_m.", "adam_v.")] + [
        f"accu_grads.{trained[0]}"
    ]
    return {
        **found,
        **{name: found[name.partition(".")[2]]._replace(dtype="float32") for name in states},
    }


MODEL = transformer()


def random_tensors(model: Mapping[str, Spec], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns tensors of any bits: NaN of all kinds, subnormal numbers."""
    random = np.random.default_rng(seed)
    found = {}
    for name, spec in model.items():
        dtype = np.dtype(getattr(ml_dtypes, spec.dtype, None) or spec.dtype)
        bits = random.integers(
            0, 2 if spec.dtype == "bool" else 256, math.prod(spec.shape) * dtype.itemsize, np.uint8
        )
        found[name] = bits.view(dtype).reshape(spec.shape)
    return found


# ---- the reference -------------------------------------------------------------------------------


def positions(shape: tuple[int, ...], layout: TensorLayout, rank: int) -> list[np.ndarray]:
    """Returns, per dimension, the indices of local ``rank``: split along each axis that cuts the
    dimension, the piece at the coordinate of the rank; then dimension 0 split among the ranks with
    equal slices."""
    matrix = layout.device_matrix
    at = np.unravel_index(rank, matrix)
    found, used = [np.arange(size) for size in shape], []
    for dim, axes in enumerate(layout.tensor_map):
        for axis in axes if isinstance(axes, tuple) else (axes,):
            if axis != -1:
                position = len(matrix) - 1 - axis
                used.append(position)
                found[dim] = np.split(found[dim], matrix[position])[at[position]]
    free = [position for position in range(len(matrix)) if position not in used]
    replicas = math.prod(matrix[position] for position in free)
    pieces = replicas if layout.optimizer_shards == -1 else layout.optimizer_shards
    if shape and pieces > 1:
        index = int(
            np.ravel_multi_index(
                [at[position] for position in free], [matrix[position] for position in free]
            )
        )
        found[0] = np.split(found[0], pieces)[index % pieces]
    return found


def part_of(array: np.ndarray, layout: TensorLayout, rank: int) -> np.ndarray:
    """Returns the slice of ``array`` that local ``rank`` has, as a copy, 0-d included."""
    return np.array(
        array[np.ix_(*positions(array.shape, layout, rank))] if array.ndim else array, order="C"
    )


def region_of(
    shape: tuple[int, ...], layout: TensorLayout, rank: int
) -> tuple[tuple[int, int], ...]:
    """Returns the same as ((start, stop), ...)."""
    return tuple(
        (int(held[0]), int(held[-1]) + 1) if held.size else (0, 0)
        for held in positions(shape, layout, rank)
    )


@dataclass(frozen=True)
class Plan:
    """A model under one parallel configuration; its layers are spread over ``pp`` stages of [dp,
    tp] ranks. ``axes``: the axes that cut tensors, counted from the right; (1, 0) cuts over all
    ranks of a stage and leaves vectors uncut."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    opt: int = 0
    axes: tuple[int, ...] = (0,)
    model: tuple[tuple[str, Spec], ...] = tuple(MODEL.items())

    @classmethod
    def parse(cls, text: str, model: Mapping[str, Spec] = MODEL) -> Plan:
        """Parses ``dp2tp2pp2opt2`` or ``dp2tp2axes10``."""
        found = {key: value for key, value in re.findall(r"(dp|tp|pp|opt|axes)(-?\d+)", text)}
        assert "".join(key + value for key, value in found.items()) == text, text
        axes = tuple(map(int, found.pop("axes", "0")))
        return cls(
            **{key: int(value) for key, value in found.items()},
            axes=axes,
            model=tuple(model.items()),
        )

    @property
    def stage_size(self) -> int:
        return self.dp * self.tp

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @cached_property
    def stages(self) -> tuple[dict[str, TensorLayout], ...]:
        """{parameter: layout} of each stage."""
        specs = dict(self.model)
        layers = 1 + max(
            (spec.place for spec in specs.values() if isinstance(spec.place, int)), default=0
        )
        places = {
            "first": {0},
            "last": {self.pp - 1},
            "ends": {0, self.pp - 1},
            **{layer: {layer * self.pp // layers} for layer in range(layers)},
        }
        return tuple(
            {
                name: self._layout(spec)
                for name, spec in specs.items()
                if stage in places[spec.place]
            }
            for stage in range(self.pp)
        )

    def _layout(self, spec: Spec) -> TensorLayout:
        """Returns the layout; it has no optimizer shard if the replicas or dimension 0 do not
        divide into its pieces."""
        axes = self.axes if len(self.axes) > 1 else self.axes[0]
        whole = spec.cut is None or (
            self.tp == 1 if isinstance(axes, int) else len(spec.shape) == 1
        )
        cut = tuple(axes if dim == spec.cut and not whole else -1 for dim in range(len(spec.shape)))
        if not self.opt or not spec.shape:
            return TensorLayout((self.dp, self.tp), cut)
        replicas = self.stage_size if whole else self.dp if isinstance(axes, int) else 1
        pieces = replicas if self.opt == -1 else self.opt
        rows = spec.shape[0] // (self.tp if spec.cut == 0 and not whole else 1)
        fits = pieces > 1 and replicas % pieces == 0 and rows % pieces == 0
        return TensorLayout((self.dp, self.tp), cut, self.opt if fits else 0)

    def strategy(self) -> Strategy:
        return Strategy(self.stages, "the strategy of the test")

    def write(self, folder: Path | str, fmt: str = "ckpt") -> Path:
        """Writes the strategy files of this plan. Returns ``folder``."""
        write_strategy(self.strategy(), str(folder), fmt)
        return Path(folder)

    def layouts(self, rank: int) -> dict[str, TensorLayout]:
        return self.stages[rank // self.stage_size]

    def shard(self, tensors: Tensors, rank: int) -> dict[str, np.ndarray]:
        """Returns the slices of a rank, without the counters."""
        return {
            name: part_of(tensors[name], layout, rank % self.stage_size)
            for name, layout in self.layouts(rank).items()
        }

    def regions(self, rank: int) -> dict[str, tuple[tuple[int, int], ...]]:
        specs = dict(self.model)
        return {
            name: region_of(specs[name].shape, layout, rank % self.stage_size)
            for name, layout in self.layouts(rank).items()
        }

    def keeps(self, rank: int) -> set[str]:
        """Returns whether this rank keeps the slice: of ranks with equal slices one keeps it, in
        turn; the others omit it as redundant."""
        first = rank - rank % self.stage_size
        kept, regions = set(), [self.regions(first + local) for local in range(self.stage_size)]
        for number, name in enumerate(self.layouts(rank)):
            group = [
                local
                for local in range(self.stage_size)
                if regions[local][name] == regions[rank - first][name]
            ]
            if group[number % len(group)] == rank - first:
                kept.add(name)
        return kept


# ---- checkpoints ---------------------------------------------------------------------------------


def shard_file(
    plan: Plan, tensors: Tensors, rank: int, dedup: bool = False, extra: Tensors = COUNTERS
) -> dict[str, np.ndarray]:
    kept = plan.keeps(rank) if dedup else set(plan.layouts(rank))
    return {
        **{name: array for name, array in plan.shard(tensors, rank).items() if name in kept},
        **extra,
    }


def put(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(bytes(piece) for _, piece in encode(path.suffix[1:], tensors, metadata or {}))
    )
    return path


def foreign(
    root: Path,
    plan: Plan,
    tensors: Tensors,
    fmt: str = "safetensors",
    dedup: bool = False,
    extra: Tensors = COUNTERS,
    others: Mapping[int, Tensors] = MappingProxyType({}),
) -> Candidate:
    """Writes files as mindformers does: no records; with ckpt no metadata either. ``others``:
    tensors of single ranks."""
    for rank in range(plan.world_size):
        metadata = {"format": "ms", "remove_redundancy": str(dedup)} if fmt == "safetensors" else {}
        put(
            path_of(root, STEP, rank, 0, fmt),
            shard_file(plan, others.get(rank, tensors), rank, dedup, extra),
            metadata,
        )
    return newest(root)


def recorded(
    root: Path,
    plan: Plan,
    tensors: Tensors,
    fmt: str = "safetensors",
    dedup: bool = False,
    layouts: bool = True,
    extra: Tensors = COUNTERS,
    unnamed: Collection[str] = (),
    others: Mapping[int, Tensors] = MappingProxyType({}),
    arrangement: Mapping[str, bool] = MappingProxyType({}),
) -> Candidate:
    """Writes a checkpoint as our store does. ``layouts`` False: as a data-parallel job, which has
    no strategy; ``unnamed``: without layouts of these. ``others``: tensors of single ranks."""
    shapes = {name: array.shape for name, array in tensors.items()}
    for rank in range(plan.world_size):
        known = {
            name: (layout, shapes[name])
            for name, layout in plan.layouts(rank).items()
            if layouts and name not in unnamed
        }
        held = shard_file(plan, others.get(rank, tensors), rank, dedup, extra)
        state = replace(state_of(STEP), arrangement=arrangement)
        shard = rank_shard(
            name_of(rank, STEP, 0, fmt),
            state,
            held,
            known,
            metadata={"format": "ms", "remove_redundancy": str(dedup)},
        )
        write_shard(target_of(root, rank, plan.world_size), shard, saved_at=1000.0)
    committer = Committer(target_of(root, 0, plan.world_size, RUN))
    committer.poll(STEP)
    assert not committer.pending
    return newest(root)


def complete(root: Path, tensors: Tensors, kind: str = "mindspore", part_bytes: int = 2000) -> Path:
    """Writes uncut weights in several files, with their index and the counters."""
    weight_map: dict[str, str] = {}
    parts = split({name: array.nbytes for name, array in tensors.items()}, part_bytes)
    for index, names in enumerate(parts):
        file = part_name(index, len(parts), kind)
        put(root / file, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    name, document = index_document(
        kind, weight_map, sum(array.nbytes for array in tensors.values())
    )
    (root / name).write_text(json.dumps(document))
    put(root / HYPER, COUNTERS)
    return root


def tensors_of_rank(folder: Path, rank: int) -> dict[str, np.ndarray]:
    """Returns all tensors of the only weight file of a rank."""
    (path,) = [
        path
        for path in (folder / f"rank_{rank}").iterdir()
        if path.suffix in (".ckpt", ".safetensors")
    ]
    return tensors_in(path)


def check_slices(folder: Path, plan: Plan, tensors: Tensors, extra: Tensors = COUNTERS) -> None:
    """Checks that every rank has exactly the slices of the plan, bit for bit, and that there are no
    more ranks."""
    assert sorted(path.name for path in folder.glob("rank_*")) == sorted(
        f"rank_{rank}" for rank in range(plan.world_size)
    )
    for rank in range(plan.world_size):
        wanted, found = shard_file(plan, tensors, rank, extra=extra), tensors_of_rank(folder, rank)
        assert {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in wanted.items()} == {
            name: (a.dtype.name, a.shape, a.tobytes()) for name, a in found.items()
        }


def newest(root: Path) -> Candidate:
    return scan(dir_at(root)).candidates[0]


def lose(root: Path, candidate: Candidate, ranks: Iterable[int]) -> None:
    for rank in ranks:
        os.remove(root / candidate.files[rank][0].path)


# ---- samples -------------------------------------------------------------------------------------

TINY = {
    "embedding.weight": Spec((4, 2), 0, "first"),
    "layers.1.weight": Spec((2, 4), 1, "last", "bfloat16"),
}
TENSORS = random_tensors(TINY)
ALL = random_tensors(MODEL)
