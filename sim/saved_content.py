"""What simulated ranks save, and whether a checkpoint holds it."""
from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from mindresume.errors import MindResumeError
from mindresume.fault_injection.tiny_checkpoints import build_shard, differing_tensors, read_sources
from mindresume.model.training_state import TrainingState
from mindresume.resume.choice import Choice
from mindresume.saving.shard_writer import SaveTarget, Shard

PER_EPOCH = 100


@lru_cache(maxsize=4096)
def tensors(run: str, step: int, rank: int, replicated: bool = False) -> dict[str, np.ndarray]:
    """Returns the tensors of a rank. Weights differ by rank, step and run, so that a wrong file is never taken for the right one.
    ``replicated``: all ranks have those of rank 0.
    """
    if replicated and rank:
        return tensors(run, step, 0)
    key = xxhash.xxh3_128_digest(f"{run} {step} {rank}".encode())
    weight = np.frombuffer(key, np.float32).reshape(2, 2)
    return {"embedding.weight": weight, "adam_m.embedding.weight": weight[::-1].copy(),
            "step_num": np.array(step, np.int64), "global_step": np.array([step], np.int32)}


def make_shard(target: SaveTarget, step: int, fmt: str, suffix: int, health: int | None = None,
               replicated: bool = False) -> Shard:
    """Returns the files that a rank saves at ``step``."""
    state = TrainingState(step, PER_EPOCH, step, 8, health=health)
    return build_shard("sim", target, state, tensors(target.run, step, target.rank, replicated), fmt, suffix)


def wrong_content(storage: Any, choice: Choice, ranks: list[int], replicated: bool = False) -> list[str]:
    """Returns which tensors of the selected checkpoint are not, bit for bit, what was saved (``replicated``: see ``tensors``).
    Raises OSError if it cannot be read now."""
    chosen, found = choice.chosen, []
    shards = {proof.rank: proof for proof in choice.shards}
    for rank in ranks:
        if rank not in shards:
            found.append(f"step {chosen.step} of {chosen.run}: rank {rank} proved nothing")
            continue
        try:
            read = read_sources(storage.open, choice.root, shards[rank].sources)
        except MindResumeError as error:
            found.append(f"step {chosen.step} of {chosen.run} was selected and cannot be read by rank {rank}: {error}")
            continue
        found += [f"{name} of rank {rank} is not what was saved in step {chosen.step} of {chosen.run}"
                  for name in differing_tensors(tensors(chosen.run or "", chosen.step or 0, rank, replicated), read)]
    return found
