"""Verifies every byte of every checkpoint of a folder (``mindresume verify``), also while a job saves into it.

    for candidate, refusals in verify_checkpoints(storage, root, rows, list_again, progress): ...

A job may complete and remove checkpoints during the verification. Before a checkpoint is reported as damaged, the folder is
listed again: a removed checkpoint is not damaged, and one that was completed meanwhile is verified as it is now.

Several processes may share the files (``read_shared``); process 0 alone lists again and decides.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindresume.coordination.collectives import Group, Watchdog, gather_results, run_on_rank0
from mindresume.formats import Candidate, Refusal
from mindresume.resume.candidates import CheckpointStatus
from mindresume.resume.checkpoint_warnings import damaged_metadata_files, replica_warning
from mindresume.resume.metadata_verifier import MetadataVerifier
from mindresume.resume.verifier import OnBytesRead, verify_rank
from mindresume.storage.interface import Storage

_MAX_LISTINGS = 20                      # each after a change of the folder
Verdict = tuple[Candidate, list[Refusal]]
# {checkpoint: {rank: [the refusal of its files as JSON or None, [[rank, path] of missing files with replicas]]}}
RankVerdicts = Mapping[str, Mapping[int, list[Any]]]


def verify_checkpoints(storage: Storage, root: str, rows: Iterable[CheckpointStatus],
                       list_again: Callable[[], Iterable[CheckpointStatus]],
                       progress: OnBytesRead = lambda count: None, known: RankVerdicts | None = None) -> list[Verdict]:
    """Returns (candidate, refusals of damaged or missing files) for ``rows``, without checkpoints that were removed meanwhile.

    Args:
        list_again: lists the checkpoints again.
        progress: receives the bytes that are read.
        known: what ``read_shared`` returned for ``rows``.
    """
    known = known or {}
    found = [(row.candidate, find_damage(storage, root, row, progress, known.get(_key(row.candidate)))) for row in rows]
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


def find_damage(storage: Storage, root: str, row: CheckpointStatus, progress: OnBytesRead = lambda count: None,
                known: Mapping[int, list[Any]] | None = None) -> list[Refusal]:
    """Returns a refusal for each damaged or missing file of one step; an empty list if all is as it was written. ``known``:
    verdicts on ranks that need not be read again."""
    candidate, problem, known = row.candidate, row.problem, known or {}
    if candidate.local_ranks:                           # partial on purpose
        problem = None
    metadata = MetadataVerifier(storage, root, candidate)
    results = [] if candidate.problem else [known.get(rank) or _read_rank(storage, root, candidate, rank, progress, metadata)
                                            for rank in candidate.files]
    bad = [Refusal(**refused) for refused, _ in results if refused]
    harmless = [candidate.refuse(replica_warning([(rank, path)])[0], path, rank) for _, missing in results
                for rank, path in missing]
    harmless += damaged_metadata_files(storage, root, candidate)
    bad += [replace(row, is_harmless=True) for row in harmless]
    bad = list(dict.fromkeys(bad))                      # every rank reports the same defect of metadata.json
    return bad or ([problem] if problem else [])


def _read_rank(storage: Storage, root: str, candidate: Candidate, rank: int, progress: OnBytesRead, metadata: MetadataVerifier
               ) -> list[Any]:
    """Reads the files of one rank. Returns a row of ``RankVerdicts``."""
    found = verify_rank(storage, root, candidate, rank, progress, metadata=metadata)
    if isinstance(found, Refusal):
        return [found.to_json(), []]
    return [None, [list(row) for row in found.missing_files(candidate)]]


def _key(candidate: Candidate) -> str:
    return repr(_identity(candidate))


def read_shared(storage: Storage, root: str, rows: Sequence[CheckpointStatus], progress: OnBytesRead, group: Group, timeout: float
                ) -> RankVerdicts:
    """Reads a share of the files of ``rows`` in each process of ``group``. A checkpoint that a process does not see as process 0
    does is left out; process 0 then reads it itself.

    Returns:
        What all processes found, on all of them.
    Raises:
        CollectiveError: On all processes, if one fails.
    """
    own, read = {_key(row.candidate): row.candidate for row in rows}, [0]
    files = run_on_rank0(group, lambda: [[_key(row.candidate), rank] for row in rows if not row.candidate.problem
                                         for rank in sorted(row.candidate.files)])

    def counted(count: int) -> None:
        read[0] += count
        progress(count)

    def work() -> list[Any]:
        metadata = {key: MetadataVerifier(storage, root, candidate) for key, candidate in own.items()}
        return [[key, rank, _read_rank(storage, root, own[key], rank, counted, metadata[key])]
                for key, rank in files[group.rank::group.size] if key in own]
    found: dict[str, dict[int, list[Any]]] = {}
    for part in gather_results(group, work, Watchdog(f"verifying {root}", lambda: read[0], timeout)):
        for key, rank, verdict in part:
            found.setdefault(key, {})[rank] = verdict
    return found
