"""Reads, puts and deletes checkpoints in an object store: the names of the objects, and the order
of puts and deletions.

    {remote_save_url}/checkpoint/
      run-0002-1f3a9c04.json                              status of the newest run: the step that it
                                                          is uploading
      step-0000000015-run-0002-1f3a9c04/                  one attempt: everything that one run saved
                                                          at one step
        rank_0/qwen3_rank_0-2_5.safetensors               weights, or qwen3-model-...safetensors,
                                                          common.json, metadata.json
        .mindresume/step-0000000015-run-0002-1f3a9c04/    rank_00000.json ..., and put last:
                                                          manifest.json

    put       each rank: weights ─▶ its record      rank 0: objects of all ranks there? ─▶ manifest,
        which is the commit
    delete    manifest ─▶ everything else

Names contain step and run. So no object ever replaces another one (except the status of a run), and
objects that a dead run left behind have other names than those that are being uploaded. An attempt
has the layout of a checkpoint directory: a copy of it is a checkpoint, or an iteration folder.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from mindresume.coordination.lease import next_run, record_run_number
from mindresume.errors import CorruptFileError, RecordError, RemoteError
from mindresume.events import CheckpointsRemoved, Emit, ignore, warning
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import iteration_name
from mindresume.formatting import listed
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    FileRecord,
    Manifest,
    attempt_name,
    attempts,
    parse_attempt,
    read_record,
    record_name,
    record_rank,
    run_sequence,
)
from mindresume.saving.retention import Policy, surplus
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.interface import Storage
from mindresume.storage.object_store import ObjectStore
from mindresume.storage.operations import parallel, read_bytes
from mindresume.tensor_files import file_checksum
from mindresume.typed import is_count, parse_json

_STATUS, _SUFFIX = "run-", ".json"
_LOST = "lost-"  # prefix of the object that says that a record will never come


@dataclass(frozen=True)
class BucketListing:
    """Holds one listing. ``objects``: {name of an attempt: names of its objects}; ``run_statuses``:
    runs with a status object."""

    objects: Mapping[str, frozenset[str]]
    run_statuses: tuple[str, ...]

    def committed(self) -> list[str]:
        """Returns the names of attempts that have a manifest, newest first: by run, then step."""
        found = [
            (run_sequence(run), step, name)
            for name, step, run in attempts(list(self.objects))
            if record_path(name, MANIFEST) in self.objects[name]
        ]
        return [name for *_, name in sorted(found, reverse=True)]

    def runs(self) -> list[str]:
        """Returns every run that has an object, the latest last."""
        found = {*self.run_statuses, *(run for _, _, run in attempts(list(self.objects)))}
        return sorted(found, key=lambda run: (run_sequence(run), run))


@dataclass(frozen=True)
class RunStatus:
    """Tells all ranks of a run what to do. ``step``: they upload it now. ``ended``: no upload
    follows. ``reason``: why; empty: the training has ended."""

    step: int | None = None
    ended: bool = False
    reason: str = ""


@dataclass(frozen=True)
class _RetentionRow:
    """Holds the values of one checkpoint that a retention policy reads."""

    step: int
    saved_at: float
    metrics: Mapping[str, float]
    health: int | None


def record_path(attempt: str, name: str) -> str:
    """Returns the path of a record or manifest of an attempt, relative to the folder to which the
    paths in it are relative."""
    return f"{FOLDER}/{attempt}/{name}"


def committed_dir(target: SaveTarget, step: int) -> str | None:
    """Returns the folder to which the paths in the records of a step are relative. Returns None
    unless this run has committed the step and the folder has its final name."""
    data_dir = os.path.join(target.root, iteration_name(step)) if target.iterations else target.root
    manifest = os.path.join(data_dir, record_path(attempt_name(step, target.run), MANIFEST))
    return data_dir if target.storage.status(manifest) is not None else None


@dataclass
class RemoteCheckpoints:
    """Reads, puts and deletes the checkpoints below ``url``. Every method raises RemoteError if the
    store fails."""

    store: ObjectStore
    url: str
    # read already; a manifest never changes
    _manifests: dict[str, Manifest] = field(default_factory=dict)
    _unreadable: set[str] = field(default_factory=set)

    # ---- reading ---------------------------------------------------------------------------------

    def scan(self) -> BucketListing:
        """Returns the names of all objects, with one listing."""
        objects: dict[str, set[str]] = {}
        statuses = []
        for name in self.store.list(self.url):
            attempt, _, path = name.partition("/")
            # without a path: an object that stands for an empty folder
            if path and parse_attempt(attempt):
                objects.setdefault(attempt, set()).add(path)
            elif attempt.startswith(_STATUS) and attempt.endswith(_SUFFIX):
                run = attempt[len(_STATUS) : -len(_SUFFIX)]
                with suppress(RecordError):
                    run_sequence(run)
                    statuses.append(run)
        return BucketListing(
            {attempt: frozenset(paths) for attempt, paths in objects.items()}, tuple(statuses)
        )

    def manifest(self, attempt: str) -> tuple[Manifest, bytes]:
        """Returns the manifest of an attempt, and its bytes. Raises RecordError if it is damaged or
        of another attempt."""
        data = self.store.read(self._url(attempt, record_path(attempt, MANIFEST)))
        manifest = Manifest.read(io.BytesIO(data))
        if attempt_name(manifest.state.step, manifest.run) != attempt:
            raise RecordError(f"the manifest is of run {manifest.run}, step {manifest.state.step}")
        return manifest, data

    def has(self, attempt: str) -> bool:
        """Returns whether an attempt is committed in the store."""
        return self.store.size(self._url(attempt, record_path(attempt, MANIFEST))) is not None

    def record(self, attempt: str, rank: int) -> bytes:
        """Returns the bytes of the record of one rank."""
        return self.store.read(self._url(attempt, record_path(attempt, record_name(rank))))

    def download(self, attempt: str, path: str, target: str) -> None:
        """Downloads a file to ``target``. ``path``: as the manifest names it."""
        self.store.download(self._url(attempt, path), target)

    def _url(self, attempt: str, path: str) -> str:
        return f"{self.url}/{attempt}/{path}"

    # ---- runs ------------------------------------------------------------------------------------

    def publish_status(self, run: str, status: RunStatus) -> None:
        """Puts the status of a run, on rank 0. The other ranks, on any node, follow it, and other
        jobs see the run."""
        self.store.put(self._status_url(run), json.dumps(asdict(status)).encode())

    def read_status(self, run: str) -> RunStatus | None:
        """Returns the status of a run; None: not published yet, or removed by a later run."""
        if self.store.size(url := self._status_url(run)) is None:
            return None
        try:
            value = parse_json(self.store.read(url))
            step, ended, reason = value["step"], value["ended"], value.get("reason", "")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RemoteError(
                f"{url} is no run status that mindresume wrote: {error}; the next upload replaces "
                "it"
            ) from error
        return RunStatus(
            step if is_count(step) else None,
            ended is True,
            reason if isinstance(reason, str) else "",
        )

    def _status_url(self, run: str) -> str:
        return f"{self.url}/{_STATUS}{run}{_SUFFIX}"

    def check_not_superseded(self, run: str, listing: BucketListing | None = None) -> None:
        """Raises SupersededError if there is an object of a later run: this run was taken for dead,
        or two jobs use the same URL."""
        latest = next(reversed((listing or self.scan()).runs()), run)
        if (run_sequence(latest), latest) > (run_sequence(run), run):
            raise SupersededError(
                f"{self.url} has been taken over by run {latest}; this job, run {run}, uploads "
                "nothing more. "
                f"End one of them, or give each job a remote_save_url of its own"
            )

    # ---- putting ---------------------------------------------------------------------------------

    @staticmethod
    def has_shard(target: SaveTarget, step: int, data_dir: str) -> bool:
        """Returns whether this rank sees its own record on its disk."""
        path = record_path(attempt_name(step, target.run), record_name(target.rank))
        return target.storage.status(os.path.join(data_dir, path)) is not None

    def has_file(self, attempt: str, file: FileRecord) -> bool:
        """See ``mindresume.saving.replication.Place``."""
        return self.store.size(self._url(attempt, file.path)) == file.size

    def put_file(self, attempt: str, file: FileRecord, storage: Storage, path: str) -> None:
        """See ``Place``. Raises CorruptFileError if the file has another checksum than recorded in
        two of two readings."""
        for is_last in (False, True):
            with storage.open(path) as opened:
                checksum = file_checksum(opened)[0]
            if file.checksum in (None, checksum):
                break
            if is_last:
                raise CorruptFileError(
                    path, f"it is not what was saved: checksum {checksum}, recorded {file.checksum}"
                )
        self.store.upload(path, self._url(attempt, file.path))

    def put_record(self, attempt: str, rank: int, record: bytes) -> None:
        """See ``Place``."""
        self.store.put(self._url(attempt, record_path(attempt, record_name(rank))), record)

    def report_lost_shard(self, target: SaveTarget, step: int, reason: str) -> None:
        """Puts an object that tells rank 0 that the shard of this rank will never come."""
        attempt = attempt_name(step, target.run)
        self.store.put(
            self._url(attempt, record_path(attempt, f"{_LOST}{record_name(target.rank)}")),
            reason.encode(),
        )

    def missing(self, target: SaveTarget, step: int, data_dir: str) -> list[str]:
        """Returns the names of missing objects that rank 0 needs before it puts the manifest. A
        rank puts its record after all files in it, so their sizes are not compared again. Raises
        LostShardError if a rank has reported that its shard is lost."""
        attempt = attempt_name(step, target.run)
        there = set(self.store.list(f"{self.url}/{attempt}"))
        for rank in range(target.world_size):
            if (path := record_path(attempt, f"{_LOST}{record_name(rank)}")) in there:
                reason = self.store.read(self._url(attempt, path)).decode(errors="replace")
                raise LostShardError(step, f"the part of rank {rank} {reason}")
        records = [record_path(attempt, record_name(rank)) for rank in range(target.world_size)]
        absent = [path for path in records if path not in there]
        if absent:
            return absent
        manifest, _ = self._whole(target, attempt, data_dir)
        files = [*(file for files in manifest.files for file in files), *manifest.metadata_files]
        return [file.path for file in files if file.path not in there]

    def commit(self, target: SaveTarget, step: int, data_dir: str) -> None:
        """Puts the manifest, after ``missing`` returned nothing. Raises RemoteError if an object is
        gone by then: a later run took this one for dead, and removed its incomplete attempt."""
        attempt = attempt_name(step, target.run)
        manifest, data = self._whole(target, attempt, data_dir)
        path = record_path(attempt, MANIFEST)
        self.store.put(self._url(attempt, path), data)
        # A later run that removes the attempt looks for the manifest before, and deletes it once
        # more after all other objects. This run puts the manifest and then looks for the other
        # objects. So one of the two runs sees what the other has done.
        gone = self.missing(target, step, data_dir)
        if gone:
            self.store.delete(self._url(attempt, path))
            raise RemoteError(
                f"{len(gone)} objects were removed during the upload, the first is {gone[0]}"
            )
        self._manifests[attempt] = manifest

    def _whole(self, target: SaveTarget, attempt: str, data_dir: str) -> tuple[Manifest, bytes]:
        """Returns the manifest of all ranks, and its bytes. If nodes share no disk, the manifest on
        the disk of rank 0 names only the ranks of its node. Then the manifest is made from the
        records of all ranks, which only the store has."""
        manifest, data = self.local_manifest(target, attempt, data_dir)
        if not manifest.local_ranks:
            return manifest, data
        if attempt not in self._manifests:
            self._manifests[attempt] = Manifest.from_records(
                parallel(
                    target.storage,
                    lambda rank: read_record(io.BytesIO(self.record(attempt, rank))),
                    range(manifest.world_size),
                )
            )
        return self._manifests[attempt], self._manifests[attempt].encode()

    @staticmethod
    def local_manifest(target: SaveTarget, attempt: str, data_dir: str) -> tuple[Manifest, bytes]:
        """Returns the manifest on the disk of this rank, and its bytes."""
        data = read_bytes(target.storage, os.path.join(data_dir, record_path(attempt, MANIFEST)))
        return Manifest.read(io.BytesIO(data)), data

    # ---- deleting --------------------------------------------------------------------------------

    def prune(self, policy: Policy, run: str, step: int, emit: Emit = ignore) -> list[int]:
        """Removes checkpoints that the policy does not keep, and incomplete attempts of earlier
        runs and of this run before ``step``. Called after ``step`` of ``run`` was committed. The
        newest checkpoint, the newest healthy one and ``step`` stay in any case. Checkpoints of
        another training (``retention.py``) stay and do not count.

        Returns:
            The steps of removed checkpoints.

        Raises:
            SupersededError: there is a later run; nothing was removed.
            RemoteError: some objects could not be removed; all others were.
        """
        seen = self.scan()
        self.check_not_superseded(run, seen)
        own = self._known(attempt_name(step, run), emit)
        newest_first, saved = [], []
        for name in seen.committed():
            manifest = self._known(name, emit)
            if manifest is not None and (own is None or manifest.lineage == own.lineage):
                newest_first.append(name)
                saved.append(
                    _RetentionRow(
                        manifest.state.step,
                        manifest.saved_at,
                        manifest.state.metrics,
                        manifest.state.health,
                    )
                )
        healthy = next((index for index, one in enumerate(saved) if not one.health), None)
        going = [
            index
            for index in surplus(policy, saved)
            if index != healthy and newest_first[index] != attempt_name(step, run)
        ]
        failures: list[RemoteError] = []
        removed = [
            saved[index].step
            for index in going
            if self._delete(newest_first[index], seen, failures)
        ]
        for name, number, of in attempts(list(seen.objects)):
            if record_path(name, MANIFEST) not in seen.objects[name] and (
                run_sequence(of) < run_sequence(run) or of == run and number < step
            ):
                self._delete(name, seen, failures)
        for other in seen.run_statuses:
            if run_sequence(other) < run_sequence(run):
                self._try(failures, self._status_url(other))
        if removed:
            emit(CheckpointsRemoved(tuple(removed), self.url, str(policy)))
        if failures:
            raise RemoteError(
                f"{len(failures)} removals below {self.url} failed, the first: {failures[0]}"
            )
        return removed

    def _known(self, attempt: str, emit: Emit) -> Manifest | None:
        """Returns the manifest of an attempt; reads it once. Returns None if it cannot be read
        (damaged, archived, access denied): then the attempt stays and does not count."""
        if attempt not in self._manifests and attempt not in self._unreadable:
            try:
                self._manifests[attempt] = self.manifest(attempt)[0]
            except (RecordError, RemoteError) as error:
                self._unreadable.add(attempt)
                emit(
                    warning(
                        f"{self.url}/{attempt} stays and does not count, because its manifest "
                        f"cannot be read: {error}"
                    )
                )
        return self._manifests.get(attempt)

    def _delete(self, attempt: str, seen: BucketListing, failures: list[RemoteError]) -> bool:
        """Deletes the objects of an attempt. Returns whether all are gone. The manifest of a
        checkpoint is deleted first: a reader that has begun to download finds that objects are
        missing, and takes another checkpoint. The manifest of an incomplete attempt is deleted
        last, because its run may be alive and put it meanwhile."""
        manifest = record_path(attempt, MANIFEST)
        others = sorted(seen.objects[attempt] - {manifest})
        if manifest not in seen.objects[attempt]:
            try:
                if self.store.size(self._url(attempt, manifest)) is not None:
                    return False  # the listing was out of date
            except RemoteError as error:
                failures.append(error)
                return False
        order = [manifest, *others] if manifest in seen.objects[attempt] else [*others, manifest]
        self._manifests.pop(attempt, None)
        return self._try(failures, *(self._url(attempt, name) for name in order))

    def _try(self, failures: list[RemoteError], *urls: str) -> bool:
        """Deletes objects in this order. Stops at the first one that cannot be deleted, and returns
        False: the next ``prune`` tries again."""
        try:
            for url in urls:
                self.store.delete(url)
        except RemoteError as error:
            failures.append(error)
            return False
        return True


class LostShardError(RemoteError):
    """A shard of this step will never be uploaded."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"step {step} is given up: {reason}")
        self.step = step


class SupersededError(RemoteError):
    """A later run uses this URL."""


def ranks_of(paths: Iterable[str], manifest: Manifest) -> str:
    """Returns the ranks that put these objects, for people: "rank 1, 3"."""
    owners = {file.path: rank for rank, files in enumerate(manifest.files) for file in files}
    ranks = {owners.get(path, record_rank(os.path.basename(path))) for path in paths} - {None}
    return f"rank {listed(sorted(ranks))}" if ranks else "rank 0"


def number_runs(
    directory: CheckpointDir,
    remote: RemoteCheckpoints | None = None,
    in_memory: str = "",
    emit: Emit = ignore,
) -> None:
    """Makes sure that the next run number in ``directory`` is larger than those of all runs in
    ``remote`` and of the run ``in_memory``, also on an empty disk: leaves a marker with the number
    of the latest. Rank 0 calls it before it acquires ``directory``. Raises OSError."""
    if remote is not None:
        try:
            for run in remote.scan().runs()[-1:]:
                record_run_number(directory, run)
        except RemoteError as error:
            # uploads will fail, or find the later run, and report it
            emit(warning(error))
    if in_memory and run_sequence(in_memory) >= run_sequence(
        next_run(directory.storage.list(directory.path(FOLDER)))
    ):
        record_run_number(directory, in_memory)
