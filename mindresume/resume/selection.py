"""Selects the checkpoint to resume from: the one function that the job and the command line call.

# by all ranks; raises if none can be used
choice = select_checkpoint(storage, path, group, policy, sources)
# by one process for all ranks; reports instead
preview = preview_selection(storage, path, policy, sources)
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from mindresume.coordination.collectives import Group, SingleProcess, run_on_rank0
from mindresume.errors import CollectiveError, NoUsableCheckpointError, UnusableCheckpointError
from mindresume.events import SILENT, Emit, Notice, Progress, ignore
from mindresume.formats import Refusal
from mindresume.formats.scan import WEIGHT_FILE, WEIGHT_FOLDER, find, find_candidates, kind_of
from mindresume.model.manifest import FOLDER
from mindresume.resume.bucket_source import BucketSource
from mindresume.resume.candidates import NODE_LOCAL, CheckpointStatus, list_checkpoints
from mindresume.resume.eligible import Choice, SelectionPolicy
from mindresume.resume.memory_source import MemorySource
from mindresume.resume.replicas import StrategyOf
from mindresume.resume.sources import (
    CheckpointSources,
    Job,
    NodeDisks,
    SharedDisk,
    job_directory,
)
from mindresume.resume.verifier import Verifier
from mindresume.saving.memory_tier.directory import MARK
from mindresume.storage import Storage


@dataclass(frozen=True)
class SelectionPreview:
    """What a resume would do with the checkpoints in ``place``.

    ``choice.chosen`` None: it starts afresh (``choice.is_fresh_start``), or stops with ``error``
    (``code``: of its class).
    ``node_local``: where nodes share no storage, the newest step whose files of this node are
    intact; the job selects together with the other nodes."""

    choice: Choice
    place: str
    error: str = ""
    node_local: CheckpointStatus | None = None
    code: str = ""


def select_checkpoint(
    storage: Storage,
    path: str,
    group: Group,
    policy: SelectionPolicy | None = None,
    sources: CheckpointSources | None = None,
    emit: Emit = ignore,
    progress: Progress = SILENT,
) -> Choice:
    """Selects the checkpoint to load from ``path``, the same on all ranks of ``group``.

    Consolidated weights are taken as they are. Else the newest save is taken that all ranks can get
    and have verified: from memory, if nothing newer lies elsewhere; from disk, to which a newer one
    is fetched from the object store first; and if the disk has none that can be used, an older one
    from memory. Rank 0 offers one save after the other, newest first; each rank verifies its part,
    and one refusal refuses it for all.

    Args:
        storage: reads the files. The files that it keeps in memory (``ReadCache``) are dropped
            whenever a candidate is refused.
        path: the folder or file in which the checkpoints lie (``formats.scan.locate``).
        group: the ranks of the job; all call it together.
        policy: which checkpoints may be taken (``eligible``).
        sources: where else they may lie.
        emit: receives events.
        progress: receives the bytes that are verified.
    Raises:
        MissingCheckpointError, NoUsableCheckpointError, ConfigError, CollectiveError: on all ranks,
        see ``sources``. RemoteError: on all ranks, see ``BucketSource.fetch_newer``.
    """
    policy = policy or SelectionPolicy()
    sources = sources or CheckpointSources()
    job = Job(storage, path, group, policy, sources, emit, progress)
    root = job_directory(path, sources.saved_to)
    if (
        not job.is_split
        and sources.consolidated is not None
        and run_on_rank0(group, partial(selects_consolidated, storage, path, policy.any_layout))
    ):
        return replace(sources.consolidated.choose(storage, path), consolidated=True)
    memory = bucket = None
    if sources.memory is not None and root is not None and policy.requested is None:
        # compared by name with what lies elsewhere, which may prove unusable below
        memory = MemorySource(job, root)
        if (newest := memory.newest()) is not None:
            return newest
    # each rank loads its own file, and a load that fails is counted on one node only
    if job.is_split:
        job = replace(job, policy=replace(policy, world_size=group.size, max_failed_loads=0))
    if sources.remote is not None and root is not None:
        bucket = BucketSource(job, sources.remote, root)
    elif sources.remote is not None:
        emit(
            Notice(
                f"checkpoints at {sources.remote.url} are not considered: load_checkpoint is "
                f"{path}, and this job saves elsewhere"
            )
        )
    try:
        while True:
            try:
                choice = (NodeDisks(job) if job.is_split else SharedDisk(job)).select()
                failure = None
            except UnusableCheckpointError as error:
                choice, failure = Choice(None, tuple(error.refused)), error
            # a step is tried once
            if bucket is None or not bucket.fetch_newer(choice.chosen, choice.refused):
                break
        if failure is not None:
            raise failure
        choice = bucket.allow(choice) if bucket is not None else choice
    except UnusableCheckpointError:
        older = memory.last_resort() if memory is not None else None
        if older is None:
            raise
        return older
    return memory.newer_than(choice) if memory is not None else choice


def preview_selection(
    storage: Storage,
    path: str,
    policy: SelectionPolicy,
    sources: CheckpointSources | None = None,
    progress: Progress = SILENT,
) -> SelectionPreview:
    """Returns what the job would select. One process verifies the files of all ranks.

    Args:
        path: any folder or file that ``load_checkpoint`` may name.
        policy: with ``every_rank``.
    """
    sources = replace(sources or CheckpointSources(), is_preview=True)
    place = path
    root = path
    local = None
    failure: UnusableCheckpointError
    try:
        place = find(storage, path) or path
        sources = replace(sources, saved_to={os.path.realpath(place)})
        with suppress(OSError):  # then the tier is looked for
            if storage.status(os.path.join(place, FOLDER, MARK)) is None:
                # no training there has a tier in memory
                sources = replace(sources, memory=None)
        choice = select_checkpoint(
            storage, place, SingleProcess(), policy, sources, progress=progress
        )
        notes = (
            (f"{path} holds no checkpoints itself; those in {place} are used",)
            if place != path
            else ()
        )
        return SelectionPreview(replace(choice, notes=(*notes, *choice.notes)), place)
    except UnusableCheckpointError as error:
        failure = error
    except CollectiveError as error:
        # damage of consolidated weights ends the job
        if sources.consolidated is None or not selects_consolidated(
            storage, place, policy.any_layout
        ):
            raise
        failure = NoUsableCheckpointError(str(error).removeprefix("rank 0: "))
    # refusals name files relative to the root of the scan
    with suppress(UnusableCheckpointError, OSError):
        root = find_candidates(storage, path, world_size=policy.world_size)[0].root
    if failure.refused and policy.requested is None:
        local = newest_node_local(storage, path, policy, sources.strategy_of)
    return SelectionPreview(
        Choice(None, tuple(failure.refused), root=root),
        place,
        str(failure),
        local,
        failure.code,
    )


def newest_node_local(
    storage: Storage, path: str, policy: SelectionPolicy, strategy_of: StrategyOf
) -> CheckpointStatus | None:
    """Returns the newest step for which all files of this node's ranks are present and verified;
    None if there is none."""
    try:
        found, rows = list_checkpoints(storage, path, strategy_of)
    except UnusableCheckpointError:
        return None
    for row in rows:
        if row.state == NODE_LOCAL:
            verifier = Verifier(found.directory, row.candidate, full=policy.full)
            if not any(isinstance(verifier.verify(rank), Refusal) for rank in row.candidate.files):
                return row
    return None


def selects_consolidated(storage: Storage, path: str, any_layout: bool) -> bool:
    """Returns whether ``path`` holds consolidated weights: a folder of them, or one file if any
    layout may be loaded."""
    kind = kind_of(storage, path)
    return kind == WEIGHT_FOLDER or any_layout and kind == WEIGHT_FILE
