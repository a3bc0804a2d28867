"""Copies a save in memory of this node to disk: files and records, which have the same format there."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from xxhash import xxh3_128

from mindresume.coordination.collectives import Group, Watchdog, run_on_all, run_on_rank0
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import SaveError
from mindresume.formats import Candidate
from mindresume.formats.checkpoint_dir import CheckpointDir
from mindresume.formats.weight_files import is_as_recorded
from mindresume.model.manifest import FileRecord, read_details, record_name
from mindresume.resume.choice import Choice
from mindresume.saving.committer import Committer
from mindresume.saving.memory_tier.tier import path_on_disk
from mindresume.saving.shard_writer import SaveTarget, is_committed
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
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
    for rank, files in candidate.files.items():
        with directory.storage.open(os.path.join(candidate.records_dir, record_name(rank))) as file:
            record, details = read_details(file)
        rows = tuple(row if target.iterations else replace(row, path=path_on_disk(row.path, candidate.run))
                     for row in record.files)
        for source, row in zip(files, rows, strict=True):
            _copy(directory.storage, os.path.join(tier, source.path), os.path.join(target.data_dir(step), row.path), row,
                  target.run,
                  progress)
        directory.storage.make_folder(target.attempt(step))
        publish(directory.storage, os.path.join(target.attempt(step), record_name(rank)),
                [replace(record, files=rows).encode(details)],
                target.run)


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


def _copy(storage: Storage, source: str, path: str, row: FileRecord, tag: str, progress: OnBytes) -> None:
    """Copies one file, unless an earlier call has copied it. Raises SaveError if another file has its name."""
    storage.make_folder(os.path.dirname(path))
    if storage.status(path) is not None:
        if is_as_recorded(storage, path, row):
            return
        raise SaveError(f"{path} exists already, with other content; a file of a checkpoint is never overwritten")
    copied = xxh3_128()

    def pieces() -> Iterator[bytes]:
        with storage.open(source) as file:
            while piece := file.read(CHUNK):
                copied.update(piece)
                progress(len(piece))
                yield piece
    publish(storage, path, pieces(), tag, row.size or 0)
    if copied.hexdigest() != row.checksum:
        storage.remove(path)
        raise SaveError(f"{source} changed while it was written to {path}")
