"""Reads into memory exactly the regions that one rank of a training needs, from a checkpoint of any
layout; a slice that several ranks need is read by one of them, which broadcasts it.

    regions = wanted_regions(weights, LoadTarget(shapes, layouts), rank)
    # the same plan on all ranks, no message
    mine, exchanges = plan_reads(regions, layouts, itemsizes, rank)
    arrays = read_regions(weights, mine)
    # collective: all ranks, in one order
    exchange_slices(arrays, exchanges, regions, dtypes, rank, broadcast)

Every rank of a pipeline stage knows the layouts of the whole stage. The reader of a slice is
assigned as its writer is with redundancy removal (``model.layout.shares``): the bytes are spread
evenly over the ranks that hold it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from mindresume import runtime
from mindresume.errors import ConfigError, LoadError
from mindresume.formatting import counted
from mindresume.model.layout import (
    Cut,
    Layouts,
    Region,
    Shape,
    TensorLayout,
    elements,
    held,
    holders_with,
    same_shape,
    shape_of,
    shares,
    whole,
    within,
)
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.checkpoint_view import (
    CheckpointView,
    SliceLocation,
    check_order,
    model_names,
)
from mindresume.reshard.range_reader import (
    TILE,
    OpenFiles,
    Traffic,
    bits_dtype,
    gather,
    view,
)
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import new_memory
from mindresume.tensor_files.header import DTYPES

# a number between the dots of a parameter name
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
WORKERS = 4  # threads: reading mostly waits

Shapes = Mapping[str, tuple[Shape, str]]  # {name: (shape, dtype)}


@dataclass(frozen=True)
class LoadTarget:
    """Describes what one rank of a training takes from a checkpoint.

    Attributes:
        shapes: the parameters of this rank.
        layouts: of those that are cut.
        optional: parameters that the checkpoint may lack, besides those that ``may_be_absent``.
        of_model: the parameters of the model, if the others are those of its optimizer; None: they
            are not told apart.
        proposes: whether an error says how to load without the missing parameters.
        names: {name in the checkpoint: parameter}, where they differ. All else has names of the
            checkpoint.
        dtypes: {name: dtype of the parameter}, where the values of the checkpoint are converted.
        deduplicated: what the checkpoint lacks comes from other ranks.
    """

    shapes: Shapes
    layouts: Layouts
    optional: Collection[str] = ()
    of_model: Collection[str] | None = None
    proposes: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    deduplicated: bool = False

    def parameter(self, name: str) -> str:
        """Returns the name of the parameter that takes a tensor."""
        return self.names.get(name, name)

    def missing(self, stored: Collection[str]) -> list[str]:
        """Returns the parameters that ``stored`` lacks and must not lack."""
        return (
            []
            if self.deduplicated
            else [
                name
                for name in self.shapes
                if name not in stored and name not in self.optional and not may_be_absent(name)
            ]
        )

    def proposal(self, missing: Collection[str]) -> str:
        """Returns a sentence that tells how to load without the ``missing`` parameters; empty if
        there are none, or it is not proposed. Names that differ only in numbers are one pattern."""
        if not missing or not self.proposes:
            return ""
        patterns = list(dict.fromkeys(_NUMBER.sub("*", name) for name in missing))
        quoted = [f'"{pattern}"' for pattern in patterns[:6]] + ["..."][: len(patterns) > 6]
        return (
            " To leave what is missing as it is initialised, set mindresume: {allow_missing: "
            f"[{', '.join(quoted)}]}}"
        )

    def misfits(self, stored: Mapping[str, Any]) -> str:
        """Compares tensors (``dtype``, ``shape``) with the parameters. Returns what does not fit or
        is missing, as text."""
        problems = []
        for name, (shape, dtype) in self.shapes.items():
            tensor, (_, full) = stored.get(name), self.layouts.get(name, (None, shape))
            if tensor is not None and str(tensor.dtype) != dtype:
                problems.append(
                    f"{name} is {tensor.dtype} in the checkpoint, {dtype} in the network"
                )
            elif tensor is not None and not same_shape(tensor.shape, full):
                problems.append(
                    f"{name} is {tuple(tensor.shape)} in the checkpoint, {full} in the network"
                )
        problems += [f"{name} is not in the checkpoint" for name in self.missing(stored)]
        shown = "; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else "")
        return f"({counted(len(problems), 'tensor')}): {shown}" if problems else ""


def wanted_regions(weights: CheckpointView, target: LoadTarget, rank: int) -> dict[str, Region]:
    """Returns {tensor: region} for the tensors that this rank loads.

    Raises:
        LoadError: names every parameter that the checkpoint lacks or holds in another global shape
            or dtype (a counter may have another number of dimensions); another one if the
            checkpoint holds the model but no optimizer state.
        ConfigError: see ``check_order``.
    """
    missing = target.missing(weights.tensors)
    if (
        missing
        and target.of_model is not None
        and not any(name in target.of_model for name in missing)
    ):
        known = model_names(weights.tensors)
        if all(name in known or tensor.is_counter for name, tensor in weights.tensors.items()):
            raise LoadError(
                f"{weights.name} holds no optimizer state: its files of the optimizer are missing, "
                "or it was saved without (no_save_optim, save_optimizer: False). To take the "
                "weights alone and start at step 0, set no_load_optim: True (resume_training: "
                "False)"
            )
    if problems := target.misfits(weights.tensors):
        raise LoadError(
            f"the checkpoint {weights.name} does not fit the network {problems}. All shapes are "
            "those of whole tensors. Was the model configuration changed?"
            + target.proposal(missing)
        )
    regions: dict[str, Region] = {}
    cuts: dict[str, TensorLayout | None] = {}
    for name, (shape, _) in target.shapes.items():
        if name in weights.tensors:
            layout, full = target.layouts.get(name, (None, shape))
            stored = weights.tensors[name].shape
            regions[name] = (
                whole(stored)
                if layout is None or stored != full
                else held(layout, rank % layout.stage_size, full)
            )
            cuts[name] = layout
    check_order(weights, cuts)
    return regions


def holds_wanted(own: CheckpointView, target: LoadTarget, rank: int) -> bool:
    """Returns whether a rank has itself saved all that it takes, by the view of its own part
    (``view_of_own_part``): optional parameters, too, as another rank may have saved them."""
    try:
        regions = wanted_regions(own, replace(target, optional=()), rank)
    except (LoadError, ConfigError):
        return False
    return all(
        rank - own.tensors[name].first in cut.holders
        for name, region in regions.items()
        for cut in own.tensors[name].cuts(region)
    )


def bytes_of(weights: CheckpointView, regions: Mapping[str, Region]) -> int:
    """Returns the bytes of the regions."""
    return sum(
        elements(region) * DTYPES[weights.tensors[name].dtype].itemsize
        for name, region in regions.items()
    )


def read_regions(
    weights: CheckpointView,
    regions: Mapping[str, Region],
    workers: int = WORKERS,
    traffic: Traffic | None = None,
) -> dict[str, np.ndarray]:
    """Returns {name: array} of the regions. Pieces that are read as a whole are compared with their
    recorded checksums. Tensors that the selection has kept (``ReadCache.take_part``) are taken
    without a copy.

    Raises:
        CorruptFileError, LoadError, OSError.
    """
    memory = new_memory(
        {name: bytes_of(weights, {name: region}) for name, region in regions.items()}
    )
    return _read_all(weights, regions, workers, traffic or Traffic(), memory)


def check_tensors(
    weights: CheckpointView,
    names: Iterable[str],
    workers: int = WORKERS,
    traffic: Traffic | None = None,
) -> None:
    """Reads whole tensors and compares every slice with its recorded checksum. Keeps nothing.
    Raises the errors of ``read_regions``."""
    regions = {name: whole(weights.tensors[name].shape) for name in names}
    _read_all(weights, regions, workers, traffic or Traffic(), None)


class _Buffers(runtime.ThreadLocal):
    """Holds the buffers of a tile, for each thread its own: new memory costs more than the read
    into it."""

    def __init__(self) -> None:
        self.staging, self.tile = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)


def _read_all(
    weights: CheckpointView,
    regions: Mapping[str, Region],
    workers: int,
    traffic: Traffic,
    memory: dict[str, np.ndarray] | None,
) -> dict[str, np.ndarray]:
    """Reads regions in several threads, and compares the slices that are read as a whole with their
    recorded checksums. Returns {name: array}.

    Args:
        traffic: is increased by the bytes read and verified.
        memory: {name: bytes for the region}; None: what was compared is not kept.
    """
    files = OpenFiles(weights.storage, traffic)
    read = partial(_read, weights, files, _Buffers(), memory)
    try:
        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(regions, pool.map(read, regions, regions.values()), strict=True))
    finally:
        files.close()


def _read(
    weights: CheckpointView,
    files: OpenFiles,
    buffers: _Buffers,
    memory: dict[str, np.ndarray] | None,
    name: str,
    region: Region,
) -> np.ndarray | None:
    """Returns the array of one region; None if it is not kept."""
    tensor = weights.tensors[name]
    array = None
    dtype = bits_dtype(tensor.dtype)
    if memory is not None:
        array = memory.pop(name).view(dtype).reshape(shape_of(region))
    if memory is not None and (taken := _kept(weights, name, region)) is not None:
        place, array = taken
        files.compare(name, place, 0, memoryview(array.reshape(-1).view(np.uint8)))
        files.count(array.nbytes)
    else:
        for chunk in tensor.chunks(region, max(TILE // dtype.itemsize, 1)):
            if array is None:
                flat = buffers.tile[: elements(chunk) * dtype.itemsize].view(dtype)
                out = flat.reshape(shape_of(chunk))
            else:
                out = view(array, within(chunk, region))
            for row in gather(weights, files, name, chunk, out, buffers.staging):
                files.compare(*row)
    files.traffic.progress(bytes_of(weights, {name: region}))
    return None if array is None else array.view(DTYPES[tensor.dtype])


def _kept(
    weights: CheckpointView, name: str, region: Region
) -> tuple[SliceLocation, np.ndarray] | None:
    """Returns a region that is one whole slice, if its file was read and kept when it was verified;
    else None."""
    storage = weights.storage
    if not isinstance(storage, ReadCache):
        return None
    cut, *others = weights.tensors[name].cuts(region) or (None,)
    if others or not isinstance(cut, Cut) or not cut.stored == cut.part == region:
        return None
    place = weights.locate(name, cut)
    kept = storage.take_part(place.path, place.entry)
    return None if kept is None else (place, kept)


# ---- slices that several ranks need --------------------------------------------------------------


MAX_EXCHANGE_BYTES = 64 << 20  # bytes in one exchange

# (ranks, owner, bytes on the owner and None on the others, number of bytes) -> bytes, on each of
#     the ranks
Broadcast = Callable[[tuple[int, ...], int, np.ndarray | None, int], np.ndarray]


@dataclass(frozen=True)
class Exchange:
    """One broadcast from ``owner`` to ``ranks`` (ascending, with the owner): ``parts`` (name, first
    byte, end), together at most MAX_EXCHANGE_BYTES."""

    ranks: tuple[int, ...]
    owner: int
    parts: tuple[tuple[str, int, int], ...]

    @property
    def size(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)


def plan_reads(
    regions: Mapping[str, Region],
    layouts: Layouts,
    itemsizes: Mapping[str, int],
    rank: int,
) -> tuple[dict[str, Region], list[Exchange]]:
    """Returns the regions that this rank reads, and the exchanges in which it takes part, in the
    order in which all ranks run them. Every rank reads a counter that is stored with another number
    of dimensions than its layout has.

    Args:
        regions: {name: region} that this rank needs.
        layouts: {name: (layout, global shape)} of this job.
        itemsizes: {name: bytes of an element}.
    """
    held = {
        name: (*layouts[name], itemsizes[name])
        for name, region in regions.items()
        if name in layouts
        and layouts[name][0].copies > 1
        and len(region) == len(layouts[name][1])
        and elements(region)
    }
    if not held:
        return dict(regions), []
    size = next(iter(held.values()))[0].stage_size
    first, table = rank - rank % size, shares(held, size)
    groups: dict[tuple[tuple[int, ...], int], list[str]] = {}
    mine = {name: region for name, region in regions.items() if name not in held}
    for name in sorted(held):
        layout, full, _ = held[name]
        local = holders_with(layout, full, rank - first)
        owner = first + next(holder for holder in local if name in table[holder])
        groups.setdefault((tuple(first + holder for holder in local), owner), []).append(name)
        if owner == rank:
            mine[name] = regions[name]
    return mine, [
        exchange
        for (ranks, owner), names in sorted(groups.items())
        for exchange in _portions(ranks, owner, names, regions, itemsizes)
    ]


def _portions(
    ranks: tuple[int, ...],
    owner: int,
    names: list[str],
    regions: Mapping[str, Region],
    itemsizes: Mapping[str, int],
) -> Iterator[Exchange]:
    parts: list[tuple[str, int, int]] = []
    left = MAX_EXCHANGE_BYTES
    for name in names:
        start, end = 0, elements(regions[name]) * itemsizes[name]
        while start < end:
            stop = min(end, start + left)
            parts.append((name, start, stop))
            start, left = stop, left - (stop - start)
            if not left:
                yield Exchange(ranks, owner, tuple(parts))
                parts, left = [], MAX_EXCHANGE_BYTES
    if parts:
        yield Exchange(ranks, owner, tuple(parts))


def exchange_slices(
    arrays: dict[str, np.ndarray],
    exchanges: list[Exchange],
    regions: Mapping[str, Region],
    dtypes: Mapping[str, str],
    rank: int,
    broadcast: Broadcast,
) -> int:
    """Adds to ``arrays`` the slices that other ranks read. Returns the bytes received. This is a
    collective: all ranks must call it, so they must agree on earlier failures before."""
    received, flat = 0, {}
    for exchange in exchanges:
        own = exchange.owner == rank
        for name, start, _ in exchange.parts:
            if not start:
                size = elements(regions[name]) * DTYPES[dtypes[name]].itemsize
                flat[name] = (
                    arrays[name].reshape(-1).view(np.uint8) if own else np.empty(size, np.uint8)
                )
        pieces = [flat[name][start:stop] for name, start, stop in exchange.parts]
        found = broadcast(
            exchange.ranks, exchange.owner, np.concatenate(pieces) if own else None, exchange.size
        )
        if own:
            continue
        position = 0
        for piece in pieces:
            piece[:] = found[position : position + len(piece)]
            position += len(piece)
        received += position
    for name in flat.keys() - arrays.keys():
        arrays[name] = flat[name].view(DTYPES[dtypes[name]]).reshape(shape_of(regions[name]))
    return received
