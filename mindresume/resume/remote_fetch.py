"""Fetches what an object store holds and this disk does not, before a checkpoint is selected. All ranks take part, each with its
own files.

    choice = RemoteFetch(storage, remote, root, group, policy, ...).select(lambda: select(...))

    select     the choice among what is on this disk ─▶ is there something newer at the url? ─▶ fetch it ─▶ choose again
    fetch      a folder of records, still empty ─▶ room? ─▶ each rank: download ─▶ checksum ─▶ rename ─▶ all ranks have theirs?
               ─▶ records ─▶ rank 0: manifest ─▶ an iteration folder gets its name

A fetch that is interrupted leaves a save that never completed, with all that arrived; the next start continues it. A file that is
on this disk with the right checksum is not downloaded again. A checkpoint that does not arrive whole is refused with its reason,
its files are removed so that they do not fill the disk, and the next older one is fetched.
"""
from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mindresume.coordination.collectives import Group, Waiting, decide, report
from mindresume.coordination.common_checkpoint import order_of
from mindresume.coordination.lease import record_run_number
from mindresume.coordination.lease_acquisition import check_no_live_job
from mindresume.coordination.read_locks import read_locks
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import CorruptFileError, NoUsableCheckpointError, RecordError, RemoteError, UnusableCheckpointError
from mindresume.events import CandidateRefused, CheckpointFetched, Emit, Notice, ignore, warning
from mindresume.formats import OURS, Candidate, Refusal
from mindresume.formats.iteration_naming import iteration_name, parse_iteration
from mindresume.formats.rank_folder_naming import folder_rank, name_for_rank, parse_label
from mindresume.formats.records import candidate_of
from mindresume.formats.scan import scan
from mindresume.formats.weight_files import header_of
from mindresume.model.file_record import FileRecord
from mindresume.model.manifest import FOLDER, MANIFEST, Manifest, parse_attempt, read_details, record_name
from mindresume.resume.health import NONE_HEALTHY, is_unhealthy
from mindresume.resume.selection_policy import SelectionPolicy
from mindresume.resume.selector import Choice
from mindresume.resume.verifier import check_files
from mindresume.saving import iteration_publisher
from mindresume.saving.crash_loop import failed_loads_by_key, suspicion
from mindresume.saving.garbage_collector import free_names
from mindresume.saving.remote_checkpoints import RemoteCheckpoints, record_path
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.atomic_publish import publish, temporary_name
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel, read_bytes
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files.checksum import file_checksum

CHECKPOINT = "checkpoint"       # below output_dir, where mindformers has folders of its own, and below remote_save_url
_SPARE = 64 << 20               # bytes that stay free on the disk
_PATIENCE = 7200.0              # seconds without a completed file on any rank, after which a download is given up


@dataclass
class RemoteFetch:
    """A selection that also considers an object store. All ranks use it in the same way.

    Args:
        storage: the disk to which is downloaded.
        root: the folder of checkpoints there.
        policy: of the selection. Checkpoints that it would refuse, by their manifest or by failed loads that are recorded here,
            are not fetched.
        emit: receives CheckpointFetched and CandidateRefused.
        shared_groups: which ranks share a folder, where nodes share no storage; each node then gets all records and the manifest.
    """
    storage: Storage
    remote: RemoteCheckpoints
    root: str
    group: Group
    policy: SelectionPolicy = SelectionPolicy()
    emit: Emit = ignore
    shared_groups: SharedGroups | None = None
    refused: list[Refusal] = field(default_factory=list)
    _tried: set[str] = field(default_factory=set)
    _fetched: list[str] = field(default_factory=list)
    _refused_unhealthy: bool = False

    def select(self, pick: Callable[[], Choice]) -> Choice:
        """Calls ``pick``, and again after each checkpoint that was fetched.

        Raises: on all ranks the errors of ``pick``, and if it finds no checkpoint on this disk
            NoUsableCheckpointError: none of those in the store could be fetched.
            RemoteError: the store cannot be read.
        """
        while True:
            choice: Choice | None = None
            failure: UnusableCheckpointError | None = None
            try:
                choice = pick()
            except UnusableCheckpointError as error:
                failure = error
            chosen = choice is not None and choice.chosen is not None
            try:
                good = choice.chosen if chosen else None
                if not (chosen and self.policy.requested) and self._fetch_newer((failure or choice).refused, good):
                    continue
            except RemoteError as error:
                if not chosen:
                    raise
                self.emit(warning(f"{error}. The newest on this machine is taken"))
            if failure is not None:
                raise failure
            if not chosen and self._tried:              # the job would start afresh
                for attempt in self._fetched:
                    self._refuse(attempt, "it was fetched, and on this disk it is not complete")
                raise NoUsableCheckpointError(self._none_usable(), self.refused)
            return choice

    def _none_usable(self) -> str:
        table = "\n".join(f"  {refusal}" for refusal in self.refused)
        unhealthy = NONE_HEALTHY + ". " if self._refused_unhealthy else ""
        return (f"{unhealthy}{self.remote.url} holds checkpoints, but none can be used:\n{table}\n"
                f"Repair one of them, or to start afresh set resume_training: False")

    def _fetch_newer(self, refused: Iterable[Any], chosen: Candidate | None) -> bool:
        """Fetches the newest checkpoint that is newer than all usable ones here. Returns whether there was one."""
        steps = {refusal.step for refusal in refused}
        bound = (chosen.order[:2] if chosen else (0, 0)) if self.shared_groups else None
        while True:
            offer = decide(self.group, lambda: self._offer(steps, bound, suspected=chosen is None),
                           Waiting(f"looking at {self.remote.url}"))
            for row in offer["refused"]:
                self._refuse(*row)
            self._refused_unhealthy = self._refused_unhealthy or offer["unhealthy"]
            if "failed" in offer:
                raise RemoteError(offer["failed"])
            if not offer["attempt"]:
                return False
            self._tried.add(offer["attempt"])
            problem = self._fetch(offer["attempt"], offer["manifest"].encode())
            if isinstance(self.storage, ReadCache):
                self.storage.clear()               # this rank or another one may have replaced files
            if problem is None:
                return True
            self._refuse(offer["attempt"], problem)

    def _refuse(self, attempt: str, reason: str) -> None:
        self._tried.add(attempt)
        step, _ = parse_attempt(attempt)
        self.refused.append(Refusal(step, f"{reason} [{self.remote.url}/{attempt}]"))
        self.emit(CandidateRefused(step, reason, f"{self.remote.url}/{attempt}"))

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _offer(self, refused: set[int | None], bound: tuple[float, ...] | None, suspected: bool) -> dict[str, Any]:
        """Returns what to fetch next, and what is refused with its reason.

        Args:
            refused: steps that were refused on this disk.
            bound: order of the checkpoint that must be older. None: that of the newest usable one on this disk.
            suspected: whether a checkpoint is offered after whose loading too many jobs died; this is better than none.
        """
        offer: dict[str, Any] = {"attempt": "", "refused": [], "unhealthy": False}
        policy, requested = self.policy, self.policy.requested
        if requested:
            bound = (0, 0)
        elif bound is None:
            bound = max((c.order[:2] for c in scan(self.storage, self.root).candidates if c.origin == OURS and c.problem is None
                         and c.step not in refused), default=(0, 0))
        try:
            names = [name for name in self.remote.scan().committed() if name not in self._tried and order_of(name) > bound]
        except RemoteError as error:
            return {**offer, "failed": f"whether there is something newer is not known: {error}"}
        deaths = failed_loads_by_key(self.storage, self.root) if policy.max_failed_loads and not requested else {}
        failing = [name for name in names if suspicion(deaths.get(name, ()), policy.max_failed_loads)]
        for attempt in [*(name for name in names if name not in failing), *(failing if suspected else ())]:
            try:
                manifest, data = self.remote.manifest(attempt)
            except (RecordError, RemoteError) as error:
                offer["refused"].append((attempt, f"its manifest cannot be read: {error}"))
                continue
            if requested and not _is_requested(manifest, requested):
                continue
            candidate = candidate_of(manifest, iteration_name(manifest.step) if _is_iteration(manifest) else "")
            if not requested and policy.unhealthy is not None and is_unhealthy(candidate, policy.unhealthy):
                offer["unhealthy"] = True
                offer["refused"].append((attempt, "it was unhealthy when it was saved"))
                continue
            refusal = check_files(self.storage, self.root, candidate, policy.world_size, files=False)
            if refusal is None:
                return {**offer, "attempt": attempt, "manifest": data.decode()}
            offer["refused"].append((attempt, refusal.reason))
        return offer

    # ---- all ranks -------------------------------------------------------------------------------------------------

    def _fetch(self, attempt: str, data: bytes) -> str | None:
        """Fetches one checkpoint. Returns None if it is complete on this disk; else the reason, and what arrived is removed."""
        manifest, started = Manifest.read(io.BytesIO(data)), time.monotonic()
        share = self._share = _Share(self, attempt, manifest)
        problem = (self._all(share.prepare, leaders=True) or self._room(share) or self._all(share.download) or
                   self._all(share.publish_records) or self._all(lambda: share.publish_records(every=True), leaders=True))
        if problem is not None:
            self._all(share.withdraw)
            return problem
        self._fetched.append(attempt)
        late = self._all(lambda: share.commit(data), leaders=True)
        total = sum(file.size or 0 for files in manifest.files for file in files)
        self.emit(CheckpointFetched(manifest.step, self.remote.url, share.fetched, total, time.monotonic() - started))
        if late is not None:                        # all files are here: the next run commits it and gives it its name
            self.emit(warning(f"step {manifest.step} was fetched, but: {late}"))
        return None

    def _room(self, share: _Share) -> str | None:
        """Returns why the disk has no room for the download; None if it has. Ranks of one machine are taken to share its disk. If
        several machines share a disk that is too small, the download itself fails."""
        def look() -> list[Any]:
            try:
                return [socket.gethostname(), share.needed(), self.storage.free_space(self.root), None]
            except OSError as error:
                return ["", 0, 0, f"{self.root}: {error}"]
        rows = report(self.group, look, Waiting("looking for room"))
        failed = next((row[3] for row in rows if row[3]), None)
        if failed:
            return failed
        for host, _, room, _ in rows:
            needed = sum(row[1] for row in rows if row[0] == host)
            if needed and room < needed + _SPARE:
                return (f"{needed / 2**20:.1f} MiB are to be fetched, {self.root} on {host} has room for {room / 2**20:.1f} MiB; "
                        f"free some space")
        return None

    def _all(self, work: Callable[[], None], leaders: bool = False) -> str | None:
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
        found = report(self.group, attempt, Waiting(f"fetching from {self.remote.url}", lambda: self._share.fetched, _PATIENCE))
        return next((f"rank {rank}: {reason}" for rank, reason in enumerate(found) if reason), None)


class _Share:
    """The files of one checkpoint that one rank fetches: those of the saved ranks ``rank``, ``rank + size``, ...; its own, if as
    many ranks saved it."""

    def __init__(self, restore: RemoteFetch, attempt: str, manifest: Manifest):
        self.storage, self.remote, self.attempt, self.manifest = restore.storage, restore.remote, attempt, manifest
        self.root, self.rank, self.emit = restore.root, restore.group.rank, restore.emit
        self.ranks = range(restore.group.rank, manifest.world_size, restore.group.size)
        visible = os.path.join(self.root, iteration_name(manifest.step))
        if not _is_iteration(manifest):
            self.target_dir = self.root
        elif self.storage.status(os.path.join(visible, FOLDER, attempt)) is not None:
            self.target_dir = visible                       # it is here, and something in it is damaged
        else:
            self.target_dir = os.path.join(self.root, FOLDER, attempt)
        self.records = os.path.join(self.target_dir, FOLDER, attempt)
        self.fetched = 0
        self._lacking: list[FileRecord] = []
        self._new: list[str] = []

    def prepare(self) -> None:
        """Creates the folder of records, which marks weights without a record as a save that never completed. Removes such files
        of earlier saves that have the names of files to fetch."""
        paths = {os.path.join(self.target_dir, file.path) for files in self.manifest.files for file in files}
        free_names(self.storage, self.root, paths, self.manifest.run,
                   lambda: check_no_live_job(self.storage, self.root, self.emit),
                   lambda: read_locks(self.storage, self.root), self.emit)
        self.storage.make_folder(self.records)

    def needed(self) -> int:
        """Returns the bytes to download."""
        files = [file for rank in self.ranks for file in self.manifest.files[rank]]
        files += self.manifest.metadata_files if self.rank == 0 else ()
        self._lacking = [file for file in files if not self._is_here(file)]
        return sum(file.size or 0 for file in self._lacking)

    def _is_here(self, file: FileRecord) -> bool:
        path = os.path.join(self.target_dir, file.path)
        found = self.storage.status(path)
        return found is not None and found.size == file.size and self._sum(path) == file.checksum

    def _sum(self, path: str) -> str:
        with self.storage.open(path) as opened:
            return file_checksum(opened)[0]

    def download(self) -> None:
        """Downloads each file under a temporary name, which the next run would remove, and renames it."""
        for file in self._lacking:
            path = os.path.join(self.target_dir, file.path)
            self._refuse_foreign(path, file)
            temporary = temporary_name(path, self.manifest.run)
            self.storage.make_folder(os.path.dirname(path))
            self.storage.remove(temporary)
            self.remote.download(self.attempt, file.path, temporary)
            if self._sum(temporary) != file.checksum:
                self.storage.remove(temporary)
                raise RecordError(f"{file.path}: its bytes are not those that were saved")
            self._new.append(path)
            self.storage.rename(temporary, path)
            self.storage.sync(os.path.dirname(path))
            self.fetched += file.size or 0

    def _refuse_foreign(self, path: str, file: FileRecord) -> None:
        """Raises RecordError if the file at ``path`` belongs to another run, which started on an empty disk with the same names.
        A damaged file of this save is replaced."""
        if self.storage.status(path) is None:
            return
        try:
            label = parse_label(header_of(self.storage, self.target_dir, file))
        except CorruptFileError:
            return
        if label not in (None, (self.manifest.run, self.manifest.step)):
            raise RecordError(f"{path} is of run {label[0]}, step {label[1]}, and is not overwritten; move it away")

    def withdraw(self) -> None:
        """Removes what was fetched; records before the files that they name."""
        for path in reversed(self._new):
            self.storage.remove(path)
        with suppress(OSError):                             # other ranks may not be done, or some records were here before
            self.storage.remove(self.records)

    def publish_records(self, every: bool = False) -> None:
        """Publishes the records of this rank's share. ``every``: those of all ranks that are missing here, as on nodes that
        share no storage."""
        self.storage.make_folder(self.records)
        names = set(self.storage.list(self.records)) if every else set()

        def fetch(rank: int) -> None:
            path = os.path.join(self.records, record_name(rank))
            data = self.remote.record(self.attempt, rank)
            record, _ = read_details(io.BytesIO(data))
            if (record.run, record.step, record.rank, record.files) != (self.manifest.run, self.manifest.step, rank,
                                                                        self.manifest.files[rank]):
                raise RecordError(f"{record_name(rank)} is not the record of rank {rank} that the manifest is made from")
            if self.storage.status(path) is None or read_bytes(self.storage, path) != data:
                self._new.append(path)
                publish(self.storage, path, [data], self.manifest.run)
        wanted = range(self.manifest.world_size) if every else self.ranks
        parallel(self.storage, fetch, [rank for rank in wanted if record_name(rank) not in names])

    def commit(self, data: bytes) -> None:
        publish(self.storage, os.path.join(self.target_dir, record_path(self.attempt, MANIFEST)), [data], self.manifest.run)
        if self.target_dir.endswith(os.path.join(FOLDER, self.attempt)):
            place = SaveTarget(self.storage, self.root, self.manifest.run, 0, self.manifest.world_size, iterations=True)
            iteration_publisher.publish_iteration(place, self.manifest.step)


@dataclass(frozen=True)
class RemoteSource:
    """An object store that is asked for newer checkpoints. ``saved_to()`` returns the real paths of the folders in which this job
    saves; only a resume from one of them continues the training that is kept in ``remote``."""
    remote: RemoteCheckpoints
    saved_to: Callable[[], Collection[str]]


def select_with_remote(pick: Callable[[], Choice], path: str, source: RemoteSource, group: Group, storage: Storage,
                       policy: SelectionPolicy, emit: Emit, shared_groups: SharedGroups | None = None) -> Choice:
    """Returns the choice of ``pick``. What is newer in the object store is fetched before, if ``path`` is where this job saves.

    Args:
        storage: of the disk to which is downloaded.
        shared_groups: which ranks see the same folder, where nodes share no disk; else None.
    Raises: as ``Restore.choose``.
    """
    remote, saved_to = source.remote, source.saved_to()
    root = os.path.realpath(path)
    root = os.path.dirname(root) if folder_rank(os.path.basename(root)) is not None else root
    if root not in saved_to and os.path.join(root, CHECKPOINT) in saved_to:
        root = os.path.join(root, CHECKPOINT)           # the output folder was given, and nothing is in it yet
    if root not in saved_to:
        emit(Notice(f"{remote.url} is not looked at: load_checkpoint is {path}, not where this job saves to"))
        return pick()
    return RemoteFetch(storage, remote, root, group, policy, emit, shared_groups).select(pick)


def number_runs(remote: RemoteCheckpoints | None, emit: Emit, storage: Storage, root: str) -> None:
    """Makes sure that this job's run number is larger than all in ``remote``, on an empty disk too. Rank 0 calls it before it
    acquires ``root``."""
    if remote is None:
        return
    try:
        keep_run_marker(storage, remote, root)
    except RemoteError as error:                    # uploads will fail, or find the later run, and report it
        emit(warning(error))


def _is_iteration(manifest: Manifest) -> bool:
    return "/" not in manifest.files[0][0].path


def _is_requested(manifest: Manifest, requested: str) -> bool:
    """Returns whether ``resume_training: requested`` means this checkpoint."""
    file = manifest.files[0][0]
    if _is_iteration(manifest):
        return manifest.step == (
            int(requested) if requested.isascii() and requested.isdigit() else parse_iteration(requested.rstrip("/")))
    return os.path.basename(file.path) == name_for_rank(requested, 0, file.format)


def keep_run_marker(storage: Storage, remote: RemoteCheckpoints, root: str) -> None:
    """Leaves the number of the latest run in ``remote`` as a marker in ``root``, so that the next run there gets a larger one.

    Raises: RemoteError, OSError."""
    runs = remote.scan().runs()
    if runs:
        record_run_number(storage, root, runs[-1])
