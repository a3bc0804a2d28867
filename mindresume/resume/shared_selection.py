"""Selects the checkpoint of a resume in a folder that all ranks see. All ranks of the job take the same one.

    rank 0        scan ─▶ the newest candidate that passes the cheap checks ─▶ broadcast
    each rank     verifies the files that it will load ─▶ gather the refusals of all ranks
    all ranks     no refusal: take it; else rank 0 offers the next older candidate

All exchanges go through ``mindresume.coordination.collectives``: an error on one rank is raised on all of them.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from mindresume.coordination.collectives import Group, Watchdog, run_on_rank0
from mindresume.errors import ConfigError, MissingCheckpointError, NoUsableCheckpointError
from mindresume.events.progress import ProgressReporter
from mindresume.formats import Candidate, Refusal, Scan
from mindresume.formats.weight_files import is_weights_only
from mindresume.resume.candidates import find_candidates, world_size_notes
from mindresume.resume.choice import Choice, VerifiedShard, candidate_from_json, candidate_to_json, read_size
from mindresume.resume.eligible import SelectionPolicy, check_files
from mindresume.resume.group_verification import collect_warnings, drop_cached_files, verify_on_all_ranks
from mindresume.resume.health import NONE_HEALTHY, is_unhealthy
from mindresume.resume.replicas import StrategyOf, complete_missing_ranks, unknown_strategy
from mindresume.saving.crash_loop import FailedLoad, failed_loads_by_key, key_of, suspicion, warning
from mindresume.storage.interface import Storage


class ProgressMeter(Protocol):
    """Receives the progress of a verification."""

    def expect(self, total: int) -> None:
        """Resets the count; ``total`` bytes will be read."""

    def advance(self, count: int) -> None:
        """Adds ``count`` bytes that were read."""


def select_shared(storage: Storage, path: str, group: Group, policy: SelectionPolicy | None = None,
           strategy_of: StrategyOf = unknown_strategy, progress: ProgressMeter | None = None) -> Choice:
    """Selects the newest checkpoint in ``path`` that every rank has verified; the same on all ranks of ``group``.

    Args:
        path: see ``find_candidates``.
        policy: what is accepted and how it is verified; None: the default.
        strategy_of: returns the strategy of a job that left no manifest. It gives the number of ranks, and the tensors of missing
            ranks.
        progress: receives the bytes that are verified of each candidate.
    Raises:
        MissingCheckpointError: on all ranks, if the requested checkpoint cannot be used, or ``path`` is a folder of another kind.
        NoUsableCheckpointError: on all ranks, if there are checkpoints, and none can be used.
        ConfigError: on all ranks, if ``path`` is a file of another kind.
        CollectiveError: on all ranks, if one fails in another way.
    """
    policy, progress = policy or SelectionPolicy(), progress or ProgressReporter.silent()
    queue = CandidateQueue(storage, path, policy, strategy_of) if group.rank == 0 else None
    refusals: list[Refusal] = []
    while True:
        message = run_on_rank0(group, lambda refusals=refusals: queue.next(refusals), Watchdog("scanning the checkpoints"))
        if message["end"]:
            return _conclude(message, (), policy.verifies_bytes)
        candidate, root = candidate_from_json(message["candidate"]), message["root"]
        ranks = policy.ranks_to_verify(group, candidate)
        progress.expect(read_size(candidate, ranks))
        drop_cached_files(storage)
        refusals, shards, missing = verify_on_all_ranks(storage, root, candidate, ranks, group, progress.advance,
                                                     policy.verifies_bytes, strategy_of)
        if not refusals:
            choice = _conclude({**message, "end": "chosen"}, shards, policy.verifies_bytes)
            return replace(choice, warnings=collect_warnings(storage, root, candidate, missing, group))


class CandidateQueue:
    """Offers the candidates on rank 0 one after the other, as messages to all ranks. The last message is the outcome."""

    def __init__(self, storage: Storage, path: str, policy: SelectionPolicy, strategy_of: StrategyOf = unknown_strategy):
        self.storage, self.path, self.policy, self.strategy_of = storage, path, policy, strategy_of
        self.failed_loads: Mapping[str, tuple[FailedLoad, ...]] = {}
        self.notes: list[str] = []
        self.suspected: list[Candidate] = []
        self.refused_unhealthy = False
        self.refused: list[Refusal] = []
        self.found: Scan | None = None
        self.queue: list[Candidate] = []
        self.is_explicit = False

    def next(self, refusals: list[Refusal]) -> dict[str, Any]:
        """Returns the next message: a candidate that passes the cheap checks, or the outcome (``end``).

        Args:
            refusals: why the ranks refused the candidate before; empty at the first call.
        """
        try:
            return self._next(refusals)
        except MissingCheckpointError as error:
            return {"end": "missing", "text": str(error)}
        except ConfigError as error:
            return {"end": "config", "text": str(error)}

    def _next(self, refusals: list[Refusal]) -> dict[str, Any]:
        policy = self.policy
        if self.found is None:
            self.found, self.is_explicit = find_candidates(self.storage, self.path, policy.requested, policy.world_size)
            self.queue = list(self.found.candidates)
            counts_loads = policy.max_failed_loads and not self.is_explicit
            self.failed_loads = failed_loads_by_key(self.storage, self.found.root) if counts_loads else {}
        self.refused += refusals[:1]
        while self.queue or self.suspected:
            if not self.queue:                                  # a suspected checkpoint is better than none
                self.queue, self.suspected, self.failed_loads = self.suspected, [], {}
            candidate = self.queue.pop(0)
            if not policy.require_counters and is_weights_only(candidate):
                candidate = replace(candidate, problem=None)
            ranks = policy.world_size
            if not (self.is_explicit and len(candidate.files) == 1):
                candidate, ranks = complete_missing_ranks(self.storage, self.found.root, candidate, self.strategy_of,
                                                          policy.world_size, self.found.expected_ranks)
            failed = self.failed_loads.get(key_of(candidate), ())
            if reason := suspicion(failed, policy.max_failed_loads):
                self.suspected.append(candidate)
                self.refused.append(candidate.refuse(reason))
                continue
            refusal = check_files(self.storage, self.found.root, candidate, policy.world_size if self.is_explicit else ranks,
                                  not candidate.committed) or self._refuse_unhealthy(candidate)
            if refusal is None:
                self.notes += [f"step {candidate.step}: {text}" for text in [warning(failed, policy.max_failed_loads)] if text]
                return {"end": "", "candidate": candidate_to_json(candidate), "root": self.found.root,
                        "refused": [r.to_json() for r in self.refused], "notes": self._all_notes()}
            self.refused.append(refusal)
        fresh = not any(candidate.maybe_completed for candidate in self.found.candidates)
        end = "missing" if self.is_explicit or self.found.fresh_start_refusal else "fresh" if fresh else "none"
        return {"end": end, "root": self.found.root, "refused": [r.to_json() for r in self.refused],
                "notes": self._all_notes(), "text": self._error_text(end, self.found.root)}

    def _refuse_unhealthy(self, candidate: Candidate) -> Refusal | None:
        """Returns a refusal if the candidate was unhealthy when it was saved, unless the user asked for it."""
        names = self.policy.unhealthy
        if names is None or self.is_explicit or not is_unhealthy(candidate, names):
            return None
        self.refused_unhealthy = True
        return candidate.refuse(f"it was unhealthy when it was saved (the embedding's local norm was above "
                                f"embedding_local_norm_threshold); to use it anyway, "
                                f"request it by the name of its {'folder' if candidate.iteration_dir else 'file'}")

    def _all_notes(self) -> list[str]:
        return [*self.found.notes, *world_size_notes(self.found, self.policy.world_size), *self.notes] if self.found else []

    def _error_text(self, end: str, root: str) -> str:
        """Returns the message of the error that the outcome means; empty for a fresh start."""
        table = "\n".join(f"  {refusal}" for refusal in self.refused)
        if self.found.fresh_start_refusal:
            return self.found.fresh_start_refusal
        if end == "missing":
            return f"the requested checkpoint cannot be used:\n{table}"
        if end == "none":
            return (f"{NONE_HEALTHY + '. ' if self.refused_unhealthy else ''}{root} holds checkpoints, but none can be used:\n"
                    f"{table}\nRepair or restore one of them, or set another load_checkpoint"
                    + ("; or, to start afresh, set resume_training: False" if self.policy.require_counters else ""))
        return ""


def _conclude(message: dict[str, Any], shards: tuple[VerifiedShard, ...], bytes_verified: bool) -> Choice:
    """Returns the choice of the last message, or raises the error that it means."""
    end = message["end"]
    refused = tuple(Refusal(**refusal) for refusal in message.get("refused", ()))
    if end == "config":
        raise ConfigError(message["text"])
    if end == "missing":
        raise MissingCheckpointError(message["text"], refused)
    if end == "none":
        raise NoUsableCheckpointError(message["text"], refused)
    chosen = candidate_from_json(message["candidate"]) if end == "chosen" else None
    return Choice(chosen, refused, tuple(message.get("notes", ())), end == "fresh", shards, message["root"],
                  bytes_verified)
