"""Finds the checkpoint directory that a path means, and scans it into candidates, in the order in
which a resume tries them.

A path means itself, or one folder below it:

    output/                            load_checkpoint: ./output means ./output/checkpoint
      checkpoint/                      where mindformers and mindresume save
      transformed_checkpoint/name/     mindformers documents auto_trans_ckpt with the path one level
                                       too high
      log/ strategy/ ...

The command line and the job call the same functions. A fresh start is right only where there was
never a checkpoint; ``fresh_start_refusal`` decides this for a folder in which none was found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

from mindresume.errors import (
    ConfigError,
    CorruptFileError,
    MissingCheckpointError,
    RecordError,
)
from mindresume.formats import MINDFORMERS, Candidate, CheckpointDir, Scan, unlisted_candidate
from mindresume.formats.bad_steps import BAD_STEPS, BadStep, read_bad_steps, refuse_bad
from mindresume.formats.iterations import (
    COMMON,
    TRACKER,
    candidate_without_records,
    parse_iteration,
    parse_weight_file,
    scan_iterations,
    tracked,
)
from mindresume.formats.rank_folders import (
    META,
    expected_ranks,
    folder_rank,
    name_for_rank,
    root_of,
    scan_rank_folders,
)
from mindresume.formats.records import attempts_within, find_attempts, scan_records
from mindresume.formats.weight_files import header_of, no_step, scalars_of
from mindresume.formatting import listed
from mindresume.model.manifest import FOLDER, FORMATS, LOAD_ATTEMPTS, MANIFEST, FileRecord, is_probe
from mindresume.storage import Storage, parallel
from mindresume.tensor_files import format_of
from mindresume.typed import is_count

# where a job saves, in its output folder
CHECKPOINT = "checkpoint"
# preferred over other folders: here a job saves
JOB_FOLDERS = (CHECKPOINT, os.path.join("output", CHECKPOINT))
# search limits: levels, names per folder, names in total
_DEPTH = 3
_WIDTH = 256
_MOST = 2048
# Entries of an output folder that a job makes before it saves, and weights for inference, which no
# training resumes from.
_OF_A_JOB = re.compile(
    r"log|msrun_log|strategy(_[0-9a-f]{8})?|merged_strategy|resume_record|checkpoint_network|"
    r"checkpoint_trainable|tensorboard|summary|profile|debug"
)
# temporary files of MindSpore
_UNFINISHED = re.compile(r".*\.tmp|tmp[0-9a-z_]{8}|.*graph\.meta|.*_breakpoint\.ckpt")


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
    bad_steps: tuple[BadStep, ...] = ()
    if BAD_STEPS in (attempted or ()):
        try:
            bad_steps = read_bad_steps(directory)
        except (OSError, RecordError, ValueError) as error:
            notes.append(f"{FOLDER}/{BAD_STEPS} cannot be read, so no sample is skipped: {error}")
        ours = refuse_bad(ours, bad_steps)
    in_ranks, first = scan_rank_folders(
        directory, top, attempted, [c for c in ours if not c.iteration_dir], known
    )
    in_iterations, second = scan_iterations(
        directory, top, attempted or [], [c for c in ours if c.iteration_dir]
    )
    newer, older = sorted((in_iterations, in_ranks), key=_newest, reverse=True)
    is_foreign = any(candidate.origin == MINDFORMERS for candidate in hidden + in_ranks)
    expected, source = expected_ranks(directory, top) if is_foreign else (None, "")
    return Scan(
        directory,
        tuple(hidden + newer + older),
        tuple(notes + first + second),
        status is not None,
        expected,
        source,
        any(name.startswith(LOAD_ATTEMPTS) for name in attempted or ()),
        bad_steps=bad_steps,
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


# ---- what a path is ------------------------------------------------------------------------------

MISSING = "missing"
OTHER_FILE = "file"
WEIGHT_FILE = "weight file"
PART = "file of a rank"
FOLDER_OF_RANK = "rank folder"
ITERATION = "iteration folder"
ROOT = "checkpoint directory"
WEIGHT_FOLDER, OTHER = "weight folder", "other folder"
CONSOLIDATED = (WEIGHT_FILE, WEIGHT_FOLDER)  # their tensors are not sharded
NO_FOLDER = (MISSING, OTHER_FILE, WEIGHT_FILE, PART)
OF_RANKS = (PART, FOLDER_OF_RANK, ITERATION, ROOT)  # theirs may be


def kind_of(storage: Storage, path: str) -> str:
    """Returns what ``path`` is, by its name and the names in it.

    PART: a file in a rank folder, or a weight file in an iteration folder. WEIGHT_FILE: another
    tensor file. OTHER_FILE: another file. ITERATION: one iteration folder, under any name; a
    renamed one that only mindformers wrote is recognised by its files. ROOT: it holds rank folders,
    iteration folders, a tracker, or records. WEIGHT_FOLDER: tensor files lie directly inside.
    """
    here, status = os.path.abspath(path), storage.status(path)
    folder, name = os.path.split(here)
    if status is None:
        return MISSING
    if not status.is_folder:
        is_part = folder_rank(os.path.basename(folder)) is not None or (
            parse_weight_file(name) is not None and kind_of(storage, folder) == ITERATION
        )
        return PART if is_part else WEIGHT_FILE if tensor_files([name]) else OTHER_FILE
    if parse_iteration(name) is not None:
        return ITERATION
    names = storage.list(path)
    if (COMMON in names or FOLDER in names) and any(map(parse_weight_file, names)):
        return ITERATION
    if folder_rank(name) is not None:
        return FOLDER_OF_RANK
    if any(
        folder_rank(name) is not None
        or parse_iteration(name) is not None
        or name in (FOLDER, TRACKER)
        for name in names
    ):
        return ROOT
    return WEIGHT_FOLDER if tensor_files(names) else OTHER


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
    """Returns ``path`` if it holds checkpoints that a training can resume from, or is a checkpoint
    or a part of one; else what ``below`` returns, and raises."""
    kind = kind_of(storage, path)
    if kind == MISSING:
        return None
    if kind not in (ROOT, OTHER) or _has_checkpoint(storage, path, kind):
        return path
    return below(storage, path)


def below(storage: Storage, path: str) -> str | None:
    """Returns the only folder below ``path`` that holds checkpoints, None if there is none. The
    folder in which the job saves precedes all others. Raises MissingCheckpointError, which names
    them, if there are several others."""
    for inner in (os.path.join(path, name) for name in JOB_FOLDERS):
        kind = kind_of(storage, inner)
        if kind == MISSING:
            storage.list(inner)  # raises for a link to itself: what the job saved is unknown
        if _has_checkpoint(storage, inner, kind):
            return inner
    found = []
    for folder, kind in _folders(storage, path)[0]:
        # a folder that cannot be listed matters only without others: see ``fresh_start_refusal``
        with suppress(OSError):
            if _has_checkpoint(storage, folder, kind):
                found.append(folder)
    if len(found) > 1:
        raise MissingCheckpointError(
            f"{path} holds no checkpoints itself, but several folders below do: {listed(found)}. "
            f"Give one of them"
        )
    return found[0] if found else None


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
    for folder in (path, *(folder for folder, _ in folders)):
        try:
            weights += [folder] if any(map(_is_tensor_file, storage.list(folder))) else []
        except OSError as error:
            unlisted.append(_unlisted(folder, error))
    if unlisted:
        return (
            f"{path} holds no visible checkpoint, and {listed(unlisted, 3)}, so whether there is "
            "one is unknown. Make it readable, or give another folder"
        )
    if weights == [path]:
        return (
            f"{path} holds only weights, not a checkpoint that a training can resume from; to "
            "start afresh give a folder that is empty or does not exist"
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
        f"nothing yet, found {listed(unexpected)}. Give the folder in which a job saved (often "
        f".../{CHECKPOINT}); to start afresh one that is empty or does not exist"
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
    if (
        CHECKPOINT in names
        and kind_of(storage, inner) not in NO_FOLDER
        and not _unexpected_names(storage, inner)
    ):
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


def _has_checkpoint(storage: Storage, path: str, kind: str) -> bool:
    """Returns whether a checkpoint was, or may have been, complete directly in ``path``. ``kind``:
    what it is."""
    if kind != ROOT:
        return kind == ITERATION
    names = storage.list(path)
    ranks = [os.path.join(path, name) for name in names if folder_rank(name) is not None]
    if (
        FOLDER not in names
        and ranks
        and not any(parse_iteration(name) is not None for name in names)
    ):
        try:
            return any(_is_tensor_file(name) for rank in ranks for name in storage.list(rank))
        except OSError:  # no record tells of unlisted ones
            return True
    with suppress(OSError):  # the scan tells what it means that records cannot be listed
        if any(
            MANIFEST in attempt.content
            for attempt in find_attempts(CheckpointDir(storage, path), top=names)
        ):
            # so is every candidate of a scan with a manifest
            return True
    return scan(CheckpointDir(storage, path)).has_checkpoint


def _folders(storage: Storage, path: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the folders below ``path`` that may hold checkpoints, and what each is, level by
    level, only a part of a large tree; and a phrase for each folder that cannot be listed."""
    found: list[tuple[str, str]] = []
    unlisted: list[str] = []
    level, room = [path], _MOST
    for _ in range(_DEPTH):
        inner_level = []
        for folder in level:
            try:
                there = storage.list(folder)
            except OSError as error:
                unlisted.append(_unlisted(folder, error))
                continue
            names = [
                name
                for name in there
                if not _is_system(name)
                and folder_rank(name) is None
                and parse_iteration(name) is None
                and not _OF_A_JOB.fullmatch(name)
                and not _is_tensor_file(name)
            ][: min(_WIDTH, room)]
            room -= len(names)
            for inner in (os.path.join(folder, name) for name in names):
                try:
                    kind = kind_of(storage, inner)
                    if kind == MISSING:
                        storage.list(inner)  # raises for a link to itself
                except OSError as error:
                    unlisted.append(_unlisted(inner, error))
                    continue
                if kind not in NO_FOLDER:
                    found.append((inner, kind))
                    inner_level += [inner] if kind == OTHER else []
        level = inner_level
    return found, unlisted


def _unlisted(folder: str, error: OSError) -> str:
    return f"{folder} cannot be listed: {error.strerror or error}"


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


# ---- the candidates that a path means ------------------------------------------------------------


def find_candidates(
    storage: Storage, path: str, requested: str | None = None, world_size: int | None = None
) -> tuple[Scan, bool]:
    """Returns the candidates that ``path`` means, and whether the user asked for a single one
    explicitly.

    Args:
        path: ``load_checkpoint``: a root folder, a folder above one, a rank folder, an iteration
            folder or a file.
        requested: ``resume_training``: the name of a file or an iteration folder, or a step.
        world_size: the number of ranks that read a file outside of rank folders.
    Raises:
        MissingCheckpointError: the requested checkpoint does not exist, or several folders below
            ``path`` hold checkpoints.
        ConfigError: ``path`` is a file of another kind.
    """
    kind = kind_of(storage, path)
    if kind in NO_FOLDER and kind != MISSING:
        return _of_file(storage, path, world_size), True
    path = path.rstrip("/") or path
    if kind == ITERATION:
        return scan_one(storage, path), True
    root = root_of(path)
    found = scan(CheckpointDir(storage, root))
    if found.exists and not found.has_checkpoint:
        # a job may have saved later ones, and removed what was listed, while it was read
        found = scan(found.directory)
    if found.exists and not found.has_checkpoint:
        # missing: a network file system showed it late
        inner = below(storage, path) if kind in (MISSING, ROOT, OTHER) else None
        if inner is not None:
            found, is_explicit = find_candidates(storage, inner, requested, world_size)
            notes = (f"{path} holds no checkpoints itself; those in {inner} are used", *found.notes)
            return replace(found, notes=notes), is_explicit
        found = replace(
            found, fresh_start_refusal=fresh_start_refusal(storage, root, bool(found.candidates))
        )
    if requested is None:
        return found, False
    matching = [c for c in found.candidates if is_requested(c, requested)]
    if not matching:
        offered = sorted(
            {c.iteration_dir or os.path.basename(c.first.path) for c in found.candidates if c.first}
        )
        where = (
            f"no rank folder of {root} has such a file"
            if any(not c.iteration_dir for c in found.candidates) or not found.candidates
            else f"{root} has no such iteration"
        )
        there = f"There are: {', '.join(offered)}" if offered else "There is no checkpoint"
        raise MissingCheckpointError(f"resume_training names {requested!r}: {where}. {there}")
    return replace(found, candidates=tuple(matching[:1]), notes=(), fresh_start_refusal=""), True


def is_requested(candidate: Candidate, requested: str) -> bool:
    """Returns whether ``resume_training: requested`` means this candidate."""
    if candidate.iteration_dir:
        step = (
            int(requested)
            if requested.isascii() and requested.isdigit()
            else parse_iteration(requested.rstrip("/"))
        )
        return candidate.step == step is not None
    return any(
        os.path.basename(file.path) == name_for_rank(requested, rank, candidate.format)
        for rank, (file, *_) in candidate.files.items()
    )


def _of_file(storage: Storage, path: str, world_size: int | None) -> Scan:
    """Returns the candidate that a single file means: in a rank folder, the files of all ranks with
    its name; in an iteration folder, the iteration; elsewhere this file, which every rank reads."""
    folder, name = os.path.split(os.path.abspath(path))
    if folder_rank(os.path.basename(folder)) is not None:
        return find_candidates(storage, os.path.dirname(folder), name)[0]
    if kind_of(storage, path) == PART:
        return scan_one(storage, folder)
    if not name.endswith(tuple(f".{fmt}" for fmt in FORMATS)):
        raise ConfigError(
            f"{path} is no checkpoint: expected a folder, or a file that ends in "
            f".{' or .'.join(FORMATS)}"
        )
    file = FileRecord(name, format_of(name))
    ranks, directory = world_size or 1, CheckpointDir(storage, folder)
    candidate = Candidate(
        None, MINDFORMERS, file.format, dict.fromkeys(range(ranks), (file,)), ranks
    )
    try:
        scalars = scalars_of(directory, file, header_of(directory, file))
    except CorruptFileError as error:
        candidate = replace(candidate, problem=candidate.refuse(error.reason, name, error=error))
    else:
        step, epoch = scalars.get("step_num"), scalars.get("epoch_num")
        candidate = (
            replace(candidate, step=step, epoch=epoch if is_count(epoch) else None)
            if is_count(step)
            else replace(candidate, problem=no_step(name))
        )
    return Scan(directory, (candidate,))
