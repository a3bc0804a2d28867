"""The object store from which checkpoints that this disk does not hold are fetched. All ranks take part.

    select from this disk ─▶ ``fetch_newer``: does the url hold a newer one? ─▶ ``remote_fetch`` ─▶ select from this disk again

A checkpoint that cannot be fetched is refused with its reason, and the next older one is fetched.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindresume.coordination.collectives import Watchdog, run_on_rank0
from mindresume.coordination.storage_topology import order_of
from mindresume.errors import NoUsableCheckpointError, RecordError, RemoteError
from mindresume.events import CandidateRefused, warning
from mindresume.formats import OURS, Candidate, CheckpointDir, Refusal
from mindresume.formats.iterations import iteration_name
from mindresume.formats.records import candidate_of
from mindresume.formats.scan import scan
from mindresume.model.manifest import parse_attempt
from mindresume.resume.candidates import is_requested
from mindresume.resume.choice import Choice
from mindresume.resume.eligible import check_files, eligible, none_usable
from mindresume.resume.remote_fetch import RemoteFetch, is_iteration_save
from mindresume.resume.sources import Job, drop_cached_files
from mindresume.saving.crash_loop import failed_loads_by_key, suspicion
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.storage.read_cache import uncached


@dataclass
class BucketSource:
    """An object store that may hold newer checkpoints. All ranks use it in the same way.

    Args:
        job: who selects. Checkpoints that its policy would refuse, by their manifest or by failed loads that are recorded on this
            disk, are not fetched.
        root: the folder in which the job saves, to which files are downloaded.
    """
    job: Job
    remote: RemoteCheckpoints
    root: str
    refused: list[Refusal] = field(default_factory=list)
    _tried: set[str] = field(default_factory=set)
    _fetched: list[str] = field(default_factory=list)

    def fetch_newer(self, chosen: Candidate | None, refused: tuple[Refusal, ...]) -> bool:
        """Fetches the newest checkpoint that is newer than all usable ones on this disk. Returns whether there was one: then the
        disk is selected from again.

        Args:
            chosen: the choice of the disk; None: there is none.
            refused: the refusals of the selection on this disk.
        Raises:
            RemoteError: on all ranks, if there is no checkpoint on this disk and the store cannot be read.
        """
        job, steps = self.job, {refusal.step for refusal in refused}
        if chosen is not None and job.policy.requested:
            return False
        shared = job.shared if job.is_split else None
        fetch = RemoteFetch(uncached(job.storage), self.remote, self.root, job.group, job.emit, shared)
        bound = (chosen.order[:2] if chosen else (0, 0)) if job.is_split else None
        while True:
            offer = run_on_rank0(job.group, lambda: self._offer(steps, bound, suspected=chosen is None),
                                 Watchdog(f"looking at {self.remote.url}"))
            for row in offer["refused"]:
                self._refuse(*row)
            if offer.get("failed") and chosen is None:
                raise RemoteError(offer["failed"])
            if offer.get("failed"):
                job.emit(warning(f"{offer['failed']}. The newest checkpoint on this machine is taken"))
            if not offer["attempt"]:
                return False
            self._tried.add(offer["attempt"])
            problem = fetch.fetch(offer["attempt"], offer["manifest"].encode())
            drop_cached_files(job.storage)              # this rank or another one may have replaced files
            if problem is None:
                self._fetched.append(offer["attempt"])
                return True
            self._refuse(offer["attempt"], problem)

    def allow(self, choice: Choice) -> Choice:
        """Returns the choice of the disk. Raises NoUsableCheckpointError, on all ranks, if it is a fresh start although the store
        holds checkpoints."""
        if choice.chosen is None and self._tried:
            for attempt in self._fetched:
                self._refuse(attempt, "it was fetched, but it is not complete on this disk")
            raise NoUsableCheckpointError(f"{none_usable(self.remote.url, self.refused)}\n"
                                          f"Repair one of them, or to start afresh set resume_training: False", self.refused)
        return choice

    def _refuse(self, attempt: str, reason: str) -> None:
        self._tried.add(attempt)
        step, _ = parse_attempt(attempt)
        self.refused.append(Refusal(step, f"{reason} [{self.remote.url}/{attempt}]"))
        self.job.emit(CandidateRefused(step, reason, f"{self.remote.url}/{attempt}"))

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _offer(self, refused: set[int | None], bound: tuple[float, ...] | None, suspected: bool) -> dict[str, Any]:
        """Returns the checkpoint to fetch next, and those that are refused with their reasons.

        Args:
            refused: steps that were refused on this disk.
            bound: the checkpoint must be newer than this order. None: than the newest usable one on this disk.
            suspected: whether a checkpoint is offered after whose loading too many jobs died: it is better than none.
        """
        offer: dict[str, Any] = {"attempt": "", "refused": []}
        directory = CheckpointDir(uncached(self.job.storage), self.root)
        policy, requested = self.job.policy, self.job.policy.requested
        if requested:
            bound = (0, 0)
        elif bound is None:
            bound = max((c.order[:2] for c in scan(directory).candidates if c.origin == OURS and c.problem is None
                         and c.step not in refused), default=(0, 0))
        try:
            names = [name for name in self.remote.scan().committed() if name not in self._tried and order_of(name) > bound]
        except RemoteError as error:
            return {**offer, "failed": f"it is not known whether {self.remote.url} holds a newer checkpoint: {error}"}
        failed_loads = failed_loads_by_key(directory) if policy.max_failed_loads and not requested else {}
        suspected_names = [name for name in names if suspicion(failed_loads.get(name, ()), policy.max_failed_loads)]
        for attempt in [*(name for name in names if name not in suspected_names), *(suspected_names if suspected else ())]:
            try:
                manifest, data = self.remote.manifest(attempt)
            except (RecordError, RemoteError) as error:
                offer["refused"].append((attempt, f"its manifest cannot be read: {error}"))
                continue
            candidate = candidate_of(manifest, iteration_name(manifest.step) if is_iteration_save(manifest) else "")
            if requested and not is_requested(candidate, requested):
                continue
            refusal = eligible(directory, candidate, policy, is_explicit=bool(requested)) or \
                check_files(directory, candidate, policy.world_size, files=False)
            if refusal is None:
                return {**offer, "attempt": attempt, "manifest": data.decode()}
            offer["refused"].append((attempt, refusal.reason))
        return offer
