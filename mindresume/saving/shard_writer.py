"""Writes the part of one rank of one step: its files of weights, and then a record of them.

    write_shard(target, shard)       # publish the files ─▶ publish the record of what was written

Whatever dies between two of these operations leaves the checkpoints before as they were, and files that no record names.
"""
from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from mindresume.coordination.lease import fence
from mindresume.errors import OutOfSpaceError, RecordError, SaveError
from mindresume.events.progress import ProgressReporter
from mindresume.formats.iteration_naming import MODEL, OPTIMIZER, WeightFile, iteration_name
from mindresume.formats.rank_folder_naming import FileName, folder_name, label
from mindresume.model.file_record import FileRecord
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import EMERGENCY, FOLDER, MANIFEST, Record, attempt_name, read_record, record_name, run_sequence
from mindresume.model.record_details import Details, TensorRecord
from mindresume.model.training_state import TrainingState
from mindresume.storage.atomic_publish import TEMPORARY, UnknownOutcomeError, publish
from mindresume.storage.interface import Storage
from mindresume.tensor_files import encode, encoded_size
from mindresume.tensor_files.checksum import Checksums, checksummed, file_checksum


@dataclass(frozen=True)
class SaveTarget:
    """Who saves where. ``root``: folder of the rank folders, or with ``iterations`` of the iteration folders. ``part``: the ranks
    that see it, where nodes share no disk; else all. ``lineage``: the run that began this training (``lineage.py``)."""
    storage: Storage
    root: str
    run: str
    rank: int
    world_size: int
    iterations: bool = False
    local_ranks: tuple[int, ...] = ()
    lineage: str = ""

    @property
    def ranks(self) -> Sequence[int]:
        """Returns the ranks whose records make a checkpoint of this directory."""
        return self.local_ranks or range(self.world_size)

    def data_dir(self, step: int) -> str:
        """Returns the folder to which paths of files are relative. An iteration folder is made under another name, and renamed by
        the commit."""
        return os.path.join(self.root, FOLDER, attempt_name(step, self.run)) if self.iterations else self.root

    def data_dirs(self, step: int) -> list[str]:
        """Returns all that ``data_dir`` may be: an iteration folder first as it is made, then as it is committed."""
        return [self.data_dir(step), *([os.path.join(self.root, iteration_name(step))] if self.iterations else [])]

    def attempt(self, step: int) -> str:
        """Returns the folder of records."""
        return os.path.join(self.data_dir(step), FOLDER, attempt_name(step, self.run))


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard. ``path``: relative to the data_dir of the target. ``tensors`` in the order of the network;
    ``metadata``: of the file, beside our label."""
    path: str
    format: str
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """The part of one rank of one step. ``layouts``: (layout, global shape) of the tensors that the strategy cuts.
    ``deduplicated``: of tensors that several ranks hold, this is a share."""
    files: tuple[ShardFile, ...]
    state: TrainingState
    layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]] = field(default_factory=dict)
    random: Mapping[str, object] = field(default_factory=dict)
    deduplicated: bool = False


def rank_shard(name: FileName, state: TrainingState, tensors: Mapping[str, np.ndarray],
               layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]] | None = None,
               random: Mapping[str, object] | None = None, metadata: Mapping[str, str] | None = None) -> Shard:
    """Returns a shard of Checkpoint 1.0: one file in the folder of the rank."""
    file = ShardFile(f"{folder_name(name.rank)}/{name}", name.format, tensors, metadata or {})
    return Shard((file,), state, layouts or {}, random or {}, file.metadata.get("remove_redundancy") == "True")


def iteration_shard(prefix: str | None, place: SaveTarget, state: TrainingState, model: Mapping[str, np.ndarray],
                    optimizer: Mapping[str, np.ndarray] | None,
                    layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]] | None = None,
                    random: Mapping[str, object] | None = None, deduplicated: bool = False) -> Shard:
    """Returns a shard of Checkpoint 2.0: a file of the network's weights and, unless None, one of everything else. Every rank
    writes all of them, an empty one too, so that the number in their names is the number of ranks."""
    metadata = {"format": "ms", "remove_redundancy": str(deduplicated)}
    files = [ShardFile(str(WeightFile(prefix, kind, place.rank, place.world_size)), "safetensors", tensors, metadata)
             for kind, tensors in ((MODEL, model), (OPTIMIZER, optimizer)) if tensors is not None]
    return Shard(tuple(files), state, layouts or {}, random or {}, deduplicated)


@dataclass(frozen=True)
class Written:
    """A part of a save that is there and counts. ``doubt``: an error after its record had its name leaves open whether it would
    outlive a loss of power before the commit."""
    record: Record
    doubt: SaveError | None = None


def write_shard(place: SaveTarget, shard: Shard, clock: Callable[[], float] = time.time,
                gauge: ProgressReporter | None = None) -> Written:
    """Writes this rank's files and its record, or finds that this run has written them already. SaveError names what failed. A
    disk or quota without room for them is an error before the first byte. LeaseHeldError if a later run has taken over the
    folder.

    Until the record is given its name, an error leaves nothing, or files that count as nothing. From then on nothing that it
    names is removed, whatever is reported: rank 0 may have seen it, committed the step and removed older ones. What is on disk
    then decides whether this rank has saved, as it does for rank 0. The same step may be tried again after any error."""
    step = shard.state.step
    data_dir, attempt = place.data_dir(step), place.attempt(step)
    targets = [os.path.join(data_dir, file.path) for file in shard.files]
    where = targets[0]
    try:
        fence(place.storage, place.root, place.run)
        before = _recorded(place, step, _listed_bases(place, step))
        if before is not None:
            return Written(before[0])
        files = [replace(file, metadata={**file.metadata, **label(place.run, step)}) for file in shard.files]
        expected = [encoded_size(file.format, file.tensors, file.metadata) for file in files]
        there = {target for target in targets if place.storage.status(target) is not None}
        needed = sum(size for target, size in zip(targets, expected, strict=True) if target not in there)
        _check_room(place, step, needed)
        gauge = gauge or ProgressReporter.silent()
        gauge.expect(needed)
        for folder in dict.fromkeys([attempt, *map(os.path.dirname, targets)]):
            place.storage.make_folder(folder)
        made, rows, sums = [], [], [Checksums() for _ in files]
        try:
            for where, file, size, into in zip(targets, files, expected, sums, strict=True):
                if where in there:
                    _check_same(place.storage, where, file, into)
                else:
                    made.append(where)
                    pieces = encode(file.format, file.tensors, file.metadata)
                    written = publish(place.storage, where, gauge.counted(checksummed(pieces, into)), place.run, size)
                    if written != size:
                        raise OSError(errno.EIO, f"wrote {written} bytes, expected {size}", where)
                rows.append(FileRecord(file.path, file.format, size, into.file))
            record = Record(place.run, place.rank, place.world_size, shard.state, clock(), tuple(rows), shard.deduplicated,
                            place.lineage, place.local_ranks)
            where = os.path.join(attempt, record_name(place.rank))
            try:
                publish(place.storage, where, [record.encode(_details(shard, sums))], place.run)
            except UnknownOutcomeError as error:
                return _settled(place, step, error)
        except OSError:                     # no record names them: they are worth nothing, fill the disk and block a retry
            with suppress(OSError):         # the first error is the one to report
                for target in made:
                    place.storage.remove(target)
            raise
    except (OSError, ValueError) as error:      # ValueError: a dtype or name that the format cannot hold
        reason, where = getattr(error, "strerror", None) or error, getattr(error, "filename", None) or where
        raise _kind(error)(f"step {step} was not saved on rank {place.rank}: {reason} ({where}). The checkpoints saved before "
                           f"are untouched") from error
    return Written(record)


def _kind(error: Exception) -> type[SaveError]:
    return OutOfSpaceError if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else SaveError


def _settled(place: SaveTarget, step: int, error: UnknownOutcomeError) -> Written:
    """Returns what is on disk after an error at the rename of the record, or after it. Raises SaveError if that is not known."""
    try:
        found = _recorded(place, step, place.data_dirs(step))
    except OSError:
        found = None
    if found is None:
        raise _kind(error)(f"step {step} may not be saved on rank {place.rank}: {error.strerror} ({error.filename}), and its "
                           f"record cannot be read now. Nothing was removed: it counts if the record turns out to be "
                           f"there") from error
    record, committed = found
    if committed:                               # with the manifest rank 0 has flushed the folder of records
        return Written(record)
    return Written(record, SaveError(
        f"step {step} may not stay saved on rank {place.rank}: its record is there, but a loss of power could undo that: "
        f"{error.strerror} ({error.filename}). Nothing was removed: it counts if all ranks have recorded it"))


def _listed_bases(place: SaveTarget, step: int) -> list[str]:
    """Returns those of ``data_dirs`` that are worth a look before a save. On NFS this host would remember for a while that a name
    it looked for is absent; a listing does no such harm."""
    names = place.storage.list(place.root) if place.iterations else []
    return [data_dir for data_dir in place.data_dirs(step) if data_dir == place.data_dir(step)
            or os.path.basename(data_dir) in names]


def _recorded(place: SaveTarget, step: int, data_dirs: Sequence[str]) -> tuple[Record, bool] | None:
    """Returns what this rank and run recorded of ``step``, if the files are as it says, and whether rank 0 has committed it. An
    iteration folder may get its other name at any moment. Raises OSError if it cannot be known."""
    for data_dir in data_dirs:
        try:
            with place.storage.open(os.path.join(data_dir, FOLDER, attempt_name(step, place.run),
                                                 record_name(place.rank))) as file:
                record, _ = read_record(file)
        except (FileNotFoundError, RecordError):
            continue
        found = [place.storage.status(os.path.join(data_dir, row.path)) for row in record.files]
        if all(status is not None and status.size == row.size for row, status in zip(record.files, found, strict=True)):
            return record, is_committed(place, step)
    return None


def is_committed(place: SaveTarget, step: int) -> bool:
    """Returns whether the save of this run has its manifest. Raises OSError."""
    return any(place.storage.status(os.path.join(data_dir, FOLDER, attempt_name(step, place.run), MANIFEST)) is not None
               for data_dir in place.data_dirs(step))


def _check_same(storage: Storage, path: str, file: ShardFile, into: Checksums) -> None:
    """Takes the checksums of what would be written, and accepts ``path`` if it is exactly that: left by an attempt of this run
    whose record did not get there, or is not visible yet, so it must not be touched. Else raises SaveError."""
    for _ in checksummed(encode(file.format, file.tensors, file.metadata), into):
        pass
    with storage.open(path) as opened:
        found = file_checksum(opened)
    if found != (into.file, into.size):
        raise SaveError(f"{path} exists already, with other content; a file of a checkpoint is never overwritten. If another "
                        f"job is writing into this folder, give each job a folder of its own")
    storage.sync(os.path.dirname(path))


def mark_emergency(place: SaveTarget, step: int) -> None:
    """Records that ranks were lost: what the others write of ``step`` may be all there will ever be of it. Each of them records
    this before it writes; not if all have saved it. Raises OSError."""
    if is_committed(place, step):
        return
    attempt = place.attempt(step)
    place.storage.make_folder(attempt)
    publish(place.storage, os.path.join(attempt, EMERGENCY), [b""], f"{place.rank}.{place.run}")


_RECORD_ROOM = 64 << 10         # bytes kept free for the small files that follow


def _check_room(place: SaveTarget, step: int, needed: int) -> None:
    room = place.storage.free_space(place.root)
    if room < needed + _RECORD_ROOM:
        raise OutOfSpaceError(f"step {step} was not saved on rank {place.rank}: its file needs {needed / 2**20:.1f} MiB, "
                          f"{place.root} has room for {room / 2**20:.1f} MiB. Nothing was written, the checkpoints saved before "
                          f"are untouched; free some space, or keep fewer (keep_checkpoint_max, mindresume prune)")


def _details(shard: Shard, sums: Sequence[Checksums]) -> Details:
    rows = {}
    for index, file in enumerate(shard.files):
        for name, array in file.tensors.items():
            layout, global_shape = shard.layouts.get(name, (None, None))
            rows[name] = TensorRecord("str" if array.dtype.kind == "U" else str(array.dtype), tuple(array.shape),
                                      sums[index].tensors[name], layout, global_shape, index)
    return Details(rows, shard.random)


def clean_own_folder(place: SaveTarget) -> list[str]:
    """Removes what earlier, dead runs left half-written in this rank's folder. Returns the names removed.

    Only temporary files that carry the name of an earlier run: the launch of this run ended those that wrote here before.
    Flushes the folder of the rank folders: what a process that died right after ``mkdir`` left there is taken for durable.
    """
    folder, removed = os.path.join(place.root, folder_name(place.rank)), []
    if place.storage.status(place.root) is not None:
        place.storage.sync(place.root)
    for name in place.storage.list(folder):
        if not name.endswith(TEMPORARY):
            continue
        try:
            earlier = run_sequence(name[:-len(TEMPORARY)].rpartition(".")[2]) < run_sequence(place.run)
        except RecordError:
            continue
        if earlier:
            place.storage.remove(os.path.join(folder, name))
            removed.append(name)
    return removed
