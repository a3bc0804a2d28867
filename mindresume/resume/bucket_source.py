"""The object store from which checkpoints that this disk does not hold are fetched. All ranks take
part.

    select from this disk ─▶ ``fetch_newer``: does the url hold a newer one? ─▶ ``_Fetch`` ─▶ select
        from this disk again

    a fetch: a folder of records, still empty ─▶ room? ─▶ each rank: download ─▶ checksum ─▶ rename
        ─▶ all ranks have theirs?
    ─▶ records ─▶ rank 0: manifest ─▶ an iteration folder gets its name

A checkpoint that cannot be fetched is refused with its reason, and the next older one is fetched. A
fetch that is interrupted leaves a save that never completed, with all files that arrived; the next
start continues it. A file that is on this disk with the right checksum is not downloaded again. The
files of a checkpoint that does not arrive whole are removed so that they do not fill the disk.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import Watchdog, gather_results, run_on_rank0
from mindresume.coordination.liveness import host_identity
from mindresume.coordination.storage_topology import order_of
from mindresume.errors import CorruptFileError, NoUsableCheckpointError, RecordError, RemoteError
from mindresume.events import CandidateRefused, CheckpointFetched, warning
from mindresume.formats import OURS, Candidate, CheckpointDir, Refusal
from mindresume.formats.iterations import iteration_name
from mindresume.formats.rank_folders import parse_label
from mindresume.formats.records import candidate_of
from mindresume.formats.scan import is_requested, scan
from mindresume.formats.weight_files import header_of, is_as_recorded
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    FileRecord,
    Manifest,
    parse_attempt,
    read_details,
    record_name,
)
from mindresume.resume.eligible import Choice, check_files, eligible, none_usable
from mindresume.resume.sources import Job, drop_cached_files
from mindresume.saving import iteration_publisher
from mindresume.saving.crash_loop import failed_loads_by_key, suspicion
from mindresume.saving.garbage_collector import free_names
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage import parallel, publish, read_bytes, temporary_name
from mindresume.storage.read_cache import uncached

_SPARE = 64 << 20  # bytes that stay free on the disk
# seconds without a completed file on any rank, after which a download is given up
_PATIENCE = 7200.0


@dataclass
class BucketSource:
    """An object store that may hold newer checkpoints. All ranks use it in the same way.

    Args:
        job: who selects. Checkpoints that its policy would refuse, by their manifest or by failed
            loads that are recorded on this disk, are not fetched.
        root: the folder in which the job saves, to which files are downloaded.
    """

    job: Job
    remote: RemoteCheckpoints
    root: str
    refused: list[Refusal] = field(default_factory=list)
    _tried: set[str] = field(default_factory=set)
    _fetched: list[str] = field(default_factory=list)

    def fetch_newer(self, chosen: Candidate | None, refused: tuple[Refusal, ...]) -> bool:
        """Fetches the newest checkpoint that is newer than all usable ones on this disk. Returns
        whether there was one: then the disk is selected from again.

        Args:
            chosen: the choice of the disk; None: there is none.
            refused: the refusals of the selection on this disk.
        Raises:
            RemoteError: on all ranks, if there is no checkpoint on this disk and the store cannot
                be read.
        """
        job, steps = self.job, {refusal.step for refusal in refused}
        if chosen is not None and job.policy.requested:
            return False
        bound = (chosen.order[:2] if chosen else (0, 0)) if job.is_split else None
        while True:
            offer = run_on_rank0(
                job.group,
                lambda: self._offer(steps, bound, suspected=chosen is None),
                Watchdog(f"looking at {self.remote.url}"),
            )
            for row in offer["refused"]:
                self._refuse(*row)
            if offer.get("failed") and chosen is None:
                raise RemoteError(offer["failed"])
            if offer.get("failed"):
                job.emit(
                    warning(f"{offer['failed']}. The newest checkpoint on this machine is taken")
                )
            if not offer["attempt"]:
                return False
            self._tried.add(offer["attempt"])
            fetch = _Fetch(
                job,
                self.remote,
                CheckpointDir(uncached(job.storage), self.root),
                offer["attempt"],
                offer["manifest"],
            )
            problem = fetch.run()
            # this rank or another one may have replaced files
            drop_cached_files(job.storage)
            if problem is None:
                self._fetched.append(offer["attempt"])
                return True
            self._refuse(offer["attempt"], problem)

    def allow(self, choice: Choice) -> Choice:
        """Returns the choice of the disk. Raises NoUsableCheckpointError, on all ranks, if it is a
        fresh start although the store holds checkpoints."""
        if choice.chosen is None and self._tried:
            for attempt in self._fetched:
                self._refuse(attempt, "it was fetched, but it is not complete on this disk")
            raise NoUsableCheckpointError(
                f"{none_usable(self.remote.url, self.refused)}\n"
                f"Repair one of them, or to start afresh set resume_training: False",
                self.refused,
            )
        return choice

    def _refuse(self, attempt: str, reason: str) -> None:
        self._tried.add(attempt)
        step, _ = parse_attempt(attempt)
        self.refused.append(Refusal(step, f"{reason} [{self.remote.url}/{attempt}]"))
        self.job.emit(CandidateRefused(step, reason, f"{self.remote.url}/{attempt}"))

    # ---- rank 0 ----------------------------------------------------------------------------------

    def _offer(
        self, refused: set[int | None], bound: tuple[float, ...] | None, suspected: bool
    ) -> dict[str, Any]:
        """Returns the checkpoint to fetch next, and those that are refused with their reasons.

        Args:
            refused: steps that were refused on this disk.
            bound: the checkpoint must be newer than this order. None: than the newest usable one on
                this disk.
            suspected: whether a checkpoint is offered after whose loading too many jobs died: it is
                better than none.
        """
        offer: dict[str, Any] = {"attempt": "", "refused": []}
        directory = CheckpointDir(uncached(self.job.storage), self.root)
        policy, requested = self.job.policy, self.job.policy.requested
        if requested:
            bound = (0, 0)
        elif bound is None:
            bound = max(
                (
                    c.order[:2]
                    for c in scan(directory).candidates
                    if c.origin == OURS and c.problem is None and c.step not in refused
                ),
                default=(0, 0),
            )
        try:
            names = [
                name
                for name in self.remote.scan().committed()
                if name not in self._tried and order_of(name) > bound
            ]
        except RemoteError as error:
            return {
                **offer,
                "failed": f"it is not known whether {self.remote.url} holds a newer checkpoint: "
                f"{error}",
            }
        failed_loads = (
            failed_loads_by_key(directory) if policy.max_failed_loads and not requested else {}
        )
        suspected_names = [
            name for name in names if suspicion(failed_loads.get(name, ()), policy.max_failed_loads)
        ]
        for attempt in [
            *(name for name in names if name not in suspected_names),
            *(suspected_names if suspected else ()),
        ]:
            try:
                manifest, data = self.remote.manifest(attempt)
            except (RecordError, RemoteError) as error:
                offer["refused"].append((attempt, f"its manifest cannot be read: {error}"))
                continue
            candidate = candidate_of(
                manifest, iteration_name(manifest.state.step) if is_iteration_save(manifest) else ""
            )
            if requested and not is_requested(candidate, requested):
                continue
            refusal = eligible(
                directory, candidate, policy, is_explicit=bool(requested)
            ) or check_files(directory, candidate, policy.world_size, files=False)
            if refusal is None:
                return {**offer, "attempt": attempt, "manifest": data.decode()}
            offer["refused"].append((attempt, refusal.reason))
        return offer


class _Fetch:
    """The fetch of one checkpoint to this disk. All ranks use it in the same way, each for its own
    files: those of the saved ranks ``rank``, ``rank + size``, ...; its own, if as many ranks saved
    it. Where nodes share no storage, each node gets all records and the manifest.

    Attributes:
        done: bytes that this rank has downloaded so far.
    """

    def __init__(
        self,
        job: Job,
        remote: RemoteCheckpoints,
        directory: CheckpointDir,
        attempt: str,
        manifest: str,
    ):
        self.job = job
        self.remote = remote
        self.directory = directory
        self.attempt = attempt
        self.manifest_bytes = manifest.encode()
        self.manifest = Manifest.read(io.BytesIO(self.manifest_bytes))
        visible = directory.path(iteration_name(self.manifest.state.step))
        if not is_iteration_save(self.manifest):
            self.target_dir = directory.root
        elif directory.storage.status(os.path.join(visible, FOLDER, attempt)) is not None:
            # it is here, and something in it is damaged
            self.target_dir = visible
        else:
            self.target_dir = directory.path(FOLDER, attempt)
        self.records = os.path.join(self.target_dir, FOLDER, attempt)
        self.done = 0
        self._missing: list[FileRecord] = []
        self._written: list[str] = []

    def run(self) -> str | None:
        """Returns None if the checkpoint is complete on this disk; else the reason, and the files
        that arrived are removed."""
        manifest, started = self.manifest, runtime.monotonic()
        problem = (
            self._on_all(self._prepare)
            or self._no_room()
            or self._on_all(self._download)
            or self._on_all(self._publish_records)
            or self._on_all(self._publish_other_records)
        )
        if problem is not None:
            self._on_all(self._withdraw)
            return problem
        late = self._on_all(self._commit)
        total = sum(file.size or 0 for files in manifest.files for file in files)
        self.job.emit(
            CheckpointFetched(
                manifest.state.step,
                self.remote.url,
                self.done,
                total,
                runtime.monotonic() - started,
            )
        )
        # all files are here: the next run commits it and gives it its name
        if late is not None:
            self.job.emit(
                warning(f"step {manifest.state.step} was fetched, but not committed: {late}")
            )
        return None

    def _on_all(self, work: Callable[[], None]) -> str | None:
        """Returns None if ``work`` succeeded on all ranks, else the first reason."""

        def attempt() -> str | None:
            try:
                work()
            except (OSError, RemoteError, RecordError) as error:
                return str(error)
            return None

        found = gather_results(
            self.job.group, attempt, Watchdog(f"fetching from {self.remote.url}", self, _PATIENCE)
        )
        return next(
            (f"rank {number}: {reason}" for number, reason in enumerate(found) if reason), None
        )

    def _is_leader(self) -> bool:
        """Returns whether this rank works for all: rank 0, or where nodes share no storage the
        first rank of each node."""
        rank = self.job.group.rank
        return self.job.sources.shared.is_leader(rank) if self.job.is_split else rank == 0

    def _ranks(self) -> range:
        """Returns the saved ranks whose files this rank fetches."""
        return range(self.job.group.rank, self.manifest.world_size, self.job.group.size)

    def _prepare(self) -> None:
        """Creates the folder of records, which marks weights without a record as a save that never
        completed. Removes such files of earlier saves that have the names of files to fetch."""
        if self._is_leader():
            paths = {
                os.path.join(self.target_dir, file.path)
                for files in self.manifest.files
                for file in files
            }
            free_names(self.directory, paths, self.manifest.run, self.job.emit)
            self.directory.storage.make_folder(self.records)

    def _no_room(self) -> str | None:
        """Returns why the disk has no room for the download; None if it has. Ranks of one host are
        taken to share its disk. If several hosts share a disk that is too small, the download
        itself fails."""
        rows = gather_results(self.job.group, self._find_missing, Watchdog("looking for room"))
        failed = next((row[3] for row in rows if row[3]), None)
        if failed:
            return failed
        for number, (host, _, room, _) in enumerate(rows):
            needed = sum(row[1] for row in rows if row[0] == host)
            if needed and room < needed + _SPARE:
                return (
                    f"{needed / 2**20:.1f} MiB are to be fetched, {self.directory.root} on the "
                    f"host of rank {number} has room for {room / 2**20:.1f} MiB; free some space"
                )
        return None

    def _find_missing(self) -> list[Any]:
        """Finds the files that are not on this disk. Returns [host, their bytes, free bytes of the
        disk, why that is not known]."""
        storage = self.directory.storage
        files = [file for rank in self._ranks() for file in self.manifest.files[rank]]
        files += self.manifest.metadata_files if self.job.group.rank == 0 else ()
        try:
            for file in files:
                path = os.path.join(self.target_dir, file.path)
                if storage.status(path) is None or not is_as_recorded(storage, path, file):
                    self._missing.append(file)
            size = sum(file.size or 0 for file in self._missing)
            return [host_identity(), size, storage.free_space(self.directory.root), None]
        except OSError as error:
            return ["", 0, 0, f"{self.directory.root}: {error}"]

    def _download(self) -> None:
        """Downloads each file under a temporary name, which the next run would remove, and renames
        it."""
        storage = self.directory.storage
        for file in self._missing:
            path = os.path.join(self.target_dir, file.path)
            self._refuse_foreign(path, file)
            temporary = temporary_name(path, self.manifest.run)
            storage.make_folder(os.path.dirname(path))
            storage.remove(temporary)
            self.remote.download(self.attempt, file.path, temporary)
            if not is_as_recorded(storage, temporary, file):
                storage.remove(temporary)
                raise RecordError(f"{file.path}: its bytes are not those that were saved")
            self._written.append(path)
            storage.rename(temporary, path)
            storage.sync(os.path.dirname(path))
            self.done += file.size or 0

    def _refuse_foreign(self, path: str, file: FileRecord) -> None:
        """Raises RecordError if the file at ``path`` belongs to another run, which started on an
        empty disk with the same names. A damaged file of this save is replaced."""
        if self.directory.storage.status(path) is None:
            return
        try:
            label = parse_label(
                header_of(CheckpointDir(self.directory.storage, self.target_dir), file)
            )
        except CorruptFileError:
            return
        if label not in (None, (self.manifest.run, self.manifest.state.step)):
            raise RecordError(
                f"{path} is of run {label[0]}, step {label[1]}, and is not overwritten; move it "
                "away"
            )

    def _publish_records(self) -> None:
        """Publishes the records of the saved ranks that this rank fetches."""
        self.directory.storage.make_folder(self.records)
        parallel(self.directory.storage, self._publish_record, self._ranks())

    def _publish_other_records(self) -> None:
        """Publishes all records that are not here, as on nodes that share no storage."""
        if self._is_leader():
            names = set(self.directory.storage.list(self.records))
            parallel(
                self.directory.storage,
                self._publish_record,
                [
                    rank
                    for rank in range(self.manifest.world_size)
                    if record_name(rank) not in names
                ],
            )

    def _publish_record(self, rank: int) -> None:
        storage = self.directory.storage
        manifest = self.manifest
        path = os.path.join(self.records, record_name(rank))
        data = self.remote.record(self.attempt, rank)
        record, _ = read_details(io.BytesIO(data))
        if (record.run, record.state.step, record.rank, record.files) != (
            manifest.run,
            manifest.state.step,
            rank,
            manifest.files[rank],
        ):
            raise RecordError(
                f"{record_name(rank)} is not the record of rank {rank} from which the manifest was "
                "made"
            )
        if storage.status(path) is None or read_bytes(storage, path) != data:
            self._written.append(path)
            publish(storage, path, [data], manifest.run)

    def _withdraw(self) -> None:
        """Removes the fetched files; records before the files that they name."""
        for path in reversed(self._written):
            self.directory.storage.remove(path)
        # other ranks may not be done, or some records were here before
        with suppress(OSError):
            self.directory.storage.remove(self.records)

    def _commit(self) -> None:
        """Publishes the manifest, and gives an iteration folder its name."""
        if not self._is_leader():
            return
        directory, manifest = self.directory, self.manifest
        publish(
            directory.storage,
            os.path.join(self.records, MANIFEST),
            [self.manifest_bytes],
            manifest.run,
        )
        if self.target_dir.endswith(os.path.join(FOLDER, self.attempt)):
            target = SaveTarget(
                directory.storage,
                directory.root,
                manifest.run,
                0,
                manifest.world_size,
                iterations=True,
            )
            iteration_publisher.publish_iteration(target, manifest.state.step)


def is_iteration_save(manifest: Manifest) -> bool:
    """Returns whether it commits an iteration folder of Checkpoint 2.0: its files lie in the folder
    itself."""
    return "/" not in manifest.files[0][0].path
