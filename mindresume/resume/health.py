"""What mindformers' health monitor said of checkpoints: whether the embedding's local norm was within its threshold.

In Checkpoint 2.0 the state of a checkpoint says so itself (``ckpt_status``). Of rank folders a list beside them does, one entry a
save, which names rank 0's file (mindformers core/callback/callback.py, tools/resume_ckpt.py):

    {output_dir}/health_ckpts.json      [{"is_health": 0, "ckpt_name": "llama2_7b_rank_0-2_5.safetensors"}, ...]

0 means healthy.
"""
from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from mindresume.documents import parse_json
from mindresume.formats import Candidate
from mindresume.store.storage import Storage, publish_json, read_bytes

LIST = "health_ckpts.json"
MAX_LIST = 64 << 20             # bytes: an entry a save has about 80
NONE_HEALTHY = "The training has no healthy checkpoints yet, please start training again"     # mindformers' own words


def add(storage: Storage, folder: str, name: str, health: int, tag: str) -> None:
    """An entry more, as mindformers keeps the list; it is replaced atomically. OSError or ValueError if it cannot be."""
    path = os.path.join(folder, LIST)
    known = read_list(storage, folder) if storage.status(path) is not None else []
    publish_json(storage, path, [*known, {"is_health": health, "ckpt_name": name}], tag)


def unhealthy_files(storage: Storage, folder: str) -> tuple[frozenset[str], str]:
    """Names in the list of ``folder`` whose newest entry says unhealthy, and a sentence if the list cannot be used: then nothing
    is known to be unhealthy. No list is no trouble."""
    path = os.path.join(folder, LIST)
    if storage.status(path) is None:
        return frozenset(), ""
    try:
        newest = {row["ckpt_name"]: row["is_health"] for row in read_list(storage, folder)}
        return frozenset(os.path.basename(name) for name, health in newest.items() if health != 0), ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return frozenset(), (f"{path} cannot be used ({type(error).__name__}: {error}"[:300] + "); no checkpoint is taken for "
                             "unhealthy by it")


def read_list(storage: Storage, folder: str) -> list[Any]:
    """The entries of the list in ``folder``, as they are. OSError; ValueError if it is none."""
    found = parse_json(read_bytes(storage, os.path.join(folder, LIST), MAX_LIST) or b"[]")
    if not isinstance(found, list):
        raise ValueError(f"expected a list, found {type(found).__name__}")
    return found


def is_unhealthy(candidate: Candidate, names: Collection[str]) -> bool:
    """``names``: of files that a list calls unhealthy."""
    if candidate.state is not None and candidate.state.health:
        return True
    return not candidate.base and any(os.path.basename(file.path) in names for file in candidate.every_file)
