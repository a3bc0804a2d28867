"""The tiny checkpoints of the drill and of the simulation: builds a rank's files, compares tensors, lists leftover files."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mindresume.formats.iteration_naming import TRACKER, iteration_name
from mindresume.formats.rank_folder_naming import META, FileName, folder_rank
from mindresume.formats.records import scan_records
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import FOLDER, attempt_name, parse_attempt
from mindresume.model.training_state import TrainingState
from mindresume.saving.shard_writer import SaveTarget, Shard, iteration_shard, rank_shard
from mindresume.storage.interface import Storage
from mindresume.tensor_files import read_header, read_tensor

ITERATION = "iteration"                     # Checkpoint 2.0; the others are formats of a file in rank folders
Saved = tuple[str, int]                     # (run, step)


def build_shard(prefix: str, target: SaveTarget, state: TrainingState, arrays: dict[str, np.ndarray], fmt: str, suffix: int
                ) -> Shard:
    """Returns the files of a rank that holds ``arrays``. In an iteration folder "embedding.weight" is a weight that all ranks
    share by rows, with its optimizer state; the other arrays are whole on every rank."""
    random = {"rank": target.rank}
    if not target.iterations:
        name = FileName(prefix, target.rank, suffix, state.epoch, state.step_in_epoch, fmt)
        return rank_shard(name, state, arrays, random=random, metadata={"format": "ms"})
    rows, columns = arrays["embedding.weight"].shape
    cut = TensorLayout((target.world_size,), (0, -1)), (rows * target.world_size, columns)
    weights = {name: array for name, array in arrays.items() if name == "embedding.weight"}
    others = {name: array for name, array in arrays.items() if name not in weights}
    return iteration_shard(prefix, target, state, weights, others, {name: cut for name in arrays if "embedding" in name}, random)


def read_sources(open_file: Callable[[str], Any], root: str, sources: Iterable[Any]) -> dict[str, np.ndarray]:
    """Returns the tensors of a selected rank. ``sources``: as a selection names them, relative to ``root``."""
    found: dict[str, np.ndarray] = {}
    for source in sources:
        path = os.path.join(root, source.file.path)
        with open_file(path) as file:
            header = read_header(file, path)
            found.update({name: read_tensor(file, header.tensors[name]) for name in source.names or header.tensors})
    return found


def differing_tensors(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the names of expected tensors that are missing or differ in any bit."""
    return [name for name, array in expected.items() if name not in found or found[name].tobytes() != array.tobytes()]


def leftovers(storage: Storage, root: str, fmt: str, newest: Saved, may_stay: Callable[[Saved], bool] = lambda saved: False,
              ignored: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Returns paths below ``root`` that belong to no checkpoint, or to one that should be gone.

    Args:
        newest: the only checkpoint to be kept.
        may_stay: whether another save may stay too.
        ignored: whether a name in the folder of records is not checked.
    """
    run, step = newest
    candidates, known, _ = scan_records(storage, root)
    names = [name for name in storage.list(os.path.join(root, FOLDER)) if not ignored(name)]
    if fmt == ITERATION:
        base = iteration_name(step)
        known = known | {file.path for candidate in candidates for file in candidate.metadata_files}
        left = [f"{FOLDER}/{name}" for name in names if name != f"ended-{run}.json"]        # holds the number of the run
        left += [name for name in storage.list(root) if name not in (FOLDER, TRACKER, base)]
        left += [f"{base}/{name}" for name in storage.list(os.path.join(root, base))
                 if f"{base}/{name}" not in known and name != FOLDER]
        return left + [f"{base}/{FOLDER}/{name}" for name in storage.list(os.path.join(root, base, FOLDER))
                       if name != attempt_name(step, run)]
    folders = [name for name in storage.list(root) if name != FOLDER]
    left = [name for name in folders if folder_rank(name) is None]
    for name in names:
        attempt = parse_attempt(name)
        if attempt is None or (attempt[0] != step and not may_stay((attempt[1], attempt[0]))):
            left.append(f"{FOLDER}/{name}")
    for folder in folders:
        if folder_rank(folder) is not None:
            left += [f"{folder}/{name}" for name in storage.list(os.path.join(root, folder))
                     if f"{folder}/{name}" not in known and name != META]
    return left
