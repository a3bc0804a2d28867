"""Reads into memory exactly the regions that one rank of a training needs, from a checkpoint of any layout.

    regions = wanted_regions(weights, LoadTarget(shapes, layouts), rank)
    arrays = read_regions(weights, regions)
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindresume import runtime
from mindresume.errors import LoadError
from mindresume.formatting import counted
from mindresume.model.layout import TensorLayout, same_shape
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.checkpoint_view import CheckpointView, PieceLocation
from mindresume.reshard.conversion_plan import model_names
from mindresume.reshard.direct_engine import TILE, SourceChecksums, Traffic
from mindresume.reshard.geometry import Region, elements, held, shape_of, view, whole, within
from mindresume.reshard.range_reader import ComposedCut, OpenFiles, bits_dtype, gather
from mindresume.reshard.tensor_checks import check_order
from mindresume.settings import allow_text
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files.header import DTYPES
from mindresume.tensor_files.whole_file import new_memory

WORKERS = 4                 # threads: reading mostly waits

Shapes = Mapping[str, tuple[tuple[int, ...], str]]                          # {name: (shape, dtype)}
Layouts = Mapping[str, tuple[TensorLayout, tuple[int, ...]]]                # {name: (layout, global shape)}


@dataclass(frozen=True)
class LoadTarget:
    """Describes what one rank of a training takes from a checkpoint.

    Attributes:
        shapes: the parameters of this rank.
        layouts: of those that are cut.
        optional: parameters that the checkpoint may lack, besides those that ``may_be_absent``.
        of_model: the parameters of the model, if the others are those of its optimizer; None: they are not told apart.
        proposes: whether an error says how to load without the missing parameters.
        names: {name in the checkpoint: parameter}, where they differ. All else has names of the checkpoint.
        dtypes: {name: dtype of the parameter}, where the values of the checkpoint are converted.
    """
    shapes: Shapes
    layouts: Layouts
    optional: Collection[str] = ()
    of_model: Collection[str] | None = None
    proposes: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def parameter(self, name: str) -> str:
        """Returns the name of the parameter that takes a tensor."""
        return self.names.get(name, name)

    def missing(self, stored: Collection[str]) -> list[str]:
        """Returns the parameters that ``stored`` lacks and must not lack."""
        return [name for name in self.shapes if name not in stored and name not in self.optional and not may_be_absent(name)]

    def misfits(self, stored: Mapping[str, Any]) -> str:
        """Compares tensors (``dtype``, ``shape``) with the parameters. Returns what does not fit or is missing, as text."""
        problems = []
        for name, (shape, dtype) in self.shapes.items():
            tensor, (_, full) = stored.get(name), self.layouts.get(name, (None, shape))
            if tensor is not None and str(tensor.dtype) != dtype:
                problems.append(f"{name} is {tensor.dtype} in the checkpoint, {dtype} in the network")
            elif tensor is not None and not same_shape(tensor.shape, full):
                problems.append(f"{name} is {tuple(tensor.shape)} in the checkpoint, {full} in the network")
        problems += [f"{name} is not in the checkpoint" for name in self.missing(stored)]
        shown = "; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else "")
        return f"({counted(len(problems), 'tensor')}): {shown}" if problems else ""


def wanted_regions(weights: CheckpointView, target: LoadTarget, rank: int) -> dict[str, Region]:
    """Returns {tensor: region} for the tensors that this rank loads.

    Raises:
        LoadError: names every parameter that the checkpoint lacks or holds in another global shape or dtype (a counter may have
            another number of dimensions); another one if the checkpoint holds the model but no optimizer state.
        ConfigError: see ``check_order``.
    """
    missing = target.missing(weights.tensors)
    if missing and target.of_model is not None and not any(name in target.of_model for name in missing):
        known = model_names(weights.tensors)
        if all(name in known or tensor.is_counter for name, tensor in weights.tensors.items()):
            raise LoadError(f"{weights.name} holds no optimizer state: its files of the optimizer are missing, or it was saved "
                            f"without (no_save_optim, save_optimizer: False). To take the weights alone and start at step 0, set "
                            f"no_load_optim: True (resume_training: False)")
    if problems := target.misfits(weights.tensors):
        raise LoadError(f"the checkpoint {weights.name} does not fit the network {problems}. All shapes are those of whole "
                        f"tensors. Was the model configuration changed?"
                        + (allow_text(missing) if missing and target.proposes else ""))
    regions: dict[str, Region] = {}
    for name, (shape, _) in target.shapes.items():
        if name in weights.tensors:
            layout, full = target.layouts.get(name, (None, shape))
            stored = weights.tensors[name].shape
            regions[name] = whole(stored) if layout is None or stored != full else held(layout, rank % layout.stage_size, full)
            check_order(weights, name, layout)
    return regions


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
        tensor, staging, sources = weights.tensors[name], room.buffer, SourceChecksums()
        dtype = bits_dtype(tensor.dtype)
        out = new.pop(name).view(dtype).reshape(shape_of(region))
        if (found := _take_kept(weights, name, region)) is not None:
            place, kept = found
            sources.hash(name, place, 0, memoryview(kept.reshape(-1).view(np.uint8)))
            files.count(kept.nbytes)
            return kept, sources.verified
        for part in tensor.tiles(region, max(TILE // dtype.itemsize, 1)):
            _gather_and_hash(weights, files, name, part, view(out, within(part, region)), staging, sources)
        return out.view(DTYPES[tensor.dtype]), sources.verified
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
        for part in weights.tensors[name].tiles(region, most):
            out = buffer[:elements(part)].reshape(shape_of(part))
            _gather_and_hash(weights, files, name, part, out, staging, sources)
        return buffer[:0], sources.verified
    _each(weights, {name: whole(weights.tensors[name].shape) for name in names}, read, workers, traffic or Traffic())


class ThreadBuffer(runtime.ThreadLocal):
    """Holds one buffer of a tile per thread. It is reused, because new memory costs more than the read into it."""

    def __init__(self) -> None:
        self.buffer = np.empty(TILE, np.uint8)


def _gather_and_hash(weights: CheckpointView, files: OpenFiles, name: str, part: Region, out: np.ndarray, staging: np.ndarray,
          sources: SourceChecksums) -> None:
    for row in gather(weights, files, name, part, out, staging):
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
