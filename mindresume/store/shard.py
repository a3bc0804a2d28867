"""What one rank writes for one step: its files of weights, and then a record of them.

    write_shard(place, shard)       # publish the files ─▶ publish the record of what was written

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

from mindresume.errors import NoRoomError, RecordError, SaveError
from mindresume.files import encode, encoded_size
from mindresume.files.checksum import Checksums, checksummed
from mindresume.formats.iteration_files import MODEL, OPTIMIZER, WeightFile
from mindresume.formats.names import FileName, folder_name, label
from mindresume.gauge import Gauge
from mindresume.layout import TensorLayout
from mindresume.manifest import (
    EMERGENCY,
    FOLDER,
    Details,
    FileRecord,
    Record,
    TensorRecord,
    attempt_name,
    record_name,
    run_sequence,
)
from mindresume.state import TrainingState
from mindresume.store.claim import fence
from mindresume.store.storage import TEMPORARY, Storage, publish


@dataclass(frozen=True)
class Place:
    """Who saves where. ``root``: folder of the rank folders, or with ``iterations`` of the iteration folders. ``part``: the ranks
    that see it, where nodes share no disk; else all."""
    storage: Storage
    root: str
    run: str
    rank: int
    world_size: int
    iterations: bool = False
    part: tuple[int, ...] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """Those whose records make a checkpoint of this folder."""
        return self.part or range(self.world_size)

    def base(self, step: int) -> str:
        """What paths of files are relative to. An iteration folder is made under another name, and renamed by the commit."""
        return os.path.join(self.root, FOLDER, attempt_name(step, self.run)) if self.iterations else self.root

    def attempt(self, step: int) -> str:
        """The folder of records."""
        return os.path.join(self.base(step), FOLDER, attempt_name(step, self.run))


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard. ``path``: relative to the base of the place. ``tensors`` in the order of the network; ``metadata``: of
    the file, beside our label."""
    path: str
    format: str
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """What one rank writes for one step. ``layouts``: (layout, global shape) of the tensors that the strategy cuts.
    ``deduplicated``: of what several ranks hold this is a share."""
    files: tuple[ShardFile, ...]
    state: TrainingState
    layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]] = field(default_factory=dict)
    random: Mapping[str, object] = field(default_factory=dict)
    deduplicated: bool = False


def rank_shard(name: FileName, state: TrainingState, tensors: Mapping[str, np.ndarray],
               layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]] | None = None,
               random: Mapping[str, object] | None = None, metadata: Mapping[str, str] | None = None) -> Shard:
    """Checkpoint 1.0: one file in the folder of the rank."""
    file = ShardFile(f"{folder_name(name.rank)}/{name}", name.format, tensors, metadata or {})
    return Shard((file,), state, layouts or {}, random or {}, file.metadata.get("remove_redundancy") == "True")


def iteration_shard(prefix: str | None, place: Place, state: TrainingState, model: Mapping[str, np.ndarray],
                    optimizer: Mapping[str, np.ndarray] | None,
                    layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]] | None = None,
                    random: Mapping[str, object] | None = None, deduplicated: bool = False) -> Shard:
    """Checkpoint 2.0: a file of the network's weights and, unless None, one of everything else. Every rank writes all of them, an
    empty one too, so that the number in their names is the number of ranks."""
    metadata = {"format": "ms", "remove_redundancy": str(deduplicated)}
    files = [ShardFile(str(WeightFile(prefix, kind, place.rank, place.world_size)), "safetensors", tensors, metadata)
             for kind, tensors in ((MODEL, model), (OPTIMIZER, optimizer)) if tensors is not None]
    return Shard(tuple(files), state, layouts or {}, random or {}, deduplicated)


def write_shard(place: Place, shard: Shard, clock: Callable[[], float] = time.time, gauge: Gauge | None = None) -> Record:
    """Writes this rank's files and its record. SaveError names what failed; then none of them has appeared, or files without a
    record, which count as nothing. A disk or quota without room for them is an error before the first byte.
    FolderInUseError if a later run has taken over the folder."""
    base, attempt = place.base(shard.state.step), place.attempt(shard.state.step)
    recorded = os.path.join(attempt, record_name(place.rank))
    targets = [os.path.join(base, file.path) for file in shard.files]
    sums = [Checksums() for _ in shard.files]
    target = targets[0]
    try:
        fence(place.storage, place.root, place.run)
        files = [replace(file, metadata={**file.metadata, **label(place.run, shard.state.step)}) for file in shard.files]
        expected = [encoded_size(file.format, file.tensors, file.metadata) for file in files]
        _check_room(place, shard, sum(expected))
        gauge = gauge or Gauge.silent()
        gauge.expect(sum(expected))
        for folder in dict.fromkeys([attempt, *map(os.path.dirname, targets)]):
            place.storage.make_folder(folder)
        for target in targets:
            if place.storage.status(target) is not None:
                raise SaveError(f"{target} exists already; a committed file is never overwritten. Another job is writing into "
                                f"this folder: give each job a folder of its own")
        try:
            rows = []
            for target, file, size, into in zip(targets, files, expected, sums, strict=True):
                pieces = encode(file.format, file.tensors, file.metadata)
                written = publish(place.storage, target, gauge.counted(checksummed(pieces, into)), place.run, size)
                if written != size:
                    raise OSError(errno.EIO, f"wrote {written} bytes, expected {size}", target)
                rows.append(FileRecord(file.path, file.format, size, into.file))
            record = Record(place.run, place.rank, place.world_size, shard.state, clock(), tuple(rows), shard.deduplicated)
            publish(place.storage, recorded, [record.encode(_details(shard, sums))], place.run)
        except OSError:                     # a file without a record is worth nothing, fills the disk and blocks a retry
            with suppress(OSError):         # the first error is the one to report; never a record without its files
                place.storage.remove(recorded)
                for written_before in targets:
                    place.storage.remove(written_before)
            raise
    except (OSError, ValueError) as error:      # ValueError: a dtype or name that the format cannot hold
        reason, where = getattr(error, "strerror", None) or error, getattr(error, "filename", None) or target
        kind = NoRoomError if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else SaveError
        raise kind(f"step {shard.state.step} was not saved on rank {place.rank}: {reason} ({where}). The checkpoints "
                   f"saved before are untouched") from error
    return record


def mark_emergency(place: Place, step: int) -> None:
    """Says that ranks were lost: what those that are left write of ``step`` may be all there will ever be of it. Each of them
    says so before it writes. OSError."""
    attempt = place.attempt(step)
    place.storage.make_folder(attempt)
    publish(place.storage, os.path.join(attempt, EMERGENCY), [b""], f"{place.rank}.{place.run}")


_RECORD_ROOM = 64 << 10         # bytes kept free for the small files that follow


def _check_room(place: Place, shard: Shard, needed: int) -> None:
    room = place.storage.room(place.root)
    if room < needed + _RECORD_ROOM:
        raise NoRoomError(f"step {shard.state.step} was not saved on rank {place.rank}: its file needs {needed / 2**20:.1f} MiB, "
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


def clean_own_folder(place: Place) -> list[str]:
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
