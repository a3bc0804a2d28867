"""Saving one rank's file before the training goes on: ours, MindSpore's save_checkpoint, and the
plain limit of the disk.

    python benchmarks/save.py [--mib 1024] [--rounds 7] [--dir FOLDER] [--json FILE]

plain       the same bytes with plain writes of 4 MiB, then fsync
ours        mindresume.saving.committer.write_shard: checksums of file and tensors, fsync, rename,
            record
mindspore   mindspore.save_checkpoint of the same parameters: no fsync, no checksum, no record;
            "flushed" adds the fsync
read        plain read of the file;  proof: mindresume.resume.verifier of it (every byte hashed)

Half of the bytes are float32, half bfloat16, in live MindSpore parameters. Everything is measured
once a round, in changing order, after a sync and with the kernel's free memory warmed up; the
target is 1.15 times the plain limit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import _measure as measure

from mindresume.formats import CheckpointDir
from mindresume.formats.rank_folders import FileName
from mindresume.formats.records import scan_records
from mindresume.mindformers.network_state import deferred
from mindresume.model.manifest import FORMATS
from mindresume.model.training_state import TrainingState
from mindresume.resume.verifier import VerifiedShard, Verifier
from mindresume.saving.shard_writer import SaveTarget, rank_shard, write_shard
from mindresume.storage.posix import PosixStorage

TARGET = 1.15
CHUNK = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-save-", dir=options.dir)
    try:
        Bench(folder, options.mib).run(options.rounds, options.json)
    finally:
        shutil.rmtree(folder)


class Bench:
    def __init__(self, folder: str, mib: int):
        self.folder, self.rounds = folder, measure.Rounds()
        self.arrays = measure.arrays(mib)
        self.live = measure.parameters(self.arrays)
        self.size = measure.size_of(self.arrays)

    def run(self, rounds: int, path: str | None) -> None:
        for number in self.rounds.numbers(rounds):
            works: list[Callable[[], Any]] = [self.plain]
            for fmt in FORMATS:
                works += [partial(self.ours, number, fmt), partial(self.mindspore, fmt)]
            for work in measure.shuffled(works, number):
                work()
        measure.finish(
            f"One rank's file, {self.size / 2**20:.0f} MiB in {len(self.arrays)} tensors, float32 "
            f"and bfloat16, {rounds} rounds",
            self.folder,
            self.rounds,
            self.text(),
            path,
            {"bytes": self.size},
        )

    def timed(self, name: str, work: Callable[[], Any]) -> None:
        self.settle()
        self.rounds.timed(name, work)

    def settle(self) -> None:
        os.sync()
        # the file's pages, and the copies that save_checkpoint makes
        measure.warm_memory(3 * self.size)

    def plain(self) -> None:
        path = os.path.join(self.folder, "plain")
        self.timed("plain", lambda: write_plain(path, self.arrays))
        # the first read after a write finds some pages slower
        read_plain(path)
        self.rounds.timed("read", lambda: read_plain(path))
        os.remove(path)

    def ours(self, number: int, fmt: str) -> None:
        root = os.path.join(self.folder, fmt)
        target = SaveTarget(PosixStorage(), root, "0001-00000000", 0, 1)
        os.makedirs(root)
        shard = rank_shard(
            FileName("bench", 0, 0, 1, number, fmt),
            TrainingState(number, 100, number),
            deferred(self.live),
        )
        self.timed(f"ours {fmt}", lambda: write_shard(target, shard))
        candidate = scan_records(CheckpointDir(target.storage, root))[0][0]
        found = self.rounds.timed(
            f"proof {fmt}",
            lambda: Verifier(CheckpointDir(target.storage, root), candidate).verify(0),
        )
        if not isinstance(found, VerifiedShard):
            raise SystemExit(f"the file just written is refused: {found}")
        shutil.rmtree(root)

    def mindspore(self, fmt: str) -> None:
        import mindspore as ms

        path = os.path.join(self.folder, f"built_in.{fmt}")
        rows = [{"name": name, "data": value} for name, value in self.live]
        self.settle()
        started = time.perf_counter()
        ms.save_checkpoint(rows, path, format=fmt)
        self.rounds.add(f"mindspore {fmt}", time.perf_counter() - started)
        flush(path)
        self.rounds.add(f"mindspore {fmt}, flushed", time.perf_counter() - started)
        os.remove(path)

    def text(self) -> str:
        rows = []
        for name in [
            "plain",
            *(
                f"{who} {fmt}{rest}"
                for fmt in FORMATS
                for who, rest in (("ours", ""), ("mindspore", ""), ("mindspore", ", flushed"))
            ),
        ]:
            verdict = (
                ("met" if self.rounds.ratio(name, "plain") <= TARGET else "missed")
                if name.startswith("ours")
                else ""
            )
            rows.append(self.row(name, "plain", verdict))
        rows += [
            self.row(name, "read", "") for name in ("read", *(f"proof {fmt}" for fmt in FORMATS))
        ]
        return measure.table(
            [
                "what",
                "median s",
                "MiB/s",
                "ratio to plain or read",
                "ratios of the rounds",
                f"target {TARGET}",
            ],
            rows,
        )

    def row(self, name: str, base: str, verdict: str) -> list[str]:
        median = self.rounds.median(name)
        return [
            name,
            f"{median:.3f}",
            f"{self.size / 2**20 / median:.0f}",
            f"{self.rounds.ratio(name, base):.2f}",
            self.rounds.spread(name, base),
            verdict,
        ]


def write_plain(path: str, arrays: dict[str, Any]) -> None:
    with open(path, "wb", buffering=0) as file:
        for array in arrays.values():
            view = memoryview(array.reshape(-1).view("u1"))
            for start in range(0, len(view), CHUNK):
                file.write(view[start : start + CHUNK])
        os.fsync(file.fileno())


def flush(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_plain(path: str) -> None:
    buffer = bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


if __name__ == "__main__":
    main()
