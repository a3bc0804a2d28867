"""The checkpoints in an object store: the names of their objects, and the order in which these are put and deleted.

    {remote_save_url}/checkpoint/
      run-0002-1f3a9c04.json                              status of the newest run: the step that it is uploading
      step-0000000015-run-0002-1f3a9c04/                  one attempt: all that one run saved of one step
        rank_0/qwen3_rank_0-2_5.safetensors               weights, or qwen3-model-...safetensors, common.json, metadata.json
        .mindresume/step-0000000015-run-0002-1f3a9c04/    rank_00000.json ..., and put last: manifest.json

    put       each rank: weights ─▶ its record      rank 0: objects of all ranks there? ─▶ the manifest: that is the commit
    delete    the manifest ─▶ everything else

Names contain step and run, so no object ever replaces another one (except the status of a run), and the objects of a dead rank
differ from those that are being uploaded. Below its name an attempt has the layout of a checkpoint directory: its copy is a
checkpoint, or an iteration folder.
"""
from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from mindresume.bounded_json import parse_json
from mindresume.errors import RecordError, RemoteError
from mindresume.events import CheckpointsRemoved, Emit, ignore, warning
from mindresume.formats.iteration_naming import iteration_name
from mindresume.formatting import listed
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    Manifest,
    attempt_name,
    attempts,
    parse_attempt,
    read_record,
    record_name,
    record_rank,
    run_sequence,
)
from mindresume.model.training_state import is_count
from mindresume.saving.retention import Policy, surplus
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.object_store import ObjectStore
from mindresume.storage.operations import parallel, read_bytes

_STATUS, _SUFFIX = "run-", ".json"
_LOST = "lost-"                  # prefix of the name of a record that will never come


@dataclass(frozen=True)
class BucketListing:
    """Holds one listing. ``objects``: {name of an attempt: names of its objects}; ``run_statuses``: runs with a status object."""
    objects: Mapping[str, frozenset[str]]
    run_statuses: tuple[str, ...]

    def committed(self) -> list[str]:
        """Returns the names of attempts that have a manifest, newest first: by run, then step."""
        found = [(run_sequence(run), step, name) for name, step, run in attempts(list(self.objects))
                 if record_path(name, MANIFEST) in self.objects[name]]
        return [name for *_, name in sorted(found, reverse=True)]

    def runs(self) -> list[str]:
        """Returns every run that has an object, the latest last."""
        found = {*self.run_statuses, *(run for _, _, run in attempts(list(self.objects)))}
        return sorted(found, key=lambda run: (run_sequence(run), run))


@dataclass(frozen=True)
class RunStatus:
    """Tells all ranks of a run what to do. ``step``: they upload it now; ``ended``: nothing will follow, because of ``reason``
    unless the training has ended."""
    step: int | None = None
    ended: bool = False
    reason: str = ""


@dataclass(frozen=True)
class _RetentionRow:
    """Holds what a retention policy needs of one checkpoint."""
    step: int
    saved_at: float
    metrics: Mapping[str, float]
    health: int | None


def record_path(attempt: str, name: str) -> str:
    """Returns the path of a record, or of the manifest, in an attempt: relative to the folder that the paths in it start from."""
    return f"{FOLDER}/{attempt}/{name}"


def committed_dir(target: SaveTarget, step: int) -> str | None:
    """Returns the folder that the paths in the records of a step start from, None unless this run has committed the step and it
    has its final name."""
    data_dir = os.path.join(target.root, iteration_name(step)) if target.iterations else target.root
    manifest = os.path.join(data_dir, record_path(attempt_name(step, target.run), MANIFEST))
    return data_dir if target.storage.status(manifest) is not None else None


@dataclass
class RemoteCheckpoints:
    """Reads, puts and deletes the checkpoints below ``url``. Every method raises RemoteError if the store fails."""
    store: ObjectStore
    url: str
    _manifests: dict[str, Manifest] = field(default_factory=dict)       # read already; they never change
    _unreadable: set[str] = field(default_factory=set)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def scan(self) -> BucketListing:
        """Returns what is there, with one listing."""
        objects: dict[str, set[str]] = {}
        statuses = []
        for name in self.store.list(self.url):
            attempt, _, path = name.partition("/")
            if path and parse_attempt(attempt):         # without a path: an object that stands for an empty folder
                objects.setdefault(attempt, set()).add(path)
            elif attempt.startswith(_STATUS) and attempt.endswith(_SUFFIX):
                run = attempt[len(_STATUS):-len(_SUFFIX)]
                with suppress(RecordError):
                    run_sequence(run)
                    statuses.append(run)
        return BucketListing({attempt: frozenset(paths) for attempt, paths in objects.items()}, tuple(statuses))

    def manifest(self, attempt: str) -> tuple[Manifest, bytes]:
        """Returns the manifest of an attempt, and its bytes. Raises RecordError if it is damaged, or not of this attempt."""
        data = self.store.read(self._url(attempt, record_path(attempt, MANIFEST)))
        manifest = Manifest.read(io.BytesIO(data))
        if attempt_name(manifest.step, manifest.run) != attempt:
            raise RecordError(f"the manifest is of run {manifest.run}, step {manifest.step}")
        return manifest, data

    def record(self, attempt: str, rank: int) -> bytes:
        """Returns the bytes of the record of one rank."""
        return self.store.read(self._url(attempt, record_path(attempt, record_name(rank))))

    def download(self, attempt: str, path: str, target: str) -> None:
        """Downloads a file to ``target``. ``path``: as the manifest names it."""
        self.store.download(self._url(attempt, path), target)

    def _url(self, attempt: str, path: str) -> str:
        return f"{self.url}/{attempt}/{path}"

    # ---- runs ------------------------------------------------------------------------------------------------------

    def publish_status(self, run: str, status: RunStatus) -> None:
        """Puts the status that rank 0 gives its run: the other ranks, on any node, follow it, and other jobs see the run."""
        text = json.dumps({"step": status.step, "ended": status.ended, "reason": status.reason})
        self.store.put(self._status_url(run), text.encode())

    def read_status(self, run: str) -> RunStatus | None:
        """Returns the status of a run; None: not published yet, or removed by a later run."""
        if self.store.size(url := self._status_url(run)) is None:
            return None
        try:
            value = parse_json(self.store.read(url))
            step, ended, reason = value["step"], value["ended"], value.get("reason", "")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RemoteError(f"{url} is not a run status that mindresume wrote ({error}); the next step replaces it") from error
        return RunStatus(step if is_count(step) else None, ended is True, reason if isinstance(reason, str) else "")

    def _status_url(self, run: str) -> str:
        return f"{self.url}/{_STATUS}{run}{_SUFFIX}"

    def check_not_superseded(self, run: str, listing: BucketListing | None = None) -> None:
        """Raises SupersededError if there is an object of a later run: this run was taken for dead, or two jobs use the same
        URL."""
        latest = next(reversed((listing or self.scan()).runs()), run)
        if (run_sequence(latest), latest) > (run_sequence(run), run):
            raise SupersededError(f"{self.url} has been taken over by run {latest}; this job, run {run}, uploads nothing more. "
                                  f"End one of them, or give each job a remote_save_url of its own")

    # ---- putting ---------------------------------------------------------------------------------------------------

    @staticmethod
    def has_shard(target: SaveTarget, step: int, data_dir: str) -> bool:
        """Returns whether this rank sees its own record on its disk."""
        path = record_path(attempt_name(step, target.run), record_name(target.rank))
        return target.storage.status(os.path.join(data_dir, path)) is not None

    def put_shard(self, target: SaveTarget, step: int, data_dir: str) -> int:
        """Uploads the files that one rank saved (rank 0: the metadata files too), then its record. Leaves out what is there
        already. Returns the bytes sent. Raises OSError or RecordError if it cannot be read from the disk (any more)."""
        attempt = attempt_name(step, target.run)
        recorded = os.path.join(data_dir, record_path(attempt, record_name(target.rank)))
        with target.storage.open(recorded) as file:
            files = [*read_record(file)[0].files]
        if target.rank == 0:
            files += self.local_manifest(target, attempt, data_dir)[0].metadata_files
        sent = 0
        for file in files:
            if self.store.size(self._url(attempt, file.path)) != file.size:
                self.store.upload(os.path.join(data_dir, file.path), self._url(attempt, file.path))
                sent += file.size or 0
        self.store.put(self._url(attempt, record_path(attempt, record_name(target.rank))), read_bytes(target.storage, recorded))
        return sent

    def report_lost_shard(self, target: SaveTarget, step: int, reason: str) -> None:
        """Tells rank 0 that the shard of this rank will never come."""
        attempt = attempt_name(step, target.run)
        self.store.put(self._url(attempt, record_path(attempt, f"{_LOST}{record_name(target.rank)}")), reason.encode())

    def missing(self, target: SaveTarget, step: int, data_dir: str) -> list[str]:
        """Returns, for rank 0, the names of objects that must be there before the manifest and are not. A record is put after all
        files that it names, whose sizes were checked. Raises LostShardError if a rank has reported its shard lost."""
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
        """Puts the manifest, after ``missing`` returned nothing. Raises RemoteError if an object is gone all the same: a later
        run took this one for dead, and removed what it had not completed."""
        attempt = attempt_name(step, target.run)
        manifest, data = self._whole(target, attempt, data_dir)
        path = record_path(attempt, MANIFEST)
        self.store.put(self._url(attempt, path), data)
        # A later run that removes the attempt looks for the manifest before, and deletes it again after everything else: one of
        # the two sees what the other has done.
        gone = self.missing(target, step, data_dir)
        if gone:
            self.store.delete(self._url(attempt, path))
            raise RemoteError(f"{len(gone)} objects were removed while the last ones came, the first is {gone[0]}")
        self._manifests[attempt] = manifest

    def _whole(self, target: SaveTarget, attempt: str, data_dir: str) -> tuple[Manifest, bytes]:
        """Returns the manifest of all ranks. Where nodes share no disk, the manifest of rank 0's node names the ranks of that
        node only: then it is made from the records of all ranks, which are together only in the store."""
        manifest, data = self.local_manifest(target, attempt, data_dir)
        if not manifest.local_ranks:
            return manifest, data
        if attempt not in self._manifests:
            self._manifests[attempt] = Manifest.from_records(parallel(
                target.storage, lambda rank: read_record(io.BytesIO(self.record(attempt, rank))), range(manifest.world_size)))
        return self._manifests[attempt], self._manifests[attempt].encode()

    @staticmethod
    def local_manifest(target: SaveTarget, attempt: str, data_dir: str) -> tuple[Manifest, bytes]:
        """Returns the manifest on the disk of this rank, and its bytes."""
        data = read_bytes(target.storage, os.path.join(data_dir, record_path(attempt, MANIFEST)))
        return Manifest.read(io.BytesIO(data)), data

    # ---- deleting --------------------------------------------------------------------------------------------------

    def prune(self, policy: Policy, run: str, step: int, emit: Emit = ignore) -> list[int]:
        """Removes, after ``step`` of ``run`` was committed, the checkpoints that the policy does not keep, and attempts that
        earlier runs, or this one before ``step``, never completed. Keeps the newest checkpoint, the newest healthy one, and
        ``step``; checkpoints of another training (``lineage.py``) are not counted and stay.

        Returns:
            The steps of removed checkpoints.

        Raises:
            SupersededError: a later run is there; nothing was removed.
            RemoteError: something could not be removed; the rest was.
        """
        seen = self.scan()
        self.check_not_superseded(run, seen)
        own = self._known(attempt_name(step, run), emit)
        newest_first, saved = [], []
        for name in seen.committed():
            manifest = self._known(name, emit)
            if manifest is not None and (own is None or manifest.lineage == own.lineage):
                newest_first.append(name)
                saved.append(_RetentionRow(manifest.step, manifest.saved_at, dict(manifest.state.metrics), manifest.state.health))
        healthy = next((index for index, one in enumerate(saved) if not one.health), None)
        going = [index for index in surplus(policy, saved) if index != healthy and newest_first[index] != attempt_name(step, run)]
        failures: list[RemoteError] = []
        removed = [saved[index].step for index in going if self._delete(newest_first[index], seen, failures)]
        for name, number, of in attempts(list(seen.objects)):
            if record_path(name, MANIFEST) not in seen.objects[name] and (
                    run_sequence(of) < run_sequence(run) or of == run and number < step):
                self._delete(name, seen, failures)
        for other in seen.run_statuses:
            if run_sequence(other) < run_sequence(run):
                self._try(failures, self._status_url(other))
        if removed:
            emit(CheckpointsRemoved(tuple(removed), self.url, str(policy)))
        if failures:
            raise RemoteError(f"{len(failures)} names below {self.url} could not be cleared: {failures[0]}")
        return removed

    def _known(self, attempt: str, emit: Emit) -> Manifest | None:
        """Returns a manifest, which is read once. None if it cannot be read (damaged, archived, access denied): the attempt
        stays, and is not counted."""
        if attempt not in self._manifests and attempt not in self._unreadable:
            try:
                self._manifests[attempt] = self.manifest(attempt)[0]
            except (RecordError, RemoteError) as error:
                self._unreadable.add(attempt)
                emit(warning(f"{self.url}/{attempt} stays, and is not counted: its manifest cannot be read: {error}"))
        return self._manifests.get(attempt)

    def _delete(self, attempt: str, seen: BucketListing, failures: list[RemoteError]) -> bool:
        """Deletes the objects of an attempt. Returns whether all are gone. The manifest of a checkpoint goes first: a reader
        that has begun to download finds objects missing, and takes another checkpoint. The manifest of an attempt that never
        completed goes last, because its run may be alive and put it meanwhile."""
        manifest = record_path(attempt, MANIFEST)
        others = sorted(seen.objects[attempt] - {manifest})
        if manifest not in seen.objects[attempt]:
            try:
                if self.store.size(self._url(attempt, manifest)) is not None:
                    return False                                    # the listing lags behind
            except RemoteError as error:
                failures.append(error)
                return False
        order = [manifest, *others] if manifest in seen.objects[attempt] else [*others, manifest]
        self._manifests.pop(attempt, None)
        return self._try(failures, *(self._url(attempt, name) for name in order))

    def _try(self, failures: list[RemoteError], *urls: str) -> bool:
        """Deletes objects in this order. Returns False, and deletes no further one, if one cannot be deleted: the next ``prune``
        tries again."""
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
