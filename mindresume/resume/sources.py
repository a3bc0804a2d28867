"""The disks from which a job can take a checkpoint: one folder that all ranks see, or the folders
of nodes that share no storage.

    # of all ranks together; raises if there are checkpoints, and none can be used
    choice = SharedDisk(job).select()

``bucket_source`` and ``memory_source`` are the other sources; ``selection`` tells in which order
they are asked. All exchanges go through ``mindresume.coordination.collectives``: an error on one
rank is raised on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from mindresume.coordination.collectives import Group, Watchdog, gather_results, run_on_rank0
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import ConfigError, MissingCheckpointError, NoUsableCheckpointError
from mindresume.events import SILENT, Counted, Emit, Progress, ignore
from mindresume.formats import MINDFORMERS, Candidate, CheckpointDir, Refusal, Scan
from mindresume.formats.bad_steps import BadStep
from mindresume.formats.rank_folders import parse_name, root_of
from mindresume.formats.scan import CHECKPOINT, find_candidates
from mindresume.formats.weight_files import is_weights_only
from mindresume.formatting import listed, ranks_count
from mindresume.resume.candidates import damaged_metadata_files, replica_warning, world_size_notes
from mindresume.resume.eligible import (
    UNHEALTHY,
    Choice,
    SelectionPolicy,
    check_files,
    eligible,
    none_usable,
    read_size,
)
from mindresume.resume.replicas import StrategyOf, complete_missing_ranks, unknown_strategy
from mindresume.resume.verifier import VerifiedShard, Verifier
from mindresume.saving.crash_loop import FailedLoad, failed_loads_by_key, key_of, warning
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.storage import Storage
from mindresume.storage.read_cache import ReadCache
from mindresume.typed import decode

_MAX_OFFERS = 64  # names of checkpoints that one rank sends to the others


class ConsolidatedWeights(Protocol):
    """Opens consolidated (merged) weights."""

    def choose(self, storage: Storage, path: str) -> Choice:
        """Returns the weights at ``path`` as the choice of a selection, on all ranks together."""


@dataclass(frozen=True)
class CheckpointSources:
    """The sources of a selection besides the folder itself.

    Args:
        strategy_of: returns the strategy of the job that saved a candidate without a manifest: the
            number of ranks, and the tensors of missing ones.
        consolidated: opens consolidated weights. None: they are not accepted.
        shared: which ranks see the same folder. None: all of them.
        saved_to: real paths of the folders in which this job saves. Only a resume from one of them
            continues the training that is kept in ``remote`` and in memory.
        remote: the object store that may hold newer checkpoints.
        memory: gets the groups of ranks that share a tier in memory, by its path. None: memory is
            not considered.
        partner: saves in memory may have copies on other nodes (``partner_source``).
        partner_port: on which a node receives them; 0: a free one.
        is_preview: one process looks for all ranks, and changes nothing.
    """

    strategy_of: StrategyOf = unknown_strategy
    consolidated: ConsolidatedWeights | None = None
    shared: SharedGroups | None = None
    saved_to: Collection[str] = ()
    remote: RemoteCheckpoints | None = None
    memory: dict[str, SharedGroups] | None = None
    partner: bool = False
    partner_port: int = 0
    is_preview: bool = False


@dataclass(frozen=True)
class Job:
    """Who selects: the ranks of a job together, or one process for all of them.

    Args:
        storage: reads the files. Those that it keeps in memory (``ReadCache``) are dropped whenever
            a candidate is refused.
        path: the folder or file in which the checkpoints lie (``formats.scan.locate``).
        policy: what is accepted and how it is verified.
        sources: what there is besides the folder.
        progress: receives the bytes that are verified of each candidate.
    """

    storage: Storage
    path: str
    group: Group
    policy: SelectionPolicy
    sources: CheckpointSources = CheckpointSources()
    emit: Emit = ignore
    progress: Progress = SILENT

    @property
    def is_split(self) -> bool:
        """Whether its nodes share no disk."""
        return self.sources.shared is not None and self.sources.shared.is_split


def job_directory(path: str, saved_to: Collection[str]) -> str | None:
    """Returns the folder in ``saved_to``, in which the job saves, that ``path`` means; None if it
    means another one."""
    root = root_of(os.path.realpath(path))
    if root not in saved_to and os.path.join(root, CHECKPOINT) in saved_to:
        # the output folder was given, and nothing is in it yet
        root = os.path.join(root, CHECKPOINT)
    return root if root in saved_to else None


# ---- verification --------------------------------------------------------------------------------


def drop_cached_files(storage: Storage) -> None:
    """Drops the files that ``storage`` keeps in memory (``ReadCache``), because their candidate was
    refused or they were replaced on disk."""
    if isinstance(storage, ReadCache):
        storage.clear()


@dataclass
class _Share:
    """The ranks of a candidate whose files this process verifies, and the verified ones. ``read``:
    the bytes so far."""

    job: Job
    directory: CheckpointDir
    candidate: Candidate
    ranks: Sequence[int]
    keep: ReadCache | None
    read: Counted
    shards: list[VerifiedShard] = field(default_factory=list)

    def verify(self) -> dict[str, Any]:
        """Returns, for the other ranks, the first refusal; or (rank, path) of each file that is
        missing, and is replaced, and on rank 0 what is wrong with the metadata files."""
        job, candidate = self.job, self.candidate
        is_guessed = candidate.missing_ranks and candidate.records_dir is None
        strategy = job.sources.strategy_of(self.directory.root, candidate) if is_guessed else None
        if self.ranks:  # a rank without a part reads no metadata, either
            verifier = Verifier(
                self.directory, candidate, self.read.advance, job.policy.full, strategy, self.keep
            )
            for rank in self.ranks:
                result = verifier.verify(rank)
                if isinstance(result, Refusal):
                    return {"refusal": result}
                self.shards.append(result)
        lost = [row for shard in self.shards for row in shard.missing_files(candidate)]
        is_first = job.group.rank == 0
        damaged = damaged_metadata_files(self.directory, candidate) if is_first else []
        return {"lost": lost, "damaged": [refusal.reason for refusal in damaged]}


def verify_on_all_ranks(
    job: Job,
    directory: CheckpointDir,
    candidate: Candidate,
    ranks: Sequence[int],
    keep: ReadCache | None = None,
) -> Choice | list[Refusal]:
    """Verifies ``candidate`` on all ranks of the job together, each the files that it will load.

    Args:
        ranks: ranks of the checkpoint whose files this process verifies.
        keep: as for ``Verifier``.
    Returns:
        The choice of the candidate, or the refusals of all ranks; the same on all but for the files
        that each verified.
    """
    drop_cached_files(job.storage)
    job.progress.expect(read_size(candidate, ranks))
    share = _Share(job, directory, candidate, ranks, keep, Counted(job.progress))
    rows = gather_results(
        job.group, share.verify, Watchdog(f"checking step {candidate.step}", share.read)
    )
    if refusals := refusals_of(rows):
        return refusals
    missing = sorted({(rank, path) for row in rows for rank, path in row.get("lost", ())})
    return Choice(
        candidate,
        (),
        (),
        False,
        tuple(share.shards),
        directory.root,
        job.policy.full,
        (*([replica_warning(missing)] if missing else ()), *rows[0]["damaged"]),
    )


def refusals_of(rows: Sequence[Mapping[str, Any]]) -> list[Refusal]:
    """Returns the refusals in the answers of all ranks: one rank that refuses a checkpoint refuses
    it for all."""
    return [Refusal(**row["refusal"]) for row in rows if "refusal" in row]


# ---- a folder that all ranks see -----------------------------------------------------------------


_ERRORS = {
    error.__name__: error
    for error in (ConfigError, MissingCheckpointError, NoUsableCheckpointError)
}


@dataclass
class SharedDisk:
    """A folder that all ranks see. All ranks of the job take the same checkpoint of it.

        rank 0        scan ─▶ the newest candidate that passes the cheap checks ─▶ broadcast
        each rank     verifies the files that it will load ─▶ gather the refusals of all ranks
        all ranks     no refusal: take it; else rank 0 offers the next older candidate

    Args:
        scan: this and what follows: on rank 0 only.
        is_explicit: see ``find_candidates``.
        queue: candidates that were not offered yet, newest first.
        suspected: those after which too many jobs died.
    """

    job: Job
    scan: Scan | None = None
    is_explicit: bool = False
    queue: list[Candidate] = field(default_factory=list)
    failed_loads: Mapping[str, tuple[FailedLoad, ...]] = field(default_factory=dict)
    suspected: list[Candidate] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def select(self) -> Choice:
        """Selects the newest checkpoint that every rank has verified; the same on all ranks.

        Raises:
            MissingCheckpointError: on all ranks, if the requested checkpoint cannot be used, or the
                path is a folder of another kind.
            NoUsableCheckpointError: on all ranks, if there are checkpoints, and none can be used.
            ConfigError: on all ranks, if the path is a file of another kind.
            CollectiveError: on all ranks, if one fails in another way.
        """
        job, verdict = self.job, []
        while True:
            message = run_on_rank0(
                job.group, partial(self.offer, verdict), Watchdog("scanning the checkpoints")
            )
            refused = tuple(Refusal(**refusal) for refusal in message["refused"])
            notes = tuple(message["notes"])
            error = _ERRORS.get(message["error"])
            if error is ConfigError:
                raise ConfigError(message["text"])
            if error is not None:
                raise error(message["text"], refused)
            bad_steps = decode(tuple[BadStep, ...], message["bad_steps"], "bad steps")
            if message["candidate"] is None:
                found = Choice(None, refused, notes, True, (), message["root"], job.policy.full)
                return replace(found, bad_steps=bad_steps)
            candidate = Candidate.from_json(message["candidate"])
            ranks = job.policy.ranks_to_verify(job.group, candidate)
            verdict = verify_on_all_ranks(
                job, CheckpointDir(job.storage, message["root"]), candidate, ranks
            )
            if isinstance(verdict, Choice):
                return replace(verdict, refused=refused, notes=notes, bad_steps=bad_steps)

    def offer(self, refusals: Sequence[Refusal]) -> dict[str, Any]:
        """Returns the next message to all ranks: a candidate that passes the cheap checks; if there
        is none left, none, and perhaps an error.

        Args:
            refusals: why the ranks refused the candidate before; empty at the first call.
        """
        job, policy = self.job, self.job.policy
        if self.scan is None:
            try:
                self.scan, self.is_explicit = find_candidates(
                    job.storage, job.path, policy.requested, policy.world_size
                )
            except (MissingCheckpointError, ConfigError) as problem:
                return {
                    "error": type(problem).__name__,
                    "text": str(problem),
                    "refused": [],
                    "notes": [],
                }
            self.queue = list(self.scan.candidates)
            if policy.max_failed_loads and self.scan.has_load_attempts and not self.is_explicit:
                self.failed_loads = failed_loads_by_key(self.scan.directory)
        scan = self.scan
        error = text = ""
        candidate = None
        self.refused += refusals[:1]
        while candidate is None and (self.queue or self.suspected):
            # a suspected checkpoint is better than none
            if not self.queue:
                self.queue = self.suspected
                self.suspected = []
                self.failed_loads = {}
            candidate = self._usable(scan, self.queue.pop(0))
        if candidate is None and (self.is_explicit or scan.fresh_start_refusal):
            error = MissingCheckpointError.__name__
            text = scan.fresh_start_refusal or "\n".join(
                [
                    "the requested checkpoint cannot be used:",
                    *(f"  {refusal}" for refusal in self.refused),
                ]
            )
        elif candidate is None and scan.has_checkpoint:
            error = NoUsableCheckpointError.__name__
            text = (
                f"{none_usable(scan.root, self.refused)}\nRepair or restore one of them, or set "
                "another load_checkpoint"
            )
            if policy.require_counters:
                text += "; or, to start afresh, set resume_training: False"
        return {
            "error": error,
            "text": text,
            "candidate": candidate,
            "root": scan.root,
            "refused": self.refused,
            "notes": [*scan.notes, *world_size_notes(scan, policy.world_size), *self.notes],
            "bad_steps": scan.bad_steps,
        }

    def _usable(self, scan: Scan, candidate: Candidate) -> Candidate | None:
        """Returns the candidate as it is loaded; None if it is refused, as far as that is known
        without its contents."""
        policy = self.job.policy
        if not policy.require_counters and is_weights_only(candidate):
            candidate = replace(candidate, problem=None)
        ranks = policy.world_size
        if candidate.origin == MINDFORMERS and not (self.is_explicit and len(candidate.files) == 1):
            candidate, ranks = complete_missing_ranks(
                scan.directory, candidate, self.job.sources.strategy_of, ranks, scan.expected_ranks
            )
        failed = self.failed_loads.get(key_of(candidate), ()) if self.failed_loads else ()
        refusal = eligible(scan.directory, candidate, policy, failed, self.is_explicit)
        if refusal is not None and refusal.is_last_resort:
            self.suspected.append(candidate)
        if refusal is not None and refusal.reason == UNHEALTHY:
            refusal = candidate.refuse(
                f"{UNHEALTHY} (the embedding's local norm was above "
                "embedding_local_norm_threshold); to use it anyway, request it by the name of its "
                f"{'folder' if candidate.iteration_dir else 'file'}"
            )
        refusal = refusal or check_files(
            scan.directory,
            candidate,
            policy.world_size if self.is_explicit else ranks,
            not candidate.committed,
        )
        if refusal is not None:
            self.refused.append(refusal)
            return None
        if failed and (text := warning(failed, policy.max_failed_loads)):
            self.notes.append(f"step {candidate.step}: {text}")
        return candidate


# ---- folders of nodes that share no storage ------------------------------------------------------


@dataclass
class NodeDisks:
    """The folders of nodes that share no storage: the newest checkpoint that every rank finds in
    its own folder.

        each rank    scan its own folder ─▶ candidates whose files for this rank pass the cheap
            checks ─▶ gather their names
        all ranks    the first name, in the order of rank 0, that all ranks have ─▶ each verifies
            its files ─▶ gather the refusals
        all ranks    no refusal: take it; else the next name that all ranks have

    The job must have as many ranks as the checkpoint, each rank verifies its own files, and failed
    loads are not counted. The policy's ``unhealthy`` is known to rank 0 only.

    Args:
        scan: of the folder of this rank.
        is_explicit: see ``find_candidates``.
        offers: usable candidates by name, newest first.
    """

    job: Job
    scan: Scan = field(init=False)
    is_explicit: bool = False
    offers: dict[str, Candidate] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)

    def select(self) -> Choice:
        """Selects the newest checkpoint that every rank finds in its own folder and has verified.

        Raises:
            NoUsableCheckpointError: on all ranks, if there are checkpoints, but none that all ranks
                can use.
            MissingCheckpointError: on all ranks, unless all of them can use the requested
                checkpoint.
        """
        job, refused = self.job, []
        rows = gather_results(
            job.group, self._look, Watchdog(f"scanning the checkpoints below {job.path}")
        )
        scan, common = self.scan, set.intersection(*(set(row["offers"]) for row in rows))
        # the disk of a new node has no note
        noted = max((row["bad_steps"] for row in rows), key=len)
        bad_steps = decode(tuple[BadStep, ...], noted, "bad steps")
        for name in [name for name in rows[0]["offers"] if name in common]:
            verdict = verify_on_all_ranks(job, scan.directory, self.offers[name], [job.group.rank])
            if isinstance(verdict, Choice):
                return replace(
                    verdict, refused=tuple(refused), notes=scan.notes, bad_steps=bad_steps
                )
            refused.append(verdict[0])
        refused += _differences(rows, self.refused)
        table = "\n".join(f"  {refusal}" for refusal in refused)
        if rows[0]["is_explicit"]:
            raise MissingCheckpointError(
                f"the requested checkpoint cannot be used by all ranks:\n{table}", tuple(refused)
            )
        if any(row["has_checkpoint"] for row in rows):
            raise NoUsableCheckpointError(
                f"nodes share no disk, and no checkpoint below {job.path} exists for all "
                f"ranks:\n{table}\n"
                "Start the nodes in the same order as in the job that saved, copy the folders of "
                "all nodes to one shared disk, "
                "or, to start afresh, set resume_training: False",
                tuple(refused),
            )
        for rank, row in enumerate(rows):
            if row["fresh_start_refusal"]:
                raise MissingCheckpointError(f"rank {rank}: {row['fresh_start_refusal']}")
        found = Choice(None, tuple(self.refused), scan.notes, True, (), scan.root, job.policy.full)
        return replace(found, bad_steps=bad_steps)

    def _look(self) -> dict[str, Any]:
        """Returns what this rank sees, for the other ranks, and keeps it, split into usable and
        refused candidates."""
        job, size = self.job, self.job.group.size
        try:
            self.scan, self.is_explicit = find_candidates(
                job.storage, job.path, job.policy.requested, size
            )
        except MissingCheckpointError:  # other ranks may have it
            self.scan = Scan(CheckpointDir(job.storage, job.path), exists=False)
            self.is_explicit = True
        for candidate in self.scan.candidates:
            whole = (
                replace(candidate, world_size=size) if candidate.records_dir is None else candidate
            )
            refusal = (
                candidate.problem
                or eligible(self.scan.directory, whole, job.policy, is_explicit=self.is_explicit)
                or _refuse_for_rank(candidate, job.group)
            )
            # without records, the scan counted only the files of this node
            if refusal is None:
                self.offers.setdefault(_shared_name(candidate), whole)
            else:
                self.refused.append(refusal)
        return {
            "offers": list(self.offers)[:_MAX_OFFERS],
            "is_explicit": self.is_explicit,
            "has_checkpoint": self.scan.has_checkpoint,
            "fresh_start_refusal": self.scan.fresh_start_refusal,
            "bad_steps": self.scan.bad_steps,
        }


def _refuse_for_rank(candidate: Candidate, group: Group) -> Refusal | None:
    """Returns why this rank cannot load the candidate from a disk that other nodes do not see; None
    if it can."""
    if candidate.iteration_dir:
        return candidate.refuse(
            "an iteration folder needs a disk that all nodes share", candidate.iteration_dir
        )
    if candidate.records_dir and candidate.world_size != group.size:
        return candidate.refuse(
            f"saved by {ranks_count(candidate.world_size)}, this job has {group.size}; another "
            "number of ranks needs a disk that all nodes share"
        )
    if candidate.records_dir is None and max(candidate.files) >= group.size:
        return candidate.refuse(
            f"saved by at least {max(candidate.files) + 1} ranks, this job has {group.size}; "
            "another number of ranks needs a disk that all nodes share",
            rank=max(candidate.files),
        )
    if group.rank not in candidate.files:
        return candidate.refuse(
            f"this node holds files of rank {listed(sorted(candidate.files))}, none of rank "
            f"{group.rank}",
            rank=group.rank,
        )
    return None


def _shared_name(candidate: Candidate) -> str:
    """Returns a name that is the same on all nodes: the name of the folder of records, or of
    mindformers' files without the rank."""
    if candidate.records_dir:
        return candidate.name
    parsed = parse_name(os.path.basename(candidate.first.path))
    return f"{candidate.step} {parsed._replace(rank=0) if parsed else ''}"


def _differences(rows: list[dict[str, Any]], refused: list[Refusal]) -> list[Refusal]:
    """Returns which checkpoints each group of ranks has, if they differ, then why this rank refused
    its newest ones."""
    by_offers: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        by_offers.setdefault(", ".join(row["offers"][:3]) or "nothing usable", []).append(rank)
    groups = [
        Refusal(None, f"rank {listed(ranks)}: {offers}", rank=ranks[0])
        for offers, ranks in by_offers.items()
    ]
    return [*(groups if len(groups) > 1 else ()), *refused[:3]]
