"""Scans a checkpoint directory of either format into candidates, in the order in which a resume tries them."""
from __future__ import annotations

import os
from collections.abc import Sequence

from mindresume.formats import Candidate, Scan, iteration_scan, rank_folders, unlisted_candidate
from mindresume.formats.checkpoint_dir import CheckpointDir
from mindresume.formats.iteration_naming import TRACKER, parse_iteration
from mindresume.formats.rank_folder_naming import folder_rank
from mindresume.formats.records import attempts_within, read_attempts, scan_records
from mindresume.model.manifest import FOLDER
from mindresume.storage.interface import Storage


def is_root(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` holds rank folders, iteration folders, a tracker, or records."""
    return any(folder_rank(name) is not None or parse_iteration(name) is not None or name in (FOLDER, TRACKER)
               for name in storage.list(path)) and not iteration_scan.is_iteration(storage, path)


def scan(directory: CheckpointDir) -> Scan:
    """Finds everything under ``root`` that looks like a saved step.

    Reads names, manifests and a few headers; sizes and contents are checked later, only for the candidates that matter. A folder
    in ``root`` that cannot be listed becomes a refused candidate.

    If a job has switched from one format to the other, both are present: all candidates of the format with the newest possibly
    complete step precede the others.

    Raises:
        OSError: ``root`` itself cannot be listed.
    """
    top, status = directory.storage.list(directory.root), directory.storage.status(directory.root)
    attempted: list[str] | None = []
    hidden: list[Candidate] = []
    try:
        attempted = directory.storage.list(directory.path(FOLDER)) if FOLDER in top else []
    except OSError as error:
        attempted, hidden = None, [unlisted_candidate(error, FOLDER)]
    ours, known, notes = scan_records(directory, attempted or [], brief=True, top=top)
    in_ranks, first = rank_folders.scan_rank_folders(directory, top, attempted, [c for c in ours if not c.iteration_dir],
                                                     known)
    in_iterations, second = iteration_scan.scan_iterations(directory, top, attempted or [],
                                                         [c for c in ours if c.iteration_dir])
    expected, source = rank_folders.expected_ranks(directory, top)
    found = sorted((in_iterations, in_ranks), key=_newest, reverse=True)
    return Scan(directory, tuple(hidden + found[0] + found[1]), tuple(notes + first + second), status is not None,
                expected, source)


def _newest(candidates: list[Candidate]) -> tuple[float, ...]:
    """Returns (run, step) of the newest candidate: the part of the order that both formats share."""
    newest = max((candidate for candidate in candidates if candidate.problem is None), key=lambda c: c.order, default=None)
    return (newest.order[0], newest.step or 0) if newest else ()


def scan_one(storage: Storage, path: str) -> Scan:
    """Scans a single iteration folder, whatever its name."""
    root, name = os.path.split(os.path.abspath(path))
    directory = CheckpointDir(storage, root)
    ours, _, notes = read_attempts(directory, attempts_within(directory, name))
    found: Sequence[Candidate | None] = ours or [iteration_scan.candidate_without_records(directory, name)]
    return Scan(directory, tuple(candidate for candidate in found if candidate), tuple(notes))
