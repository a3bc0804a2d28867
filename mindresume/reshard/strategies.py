"""Which strategy a checkpoint was saved with, though the files of it lie where the next job writes its own.

mindformers writes the strategy of every job to ``output/strategy``, over that of the job before. So before a training in another
layout is compiled, that folder is renamed (``set_aside``) to one named after its content, with a mark that says which checkpoint
it was needed for. When the same command starts again, ``strategy_for`` finds it there.
"""
from __future__ import annotations

import json
import os
import re
from typing import Any

import xxhash

from mindresume.formats import OURS, Candidate
from mindresume.store.storage import Storage, publish_json, read_bytes
from mindresume.strategy import Strategy, read_strategy

MARK = "used_for.json"              # in a folder that was set aside: identities of checkpoints it is the strategy of


def strategy_for(storage: Storage, root: str, candidate: Candidate, given: str | None, identity: Any) -> Strategy | None:
    """The strategy given, or for what mindformers wrote on several ranks that in the folder beside (as mindformers looks for it).
    If that was set aside for this very checkpoint, the one set aside. None if nobody says one. StrategyError."""
    if given is None and (candidate.origin == OURS or len(candidate.files) < 2):
        return None
    path = (given or os.path.join(os.path.dirname(os.path.abspath(root)), "strategy")).rstrip("/")
    for kept in _kept(storage, path):
        if identity in _marked(storage, kept):
            return read_strategy(kept, storage)
    return read_strategy(path, storage) if given or storage.status(path) is not None else None


def set_aside(storage: Storage, folder: str, identity: Any = None) -> str:
    """Renames a folder of strategy files, which the compiler would write over. ``identity``: of the checkpoint that it is the
    strategy of. Returns the new name; empty if there is nothing to keep."""
    content, found = xxhash.xxh3_64(), False
    for name in storage.list(folder):
        path = os.path.join(folder, name)
        status = storage.status(path)
        if status is not None and not status.is_folder:
            found = True
            content.update(name.encode() + b"\0" + read_bytes(storage, path))
    if not found:
        return ""
    kept = f"{folder}_{content.hexdigest()[:8]}"
    if storage.status(kept) is not None:
        for name in storage.list(folder):           # the very same files are there already
            storage.remove(os.path.join(folder, name))
    else:
        storage.rename(folder, kept)
        storage.make_folder(folder)
    if identity is not None and identity not in _marked(storage, kept):
        publish_json(storage, os.path.join(kept, MARK), [*_marked(storage, kept), identity], "mark")
    storage.sync(os.path.dirname(os.path.abspath(folder)))
    return kept


def _kept(storage: Storage, folder: str) -> list[str]:
    parent, name = os.path.split(os.path.abspath(folder))
    pattern = re.compile(re.escape(name) + "_[0-9a-f]{8}")
    return [os.path.join(parent, other) for other in storage.list(parent) if pattern.fullmatch(other)]


def _marked(storage: Storage, kept: str) -> list[Any]:
    try:
        found = json.loads(read_bytes(storage, os.path.join(kept, MARK)))
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []
