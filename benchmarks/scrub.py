"""The scrub: its rate, what it costs the steps of a training beside it, and flipped bits.

    python benchmarks/scrub.py [--only steps rate bits] [--mib 512] [--rounds 7] [--seconds 4]
    [--dir FOLDER] [--json FILE]

steps       steps of a training (matrix products of numpy in one process) with and without a process
            that scrubs beside them, in
            turns, at 50 MB/s and without a limit; a ratio is that of the median steps of a round
rate        one checkpoint of so many MiB at 50 and 200 MB/s, and without a limit
bits        one random bit in each of 200 files of weights; each must be found, and nothing else
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _measure as measure
import numpy as np

import mindresume
from mindresume.formats.rank_folders import FileName
from mindresume.model.manifest import run_name
from mindresume.model.training_state import TrainingState
from mindresume.saving.committer import Committer
from mindresume.saving.shard_writer import SaveTarget, rank_shard, write_shard
from mindresume.storage.posix import PosixStorage

RUN = run_name(1, "0000aaaa")
WORLD = 4
FLIPS = 200
AGAIN = """import sys, mindresume
print("begins", flush=True)
while True:
    mindresume.scrub(sys.argv[1], rate_mb=float(sys.argv[2]))
"""


def save(root: Path, step: int, count: int, world: int = WORLD) -> list[Path]:
    """Writes a checkpoint with ``count`` float32 values on each rank; all ranks hold other values.
    Returns its files."""
    files = []
    for rank in range(world):
        state = TrainingState(step, 1000, step, 8, 1.0, None, 1000)
        tensors = {
            "weight": np.random.default_rng([rank, step]).random(count, np.float32),
            "bias": np.ones(5, np.float32),
            "step_num": np.array(step, np.int64),
        }
        target = SaveTarget(PosixStorage(), str(root), RUN, rank, world)
        written = write_shard(
            target,
            rank_shard(
                FileName("net", rank, 0, state.epoch, state.step_in_epoch, "safetensors"),
                state,
                tensors,
                metadata={"format": "ms", "remove_redundancy": "False"},
            ),
        )
        files += [root / file.path for file in written.record.files]
    Committer(SaveTarget(PosixStorage(), str(root), RUN, 0, world)).poll(step)
    return files


def bits(root: Path, seed: int) -> dict[str, Any]:
    """Flips one bit in each of FLIPS files among 1.25 times as many, and scrubs."""
    draw, files = random.Random(seed), []
    for step in range(1, FLIPS * 5 // 4 // WORLD + 1):
        files += save(root, step, 500)
    flipped = set()
    for path in draw.sample(files, FLIPS):
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        flipped.add(str(path))
    report = mindresume.scrub(root)
    found = {problem.file for row in report.checkpoints for problem in row.damaged}
    return {
        "files": len(files),
        "flipped": len(flipped),
        "found": len(found & flipped),
        "false alarms": len(found - flipped),
    }


def rate(root: Path, mib: int) -> list[dict[str, float]]:
    save(root, 1, mib * (1 << 18) // WORLD)
    rows = []
    for limit in (50, 200, 0):
        report = mindresume.scrub(root, rate_mb=limit)
        rows.append(
            {
                "limit MB/s": limit,
                "MB/s": report.bytes_read / report.seconds / 1e6,
                "read MiB": report.bytes_read / 2**20,
                "stayed in cache": sum(row.cached_bytes for row in report.checkpoints)
                / report.bytes_read,
            }
        )
    return rows


def steps(root: Path, mib: int, rounds: int, seconds: float) -> measure.Rounds:
    """Times steps for ``seconds`` with each kind of scrub, in each round in another order."""
    save(root, 1, mib * (1 << 18) // WORLD)
    left, right = (np.random.default_rng(seed).random((300, 300), np.float32) for seed in range(2))
    found = measure.Rounds()
    for number in found.numbers(rounds):
        kinds = ["no scrub", "50 MB/s", "no limit"]
        random.Random(number).shuffle(kinds)
        for kind in kinds:
            running = (
                None
                if kind == "no scrub"
                else subprocess.Popen(
                    [sys.executable, "-c", AGAIN, str(root), "50" if kind == "50 MB/s" else "0"],
                    stdout=subprocess.PIPE,
                )
            )
            if running is not None:
                running.stdout.read(1)  # it begins to read
            times, until = [], time.perf_counter() + seconds
            while time.perf_counter() < until:
                started = time.perf_counter()
                for _ in range(4):
                    left @ right
                times.append(time.perf_counter() - started)
            if running is not None:
                running.kill()
                running.communicate()
            found.add(kind, statistics.median(times))
            found.add(f"{kind}, mean", statistics.fmean(times))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["steps", "rate", "bits"])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--dir")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=asked.dir))
    result = {}
    good = True
    try:
        if "steps" in asked.only:
            found = steps(folder / "steps", asked.mib, asked.rounds, asked.seconds)
            print(
                "| steps beside | median ms | ratio | ratios of the rounds | mean, ratio |\n| --- "
                "| --- | --- | --- | --- |"
            )
            for kind in ("no scrub", "50 MB/s", "no limit"):
                each = [
                    a / b for a, b in zip(found.values[kind], found.values["no scrub"], strict=True)
                ]
                mean = found.ratio(f"{kind}, mean", "no scrub, mean")
                print(
                    f"| {kind} | {found.median(kind) * 1000:.2f} | {statistics.median(each):.3f} | "
                    f"{min(each):.2f} to {max(each):.2f} | {mean:.3f} |"
                )
            result["steps"] = found.values
        if "rate" in asked.only:
            rows = rate(folder / "rate", asked.mib)
            print("\n| limit MB/s | MB/s | stayed in the kernel's cache |\n| --- | --- | --- |")
            for row in rows:
                print(
                    f"| {row['limit MB/s'] or 'none'} | {row['MB/s']:.0f} | "
                    f"{row['stayed in cache']:.0%} |"
                )
            result["rate"] = rows
        if "bits" in asked.only:
            result["bits"] = bits(folder / "bits", 1)
            print(f"\nbits: {result['bits']}")
            good = result["bits"]["found"] == FLIPS and not result["bits"]["false alarms"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    print(f"\nload average {os.getloadavg()[0]:.1f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
