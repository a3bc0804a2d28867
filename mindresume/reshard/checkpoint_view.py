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

Before tensors are taken, three things must hold: none is missing, the order of their elements does
not depend on how they are cut, and copies in several pipeline stages are alike.

    # refuses another number of slices if the meaning of the elements depends on it
    check_order(weights, {name: layout})
    check_replicas(weights)             # by the recorded checksums; others are not compared
    check_replicas(weights, read=True)  # tensors without a recorded checksum are read
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mindresume.errors import ConfigError, CorruptFileError, LoadError
from mindresume.formats import Candidate
from mindresume.formats.consolidated import (
    ConsolidatedWeights,
    ConversionManifest,
    check_contents,
    conversion_manifest_of,
    read_consolidated,
)
from mindresume.formats.huggingface import ATTENTION_KEY, FC1, MLP_KEY, QKV
from mindresume.formats.records import RecordFolder
from mindresume.formats.weight_files import SCALARS
from mindresume.formatting import listed
from mindresume.model.layout import (
    Cut,
    Region,
    TensorLayout,
    chunks,
    cuts,
    is_scalar,
    shape_of,
    whole,
)
from mindresume.model.manifest import Details, Record, TensorRecord
from mindresume.model.training_state import may_be_absent
from mindresume.storage import Storage, parallel
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import Header, TensorEntry, read_header, tensor_checksum
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
        arrangement: how the network orders the elements within the tensors (``check_order``);
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

    def recorded(self, rank: int, name: str) -> TensorRecord | None:
        """Returns what the record of a rank says of a tensor; None if nothing does."""
        details = self.details(rank)
        return details.tensors.get(name) if details else None

    def check(self) -> None:
        """Reads the headers and records of the ranks that are read first, side by side, and looks
        for every slice of every tensor. Raises the errors of ``locate`` and ``check_replicas``."""
        first = {
            start + cut.holders[0]
            for tensor in self.tensors.values()
            for cut in tensor.cuts(whole(tensor.shape))
            for start in (tensor.first, *tensor.other_stages)
        }
        parallel(self.storage, self.entries, sorted(first))
        parallel(self.storage, self.details, sorted(first))
        for tensor in self.tensors.values():
            for cut in tensor.cuts(whole(tensor.shape)):
                self.locate(tensor.name, cut)
        check_replicas(self)

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
            row = self.recorded(rank, name)
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


# ---- consolidated weights ------------------------------------------------------------------------


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


def read_weights(
    storage: Storage, path: str
) -> tuple[ConsolidatedWeights, CheckpointView, ConversionManifest | None]:
    """Reads consolidated weights of MindSpore or Hugging Face, a folder or a file. Returns them, a
    view of them, which compares what it reads with the checksums of the manifest, and the manifest;
    None if mindresume did not write them. Raises the errors of ``read_consolidated``, and
    CorruptFileError if other tensors were written."""
    found = read_consolidated(storage, path)
    view, made = view_of_consolidated(storage, found), conversion_manifest_of(storage, path)
    if made is not None:
        check_contents(made, found)
        view = replace(view, checksums=made.tensors)
        view.arrangement = dict(made.arrangement)
    return found, view, made


# ---- names: adam_m.layers.0.weight is layers.0.weight in the family adam_m -----------------------


def missing_parameters(named: Collection[str], present: Collection[str]) -> list[str]:
    """Returns the parameters that a strategy names (``named``) and a checkpoint (``present``)
    lacks, sorted. Leaves out parameters that may be absent, and families of which the checkpoint
    has no parameter: the moments, if only weights were saved."""
    families = {family for name in present for family, rest in prefix_splits(name) if rest in named}
    return sorted(
        name
        for name in named
        if name not in present
        and not may_be_absent(name)
        and not any(
            rest in present and family not in families for family, rest in prefix_splits(name)
        )
    )


def prefix_splits(name: str) -> list[tuple[str, str]]:
    """Returns every way to split a name at a dot, such as ("adam_m", "layers.0.weight")."""
    parts = name.split(".")
    return [(".".join(parts[:i]), ".".join(parts[i:])) for i in range(1, len(parts))]


def model_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """Returns the tensors of the network: no counters, and no optimizer states (named ``adam_m.``
    and the name of a parameter)."""
    return {
        name
        for name, tensor in tensors.items()
        if not tensor.is_counter
        and name not in SCALARS
        and not any(rest in tensors for _, rest in prefix_splits(name))
    }


# ---- the order of the elements -------------------------------------------------------------------

# With ``use_contiguous_weight_layout_attention: True`` each rank splits its own slice of linear_qkv
# into [q, k, v], and with ``use_interleaved_weight_layout_mlp: False`` its own slice of linear_fc1
# into [gate, up]. With another number of slices, shapes and bytes would fit, and the network would
# compute another function.
#
# A ``metadata.json``, and a record of Checkpoint 2.0 by mindresume 0.1.0, does not tell the
# optimizer shards of such a tensor from its tensor parallelism: data parallel 2 with optimizer
# shards and tensor parallel 2 give each rank the same rows. Both cut dimension 0, but the tensor
# behind it, linear_proj or linear_fc2, is cut by tensor parallelism along dimension 1, which no
# optimizer shard cuts: so that one tells.

# tensors, the key, its value that makes them contiguous, the tensors behind them
_CONTIGUOUS = ((QKV, ATTENTION_KEY, True, "linear_proj"), (FC1, MLP_KEY, False, "linear_fc2"))


def depends_on_slices(arrangement: Mapping[str, bool]) -> bool:
    """Returns whether some tensor of a checkpoint with this ``arrangement`` must not be cut in
    another way."""
    return any(arrangement.get(key) is contiguous for _, key, contiguous, _ in _CONTIGUOUS)


def computed_slices(layout: TensorLayout | None) -> int:
    """Returns into how many slices computations cut dimension 0. An optimizer shard does not count:
    it is gathered first."""
    return (
        math.prod(layout.device_matrix[-1 - axis] for axis in layout.axes[0])
        if layout is not None and layout.axes
        else 1
    )


def check_order(weights: CheckpointView, wanted: Mapping[str, TensorLayout | None]) -> None:
    """Compares how tensors are cut in a checkpoint and where they shall be loaded or written.

    Args:
        weights: the checkpoint. Without a key in its ``arrangement`` nothing is known, and nothing
            refused.
        wanted: {name: layout there}; names of optimizer states contain that of their parameter.
    Raises:
        ConfigError: The numbers of slices differ, or are unknown, and the order of the elements
            depends on them.
    """
    for name, (part, key, contiguous, behind) in itertools.product(wanted, _CONTIGUOUS):
        if weights.arrangement.get(key) is not contiguous or f".{part}." not in name:
            continue
        stored = _computed_by(weights, name, part, behind)
        slices = computed_slices(wanted[name])
        if stored == slices:
            continue
        reason = (
            f"{weights.name}: {name} was trained with {key}: {contiguous}, so the order of its "
            f"elements depends on tensor parallelism. "
        )
        if stored is None:
            raise ConfigError(
                f"{reason}It has {computed_slices(weights.tensors[name].layout)} pieces there, "
                "optimizer shards perhaps among them: metadata.json does not tell, and no "
                f"{behind} beside it does. Only mindformers alone can continue that job"
            )
        raise ConfigError(
            f"{reason}It is cut into {stored} there and cannot be cut into {slices}: keep the "
            f"tensor parallelism of that job"
        )


def _computed_by(weights: CheckpointView, name: str, part: str, behind: str) -> int | None:
    """Returns ``computed_slices`` a tensor whose layout may contain optimizer shards, by the tensor
    ``behind`` it; None: unknown. Without that tensor the layout itself decides if it keeps them
    apart (``CheckpointView.split``)."""
    cut = computed_slices(weights.tensors[name].layout)
    if cut == 1:
        return 1
    other = weights.tensors.get(f"{name.split(f'.{part}.')[0]}.{behind}.weight")
    if other is None or len(other.shape) != 2 or weights.split and other.layout is None:
        return cut if weights.split else None
    found = other.layout.counts(other.shape)[1] if other.layout is not None else 1
    return found if cut % found == 0 else None


# ---- copies in several stages --------------------------------------------------------------------


def check_replicas(weights: CheckpointView, read: bool = False) -> None:
    """Compares tensors that several pipeline stages hold, such as an embedding that is also the
    head: all other code takes such a tensor from the first stage that holds it.

    Args:
        read: reads tensors without a recorded checksum; else they are not compared.
    Raises:
        LoadError: Copies in two stages differ in a bit; names tensor and both files. And the errors
            of ``CheckpointView.locate``.
    """
    for tensor in weights.tensors.values():
        # a counter, or alike on all ranks by the records
        if tensor.layout is None or not tensor.other_stages:
            continue
        for cut in tensor.cuts(whole(tensor.shape)):
            a, *others = (
                weights.locate(tensor.name, cut, first)
                for first in (tensor.first, *tensor.other_stages)
            )
            for b in others:
                sums = [a.checksum, b.checksum]
                if None in sums and not read:
                    continue
                if None in sums:
                    for side, place in enumerate((a, b)):
                        with weights.storage.open(place.path) as file:
                            sums[side] = tensor_checksum(file, place.entry)
                if sums[0] != sums[1]:
                    raise LoadError(
                        f"{weights.name}: {tensor.name} is held by several pipeline stages and "
                        f"differs: rank {a.rank} has checksum {sums[0]} ({a.path}), rank {b.rank} "
                        f"has {sums[1]} ({b.path}). Which one is right is unknown; take another "
                        "step"
                    )
