"""A folder of checkpoints of either format -> candidates, in the order in which a resume tries them."""
from __future__ import annotations

import os

from mindresume.formats import Scan, iterations, rank_folders
from mindresume.formats.iteration_files import TRACKER, parse_iteration
from mindresume.formats.names import folder_rank
from mindresume.formats.records import attempts_within, read_attempts, scan_records
from mindresume.manifest import FOLDER
from mindresume.store.storage import Storage


def is_root(storage: Storage, path: str) -> bool:
    """Whether ``path`` is a folder of rank folders, of iteration folders, or of records of what was in them."""
    return any(folder_rank(name) is not None or parse_iteration(name) is not None or name in (FOLDER, TRACKER)
               for name in storage.list(path)) and not iterations.is_iteration(storage, path)


def scan(storage: Storage, root: str, legacy: bool | None = None) -> Scan:
    """Everything under ``root`` that looks like a saved step. Names, manifests and a few headers are read; sizes and contents are
    checked later, only for the candidates that matter.

    ``legacy``: the format that counts where both are there: True Checkpoint 1.0, False 2.0, None whichever has the newest."""
    top, status = storage.list(root), storage.status(root)
    attempted = storage.list(os.path.join(root, FOLDER)) if FOLDER in top else []
    ours, known, notes = scan_records(storage, root, attempted, brief=True, top=top)
    in_ranks, first = rank_folders.candidates_of(storage, root, top, attempted, [c for c in ours if not c.base], known)
    in_iterations, second = iterations.candidates_of(storage, root, top, attempted, [c for c in ours if c.base])
    expected, source = rank_folders.expected_ranks(storage, root, top)
    if legacy is None and in_ranks and in_iterations:
        legacy = max(c.order for c in in_ranks) > max(c.order for c in in_iterations)
    taken, other = (in_iterations, in_ranks) if legacy is False or not in_ranks else (in_ranks, in_iterations)
    if not taken:
        taken, other = other, taken
    if other and any(c.existed for c in other):
        notes.append(f"{root} holds {'rank' if taken is in_iterations else 'iteration'} folders too, checkpoints of the other "
                     f"format; ignored, those of this format count")
    both = [*first, *second] if taken is not in_iterations else second
    return Scan(root, tuple(taken), tuple(notes + both), status is not None, expected, source)


def scan_one(storage: Storage, path: str) -> Scan:
    """One iteration folder, under whatever name, alone."""
    root, name = os.path.split(os.path.abspath(path))
    ours, _, notes = read_attempts(storage, root, attempts_within(storage, root, name))
    found = ours or [iterations.foreign_candidate(storage, root, name)]
    return Scan(root, tuple(candidate for candidate in found if candidate), tuple(notes))
