"""Saving behind the training: how long the training stands still, how much memory it takes, how
much it slows the training.

    python benchmarks/background.py [--mib 1024] [--rounds 7] [--saves 10] [--format
    safetensors|ckpt]
                                    [--dir FOLDER] [--json FILE] [--only stop|memory|speed]

copy              np.copyto of the same tensors into memory that was written before: the limit of
                  any background save
background        mindresume.saving.async_saver.AsyncSaver, "live": MindSpore parameters as the
                  plugin has them, "numpy": arrays
synchronous       mindresume.saving.committer.SyncSaver: written, flushed, committed before it
                  returns
mindspore         mindspore.save_checkpoint(async_save="thread"; True means the same, or "process")

Half of the bytes are float32, half bfloat16. Targets: at most 1.3 times the copy and 10 % of the
synchronous save; at most one times the bytes of memory, and none after the first save.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import _measure as measure
import numpy as np
from _background_job import KINDS, built_in, place_in, save_of, wait_for_built_in

from mindresume.mindformers.network_state import deferred
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import SyncSaver
from mindresume.saving.retention import KeepLast

COPIES = 1.3
SHARE = 0.10
MEMORY = 1.0
PATIENCE = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--saves", type=int, default=10, help="in the measurement of memory")
    parser.add_argument("--format", default="safetensors", choices=["safetensors", "ckpt"])
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    parser.add_argument("--only", choices=["stop", "memory", "speed"])
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-background-", dir=options.dir)
    rounds = measure.Rounds()
    texts = []
    more = {}
    try:
        if options.only in (None, "memory"):
            more["memory"] = memory(folder, options)
            texts.append(memory_text(more["memory"]))
        if options.only in (None, "speed"):
            more["speed"] = job(folder, "speed", "all", options, OPENBLAS_NUM_THREADS="1")
            texts.append(speed_text(more["speed"]))
        if options.only in (None, "stop"):
            stop = Stop(folder, options.mib, options.format, rounds)
            stop.run(options.rounds)
            texts.insert(0, stop.text())
        measure.finish(
            f"Saving {options.mib} MiB behind the training, {options.format}, {options.rounds} "
            "rounds",
            folder,
            rounds,
            "\n".join(texts),
            options.json,
            more,
        )
    finally:
        shutil.rmtree(folder)


# ---- stall of the training -----------------------------------------------------------------------


class Stop:
    def __init__(self, folder: str, mib: int, fmt: str, rounds: measure.Rounds):
        self.folder = os.path.join(folder, "stop")
        self.fmt = fmt
        self.rounds = rounds
        self.step = 0
        self.arrays = measure.arrays(mib)
        self.live = measure.parameters(self.arrays)
        self.size = measure.size_of(self.arrays)
        self.buffer = np.ones(self.size, np.uint8)
        self.savers: dict[str, Any] = {
            kind: AsyncSaver(place_in(f"{self.folder}/{kind}"), KeepLast(1), kind) for kind in KINDS
        }
        self.savers["synchronous"] = SyncSaver(place_in(f"{self.folder}/synchronous"), KeepLast(1))

    def run(self, rounds: int) -> None:
        for number in self.rounds.numbers(rounds):
            works: list[Callable[[], Any]] = [self.copy, partial(self.save, "synchronous", "live")]
            for kind in KINDS:
                works += [
                    partial(self.save, kind, "live"),
                    partial(self.save, kind, "numpy"),
                    partial(self.built_in, kind),
                ]
            for work in measure.shuffled(works, number):
                os.sync()
                measure.warm_memory(3 * self.size)
                work()
        for saver in self.savers.values():
            saver.finish(PATIENCE)

    def copy(self) -> None:
        def work() -> None:
            position = 0
            for array in self.arrays.values():
                np.copyto(
                    self.buffer[position : position + array.nbytes],
                    array.reshape(-1).view(np.uint8),
                )
                position += array.nbytes

        self.rounds.timed("copy", work)

    def save(self, kind: str, what: str) -> None:
        self.step += 1
        saver, step = self.savers[kind], self.step
        self.rounds.timed(
            f"{kind}, {what}", lambda: saver.save(save_of(self.tensors(what), step, self.fmt))
        )
        (outcome,) = saver.wait(PATIENCE)
        if not outcome.saved or outcome.error is not None:
            raise SystemExit(f"{kind}: {outcome.error}")
        self.rounds.add(f"{kind}, {what}: written", outcome.seconds)

    def tensors(self, what: str) -> Mapping[str, Any]:
        return deferred(self.live) if what == "live" else self.arrays

    def built_in(self, kind: str) -> None:
        path = os.path.join(self.folder, f"built_in.{self.fmt}")
        self.rounds.timed(f"mindspore, {kind}", lambda: built_in(self.live, path, kind, self.fmt))
        wait_for_built_in()
        os.remove(path)

    def text(self) -> str:
        rows = []
        for name in (
            "copy",
            *(f"{kind}, {what}" for kind in KINDS for what in ("live", "numpy")),
            "synchronous, live",
            *(f"mindspore, {kind}" for kind in KINDS),
        ):
            copies = self.rounds.ratio(name, "copy")
            share = self.rounds.ratio(name, "synchronous, live")
            ours = name.startswith(KINDS)
            written = (
                f"{self.rounds.median(f'{name}: written'):.2f}"
                if f"{name}: written" in self.rounds.values
                else ""
            )
            rows.append(
                [
                    f"background {name}" if ours else name,
                    f"{self.rounds.median(name):.4f}",
                    f"{copies:.2f}",
                    self.rounds.spread(name, "copy"),
                    f"{100 * share:.1f} %",
                    written,
                    ("met" if copies <= COPIES and share <= SHARE else "missed") if ours else "",
                ]
            )
        return "How long the training stands still:\n\n" + measure.table(
            [
                "what",
                "stop, median s",
                "ratio to the copy",
                "ratios of the rounds",
                "of the synchronous save",
                "writing, s",
                f"targets {COPIES} and {100 * SHARE:.0f} %",
            ],
            rows,
        )


# ---- memory and speed, in processes of their own -------------------------------------------------


def job(folder: str, part: str, kind: str, options: argparse.Namespace, **environment: str) -> Any:
    """Returns the measurements of ``_background_job``, its answer on the last line."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_background_job.py")
    root = os.path.join(folder, f"{part}-{kind.replace(' ', '-')}")
    os.makedirs(root)
    done = subprocess.run(
        [
            sys.executable,
            script,
            part,
            kind,
            root,
            str(options.mib),
            options.format,
            str(options.saves),
            str(options.rounds),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise SystemExit(
            f"the measurement of {part}, {kind} ended with exit status "
            f"{done.returncode}:\n{done.stdout[-2000:]}"
        )
    shutil.rmtree(root)
    return json.loads(done.stdout.splitlines()[-1])


def memory(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    return {
        name: job(folder, "memory", name, options)
        for name in (*KINDS, *(f"mindspore {kind}" for kind in KINDS))
    }


def memory_text(found: dict[str, Any]) -> str:
    """Describes memory in multiples of the bytes saved; measured once."""
    rows = []
    for name, values in found.items():
        extra = [(value - values["before"]) / values["bytes"] for value in values["after"]]
        growth, peak = extra[-1] - extra[0], (values["peak"] - values["before"]) / values["bytes"]
        ours = name in KINDS
        # a tenth for the interpreter of a writer process, the chunks in flight, and what an
        # allocator rounds up
        verdict = "met" if peak <= MEMORY + 0.1 and growth <= 0.01 else "missed"
        rows.append(
            [
                f"background {name}" if ours else name,
                f"{extra[0]:.2f}",
                f"{extra[-1]:.2f}",
                f"{growth:+.3f}",
                f"{peak:.2f}",
                f"{values['writer'] / 2**20:.0f}",
                f"{values['stops'][0]:.3f}",
                verdict if ours else "",
            ]
        )
    count = len(next(iter(found.values()))["after"])
    columns = [
        "what",
        "after the first save",
        f"after save {count}",
        "growth",
        "largest seen",
        "writer's own MiB",
        "stop of the first save, s",
        f"target {MEMORY:.0f}, then none",
    ]
    return (
        "Memory of the training and its writer together (anonymous and shared pages, a shared one "
        "counted once), above that "
        f"before the first save, in multiples of the bytes saved:\n\n{measure.table(columns, rows)}"
    )


def speed_text(found: dict[str, Any]) -> str:
    rows = []
    for name, values in found["rates"].items():
        rows.append(
            [
                name,
                f"{100 * values['ratio']:.0f} %",
                f"{100 * values['least']:.0f} to {100 * values['most']:.0f} %",
                f"{values['quiet_longest'] * 1000:.0f}",
                f"{values['longest'] * 1000:.0f}",
            ]
        )
    columns = ["writer, loop", "speed, median", "rounds", "longest step without, ms", "with, ms"]
    return (
        "Speed of a busy training thread while the save is written, against the same loop without "
        "a save in the same round; "
        f'steps of about {found["step"] * 1000:.0f} ms, one BLAS thread; "nothing": no save at '
        "all, the noise:\n\n" + measure.table(columns, rows)
    )


if __name__ == "__main__":
    main()
