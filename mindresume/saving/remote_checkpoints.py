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

    put       each rank: weights ─▶ its record
              rank 0: objects of all ranks there? ─▶ manifest, which is the commit
    delete    manifest ─▶ everything else

Names contain step and run. So no object ever replaces another one (except the status of a run), and
objects that a dead run left behind have other names than those that are being uploaded. An attempt
has the layout of a checkpoint directory: a copy of it is a checkpoint, or an iteration folder.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from mindresume.coordination.lease import run_order
from mindresume.coordination.lease_acquisition import next_run, record_run_number
from mindresume.errors import CorruptFileError, RecordError, RemoteError
from mindresume.events import CheckpointsRemoved, Emit, ignore, warning
from mindresume.formats import CheckpointDir
from mindresume.formats.records import candidate_of
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    FileRecord,
    Manifest,
    attempt_name,
    attempts,
    parse_attempt,
    record_name,
    run_sequence,
)
from mindresume.saving.retention import Policy, surplus
from mindresume.storage import Storage
from mindresume.storage.object_store import ObjectStore
from mindresume.tensor_files import file_checksum
from mindresume.typed import Count, decode, parse_json

_STATUS, _SUFFIX = "run-", ".json"


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
        return sorted(found, key=run_order)


@dataclass(frozen=True)
class RunStatus:
    """Tells all ranks of a run what to do. ``step``: they upload it now. ``ended``: no upload
    follows. ``reason``: why; empty: the training has ended."""

    step: Count | None
    ended: bool
    reason: str = ""


def record_path(attempt: str, name: str) -> str:
    """Returns the path of a record or manifest of an attempt, relative to the folder to which the
    paths in it are relative."""
    return f"{FOLDER}/{attempt}/{name}"


@dataclass
class RemoteCheckpoints:
    """Reads, puts and deletes the checkpoints below ``url``. Every method raises RemoteError if the
    store fails."""

    store: ObjectStore
    url: str
    # read already; a manifest never changes
    manifests: dict[str, Manifest] = field(default_factory=dict)
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
        data = self.store.read(self.record_url(attempt, MANIFEST))
        manifest = Manifest.read(io.BytesIO(data))
        if attempt_name(manifest.state.step, manifest.run) != attempt:
            raise RecordError(f"the manifest is of run {manifest.run}, step {manifest.state.step}")
        return manifest, data

    def has(self, attempt: str) -> bool:
        """Returns whether an attempt is committed in the store."""
        return self.store.size(self.record_url(attempt, MANIFEST)) is not None

    def record(self, attempt: str, rank: int) -> bytes:
        """Returns the bytes of the record of one rank."""
        return self.store.read(self.record_url(attempt, record_name(rank)))

    def download(self, attempt: str, path: str, target: str) -> None:
        """Downloads a file to ``target``. ``path``: as the manifest names it."""
        self.store.download(self.object_url(attempt, path), target)

    def object_url(self, attempt: str, path: str) -> str:
        """Returns the URL of an object of an attempt."""
        return f"{self.url}/{attempt}/{path}"

    def record_url(self, attempt: str, name: str) -> str:
        """Returns the URL of a record or the manifest of an attempt."""
        return self.object_url(attempt, record_path(attempt, name))

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
            return decode(RunStatus, parse_json(self.store.read(url)), "status")
        except (ValueError, RecordError) as error:
            raise RemoteError(
                f"{url} is no run status that mindresume wrote: {error}; the next upload replaces "
                "it"
            ) from error

    def _status_url(self, run: str) -> str:
        return f"{self.url}/{_STATUS}{run}{_SUFFIX}"

    def check_not_superseded(self, run: str, listing: BucketListing | None = None) -> None:
        """Raises SupersededError if there is an object of a later run: this run was taken for dead,
        or two jobs use the same URL."""
        latest = next(reversed((listing or self.scan()).runs()), run)
        if run_order(latest) > run_order(run):
            raise SupersededError(
                f"{self.url} has been taken over by run {latest}; this job, run {run}, uploads "
                "nothing more. End one of them, or give each job a remote_save_url of its own"
            )

    # ---- putting ---------------------------------------------------------------------------------

    def has_file(self, attempt: str, file: FileRecord) -> bool:
        """See ``mindresume.saving.replication.Place``."""
        return self.store.size(self.object_url(attempt, file.path)) == file.size

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
        self.store.upload(path, self.object_url(attempt, file.path))

    def put_record(self, attempt: str, rank: int, record: bytes) -> None:
        """See ``Place``."""
        self.store.put(self.record_url(attempt, record_name(rank)), record)

    def committed(self, attempt: str, manifest: Manifest) -> None:
        """Notes the manifest of a save that is complete in the store now."""
        self.manifests[attempt] = manifest

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
        saves = [
            candidate_of(manifest)
            for name in seen.committed()
            if (manifest := self._known(name, emit)) is not None
            and (own is None or manifest.lineage == own.lineage)
        ]
        healthy = next((save for save in saves if not save.health), None)
        failures: list[RemoteError] = []
        removed = [
            save.step
            for save in (saves[index] for index in surplus(policy, saves))
            if save is not healthy
            and save.name != attempt_name(step, run)
            and self._delete(save.name, seen, failures)
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
        if attempt not in self.manifests and attempt not in self._unreadable:
            try:
                self.manifests[attempt] = self.manifest(attempt)[0]
            except (RecordError, RemoteError) as error:
                self._unreadable.add(attempt)
                emit(
                    warning(
                        f"{self.url}/{attempt} stays and does not count, because its manifest "
                        f"cannot be read: {error}"
                    )
                )
        return self.manifests.get(attempt)

    def _delete(self, attempt: str, seen: BucketListing, failures: list[RemoteError]) -> bool:
        """Deletes the objects of an attempt. Returns whether all are gone. The manifest of a
        checkpoint is deleted first: a reader that has begun to download finds that objects are
        missing, and takes another checkpoint. The manifest of an incomplete attempt is deleted
        last, because its run may be alive and put it meanwhile."""
        manifest = record_path(attempt, MANIFEST)
        others = sorted(seen.objects[attempt] - {manifest})
        if manifest not in seen.objects[attempt]:
            try:
                if self.store.size(self.object_url(attempt, manifest)) is not None:
                    return False  # the listing was out of date
            except RemoteError as error:
                failures.append(error)
                return False
        order = [manifest, *others] if manifest in seen.objects[attempt] else [*others, manifest]
        self.manifests.pop(attempt, None)
        return self._try(failures, *(self.object_url(attempt, name) for name in order))

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


class SupersededError(RemoteError):
    """A later run uses this URL."""

    code = "MR-503"


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
