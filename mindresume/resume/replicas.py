"""Finds the tensors of a rank in the files of other ranks: replicas of data parallelism.

``replica_files`` replaces a file that was lost, by the records. The rest completes a checkpoint
whose job was failing: some ranks wrote nothing, the remaining ranks saved what they held.

By the layouts, other ranks hold everything that such a rank held; otherwise the scan would have
refused the checkpoint (``mindresume.formats.metadata.missing_slices``). Only its random state is
lost. The layouts are those of the records; for files of mindformers (MindIO TTP: only some of the
ranks save) those of the strategy files. Whether the strategy belongs to the same job is not
recorded, so tensors that are equal on two ranks by the strategy must have equal bytes
(``Verifier``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from mindresume.errors import CorruptFileError, RecordError, StrategyError
from mindresume.formats import MINDFORMERS, Candidate, CheckpointDir, Refusal
from mindresume.formats.metadata import HasDetails, missing_slices, stage_size
from mindresume.formats.records import RecordFolder
from mindresume.formats.strategy import Strategy
from mindresume.formats.weight_files import header_of
from mindresume.formatting import listed
from mindresume.model.layout import holders_with
from mindresume.model.manifest import Details, FileRecord, TensorRecord
from mindresume.storage import error_text
from mindresume.tensor_files.header import TensorEntry

# (root, candidate) -> strategy of the job that saved; None: unknown
StrategyOf = Callable[[str, Candidate], Strategy | None]


def unknown_strategy(root: str, candidate: Candidate) -> Strategy | None:
    """Returns None: the ``StrategyOf`` of a job without strategy files."""
    return None


@dataclass(frozen=True)
class ShardSource:
    """Tensors to read from one file. ``names`` None: all of them."""

    file: FileRecord
    names: tuple[str, ...] | None = None


def complete_missing_ranks(
    directory: CheckpointDir,
    candidate: Candidate,
    strategy_of: StrategyOf,
    world_size: int | None,
    expected: int | None,
) -> tuple[Candidate, int | None]:
    """Returns the candidate with its ``missing_ranks``, and the number of ranks that it must have.

    Only checkpoints of mindformers without records are completed: where some of the ranks saved
    (MindIO TTP) and the strategy proves that they hold everything. If they do not, the candidate
    gets a problem that says what is missing.

    Args:
        world_size: ranks of the job that would resume. None: not known; the number then follows
            from the strategy, else it is ``expected``.
        expected: estimate from the folder. None: any number.
    """
    there = candidate.files
    if candidate.origin != MINDFORMERS or candidate.iteration_dir or candidate.problem is not None:
        return candidate, world_size
    if world_size is not None and set(there) == set(range(world_size)):
        return candidate, world_size
    strategy = strategy_of(directory.root, candidate)
    ranks = world_size or (strategy.world_size if strategy else expected)
    if strategy is None or strategy.world_size != ranks or max(there) >= ranks:
        return candidate, ranks
    missing = tuple(rank for rank in range(ranks) if rank not in there)
    if not missing:
        return candidate, ranks
    files = [[file.path for file in there.get(rank, ())] for rank in range(ranks)]
    try:
        lost = missing_slices(files, True, StrategyDetails(directory, candidate, strategy))
    except (CorruptFileError, StrategyError) as error:
        lost = str(error)
    if not lost:
        return replace(candidate, world_size=ranks, missing_ranks=missing), ranks
    return replace(
        candidate,
        problem=candidate.refuse(
            f"no file of rank {listed(missing)} for this step of this run, and by "
            f"{strategy.source} {lost}",
            rank=missing[0],
        ),
    ), ranks


@dataclass
class StrategyDetails:
    """Derives the details of ranks, as records would hold them, from the headers of their files and
    the strategy; checksums are empty. ``entries``: by rank, where the tensors lie, by the headers
    that were read."""

    directory: CheckpointDir
    candidate: Candidate
    strategy: Strategy
    entries: dict[int, dict[str, tuple[FileRecord, TensorEntry]]] = field(default_factory=dict)
    _known: dict[int, Details] = field(default_factory=dict)

    def details(self, rank: int) -> Details:
        """Returns the details of a rank. Raises CorruptFileError, and StrategyError if the strategy
        is of another model."""
        if rank not in self._known:
            entries = {
                name: (file, entry)
                for file in self.candidate.files[rank]
                for name, entry in header_of(self.directory, file).tensors.items()
            }
            fitted = self.strategy.fit_dimensions(
                {name: len(entry.shape) for name, (_, entry) in entries.items()}
            )
            layouts = fitted.stages[rank // self.strategy.stage_size]
            rows = {}
            for name, (_, entry) in entries.items():
                layout = layouts.get(name)
                rows[name] = TensorRecord(
                    entry.dtype,
                    entry.shape,
                    "",
                    layout,
                    layout and layout.global_shape(entry.shape),
                )
            self.entries[rank], self._known[rank] = entries, Details(rows)
        return self._known[rank]


def replica_sources(
    rank: int, present: Iterable[int], world_size: int, records: HasDetails
) -> dict[str, tuple[int, TensorRecord]] | str:
    """Returns {tensor: (rank that holds a replica, its row there)} for the tensors that ``rank``
    held; a phrase if no rank holds one of them.

    Args:
        present: ranks that wrote.
        records: of the ranks that wrote.
    """
    there = sorted(present)
    size = stage_size(records.details(there[0]).tensors.values(), world_size)
    first = rank - rank % size
    mates = [other for other in there if first <= other < first + size]
    if not mates:
        return f"ranks {first} to {first + size - 1}, a whole pipeline stage, wrote nothing"
    found: dict[str, tuple[int, TensorRecord]] = {}
    # the first rank has all names, unless redundancy was removed
    for mate in mates:
        for name, row in records.details(mate).tensors.items():
            if name in found:
                continue
            holder = holder_of(rank, name, row, mates, records)
            if holder is None:
                return f"a part of {name} was held by it alone"
            found[name] = holder, records.details(holder).tensors[name]
    return found


def holder_of(
    rank: int, name: str, row: TensorRecord, mates: list[int], records: HasDetails
) -> int | None:
    """Returns the first of ``mates`` that holds the same slice as ``rank``; None if none does."""
    return next(
        (
            other
            for other in ranks_alike(rank, row) or mates
            if other in mates and name in records.details(other).tensors
        ),
        None,
    )


def ranks_alike(rank: int, row: TensorRecord) -> list[int]:
    """Returns the ranks of its stage that hold the same slice of a tensor as ``rank``, by its
    layout; none if it has no layout."""
    layout, shape = row.layout, row.global_shape
    if layout is None or shape is None:
        return []
    first = rank - rank % layout.stage_size
    return [first + local for local in holders_with(layout, shape, rank - first)]


def replica_files(
    directory: CheckpointDir, candidate: Candidate, rank: int
) -> tuple[ShardSource, ...] | Refusal:
    """Returns files of other ranks that hold the tensors of the missing files of ``rank``; a
    Refusal if no other rank has one of them. A replica is recorded with the same name, dtype, shape
    and checksum."""
    missing = candidate.files[rank][0]
    records = RecordFolder(directory.storage, candidate.records_dir or "")
    try:
        present = {
            index
            for index, file in enumerate(candidate.files[rank])
            if directory.storage.status(directory.path(file.path))
        }
        missing = next(
            file for index, file in enumerate(candidate.files[rank]) if index not in present
        )
        wanted = {
            name: row
            for name, row in records.details(rank).tensors.items()
            if row.file not in present
        }
        sources = []
        for file, copies in copies_elsewhere(directory, candidate, rank, wanted):
            if directory.storage.status(directory.path(file.path)) is not None:
                sources.append(ShardSource(file, tuple(copies)))
                for name in copies:
                    del wanted[name]
    except (RecordError, OSError) as error:
        return candidate.refuse(
            f"the file of rank {rank} is missing, and {error_text(error)}",
            missing.path,
            rank,
            error=error,
        )
    if wanted:
        return candidate.refuse(
            f"the file of rank {rank} is missing, and {len(wanted)} of its tensors are on no other "
            f"rank, for example {next(iter(wanted))}",
            missing.path,
            rank,
        )
    return tuple(sources)


def copies_elsewhere(
    directory: CheckpointDir,
    candidate: Candidate,
    rank: int,
    wanted: dict[str, TensorRecord],
    is_repair: bool = False,
) -> Iterator[tuple[FileRecord, dict[str, TensorRecord]]]:
    """Yields files of other ranks than ``rank``, each with those of ``wanted`` that it holds, too,
    by its record: with the same name, dtype, shape and checksum. Ends when the receiver has removed
    all from ``wanted``.

    Args:
        is_repair: a record that cannot be read is passed over; else it raises RecordError or
            OSError.
    """
    records = RecordFolder(directory.storage, candidate.records_dir or "")
    for other in _likely_holders(wanted, rank, candidate):
        if not wanted:
            return
        try:
            theirs = records.details(other).tensors
        except (RecordError, OSError):
            if not is_repair:
                raise
            continue
        for index, file in enumerate(candidate.files[other]):
            copies = {
                name: row
                for name, row in wanted.items()
                if name in theirs
                and theirs[name].file == index
                and (theirs[name].dtype, theirs[name].shape, theirs[name].checksum)
                == (row.dtype, row.shape, row.checksum)
            }
            if copies:
                yield file, copies


def _likely_holders(
    tensors: Mapping[str, TensorRecord], rank: int, candidate: Candidate
) -> list[int]:
    """Returns all other ranks that have files. Ranks that hold the same slices, by the layout of
    one sharded tensor, come first: reading a record takes some milliseconds, and there may be
    thousands of ranks."""
    others = [other for other in candidate.files if other != rank]
    for row in tensors.values():
        if likely := {*ranks_alike(rank, row)}:
            return sorted(others, key=lambda other: other not in likely)
    return others
