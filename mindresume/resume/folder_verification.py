"""Verifies every byte of every checkpoint of a folder (``mindresume verify``), also while a job saves into it.

    for candidate, refusals in verify_checkpoints(storage, root, rows, list_again, progress): ...

A job may complete and remove checkpoints during the verification. Before a checkpoint is reported as damaged, the folder is
listed again: a removed checkpoint is not damaged, and one that was completed meanwhile is verified as it is now.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mindresume.formats import Candidate, Refusal
from mindresume.resume.checkpoint_warnings import damaged_metadata_files, replica_warning
from mindresume.resume.listing import CheckpointStatus
from mindresume.resume.metadata_verifier import MetadataVerifier
from mindresume.resume.verifier import OnBytesRead, verify_rank
from mindresume.storage.interface import Storage

_MAX_LISTINGS = 20                      # each after a change of the folder
Verdict = tuple[Candidate, list[Refusal]]


def verify_checkpoints(storage: Storage, root: str, rows: Iterable[CheckpointStatus],
                       list_again: Callable[[], Iterable[CheckpointStatus]],
                       progress: OnBytesRead = lambda count: None) -> list[Verdict]:
    """Returns (candidate, refusals of damaged or missing files) for ``rows``, without checkpoints that were removed meanwhile.

    Args:
        list_again: lists the checkpoints again.
        progress: receives the bytes that are read.
    """
    found = [(row.candidate, find_damage(storage, root, row, progress)) for row in rows]
    for _ in range(_MAX_LISTINGS):
        if not any(candidate.maybe_completed for candidate, bad in found if bad):
            break
        now = {_identity(row.candidate): row for row in list_again()}
        gone = [verdict for verdict in found if verdict[1] and not _is_unchanged(storage, verdict[0], now)]
        if not gone:
            break
        known, lost = {_identity(candidate) for candidate, _ in found}, {candidate.step for candidate, _ in gone}
        later = [row for identity, row in now.items() if row.candidate.step in lost and identity not in known]
        found = [*((row.candidate, find_damage(storage, root, row, progress)) for row in later),
                 *(verdict for verdict in found if verdict not in gone)]
    return found


def _identity(candidate: Candidate) -> Any:
    """Returns a value that changes if the checkpoint is completed or renamed."""
    return candidate.commit_dir, candidate.run, candidate.step, tuple(file.path
                                                                      for file in candidate.all_files), candidate.committed


def _is_unchanged(storage: Storage, candidate: Candidate, now: dict[Any, CheckpointStatus]) -> bool:
    """Returns whether the checkpoint still exists as it was read. A listing can be stale; the status of one name is not."""
    return _identity(candidate) in now and (not candidate.commit_dir or storage.status(candidate.commit_dir) is not None)


def find_damage(storage: Storage, root: str, row: CheckpointStatus, progress: OnBytesRead = lambda count: None) -> list[Refusal]:
    """Returns a refusal for each damaged or missing file of one step; an empty list if all is as it was written."""
    candidate, problem = row.candidate, None if row.candidate.local_ranks else row.problem     # partial on purpose
    metadata = MetadataVerifier(storage, root, candidate)
    results = [] if candidate.problem else [verify_rank(storage, root, candidate, rank, progress, metadata=metadata)
                                           for rank in candidate.files]
    bad = [result for result in results if isinstance(result, Refusal)]
    missing = [row for result in results if not isinstance(result, Refusal) for row in result.missing_files(candidate)]
    bad += [candidate.refuse(replica_warning([(rank, path)])[0], path, rank) for rank, path in missing]
    bad += damaged_metadata_files(storage, root, candidate)
    bad = list(dict.fromkeys(bad))                      # every rank reports the same defect of metadata.json
    return bad or ([problem] if problem else [])
