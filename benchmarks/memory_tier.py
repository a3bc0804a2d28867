"""The tier in memory: how long a save stops the training, and how fast a start loads it.

    python benchmarks/memory_tier.py [--mib 512] [--rounds 7] [--dir FOLDER] [--json FILE]
    python benchmarks/memory_tier.py --steps [--ranks 1] [--rounds 20] [--seconds 3]

copy          one copy of the same bytes into memory that was touched before: the lower limit of a
              stop; target 1.2
stop          mindresume.saving.memory_tier of the same bytes: until the training goes on
background    its checksums and record, while the training goes on
fresh copy    one copy into new memory: the lower limit of a load; target 1.5
memory        verify and load from the tier;   disk: from a file that the page cache does not hold;
              target 0.25 of it

Half of the bytes are float32, half bfloat16. Everything is measured once a round, in changing
order.

--steps: how much longer a step of the quickstart's training takes if each step is saved in memory;
target 10 % (_tier_steps.py)
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import _measure as measure
import _tier_steps
import numpy as np

from mindresume.coordination.collectives import SingleProcess
from mindresume.formats import CheckpointDir
from mindresume.formats.rank_folders import FileName
from mindresume.formats.records import scan_records
from mindresume.mindformers.loading import read_shard
from mindresume.model.training_state import TrainingState
from mindresume.resume.verifier import VerifiedShard, Verifier
from mindresume.saving.memory_tier.tier import MemoryTier
from mindresume.saving.shard_writer import Save, SaveTarget, rank_shard, write_shard
from mindresume.settings import MemoryTierSettings, Settings
from mindresume.storage.posix import PosixStorage
from mindresume.storage.read_cache import ReadCache

STORAGE = PosixStorage()
RUN = "0001-00000000"
MEMORY = "/dev/shm"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    folder, memory = (
        tempfile.mkdtemp(prefix="bench-tier-", dir=where) for where in (options.dir, MEMORY)
    )
    try:
        if options.steps:
            found = _tier_steps.measure_steps(
                folder, memory, options.ranks, options.rounds, options.seconds
            )
            measure.finish(
                f"Step time of the quickstart with a tier in memory, {options.ranks} ranks, "
                f"{options.rounds} rounds",
                folder,
                found,
                _tier_steps.text(found),
                options.json,
            )
        else:
            Bench(folder, memory, options.mib).run(options.rounds, options.json)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(memory)


class Request:
    def __init__(self, arrays: dict[str, np.ndarray], step: int):
        self.arrays, self.step = arrays, step

    def collect(self) -> Save:
        state = TrainingState(self.step, 1000, self.step)
        return Save(
            rank_shard(
                FileName("net", 0, 0, state.epoch, state.step_in_epoch, "safetensors"),
                state,
                self.arrays,
            )
        )


class Bench:
    def __init__(self, folder: str, memory: str, mib: int):
        self.folder = folder
        self.memory = memory
        self.rounds = measure.Rounds()
        self.arrays = measure.arrays(mib)
        self.size = measure.size_of(self.arrays)
        self.buffers = {name: np.empty_like(array) for name, array in self.arrays.items()}
        target = SaveTarget(STORAGE, memory, RUN, 0, 1, lineage=RUN)
        self.events: list[Any] = []
        self.tier = MemoryTier(
            target,
            SingleProcess(),
            Settings(memory_tier=MemoryTierSettings(2, memory)),
            self.events.append,
        )
        self.step = 0
        self.next()
        self.next()
        write_shard(
            SaveTarget(STORAGE, folder, RUN, 0, 1, lineage=RUN),
            Request(self.arrays, 2).collect().shard,
        )

    def next(self) -> None:
        """Passes one end of a step, and waits for the background work."""
        self.step += 1
        self.tier.step_end(Request(self.arrays, self.step))
        self.tier._join(self.tier._reserving)
        self.tier._join(self.tier._work)

    def run(self, rounds: int, path: str | None) -> None:
        for number in self.rounds.numbers(rounds):
            works: list[Callable[[], Any]] = [
                self.copy,
                self.stop,
                self.fresh,
                self.from_memory,
                self.from_disk,
            ]
            for work in measure.shuffled(works, number):
                work()
        self.tier.stop()
        measure.finish(
            f"A tier in memory, {self.size / 2**20:.0f} MiB in {len(self.arrays)} tensors, "
            f"{rounds} rounds",
            self.folder,
            self.rounds,
            self.text(),
            path,
            {"bytes": self.size},
        )

    def copy(self) -> None:
        def work() -> None:
            for name, array in self.arrays.items():
                np.copyto(self.buffers[name], array)

        self.rounds.timed("copy", work)

    def stop(self) -> None:
        self.next()  # no save
        self.events.clear()
        self.next()
        self.tier._emit_done()
        (event,) = self.events
        self.rounds.add("stop", event.stall_seconds)
        self.rounds.add("background", event.background_seconds)

    def fresh(self) -> None:
        measure.warm_memory(2 * self.size)
        self.rounds.timed("fresh copy", lambda: [array.copy() for array in self.arrays.values()])

    def from_memory(self) -> None:
        self._load("memory", ReadCache(STORAGE, 2 * self.size), self.memory, keeps=True)

    def from_disk(self) -> None:
        os.sync()
        for folder, _, names in os.walk(self.folder):
            for name in names:
                handle = os.open(os.path.join(folder, name), os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
        self._load("disk", ReadCache(STORAGE, 2 * self.size), self.folder)

    def _load(self, name: str, storage: ReadCache, root: str, keeps: bool = False) -> None:
        measure.warm_memory(3 * self.size)

        def work() -> None:
            candidate = scan_records(CheckpointDir(STORAGE, root))[0][0]
            place = CheckpointDir(STORAGE if keeps else storage, root)
            shard = Verifier(place, candidate, keep=storage if keeps else None).verify(0)
            assert isinstance(shard, VerifiedShard), shard
            read_shard(CheckpointDir(storage, root), shard)

        self.rounds.timed(name, work)
        storage.clear()

    def text(self) -> str:
        rows = []
        for name, base, target in (
            ("copy", "copy", 0),
            ("stop", "copy", 1.2),
            ("background", "copy", 0),
            ("fresh copy", "fresh copy", 0),
            ("memory", "fresh copy", 1.5),
            ("memory", "disk", 0.25),
            ("disk", "fresh copy", 0),
        ):
            ratio = self.rounds.ratio(name, base)
            verdict = f"{target}: {'met' if ratio <= target else 'missed'}" if target else ""
            rows.append(
                [
                    name,
                    f"{self.rounds.median(name):.4f}",
                    base,
                    f"{ratio:.2f}",
                    self.rounds.spread(name, base),
                    verdict,
                ]
            )
        return measure.table(
            ["what", "median s", "compared with", "ratio", "ratios of the rounds", "target"], rows
        )


if __name__ == "__main__":
    main()
