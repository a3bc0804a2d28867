"""What rank 0 does alone for thousands of ranks: operations of the file system, and seconds, also
on one that is slow to answer.

    python benchmarks/many_ranks.py [--ranks 8192] [--delay 0.002] [--format safetensors iteration]
    [--json FILE]

commit      the records of all ranks are there: check them, manifest, pointers; nothing is removed
prune       the next commit, with which the step before is removed
choice      a resume of as many ranks: rank 0's part, and the proof of its own file mindformers the
            same of a folder that mindformers wrote: no records, a meta.json in every rank folder
clean-up    the next run removes a save that died with all its weights and none of its records

The disk is the one of ``sim`` (in memory), so that all seconds are ours but ``delay``, which every
operation really waits in its thread, as for a metadata server; as many wait side by side as the
seam says (``width``). Bars: a commit of 8,192 ranks within 5 s, a choice within 3 s, with 2 ms an
operation.
"""  # noqa: E501

from __future__ import annotations

import argparse
import io
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mindresume.formats.rank_folders import META, FileName, folder_name, meta_json
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import FOLDER, attempt_name, run_name, trash_name
from mindresume.model.training_state import TrainingState
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.shard_writer import (
    SaveTarget,
    Shard,
    iteration_shard,
    rank_shard,
    write_shard,
)
from mindresume.storage import UNKNOWN_SPACE, Status
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import encode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # sim is not installed
from sim.disk import Disk, File, Folder

ROOT = "/c"
RUN = run_name(1, "00000000")
PER_EPOCH = 1000
ACTIONS = ("commit", "prune", "choice", "mindformers", "clean-up")


class Slow:
    """A ``Storage`` on a disk in memory that counts, and answers after ``delay`` seconds."""

    width = PosixStorage.width

    def __init__(self, disk: Disk, delay: float = 0.0):
        self.disk, self.delay = disk, delay
        self.done: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _do(self, name: str, act: Callable[[], Any]) -> Any:
        if self.delay:
            time.sleep(self.delay)
        with self._lock:
            self.done[name] += 1
            return act()

    def list(self, folder: str) -> list[str]:
        def act() -> list[str]:
            node = self.disk.find(folder)
            return sorted(node.entries) if isinstance(node, Folder) else []

        return self._do("list", act)

    def status(self, path: str) -> Status | None:
        def act() -> Status | None:
            node = self.disk.find(path)
            if node is None:
                return None
            return (
                Status(len(node.data), node.mtime, False)
                if isinstance(node, File)
                else Status(0, node.mtime, True)
            )

        return self._do("status", act)

    def open(self, path: str) -> BinaryIO:
        def act() -> BinaryIO:
            node = self.disk.find(path)
            if not isinstance(node, File):
                raise FileNotFoundError(2, "No such file", path)
            return io.BytesIO(node.data)

        return self._do("open", act)

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        data = b"".join(pieces)
        self._do("write", lambda: self.disk.create(path, data))
        return len(data)

    def rename(self, old: str, new: str) -> None:
        self._do("rename", lambda: self.disk.rename(old, new))

    def sync(self, folder: str) -> None:
        self._do("flush", lambda: self.disk.sync(folder))

    def remove(self, path: str) -> None:
        def act() -> None:
            with suppress(FileNotFoundError):
                self.disk.remove(path)

        self._do("remove", act)

    def make_folder(self, path: str) -> None:
        def act() -> None:
            at = ""
            for name in path.split("/")[1:]:
                at = f"{at}/{name}"
                self.disk.make_folder(at)

        self._do("make_folder", act)

    def free_space(self, folder: str) -> int:
        return UNKNOWN_SPACE


class First:
    """Rank 0 of a group whose other ranks agree with it."""

    rank = 0

    def __init__(self, size: int):
        self.size = size

    def broadcast(self, message: bytes) -> bytes:
        return message

    def gather(self, message: bytes) -> list[bytes]:
        return [message] * self.size


def shard_of(target: SaveTarget, step: int, fmt: str) -> Shard:
    state = TrainingState(step, PER_EPOCH, step, 8)
    arrays = {"w": np.full((1, 4), step, np.float32)}
    if not target.iterations:
        return rank_shard(
            FileName("net", target.rank, 0, 1, step, fmt),
            state,
            arrays,
            random={},
            metadata={"format": "ms"},
        )
    cut = TensorLayout((target.world_size,), (0, -1)), (target.world_size, 4)
    return iteration_shard(
        "net", target, state, arrays, {"adam_m.w": arrays["w"]}, {"w": cut, "adam_m.w": cut}, {}
    )


class Bench:
    def __init__(self, ranks: int, fmt: str, delay: float):
        self.ranks = ranks
        self.format = fmt
        self.delay = delay
        self.disk = Disk()
        self.disk.make_folder(ROOT)

    def target(self, storage: Slow, rank: int) -> SaveTarget:
        return SaveTarget(storage, ROOT, RUN, rank, self.ranks, self.format == "iteration")

    def saved(self, step: int) -> None:
        """Saves as all ranks, without a commit."""
        fast = Slow(self.disk)
        for rank in range(self.ranks):
            target = self.target(fast, rank)
            write_shard(target, shard_of(target, step, self.format))

    def row(self, action: str) -> dict[str, Any]:
        storage = Slow(self.disk, self.delay)
        started = time.perf_counter()
        getattr(self, "_" + action.replace("-", "_"))(storage)
        seconds = time.perf_counter() - started
        return {
            "action": action,
            "format": self.format,
            "ranks": self.ranks,
            "delay": self.delay,
            "seconds": seconds,
            "operations": sum(storage.done.values()),
            "of": dict(storage.done),
        }

    def _commit(self, storage: Slow) -> None:
        committer = Committer(self.target(storage, 0), KEEP_ALL, print)
        committer.poll(10)
        assert committer.committed == [10]

    def _prune(self, storage: Slow) -> None:
        committer = Committer(self.target(storage, 0), KeepLast(1), lambda text: None)
        committer._has_single_meta = True  # behind the first commit of a run
        committer.poll(20)
        assert committer.committed == [20] and not self.disk.find(
            f"{ROOT}/{FOLDER}/{attempt_name(10, RUN)}"
        )

    def _choice(self, storage: Slow) -> None:
        choice = select_checkpoint(storage, ROOT, First(self.ranks), SelectionPolicy(self.ranks))
        assert choice.chosen is not None and choice.chosen.step == 20

    def _mindformers(self, storage: Slow) -> None:
        choice = select_checkpoint(storage, ROOT, First(self.ranks), SelectionPolicy(self.ranks))
        assert choice.chosen is not None and choice.chosen.step == 20 and choice.chosen.run is None

    def _clean_up(self, storage: Slow) -> None:
        Committer(self.target(storage, 0), KeepLast(1), print).prune()

    def as_mindformers_writes(self) -> None:
        """Weights and a meta.json in every rank folder, and no records."""
        state = {
            "step_num": np.array(20, np.int64),
            "epoch_num": np.array(1, np.int64),
            "w": np.ones((1, 4), np.float32),
        }
        data = b"".join(bytes(piece) for _, piece in encode("safetensors", state, {"format": "ms"}))
        for rank in range(self.ranks):
            name = FileName("net", rank, 0, 1, 20, "safetensors")
            folder = f"{ROOT}/{folder_name(rank)}"
            self.disk.make_folder(folder)
            self.disk.create(f"{folder}/{name}", data)
            self.disk.create(f"{folder}/{META}", json.dumps(meta_json(name)).encode())

    def without_records(self) -> None:
        """A removal of step 20 was begun, and its records are damaged: only the names of its files
        tell which they are."""
        records = f"{ROOT}/{FOLDER}/{attempt_name(20, RUN)}"
        node = self.disk.folder(records)
        for name in list(node.entries):
            self.disk.create(f"{records}/{name}", b"damaged")
        self.disk.rename(records, f"{ROOT}/{FOLDER}/{trash_name(attempt_name(20, RUN))}")


def measured(ranks: int, fmt: str, delay: float) -> list[dict[str, Any]]:
    bench = Bench(ranks, fmt, delay)
    bench.saved(10)
    rows = [bench.row("commit")]
    bench.saved(20)
    rows += [bench.row("prune"), bench.row("choice")]
    if fmt != "iteration":
        bench.without_records()
        rows.append(bench.row("clean-up"))
        bench = Bench(ranks, fmt, delay)
        bench.as_mindformers_writes()
        rows.append(bench.row("mindformers"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8192)
    parser.add_argument("--delay", type=float, default=0.002, help="seconds an operation")
    parser.add_argument("--format", nargs="+", default=["safetensors", "iteration"])
    parser.add_argument("--json")
    asked = parser.parse_args()
    delays = dict.fromkeys((0.0, asked.delay))
    rows = [
        row for fmt in asked.format for delay in delays for row in measured(asked.ranks, fmt, delay)
    ]
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(rows, file)
    print(
        f"| format | rank 0's part | operations | seconds | with {asked.delay * 1000:g} ms an "
        "operation |"
    )
    print("|---|---|---|---|---|")
    for row in [row for row in rows if not row["delay"]]:
        slow = next(
            (
                other
                for other in rows
                if other["delay"]
                and (other["format"], other["action"]) == (row["format"], row["action"])
            ),
            row,
        )
        print(
            f"| {row['format']} | {row['action']} | {row['operations']} | {row['seconds']:.1f} | "
            f"{slow['seconds']:.1f} |"
        )


if __name__ == "__main__":
    main()
