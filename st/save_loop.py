"""A training without a network: one rank that saves step after step until it is killed, through the
code of the product.

    save_loop.py FOLDER RUN RANK RANKS SUFFIX FIRST_STEP

As a training does, it cleans its own folder first and rank 0 adopts what is complete; the ranks go
step by step together. Prints ``ready``, then, on rank 0, ``committed N`` after each commit. The
tensors of a step and rank are ``tensors_of``.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

from mindresume.formats.rank_folders import FileName
from mindresume.model.training_state import TrainingState
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import SaveTarget, clean_own_folder, rank_shard, write_shard
from mindresume.storage.posix import PosixStorage

PREFIX, PER_EPOCH, KEPT = "net", 10, 2


def tensors_of(step: int, rank: int) -> dict[str, np.ndarray]:
    """About 4 MB that depend on nothing but ``step`` and ``rank``, and the counters of a resume."""
    generator = np.random.default_rng([step, rank])
    return {
        "embedding.weight": generator.standard_normal((512, 1024), np.float32),
        "adam_m.embedding.weight": generator.standard_normal((512, 1024), np.float32),
        "layer.bias": generator.integers(0, 2**16, 1001, np.uint16).view(np.float16),
        "step_num": np.array(step, np.int64),
        "epoch_num": np.array(state_of(step).epoch, np.int64),
        "global_step": np.array([step], np.int32),
    }


def state_of(step: int) -> TrainingState:
    return TrainingState(step, PER_EPOCH, step, 8, 1.0, None, PER_EPOCH)


def name_of(step: int, rank: int, suffix: int) -> FileName:
    """safetensors for even steps, ckpt for odd ones."""
    state = state_of(step)
    return FileName(
        PREFIX, rank, suffix, state.epoch, state.step_in_epoch, ("safetensors", "ckpt")[step % 2]
    )


def wait_for_others(folder: Path, rank: int, ranks: int, step: int) -> None:
    """Waits as the collectives of a step do: no rank is more than a step ahead. Waits forever for a
    killed rank."""
    mine = folder / f"at_{rank}"
    mine.with_suffix(".part").write_text(str(step))
    os.replace(mine.with_suffix(".part"), mine)
    others = [folder / f"at_{other}" for other in range(ranks)]
    while not all(path.exists() and int(path.read_text()) >= step for path in others):
        time.sleep(0.001)


def save_until_killed(target: SaveTarget, suffix: int, first_step: int) -> None:
    clean_own_folder(target)
    committer = Committer(target, KeepLast(KEPT)) if target.rank == 0 else None
    if committer:
        committer.recover()
    print("ready", flush=True)
    step, reported, meeting = first_step, 0, Path(target.root).parent / f"steps-{target.run}"
    meeting.mkdir(exist_ok=True)
    while True:
        wait_for_others(meeting, target.rank, target.world_size, step)
        if committer:
            committer.poll()
        write_shard(
            target,
            rank_shard(
                name_of(step, target.rank, suffix),
                state_of(step),
                tensors_of(step, target.rank),
                random={"rank": target.rank},
            ),
        )
        if committer:
            committer.poll(step)
            for done in committer.committed[reported:]:
                print(f"committed {done}", flush=True)
            reported = len(committer.committed)
        step += 1


if __name__ == "__main__":
    root, run, *numbers = sys.argv[1:]
    own, world, number, start = map(int, numbers)
    save_until_killed(SaveTarget(PosixStorage(), root, run, own, world), number, start)
