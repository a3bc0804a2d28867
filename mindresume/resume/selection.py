"""Selects the checkpoint to resume from: the one function that the job and the command line call.

    choice = select_checkpoint(storage, path, group, policy, sources)           # by all ranks; raises if none can be used
    preview = preview_selection(storage, path, policy, sources)                 # by one process for all ranks; reports instead

    shared storage          ``shared_selection``: the newest that all ranks verified
    node-local storage      ``node_local_selection``: the newest that all nodes have
    consolidated weights    ``sources.select_consolidated``
    an object store         ``remote_selection``: newer checkpoints are fetched before the selection
    a tier in memory        ``memory_selection``: a newer save that all ranks have precedes all of these
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from mindresume.coordination.collectives import Group, SingleProcess, run_on_rank0
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import CollectiveError, NoUsableCheckpointError, UnusableCheckpointError
from mindresume.events import Emit, ignore
from mindresume.formats import Candidate, Refusal
from mindresume.formats.consolidated import is_consolidated
from mindresume.formats.location import locate
from mindresume.resume.candidates import NODE_LOCAL, find_candidates, list_checkpoints
from mindresume.resume.choice import Choice
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.group_verification import drop_cached_files
from mindresume.resume.memory_selection import MemorySource, select_with_memory
from mindresume.resume.node_local_selection import select_node_local
from mindresume.resume.remote_selection import RemoteSource, select_with_remote
from mindresume.resume.replicas import StrategyOf, unknown_strategy
from mindresume.resume.shared_selection import ProgressMeter, select_shared
from mindresume.resume.verifier import verify_rank
from mindresume.storage.interface import Storage
from mindresume.storage.read_cache import uncached


@dataclass(frozen=True)
class CheckpointSources:
    """The sources of a selection besides the folder itself.

    Args:
        strategy_of: returns the strategy of the job that saved a candidate without a manifest.
        select_consolidated: ``(storage, path) -> Choice`` of consolidated (merged) weights. None: they are not accepted.
        remote: the object store that may hold newer checkpoints.
        shared: which ranks see the same folder. None: all of them.
        memory: the tiers in memory that may hold newer saves.
    """
    strategy_of: StrategyOf = unknown_strategy
    select_consolidated: Callable[[Storage, str], Choice] | None = None
    remote: RemoteSource | None = None
    shared: SharedGroups | None = None
    memory: MemorySource | None = None


@dataclass(frozen=True)
class SelectionPreview:
    """What a resume would do. ``choice.chosen`` None: it starts afresh (``choice.is_fresh_start``), or stops with ``error``.
    ``node_local``: where nodes share no storage, the newest step whose files of this node are intact; the job selects together
    with the other nodes."""
    choice: Choice
    error: str = ""
    node_local: Candidate | None = None


def select_checkpoint(storage: Storage, path: str, group: Group, policy: SelectionPolicy,
                      sources: CheckpointSources | None = None, emit: Emit = ignore,
                      progress: ProgressMeter | None = None) -> Choice:
    """Selects the checkpoint to load from ``path``, the same on all ranks of ``group``.

    Args:
        storage: reads the files. The files that it keeps in memory (``ReadCache``) are dropped whenever a candidate is refused.
        path: the folder or file in which the checkpoints lie (``formats.location``).
        progress: receives the bytes that are verified.
    Raises:
        MissingCheckpointError, NoUsableCheckpointError, ConfigError, CollectiveError: on all ranks, see ``select_shared``.
    """
    sources, disk, asked = sources or CheckpointSources(), uncached(storage), policy
    split = sources.shared is not None and sources.shared.is_split

    def pick() -> Choice:
        drop_cached_files(storage)                          # a download may have replaced files that were verified before
        if split:
            return select_node_local(storage, path, group, policy)
        return select_shared(storage, path, group, policy, sources.strategy_of, progress)
    if split:
        policy = replace(policy, world_size=group.size, max_failed_loads=0)
    elif sources.select_consolidated is not None and run_on_rank0(group,
                                                                  lambda: selects_consolidated(disk, path, policy.any_layout)):
        return replace(sources.select_consolidated(storage, path), consolidated=True)

    def pick_durable() -> Choice:
        if sources.remote is None:
            return pick()
        return select_with_remote(pick, path, sources.remote, group, disk, policy, emit, sources.shared if split else None)
    if sources.memory is None:
        return pick_durable()
    return select_with_memory(pick_durable, path, sources.memory, group, storage, asked, emit, split)


def preview_selection(storage: Storage, path: str, policy: SelectionPolicy, sources: CheckpointSources | None = None,
                      progress: ProgressMeter | None = None) -> SelectionPreview:
    """Returns what the job would select. One process verifies the files of all ranks.

    Args:
        path: any folder or file that ``load_checkpoint`` may name.
        policy: ``ranks_to_verify`` should be ``every_rank``.
    """
    sources = sources or CheckpointSources()

    def consolidated(storage: Storage, path: str) -> Choice:
        try:
            return sources.select_consolidated(storage, path)
        except CollectiveError as error:                     # damage ends the job
            raise NoUsableCheckpointError(str(error).removeprefix("rank 0: ")) from error
    try:
        place = locate(storage, path)
        choice = select_checkpoint(storage, place, SingleProcess(), policy,
                                   replace(sources, select_consolidated=sources.select_consolidated and consolidated),
                                   progress=progress)
    except UnusableCheckpointError as failure:
        root = path
        with suppress(UnusableCheckpointError, OSError):              # refusals name files relative to the root of the scan
            root = find_candidates(storage, path, world_size=policy.world_size)[0].root
        local = None
        if failure.refused and policy.requested is None:
            local = newest_node_local(storage, path, policy, sources.strategy_of)
        return SelectionPreview(Choice(None, tuple(failure.refused), (), False, (), root), str(failure), local)
    notes = choice.notes if place == path else (f"{path} holds no checkpoints itself; those in {place} are used", *choice.notes)
    return SelectionPreview(replace(choice, notes=notes))


def newest_node_local(storage: Storage, path: str, policy: SelectionPolicy, strategy_of: StrategyOf) -> Candidate | None:
    """Returns the newest step for which all files of this node's ranks are present and verified; None if there is none."""
    try:
        found, rows = list_checkpoints(storage, path, strategy_of)
    except UnusableCheckpointError:
        return None
    for row in rows:
        if row.state == NODE_LOCAL and not any(
                isinstance(verify_rank(storage, found.root, row.candidate, rank, None, policy.verifies_bytes), Refusal)
                for rank in row.candidate.files):
            return row.candidate
    return None


def selects_consolidated(storage: Storage, path: str, any_layout: bool) -> bool:
    """Returns whether ``path`` holds consolidated weights: a folder of them, or one file if any layout may be loaded."""
    if not is_consolidated(storage, path):
        return False
    if any_layout:
        return True
    with suppress(OSError, ValueError):
        status = storage.status(path)
        return status is not None and status.is_folder
    return False
