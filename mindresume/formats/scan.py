"""Finds the checkpoint directory that a path means, and scans it into candidates, in the order in
which a resume tries them.

A path means itself, or one folder below it:

    output/                            load_checkpoint: ./output means ./output/checkpoint
      checkpoint/                      where mindformers and mindresume save
      transformed_checkpoint/name/     mindformers documents auto_trans_ckpt with the path one level
                                       too high log/ strategy/ ...

The command line and the job call the same functions. A fresh start is right only where there was
never a checkpoint; ``fresh_start_refusal`` decides this for a folder in which none was found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter

from mindresume.errors import MissingCheckpointError
from mindresume.formats import Candidate, CheckpointDir, Scan, unlisted_candidate
from mindresume.formats.iterations import (
    TRACKER,
    candidate_without_records,
    is_iteration,
    parse_iteration,
    parse_weight_file,
    scan_iterations,
    tracked,
)
from mindresume.formats.rank_folders import META, expected_ranks, folder_rank, scan_rank_folders
from mindresume.formats.records import attempts_within, find_attempts, scan_records
from mindresume.formatting import listed
from mindresume.model.manifest import FOLDER, FORMATS, MANIFEST, is_probe
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel

# where a job saves, in its output folder
CHECKPOINT = "checkpoint"
# preferred over other folders: here a job saves
JOB_FOLDERS = (CHECKPOINT, os.path.join("output", CHECKPOINT))
# search limits: levels, names per folder, names in total
_DEPTH, _WIDTH, _MOST = 3, 256, 2048
# Entries of an output folder that a job makes before it saves, and weights for inference, which no
# training resumes from.
_OF_A_JOB = re.compile(
    r"log|msrun_log|strategy(_[0-9a-f]{8})?|merged_strategy|resume_record|checkpoint_network|"
    r"checkpoint_trainable|tensorboard|summary|profile|debug"
)
# temporary files of MindSpore
_UNFINISHED = re.compile(r".*\.tmp|tmp[0-9a-z_]{8}|.*graph\.meta|.*_breakpoint\.ckpt")


def is_root(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` holds rank folders, iteration folders, a tracker, or records."""
    return any(
        folder_rank(name) is not None
        or parse_iteration(name) is not None
        or name in (FOLDER, TRACKER)
        for name in storage.list(path)
    ) and not is_iteration(storage, path)


def scan(directory: CheckpointDir) -> Scan:
    """Finds everything under ``root`` that looks like a saved step.

    Reads names, manifests and a few headers; sizes and contents are checked later, only for the
    candidates that matter. A folder in ``root`` that cannot be listed becomes a refused candidate.

    If a job has switched from one format to the other, both are present: all candidates of the
    format with the newest possibly complete step precede the others.

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
    ours, known, notes = scan_records(
        directory, find_attempts(directory, attempted or [], top), brief=True
    )
    in_ranks, first = scan_rank_folders(
        directory, top, attempted, [c for c in ours if not c.iteration_dir], known
    )
    in_iterations, second = scan_iterations(
        directory, top, attempted or [], [c for c in ours if c.iteration_dir]
    )
    expected, source = expected_ranks(directory, top)
    found = sorted((in_iterations, in_ranks), key=_newest, reverse=True)
    return Scan(
        directory,
        tuple(hidden + found[0] + found[1]),
        tuple(notes + first + second),
        status is not None,
        expected,
        source,
    )


def _newest(candidates: list[Candidate]) -> tuple[float, ...]:
    """Returns (run, step) of the newest candidate: the part of the order that both formats
    share."""
    newest = max(
        (candidate for candidate in candidates if candidate.problem is None),
        key=attrgetter("order"),
        default=None,
    )
    return (newest.order[0], newest.step or 0) if newest else ()


def scan_one(storage: Storage, path: str) -> Scan:
    """Scans a single iteration folder, whatever its name."""
    root, name = os.path.split(os.path.abspath(path))
    directory = CheckpointDir(storage, root)
    ours, _, notes = scan_records(directory, attempts_within(directory, name))
    found: Sequence[Candidate | None] = ours or [candidate_without_records(directory, name)]
    return Scan(directory, tuple(candidate for candidate in found if candidate), tuple(notes))


# ---- consolidated weights, and parts of a checkpoint ---------------------------------------------


def is_consolidated(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` is one tensor file, or a folder with tensor files directly inside,
    but not files of ranks, which may be sharded."""
    status = storage.status(path)
    if status is None or part_of_ranks(storage, path, status.is_folder):
        return False
    return bool(tensor_files(storage.list(path) if status.is_folder else [os.path.basename(path)]))


def part_of_ranks(storage: Storage, path: str, is_folder: bool) -> bool:
    """Returns whether ``path`` holds rank folders, or is a rank folder, an iteration folder, or a
    file in one of these."""
    here = os.path.abspath(path)
    own = here if is_folder else os.path.dirname(here)
    if folder_rank(os.path.basename(own)) is not None or is_folder and is_root(storage, path):
        return True
    return (is_folder or parse_weight_file(os.path.basename(here)) is not None) and is_iteration(
        storage, own
    )


def tensor_files(names: Iterable[str]) -> list[str]:
    """Returns the names of tensor files. Ignores hidden names, which are half-written or belong to
    the file system."""
    return [
        name
        for name in names
        if not name.startswith(".") and name.endswith(tuple(f".{fmt}" for fmt in FORMATS))
    ]


# ---- location ------------------------------------------------------------------------------------


def locate(storage: Storage, path: str) -> str:
    """Returns the checkpoint directory that ``path`` means; ``path`` itself if there is none.
    Raises like ``find``."""
    return find(storage, path) or path


def find(storage: Storage, path: str) -> str | None:
    """Returns ``path`` if it holds checkpoints, else the only checkpoint directory below it, else
    None. Raises MissingCheckpointError, which names them, if there are several."""
    status = storage.status(path)
    if status is None:
        return None
    if not status.is_folder or _is_checkpoint(storage, path) or _has_checkpoint(storage, path):
        return path
    return below(storage, path) or None


def below(storage: Storage, path: str) -> str:
    """Returns the only folder below ``path`` with checkpoints that a training can resume from;
    empty if there is none. The folder in which the job saves precedes all others. Raises
    MissingCheckpointError, which names them, if there are several others."""
    if _is_checkpoint(storage, path):
        return ""
    for inner in JOB_FOLDERS:
        if _has_checkpoint(storage, os.path.join(path, inner)):
            return os.path.join(path, inner)
    found = []
    for folder in _folders(storage, path)[0]:
        # a folder that cannot be listed matters only without others: see ``fresh_start_refusal``
        with suppress(OSError):
            if _has_checkpoint(storage, folder):
                found.append(folder)
    if len(found) > 1:
        raise MissingCheckpointError(
            f"{path} holds no checkpoints itself, but several folders below do: {listed(found)}. "
            f"Give one of them"
        )
    return found[0] if found else ""


def fresh_start_refusal(storage: Storage, path: str, has_incomplete_saves: bool) -> str:
    """Returns why no training may start afresh in ``path``, in which neither a scan nor ``below``
    found a checkpoint, in sentences. Empty if a training may: the folder is empty, or holds only
    traces of first starts and of saves that never completed.

    Args:
        storage: the file system.
        path: the folder.
        has_incomplete_saves: a scan found such saves, so this is a checkpoint directory.

    Raises:
        OSError: A folder in it cannot be listed.
    """
    if (step := tracked(CheckpointDir(storage, path)) or 0) > 0:
        return (
            f"{os.path.join(path, TRACKER)} names step {step}, but there is no iteration folder "
            "beside it: the checkpoints "
            f"were moved or removed. Bring them back, or remove that file to start afresh"
        )
    if has_incomplete_saves:
        return ""
    folders, unlisted = _folders(storage, path)
    weights = []
    for folder in (path, *folders):
        names, problem = _names(storage, folder)
        weights += [folder] if any(map(_is_tensor_file, names)) else []
        unlisted += [problem] if problem else []
    if unlisted:
        return (
            f"{path} holds no visible checkpoint, and {listed(unlisted, 3)}, so whether there is "
            "one is unknown. "
            f"Make it readable, or give another folder"
        )
    if weights == [path]:
        return (
            f"{path} holds only weights, not a checkpoint that a training can resume from; to "
            "start afresh give a folder "
            f"that is empty or does not exist"
        )
    if weights:
        return (
            f"{path} holds no checkpoint that a training can resume from; weights lie in "
            f"{listed(weights, 3)}. To load "
            f"them give that folder; to start afresh give a folder that is empty or does not exist"
        )
    unexpected = _unexpected_names(storage, path)
    if not unexpected:
        return ""
    return (
        f"{path} is not a checkpoint directory: expected rank folders, iteration folders or "
        "nothing yet, found "
        f"{listed(unexpected)}. Give the folder in which a job saved (often .../{CHECKPOINT}); to "
        "start afresh one that is "
        f"empty or does not exist"
    )


def _unexpected_names(storage: Storage, path: str) -> list[str]:
    """Returns the names, relative to ``path``, that neither first starts nor saves that never
    completed leave there."""
    names, inner = storage.list(path), os.path.join(path, CHECKPOINT)
    saved = storage.list(os.path.join(path, FOLDER)) if FOLDER in names else None
    # A job saves here, so anything else may lie beside it. Only probes were left by one that was
    # killed before it knew whether it may save here.
    if saved is not None and not (saved and all(map(is_probe, saved))):
        return []
    if CHECKPOINT in names and _is_folder(storage, inner) and not _unexpected_names(storage, inner):
        return []
    ranks = [name for name in names if folder_rank(name) is not None]
    unexpected = [
        name
        for name in names
        if name not in ranks
        and name not in (TRACKER, CHECKPOINT)
        and not _is_system(name)
        and not _OF_A_JOB.fullmatch(name)
        and parse_iteration(name) is None
    ]
    if CHECKPOINT in names:
        unexpected.append(CHECKPOINT)
    listings = parallel(storage, storage.list, [os.path.join(path, name) for name in ranks])
    return unexpected + [
        f"{folder}/{name}"
        for folder, content in zip(ranks, listings, strict=True)
        for name in content
        if not _is_system(name) and name != META and not _UNFINISHED.fullmatch(name)
    ]


def _is_checkpoint(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` is itself one checkpoint or a part of one; folders below it are then
    not considered."""
    own = os.path.basename(os.path.abspath(path))
    return (
        folder_rank(own) is not None
        or is_iteration(storage, path)
        or is_consolidated(storage, path)
    )


def _has_checkpoint(storage: Storage, path: str) -> bool:
    """Returns whether a checkpoint was, or may have been, complete directly in ``path``."""
    if is_iteration(storage, path):
        return True
    if not is_root(storage, path):
        return False
    names = storage.list(path)
    ranks = [name for name in names if folder_rank(name) is not None]
    if (
        FOLDER not in names
        and ranks
        and not any(parse_iteration(name) is not None for name in names)
    ):
        found = (_names(storage, os.path.join(path, name)) for name in ranks)
        # no record tells of unlisted ones
        return any(problem or any(map(_is_tensor_file, inner)) for inner, problem in found)
    # the scan tells what it means that records cannot be listed
    with suppress(OSError):
        if any(
            MANIFEST in attempt.content
            for attempt in find_attempts(CheckpointDir(storage, path), top=names)
        ):
            # so is every candidate of a scan with a manifest
            return True
    return any(
        candidate.maybe_completed for candidate in scan(CheckpointDir(storage, path)).candidates
    )


def _folders(storage: Storage, path: str) -> tuple[list[str], list[str]]:
    """Returns the folders below ``path`` that may hold checkpoints, level by level, only a part of
    a large tree; and a phrase for each folder that cannot be listed."""
    found: list[str] = []
    unlisted: list[str] = []
    level, left = [path], _MOST
    for _ in range(_DEPTH):
        below_level = []
        for folder in level:
            names = [
                name
                for name in _names(storage, folder)[0]
                if not _is_system(name)
                and folder_rank(name) is None
                and parse_iteration(name) is None
                and not _OF_A_JOB.fullmatch(name)
                and not _is_tensor_file(name)
            ]
            names = names[: min(_WIDTH, left)]
            left -= len(names)
            for inner in (os.path.join(folder, name) for name in names):
                problem = _names(storage, inner)[1]
                if problem:
                    unlisted.append(problem)
                elif _is_folder(storage, inner):
                    below_level.append(inner)
        found += below_level
        level = [folder for folder in below_level if _may_contain_more(storage, folder)]
    return found, unlisted


def _may_contain_more(storage: Storage, folder: str) -> bool:
    """Returns whether there may be checkpoint directories below ``folder``."""
    try:
        return not _is_checkpoint(storage, folder) and not is_root(storage, folder)
    except OSError:
        return False


def _names(storage: Storage, folder: str) -> tuple[list[str], str]:
    """Returns the names in ``folder``, or none and a phrase if it cannot be listed."""
    try:
        return storage.list(folder), ""
    except OSError as error:
        return [], f"{folder} cannot be listed: {error.strerror or error}"


def _is_folder(storage: Storage, path: str) -> bool:
    status = storage.status(path)
    return status is not None and status.is_folder


def _is_system(name: str) -> bool:
    """Returns whether a name is hidden or made by the file system."""
    return name.startswith(".") or name == "lost+found"


def _is_tensor_file(name: str) -> bool:
    """Returns whether a name is that of a weight file; strategy files have the extension .ckpt
    too."""
    return (
        name.endswith(tuple(f".{fmt}" for fmt in FORMATS))
        and "strategy" not in name
        and not _is_system(name)
        and not _UNFINISHED.fullmatch(name)
    )
