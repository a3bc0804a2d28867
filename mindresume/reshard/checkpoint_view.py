"""Views a checkpoint of any format as tensors in global shape, and locates each slice of a tensor.

    # rank folders, with records or with a strategy
    weights = view_of_rank_folders(storage, root, candidate, strategy)
    weights = view_of_consolidated(storage, read_consolidated(storage, path))   # uncut
    for cut in weights.tensors["embedding.weight"].cuts(region):
        # rank, file, byte ranges, checksum of that slice
        location = weights.locate("embedding.weight", cut)

Only headers and records are read here. A slice is read from the first of its ranks whose file holds
it, so redundancy removal and missing files do no harm while one copy is left. A rank whose verified
file is still in the memory of this process comes first.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindresume.errors import CorruptFileError, LoadError
from mindresume.formats import Candidate
from mindresume.formats.consolidated import ConsolidatedWeights
from mindresume.formats.records import RecordFolder
from mindresume.formatting import listed
from mindresume.model.layout import Region, TensorLayout, is_scalar
from mindresume.model.manifest import Details, Record
from mindresume.reshard.geometry import Cut, chunks, cuts, shape_of
from mindresume.storage.interface import Storage
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import Header, TensorEntry, read_header
from mindresume.tensor_files.header import DTYPES


@dataclass(frozen=True)
class Tensor:
    """Describes one tensor in global ``shape``, in elements. ``first``: the first rank of the
    pipeline stage that holds it. ``layout`` None: it is not cut, and each of ``copies`` ranks from
    ``first`` on holds all of it. ``other_stages``: the first ranks of further stages that hold
    it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: TensorLayout | None = None
    first: int = 0
    copies: int = 1
    other_stages: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def is_counter(self) -> bool:
        """Whether it is a counter of the training: no strategy names it, and it is alike on all
        ranks."""
        return self.layout is None and is_scalar(self.shape)

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages that hold it, ascending; none if it is not cut."""
        if self.layout is None:
            return ()
        return tuple(
            sorted(first // self.layout.stage_size for first in (self.first, *self.other_stages))
        )

    def chunks(self, region: Region, most: int) -> Iterator[Region]:
        """Yields the chunks in which ``region`` is read, of at most ``most`` elements each (at
        least one)."""
        return chunks(region, most)

    def cuts(self, region: Region) -> tuple[Cut, ...]:
        """Returns the slices that cover ``region``, each once."""
        found = cuts(self.layout, self.shape, region)
        return (
            found
            if self.layout
            else tuple(cut._replace(holders=range(self.copies)) for cut in found)
        )


class SliceLocation(NamedTuple):
    """Locates one slice of a tensor: all of ``entry`` in the file ``path`` of ``rank``.
    ``checksum``: as recorded, else None."""

    rank: int
    path: str
    entry: TensorEntry
    checksum: str | None


@dataclass
class CheckpointView:
    """Gives access to the tensors of a checkpoint.

    Attributes:
        name: for messages.
        files: {rank: paths of its files}; an iteration folder has several of a rank. Empty for
            consolidated weights.
        places: {tensor: {rank: path of the file that holds its slice}}; of others it is the first
            file of the rank.
        checksums: of consolidated weights, as far as they are recorded.
        candidate: the saved step, whose records are read; None: there are none.
        headers: by path, as far as they were read.
        records: by rank, likewise.
        arrangement: how the network orders the elements within the tensors (``tensor_checks``);
            empty if unknown.
        split: the layouts tell optimizer shards from tensor parallelism; those of a
            ``metadata.json`` do not.
        memory: keeps files in memory alive.
    """

    storage: Storage
    name: str
    tensors: Mapping[str, Tensor]
    files: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    places: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    candidate: Candidate | None = None
    world_size: int = 1
    headers: dict[str, Header | None] = field(default_factory=dict)
    records: dict[int, tuple[Record, Details]] = field(default_factory=dict)
    arrangement: Mapping[str, bool] = field(default_factory=dict)
    split: bool = True
    memory: Any = None
    # {slice: ranks whose files are in memory}
    _kept: dict[tuple[str, Region, int], list[int]] = field(default_factory=dict)

    @property
    def is_consolidated(self) -> bool:
        """Whether it views consolidated weights, which are not cut and belong to no rank."""
        return not self.files

    def path_of(self, rank: int, name: str) -> str | None:
        """Returns the path of the file that holds a rank's slice of a tensor; None if there is
        none."""
        return (
            self.places[name].get(rank)
            if name in self.places
            else next(iter(self.files.get(rank, ())), None)
        )

    def details(self, rank: int) -> Details | None:
        """Returns the details in the record of a rank, which is read once; None if it has none."""
        candidate = self.candidate
        if candidate is None or candidate.records_dir is None or rank not in candidate.files:
            return None
        return RecordFolder(self.storage, candidate.records_dir, self.records).read(rank)[1]

    def read(self, rank: int) -> None:
        """Reads the headers and the record of a rank, if they were not read. Any thread."""
        self.entries(rank)
        self.details(rank)

    @property
    def format(self) -> str:
        """Format of its files."""
        return next(header.format for header in self.headers.values() if header)

    def locate(self, name: str, cut: Cut, first: int | None = None) -> SliceLocation:
        """Returns where a slice lies; with ``first`` in the pipeline stage that begins with this
        rank, instead of the first that holds the tensor. CorruptFileError if the file holds another
        dtype or shape; LoadError if no holder has the slice."""
        tensor = self.tensors[name]
        asked: dict[int, None] = {}
        start = tensor.first if first is None else first
        ranks: Iterable[int] = (start + holder for holder in cut.holders)
        # copies are alike: no byte is read again
        if isinstance(self.storage, ReadCache) and len(cut.holders) > 1:
            ranks = itertools.chain(self._ranks_in_memory(name, cut, start), ranks)
        for rank in ranks:
            path = self.path_of(rank, name)
            header = self.header(path) if path is not None else None
            entry = header.tensors.get(name) if header else None
            if entry is None:
                asked[rank] = None
                continue
            expected = shape_of(cut.stored)
            if entry.dtype != tensor.dtype or entry.shape != expected:
                raise CorruptFileError(
                    path,
                    f"rank {rank} holds {name} as {entry.dtype} of shape {entry.shape}, expected "
                    f"{tensor.dtype} of shape {expected}, a part of {tensor.shape}: the strategy "
                    "is not that of these weights, or the file is of another job",
                    tensor=name,
                )
            details = self.details(rank)
            row = details.tensors.get(name) if details else None
            return SliceLocation(
                rank, path, entry, row.checksum if row else self.checksums.get(name)
            )
        raise LoadError(
            f"{self.name}: {name} {cut.stored} of {tensor.shape} is nowhere: it should be in the "
            f"file of rank {listed([*asked])}, which {'has' if len(asked) == 1 else 'have'} no "
            "such tensor or no file"
        )

    def _ranks_in_memory(self, name: str, cut: Cut, start: int) -> list[int]:
        """Returns the ranks of the stage that begins with rank ``start`` that hold a slice in files
        kept in memory."""
        key = name, cut.stored, start
        if key not in self._kept:
            self._kept[key] = [
                rank
                for rank in (start + holder for holder in cut.holders)
                if (path := self.path_of(rank, name)) is not None and self.storage.keeps(path)
            ]
        return self._kept[key]

    def entries(self, rank: int) -> dict[str, TensorEntry] | None:
        """Returns all tensors in the files of a rank; None if no file of it is there."""
        headers = [header for path in self.files.get(rank, ()) if (header := self.header(path))]
        return (
            {name: entry for header in headers for name, entry in header.tensors.items()}
            if headers
            else None
        )

    def header(self, path: str) -> Header | None:
        """Returns the header of a file, None if there is no such file. Each is read once."""
        if path not in self.headers:
            try:
                with self.storage.open(path) as file:
                    self.headers[path] = read_header(file, path)
            except FileNotFoundError:
                self.headers[path] = None
        return self.headers[path]


def view_of_consolidated(storage: Storage, weights: ConsolidatedWeights) -> CheckpointView:
    """Views consolidated weights. LoadError if one of them is a text."""
    places = {name: {0: os.path.join(weights.root, file)} for name, file in weights.tensors.items()}
    entries = {name: weights.headers[file].tensors[name] for name, file in weights.tensors.items()}
    texts = [name for name, entry in entries.items() if entry.dtype not in DTYPES]
    if texts:
        raise LoadError(
            f"{places[texts[0]][0]}: {texts[0]} is a text, not a tensor; it can be part of no "
            "other layout"
        )
    tensors = {name: Tensor(name, entry.dtype, entry.shape) for name, entry in entries.items()}
    headers = {os.path.join(weights.root, file): header for file, header in weights.headers.items()}
    return CheckpointView(storage, weights.root, tensors, places=places, headers=dict(headers))
