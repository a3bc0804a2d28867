"""A checkpoint of any kind as tensors in global shape, and where each piece of a tensor lies.

    weights = of_candidate(storage, root, candidate, strategy)      # rank folders, with records or with a strategy
    weights = of_complete(read_complete(storage, path))             # uncut
    for cut in weights.tensors["embedding.weight"].cuts(region):
        place = weights.place("embedding.weight", cut)              # rank, file, byte ranges, checksum of that piece

Nothing but headers and records is read here. Of ranks that hold the same piece the first one is taken whose file has it: copies
that were removed as redundant, and files that are lost, are no obstacle while one copy is left.
"""
from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mindresume.errors import DamagedFileError, LoadError, StrategyError
from mindresume.files import Header, TensorEntry, read_header
from mindresume.files.model import DTYPES
from mindresume.formats import Candidate
from mindresume.formats.complete import CompleteWeights
from mindresume.formatting import listed
from mindresume.layout import TensorLayout, is_scalar
from mindresume.record_details import Details
from mindresume.reshard.geometry import Cut, Region, cuts, held, shape_of
from mindresume.reshard.names import missing
from mindresume.resume.prove import record_of
from mindresume.state import is_transient
from mindresume.store.storage import Storage, parallel
from mindresume.strategy import Strategy


@dataclass(frozen=True)
class Tensor:
    """One tensor in global ``shape``. ``first``: the first rank of the pipeline stage that holds it. ``layout`` None: it is not
    cut, and each of ``copies`` ranks from there on has all of it. ``also``: first ranks of further stages that hold it too."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: TensorLayout | None = None
    first: int = 0
    copies: int = 1
    also: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def is_counter(self) -> bool:
        """Whether it is outside the strategy, and alike on all ranks."""
        return self.layout is None and is_scalar(self.shape)

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages that hold it, ascending; none if it is not cut."""
        return () if self.layout is None else tuple(sorted(first // self.layout.stage_size for first in (self.first, *self.also)))

    def cuts(self, region: Region) -> tuple[Cut, ...]:
        found = cuts(self.layout, self.shape, region)
        return found if self.layout else tuple(cut._replace(holders=range(self.copies)) for cut in found)


class Place(NamedTuple):
    """One piece of a tensor: all of ``entry`` in ``path``. ``checksum`` None: nobody recorded one."""
    rank: int
    path: str
    entry: TensorEntry
    checksum: str | None


@dataclass
class Weights:
    """``tensors`` by name. ``file_of(rank, tensor)``: path of the file in which a rank's piece of a tensor lies, None if there is
    none. ``checksum(rank, tensor)``: the recorded one. ``name``: for messages. ``found_in``: {tensor: path} of complete weights.
    ``paths(rank)``: of all files of a rank; several in an iteration folder."""
    storage: Storage
    name: str
    tensors: Mapping[str, Tensor]
    file_of: Callable[[int, str], str | None]
    checksum: Callable[[int, str], str | None] = lambda rank, name: None
    found_in: Mapping[str, str] | None = None
    paths: Callable[[int], tuple[str, ...]] = lambda rank: ()
    world_size: int = 1
    headers: dict[str, Header | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def format(self) -> str:
        """Of its files."""
        return next(header.format for header in self.headers.values() if header)

    def place(self, name: str, cut: Cut, first: int | None = None) -> Place:
        """Where a piece lies; ``first``: in another pipeline stage that holds the tensor too, the one that begins with this rank.
        DamagedFileError if the file holds another dtype or shape than it should; LoadError if none of its holders has it."""
        tensor = self.tensors[name]
        asked = []
        for holder in cut.holders:
            rank = (tensor.first if first is None else first) + holder
            path = self.file_of(rank, name)
            header = self.header(path) if path is not None else None
            entry = header.tensors.get(name) if header else None
            if entry is None:
                asked.append(rank)
                continue
            expected = shape_of(cut.piece)
            if entry.dtype != tensor.dtype or entry.shape != expected:
                raise DamagedFileError(path, f"rank {rank} holds {name} as {entry.dtype} of shape {entry.shape}, expected "
                                             f"{tensor.dtype} of shape {expected}, a part of {tensor.shape}: the strategy is not "
                                             f"that of these weights, or the file is of another job", tensor=name)
            return Place(rank, path, entry, self.checksum(rank, name))
        raise LoadError(f"{self.name}: {name} {cut.piece} of {tensor.shape} is nowhere: it should be in the file of rank "
                        f"{listed(asked)}, which {'has' if len(asked) == 1 else 'have'} no such tensor or no file")

    def entries(self, rank: int) -> dict[str, TensorEntry] | None:
        """Everything in the files of a rank; None if none of them is there."""
        headers = [header for path in self.paths(rank) if (header := self.header(path))]
        return {name: entry for header in headers for name, entry in header.tensors.items()} if headers else None

    def header(self, path: str) -> Header | None:
        """None if there is no such file. Read once."""
        with self._lock:
            if path in self.headers:
                return self.headers[path]
        found = _read(self.storage, path)
        with self._lock:
            self.headers[path] = found
        return found


def _read(storage: Storage, path: str) -> Header | None:
    """None if there is no such file."""
    try:
        with storage.open(path) as file:
            return read_header(file, path)
    except FileNotFoundError:
        return None


def of_complete(storage: Storage, weights: CompleteWeights) -> Weights:
    """Uncut weights."""
    paths = {name: os.path.join(weights.root, file) for name, file in weights.tensors.items()}
    entries = {name: weights.headers[file].tensors[name] for name, file in weights.tensors.items()}
    texts = [name for name, entry in entries.items() if entry.dtype not in DTYPES]
    if texts:
        raise LoadError(f"{paths[texts[0]]}: {texts[0]} is a text, not a tensor; it can be part of no other layout")
    tensors = {name: Tensor(name, entry.dtype, entry.shape) for name, entry in entries.items()}
    headers = {os.path.join(weights.root, file): header for file, header in weights.headers.items()}
    return Weights(storage, weights.root, tensors, lambda rank, name: paths[name], found_in=paths, headers=dict(headers))


def of_candidate(storage: Storage, root: str, candidate: Candidate, strategy: Strategy | None = None) -> Weights:
    """Rank folders. ``strategy``: needed for what mindformers wrote on several ranks; where records know the layouts it must
    agree with them. StrategyError if there is no layout for a tensor that needs one, or it does not fit; all named."""
    if strategy is not None and strategy.world_size != candidate.world_size:
        raise StrategyError(f"{strategy.source}: a strategy of {strategy.world_size} ranks ({len(strategy.stages)} stages of "
                            f"{strategy.stage_size}), the checkpoint {root}, step {candidate.step}, is of {candidate.world_size}")
    builder = _RankFolders(storage, root, candidate)
    tensors = builder.tensors(strategy)
    return Weights(storage, root, tensors, lambda rank, name: builder.path(rank), builder.checksum,
                   world_size=candidate.world_size, headers=builder.headers,
                   paths=lambda rank: tuple(filter(None, [builder.path(rank)])))


class _RankFolders:
    """Reads as little as the layouts need: one header (and record) a stage, more only where redundancy was removed."""

    def __init__(self, storage: Storage, root: str, candidate: Candidate):
        self.storage, self.root, self.candidate = storage, root, candidate
        self.headers: dict[str, Header | None] = {}
        self._details: dict[int, Details | None] = {}
        self._lock = threading.Lock()

    def path(self, rank: int) -> str | None:
        files = self.candidate.files.get(rank)
        return os.path.join(self.root, files[0].path) if files else None

    def header(self, rank: int) -> Header | None:
        path = self.path(rank)
        if path is None:
            return None
        if path not in self.headers:
            self.headers[path] = _read(self.storage, path)
        return self.headers[path]

    def details(self, rank: int) -> Details | None:
        """What the record of a rank says; None where mindformers wrote without records."""
        if self.candidate.attempt is None or rank not in self.candidate.files:
            return None
        with self._lock:
            if rank not in self._details:
                self._details[rank] = record_of(self.storage, self.candidate, rank)[1]
            return self._details[rank]

    def checksum(self, rank: int, name: str) -> str | None:
        row = self._recorded(rank, name)
        return row.checksum if row else None

    # ---- layouts -----------------------------------------------------------------------------------------------------

    def tensors(self, strategy: Strategy | None) -> dict[str, Tensor]:
        size = strategy.stage_size if strategy else self._stage_size()
        stages = range(0, self.candidate.world_size, size)
        held_by = [self._held(first, size, strategy.stages[stage] if strategy else ()) for stage, first in enumerate(stages)]
        if strategy:
            strategy = strategy.fitted({name: len(shape) for stage in held_by for name, (_, _, shape) in stage.items()})
        found: dict[str, Tensor] = {}
        lost: list[str] = []
        for stage, first in enumerate(stages):
            given = strategy.stages[stage] if strategy else None
            for name, (rank, dtype, shape) in held_by[stage].items():
                known, recorded = found.get(name), self._recorded(rank, name)
                layout = self._layout(name, shape, recorded, given, first, size) or (known.layout if known else None)
                ranks = (*([known.first] if known else []), *range(first, first + size))
                if layout is None and self.candidate.world_size > 1 and not self._same_everywhere(name, shape, ranks):
                    lost.append(f"{name} {shape}")
                    continue
                full = shape if layout is None else _global_shape(layout, shape, name)
                if known is None:
                    found[name] = Tensor(name, dtype, full, layout, first, size)
                else:                               # shared by several stages, or a counter
                    found[name] = _also(known, dtype, full, layout, first, self.root)
            self._check_lost(first, size, given, found)
        if lost:
            source = strategy.source if strategy else "the checkpoint records no layout for them, and no strategy is given " \
                "(src_strategy_path_or_dir, --from)"
            raise StrategyError(f"{self.root}, step {self.candidate.step}: {len(lost)} tensors have no layout: "
                                f"{listed(lost, 5)}; {source}")
        return found

    def _stage_size(self) -> int:
        """Ranks of a stage by the records; all ranks of the job where they know of no layout."""
        for rank in self.candidate.files:
            details = self.details(rank)
            sizes = {row.layout.stage_size for row in details.tensors.values() if row.layout} if details else set()
            if sizes:
                size = sizes.pop()
                if sizes or self.candidate.world_size % size:
                    raise StrategyError(f"{self.root}: the record of rank {rank} has layouts of stages of {size} ranks"
                                        f"{' and other sizes' if sizes else ''}, the job had {self.candidate.world_size}")
                return size
        return self.candidate.world_size

    def _held(self, first: int, size: int, named: Collection[str]) -> dict[str, tuple[int, str, tuple[int, ...]]]:
        """{tensor: (rank, dtype, local shape)} of a stage. All its ranks hold the same names, unless redundancy was removed: that
        a safetensors file says, and of others it is suspected where a tensor that the strategy names is missing."""
        one = next((rank for rank in range(first, first + size) if self.header(rank) is not None), None)
        if one is None:
            raise LoadError(f"{self.root}, step {self.candidate.step}: the files of all ranks from {first} to "
                            f"{first + size - 1}, a whole pipeline stage, are missing")
        ranks, header = [one], self.header(one)
        if header.metadata.get("remove_redundancy") == "True" or any(
                name not in header.tensors and not is_transient(name) for name in named):
            parallel(self.storage, self.header, range(first, first + size))
            ranks = [rank for rank in range(first, first + size) if self.header(rank) is not None]
        found: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        for rank in ranks:
            for name, entry in self.header(rank).tensors.items():
                if entry.dtype not in DTYPES:
                    raise LoadError(f"{self.path(rank)}: {name} is a text, not a tensor; it can be part of no other layout")
                found.setdefault(name, (rank, entry.dtype, entry.shape))
        return found

    def _check_lost(self, first: int, size: int, given: Mapping[str, TensorLayout] | None, found: Mapping[str, Tensor]) -> None:
        """LoadError if a tensor of this stage was only in files that are missing: the records or the strategy name it."""
        gone = [rank for rank in range(first, first + size) if self.header(rank) is None] if self._read_all(first, size) else []
        for rank in gone:
            details = self.details(rank)
            lost = [name for name in details.tensors if name not in found] if details else missing(given or {}, found)
            if lost:
                raise LoadError(f"{self.root}, step {self.candidate.step}: the file of rank {rank} is missing, and with it "
                                f"{len(lost)} tensors that no other rank has, for example {lost[0]}")

    def _read_all(self, first: int, size: int) -> bool:
        return all(self.path(rank) is None or self.path(rank) in self.headers for rank in range(first, first + size))

    def _recorded(self, rank: int, name: str) -> Any:
        details = self.details(rank)
        return details.tensors.get(name) if details else None

    def _layout(self, name: str, shape: tuple[int, ...], recorded: Any, given: Mapping[str, TensorLayout] | None, first: int,
                size: int) -> TensorLayout | None:
        known = recorded.layout if recorded else None
        wanted = given.get(name) if given else None
        if known is None or wanted is None:
            return known or wanted
        full = _global_shape(known, shape, name)
        if known != wanted:
            for rank in range(size):
                try:
                    same = held(known, rank, full) == held(wanted, rank, full)
                except ValueError:
                    same = False
                if not same:
                    raise StrategyError(f"{name}: the strategy that is given cuts it as {wanted}, the record of the checkpoint "
                                        f"as {known}; rank {first + rank} would hold another part of {full}. Leave "
                                        f"src_strategy_path_or_dir (--from) away: these records know their layouts")
        return known

    def _same_everywhere(self, name: str, shape: tuple[int, ...], ranks: Iterable[int]) -> bool:
        """Whether a tensor without a layout is the same on these ranks: a counter, or proven by the records (data parallel)."""
        if is_scalar(shape):
            return True
        rows = [self._recorded(rank, name) for rank in ranks]
        return len({(row.dtype, row.shape, row.checksum) if row else None for row in rows}) == 1 and rows[0] is not None


def _also(known: Tensor, dtype: str, shape: tuple[int, ...], layout: TensorLayout | None, first: int, where: str) -> Tensor:
    """Held by the stage that begins with rank ``first``, too. StrategyError if that has it in another form."""
    if (known.dtype, known.shape, known.layout) != (dtype, shape, layout) and not is_scalar(shape):
        raise StrategyError(f"{where}: the pipeline stage of rank {known.first} holds {known.name} as {known.dtype} of whole "
                            f"shape {known.shape}, cut as {known.layout}, that of rank {first} as {dtype} of {shape}, cut as "
                            f"{layout}; expected the same on both")
    return replace(known, also=(*known.also, first))


def _global_shape(layout: TensorLayout, held: tuple[int, ...], name: str) -> tuple[int, ...]:
    try:
        return layout.global_shape(held)
    except ValueError as error:
        raise StrategyError(f"{name}: {error}") from error
