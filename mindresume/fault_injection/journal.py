"""What ranks have saved and what they were promised: the memory of both harnesses, the drill and
the simulated cluster.

    journal = Journal()
    write_shard(target, make_shard(target, 4, "ckpt", 1))
    journal.report((target.run, 4), target.rank)
    choice = select(storage, root, ranks)       # must be ``journal.newest()`` or newer
    wrong_content(storage, choice, ranks)       # empty if it is, bit for bit, what was saved

Weights differ by rank, step and run, so that a wrong file is never taken for the right one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import MindResumeError
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import TRACKER, iteration_name
from mindresume.formats.rank_folders import META, FileName, folder_rank
from mindresume.formats.records import scan_records
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import FOLDER, attempt_name, parse_attempt, run_sequence
from mindresume.model.training_state import TrainingState
from mindresume.resume.eligible import Choice, SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.shard_writer import SaveTarget, Shard, iteration_shard, rank_shard
from mindresume.tensor_files import read_header, read_tensor

# Checkpoint 2.0; the others are formats of a file in rank folders
ITERATION = "iteration"
PER_EPOCH = 10
Saved = tuple[str, int]  # (run, step)


@dataclass
class Journal:
    """What the ranks were told.

    ``reported``: (run, step) -> ranks that were told that it is saved. ``sizes``: run -> number of
    ranks. ``unhealthy``: steps that must not be taken.
    """

    reported: dict[Saved, set[int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    unhealthy: tuple[int, ...] = ()

    def report(self, saved: Saved, rank: int) -> None:
        self.reported.setdefault(saved, set()).add(rank)

    def complete(self) -> list[Saved]:
        """Returns the acknowledged saves: every rank was told that it is saved, and a resume may
        take it. From then on a resume must take nothing older."""
        return [
            saved
            for saved, ranks in self.reported.items()
            if len(ranks) == self.sizes[saved[0]] and saved[1] not in self.unhealthy
        ]

    def newest(self) -> Saved | None:
        return max(self.complete(), key=save_order, default=None)


def save_order(saved: Saved) -> tuple[int, int]:
    """Returns a sort key: a save of a later run is newer; within a run, the later step."""
    # a checkpoint without records has no run
    return run_sequence(saved[0]) if saved[0] else 0, saved[1]


# ---- what ranks save -----------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def tensors(run: str, step: int, rank: int, replicated: bool = False) -> dict[str, np.ndarray]:
    """Returns the tensors of a rank. ``replicated``: all ranks have those of rank 0."""
    if replicated and rank:
        return tensors(run, step, 0)
    key = xxhash.xxh3_128_digest(f"{run} {step} {rank}".encode())
    weight = np.frombuffer(key, np.float32).reshape(2, 2)
    return {
        "embedding.weight": weight,
        "adam_m.embedding.weight": weight[::-1].copy(),
        "step_num": np.array(step, np.int64),
        "global_step": np.array([step], np.int32),
    }


def make_shard(
    target: SaveTarget,
    step: int,
    fmt: str,
    suffix: int,
    prefix: str = "drill",
    per_epoch: int = PER_EPOCH,
    health: int | None = None,
    replicated: bool = False,
) -> Shard:
    """Returns the files that a rank saves at ``step``. In an iteration folder "embedding.weight" is
    a weight that all ranks share by rows, with its optimizer state; the other arrays are whole on
    every rank."""
    state = TrainingState(step, per_epoch, step, 8, health=health)
    arrays, random = tensors(target.run, step, target.rank, replicated), {"rank": target.rank}
    if not target.iterations:
        name = FileName(prefix, target.rank, suffix, state.epoch, state.step_in_epoch, fmt)
        return rank_shard(name, state, arrays, random=random, metadata={"format": "ms"})
    rows, columns = arrays["embedding.weight"].shape
    cut = TensorLayout((target.world_size,), (0, -1)), (rows * target.world_size, columns)
    weights = {name: array for name, array in arrays.items() if name == "embedding.weight"}
    others = {name: array for name, array in arrays.items() if name not in weights}
    return iteration_shard(
        prefix,
        target,
        state,
        weights,
        others,
        {name: cut for name in arrays if "embedding" in name},
        random,
    )


# ---- what a resume takes -------------------------------------------------------------------------


def select(directory: CheckpointDir, ranks: int) -> Choice:
    """Selects as a job of ``ranks`` does at its start, for all of them."""
    return select_checkpoint(
        directory.storage,
        directory.root,
        SingleProcess(),
        SelectionPolicy(ranks, every_rank=True),
    )


def wrong_content(
    storage: Any, choice: Choice, ranks: Sequence[int], replicated: bool = False
) -> list[str]:
    """Returns which tensors of the selected checkpoint are not, bit for bit, what was saved
    (``replicated``: see ``tensors``). Raises OSError if it cannot be read now."""
    chosen, wrong = choice.chosen, []
    shards = {proof.rank: proof for proof in choice.shards}
    for rank in ranks:
        if rank not in shards:
            wrong.append(f"step {chosen.step} of {chosen.run}: rank {rank} proved nothing")
            continue
        read: dict[str, np.ndarray] = {}
        try:
            for source in shards[rank].sources:
                path = os.path.join(choice.root, source.file.path)
                with storage.open(path) as file:
                    header = read_header(file, path)
                    read.update(
                        {
                            name: read_tensor(file, header.tensors[name])
                            for name in source.names or header.tensors
                        }
                    )
        except MindResumeError as error:
            wrong.append(
                f"step {chosen.step} of {chosen.run} was selected and cannot be read by rank "
                f"{rank}: {error}"
            )
            continue
        wrong += [
            f"{name} of rank {rank} is not what was saved in step {chosen.step} of {chosen.run}"
            for name, array in tensors(chosen.run or "", chosen.step or 0, rank, replicated).items()
            if name not in read or read[name].tobytes() != array.tobytes()
        ]
    return wrong


def leftovers(
    directory: CheckpointDir, fmt: str, newest: Saved, kept_from: Saved | None = None
) -> list[str]:
    """Returns paths below ``root`` that belong to no checkpoint, or to one that should be gone.

    Args:
        newest: the only checkpoint to be kept.
        kept_from: this save and later ones may stay too, in rank folders.
    """
    run, step = newest
    candidates, known, _ = scan_records(directory)
    names = directory.storage.list(directory.path(FOLDER))
    if fmt == ITERATION:
        base = iteration_name(step)
        known = known | {file.path for candidate in candidates for file in candidate.metadata_files}
        # holds the number of the run
        left = [f"{FOLDER}/{name}" for name in names if name != f"ended-{run}.json"]
        left += [
            name
            for name in directory.storage.list(directory.root)
            if name not in (FOLDER, TRACKER, base)
        ]
        left += [
            f"{base}/{name}"
            for name in directory.storage.list(directory.path(base))
            if f"{base}/{name}" not in known and name != FOLDER
        ]
        return left + [
            f"{base}/{FOLDER}/{name}"
            for name in directory.storage.list(directory.path(base, FOLDER))
            if name != attempt_name(step, run)
        ]
    folders = [name for name in directory.storage.list(directory.root) if name != FOLDER]
    left = [name for name in folders if folder_rank(name) is None]
    for name in names:
        attempt = parse_attempt(name)
        if (
            attempt is None
            or attempt[0] != step
            and (kept_from is None or save_order((attempt[1], attempt[0])) < save_order(kept_from))
        ):
            left.append(f"{FOLDER}/{name}")
    for folder in folders:
        if folder_rank(folder) is not None:
            left += [
                f"{folder}/{name}"
                for name in directory.storage.list(directory.path(folder))
                if f"{folder}/{name}" not in known and name != META
            ]
    return left
