"""Choosing the checkpoint of a resume among 5 committed steps: ours and mindformers'
get_resume_checkpoint, on one folder.

    python benchmarks/choose.py [--ranks 64 512 4096] [--steps 5] [--rounds 7] [--dir FOLDER]
    [--json FILE]

rank 0      scan, quick proof, message to all ranks
            (mindresume.coordination.collectives.run_on_rank0 with one rank)
select      the same, and every byte of rank 0's own file proven (in a job each rank proves its own)
            mindformers mindformers.tools.resume_ckpt.get_resume_checkpoint, rank 0's part: names
            and meta.json alone
operations  calls that ask the file system for a name: open, stat, list

The folders are written by the product itself, without flushing; the files of weights are tiny, as
only the proof. "cut short": the job died in a sixth save, when half of the ranks had recorded it.
Directories are in the kernel's cache. The target of rank 0's part is 2 s for 4096 ranks, and
operations that do not grow with the ranks.
"""  # noqa: E501

from __future__ import annotations

import argparse
import builtins
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import _measure as measure
import numpy as np

from mindresume.coordination.collectives import SingleProcess, run_on_rank0
from mindresume.formats.rank_folders import FileName
from mindresume.model.manifest import run_name
from mindresume.model.training_state import TrainingState
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.resume.sources import Job, SharedDisk
from mindresume.saving.committer import Committer
from mindresume.saving.shard_writer import SaveTarget, rank_shard, write_shard
from mindresume.storage import parallel
from mindresume.storage.posix import PosixStorage

RUN = run_name(1, "00000000")
PER_EPOCH, EVERY = 1000, 10
TARGET = 2.0
STATES = ("committed", "cut short")


class Unflushed(PosixStorage):
    """Builds a folder that need not survive a power loss."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        with open(path, "wb") as file:
            return sum(file.write(piece) for piece in pieces)

    def sync(self, folder: str) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-choose-", dir=options.dir)
    try:
        Bench(folder, options.ranks, options.steps).run(options.rounds, options.json)
    finally:
        shutil.rmtree(folder)


class Bench:
    def __init__(self, folder: str, worlds: list[int], steps: int):
        self.folder = folder
        self.worlds = worlds
        self.steps = steps
        self.rounds = measure.Rounds()
        self.operations: dict[str, int] = {}
        self.message: dict[str, int] = {}
        self.built_in = built_in(folder)

    def run(self, rounds: int, path: str | None) -> None:
        for world in self.worlds:
            print(f"building {self.steps} steps of {world} ranks, twice", file=sys.stderr)
            for state in STATES:
                build(self.root(world, state), world, self.steps, state == "cut short")
        for number in self.rounds.numbers(rounds):
            works = [
                lambda world=world, state=state: self.choose(world, state)
                for world in self.worlds
                for state in STATES
            ]
            for work in measure.shuffled(works, number):
                work()
        measure.finish(
            f"Choosing among {self.steps} committed steps, {rounds} rounds",
            self.folder,
            self.rounds,
            self.text(),
            path,
            {"operations": self.operations, "message_bytes": self.message},
        )

    def root(self, world: int, state: str) -> str:
        return os.path.join(self.folder, f"{world}-{state.replace(' ', '-')}", "checkpoint")

    def choose(self, world: int, state: str) -> None:
        root, expected = self.root(world, state), self.steps * EVERY

        def rank_0() -> int:
            disk = SharedDisk(Job(PosixStorage(), root, SingleProcess(), SelectionPolicy(world)))
            message = run_on_rank0(SingleProcess(), lambda: disk.offer([]))
            self.message[f"{world} {state}"] = len(json.dumps(message).encode())
            return message["candidate"]["step"]

        def select() -> int:
            policy = SelectionPolicy(world)
            return select_checkpoint(PosixStorage(), root, SingleProcess(), policy).chosen.step

        def mindformers() -> int:
            return int(self.built_in(root).rpartition("_")[2].partition(".")[0])

        for what, work in (("rank 0", rank_0), ("select", select), ("mindformers", mindformers)):
            name = f"{what} {world} {state}"
            found = self.rounds.timed(name, work)
            if found != expected:
                raise SystemExit(f"{name}: step {found} was chosen, expected {expected}")
            if name not in self.operations:
                with counted() as count:
                    work()
                self.operations[name] = count[0]

    def text(self) -> str:
        rows, most = [], max(self.worlds)
        for state in STATES:
            for world in self.worlds:
                names = {
                    what: f"{what} {world} {state}" for what in ("rank 0", "select", "mindformers")
                }
                verdict = (
                    ""
                    if world < most or state != STATES[0]
                    else "met"
                    if self.rounds.median(names["rank 0"]) <= TARGET
                    else "missed"
                )
                rows.append(
                    [
                        str(world),
                        state,
                        *(f"{self.rounds.median(name):.3f}" for name in names.values()),
                        f"{self.rounds.ratio(names['rank 0'], names['mindformers']):.2f}",
                        *(str(self.operations[name]) for name in names.values()),
                        f"{self.message[f'{world} {state}'] / 1024:.0f}",
                        verdict,
                    ]
                )
        return measure.table(
            [
                "ranks",
                "newest save",
                "rank 0, s",
                "select, s",
                "mindformers, s",
                "rank 0 / mindformers",
                "operations: rank 0",
                "select",
                "mindformers",
                "message KiB",
                f"target {TARGET:.0f} s",
            ],
            rows,
        )


def build(root: str, world: int, steps: int, cut_short: bool) -> None:
    storage = Unflushed()
    tensors = {f"layer.{index}.weight": np.full(16, index, np.float32) for index in range(4)}

    def write(step: int, rank: int) -> None:
        state = TrainingState(step, PER_EPOCH, step, 8, 1.0, None, PER_EPOCH)
        counters = {
            "epoch_num": np.array(state.epoch),
            "step_num": np.array(step),
            "global_step": np.array([step], np.int32),
        }
        name = FileName("net", rank, 0, state.epoch, state.step_in_epoch, "safetensors")
        write_shard(
            SaveTarget(storage, root, RUN, rank, world),
            rank_shard(name, state, {**tensors, **counters}),
        )

    for step in range(EVERY, (steps + 1) * EVERY, EVERY):
        parallel(storage, lambda rank, step=step: write(step, rank), range(world))
        committer = Committer(SaveTarget(storage, root, RUN, 0, world))
        committer.poll(step)
        if committer.pending:
            raise SystemExit(f"step {step} of {world} ranks could not be committed")
    if cut_short:
        parallel(storage, lambda rank: write((steps + 1) * EVERY, rank), range(world // 2))


def built_in(folder: str) -> Callable[[str], str]:
    """mindformers' choice, made by rank 0, with its notes in ``folder`` and its log silent."""
    os.environ["LOCAL_DEFAULT_PATH"] = os.path.join(folder, "output")
    from mindformers.tools.resume_ckpt import get_resume_checkpoint

    logging.disable(logging.WARNING)
    return lambda root: get_resume_checkpoint(
        root, True, resume_by_meta=True, ckpt_format="safetensors"
    )


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts opens, stats and listings of all threads, whoever calls them."""
    count, lock = [0], threading.Lock()

    def counting(function: Callable) -> Callable:
        def call(*values: object, **named: object) -> object:
            with lock:
                count[0] += 1
            return function(*values, **named)

        return call

    with (
        patch.object(os, "stat", counting(os.stat)),
        patch.object(os, "lstat", counting(os.lstat)),
        patch.object(os, "listdir", counting(os.listdir)),
        patch.object(os, "scandir", counting(os.scandir)),
        patch.object(builtins, "open", counting(builtins.open)),
    ):
        yield count


if __name__ == "__main__":
    main()
