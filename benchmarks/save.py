"""Saving and checking one rank's file: ours, MindSpore's save_checkpoint, and the plain limit, interleaved in one run.

    python benchmarks/save.py [--mib 512] [--rounds 7] [--dir FOLDER] [--format safetensors|ckpt]

write       the same bytes with plain write + fsync: the limit of the disk
mindspore   mindspore.save_checkpoint of the same parameters (no fsync, no checksum, no record)
ours        mindresume.store.commit.write_shard: checksums of file and tensors, fsync, rename, record
read        plain read of the file;  check: mindresume.resume.prove of the file just written (every byte hashed)

Medians in seconds, MiB/s, and the ratio to the plain limit of the same round. The page cache is warm for reading.
"""
from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from mindresume.formats.names import FileName
from mindresume.formats.rank_folders import scan_records
from mindresume.resume.prove import ProvenShard, prove
from mindresume.state import TrainingState
from mindresume.store.commit import Place, Shard, write_shard
from mindresume.store.storage import PosixStorage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--format", default="safetensors", choices=["safetensors", "ckpt"])
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-", dir=options.dir)
    try:
        measure(folder, options.mib, options.rounds, options.format)
    finally:
        shutil.rmtree(folder)


def measure(folder: str, mib: int, rounds: int, fmt: str) -> None:
    import mindspore as ms
    random = np.random.default_rng(0)
    count = max(1, mib // 16)
    arrays = {f"layer.{i}.weight": random.standard_normal((2048, 2048), np.float32) for i in range(count)}
    parameters = [{"name": name, "data": ms.Tensor.from_numpy(array)} for name, array in arrays.items()]
    total = sum(array.nbytes for array in arrays.values())
    times: dict[str, list[float]] = {"write": [], "mindspore": [], "ours": [], "read": [], "check": []}

    def timed(name: str, work: Callable[[], object]) -> None:
        os.sync()
        started = time.perf_counter()
        work()
        times[name].append(time.perf_counter() - started)

    for number in range(1, rounds + 1):
        root = os.path.join(folder, str(number))
        os.makedirs(root)
        plain, built_in = os.path.join(root, "plain"), os.path.join(root, f"built_in.{fmt}")
        place = Place(PosixStorage(), root, "0001-00000000", 0, 1)
        shard = Shard(FileName("bench", 0, 0, 1, number, fmt), TrainingState(number, 100, number), arrays)
        timed("write", lambda plain=plain: write_plain(plain, arrays))
        timed("mindspore", lambda path=built_in: ms.save_checkpoint(parameters, path, format=fmt))
        timed("ours", lambda place=place, shard=shard: write_shard(place, shard))
        timed("read", lambda plain=plain: read_plain(plain))
        candidate = scan_records(place.storage, root)[0][0]
        timed("check", lambda place=place, candidate=candidate: proven(place, candidate))
        shutil.rmtree(root)
    print(f"{total / 2**20:.0f} MiB in {count} float32 tensors, {fmt}, {rounds} rounds, {platform.machine()}, "
          f"{os.cpu_count()} cores, mindspore {ms.__version__}\n")
    print("| what | median s | MiB/s | ratio to the plain limit |\n|---|---|---|---|")
    for name, limit in (("write", "write"), ("mindspore", "write"), ("ours", "write"), ("read", "read"), ("check", "read")):
        median = statistics.median(times[name])
        ratio = statistics.median(a / b for a, b in zip(times[name], times[limit], strict=True))
        print(f"| {name} | {median:.3f} | {total / 2**20 / median:.0f} | {ratio:.2f} |")


def write_plain(path: str, arrays: dict[str, np.ndarray]) -> None:
    with open(path, "wb", buffering=0) as file:
        for array in arrays.values():
            view = memoryview(array).cast("B")
            for start in range(0, len(view), 4 << 20):
                file.write(view[start:start + (4 << 20)])
        os.fsync(file.fileno())


def read_plain(path: str) -> None:
    buffer = bytearray(4 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def proven(place: Place, candidate: object) -> None:
    found = prove(place.storage, place.root, candidate, 0)
    assert isinstance(found, ProvenShard), found


if __name__ == "__main__":
    main()
