"""Parts of ``background.py`` that need a process of their own: memory (nothing else may live there)
and speed (one BLAS thread).

    python _background_job.py memory thread|process|"mindspore thread"|"mindspore process" FOLDER MIB FORMAT SAVES ROUNDS
    python _background_job.py speed all FOLDER MIB FORMAT SAVES ROUNDS

The last line of the output is JSON.
"""  # noqa: E501

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import _measure as measure
import numpy as np

from mindresume.formats.rank_folders import FileName
from mindresume.mindformers.network_state import deferred
from mindresume.model.training_state import TrainingState
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import Save, SaveTarget, rank_shard
from mindresume.storage.posix import PosixStorage

KINDS = ("thread", "process")
PATIENCE = 600.0
STEP, QUIET = 0.01, 1.0  # seconds


def place_in(root: str) -> SaveTarget:
    os.makedirs(root)
    return SaveTarget(PosixStorage(), root, "0001-00000000", 0, 1)


def save_of(tensors: Mapping[str, Any], step: int, fmt: str) -> Save:
    return Save(
        rank_shard(
            FileName("bench", 0, 0, 1, step, fmt), TrainingState(step, 1_000_000, step), tensors
        )
    )


def built_in(live: list[tuple[str, Any]], path: str, kind: str | bool, fmt: str) -> None:
    import mindspore as ms

    ms.save_checkpoint(
        [{"name": name, "data": value} for name, value in live], path, async_save=kind, format=fmt
    )


def wait_for_built_in() -> None:
    for writer in (*threading.enumerate(), *multiprocessing.active_children()):
        if writer.name == "asyn_save_ckpt":
            writer.join()


# ---- memory --------------------------------------------------------------------------------------


def memory(kind: str, root: str, mib: int, fmt: str, saves: int) -> dict[str, Any]:
    live = measure.parameters(measure.arrays(mib))
    size = sum(tensor.nbytes for tensor in deferred(live).values())
    measure.warm_memory(3 * size)
    saver = AsyncSaver(place_in(f"{root}/saves"), KeepLast(1), kind) if kind in KINDS else None
    # what it allocates and frees at its first save, whatever the kind, is not asked for
    if saver is None:
        built_in(live, f"{root}/built_in.{fmt}", False, fmt)
    gc.collect()
    before = sum(footprint().values())
    after = []
    stops = []
    seen = Peak()
    for step in range(1, saves + 1):
        started = time.perf_counter()
        if saver is not None:
            saver.save(save_of(deferred(live), step, fmt))
        else:
            built_in(live, f"{root}/built_in.{fmt}", kind.removeprefix("mindspore "), fmt)
        stops.append(time.perf_counter() - started)
        if saver is None:
            wait_for_built_in()
        elif any(not outcome.saved or outcome.error for outcome in saver.wait(PATIENCE)):
            raise SystemExit(f"step {step} was not saved")
        after.append(sum(footprint().values()))
    peak, own = seen.stop()
    if saver is not None:
        saver.finish(PATIENCE)
    return {
        "bytes": size,
        "before": before,
        "after": after,
        "peak": peak,
        "writer": own,
        "stops": stops,
    }


class Peak:
    """Samples the memory of this process and its children fifty times a second."""

    def __init__(self) -> None:
        self._largest = self._own = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            found = footprint()
            self._largest = max(self._largest, sum(found.values()))
            self._own = max([self._own, *(anonymous(pid) for pid in found if pid != os.getpid())])

    def stop(self) -> tuple[int, int]:
        """Largest sum, and most anonymous memory of a child, in bytes."""
        self._end.set()
        self._thread.join()
        return self._largest, self._own


def footprint() -> dict[int, int]:
    """Returns anonymous and shared memory of this process and its children in bytes: the
    proportional set size, so that a shared page counts once in the sum, without that of files
    (libraries), which other processes of the machine change."""
    return {pid: anonymous(pid) + _rollup(pid, "Pss_Shmem:") for pid in (os.getpid(), *_children())}


def anonymous(pid: int) -> int:
    return _rollup(pid, "Pss_Anon:")


def _rollup(pid: int, field: str) -> int:
    # it may just have ended
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(field))
    return 0


def _children() -> list[int]:
    found = []
    for task in os.listdir("/proc/self/task"):
        with (
            suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/self/task/{task}/children") as file,
        ):
            found += map(int, file.read().split())
    return found


# ---- speed ---------------------------------------------------------------------------------------


def speed(root: str, mib: int, fmt: str, rounds: int) -> dict[str, Any]:
    table = measure.arrays(mib)
    live, size = measure.parameters(table), measure.size_of(table)
    savers = {kind: AsyncSaver(place_in(f"{root}/{kind}"), KeepLast(1), kind) for kind in KINDS}
    loops = {"python": python_step(), "matmul": matmul_step()}
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    step = 0
    for number in measure.Rounds().numbers(rounds):
        works = [
            (writer, loop)
            for writer in ("nothing", *KINDS, *(f"mindspore {kind}" for kind in KINDS))
            for loop in loops
        ]
        for writer, loop in measure.shuffled(works, number):
            os.sync()
            measure.warm_memory(3 * size)
            step += 1
            until = time.perf_counter() + QUIET
            quiet = run(loops[loop], lambda until=until: time.perf_counter() < until)
            busy = begin(writer, savers, live, table, f"{root}/built_in.{fmt}", fmt, step)
            with_save = run(loops[loop], busy)
            for saver in savers.values():
                saver.wait(PATIENCE)
            wait_for_built_in()
            if number:
                found.setdefault(f"{writer}, {loop}", []).append(
                    (with_save[0] / quiet[0], quiet[1], with_save[1], with_save[2])
                )
    for saver in savers.values():
        saver.finish(PATIENCE)
    return {
        "step": STEP,
        "rates": {name: summary(values) for name, values in sorted(found.items())},
    }


def summary(values: list[tuple[float, float, float, float]]) -> dict[str, Any]:
    ratios, quiet_longest, longest, seconds = zip(*values, strict=True)
    return {
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "seconds": statistics.median(seconds),
        "quiet_longest": statistics.median(quiet_longest),
        "longest": statistics.median(longest),
        "ratios": ratios,
    }


def begin(
    writer: str,
    savers: Mapping[str, AsyncSaver],
    live: list[tuple[str, Any]],
    table: Mapping[str, np.ndarray],
    path: str,
    fmt: str,
    step: int,
) -> Callable[[], bool]:
    """Starts a save; the answer is whether it is still being written."""
    if writer == "nothing":
        until = time.perf_counter() + QUIET
        return lambda: time.perf_counter() < until
    if writer in KINDS:
        savers[writer].save(save_of(table, step, fmt))
        return savers[writer].busy
    built_in(live, path, writer.removeprefix("mindspore "), fmt)
    return lambda: any(
        one.name == "asyn_save_ckpt" and one.is_alive()
        for one in (*threading.enumerate(), *multiprocessing.active_children())
    )


def run(work: Callable[[], None], goes_on: Callable[[], bool]) -> tuple[float, float, float]:
    """Steps a second, the longest step and all of the time in seconds. ``goes_on`` is asked after
    each step, as a callback is."""
    count = 0
    longest = 0.0
    begun = time.perf_counter()
    last = begun
    while True:
        work()
        going = goes_on()
        count = count + 1
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        if not going:
            return count / (now - begun), longest, now - begun


def python_step() -> Callable[[], None]:
    """Holds Python's lock all the time."""
    return _of_length(lambda: sum(index * index for index in range(2000)))


def matmul_step() -> Callable[[], None]:
    """Gives Python's lock away while it multiplies."""
    left, right = (
        np.random.default_rng(seed).standard_normal((256, 256), np.float32) for seed in (1, 2)
    )
    out = np.empty_like(left)
    return _of_length(lambda: np.matmul(left, right, out=out))


def _of_length(work: Callable[[], Any]) -> Callable[[], None]:
    """Returns as many repetitions of ``work`` as take STEP seconds here."""
    work()
    times = []
    for _ in range(50):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    repetitions = max(1, round(STEP / statistics.median(times)))

    def repeated() -> None:
        for _ in range(repetitions):
            work()

    return repeated


def main() -> None:
    part, kind, root, mib, fmt, saves, rounds = sys.argv[1:]
    found = (
        memory(kind, root, int(mib), fmt, int(saves))
        if part == "memory"
        else speed(root, int(mib), fmt, int(rounds))
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
