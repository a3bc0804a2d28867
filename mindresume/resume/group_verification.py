"""Verifies a candidate on all ranks of a job together: each verifies the files that it will load.

    refusals, shards, missing = verify_on_all_ranks(storage, root, candidate, ranks, group, progress, verifies_bytes)
    warnings = collect_warnings(storage, root, candidate, missing, group)
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindresume.coordination.collectives import Group, Watchdog, gather_results, run_on_rank0
from mindresume.formats import Candidate, Refusal
from mindresume.resume.checkpoint_warnings import damaged_metadata_files, replica_warning
from mindresume.resume.choice import VerifiedShard
from mindresume.resume.metadata_verifier import MetadataVerifier
from mindresume.resume.replicas import StrategyOf, unknown_strategy
from mindresume.resume.verifier import OnBytesRead, verify_rank
from mindresume.storage.interface import Storage
from mindresume.storage.read_cache import ReadCache


def drop_cached_files(storage: Storage) -> None:
    """Drops the files that ``storage`` keeps in memory (``ReadCache``), because their candidate was refused or they were replaced
    on disk."""
    if isinstance(storage, ReadCache):
        storage.clear()


def verify_on_all_ranks(storage: Storage, root: str, candidate: Candidate, ranks: Sequence[int], group: Group,
                        progress: OnBytesRead | None, verifies_bytes: bool, strategy_of: StrategyOf = unknown_strategy,
                        keep: ReadCache | None = None) -> tuple[list[Refusal], tuple[VerifiedShard, ...], list[tuple[int, str]]]:
    """Verifies ``candidate`` on all ranks of the job together.

    Args:
        ranks: ranks of the checkpoint whose files this process verifies.
        progress: receives the bytes that are read.
        verifies_bytes: every byte is read; False: only records, sizes and headers.
        keep: as for ``verify_rank``.
    Returns:
        The refusals of all ranks, the same on all; the files that this process verified; and (rank, path) of each missing file
        whose tensors are read from replicas, the same on all.
    """
    shards: list[VerifiedShard] = []
    metadata, read = MetadataVerifier(storage, root, candidate), [0]

    def counted(count: int) -> None:
        read[0] += count
        if progress:
            progress(count)

    def check() -> Any:
        for rank in ranks:
            strategy = strategy_of(root, candidate) if candidate.missing_ranks and candidate.records_dir is None else None
            result = verify_rank(storage, root, candidate, rank, counted, verifies_bytes, strategy, metadata, keep)
            if isinstance(result, Refusal):
                return {"refusal": result.to_json()}
            shards.append(result)
        return {"lost": [row for shard in shards for row in shard.missing_files(candidate)]}
    rows = gather_results(group, check, Watchdog(f"checking step {candidate.step}", lambda: read[0]))
    return ([Refusal(**row["refusal"]) for row in rows if "refusal" in row], tuple(shards),
            sorted({(rank, path) for row in rows for rank, path in row.get("lost", ())}))


def collect_warnings(storage: Storage, root: str, candidate: Candidate, missing: list[tuple[int, str]], group: Group
                     ) -> tuple[str, ...]:
    """Returns sentences on defects of a usable candidate, the same on all ranks. ``missing``: (rank, path) of files that replicas
    replace (``verify_on_all_ranks``)."""
    damaged = run_on_rank0(group, lambda: [refusal.reason for refusal in damaged_metadata_files(storage, root, candidate)],
                          Watchdog("checking the metadata files"))
    return (*replica_warning(missing), *damaged)
