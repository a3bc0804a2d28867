"""Fetches one checkpoint from an object store to this disk. All ranks take part, each with its own files.

    problem = RemoteFetch(storage, remote, root, group, emit).fetch(attempt, manifest)     # None: it is complete on this disk

    a folder of records, still empty ─▶ room? ─▶ each rank: download ─▶ checksum ─▶ rename ─▶ all ranks have theirs?
    ─▶ records ─▶ rank 0: manifest ─▶ an iteration folder gets its name

A fetch that is interrupted leaves a save that never completed, with all files that arrived; the next start continues it. A file
that is on this disk with the right checksum is not downloaded again. The files of a checkpoint that does not arrive whole are
removed so that they do not fill the disk.
"""
from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import Group, Watchdog, gather_results
from mindresume.coordination.process_identity import host_identity
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import CorruptFileError, RecordError, RemoteError
from mindresume.events import CheckpointFetched, Emit, ignore, warning
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import iteration_name
from mindresume.formats.rank_folders import parse_label
from mindresume.formats.weight_files import header_of, is_as_recorded
from mindresume.model.manifest import FOLDER, MANIFEST, FileRecord, Manifest, read_details, record_name
from mindresume.saving import iteration_publisher
from mindresume.saving.garbage_collector import free_names
from mindresume.saving.remote_checkpoints import RemoteCheckpoints, record_path
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.atomic_publish import publish, temporary_name
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel, read_bytes

_SPARE = 64 << 20               # bytes that stay free on the disk
_PATIENCE = 7200.0              # seconds without a completed file on any rank, after which a download is given up


@dataclass
class RemoteFetch:
    """Fetches checkpoints, one after the other. All ranks use it in the same way.

    Args:
        storage: the disk to which files are downloaded.
        root: the folder of checkpoints there.
        emit: receives CheckpointFetched and warnings.
        shared_groups: which ranks share a folder, where nodes share no storage; each node then gets all records and the manifest.
    """
    storage: Storage
    remote: RemoteCheckpoints
    root: str
    group: Group
    emit: Emit = ignore
    shared_groups: SharedGroups | None = None

    def fetch(self, attempt: str, manifest_bytes: bytes) -> str | None:
        """Fetches the checkpoint ``attempt``. Returns None if it is complete on this disk; else the reason, and the files that
        arrived are removed."""
        manifest, started = Manifest.read(io.BytesIO(manifest_bytes)), runtime.monotonic()
        rank = _RankFetch(self, attempt, manifest)
        problem = (self._on_all(rank, rank.prepare, leaders=True) or self._no_room(rank) or self._on_all(rank, rank.download) or
                   self._on_all(rank, rank.publish_records) or
                   self._on_all(rank, lambda: rank.publish_records(every=True), leaders=True))
        if problem is not None:
            self._on_all(rank, rank.withdraw)
            return problem
        late = self._on_all(rank, lambda: rank.commit(manifest_bytes), leaders=True)
        total = sum(file.size or 0 for files in manifest.files for file in files)
        self.emit(CheckpointFetched(manifest.step, self.remote.url, rank.done, total, runtime.monotonic() - started))
        if late is not None:                        # all files are here: the next run commits it and gives it its name
            self.emit(warning(f"step {manifest.step} was fetched, but not committed: {late}"))
        return None

    def _no_room(self, rank: _RankFetch) -> str | None:
        """Returns why the disk has no room for the download; None if it has. Ranks of one host are taken to share its disk. If
        several hosts share a disk that is too small, the download itself fails."""
        def measure() -> list[Any]:
            try:
                return [host_identity(), rank.find_missing(), self.storage.free_space(self.root), None]
            except OSError as error:
                return ["", 0, 0, f"{self.root}: {error}"]
        rows = gather_results(self.group, measure, Watchdog("looking for room"))
        failed = next((row[3] for row in rows if row[3]), None)
        if failed:
            return failed
        for number, (host, _, room, _) in enumerate(rows):
            needed = sum(row[1] for row in rows if row[0] == host)
            if needed and room < needed + _SPARE:
                return (f"{needed / 2**20:.1f} MiB are to be fetched, {self.root} on the host of rank {number} has room for "
                        f"{room / 2**20:.1f} MiB; free some space")
        return None

    def _on_all(self, rank: _RankFetch, work: Callable[[], None], leaders: bool = False) -> str | None:
        """Returns None if ``work`` succeeded on all ranks, else the first reason. ``leaders``: only rank 0 works, or where nodes
        share no storage the first rank of each node."""
        is_leader = self.shared_groups.is_leader(self.group.rank) if self.shared_groups else self.group.rank == 0

        def attempt() -> str | None:
            if leaders and not is_leader:
                return None
            try:
                work()
            except (OSError, RemoteError, RecordError) as error:
                return str(error)
            return None
        found = gather_results(self.group, attempt,
                               Watchdog(f"fetching from {self.remote.url}", rank, _PATIENCE))
        return next((f"rank {number}: {reason}" for number, reason in enumerate(found) if reason), None)


class _RankFetch:
    """Fetches the files of one checkpoint that one rank of the job fetches: those of the saved ranks ``rank``, ``rank + size``,
    ...; its own, if as many ranks saved it."""

    def __init__(self, fetch: RemoteFetch, attempt: str, manifest: Manifest):
        self.storage, self.remote, self.attempt, self.manifest = fetch.storage, fetch.remote, attempt, manifest
        self.root, self.rank, self.emit = fetch.root, fetch.group.rank, fetch.emit
        self.ranks = range(fetch.group.rank, manifest.world_size, fetch.group.size)
        visible = os.path.join(self.root, iteration_name(manifest.step))
        if not is_iteration_save(manifest):
            self.target_dir = self.root
        elif self.storage.status(os.path.join(visible, FOLDER, attempt)) is not None:
            self.target_dir = visible                       # it is here, and something in it is damaged
        else:
            self.target_dir = os.path.join(self.root, FOLDER, attempt)
        self.records = os.path.join(self.target_dir, FOLDER, attempt)
        self.done = 0                           # bytes so far
        self._missing: list[FileRecord] = []
        self._written: list[str] = []

    def prepare(self) -> None:
        """Creates the folder of records, which marks weights without a record as a save that never completed. Removes such files
        of earlier saves that have the names of files to fetch."""
        paths = {os.path.join(self.target_dir, file.path) for files in self.manifest.files for file in files}
        free_names(CheckpointDir(self.storage, self.root), paths, self.manifest.run, self.emit)
        self.storage.make_folder(self.records)

    def find_missing(self) -> int:
        """Finds the files that are not on this disk. Returns their size in bytes."""
        files = [file for rank in self.ranks for file in self.manifest.files[rank]]
        files += self.manifest.metadata_files if self.rank == 0 else ()
        self._missing = [file for file in files if not self._is_here(file)]
        return sum(file.size or 0 for file in self._missing)

    def _is_here(self, file: FileRecord) -> bool:
        path = os.path.join(self.target_dir, file.path)
        return self.storage.status(path) is not None and is_as_recorded(self.storage, path, file)

    def download(self) -> None:
        """Downloads each file under a temporary name, which the next run would remove, and renames it."""
        for file in self._missing:
            path = os.path.join(self.target_dir, file.path)
            self._refuse_foreign(path, file)
            temporary = temporary_name(path, self.manifest.run)
            self.storage.make_folder(os.path.dirname(path))
            self.storage.remove(temporary)
            self.remote.download(self.attempt, file.path, temporary)
            if not is_as_recorded(self.storage, temporary, file):
                self.storage.remove(temporary)
                raise RecordError(f"{file.path}: its bytes are not those that were saved")
            self._written.append(path)
            self.storage.rename(temporary, path)
            self.storage.sync(os.path.dirname(path))
            self.done += file.size or 0

    def _refuse_foreign(self, path: str, file: FileRecord) -> None:
        """Raises RecordError if the file at ``path`` belongs to another run, which started on an empty disk with the same names.
        A damaged file of this save is replaced."""
        if self.storage.status(path) is None:
            return
        try:
            label = parse_label(header_of(CheckpointDir(self.storage, self.target_dir), file))
        except CorruptFileError:
            return
        if label not in (None, (self.manifest.run, self.manifest.step)):
            raise RecordError(f"{path} is of run {label[0]}, step {label[1]}, and is not overwritten; move it away")

    def withdraw(self) -> None:
        """Removes the fetched files; records before the files that they name."""
        for path in reversed(self._written):
            self.storage.remove(path)
        with suppress(OSError):                             # other ranks may not be done, or some records were here before
            self.storage.remove(self.records)

    def publish_records(self, every: bool = False) -> None:
        """Publishes the records of the saved ranks that this rank fetches. ``every``: of all ranks whose record is not here, as
        on nodes that share no storage."""
        self.storage.make_folder(self.records)
        names = set(self.storage.list(self.records)) if every else set()

        def fetch(rank: int) -> None:
            path = os.path.join(self.records, record_name(rank))
            data = self.remote.record(self.attempt, rank)
            record, _ = read_details(io.BytesIO(data))
            if (record.run, record.step, record.rank, record.files) != (self.manifest.run, self.manifest.step, rank,
                                                                        self.manifest.files[rank]):
                raise RecordError(f"{record_name(rank)} is not the record of rank {rank} from which the manifest was made")
            if self.storage.status(path) is None or read_bytes(self.storage, path) != data:
                self._written.append(path)
                publish(self.storage, path, [data], self.manifest.run)
        wanted = range(self.manifest.world_size) if every else self.ranks
        parallel(self.storage, fetch, [rank for rank in wanted if record_name(rank) not in names])

    def commit(self, manifest_bytes: bytes) -> None:
        """Publishes the manifest, and gives an iteration folder its name."""
        path = os.path.join(self.target_dir, record_path(self.attempt, MANIFEST))
        publish(self.storage, path, [manifest_bytes], self.manifest.run)
        if self.target_dir.endswith(os.path.join(FOLDER, self.attempt)):
            target = SaveTarget(self.storage, self.root, self.manifest.run, 0, self.manifest.world_size, iterations=True)
            iteration_publisher.publish_iteration(target, self.manifest.step)


def is_iteration_save(manifest: Manifest) -> bool:
    """Returns whether it commits an iteration folder of Checkpoint 2.0: its files lie in the folder itself."""
    return "/" not in manifest.files[0][0].path
