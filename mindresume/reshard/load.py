"""What one rank of a training needs of a checkpoint of any layout, read into memory: its own regions and no byte more.

    regions = wanted_regions(weights, wanted, layouts, rank)
    arrays = read_regions(weights, regions)
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mindresume.errors import LoadError
from mindresume.files.model import DTYPES
from mindresume.layout import TensorLayout, same_shape
from mindresume.reshard.direct import TILE, Sources, Traffic
from mindresume.reshard.geometry import Region, blocks, elements, held, shape_of, view, whole
from mindresume.reshard.reading import OpenFiles, gather, plain
from mindresume.reshard.weights import Place, Weights
from mindresume.settings import allow_text
from mindresume.state import is_transient

WORKERS = 4                 # threads: reading is waiting


def wanted_regions(weights: Weights, wanted: Mapping[str, tuple[tuple[int, ...], str]],
                   layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]], rank: int,
                   may_miss: Callable[[str], bool] = is_transient, allow: bool = False) -> dict[str, Region]:
    """Which region of which tensor this rank loads. ``wanted``: {name: (shape, dtype)} of its parameters; ``layouts``: {name:
    (layout, global shape)} of those that are cut. LoadError that names every parameter that the checkpoint lacks or holds in
    another global shape or dtype; with ``allow`` it says how to go on without those that are lacking. A counter may have another
    number of dimensions."""
    regions: dict[str, Region] = {}
    problems, missing = [], []
    for name, (shape, dtype) in wanted.items():
        tensor = weights.tensors.get(name)
        layout, full = layouts.get(name, (None, shape))
        if tensor is None:
            if not may_miss(name):
                problems.append(f"{name} is not in the checkpoint")
                missing.append(name)
        elif tensor.dtype != dtype:
            problems.append(f"{name} is {tensor.dtype} in the checkpoint, {dtype} in the network")
        elif not same_shape(tensor.shape, full):
            problems.append(f"{name} is {tensor.shape} in the checkpoint, {full} in the network")
        elif layout is None or tensor.shape != full:
            regions[name] = whole(tensor.shape)
        else:
            regions[name] = held(layout, rank % layout.stage_size, full)
    if problems:
        raise LoadError(f"the checkpoint {weights.name} does not fit the network ({len(problems)} tensors): "
                        + "; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else "")
                        + ". All shapes are those of whole tensors. Was the model configuration changed?"
                        + (allow_text(missing) if allow and missing else ""))
    return regions


def bytes_of(weights: Weights, regions: Mapping[str, Region]) -> int:
    return sum(elements(region) * DTYPES[weights.tensors[name].dtype].itemsize for name, region in regions.items())


def read_regions(weights: Weights, regions: Mapping[str, Region], workers: int = WORKERS, traffic: Traffic | None = None
                 ) -> dict[str, np.ndarray]:
    """{name: array} of the regions. A piece that is needed whole is compared with its recorded checksum. DamagedFileError,
    LoadError or OSError."""
    room = Room()

    def read(files: OpenFiles, name: str, region: Region) -> tuple[np.ndarray, int]:
        dtype = plain(weights.tensors[name].dtype)
        out, staging, sources = np.empty(shape_of(region), dtype), room.of_thread, Sources()
        for block in blocks(out.shape, max(TILE // dtype.itemsize, 1)):
            part = tuple((low + start, low + stop) for (start, stop), (low, _) in zip(block, region, strict=True))
            _pass(weights, files, name, part, view(out, block), staging, sources)
        return out.view(DTYPES[weights.tensors[name].dtype]), sources.verified
    return _each(weights, regions, read, workers, traffic or Traffic())


def check_tensors(weights: Weights, names: Iterable[str], workers: int = WORKERS, traffic: Traffic | None = None) -> None:
    """Reads whole tensors and compares every piece with its recorded checksum; nothing is kept. Errors as of
    ``read_regions``."""
    buffers, room = Room(), Room()

    def read(files: OpenFiles, name: str, region: Region) -> tuple[np.ndarray, int]:
        dtype, staging, sources = plain(weights.tensors[name].dtype), room.of_thread, Sources()
        most = max(TILE // dtype.itemsize, 1)
        buffer = buffers.of_thread[:most * dtype.itemsize].view(dtype)
        for block in blocks(shape_of(region), most):
            out = buffer[:elements(block)].reshape(shape_of(block))
            _pass(weights, files, name, block, out, staging, sources)
        return buffer[:0], sources.verified
    _each(weights, {name: whole(weights.tensors[name].shape) for name in names}, read, workers, traffic or Traffic())


class Room(threading.local):
    """A buffer of a tile a thread, used again: memory that is new costs more than what is read into it."""

    def __init__(self) -> None:
        self.of_thread = np.empty(TILE, np.uint8)


def _pass(weights: Weights, files: OpenFiles, name: str, part: Region, out: np.ndarray, staging: np.ndarray, sources: Sources
          ) -> None:
    seen: list[tuple[str, Place, int, memoryview]] = []
    gather(weights, files, name, part, out, staging, lambda *row: seen.append(row))
    for row in seen:
        sources.hash(*row)


def _each(weights: Weights, regions: Mapping[str, Region], read: Callable[[OpenFiles, str, Region], tuple[np.ndarray, int]],
          workers: int, traffic: Traffic) -> dict[str, np.ndarray]:
    files = OpenFiles(weights.storage)

    def one(item: tuple[str, Region]) -> tuple[np.ndarray, int]:
        found = read(files, *item)
        traffic.progress(bytes_of(weights, dict([item])))
        return found
    try:
        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(one, regions.items()))
    finally:
        files.close()
    traffic.read += files.bytes_read
    traffic.verified += sum(verified for _, verified in found)
    return {name: array for name, (array, _) in zip(regions, found, strict=True)}
