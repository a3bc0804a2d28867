"""Lists whether a resume could use each of the candidates that a path means, by names, records and
sizes, with the defects that do not prevent its use. ``verify_checkpoints`` reads every byte of them
(``mindresume verify``), also while a job saves there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindresume.errors import CorruptFileError, RecordError
from mindresume.formats import (
    MINDFORMERS,
    Candidate,
    CheckpointDir,
    Refusal,
    Scan,
    missing_ranks_text,
)
from mindresume.formats.iterations import COMMON, METADATA, common_from_state, load_common
from mindresume.formats.metadata import (
    encode_metadata,
    load_metadata,
    metadata_from_records,
    read_metadata,
)
from mindresume.formats.records import RecordFolder
from mindresume.formats.scan import find_candidates
from mindresume.formats.weight_files import file_sizes, is_as_recorded
from mindresume.formatting import listed, ranks_count
from mindresume.model.manifest import MANIFEST
from mindresume.resume.eligible import SelectionPolicy, check_files, eligible
from mindresume.resume.replicas import StrategyOf, complete_missing_ranks
from mindresume.resume.verifier import OnBytesRead, Verifier, ignore_bytes
from mindresume.storage import Storage


def world_size_notes(found: Scan, world_size: int | None) -> list[str]:
    """Returns one sentence that states the assumed number of ranks; none if the user or the
    manifests give it."""
    foreign = any(
        candidate.origin == MINDFORMERS and not candidate.iteration_dir
        for candidate in found.candidates
    )
    if world_size is not None or not foreign or found.expected_ranks is None:
        return []
    return [
        f"{ranks_count(found.expected_ranks)} assumed from {found.expected_source}, because "
        "mindformers writes no manifest"
    ]


_LISTED = SelectionPolicy()
COMPLETE = "complete"
INCOMPLETE = "incomplete"
UNUSABLE = "unusable"
NODE_LOCAL = "node-local"


@dataclass(frozen=True)
class CheckpointStatus:
    """A saved step. ``problem``: why a resume refuses it; None: it can be used. ``warnings``:
    sentences on defects that do not prevent its use."""

    candidate: Candidate
    problem: Refusal | None
    warnings: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """COMPLETE; INCOMPLETE: the save never completed, so nothing is lost; UNUSABLE; or
        NODE_LOCAL: nodes share no storage, and all files of this node are present."""
        candidate, problem = self.candidate, self.problem
        if (
            candidate.local_ranks
            and candidate.problem is None
            and problem is not None
            and problem.file is None
        ):
            return NODE_LOCAL
        return (
            COMPLETE
            if self.problem is None
            else UNUSABLE
            if self.candidate.maybe_completed
            else INCOMPLETE
        )


def list_checkpoints(
    storage: Storage, path: str, strategy_of: StrategyOf, world_size: int | None = None
) -> tuple[Scan, tuple[CheckpointStatus, ...]]:
    """Returns the scan, and the status of each step in the order in which a resume tries them,
    newest first.

    Args:
        strategy_of, world_size: see ``complete_missing_ranks``.
    Raises:
        MissingCheckpointError, ConfigError: see ``find_candidates``.
    """
    found, _ = find_candidates(storage, path)
    return found, tuple(
        status_of_candidate(found, candidate, strategy_of, world_size)
        for candidate in found.candidates
    )


def status_of_candidate(
    found: Scan, candidate: Candidate, strategy_of: StrategyOf, world_size: int | None = None
) -> CheckpointStatus:
    """Returns the row of ``list_checkpoints`` for one candidate of the scan ``found``."""
    directory = found.directory
    candidate, ranks = complete_missing_ranks(
        directory, candidate, strategy_of, world_size, found.expected_ranks
    )
    problem = eligible(directory, candidate, _LISTED) or check_files(directory, candidate, ranks)
    return CheckpointStatus(
        candidate, problem, _warnings(directory, candidate) if problem is None else ()
    )


def _warnings(directory: CheckpointDir, candidate: Candidate) -> tuple[str, ...]:
    """Returns the warnings that are known without reading contents."""
    rows = (
        [(rank, file) for rank, files in candidate.files.items() for file in files]
        if candidate.records_dir
        else []
    )
    sizes = file_sizes(directory, [file for _, file in rows])
    lost = [
        (rank, file.path) for (rank, file), size in zip(rows, sizes, strict=True) if size is None
    ]
    found = [
        replica_warning(lost) if lost else "",
        manifest_warning(candidate),
        missing_ranks_text(candidate),
    ]
    return tuple(filter(None, found))


# ---- defects that do not prevent its use ---------------------------------------------------------

#     a file of a rank is missing           other ranks hold every tensor of it, by the records the
#     manifest cannot be read           the records of all ranks exist and agree: they are the
#     commit common.json or metadata.json differ   the records hold the same facts. The manifest
#     holds their checksums; if it is damaged,
#                                           the expected contents are derived from the records

_Problem = tuple[str, str, Exception | None]  # (text, file, error from which it follows)


def replica_warning(missing: Sequence[tuple[int, str]]) -> str:
    """Returns a sentence about missing files, (rank, path), that replicas replace."""
    return (
        f"the file of rank {listed(list(dict.fromkeys(rank for rank, _ in missing)))} is missing "
        f"({listed([path for _, path in missing], 2)}); other ranks hold every tensor of it, so a "
        "resume uses those"
    )


def manifest_warning(candidate: Candidate) -> str:
    """Returns a sentence if the manifest cannot be used but the records can; else an empty text."""
    if not candidate.manifest_problem or candidate.problem is not None:
        return ""
    return (
        f"{MANIFEST} of step {candidate.step}: {candidate.manifest_problem}; the records of all "
        "ranks exist and agree, so a resume uses them"
    )


def damaged_metadata_files(directory: CheckpointDir, candidate: Candidate) -> list[Refusal]:
    """Returns a refusal for each of the manifest, ``common.json`` and ``metadata.json`` that
    differs from what was written. A resume by mindresume does not need them; mindformers without
    mindresume needs the last two."""
    found: list[Refusal] = []
    damaged: Iterable[_Problem] = ()
    if text := manifest_warning(candidate):
        path = os.path.relpath(candidate.in_records(MANIFEST), directory.root)
        found = [replace(candidate.refuse(text, path), is_unreadable=candidate.manifest_unreadable)]
        damaged = _by_records(directory, candidate) if candidate.iteration_dir else ()
    elif candidate.metadata_files:
        damaged = _by_checksums(directory, candidate)
    return found + [
        candidate.refuse(
            f"{text}; a resume uses the records, mindformers without mindresume cannot",
            file,
            error=error,
        )
        for text, file, error in damaged
    ]


def _by_checksums(directory: CheckpointDir, candidate: Candidate) -> Iterator[_Problem]:
    """Yields a row for each metadata file whose checksum differs from the one in the manifest."""
    for file in candidate.metadata_files:
        path = directory.path(file.path)
        try:
            if not is_as_recorded(directory.storage, path, file):
                status = directory.storage.status(path)
                text = (
                    f"{file.path} is not what was written: it has "
                    f"{status.size if status else 0} bytes, "
                    f"{file.size} bytes of checksum {file.checksum} were written"
                )
                yield text, file.path, None
        except OSError as error:
            yield f"{file.path} cannot be read: {error.strerror or error}", file.path, error


def _by_records(directory: CheckpointDir, candidate: Candidate) -> Iterator[_Problem]:
    """Yields a row for each metadata file that contradicts the records. Values are compared, not
    bytes: another version may have encoded them differently."""
    common = f"{candidate.iteration_dir}/{COMMON}"
    metadata = f"{candidate.iteration_dir}/{METADATA}"
    storage = directory.storage
    try:
        there = load_common(directory, candidate.iteration_dir)
        expected = common_from_state(candidate.state)
        if there != expected:
            text = f"{common} is not what was written: it holds {there}, the records {expected}"
            yield text, common, None
    except CorruptFileError as error:
        yield f"{common}: {error.reason}", common, error
    try:
        if candidate.world_size > 1:
            written = load_metadata(storage, directory.path(candidate.iteration_dir))
            files = [
                [os.path.basename(file.path) for file in candidate.files[rank]]
                for rank in range(candidate.world_size)
            ]
            records = RecordFolder(storage, candidate.records_dir or "")
            pieces = encode_metadata(metadata_from_records(files, candidate.deduplicated, records))
            if written != read_metadata(b"".join(pieces), METADATA):
                text = f"{metadata} is not what was written: the records hold other values"
                yield text, metadata, None
    except CorruptFileError as error:
        yield f"{metadata}: {error.reason}", metadata, error
    except (RecordError, ValueError, OSError) as error:
        yield f"{metadata} cannot be compared with the records: {error}", metadata, error


# ---- verification of every byte ------------------------------------------------------------------

# A job may complete and remove checkpoints during the verification. Before a checkpoint is reported
# as damaged, the folder is listed again: a removed checkpoint is not damaged, and one that was
# completed meanwhile is verified as it is now. Several processes may read a part of the files each:
# (K, N) is the K-th of N, from 1.

_MAX_LISTINGS = 20  # each after a change of the folder
Verdict = tuple[Candidate, list[Refusal]]
WHOLE = (1, 1)


def verify_checkpoints(
    directory: CheckpointDir,
    rows: Iterable[CheckpointStatus],
    list_again: Callable[[], Iterable[CheckpointStatus]],
    progress: OnBytesRead = ignore_bytes,
    part: tuple[int, int] = WHOLE,
) -> list[Verdict]:
    """Returns (candidate, refusals of damaged or missing files) for ``rows``, without checkpoints
    that were removed meanwhile.

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
        gone = [
            verdict
            for verdict in found
            if verdict[1] and not _is_unchanged(directory.storage, verdict[0], now)
        ]
        if not gone:
            break
        known = {_identity(candidate) for candidate, _ in found}
        lost = {candidate.step for candidate, _ in gone}
        later = [
            row
            for identity, row in now.items()
            if row.candidate.step in lost and identity not in known
        ]
        found = [
            *((row.candidate, find_damage(directory, row, progress, part)) for row in later),
            *(verdict for verdict in found if verdict not in gone),
        ]
    return found


def _identity(candidate: Candidate) -> Any:
    """Returns a value that changes if the checkpoint is completed or renamed."""
    return (
        candidate.commit_dir,
        candidate.run,
        candidate.step,
        tuple(file.path for file in candidate.all_files),
        candidate.committed,
    )


def _is_unchanged(storage: Storage, candidate: Candidate, now: dict[Any, CheckpointStatus]) -> bool:
    """Returns whether the checkpoint still exists as it was read. A listing can be stale; the
    status of one name is not."""
    return _identity(candidate) in now and (
        not candidate.commit_dir or storage.status(candidate.commit_dir) is not None
    )


def find_damage(
    directory: CheckpointDir,
    row: CheckpointStatus,
    progress: OnBytesRead = ignore_bytes,
    part: tuple[int, int] = WHOLE,
) -> list[Refusal]:
    """Returns a refusal for each damaged or missing file of one step, of those of ``part``; an
    empty list if all is as it was written."""
    candidate = row.candidate
    problem = row.problem
    number, count = part
    if candidate.local_ranks:  # partial on purpose
        problem = None
    verifier = Verifier(directory, candidate, progress)
    bad: list[Refusal] = []
    harmless: list[Refusal] = []
    ranks = [] if candidate.problem else [*candidate.files]
    # so that saves of few ranks are shared too
    for position, rank in enumerate(ranks, candidate.step or 0):
        if position % count != number - 1:
            continue
        found = verifier.verify(rank)
        if isinstance(found, Refusal):
            bad.append(found)
        else:
            harmless += [
                candidate.refuse(replica_warning([(lost, path)]), path, lost)
                for lost, path in found.missing_files(candidate)
            ]
    harmless += damaged_metadata_files(directory, candidate)
    bad += [replace(row, is_harmless=True) for row in harmless]
    # every rank reports the same defect of metadata.json
    bad = list(dict.fromkeys(bad))
    return bad or ([problem] if problem else [])
