"""Where the checkpoints lie that a path means: there, or in one folder below.

    output/                            load_checkpoint: ./output means ./output/checkpoint
      checkpoint/                      where mindformers and we save
      transformed_checkpoint/name/     as the documents of auto_trans_ckpt say, one level too high
      log/ strategy/ ...

The command line and the job ask the same functions. A fresh start is right only where no checkpoint ever was:
``fresh_start_refusal`` says of a folder without any whether it is one of these.
"""
from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from mindresume.errors import MissingCheckpointError
from mindresume.formats.consolidated import is_complete
from mindresume.formats.iteration_naming import TRACKER, parse_iteration
from mindresume.formats.iteration_scan import is_iteration, tracked
from mindresume.formats.rank_folder_naming import META, folder_rank
from mindresume.formats.scan import is_root, scan
from mindresume.formatting import listed
from mindresume.model.file_record import FORMATS
from mindresume.model.manifest import FOLDER, is_probe
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel

CHECKPOINT = "checkpoint"                                   # where a job saves, in its output folder
_FIRST = (CHECKPOINT, os.path.join("output", CHECKPOINT))   # of several these count: a job that saved goes on there
_DEPTH, _WIDTH, _MOST = 3, 256, 2048                        # levels below; most names of a folder, and in all, that count
# What a job makes in its output folder before it saves, and weights for inference alone, which no training resumes from.
_OF_A_JOB = re.compile(r"log|msrun_log|strategy(_[0-9a-f]{8})?|merged_strategy|resume_record|checkpoint_network|"
                       r"checkpoint_trainable|tensorboard|summary|profile|debug")
_UNFINISHED = re.compile(r".*\.tmp|tmp[0-9a-z_]{8}|.*graph\.meta|.*_breakpoint\.ckpt")   # MindSpore's own, and no checkpoint


def locate(storage: Storage, path: str) -> str:
    """Where the checkpoints lie that ``path`` means; ``path`` itself if there are none. Errors as ``find``."""
    return find(storage, path) or path


def find(storage: Storage, path: str) -> str | None:
    """``path``; or if there is no checkpoint right in it the one folder of checkpoints below; None if there is none.
    MissingCheckpointError, which names them, if there are several."""
    status = storage.status(path)
    if status is None:
        return None
    if not status.is_folder or _is_one(storage, path) or _holds(storage, path):
        return path
    return below(storage, path) or None


def below(storage: Storage, path: str) -> str:
    """The one folder below ``path`` with checkpoints that a training can resume from; empty if there is none. That in which the
    job saves counts before all others. MissingCheckpointError, which names them, if there are several others."""
    if _is_one(storage, path):
        return ""
    for inner in _FIRST:
        if _holds(storage, os.path.join(path, inner)):
            return os.path.join(path, inner)
    found = []
    for folder in _folders(storage, path, []):
        with suppress(OSError):  # one that cannot be listed counts only if there is nothing else: see ``fresh_start_refusal``
            if _holds(storage, folder):
                found.append(folder)
    if len(found) > 1:
        raise MissingCheckpointError(f"{path} holds no checkpoints itself, and several folders below do: {listed(found)}. "
                                     f"Which one is meant is not known; give one of them")
    return found[0] if found else ""


def fresh_start_refusal(storage: Storage, path: str, has_incomplete_saves: bool) -> str:
    """Of a folder in which neither a scan nor ``below`` found a checkpoint: why it is not one where no checkpoint ever was, in
    sentences. Empty if it is: empty, or only with what first starts and saves that never completed leave.
    ``has_incomplete_saves``: a scan found such saves, so it is a folder of checkpoints. OSError if something in it cannot be
    listed."""
    if (step := tracked(storage, path) or 0) > 0:
        return (f"{os.path.join(path, TRACKER)} names step {step}, and there is no iteration folder beside it: the checkpoints "
                f"were moved or removed. Bring them back, or to start afresh remove that file")
    if has_incomplete_saves:
        return ""
    unlisted: list[str] = []
    weights = [folder for folder in (path, *_folders(storage, path, unlisted))
               if any(map(_is_tensor_file, _names(storage, folder, unlisted)))]
    if unlisted:
        return (f"{path} holds no checkpoint that can be seen, and {listed(unlisted, 3)}, so whether there is one is not known. "
                f"Make it readable, or give another folder")
    if weights == [path]:
        return (f"{path} holds weights alone, no checkpoint that a training could be resumed from; to start afresh give a folder "
                f"that is empty or does not exist")
    if weights:
        return (f"{path} holds no checkpoint that a training could be resumed from; weights lie in {listed(weights, 3)}. To load "
                f"them give that folder; to start afresh give a folder that is empty or does not exist")
    alien = _alien(storage, path)
    if not alien:
        return ""
    return (f"{path} is no folder of checkpoints: expected rank folders, iteration folders or nothing yet, found "
            f"{listed(alien)}. Give the folder in which a job saved (often .../{CHECKPOINT}); to start afresh one that is "
            f"empty or does not exist")


def _alien(storage: Storage, path: str) -> list[str]:
    """Names, relative to ``path``, of what neither first starts nor saves that never completed leave there."""
    names = storage.list(path)
    inner = os.path.join(path, CHECKPOINT)
    saves = FOLDER in names and not _only_probes(storage, os.path.join(path, FOLDER))
    if saves or CHECKPOINT in names and _is_folder(storage, inner) and not _alien(storage, inner):
        return []                               # a job saves here; whatever else lies beside it
    ranks = [name for name in names if folder_rank(name) is not None]
    alien = [name for name in names if name not in ranks and name not in (TRACKER, CHECKPOINT) and not _is_system(name) and
             not _OF_A_JOB.fullmatch(name) and parse_iteration(name) is None]       # with a checkpoint it would have been found
    if CHECKPOINT in names:
        alien.append(CHECKPOINT)
    listings = parallel(storage, lambda name: storage.list(os.path.join(path, name)), ranks)
    return alien + [f"{folder}/{name}" for folder, content in zip(ranks, listings, strict=True) for name in content
                    if not _is_system(name) and name != META and not _UNFINISHED.fullmatch(name)]


def _only_probes(storage: Storage, records: str) -> bool:
    """Whether all that lies in a folder of records is what a job left that was killed before it knew that it may save there."""
    names = storage.list(records)
    return bool(names) and all(map(is_probe, names))


def _is_one(storage: Storage, path: str) -> bool:
    """Whether it is itself one checkpoint, or a part of one: nothing below it is meant."""
    own = os.path.basename(os.path.abspath(path))
    return folder_rank(own) is not None or is_iteration(storage, path) or is_complete(storage, path)


def _holds(storage: Storage, path: str) -> bool:
    """Whether a checkpoint was ever complete right there, or seems so."""
    if is_iteration(storage, path):
        return True
    if not is_root(storage, path):
        return False
    names = storage.list(path)
    ranks = [name for name in names if folder_rank(name) is not None]
    if FOLDER not in names and ranks and not any(parse_iteration(name) is not None for name in names):
        unlisted: list[str] = []                              # what cannot be seen may be one, too; no record denies it
        return any(any(map(_is_tensor_file, _names(storage, os.path.join(path, name), unlisted))) or unlisted for name in ranks)
    return any(candidate.maybe_completed for candidate in scan(storage, path).candidates)


def _folders(storage: Storage, path: str, unlisted: list[str]) -> Iterator[str]:
    """Folders below in which checkpoints may lie, those of a level before those below them; of a large tree a part. ``unlisted``
    gets a phrase on each that cannot be listed."""
    level, left = [path], _MOST
    for _ in range(_DEPTH):
        found = []
        for folder in level:
            names = [name for name in _names(storage, folder, []) if not _is_system(name) and folder_rank(name) is None and
                     parse_iteration(name) is None and not _OF_A_JOB.fullmatch(name) and not _is_tensor_file(name)]
            names = names[:min(_WIDTH, left)]
            left -= len(names)
            for inner in (os.path.join(folder, name) for name in names):
                trouble: list[str] = []
                _names(storage, inner, trouble)
                if trouble:
                    unlisted += trouble
                elif _is_folder(storage, inner):
                    found.append(inner)
        yield from found
        level = [folder for folder in found if _goes_on(storage, folder)]


def _goes_on(storage: Storage, folder: str) -> bool:
    """Whether there may be folders of checkpoints below."""
    try:
        return not _is_one(storage, folder) and not is_root(storage, folder)
    except OSError:
        return False


def _names(storage: Storage, folder: str, unlisted: list[str]) -> list[str]:
    try:
        return storage.list(folder)
    except OSError as error:
        unlisted.append(f"{folder} cannot be listed: {error.strerror or error}")
        return []


def _is_folder(storage: Storage, path: str) -> bool:
    status = storage.status(path)
    return status is not None and status.is_folder


def _is_system(name: str) -> bool:
    """Hidden, or of the file system."""
    return name.startswith(".") or name == "lost+found"


def _is_tensor_file(name: str) -> bool:
    """Strategy files have the extension .ckpt too."""
    return name.endswith(tuple(f".{fmt}" for fmt in FORMATS)) and "strategy" not in name and not _is_system(name) and \
        not _UNFINISHED.fullmatch(name)
