"""Reads into memory exactly the regions that one rank of a training needs, from a checkpoint of any layout.

    regions = wanted_regions(weights, wanted, layouts, rank)
    arrays = read_regions(weights, regions)
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mindresume import runtime
from mindresume.errors import LoadError
from mindresume.formatting import counted
from mindresume.model.layout import TensorLayout, same_shape
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.checkpoint_view import CheckpointView, PieceLocation
from mindresume.reshard.direct_engine import TILE, SourceChecksums, Traffic
from mindresume.reshard.element_order import check_order
from mindresume.reshard.geometry import Region, blocks, elements, held, shape_of, view, whole
from mindresume.reshard.range_reader import ComposedCut, OpenFiles, bits_dtype, gather
from mindresume.reshard.target_files import model_names
from mindresume.settings import allow_text
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files.header import DTYPES
from mindresume.tensor_files.whole_file import new_memory

WORKERS = 4                 # threads: reading mostly waits


def wanted_regions(weights: CheckpointView, wanted: Mapping[str, tuple[tuple[int, ...], str]],
                   layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]], rank: int,
                   may_miss: Callable[[str], bool] = may_be_absent, allow: bool = False) -> dict[str, Region]:
    """Returns {tensor: region} for the tensors that this rank loads.

    Args:
        wanted: {name: (shape, dtype)} of the parameters of this rank.
        layouts: {name: (layout, global shape)} of those that are cut.
        may_miss: whether the checkpoint may lack a parameter.
        allow: whether the error says how to load without the missing parameters.

    Raises:
        LoadError: names every parameter that the checkpoint lacks or holds in another global shape or dtype. A counter may have
            another number of dimensions.
        ConfigError: see ``check_order``.
    """
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
        if name in regions:
            check_order(weights, name, layout)
    if problems:
        raise LoadError(f"the checkpoint {weights.name} does not fit the network ({counted(len(problems), 'tensor')}): "
                        + "; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else "")
                        + ". All shapes are those of whole tensors. Was the model configuration changed?"
                        + (allow_text(missing) if allow and missing else ""))
    return regions


def resume_regions(weights: CheckpointView, wanted: Mapping[str, tuple[tuple[int, ...], str]],
                   layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]], rank: int, may_miss: Callable[[str], bool],
                   of_model: Collection[str]) -> dict[str, Region]:
    """Returns ``wanted_regions`` for the model and its optimizer. ``of_model``: the parameters of the model.

    Raises:
        LoadError: The same as ``wanted_regions``; another one if the checkpoint holds the model but no optimizer state.
    """
    absent = [name for name in wanted if name not in weights.tensors and not may_miss(name)]
    if absent and not any(name in of_model for name in absent):
        known = model_names(weights.tensors)
        if all(name in known or tensor.is_counter for name, tensor in weights.tensors.items()):
            raise LoadError(f"{weights.name} holds no optimizer state: its files of the optimizer are missing, or it was saved "
                            f"without (no_save_optim, save_optimizer: False). To take the weights alone and start at step 0, set "
                            f"no_load_optim: True (resume_training: False)")
    return wanted_regions(weights, wanted, layouts, rank, may_miss, allow=True)


def bytes_of(weights: CheckpointView, regions: Mapping[str, Region]) -> int:
    """Returns the bytes of the regions."""
    return sum(elements(region) * DTYPES[weights.tensors[name].dtype].itemsize for name, region in regions.items())


def read_regions(weights: CheckpointView, regions: Mapping[str, Region], workers: int = WORKERS, traffic: Traffic | None = None
                 ) -> dict[str, np.ndarray]:
    """Returns {name: array} of the regions. Pieces that are read as a whole are compared with their recorded checksums. Tensors
    that the selection has kept (``ReadCache.take_part``) are taken without a copy.

    Raises:
        CorruptFileError, LoadError, OSError.
    """
    room = ThreadBuffer()
    new = new_memory({name: bytes_of(weights, {name: region}) for name, region in regions.items()})

    def read(files: OpenFiles, name: str, region: Region) -> tuple[np.ndarray, int]:
        dtype = bits_dtype(weights.tensors[name].dtype)
        out, staging, sources = new.pop(name).view(dtype).reshape(shape_of(region)), room.buffer, SourceChecksums()
        if (found := _take_kept(weights, name, region)) is not None:
            place, kept = found
            sources.hash(name, place, 0, memoryview(kept.reshape(-1).view(np.uint8)))
            files.count(kept.nbytes)
            return kept, sources.verified
        for block in blocks(out.shape, max(TILE // dtype.itemsize, 1)):
            part = tuple((low + start, low + stop) for (start, stop), (low, _) in zip(block, region, strict=True))
            _gather_and_hash(weights, files, name, part, view(out, block), staging, sources)
        return out.view(DTYPES[weights.tensors[name].dtype]), sources.verified
    return _each(weights, regions, read, workers, traffic or Traffic())


def _take_kept(weights: CheckpointView, name: str, region: Region) -> tuple[PieceLocation, np.ndarray] | None:
    """Returns a region that is one whole piece, if its file was read and kept when it was verified; else None."""
    if not isinstance(weights.storage, ReadCache):
        return None
    cuts = weights.tensors[name].cuts(region)
    if len(cuts) != 1 or isinstance(cuts[0], ComposedCut) or not cuts[0].piece == cuts[0].part == region:
        return None
    place = weights.locate(name, cuts[0])
    kept = weights.storage.take_part(place.path, place.entry)
    return None if kept is None else (place, kept)


def check_tensors(weights: CheckpointView, names: Iterable[str], workers: int = WORKERS, traffic: Traffic | None = None) -> None:
    """Reads whole tensors and compares every piece with its recorded checksum. Keeps nothing. Raises the errors of
    ``read_regions``."""
    buffers, room = ThreadBuffer(), ThreadBuffer()

    def read(files: OpenFiles, name: str, region: Region) -> tuple[np.ndarray, int]:
        dtype, staging, sources = bits_dtype(weights.tensors[name].dtype), room.buffer, SourceChecksums()
        most = max(TILE // dtype.itemsize, 1)
        buffer = buffers.buffer[:most * dtype.itemsize].view(dtype)
        for block in blocks(shape_of(region), most):
            out = buffer[:elements(block)].reshape(shape_of(block))
            _gather_and_hash(weights, files, name, block, out, staging, sources)
        return buffer[:0], sources.verified
    _each(weights, {name: whole(weights.tensors[name].shape) for name in names}, read, workers, traffic or Traffic())


class ThreadBuffer(runtime.ThreadLocal):
    """Holds one buffer of a tile per thread. It is reused, because new memory costs more than the read into it."""

    def __init__(self) -> None:
        self.buffer = np.empty(TILE, np.uint8)


def _gather_and_hash(weights: CheckpointView, files: OpenFiles, name: str, part: Region, out: np.ndarray, staging: np.ndarray,
          sources: SourceChecksums) -> None:
    seen: list[tuple[str, PieceLocation, int, memoryview]] = []
    gather(weights, files, name, part, out, staging, lambda *row: seen.append(row))
    for row in seen:
        sources.hash(*row)


def _each(weights: CheckpointView, regions: Mapping[str, Region],
          read: Callable[[OpenFiles, str, Region], tuple[np.ndarray, int]], workers: int, traffic: Traffic
          ) -> dict[str, np.ndarray]:
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
