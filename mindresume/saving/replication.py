"""Copies saves to other places: from disk to an object store, from memory to disk.

    copy_files(place, attempt, storage, files)      # to any ``Place``
    place.put_record(attempt, rank, record)

    save = save_of(remote, target, 20)              # a step of this run, to the object store
    save.upload()                                   # each rank: its part
    save.missing(); save.commit()                   # rank 0

``mindresume.saving.upload`` says when which step is uploaded.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from mindresume.errors import RemoteError
from mindresume.formats.iterations import iteration_name
from mindresume.formatting import listed
from mindresume.model.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    attempt_name,
    read_record,
    record_name,
    record_rank,
)
from mindresume.saving.remote_checkpoints import RemoteCheckpoints, record_path
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage import Storage, parallel, read_bytes

_LOST = "lost-"  # prefix of the object that says that a record will never come


class FilePlace(Protocol):
    """A place to which the files of saves are copied. An attempt is all that one run saved at one
    step (``attempt_name``)."""

    def has_file(self, attempt: str, file: FileRecord) -> bool:
        """Returns whether the place has this file. Raises SaveError if another one has its name and
        may not be replaced."""

    def put_file(self, attempt: str, file: FileRecord, storage: Storage, path: str) -> None:
        """Copies ``path`` there as ``file.path``. Raises MindResumeError if its bytes are not those
        of ``file``: a copy would replace a good checkpoint by a damaged one. Raises OSError if it
        cannot be read (any more)."""


class Place(FilePlace, Protocol):
    """A place that keeps copies of saves. The record of a rank is put after all files that it
    names, so whoever finds a record finds them."""

    def put_record(self, attempt: str, rank: int, record: bytes) -> None:
        """Publishes the record of one rank."""


def copy_files(
    place: FilePlace, attempt: str, storage: Storage, files: Iterable[tuple[str, FileRecord]]
) -> int:
    """Copies the files that ``place`` lacks; the record follows. Returns their bytes. It may be
    called again after a death. Raises what ``Place`` does.

    Args:
        files: (where it lies in ``storage``, how the record of the copy names it).
    """
    size = 0
    for path, file in files:
        if not place.has_file(attempt, file):
            place.put_file(attempt, file, storage, path)
            size += file.size or 0
    return size


class LostShardError(RemoteError):
    """A shard of this step will never be uploaded."""

    code = "MR-502"

    def __init__(self, step: int, reason: str):
        super().__init__(f"step {step} is given up: {reason}")
        self.step = step


@dataclass(frozen=True)
class RemoteSave:
    """One step of a run, as its ranks upload it.

    Attributes:
        remote: the checkpoints in the object store.
        target: the run, the rank and the checkpoint directory.
        data_dir: the folder to which the paths in the records of the step are relative.
        is_committed: this run has committed the step, and the folder has its final name.
    """

    remote: RemoteCheckpoints
    target: SaveTarget
    step: int
    data_dir: str
    is_committed: bool

    @property
    def attempt(self) -> str:
        return attempt_name(self.step, self.target.run)

    def path(self, name: str) -> str:
        """Returns the path of a record or the manifest on the disk of this rank."""
        return os.path.join(self.data_dir, record_path(self.attempt, name))

    def record_url(self, name: str) -> str:
        """Returns the URL of a record or the manifest."""
        return self.remote.record_url(self.attempt, name)

    def upload(self) -> int:
        """Uploads what this rank saved (rank 0: the metadata files too). Returns the bytes sent.
        Raises OSError or RecordError if a file cannot be read from the disk (any more),
        CorruptFileError if it is not what was saved."""
        target, path = self.target, self.path(record_name(self.target.rank))
        files = [*read_record(io.BytesIO(read_bytes(target.storage, path))).files]
        if target.rank == 0:
            files += self.local_manifest()[0].metadata_files
        rows = [(os.path.join(self.data_dir, file.path), file) for file in files]
        size = copy_files(self.remote, self.attempt, target.storage, rows)
        # read again: the save must still be there
        self.remote.put_record(self.attempt, target.rank, read_bytes(target.storage, path))
        return size

    def report_lost(self, reason: str) -> None:
        """Puts an object that tells rank 0 that the shard of this rank will never come."""
        url = self.record_url(f"{_LOST}{record_name(self.target.rank)}")
        self.remote.store.put(url, reason.encode())

    def missing(self) -> list[str]:
        """Returns the names of missing objects that rank 0 needs before it puts the manifest. A
        rank puts its record after all files in it, so their sizes are not compared again. Raises
        LostShardError if a rank has reported that its shard is lost."""
        store = self.remote.store
        records = [record_name(rank) for rank in range(self.target.world_size)]
        there = set(store.list(f"{self.remote.url}/{self.attempt}"))
        for rank, name in enumerate(records):
            if record_path(self.attempt, f"{_LOST}{name}") in there:
                reason = store.read(self.record_url(f"{_LOST}{name}")).decode(errors="replace")
                raise LostShardError(self.step, f"the part of rank {rank} {reason}")
        paths = [record_path(self.attempt, name) for name in records]
        if there.issuperset(paths):
            manifest, _ = self._whole()
            files = [
                *(file for files in manifest.files for file in files),
                *manifest.metadata_files,
            ]
            paths = [file.path for file in files]
        return [path for path in paths if path not in there]

    def commit(self) -> None:
        """Puts the manifest, after ``missing`` returned nothing. Raises RemoteError if an object is
        gone by then: a later run took this one for dead, and removed its incomplete attempt."""
        manifest, data = self._whole()
        self.remote.store.put(self.record_url(MANIFEST), data)
        # A later run that removes the attempt looks for the manifest before, and deletes it once
        # more after all other objects. This run puts the manifest and then looks for the other
        # objects. So one of the two runs sees what the other has done.
        gone = self.missing()
        if gone:
            self.remote.store.delete(self.record_url(MANIFEST))
            raise RemoteError(
                f"{len(gone)} objects were removed during the upload, the first is {gone[0]}"
            )
        self.remote.committed(self.attempt, manifest)

    def _whole(self) -> tuple[Manifest, bytes]:
        """Returns the manifest of all ranks, and its bytes. If nodes share no disk, the manifest on
        the disk of rank 0 names only the ranks of its node. Then the manifest is made from the
        records of all ranks, which only the store has."""
        local, remote = self.local_manifest(), self.remote
        if not local[0].local_ranks:
            return local
        if self.attempt not in remote.manifests:
            remote.manifests[self.attempt] = Manifest.from_records(
                parallel(
                    self.target.storage,
                    lambda rank: read_record(io.BytesIO(remote.record(self.attempt, rank))),
                    range(local[0].world_size),
                )
            )
        return remote.manifests[self.attempt], remote.manifests[self.attempt].encode()

    def local_manifest(self) -> tuple[Manifest, bytes]:
        """Returns the manifest on the disk of this rank, and its bytes."""
        data = read_bytes(self.target.storage, self.path(MANIFEST))
        return Manifest.read(io.BytesIO(data)), data

    def owners(self, paths: Iterable[str]) -> str:
        """Returns the ranks that put these objects, for people: "rank 1, 3"."""
        files = self.local_manifest()[0].files
        owners = {file.path: rank for rank, files in enumerate(files) for file in files}
        ranks = {owners.get(path, record_rank(os.path.basename(path))) for path in paths} - {None}
        return f"rank {listed(sorted(ranks))}" if ranks else "rank 0"


def save_of(remote: RemoteCheckpoints, target: SaveTarget, step: int) -> RemoteSave:
    """Returns a step of the run of ``target``."""
    data_dir = os.path.join(target.root, iteration_name(step)) if target.iterations else target.root
    save = RemoteSave(remote, target, step, data_dir, True)
    if target.storage.status(save.path(MANIFEST)) is not None:
        return save
    return RemoteSave(remote, target, step, target.data_dir(step), False)
