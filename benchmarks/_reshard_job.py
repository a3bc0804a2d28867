"""One candidate of ``reshard.py`` in a process of its own, so that its memory can be measured:
reads one JSON line per task from standard input, answers with one line: {"seconds", "anonymous":
peak MiB above that before, "read"}.

    python _reshard_job.py direct|transform|unified|copy
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from mindresume.formats.strategy import read_strategy
from mindresume.reshard.conversion_plan import to_consolidated, to_ranks
from mindresume.reshard.converter import Conversion
from mindresume.reshard.direct_engine import Engine
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.range_reader import Traffic
from mindresume.storage import posix
from mindresume.storage.posix import PosixStorage

STEP = 0.005  # seconds between two looks at the memory
COPY = 4 << 20


def anonymous() -> int:
    """Bytes of this process and all its children that no file backs."""
    total, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        try:
            with open(f"/proc/{pid}/status") as file:
                total += next(
                    (int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon")), 0
                )
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    todo += map(int, file.read().split())
        except OSError:
            continue
    return total


class Peak:
    def __enter__(self) -> Peak:
        self.before = self.most = anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(STEP):
            self.most = max(self.most, anonymous())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.mib = (self.most - self.before) / 2**20


def direct(task: dict[str, Any]) -> dict[str, Any]:
    """Everything from opening the source to the target. ``flush`` False: the disk is not asked to
    write, as with MindSpore."""
    storage, traffic = PosixStorage(), Traffic()
    if not task["flush"]:
        os.fsync = lambda handle: None
        posix._begin_flush = lambda *rest: None
    source = open_checkpoint(storage, task["source"], strategy=task["from"])
    job = (
        to_ranks(source, read_strategy(task["to"]), "safetensors")
        if task["to"]
        else to_consolidated(source, "mindspore")
    )
    conversion = Conversion(storage, job, task["target"])
    conversion.run(Engine(workers=task["workers"], traffic=traffic))
    return {"read": traffic.read}


def transform(task: dict[str, Any]) -> dict[str, Any]:
    import mindspore as ms

    os.makedirs(task["target"])
    ms.transform_checkpoints(
        task["source"],
        task["target"],
        "net",
        task["merged_from"],
        task["merged_to"],
        output_format="safetensors",
    )
    return {}


def unified(task: dict[str, Any]) -> dict[str, Any]:
    import mindspore as ms

    middle = task["target"] + "-unified"
    ms.unified_safetensors(task["source"], task["merged_from"], middle)
    if task["to"]:
        ms.load_distributed_checkpoint(
            network=None,
            predict_strategy=task["merged_to"],
            format="safetensors",
            unified_safetensors_dir=middle,
            dst_safetensors_dir=task["target"],
        )
    return {}


def copy(task: dict[str, Any]) -> dict[str, Any]:
    """The bytes of the target, from the source to new files: reads and writes of 4 MiB in one
    thread."""
    buffer = memoryview(bytearray(COPY))
    for folder, _, names in os.walk(task["source"]):
        for name in names:
            path = os.path.join(folder, name)
            target = os.path.join(task["target"], os.path.relpath(path, task["source"]))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(path, "rb", buffering=0) as old, open(target, "wb", buffering=0) as new:
                while count := old.readinto(buffer):
                    new.write(buffer[:count])
                if task["flush"]:
                    os.fsync(new.fileno())
    return {}


def main() -> None:
    work = {"direct": direct, "transform": transform, "unified": unified, "copy": copy}[sys.argv[1]]
    if sys.argv[1] in ("transform", "unified"):
        import mindspore  # noqa: F401  not part of what is measured
    print("ready", file=sys.stderr, flush=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # MindSpore prints
    for line in sys.stdin:
        task = json.loads(line)
        with Peak() as peak:
            started = time.perf_counter()
            result = work(task)
            seconds = time.perf_counter() - started
        answers.write(json.dumps({"seconds": seconds, "anonymous": peak.mib, **result}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
