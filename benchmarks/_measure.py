"""What the benchmarks share: interleaved rounds, medians and ratios, the machine, and Markdown.

    rounds = Rounds()
    for number in rounds.numbers(7):                    # one more that does not count, to warm up
        rounds.timed("plain", lambda: write(...))       # seconds
        rounds.timed("ours", lambda: save(...))
    # the median of the ratios within the rounds
    rounds.median("ours"); rounds.ratio("ours", "plain")

Ratios are taken within a round, because a shared machine drifts. Nothing is kept between two runs.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import numpy as np

PACKAGES = ("numpy", "xxhash", "safetensors", "mindspore", "mindformers")


class Rounds:
    """Numbers by name, one a round. The round 0 warms up and is forgotten."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.loads: list[float] = []
        self._counts = False

    def numbers(self, rounds: int) -> Iterator[int]:
        for number in range(rounds + 1):
            self._counts = number > 0
            if self._counts:
                self.loads.append(os.getloadavg()[0])
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
            yield number

    def add(self, name: str, value: float) -> None:
        if self._counts:
            self.values.setdefault(name, []).append(value)

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        self.add(name, time.perf_counter() - started)
        return result

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def ratio(self, name: str, base: str) -> float:
        return statistics.median(self.ratios(name, base))

    def ratios(self, name: str, base: str) -> list[float]:
        return [
            value / other for value, other in zip(self.values[name], self.values[base], strict=True)
        ]

    def spread(self, name: str, base: str) -> str:
        """Smallest and largest ratio of a round."""
        found = self.ratios(name, base)
        return f"{min(found):.2f} to {max(found):.2f}"

    def load(self) -> str:
        return f"{min(self.loads):.1f} to {max(self.loads):.1f}" if self.loads else "not measured"


def shuffled(works: list[Callable[[], Any]], number: int) -> list[Callable[[], Any]]:
    """Another order in every round, the same in every run: what follows what must not decide."""
    return random.Random(number).sample(works, len(works))


def warm_memory(size: int) -> None:
    """Makes the kernel's free memory fast again. The first touch of a page that a virtual machine
    has given back to its host costs several times what writing a file costs, and would hit
    whichever candidate comes along."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(memory, np.uint8)
    ctypes.memset(view.ctypes.data, 1, size)
    del view
    memory.close()


def arrays(mib: int, tensor_mib: int = 16) -> dict[str, np.ndarray]:
    """``mib`` MiB of weights, half float32 and half bfloat16 by bytes, in tensors of
    ``tensor_mib``, with random values."""
    import ml_dtypes

    generator, found = np.random.default_rng(0), {}
    for index in range(max(2, mib // tensor_mib)):
        values = generator.standard_normal((tensor_mib << 20) // 4, np.float32).reshape(-1, 2048)
        name = f"model.layers.{index}.weight"
        # the upper half of a float32 is a bfloat16: no conversion needed
        found[name] = (
            values
            if index % 2 == 0
            else values.view(np.uint16)[:, 1::2].repeat(2, axis=0).view(ml_dtypes.bfloat16)
        )
    return found


def parameters(table: dict[str, np.ndarray]) -> list[tuple[str, Any]]:
    """The same values as live MindSpore parameters on the CPU."""
    import mindspore as ms

    found = []
    for name, array in table.items():
        value = ms.Parameter(
            ms.Tensor(array.view(np.int16)).view(ms.bfloat16)
            if array.dtype.itemsize == 2
            else ms.Tensor(array),
            name=name,
        )
        # the first access moves the bytes; training has done so long before it saves
        value.asnumpy()
        found.append((name, value))
    return found


def size_of(table: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in table.values())


# ---- the machine and the output ------------------------------------------------------------------


def machine(folder: str) -> dict[str, str]:
    return {
        "cores": f"{os.cpu_count()} x "
        f"{_field('/proc/cpuinfo', 'model name') or platform.machine()}",
        "memory": f"{int((_field('/proc/meminfo', 'MemTotal') or '0').split()[0]) / 2**20:.0f} GiB",
        "file system": _file_system(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def _field(path: str, name: str) -> str:
    try:
        with open(path) as file:
            return next(
                (line.partition(":")[2].strip() for line in file if line.startswith(name)), ""
            )
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _file_system(folder: str) -> str:
    """Returns type and options of the mount of ``folder``."""
    real = os.path.realpath(folder)
    best = ""
    found = "unknown"
    with open("/proc/mounts") as file:
        for line in file:
            _, point, kind, options, *_ = line.split()
            if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(
                best
            ):
                best, found = point, f"{kind} ({options})"
    return found


def heading(folder: str, load: str) -> str:
    parts = ", ".join(f"{name} {value}" for name, value in machine(folder).items())
    command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return f"`{command}`\n\n{parts}; load average while it ran: {load}\n"


def table(columns: list[str], rows: list[list[str]]) -> str:
    return (
        "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])
        + "\n"
    )


def finish(
    title: str,
    folder: str,
    rounds: Rounds,
    text: str,
    path: str | None,
    more: dict[str, Any] | None = None,
) -> None:
    """Prints everything; ``path``: also the single measurements, as JSON."""
    print(f"## {title}\n\n{heading(folder, rounds.load())}\n{text}")
    if path:
        with open(path, "w") as file:
            json.dump(
                {
                    "title": title,
                    "command": sys.argv,
                    "machine": machine(folder),
                    "loads": rounds.loads,
                    "rounds": rounds.values,
                    **(more or {}),
                },
                file,
                indent=1,
            )
