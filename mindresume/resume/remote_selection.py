"""Fetches checkpoints that an object store holds and this disk does not, and then selects. All ranks take part.

    choice = select_with_remote(select, path, RemoteSource(remote, saved_to), group, storage, policy, emit)

    select among the checkpoints on this disk ─▶ does the url hold a newer one? ─▶ ``remote_fetch`` ─▶ select again

A checkpoint that cannot be fetched is refused with its reason, and the next older one is fetched.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from mindresume.coordination.collectives import Group, Watchdog, run_on_rank0
from mindresume.coordination.common_checkpoint import order_of
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import NoUsableCheckpointError, RecordError, RemoteError, UnusableCheckpointError
from mindresume.events import CandidateRefused, Emit, Notice, ignore, warning
from mindresume.formats import OURS, Candidate, Refusal
from mindresume.formats.iteration_naming import iteration_name, parse_iteration
from mindresume.formats.rank_folder_naming import folder_rank, name_for_rank
from mindresume.formats.records import candidate_of
from mindresume.formats.scan import scan
from mindresume.model.manifest import Manifest, parse_attempt
from mindresume.resume.choice import Choice
from mindresume.resume.eligible import SelectionPolicy, check_files
from mindresume.resume.group_verification import drop_cached_files
from mindresume.resume.health import NONE_HEALTHY, is_unhealthy
from mindresume.resume.remote_fetch import RemoteFetch, is_iteration_save
from mindresume.saving.crash_loop import failed_loads_by_key, suspicion
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.storage.interface import Storage

CHECKPOINT = "checkpoint"       # below output_dir, where mindformers has folders of its own, and below remote_save_url


@dataclass(frozen=True)
class RemoteSource:
    """An object store that may hold newer checkpoints. ``saved_to()`` returns the real paths of the folders in which this job
    saves; only a resume from one of them continues the training that is kept in ``remote``."""
    remote: RemoteCheckpoints
    saved_to: Callable[[], Collection[str]]


def select_with_remote(pick: Callable[[], Choice], path: str, source: RemoteSource, group: Group, storage: Storage,
                       policy: SelectionPolicy, emit: Emit, shared_groups: SharedGroups | None = None) -> Choice:
    """Fetches newer checkpoints from the object store, if ``path`` is a folder in which this job saves. Returns the choice of
    ``pick``.

    Args:
        pick: selects among the checkpoints on this disk.
        storage: the disk to which files are downloaded.
        shared_groups: which ranks see the same folder, where nodes share no disk; else None.
    Raises: see ``RemoteSelection.select``.
    """
    remote, root = source.remote, job_directory(path, source.saved_to())
    if root is None:
        emit(Notice(f"checkpoints at {remote.url} are not considered: load_checkpoint is {path}, and this job saves elsewhere"))
        return pick()
    return RemoteSelection(storage, remote, root, group, policy, emit, shared_groups).select(pick)


def job_directory(path: str, saved_to: Collection[str]) -> str | None:
    """Returns the folder in ``saved_to``, in which the job saves, that ``path`` means; None if it means another one."""
    root = os.path.realpath(path)
    root = os.path.dirname(root) if folder_rank(os.path.basename(root)) is not None else root
    if root not in saved_to and os.path.join(root, CHECKPOINT) in saved_to:
        root = os.path.join(root, CHECKPOINT)           # the output folder was given, and nothing is in it yet
    return root if root in saved_to else None


@dataclass
class RemoteSelection:
    """A selection that also considers an object store. All ranks use it in the same way.

    Args:
        storage, root, shared_groups: as of ``RemoteFetch``.
        policy: policy of the selection. Checkpoints that it would refuse, by their manifest or by failed loads that are recorded
            on this disk, are not fetched.
        emit: receives CheckpointFetched and CandidateRefused.
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

        Raises:
            the errors of ``pick``, on all ranks.
            NoUsableCheckpointError: on all ranks, if there is no checkpoint on this disk and none in the store can be fetched.
            RemoteError: on all ranks, if there is no checkpoint on this disk and the store cannot be read.
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
                self.emit(warning(f"{error}. The newest checkpoint on this machine is taken"))
            if failure is not None:
                raise failure
            if not chosen and self._tried:              # the job would start afresh
                for attempt in self._fetched:
                    self._refuse(attempt, "it was fetched, but it is not complete on this disk")
                raise NoUsableCheckpointError(self._none_usable(), self.refused)
            return choice

    def _none_usable(self) -> str:
        table = "\n".join(f"  {refusal}" for refusal in self.refused)
        unhealthy = NONE_HEALTHY + ". " if self._refused_unhealthy else ""
        return (f"{unhealthy}{self.remote.url} holds checkpoints, but none can be used:\n{table}\n"
                f"Repair one of them, or to start afresh set resume_training: False")

    def _fetch_newer(self, refused: Iterable[Any], chosen: Candidate | None) -> bool:
        """Fetches the newest checkpoint that is newer than all usable ones on this disk. Returns whether there was one.

        Args:
            refused: the refusals of the selection on this disk.
            chosen: its choice; None: there is none.
        """
        steps = {refusal.step for refusal in refused}
        fetch = RemoteFetch(self.storage, self.remote, self.root, self.group, self.emit, self.shared_groups)
        bound = (chosen.order[:2] if chosen else (0, 0)) if self.shared_groups else None
        while True:
            offer = run_on_rank0(self.group, lambda: self._offer(steps, bound, suspected=chosen is None),
                                 Watchdog(f"looking at {self.remote.url}"))
            for row in offer["refused"]:
                self._refuse(*row)
            self._refused_unhealthy = self._refused_unhealthy or offer["unhealthy"]
            if "failed" in offer:
                raise RemoteError(offer["failed"])
            if not offer["attempt"]:
                return False
            self._tried.add(offer["attempt"])
            problem = fetch.fetch(offer["attempt"], offer["manifest"].encode())
            drop_cached_files(self.storage)             # this rank or another one may have replaced files
            if problem is None:
                self._fetched.append(offer["attempt"])
                return True
            self._refuse(offer["attempt"], problem)

    def _refuse(self, attempt: str, reason: str) -> None:
        self._tried.add(attempt)
        step, _ = parse_attempt(attempt)
        self.refused.append(Refusal(step, f"{reason} [{self.remote.url}/{attempt}]"))
        self.emit(CandidateRefused(step, reason, f"{self.remote.url}/{attempt}"))

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _offer(self, refused: set[int | None], bound: tuple[float, ...] | None, suspected: bool) -> dict[str, Any]:
        """Returns the checkpoint to fetch next, and those that are refused with their reasons.

        Args:
            refused: steps that were refused on this disk.
            bound: the checkpoint must be newer than this order. None: than the newest usable one on this disk.
            suspected: whether a checkpoint is offered after whose loading too many jobs died: it is better than none.
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
            return {**offer, "failed": f"it is not known whether {self.remote.url} holds a newer checkpoint: {error}"}
        failed_loads = failed_loads_by_key(self.storage, self.root) if policy.max_failed_loads and not requested else {}
        suspected_names = [name for name in names if suspicion(failed_loads.get(name, ()), policy.max_failed_loads)]
        for attempt in [*(name for name in names if name not in suspected_names), *(suspected_names if suspected else ())]:
            try:
                manifest, data = self.remote.manifest(attempt)
            except (RecordError, RemoteError) as error:
                offer["refused"].append((attempt, f"its manifest cannot be read: {error}"))
                continue
            if requested and not _is_requested(manifest, requested):
                continue
            candidate = candidate_of(manifest, iteration_name(manifest.step) if is_iteration_save(manifest) else "")
            if not requested and policy.unhealthy is not None and is_unhealthy(candidate, policy.unhealthy):
                offer["unhealthy"] = True
                offer["refused"].append((attempt, "it was unhealthy when it was saved"))
                continue
            refusal = check_files(self.storage, self.root, candidate, policy.world_size, files=False)
            if refusal is None:
                return {**offer, "attempt": attempt, "manifest": data.decode()}
            offer["refused"].append((attempt, refusal.reason))
        return offer


def _is_requested(manifest: Manifest, requested: str) -> bool:
    """Returns whether ``resume_training: requested`` means this checkpoint."""
    file = manifest.files[0][0]
    if is_iteration_save(manifest):
        return manifest.step == (
            int(requested) if requested.isascii() and requested.isdigit() else parse_iteration(requested.rstrip("/")))
    return os.path.basename(file.path) == name_for_rank(requested, 0, file.format)
