"""What a training does in its checkpoint directory before it begins: acquires it (groups that share
it, lease, run id, suffix of file names), or, if it is complete already, finishes for the last step
what an earlier run did not do before it died.

    # on all ranks together
    session = open_save_session(storage, options, group, emit, settings.heartbeat)
    session.begin(resumed)                      # warns of other trainings
    session.target                              # where to save
    session.release()

    publish_completed(storage, choice, group, ...)      # commit, final name, tracker or meta.json
    upload_completed(storage, choice, group, remote, emit)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from mindresume import runtime
from mindresume.coordination.collectives import (
    Group,
    Watchdog,
    gather_results,
    run_on_all,
    run_on_rank0,
)
from mindresume.coordination.lease import SAVING, Lease, LeaseHolder, holder_of_this_process
from mindresume.coordination.lease_acquisition import acquire
from mindresume.coordination.storage_topology import (
    PeerState,
    SharedGroups,
    check_not_shared,
    clear_common,
    find_shared_groups,
    next_common_run,
)
from mindresume.errors import CollectiveError, ConfigError, MindResumeError, RemoteError, SaveError
from mindresume.events import Emit, Notice, UploadFailed, UploadFinished, warning
from mindresume.formats import OURS, Candidate, CheckpointDir
from mindresume.formats.iterations import tracked
from mindresume.formats.rank_folders import folder_name, free_suffix, parse_name
from mindresume.formats.records import scan_records
from mindresume.formatting import counted, listed
from mindresume.model.manifest import FOLDER, PROBE, is_probe
from mindresume.saving.committer import SyncSaver, is_in_meta
from mindresume.saving.remote_checkpoints import RemoteCheckpoints, number_runs
from mindresume.saving.replication import save_of
from mindresume.saving.retention import KEEP_ALL, continued, others
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage import Storage, read_bytes, remove_stale

# {directory: lease} of this process, which runs one training at a time
_LEASES: dict[str, Lease] = {}


class Resumed(Protocol):
    """A checkpoint from which a training resumes (a ``mindresume.resume.eligible.Choice``), the
    folder that it lies in, and the checkpoint directory of its training, which differ for a tier in
    memory."""

    chosen: Candidate | None
    root: str
    checkpoint_dir: str


@dataclass
class SaveSession:
    """The directory that a training has acquired. ``suffix``: of the names of files, the same on
    all ranks. ``is_leader``: this rank commits and prunes. ``lease``: on leaders. ``peer_state``:
    for nodes that share no disk."""

    target: SaveTarget
    suffix: int
    shared_groups: SharedGroups
    lease: Lease | None
    peer_state: PeerState
    emit: Emit

    @property
    def is_leader(self) -> bool:
        return self.shared_groups.is_leader(self.target.rank)

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()

    def begin(self, resumed: Resumed | None) -> None:
        """Records the loaded checkpoint as the common one of nodes that share no disk, until they
        have a newer one. ``resumed``: what this training has loaded; None: nothing."""
        root = self.target.root
        if self.is_leader:
            self._warn_of_others()
        if not self.shared_groups.is_split:
            if self.is_leader:
                try:
                    clear_common(self.target)
                except OSError as error:
                    # then more stays than must; no rank fails alone for that
                    self.emit(warning(f"{root}: {error}"))
            return
        self.emit(
            warning(
                f"the nodes share no disk at {root}: each keeps what its own ranks save, here rank "
                f"{listed(self.target.local_ranks)}, and a resume takes the newest checkpoint that "
                "all of them have"
            )
        )
        chosen = resumed.chosen if resumed is not None and resumed.root == root else None
        self.peer_state.record(chosen.name if chosen is not None else "")

    def _warn_of_others(self) -> None:
        """Warns of checkpoints of another training in this directory, which retention does not
        touch."""
        root = self.target.root
        try:
            rows = others(scan_records(self.target)[0], self.target.lineage)
        except OSError as error:
            self.emit(
                Notice(
                    f"whether {root} holds checkpoints of another training is not known: {error}"
                )
            )
            return
        if rows:
            steps = sorted({candidate.step or 0 for candidate in rows})
            self.emit(
                warning(
                    f"{root} holds {counted(len(rows), 'checkpoint')} of another training, step "
                    f"{listed(steps)}, which this run does not continue. They are not counted and "
                    "never removed: mindresume prune --all-trainings removes them; or give each "
                    "training an output_dir of its own"
                )
            )


def open_save_session(
    storage: Storage,
    options: SaveOptions,
    group: Group,
    emit: Emit,
    heartbeat: float,
    shared_groups: dict[str, SharedGroups] | None = None,
    origin: Resumed | None = None,
    remote: RemoteCheckpoints | None = None,
    in_memory: str = "",
    leases: dict[str, Lease] | None = None,
) -> SaveSession:
    """Acquires ``options.root``, on all ranks of ``group`` together.

    Args:
        options: where, and in which form, the training saves.
        heartbeat: seconds between two heartbeats; 0: none.
        shared_groups: {directory: groups of ranks that share it}, as far as known; this call adds
            what it finds.
        origin: the checkpoint whose training goes on, before any conversion; None: a new training.
        remote: the object store, with whose runs the number of this one is compared, too.
        in_memory: the same for the latest run in memory; empty: none.
        leases: {directory: lease} of this process; None: those that this module remembers.
    Raises:
        CollectiveError: on all ranks, if one cannot save there (SaveError, LeaseHeldError).
        ConfigError: Checkpoint 2.0 where nodes share no disk.
    """
    root = options.root
    prefix = options.prefix
    iterations = options.iterations
    directory = CheckpointDir(storage, root)
    run_on_rank0(group, partial(check_directory, directory))
    shared_groups = {} if shared_groups is None else shared_groups
    if root not in shared_groups:
        shared_groups[root] = find_shared_groups(directory, group)
    shared = shared_groups[root]
    if shared.is_split and iterations:
        blind = [rank for rank, leader in enumerate(shared.leaders) if leader != shared.leaders[0]]
        raise ConfigError(
            "Checkpoint 2.0 is not supported in non-shared storage environments with multiple "
            f"hosts: rank {listed(blind)} cannot see what rank 0 writes to {root}. Put save_path "
            "(output_dir) on a disk that all nodes share, and name it in SHARED_PATHS; or set "
            "use_legacy_format: True"
        )
    # By all ranks: whether one has a ``remote`` follows from the environment of its node, which can
    # differ.
    run_on_rank0(
        group,
        partial(number_runs, directory, remote, in_memory, emit),
        Watchdog("numbering the run"),
    )
    # Without a common run the lease finds the next one.
    common_run = next_common_run(directory, group) if shared.is_split else ""
    holder = replace(holder_of_this_process(SAVING, group.size), run=common_run)
    memory = _LEASES if leases is None else leases
    is_leader = shared.is_leader(group.rank)
    # Rank 0 may watch the lease of another job for some minutes, which is less than the stall
    # timeout.
    runs = gather_results(
        group,
        partial(_acquire, directory, group, holder, heartbeat, emit, iterations, memory),
        Watchdog("acquiring the directory"),
        takes_part=is_leader,
    )
    # if they do share it, two of them have now acquired one directory
    if shared.is_split:
        gather_results(group, partial(check_not_shared, memory.get(root)), takes_part=is_leader)
    suffixes = gather_results(
        group,
        partial(_unused_suffix, directory, prefix, group.rank, is_leader, iterations),
        Watchdog("looking for unused names"),
    )
    run, part = runs[0], shared.ranks(group.rank) if shared.is_split else ()
    lineage = (
        run
        if origin is None
        else continued(
            # on all ranks the same choice
            origin.chosen,
            run,
            os.path.realpath(origin.checkpoint_dir) == os.path.realpath(root),
        )
    )
    target = SaveTarget(
        storage,
        root,
        run,
        group.rank,
        group.size,
        iterations,
        part,
        lineage,
        options.samples_in_common,
    )
    session = SaveSession(
        target,
        max(suffixes),
        shared,
        memory[root] if is_leader else None,
        PeerState(directory, run, shared, group.rank, emit=emit),
        emit,
    )
    runtime.at_exit(session.release)
    return session


def _acquire(
    directory: CheckpointDir,
    group: Group,
    holder: LeaseHolder,
    heartbeat: float,
    emit: Emit,
    iterations: bool,
    memory: dict[str, Lease],
) -> str:
    """Acquires the directory, on each leader. Returns the run."""
    # it is on a disk that rank 0 does not see
    if group.rank != 0:
        check_directory(directory)
    # of an earlier training of this process, which is over
    if directory.root in memory:
        memory.pop(directory.root).release()
    memory[directory.root] = acquire(
        directory, holder, heartbeat, emit, keep_run_marker=iterations
    ).start()
    return memory[directory.root].run


def _unused_suffix(
    directory: CheckpointDir, prefix: str, rank: int, is_leader: bool, iterations: bool
) -> int:
    """Returns the smallest suffix that no file of this rank uses, and on a leader, that no record
    uses either: rank folders can have been deleted by hand, and names with records are not used
    again."""
    unused = (
        0
        if iterations
        else free_suffix(directory.storage.list(directory.path(folder_name(rank))), prefix, rank)
    )
    names = (
        [parse_name(os.path.basename(path)) for path in scan_records(directory)[1]]
        if is_leader
        else []
    )
    return max([unused, *(name.suffix + 1 for name in names if name and name.prefix == prefix)])


# ---- preflight -----------------------------------------------------------------------------------


def check_directory(directory: CheckpointDir) -> None:
    """Tests, before a training begins, whether it can hold checkpoints: runs every operation of a
    save once, with a small file. Raises SaveError that names the operation that failed or had
    another effect. Removes old probe files of dead jobs."""
    storage = directory.storage
    root = directory.root
    folder = directory.path(FOLDER)
    first, second = (os.path.join(folder, f"{PROBE}{runtime.token_hex(4)}") for _ in range(2))
    what = "making a folder"
    try:
        storage.make_folder(folder)
        what = "flushing the folders above"
        storage.sync(root)
        # not our folder: ``root`` existed before, and its name is durable
        with suppress(PermissionError):
            storage.sync(os.path.dirname(os.path.abspath(root)))
        what = "writing and flushing a file"
        storage.write(first, [b"one"], 3)
        storage.write(second, [b"two"], 3)
        what = "reading it back"
        _check_content(directory, first, b"one")
        what = "renaming a file over another one"
        storage.rename(second, first)
        what = "flushing the folder"
        storage.sync(folder)
        what = "reading the renamed file"
        _check_content(directory, first, b"two")
        what = "listing the folder"
        names = set(storage.list(folder))
        _check_listed(root, first, names, True)
        _check_listed(root, second, names, False)
        remove_stale(
            storage, [os.path.join(folder, name) for name in names if is_probe(name)], first
        )
        what = "removing a file"
        storage.remove(first)
        what = "listing the folder again"
        _check_listed(root, first, set(storage.list(folder)), False)
    except OSError as error:
        raise SaveError(
            f"{root} cannot hold checkpoints: {what} failed: {error.strerror or error} "
            f"({error.filename or folder}). "
            f"Give the job an output_dir on a disk that can be written to and has atomic rename"
        ) from error
    finally:
        for path in (first, second):
            with suppress(OSError):
                storage.remove(path)


def _check_content(directory: CheckpointDir, path: str, content: bytes) -> None:
    data = read_bytes(directory.storage, path, 1 << 10)
    if data != content:
        raise SaveError(
            f"{directory.root} cannot hold checkpoints: {path} reads {data!r} after {content!r} "
            "was written there"
        )


def _check_listed(root: str, path: str, names: set[str], expected: bool) -> None:
    if (os.path.basename(path) in names) != expected:
        raise SaveError(
            f"{root} cannot hold checkpoints: {path} is {'not ' if expected else 'still '}listed "
            f"after it was {'made' if expected else 'renamed or removed'}"
        )


# ---- a training that was complete already --------------------------------------------------------


def publish_completed(
    storage: Storage,
    origin: Resumed,
    group: Group,
    shared_groups: dict[str, SharedGroups],
    heartbeat: float,
    emit: Emit,
    samples_in_common: bool = False,
) -> None:
    """Commits and publishes ``origin``, which an earlier run completed, if that run died before it
    had, on all ranks together. A training that goes on does so when it begins to save. This is for
    one that is complete: mindformers alone, evaluations and exports would never see its last step.
    If it fails, a warning says so, and the step is whole all the same. ``samples_in_common``: see
    ``SaveTarget``."""
    directory, chosen = CheckpointDir(storage, origin.root), origin.chosen
    if run_on_rank0(group, partial(_is_published, directory, chosen)):
        return
    try:
        options = SaveOptions(
            origin.root,
            "",
            iterations=bool(chosen.iteration_dir),
            samples_in_common=samples_in_common,
        )
        session = open_save_session(storage, options, group, emit, heartbeat, shared_groups, origin)
    except MindResumeError as error:
        emit(
            warning(
                f"step {chosen.step} of {origin.root} is complete, and not published now: {error}"
            )
        )
        return
    try:
        policy = KEEP_ALL if session.is_leader else None
        run_on_all(group, SyncSaver(session.target, policy, emit).begin)
    finally:
        session.release()


def _is_published(directory: CheckpointDir, chosen: Candidate) -> bool:
    if chosen.origin != OURS or not chosen.committed:
        return chosen.origin != OURS
    if not chosen.iteration_dir:
        return is_in_meta(directory, chosen)
    return not chosen.iteration_dir.startswith(FOLDER) and tracked(directory) == chosen.step


def upload_completed(
    storage: Storage, origin: Resumed, group: Group, remote: RemoteCheckpoints, emit: Emit
) -> None:
    """Uploads ``origin``, which an earlier run completed, if the store does not have it, on all
    ranks together. Nothing is pruned there.

    Raises:
        RemoteError: it is not in the store.
    """
    chosen, started = origin.chosen, runtime.monotonic()
    if chosen.origin != OURS or chosen.missing_ranks:
        return
    step = chosen.step
    target = SaveTarget.of(CheckpointDir(storage, origin.checkpoint_dir), chosen)
    ranks = range(group.rank, chosen.world_size, group.size)
    try:
        if not run_on_rank0(
            group,
            partial(_is_upload_due, remote, target, step),
            Watchdog("looking for the last step in the object store"),
        ):
            return
        emit(
            Notice(
                f"step {step} is uploaded to {remote.url}: the training is complete with it, and "
                "the store lacks it"
            )
        )
        sent = run_on_all(
            group,
            partial(_upload, remote, target, step, ranks),
            Watchdog("uploading the last step"),
        )
        run_on_rank0(
            group,
            partial(_commit_upload, remote, target, step),
            Watchdog("committing the last step in the object store"),
        )
    except CollectiveError as error:
        text = f"step {step} is not uploaded: {error}"
        emit(UploadFailed(step, text, 1))
        raise RemoteError(text) from error
    emit(
        UploadFinished(
            step, remote.url, sent, runtime.monotonic() - started, is_whole=group.rank == 0
        )
    )


def _is_upload_due(remote: RemoteCheckpoints, target: SaveTarget, step: int) -> bool:
    save = save_of(remote, target, step)
    if not save.is_committed or remote.has(save.attempt):
        return False
    remote.check_not_superseded(target.run)
    return True


def _upload(remote: RemoteCheckpoints, target: SaveTarget, step: int, ranks: Iterable[int]) -> int:
    return sum(save_of(remote, replace(target, rank=rank), step).upload() for rank in ranks)


def _commit_upload(remote: RemoteCheckpoints, target: SaveTarget, step: int) -> None:
    save = save_of(remote, target, step)
    if missing := save.missing():
        raise RemoteError(
            f"{len(missing)} objects are missing in {remote.url}, the first is {missing[0]}"
        )
    save.commit()
