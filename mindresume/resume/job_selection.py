"""Selects the checkpoint from which a job starts, on all ranks together, and protects it from
removal until it is loaded.

found = CheckpointSelector(storage, group, settings, emit, select_consolidated,
...).select(SelectionRequest(path))
found.choice                # None: a fresh start

locate the checkpoints that the path means ─▶ find out which ranks share that folder ─▶ wait until
    all of them list the same
─▶ ``selection.select_checkpoint`` ─▶ an event for each refusal ─▶ a fresh start or an error; else a
    read lock until all ranks
have loaded it, and a load attempt that ends with the first step (``saving.crash_loop``)
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from mindresume.coordination.collectives import (
    Group,
    Watchdog,
    gather_results,
    gather_values,
    run_on_rank0,
)
from mindresume.coordination.host_memory import share_of_rank
from mindresume.coordination.lease import Lease, acquire_read_lock
from mindresume.coordination.storage_topology import (
    SharedGroups,
    find_shared_groups,
    single_group,
    wait_until_visible,
)
from mindresume.errors import (
    CollectiveError,
    LoadError,
    MissingCheckpointError,
    NoUsableCheckpointError,
)
from mindresume.events import (
    DISK,
    MEMORY,
    CandidateRefused,
    CheckpointSelected,
    Emit,
    FreshStart,
    Notice,
    ProgressReporter,
    VerifiedBytesKept,
    VisibilityWaited,
    warning,
)
from mindresume.formats import MINDFORMERS, CheckpointDir
from mindresume.formats.bad_steps import BadStep
from mindresume.formats.scan import find as find_checkpoints
from mindresume.resume.eligible import Choice, SelectionPolicy, describe_candidate, unhealthy_files
from mindresume.resume.selection import select_checkpoint
from mindresume.resume.sources import CheckpointSources, drop_cached_files
from mindresume.resume.verifier import VerifiedShard
from mindresume.saving.crash_loop import LoadAttempt
from mindresume.settings import Settings
from mindresume.storage import Storage
from mindresume.storage.read_cache import ReadCache, uncached


@dataclass(frozen=True)
class SelectionRequest:
    """A request of a job for a checkpoint.

    Args:
        path: folder or file, as given by the user.
        requested: one checkpoint in it: the name of a file or an iteration folder, or a step.
        any_layout: the number of ranks may differ, so all ranks together verify all files.
        resume: False: only weights are wanted, so a fresh start is an error.
        keep_layout: with ``any_layout``: a checkpoint that mindformers saved on as many ranks as
            the job has is loaded as it is, without layouts.
        pretrained: weights with which a fresh start begins; empty: random ones.
        health_dir: folder of the list of mindformers' health monitor; unhealthy checkpoints are
            refused. None: health is ignored.
        output_dir: the job's output folder, if the job will report its first finished step; failed
            loads are then counted.
    """

    path: str
    requested: str | None = None
    any_layout: bool = False
    resume: bool = True
    keep_layout: bool = False
    pretrained: str = ""
    health_dir: str | None = None
    output_dir: str | None = None


@dataclass(frozen=True)
class SelectedCheckpoint:
    """The result of a selection.

    Args:
        choice: None: a fresh start.
        uses_layouts: each rank loads regions of tensors, instead of its own file.
        read_lock: keeps the checkpoint from being removed. Release it when all ranks have read it.
        load_attempt: counts this load until a step is done. None: loads are not counted.
        bad_steps: of the checkpoint directory, oldest first.
    """

    choice: Choice | None = None
    uses_layouts: bool = False
    read_lock: Lease | None = None
    load_attempt: LoadAttempt | None = None
    bad_steps: tuple[BadStep, ...] = ()


@dataclass(frozen=True)
class CheckpointSelector:
    """Selects for one training.

    Args:
        storage: reads the checkpoint, first to verify it and then to load it (``caching_storage``).
        emit: receives the events of the selection.
        sources: besides the folder of a request. Its object store and memory are asked for a resume
            only.
        shared_groups: which ranks share a folder, by its real path. New findings are added.
    """

    storage: Storage
    group: Group
    settings: Settings
    emit: Emit
    sources: CheckpointSources = CheckpointSources()
    shared_groups: dict[str, SharedGroups] = field(default_factory=dict)

    def select(self, request: SelectionRequest) -> SelectedCheckpoint:
        """Selects and protects a checkpoint.

        Raises:
            NoUsableCheckpointError, MissingCheckpointError, LoadError, CollectiveError: on all
            ranks together.
        """
        emit = self.emit
        group = self.group
        disk = uncached(self.storage)
        path = request.path
        requested = request.requested
        resume = request.resume
        if requested and _is_file(disk, path):
            emit(
                warning(
                    f"resume_training: {requested} is ignored, because load_checkpoint is a file: "
                    f"{path}"
                )
            )
            requested = None
        path = locate_checkpoints(disk, path, group, emit)
        # A collective: all ranks must take part, whatever each of them finds.
        is_one_place = request.any_layout or any(
            gather_results(group, partial(_is_file, disk, path))
        )
        shared_groups = (
            single_group(group.size)
            if is_one_place
            else shared_groups_of(disk, path, group, self.shared_groups, emit)
        )
        visibility = wait_until_visible(disk, path, group, shared_groups)
        if visibility.wait_seconds or visibility.missing:
            emit(VisibilityWaited(visibility.wait_seconds, visibility.missing))
        if shared_groups.is_split:
            emit(
                Notice(
                    f"the nodes share no disk below {path}: the newest checkpoint that all nodes "
                    "have is selected"
                )
            )
        any_layout, unhealthy = request.any_layout, None
        if request.health_dir is not None:  # rank 0 decides
            unhealthy, problem = (
                unhealthy_files(disk, request.health_dir) if group.rank == 0 else (frozenset(), "")
            )
            if problem:
                emit(warning(problem))
        policy = SelectionPolicy(
            None if any_layout else group.size,
            requested,
            self.settings.verify == "full",
            any_layout,
            any_layout,
            unhealthy,
            self.settings.max_failed_loads,
            require_counters=resume,
        )
        sources = replace(
            self.sources,
            shared=shared_groups,
            remote=self.sources.remote if resume else None,
            memory=self.shared_groups if self.settings.memory_tier.every_steps and resume else None,
            partner=self.settings.memory_tier.partner,
            partner_port=self.settings.memory_tier.partner_port,
        )
        choice = select_checkpoint(
            self.storage, path, group, policy, sources, emit, ProgressReporter("checking", emit)
        )
        for refusal in choice.refused:
            emit(
                CandidateRefused(
                    refusal.step, refusal.reason, refusal.file, weights_only=not resume
                )
            )
        for note in choice.notes:
            emit(Notice(note))
        if choice.chosen is None and visibility.missing:
            raise NoUsableCheckpointError(
                f"{path} seems to hold no checkpoint, but {'; '.join(visibility.missing)}. The job "
                "does not start afresh. Check "
                f"that all hosts mount the same folder, and start the job again"
            )
        if choice.chosen is None:
            self._start_afresh(request, path)
            return SelectedCheckpoint(bad_steps=choice.bad_steps)
        return self._protect(request, choice, any_layout or choice.consolidated)

    def _start_afresh(self, request: SelectionRequest, path: str) -> None:
        """Emits FreshStart. Raises MissingCheckpointError if weights were requested."""
        drop_cached_files(self.storage)
        exists = any(gather_results(self.group, partial(_exists, self.storage, path)))
        reason = "holds no checkpoint that was ever complete" if exists else "does not exist"
        if not request.resume:
            raise MissingCheckpointError(
                f"{path} {reason}, and initial weights were requested (no_load_optim: True, "
                "resume_training: False). Set another load_checkpoint (load_path), or none for "
                "random weights"
            )
        weights = f"of {request.pretrained}" if request.pretrained else "are initialised at random"
        self.emit(FreshStart(path, reason, weights, is_expected=exists))

    def _protect(
        self, request: SelectionRequest, choice: Choice, uses_layouts: bool
    ) -> SelectedCheckpoint:
        """Acquires the read lock and the load attempt of the selected checkpoint, and emits
        CheckpointSelected."""
        group = self.group
        disk = uncached(self.storage)
        chosen = choice.chosen
        resume = request.resume
        lock = lock_selected(disk, choice, group, self.shared_groups, self.emit)
        try:
            limit = self.settings.max_failed_loads
            attempt = (
                LoadAttempt(
                    CheckpointDir(disk, choice.root),
                    chosen,
                    os.path.realpath(request.output_dir),
                    group.rank,
                    limit,
                )
                if (resume and limit and request.output_dir is not None)
                else None
            )
            self.emit(
                CheckpointSelected(
                    chosen.step,
                    chosen.epoch,
                    chosen.run,
                    choice.root,
                    describe_candidate(chosen, choice.bytes_verified)
                    + (", in memory of the nodes" if choice.in_memory else ""),
                    weights_only=not resume,
                    source=MEMORY if choice.in_memory else DISK,
                )
            )
            if isinstance(self.storage, ReadCache):
                storage = self.storage
                read = sum(
                    source.file.size or 0 for shard in choice.shards for source in shard.sources
                )
                # else only headers were read
                is_whole = chosen.origin != MINDFORMERS and not choice.in_memory
                if is_whole and (read or storage.size):
                    self.emit(
                        VerifiedBytesKept(storage.size, max(read - storage.size, 0), storage.budget)
                    )
                storage.freeze()
            for text in choice.warnings:
                self.emit(warning(text))
            in_rank_folders = chosen.origin == MINDFORMERS and not chosen.iteration_dir
            if uses_layouts and request.keep_layout and group.size > 1 and in_rank_folders:
                uses_layouts = not all(gather_values(group, own_shard(choice, group) is not None))
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return SelectedCheckpoint(choice, uses_layouts, lock, attempt, choice.bad_steps)


def caching_storage(storage: Storage, settings: Settings, group: Group) -> Storage:
    """Returns a storage that keeps verified files in memory until they are loaded. All ranks call
    it together.

    It keeps at most half of this rank's share of the host's free memory, because the loaded arrays
    need the other half, and at most ``staging_gib``."""
    if settings.verify != "full":
        return storage
    budget = share_of_rank(group) // 2
    if settings.staging_gib:
        budget = min(budget, int(settings.staging_gib * 2**30))
    return ReadCache(storage, budget)


def locate_checkpoints(storage: Storage, path: str, group: Group, emit: Emit) -> str:
    """Returns the folder of checkpoints that ``path`` means (``formats.scan.locate``), the same on
    all ranks.

    Rank 0 searches. If it finds none, all ranks search: where nodes share no storage, some of them
    may have none. Raises:
        MissingCheckpointError: on all ranks, if they find several folders.
    """
    search = partial(_search, storage, path)
    rows = [run_on_rank0(group, search, Watchdog(f"searching for checkpoints below {path}"))]
    if rows == [["", ""]]:
        rows = gather_results(group, search, Watchdog(f"searching for checkpoints below {path}"))
    folders = sorted({folder for folder, _ in rows if folder})
    problem = next((text for _, text in rows if text), "")
    if len(folders) > 1:
        problem = (
            "the ranks of this job find checkpoints in different folders: "
            f"{', '.join(folders)}; set load_checkpoint to one"
        )
    if problem:
        raise MissingCheckpointError(problem)
    if not folders or folders[0] == path:
        return path
    emit(Notice(f"{path} holds no checkpoints itself; those in {folders[0]} are used"))
    return folders[0]


def _search(storage: Storage, path: str) -> list[str]:
    """Returns [folder of checkpoints, why it is not known]; empty texts: none."""
    try:
        return [find_checkpoints(storage, path) or "", ""]
    except MissingCheckpointError as error:
        return ["", str(error)]


def shared_groups_of(
    storage: Storage, path: str, group: Group, known: dict[str, SharedGroups], emit: Emit
) -> SharedGroups:
    """Returns which ranks see the same folder: all of them, if the folder does not exist on any
    rank or a rank cannot write the probe file there."""
    root = os.path.realpath(path)
    if root not in known:
        if not any(gather_results(group, partial(_exists, storage, root))):
            return single_group(group.size)
        try:
            known[root] = find_shared_groups(CheckpointDir(storage, root), group)
        except CollectiveError as error:
            emit(Notice(f"{root} is assumed to be a folder that all nodes share: {error}"))
            # not remembered: a save into it must probe again
            return single_group(group.size)
    return known[root]


def lock_selected(
    storage: Storage, choice: Choice, group: Group, known: dict[str, SharedGroups], emit: Emit
) -> Lease | None:
    """Publishes a read lock, so that neither the retention of a job that still saves there nor
    ``mindresume prune`` removes the selected checkpoint. Rank 0 does so, or where nodes share no
    storage the first rank of each node. A read-only folder is read without a lock.

    Returns:
        The lock of this rank; None if it has none.
    Raises:
        LoadError: on all ranks, if the checkpoint was removed since it was selected.
    """
    chosen = choice.chosen
    if chosen.records_dir is None:
        return None
    shared_groups = known.get(os.path.realpath(choice.root), single_group(group.size))
    held: list[Lease | None] = []

    def lock() -> bool:
        try:
            held.append(
                acquire_read_lock(
                    CheckpointDir(storage, choice.root), chosen.name, chosen.commit_dir
                )
            )
        except OSError as error:
            emit(
                Notice(
                    f"{choice.root} is read without a lock, because none can be written: {error}"
                )
            )
        return None not in held

    try:
        is_leader = shared_groups.is_leader(group.rank)
        if False in gather_results(group, lock, takes_part=is_leader):
            raise LoadError(
                f"{chosen.records_dir} was removed while it was selected; start the job again"
            )
    except BaseException:
        for lease in filter(None, held):
            lease.release()
        raise
    return held[0] if held else None


def own_shard(choice: Choice | None, group: Group) -> VerifiedShard | None:
    """Returns the files that this rank verified and loads. None if the checkpoint has another
    number of ranks: it is then loaded by its layouts."""
    chosen = choice.chosen if choice else None
    shards = choice.shards if chosen and chosen.world_size == group.size else ()
    return next((shard for shard in shards if shard.rank == group.rank), None)


def _exists(storage: Storage, path: str) -> bool:
    return storage.status(path) is not None


def _is_file(storage: Storage, path: str) -> bool:
    with suppress(OSError, ValueError):
        status = storage.status(path)
        return status is not None and not status.is_folder
    return False
