"""Iteration folders for the tests: written by the product itself, as several ranks would, or by
mindformers (the fixtures)."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from rank_folders import RUN, STORAGE, state_of

from mindresume.formats.iterations import intent_name, iteration_name
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import FOLDER, attempt_name
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KEEP_ALL, Policy
from mindresume.saving.shard_writer import SaveTarget, iteration_shard, write_shard
from mindresume.storage import Storage

COMMON, METADATA, TRACKER = "common.json", "metadata.json", "latest_checkpointed_iteration.txt"
FIXTURES = Path(__file__).resolve().parents[1] / "st" / "fixtures"
# steps 10 and 15, the tracker names 15
FOREIGN = ("mf190_20_single", "mf190_20_dp2tp2opt", "mf180_20_tp2")


def target_of(
    root: Path, rank: int = 0, world: int = 2, run: str = RUN, storage: Storage = STORAGE
) -> SaveTarget:
    return SaveTarget(storage, str(root), run, rank, world, iterations=True)


def tensors_of(rank: int, step: int, run: str = RUN) -> dict[str, np.ndarray]:
    random = np.random.default_rng([rank, step, int(run[:4])])
    return {
        "embedding.weight": random.standard_normal((4, 4)).astype(np.float32),
        "adam_m.embedding.weight": random.standard_normal((4, 4)).astype(np.float32),
        "global_step": np.array([step], np.int32),
    }


def write_rank(
    root: Path,
    step: int,
    rank: int = 0,
    world: int = 2,
    run: str = RUN,
    health: int | None = None,
    at: float = 1000.0,
    storage: Storage = STORAGE,
) -> None:
    target, arrays = target_of(root, rank, world, run, storage), tensors_of(rank, step, run)
    weights = {name: array for name, array in arrays.items() if name == "embedding.weight"}
    others = {name: array for name, array in arrays.items() if name not in weights}
    cut = TensorLayout((world,), (0, -1)), (4 * world, 4)
    shard = iteration_shard(
        "net",
        target,
        replace(state_of(step), health=health),
        weights,
        others,
        {name: cut for name in arrays if "embedding" in name},
        {"python": f"of rank {rank}"},
    )
    write_shard(target, shard, saved_at=at + step)


def write_all(root: Path, step: int, world: int = 2, run: str = RUN, **how) -> None:
    """Writes the files and records of all ranks, without a commit."""
    for rank in range(world):
        write_rank(root, step, rank, world, run, **how)


def save(
    root: Path, *steps: int, world: int = 2, run: str = RUN, policy: Policy = KEEP_ALL, **how
) -> Committer:
    """Writes complete, committed iterations."""
    committer = Committer(target_of(root, 0, world, run), policy)
    for step in steps:
        write_all(root, step, world, run, **how)
        committer.poll(step)
        assert committer.pending == []
    return committer


def folder_of(root: Path, step: int) -> Path:
    return Path(root) / iteration_name(step)


def making(root: Path, step: int, run: str = RUN) -> Path:
    """Returns the path of the iteration folder before it gets its name."""
    return Path(root) / FOLDER / attempt_name(step, run)


def records_of(base: Path, step: int, run: str = RUN) -> Path:
    return base / FOLDER / attempt_name(step, run)


def weights_of(root: Path, step: int, rank: int = 0, kind: str = "model", world: int = 2) -> Path:
    return folder_of(root, step) / f"net-{kind}-{rank:07d}-{world:07d}.safetensors"


def track(root: Path, content: bytes | str | int) -> None:
    """Writes the tracker, as a user does by hand."""
    data = content if isinstance(content, bytes) else str(content).encode()
    (Path(root) / TRACKER).write_bytes(data)


def tracker(root: Path) -> str | None:
    path = Path(root) / TRACKER
    return path.read_text() if path.exists() else None


def intend(root: Path, step: int) -> Path:
    path = Path(root) / FOLDER / intent_name(step)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    return path


def unname(root: Path, step: int, run: str = RUN) -> Path:
    """Moves a published iteration back, as if the writer had been killed between the manifest and
    the rename."""
    os.rename(folder_of(root, step), making(root, step, run))
    return making(root, step, run)


def foreign(
    root: Path,
    name: str = "mf190_20_dp2tp2opt",
    steps: tuple[int, ...] = (10, 15),
    tracked: bool = True,
) -> Path:
    """Writes the files of mindformers. Returns ``root``."""
    source = FIXTURES / name / "output" / "checkpoint"
    Path(root).mkdir(parents=True, exist_ok=True)
    for step in steps:
        shutil.copytree(source / iteration_name(step), folder_of(root, step))
    if tracked:
        track(root, max(steps))
    return Path(root)


def listing(root: Path) -> list[str]:
    """Returns the visible names, without the folder of records."""
    return sorted(name for name in os.listdir(root) if name != FOLDER)


def hidden(root: Path) -> list[str]:
    folder = Path(root) / FOLDER
    return sorted(os.listdir(folder)) if folder.exists() else []
