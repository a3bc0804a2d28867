"""Reads the results of mindformers' health monitor: whether the local norm of the embedding was within its threshold.

In Checkpoint 2.0 the state of a checkpoint holds the result (``ckpt_status``). For rank folders, a list in the output folder has
one entry per save, which names the file of rank 0 (mindformers core/callback/callback.py, tools/resume_ckpt.py):

    {output_dir}/health_ckpts.json      [{"is_health": 0, "ckpt_name": "llama2_7b_rank_0-2_5.safetensors"}, ...]

0 means healthy.
"""
from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from mindresume.formats import Candidate
from mindresume.storage.atomic_publish import publish_json
from mindresume.storage.interface import Storage
from mindresume.storage.operations import read_bytes
from mindresume.typed import parse_json

LIST = "health_ckpts.json"
MAX_LIST = 64 << 20             # bytes; one entry has about 80


def add(storage: Storage, folder: str, name: str, health: int, tag: str) -> None:
    """Appends an entry, in the format of mindformers; the list is replaced atomically. Raises OSError or ValueError."""
    path = os.path.join(folder, LIST)
    known = read_list(storage, folder) if storage.status(path) is not None else []
    publish_json(storage, path, [*known, {"is_health": health, "ckpt_name": name}], tag)


def unhealthy_files(storage: Storage, folder: str) -> tuple[frozenset[str], str]:
    """Returns the names whose newest entry in the list of ``folder`` is unhealthy, and a problem. If the list cannot be used,
    there are no names and the problem says why; else the problem is empty."""
    path = os.path.join(folder, LIST)
    if storage.status(path) is None:
        return frozenset(), ""
    try:
        newest = {row["ckpt_name"]: row["is_health"] for row in read_list(storage, folder)}
        return frozenset(os.path.basename(name) for name, health in newest.items() if health != 0), ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return frozenset(), (f"{path} cannot be used ({type(error).__name__}: {error}"[:300] + "); no checkpoint is "
                             "taken for unhealthy by it")


def read_list(storage: Storage, folder: str) -> list[Any]:
    """Returns the entries of the list in ``folder``. Raises OSError, and ValueError if it is not a list."""
    found = parse_json(read_bytes(storage, os.path.join(folder, LIST), MAX_LIST) or b"[]")
    if not isinstance(found, list):
        raise ValueError(f"expected a list, found {type(found).__name__}")
    return found


def is_unhealthy(candidate: Candidate, names: Collection[str]) -> bool:
    """Returns whether the candidate was unhealthy when it was saved, by its own state or by the list (``names`` of unhealthy
    files)."""
    if candidate.state is not None and candidate.state.health:
        return True
    return not candidate.iteration_dir and any(os.path.basename(file.path) in names for file in candidate.all_files)
