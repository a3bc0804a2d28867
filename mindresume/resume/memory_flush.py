"""Copies a save in memory of this node to disk: files and records, which have the same format there."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from xxhash import xxh3_128

from mindresume.coordination.collectives import Group, Watchdog, run_on_all, run_on_rank0
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import SaveError
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.weight_files import is_as_recorded
from mindresume.model.manifest import FOLDER, FileRecord, read_details, record_name
from mindresume.resume.choice import Choice
from mindresume.saving.committer import Committer
from mindresume.saving.memory_tier.slots import path_on_disk
from mindresume.saving.replication import copy_files
from mindresume.saving.shard_writer import SaveTarget, is_committed
from mindresume.storage.interface import Storage
from mindresume.storage.operations import publish
from mindresume.tensor_files.header import CHUNK

OnBytes = Callable[[int], None]


def write_selected(storage: Storage, choice: Choice, group: Group, shared: SharedGroups,
                   samples_in_common: bool = False) -> None:
    """Writes the selected save in memory to disk, on all ranks together: for a training that is complete with it, so that nothing
    saves it later.

    Args:
        shared: the ranks that share a tier.
        samples_in_common: see ``SaveTarget``.
    Raises:
        CollectiveError: on all ranks, if one node fails.
    """
    root, chosen = choice.checkpoint_dir, choice.chosen

    def write() -> None:
        if shared.is_leader(group.rank):
            write_to_disk(CheckpointDir(storage, root), choice.root, chosen)
    run_on_all(group, write, Watchdog("writing the last step to disk"))
    run_on_rank0(group, lambda: commit_written(CheckpointDir(storage, root), chosen, samples_in_common),
                 Watchdog("committing the last step"))


def write_to_disk(directory: CheckpointDir, tier: str, candidate: Candidate, progress: OnBytes = lambda count: None) -> None:
    """Copies the files and records of a verified save from ``tier`` to the checkpoint directory ``root``. It may be called again
    after a death.

    Args:
        progress: receives the bytes that are written.
    Raises:
        SaveError: a file of that name holds something else, or the bytes changed meanwhile.
        OSError, RecordError: a file cannot be read or written.
    """
    target, step = _target(directory, candidate), candidate.step
    if is_committed(target, step):          # its records, which the manifest names, must stay as they are
        return
    place = _Disk(target, progress)
    for rank, sources in candidate.files.items():
        with directory.storage.open(os.path.join(candidate.records_dir, record_name(rank))) as file:
            record, details = read_details(file)
        rows = tuple(row if target.iterations else row._replace(path=path_on_disk(row.path, candidate.run))
                     for row in record.files)
        files = [(os.path.join(tier, source.path), row) for source, row in zip(sources, rows, strict=True)]
        copy_files(place, candidate.name, directory.storage, files)
        place.put_record(candidate.name, rank, replace(record, files=rows).encode(details))


@dataclass(frozen=True)
class _Disk:
    """The checkpoint directory as a ``Place``."""
    target: SaveTarget
    progress: OnBytes

    def _path(self, attempt: str, *inner: str) -> str:
        return os.path.join(self.target.root, *([FOLDER, attempt] if self.target.iterations else []), *inner)

    def has_file(self, attempt: str, file: FileRecord) -> bool:
        path = self._path(attempt, file.path)
        if self.target.storage.status(path) is None:
            return False
        if not is_as_recorded(self.target.storage, path, file):
            raise SaveError(f"{path} exists already, with other content; a file of a checkpoint is never overwritten")
        return True

    def put_file(self, attempt: str, file: FileRecord, storage: Storage, path: str) -> None:
        target, disk, copied = self._path(attempt, file.path), self.target.storage, xxh3_128()

        def pieces() -> Iterator[bytes]:
            with storage.open(path) as source:
                while piece := source.read(CHUNK):
                    copied.update(piece)
                    self.progress(len(piece))
                    yield piece
        disk.make_folder(os.path.dirname(target))
        publish(disk, target, pieces(), self.target.run, file.size or 0)
        if copied.hexdigest() != file.checksum:
            disk.remove(target)
            raise SaveError(f"{path} changed while it was written to {target}")

    def put_record(self, attempt: str, rank: int, record: bytes) -> None:
        folder = self._path(attempt, FOLDER, attempt)
        self.target.storage.make_folder(folder)
        publish(self.target.storage, os.path.join(folder, record_name(rank)), [record], self.target.run)


def commit_written(directory: CheckpointDir, candidate: Candidate, samples_in_common: bool = False) -> bool:
    """Commits and publishes what ``write_to_disk`` wrote, as the next run would. Returns whether it is a checkpoint now; not
    while parts of other nodes are missing."""
    target = replace(_target(directory, candidate), samples_in_common=samples_in_common)
    Committer(target).recover()                         # also of a step that is committed already: it may not be published
    return is_committed(target, candidate.step)


def _target(directory: CheckpointDir, candidate: Candidate) -> SaveTarget:
    return SaveTarget(directory.storage, directory.root, candidate.run, min(candidate.files), candidate.world_size,
                      bool(candidate.iteration_dir), (),
                      candidate.lineage)
