"""Verifies every byte of every checkpoint of a folder (``mindresume verify``), also while a job saves into it.

    for candidate, refusals in verify_checkpoints(storage, root, rows, list_again, progress): ...

A job may complete and remove checkpoints during the verification. Before a checkpoint is reported as damaged, the folder is
listed again: a removed checkpoint is not damaged, and one that was completed meanwhile is verified as it is now.

Several processes may read a part of the files each: (K, N) is the K-th of N, from 1.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from mindresume.formats import Candidate, CheckpointDir, Refusal
from mindresume.resume.candidates import CheckpointStatus
from mindresume.resume.checkpoint_warnings import damaged_metadata_files, replica_warning
from mindresume.resume.verifier import OnBytesRead, Verifier
from mindresume.storage.interface import Storage

_MAX_LISTINGS = 20                      # each after a change of the folder
Verdict = tuple[Candidate, list[Refusal]]
WHOLE = (1, 1)


def verify_checkpoints(directory: CheckpointDir, rows: Iterable[CheckpointStatus],
                       list_again: Callable[[], Iterable[CheckpointStatus]],
                       progress: OnBytesRead = lambda count: None, part: tuple[int, int] = WHOLE) -> list[Verdict]:
    """Returns (candidate, refusals of damaged or missing files) for ``rows``, without checkpoints that were removed meanwhile.

    Args:
        list_again: lists the checkpoints again.
        progress: receives the bytes that are read.
        part: of the files, which are read.
    """
    found = [(row.candidate, find_damage(directory, row, progress, part)) for row in rows]
    for _ in range(_MAX_LISTINGS):
        if not any(candidate.maybe_completed for candidate, bad in found if bad):
            break
        now = {_identity(row.candidate): row for row in list_again()}
        gone = [verdict for verdict in found if verdict[1] and not _is_unchanged(directory.storage, verdict[0], now)]
        if not gone:
            break
        known, lost = {_identity(candidate) for candidate, _ in found}, {candidate.step for candidate, _ in gone}
        later = [row for identity, row in now.items() if row.candidate.step in lost and identity not in known]
        found = [*((row.candidate, find_damage(directory, row, progress, part)) for row in later),
                 *(verdict for verdict in found if verdict not in gone)]
    return found


def _identity(candidate: Candidate) -> Any:
    """Returns a value that changes if the checkpoint is completed or renamed."""
    return candidate.commit_dir, candidate.run, candidate.step, tuple(file.path
                                                                      for file in candidate.all_files), candidate.committed


def _is_unchanged(storage: Storage, candidate: Candidate, now: dict[Any, CheckpointStatus]) -> bool:
    """Returns whether the checkpoint still exists as it was read. A listing can be stale; the status of one name is not."""
    return _identity(candidate) in now and (not candidate.commit_dir or storage.status(candidate.commit_dir) is not None)


def find_damage(directory: CheckpointDir, row: CheckpointStatus, progress: OnBytesRead = lambda count: None,
                part: tuple[int, int] = WHOLE) -> list[Refusal]:
    """Returns a refusal for each damaged or missing file of one step, of those of ``part``; an empty list if all is as it was
    written."""
    candidate, problem, (number, count) = row.candidate, row.problem, part
    if candidate.local_ranks:                           # partial on purpose
        problem = None
    verifier = Verifier(directory, candidate, progress)
    bad: list[Refusal] = []
    harmless: list[Refusal] = []
    ranks = [] if candidate.problem else [*candidate.files]
    for position, rank in enumerate(ranks, candidate.step or 0):        # so that saves of few ranks are shared too
        if position % count != number - 1:
            continue
        found = verifier.verify(rank)
        if isinstance(found, Refusal):
            bad.append(found)
        else:
            harmless += [candidate.refuse(replica_warning([(lost, path)])[0], path, lost)
                         for lost, path in found.missing_files(candidate)]
    harmless += damaged_metadata_files(directory, candidate)
    bad += [replace(row, is_harmless=True) for row in harmless]
    bad = list(dict.fromkeys(bad))                      # every rank reports the same defect of metadata.json
    return bad or ([problem] if problem else [])
