"""Copies a save in memory of this node to disk: files and records, which have the same format there.

    copy = DiskCopy(directory, tier, candidate)
    copy.write();  copy.commit()
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from xxhash import xxh3_128

from mindresume.coordination.collectives import Group, Watchdog, run_on_all, run_on_rank0
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import SaveError
from mindresume.events.progress import SILENT, Progress
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.weight_files import is_as_recorded
from mindresume.model.manifest import FileRecord, read_details, record_name
from mindresume.resume.choice import Choice
from mindresume.saving.committer import Committer
from mindresume.saving.memory_tier.slots import path_on_disk
from mindresume.saving.replication import copy_files
from mindresume.saving.shard_writer import SaveTarget, is_committed
from mindresume.storage.interface import Storage
from mindresume.storage.operations import publish
from mindresume.tensor_files.header import CHUNK


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
    copy = DiskCopy(CheckpointDir(storage, choice.checkpoint_dir), choice.root, choice.chosen, samples_in_common)
    run_on_all(group, copy.write if shared.is_leader(group.rank) else copy.leave, Watchdog("writing the last step to disk"))
    run_on_rank0(group, copy.commit, Watchdog("committing the last step"))


@dataclass(frozen=True)
class DiskCopy:
    """The copy of a verified save on disk: the checkpoint directory as a ``Place``.

    Args:
        tier: the folder in memory that has the save.
        progress: receives the bytes that are written.
    """
    directory: CheckpointDir
    tier: str
    candidate: Candidate
    samples_in_common: bool = False
    progress: Progress = SILENT

    @cached_property
    def target(self) -> SaveTarget:
        found = self.candidate
        return SaveTarget(self.directory.storage, self.directory.root, found.run, min(found.files), found.world_size,
                          bool(found.iteration_dir), (), found.lineage, self.samples_in_common)

    def leave(self) -> None:
        """Does nothing: another rank of the node writes it."""

    def write(self) -> None:
        """Copies the files and records. It may be called again after a death.

        Raises:
            SaveError: a file of that name holds something else, or the bytes changed meanwhile.
            OSError, RecordError: a file cannot be read or written.
        """
        candidate, target, storage = self.candidate, self.target, self.directory.storage
        if is_committed(target, candidate.step):            # its records, which the manifest names, must stay as they are
            return
        for rank, sources in candidate.files.items():
            with storage.open(os.path.join(candidate.records_dir, record_name(rank))) as file:
                record, details = read_details(file)
            rows = tuple(row if target.iterations else row._replace(path=path_on_disk(row.path, candidate.run))
                         for row in record.files)
            files = [(os.path.join(self.tier, source.path), row) for source, row in zip(sources, rows, strict=True)]
            copy_files(self, candidate.name, storage, files)
            self.put_record(candidate.name, rank, replace(record, files=rows).encode(details))

    def commit(self) -> bool:
        """Commits and publishes what ``write`` wrote, as the next run would. Returns whether it is a checkpoint now; not while
        parts of other nodes are missing."""
        Committer(self.target).recover()                    # also of a step that is committed already: it may not be published
        return is_committed(self.target, self.candidate.step)

    def has_file(self, attempt: str, file: FileRecord) -> bool:
        """See ``mindresume.saving.replication.Place``."""
        path = os.path.join(self.target.data_dir(self.candidate.step), file.path)
        if self.target.storage.status(path) is None:
            return False
        if not is_as_recorded(self.target.storage, path, file):
            raise SaveError(f"{path} exists already, with other content; a file of a checkpoint is never overwritten")
        return True

    def put_file(self, attempt: str, file: FileRecord, storage: Storage, path: str) -> None:
        """See ``Place``."""
        disk, copied = self.target.storage, xxh3_128()
        target = os.path.join(self.target.data_dir(self.candidate.step), file.path)
        disk.make_folder(os.path.dirname(target))
        publish(disk, target, self._pieces(storage, path, copied), self.target.run, file.size or 0)
        if copied.hexdigest() != file.checksum:
            disk.remove(target)
            raise SaveError(f"{path} changed while it was written to {target}")

    def _pieces(self, storage: Storage, path: str, copied: Any) -> Iterator[bytes]:
        with storage.open(path) as source:
            while piece := source.read(CHUNK):
                copied.update(piece)
                self.progress.advance(len(piece))
                yield piece

    def put_record(self, attempt: str, rank: int, record: bytes) -> None:
        """See ``Place``."""
        folder = self.target.attempt(self.candidate.step)
        self.target.storage.make_folder(folder)
        publish(self.target.storage, os.path.join(folder, record_name(rank)), [record], self.target.run)
