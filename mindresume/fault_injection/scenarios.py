"""What is attacked. A story has a past, which is on disk and durable, and an attack that all ranks run on the machine.

Weights differ by rank, step and run, so that a file of another one is never taken for the right one.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from mindresume.coordination.lease import LeaseHolder
from mindresume.coordination.lease_acquisition import acquire
from mindresume.errors import SaveError
from mindresume.fault_injection.faults import Machine
from mindresume.formats.rank_folder_naming import FileName
from mindresume.model.file_record import FORMATS
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import run_name
from mindresume.model.training_state import TrainingState
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KEEP_ALL, KeepLast, Policy
from mindresume.saving.shard_writer import SaveTarget, Shard, clean_own_folder, iteration_shard, rank_shard, write_shard
from mindresume.saving.sync_saver import Outcome, Save, SaveJob, SyncSaver
from mindresume.storage.atomic_publish import temporary_name
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage

ITERATION = "iteration"                     # Checkpoint 2.0; the others are formats of a file in rank folders
LAYOUTS = (*FORMATS, ITERATION)
PER_EPOCH = 10
RUNS = (run_name(1, "0000aaaa"), run_name(2, "0000bbbb"), run_name(3, "0000cccc"))
Saved = tuple[str, int]                     # (run, step)


@dataclass
class World:
    """One folder and the ranks that save into it. ``format``: one of LAYOUTS. ``complete``: saves that all ranks have finished:
    from then on a resume must not take anything older. ``recorded``: ranks that have finished a save."""
    machine: Machine
    root: str
    format: str
    ranks: int
    recorded: dict[Saved, set[int]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def place(self, rank: int, run: int, storage: Storage | None = None) -> SaveTarget:
        return place_of(storage or self.machine.view(rank), self.root, self.format, self.ranks, run, rank)

    def did(self, rank: int, run: int, step: int) -> None:
        self.recorded.setdefault((RUNS[run], step), set()).add(rank)

    @property
    def complete(self) -> list[Saved]:
        return [saved for saved, ranks in self.recorded.items() if len(ranks) == self.ranks]

    def committer(self, run: int, policy: Policy = KEEP_ALL) -> Committer:
        return Committer(self.place(0, run), policy, clock=self.machine.clock, sleep=self.machine.sleep)


def tensors(run: int, step: int, rank: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([run, step, rank])
    return {"embedding.weight": random.standard_normal((6, 4)).astype(np.float32),
            "adam_m.embedding.weight": random.standard_normal((6, 4)).astype(np.float32),
            "step_num": np.array(step, np.int64), "global_step": np.array([step], np.int32)}


def place_of(storage: Storage, root: str, fmt: str, ranks: int, run: int, rank: int) -> SaveTarget:
    return SaveTarget(storage, root, RUNS[run], rank, ranks, fmt == ITERATION)


def shard(place: SaveTarget, step: int, fmt: str) -> Shard:
    run, state = RUNS.index(place.run), TrainingState(step, PER_EPOCH, step, 8)
    arrays, random = tensors(run, step, place.rank), {"rank": place.rank}
    if not place.iterations:
        name = FileName("drill", place.rank, run, state.epoch, state.step_in_epoch, fmt)
        return rank_shard(name, state, arrays, random=random, metadata={"format": "ms"})
    cut = TensorLayout((place.world_size,), (0, -1)), (6 * place.world_size, 4)
    weights = {name: array for name, array in arrays.items() if name == "embedding.weight"}
    others = {name: array for name, array in arrays.items() if name not in weights}
    return iteration_shard("drill", place, state, weights, others, {name: cut for name in arrays if "embedding" in name}, random)


def save_quietly(root: str, fmt: str, ranks: int, run: int, step: int, commit: bool = True, only: int | None = None,
                 storage: Storage | None = None) -> None:
    """The past: written without anybody interfering."""
    places = [place_of(storage or PosixStorage(), root, fmt, ranks, run, rank) for rank in range(ranks)]
    for place in places[:only]:
        write_shard(place, shard(place, step, fmt))
    if commit:
        Committer(places[0]).saved(step)


class _Told(SaveJob):
    """Says when this rank's part is written, which for rank 0 is before it commits."""

    def __init__(self, place: SaveTarget, committer: Committer | None, world: World, run: int):
        super().__init__(place, committer)
        self.world, self.run = world, run

    def write(self, save: Save) -> Outcome:
        outcome = super().write(save)
        if outcome.saved:
            self.world.did(self.place.rank, self.run, outcome.step)
        return outcome


# ---- attacks: what one rank does -----------------------------------------------------------------------------------

def _save_steps(world: World, rank: int, run: int, steps: list[int], policy: Policy = KEEP_ALL,
                background: bool = False) -> None:
    place = world.place(rank, run)
    if background:
        saver: AsyncSaver | SyncSaver = AsyncSaver(place, policy if rank == 0 else None, "thread")
    else:
        saver = SyncSaver(_Told(place, world.committer(run, policy) if rank == 0 else None, world, run))
    for number, step in enumerate(steps):
        saver.save(Save(shard(place, step, world.format)))
        outcomes = saver.wait(60.0)
        if number == len(steps) - 1:            # a writer thread waits by the real clock, so it does not wait for other ranks
            outcomes += saver.finish(0.0 if background else 5.0)
        for outcome in outcomes:
            if outcome.saved:
                world.did(rank, run, outcome.step)
            else:
                world.errors.append(str(outcome.error))


def _finish(world: World, rank: int, background: bool = False, run: int = 0, policy: Policy = KEEP_ALL) -> None:
    _save_steps(world, rank, run, [20, 30], policy, background)


def _first(world: World, rank: int) -> None:
    _save_steps(world, rank, 0, [10])


def _save(world: World, rank: int) -> None:
    _finish(world, rank)


def _again(world: World, rank: int) -> None:
    """Run 2 went back to step 10 and saves step 20 a second time."""
    _finish(world, rank, run=1)


def _background(world: World, rank: int) -> None:
    _finish(world, rank, background=True)


def _prune(world: World, rank: int) -> None:
    _finish(world, rank, policy=KeepLast(1))


def _pointers(world: World, rank: int) -> None:
    """All records of step 20 are there: only rank 0's commit is left."""
    world.did(rank, 0, 20)
    if rank == 0:
        committer = world.committer(0)
        committer.saved(20)
        committer.finish(2.0)


def _claim(world: World, rank: int) -> None:
    """Rank 0 alone; the others wait for the name of the run, as they do in a training."""
    if rank == 0:
        holder = LeaseHolder("saving", RUNS[1], "drill", "", 1, 1, 0.0, world.ranks)
        acquire(world.place(0, 1).storage, world.root, holder, 1.0, clock=world.machine.clock, sleep=world.machine.sleep,
                keep_run_marker=world.format == ITERATION)


def _start(world: World, rank: int) -> None:
    """The next run cleans up, commits what was complete, and saves."""
    place = world.place(rank, 1)
    clean_own_folder(place)
    if rank == 0:
        SaveJob(place, world.committer(1)).begin()
    _save_steps(world, rank, 1, [30], KeepLast(1))


@dataclass(frozen=True)
class Story:
    """``past``: (run, step) that are committed before, newest last. ``before``: a part of the attack that all ranks have ended
    before the rest begins."""
    name: str
    about: str
    attack: Callable[[World, int], None]
    past: tuple[tuple[int, int], ...] = ((0, 10),)
    also: Callable[[str, str, int], None] = lambda root, fmt, ranks: None
    before: Callable[[World, int], None] | None = None

    def prepare(self, root: str, fmt: str, ranks: int) -> None:
        for run, step in self.past:
            save_quietly(root, fmt, ranks, run, step)
        self.also(root, fmt, ranks)

    def run(self, world: World) -> list[object]:
        def work(attack: Callable[[World, int], None], rank: int) -> object:
            try:
                return attack(world, rank)
            except (SaveError, OSError) as error:           # the training goes on, or ends with this error
                world.errors.append(str(error))
                return error
        results: list[object] = []
        for attack in filter(None, (self.before, self.attack)):
            results += world.machine.turns.run([lambda rank=rank, attack=attack: work(attack, rank)
                                                for rank in range(world.ranks)])
        return results


def _records_only(root: str, fmt: str, ranks: int) -> None:
    save_quietly(root, fmt, ranks, 0, 20, commit=False)


def _one_rank_missing(root: str, fmt: str, ranks: int) -> None:
    """Step 20 of the run before was complete and not committed, step 30 was cut by its end."""
    save_quietly(root, fmt, ranks, 0, 20, commit=False)
    save_quietly(root, fmt, ranks, 0, 30, commit=False, only=ranks - 1)
    for rank in range(ranks):
        place = place_of(PosixStorage(), root, fmt, ranks, 0, rank)
        folder = place.data_dir(30) if place.iterations else os.path.join(root, f"rank_{rank}")
        with open(temporary_name(os.path.join(folder, f"x{rank}"), RUNS[0]), "wb") as file:
            file.write(b"half")


STORIES: Mapping[str, Story] = {story.name: story for story in (
    Story("first save", "the very first checkpoint of a folder", _first, ()),
    Story("save", "two more checkpoints after one that is committed", _save),
    Story("save again", "a later run, which went back, saves step 20 once more", _again, ((0, 10), (0, 20))),
    Story("background", "the same as save, in a background thread of every rank", _background),
    Story("prune", "saves of which only the newest is kept", _prune, ((0, 5), (0, 10))),
    Story("pointers", "rank 0 commits, and points meta.json or the tracker to it", _pointers, also=_records_only),
    Story("start", "the next run claims the folder, cleans up after the last one, commits and saves", _start,
          also=_one_rank_missing, before=_claim),
)}
