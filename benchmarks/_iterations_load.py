"""One rank of the loading part of ``iterations.py``: it loads a checkpoint of eight ranks as one of
a job of four.

    python _iterations_load.py built-in|ours RANK MIB

One JSON line per task on standard input, {"root", "first", "prove", "plain"}. It answers "ready",
waits for a line, loads, and answers with one JSON line: {"seconds", "anonymous": peak MiB above
that before, "read": bytes, "parameters": bytes of this rank}. ``first``: what arrived is compared,
and with the built-in, which maps its files, the pages that it touched are counted; that takes time.
``prove``: ours also proves its share of the files, as a resume does when it chooses; "proof" are
the seconds of that alone. ``plain`` (ours): nothing but reading.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TextIO
from unittest import mock

import _iterations_job as job
from _iterations_job import builtin
from _reshard_job import Peak

from mindresume.formats import CheckpointDir

SOURCE, TARGET = (2, 4), (2, 2)  # data x tensor
RANKS = TARGET[0] * TARGET[1]


class Ours:
    """Loads as mindresume.mindformers.loading does."""

    def __init__(self, optimizer: Any, strategies: job.Strategies, rank: int):
        self.optimizer = optimizer
        self.strategies = strategies
        self.rank = rank

    def load(self, root: str) -> int:
        from mindresume.formats.scan import scan
        from mindresume.mindformers import adapter
        from mindresume.mindformers.network_state import strategy_layouts
        from mindresume.reshard.range_reader import Traffic
        from mindresume.reshard.region_load import LoadTarget, read_regions, wanted_regions
        from mindresume.reshard.step_view import view_of_iteration
        from mindresume.storage.posix import PosixStorage

        storage, traffic = PosixStorage(), Traffic()
        weights = view_of_iteration(
            CheckpointDir(storage, root), scan(CheckpointDir(storage, root)).candidates[0]
        )
        wanted = adapter.parameters_to_load(self.optimizer)
        shapes = {name: shape for name, (shape, _) in wanted.items()}
        layouts = strategy_layouts(self.strategies.of_rank[self.rank], shapes, print)
        arrays = read_regions(
            weights,
            wanted_regions(weights, LoadTarget(wanted, layouts), self.rank),
            traffic=traffic,
        )
        left, _ = adapter.load_into(self.optimizer, arrays)
        if left:
            raise SystemExit(f"{len(left)} parameters got no value, for example {left[0]}")
        return traffic.read

    def plain(self, root: str) -> int:
        """Reads as many bytes of the files into as many new arrays."""
        import numpy as np

        from mindresume.mindformers import adapter

        path = max(
            (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names),
            key=os.path.getsize,
        )
        total = 0
        size = os.path.getsize(path)
        position = 0
        with open(path, "rb", buffering=0) as file:
            arrays = []
            for shape, dtype in adapter.parameters_to_load(self.optimizer).values():
                arrays.append(np.empty(shape, dtype))
                left = memoryview(arrays[-1].reshape(-1).view(np.uint8))
                while left:
                    position = 0 if position == size else position
                    found = os.preadv(file.fileno(), [left], position)
                    position = position + found
                    left = left[found:]
                    total = total + found
        return total

    def prove(self, root: str) -> None:
        """The files of the source ranks that fall to this one."""
        from mindresume.formats.scan import scan
        from mindresume.resume.verifier import VerifiedShard, Verifier
        from mindresume.storage.posix import PosixStorage

        storage = PosixStorage()
        candidate = scan(CheckpointDir(storage, root)).candidates[0]
        for source in range(self.rank, candidate.world_size, RANKS):
            found = Verifier(CheckpointDir(storage, root), candidate).verify(source)
            if not isinstance(found, VerifiedShard):
                raise SystemExit(f"the checkpoint just written is refused: {found}")


class BuiltIn:
    def __init__(self, network: Any, optimizer: Any):
        self.network, self.optimizer = network, optimizer

    def load(self, root: str) -> int:
        from mindformers.checkpoint.checkpoint import load_checkpoint

        load_checkpoint(root, self.network, self.optimizer)
        return 0


@contextmanager
def mapped_counted() -> Iterator[list[int]]:
    """[bytes of the pages touched in the files that MindSpore maps], right after the block."""
    from mindspore.parallel import data_access_adapter

    found = [0]

    class Counted(mmap.mmap):
        path = ""

        def __new__(cls, handle: int, length: int, **options: Any) -> Any:
            made = super().__new__(cls, handle, length, **options)
            made.path = os.readlink(f"/proc/self/fd/{handle}")
            return made

        def __del__(self) -> None:
            found[0] += touched(self.path)

    with mock.patch.object(
        data_access_adapter, "mmap", SimpleNamespace(mmap=Counted, ACCESS_COPY=mmap.ACCESS_COPY)
    ):
        yield found
    gc.collect()
    found[0] += touched(".safetensors")


def touched(path: str) -> int:
    """Bytes in memory of this process's mappings of files whose name ends so."""
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0] and not line.split(" ", 1)[0].endswith(":"):
                inside = line.rstrip().endswith(path)
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) << 10
    return total


def characters_read() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def main() -> None:
    kind = sys.argv[1]
    rank = int(sys.argv[2])
    mib = int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # MindSpore prints

    tensors = job.model(mib, *TARGET)
    spec = job.spec_of(tensors)
    strategies = job.Strategies(spec, RANKS)
    network, optimizer = job.cells_of(spec, tensors, rank, values=False)
    work = Ours(optimizer, strategies, rank) if kind == "ours" else BuiltIn(network, optimizer)
    with builtin.as_rank(rank, RANKS, spec), strategies.patched(rank):
        for line in iter(sys.stdin.readline, ""):
            print(
                json.dumps(one(work, json.loads(line), tensors, optimizer, rank, answers)),
                file=answers,
                flush=True,
            )


def one(
    work: Ours | BuiltIn,
    task: dict[str, Any],
    tensors: job.Model,
    optimizer: Any,
    rank: int,
    answers: TextIO,
) -> dict[str, Any]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    proof = 0.0
    if task["prove"]:
        started = time.perf_counter()
        work.prove(task["root"])
        proof = time.perf_counter() - started
    # no rank collects garbage, or proves, while another one loads
    print("ready", file=answers, flush=True)
    sys.stdin.readline()
    before = characters_read()
    if task["first"] and isinstance(work, BuiltIn):
        with mapped_counted() as mapped:
            work.load(task["root"])
        measured = {"read": characters_read() - before + mapped[0]}
    else:
        with Peak() as peak:
            started = time.perf_counter()
            read = (work.plain if task["plain"] else work.load)(task["root"])
            seconds = time.perf_counter() - started
        measured = {
            "seconds": seconds,
            "anonymous": peak.mib,
            "read": read,
            "rchar": characters_read() - before,
            "proof": proof,
        }
    if task["first"] and not task["plain"]:
        check(tensors, optimizer, rank)
    return {**measured, "parameters": job.held(tensors), "mapped": touched(".safetensors")}


def check(tensors: job.Model, optimizer: Any, rank: int) -> None:
    parameters = optimizer.parameters_dict()
    for name in tensors:
        if parameters[name].asnumpy().tobytes() != job.part(tensors, name, rank).tobytes():
            raise SystemExit(f"rank {rank}: {name} is wrong")


if __name__ == "__main__":
    main()
