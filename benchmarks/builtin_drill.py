"""Kills real trainings at every file operation of a save: mindformers' own CheckpointMonitor beside
ours.

    python benchmarks/builtin_drill.py [--configs NAME ...] [--formats ckpt safetensors] [--save second|first]
                                       [--limit N] [--jobs 2] [--dir FOLDER] [--keep-folders]
                                       [--json FILE]

One process, CPU, mindformers' real Trainer around a tiny network (_drill_job.py): 15 steps, saves
after 5, 10 and 15.

clean run   counts the file operations from the beginning of step 10 to the beginning of step 14:
            its save, all of it
each cell   a fresh training dies by SIGKILL at operation N (faults: _drill_kill.py); the same
            command is started again, chooses
            and loads a checkpoint by the library's own means and trains to the end; compared with
            an uninterrupted run

| verdict | |
|---|---|
| PASS | resumed from the newest completed save, or a newer one; final weights and optimizer bit-identical |
| LOST_WORK | bit-identical, but resumed from an older save than necessary, or from none |
| HARD_FAIL | the second start raised an error or did not end within 60 s |
| SILENT_DIVERGENCE | it trained to the end, with other weights |

The save of step 5 has always completed. That of step 10 counts as completed once step 11 began
(synchronous saving only) and in the control, which is killed when step 14 begins. ``--save first``
tests the save of step 5: nothing older exists, so a fresh start is correct.

Limits: one run per cell, one process; the barrier of that one rank, which has no kernel on CPU,
does nothing; SIGKILL leaves the page cache, so power loss is not tested. With background saving the
threads decide the order; each row names what its own killed process was about to do, and a cell
whose fault found another operation there is tried up to 5 times. "other threads" in the table:
operations of the save that were not done by the main thread.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from _drill_job import INTERVAL, Setup, train
from _drill_kill import Fault

DEADLINE = 60.0  # seconds for one attempt
# attempts to reach one fault: threads may come in another order than in the clean run
TRIES = 5
VERDICTS = ("PASS", "LOST_WORK", "HARD_FAIL", "SILENT_DIVERGENCE")
CONFIGS = {
    "mindformers-1.0-sync": ("mindformers", "1.0", False),
    "mindformers-1.0-async": ("mindformers", "1.0", True),
    "mindformers-2.0-sync": ("mindformers", "2.0", False),
    "mindformers-2.0-async": ("mindformers", "2.0", True),
    "mindresume-1.0-sync": ("mindresume", "1.0", False),
    "mindresume-1.0-async": ("mindresume", "1.0", True),
}
NOISE = (
    "is deprecated",
    "will be deprecated",
    "set checkpoint save path",
    "set output path",
    "set strategy path",
)


@dataclass
class Attempt:
    """One training process, forked from this one. ``folder``: receives its output besides
    checkpoints."""

    pid: int
    folder: str
    started: float = field(default_factory=time.monotonic)
    status: int | None = None  # as os.waitpid gives it; None while it runs
    late: bool = False  # it was ended here, at the deadline

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = os.path.join(self.folder, name)
        if not os.path.exists(path):
            return []
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]

    def poll(self) -> bool:
        """Returns whether it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
            elif time.monotonic() - self.started > DEADLINE:
                os.kill(self.pid, signal.SIGKILL)
                self.late, self.status = True, os.waitpid(self.pid, 0)[1]
        return self.status is not None

    @property
    def killed(self) -> bool:
        return (
            not self.late
            and os.WIFSIGNALED(self.status)
            and os.WTERMSIG(self.status) == signal.SIGKILL
        )

    @property
    def good(self) -> bool:
        return os.WIFEXITED(self.status) and os.WEXITSTATUS(self.status) == 0


def start(setup: Setup, home: str, name: str, fault: Fault, attacked: int) -> Attempt:
    """Starts an attempt in ``home``; its output besides checkpoints goes to ``home/name``."""
    folder = os.path.join(home, name)
    os.makedirs(folder)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Attempt(pid, folder)
    status = 1
    try:
        os.chdir(home)
        output = os.open(os.path.join(folder, "output.txt"), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        train(setup, folder, fault, attacked)
        status = 0
    except Exception as error:
        traceback.print_exc()
        with open(os.path.join(folder, "book"), "a", encoding="utf-8") as book:
            book.write(
                json.dumps({"error": f"{type(error).__name__}: {first_words(error)}"}) + "\n"
            )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise AssertionError("not reached")


def first_words(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip(" -"))[:300]


# ---- one cell ------------------------------------------------------------------------------------


@dataclass
class Reference:
    """The results of the clean run of a configuration."""

    operations: list[dict[str, Any]]
    weights: dict[str, np.ndarray]


def clean(setup: Setup, home: str, attacked: int) -> Iterator[Attempt]:
    """Runs the clean run: a generator of attempts whose result is a Reference. Raises RuntimeError
    if the run failed or if operations were not counted."""
    attempt = start(setup, home, "clean", Fault(0, "none"), attacked)
    yield attempt
    if not attempt.good:
        raise RuntimeError(
            f"{setup.key}: the clean run failed; see {attempt.folder}: {attempt.lines('book')[-1:]}"
        )
    lines = attempt.lines("operations")
    missed = [path for line in lines for path in line.get("missed", [])]
    if missed:
        raise RuntimeError(f"{setup.key}: files that no counted operation made: {missed}")
    return Reference([line for line in lines if "operation" in line], weights_of(attempt))


def weights_of(attempt: Attempt) -> dict[str, np.ndarray]:
    with np.load(os.path.join(attempt.folder, "weights.npz")) as file:
        return {name: file[name] for name in file.files}


def faults_of(operations: list[dict[str, Any]]) -> list[Fault]:
    kinds = {"create": ("before", "empty", "torn"), "write": ("before", "torn")}
    found = [
        Fault(line["operation"], kind)
        for line in operations
        for kind in kinds.get(line["kind"], ("before",))
    ]
    return [*found, Fault(0, "control")]


def cell(
    setup: Setup, home: str, fault: Fault, attacked: int, reference: Reference
) -> Iterator[Attempt]:
    """Runs a cell: a generator of attempts whose result is the row of the cell."""
    for number in range(1, TRIES + 1):
        place = os.path.join(home, str(number))
        os.makedirs(place)
        first = start(setup, place, "killed", fault, attacked)
        yield first
        row = {
            "config": setup.key,
            "operation": fault.number,
            "fault": fault.kind,
            **where(first, fault),
        }
        if first.killed:
            break
    else:
        ended = "hung" if first.late else "was not killed"
        return {
            **row,
            "verdict": "NOT_REACHED",
            "reason": f"the first attempt {ended}: {first.lines('book')[-1:]}",
        }
    second = start(setup, place, "resumed", Fault(0, "none"), attacked)
    yield second
    required = required_step(setup, first, fault, attacked)
    verdict, reason = verdict_of(second, required, reference)
    return {**row, "required_step": required, "verdict": verdict, "reason": reason}


def where(attempt: Attempt, fault: Fault) -> dict[str, Any]:
    """Returns what the killed attempt was about to do. Threads may come in another order than in
    the clean run."""
    seen = [line for line in attempt.lines("operations") if line.get("operation") == fault.number]
    if not seen:
        return {"kind": fault.kind, "path": None}
    return {key: seen[0][key] for key in ("kind", "path", "to", "thread") if key in seen[0]}


def required_step(setup: Setup, attempt: Attempt, fault: Fault, attacked: int) -> int:
    begun = max(line["begins"] for line in attempt.lines("operations") if "begins" in line)
    completed = fault.kind == "control" or (not setup.asynchronous and begun > attacked)
    return attacked if completed else attacked - INTERVAL


def verdict_of(attempt: Attempt, required: int, reference: Reference) -> tuple[str, str]:
    book = attempt.lines("book")
    messages = [
        line["message"]
        for line in book
        if "message" in line and not any(word in line["message"] for word in NOISE)
    ]
    if attempt.late:
        return (
            "HARD_FAIL",
            f"did not end within {DEADLINE:.0f} s; last message: "
            f"{messages[-1] if messages else 'none'}",
        )
    if not attempt.good:
        errors = [line["error"] for line in book if "error" in line]
        return "HARD_FAIL", errors[0] if errors else f"ended with status {attempt.status}"
    resumed = next(line["resumed_from"] for line in book if "resumed_from" in line)
    different = differences(reference.weights, weights_of(attempt))
    choice = [
        text
        for text in messages
        if any(
            word in text
            for word in (
                "Get resume checkpoint",
                "Get checkpoint",
                "empty path",
                "fresh start",
                "not resuming",
                "resume from",
            )
        )
    ]
    said = choice[0] if choice else "no message about the choice"
    if different:
        return "SILENT_DIVERGENCE", f"resumed after step {resumed}; {different}; {said}"
    if resumed < required:
        return "LOST_WORK", f"resumed after step {resumed}, step {required} was complete; {said}"
    return "PASS", f"resumed after step {resumed}; {said}"


def differences(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> str:
    """Returns how the tensors differ; empty if all bits are equal."""
    if expected.keys() != found.keys():
        return f"different tensors: {sorted(expected.keys() ^ found.keys())}"
    names = [name for name, array in expected.items() if array.tobytes() != found[name].tobytes()]
    return (
        f"{len(names)} of {len(expected)} tensors differ, for example {names[0]}" if names else ""
    )


# ---- all of them ---------------------------------------------------------------------------------


def in_parallel(
    jobs: int, works: Iterator[tuple[Any, Iterator[Attempt]]]
) -> Iterator[tuple[Any, Any]]:
    """Runs generators of attempts, ``jobs`` at once; yields (label, result) in the order of
    completion. Kills what still runs when it is left."""
    running: list[tuple[Any, Iterator[Attempt], Attempt]] = []
    try:
        for label, work in works:
            running.append((label, work, next(work)))
            while len(running) >= jobs:
                yield from _poll_all(running)
        while running:
            yield from _poll_all(running)
    finally:
        for _, _, attempt in running:
            if not attempt.poll():
                os.kill(attempt.pid, signal.SIGKILL)
                os.waitpid(attempt.pid, 0)


def _poll_all(running: list[tuple[Any, Iterator[Attempt], Attempt]]) -> Iterator[tuple[Any, Any]]:
    for item in list(running):
        label, work, attempt = item
        if not attempt.poll():
            continue
        running.remove(item)
        try:
            running.append((label, work, work.send(None)))
        except StopIteration as end:
            yield label, end.value
    time.sleep(0.01)


def drill(
    setup: Setup, options: argparse.Namespace, folder: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the cells of one configuration in order, and the operations of the clean run."""
    attacked = INTERVAL if options.save == "first" else 2 * INTERVAL

    def home(name: str) -> str:
        path = os.path.join(folder, f"{setup.key}-{name}")
        os.makedirs(path)
        return path

    [(_, reference)] = in_parallel(1, iter([(None, clean(setup, home("clean"), attacked))]))
    faults = faults_of(reference.operations)
    if options.limit and len(faults) > options.limit:
        picked = sorted({round(i) for i in np.linspace(0, len(faults) - 1, options.limit)})
        print(
            f"note: {setup.key}: {len(picked)} of {len(faults)} cells, evenly spread (--limit)",
            file=sys.stderr,
        )
        faults = [faults[i] for i in picked]

    def works() -> Iterator[tuple[Any, Iterator[Attempt]]]:
        for number, fault in enumerate(faults):
            place = home(str(number))
            yield (number, place), cell(setup, place, fault, attacked, reference)

    rows = {}
    for (number, place), row in in_parallel(options.jobs, works()):
        rows[number] = row
        if not options.keep_folders:
            shutil.rmtree(place)
    return [rows[number] for number in sorted(rows)], reference.operations


def setups(options: argparse.Namespace) -> list[Setup]:
    found = []
    for name in options.configs:
        library, version, asynchronous = CONFIGS[name]
        formats = [fmt for fmt in options.formats if version == "1.0" or fmt == "safetensors"]
        found += [
            Setup(library, version, asynchronous, fmt, keep)
            for fmt in formats
            for keep in options.keep
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configs",
        nargs="+",
        choices=list(CONFIGS),
        default=list(CONFIGS),
        metavar="NAME",
        help=", ".join(CONFIGS),
    )
    parser.add_argument(
        "--formats", nargs="+", choices=["safetensors", "ckpt"], default=["safetensors", "ckpt"]
    )
    parser.add_argument(
        "--keep", nargs="+", type=int, default=[5, 1], help="values of keep_checkpoint_max"
    )
    parser.add_argument(
        "--save", choices=["second", "first"], default="second", help="the save that is tested"
    )
    parser.add_argument(
        "--limit", type=int, default=0, help="largest number of cells a row, evenly spread; 0: all"
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent processes")
    parser.add_argument(
        "--dir",
        default=None,
        help="folder of the trainings; default: the folder for temporary files",
    )
    parser.add_argument("--keep-folders", action="store_true")
    parser.add_argument("--json", default=None, help="file that receives every cell")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="drill-", dir=options.dir)
    os.environ["LOG_MF_PATH"] = os.path.join(folder, "log")
    prepare()
    started = time.monotonic()
    rows = []
    table = []
    try:
        for setup in setups(options):
            cells, operations = drill(setup, options, folder)
            rows += cells
            table.append((setup, operations, Counter(row["verdict"] for row in cells)))
            print(
                f"{time.monotonic() - started:5.0f} s  {setup.key}: {dict(table[-1][2])}",
                file=sys.stderr,
                flush=True,
            )
            for row in cells:
                if row["verdict"] == "NOT_REACHED":
                    print(f"note: not counted: {row}", file=sys.stderr)
    finally:
        if not options.keep_folders:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    show(table, options)


def prepare() -> None:
    """Imports once what takes seconds, since every attempt is forked from here. A barrier of one
    rank has no kernel on CPU."""
    import mindspore.communication.comm_func as comm_func

    comm_func.barrier = lambda group=None, *_, **__: None
    import mindformers.trainer.base_trainer
    import mindformers.trainer.trainer  # noqa: F401


def show(
    table: list[tuple[Setup, list[dict[str, Any]], Counter]], options: argparse.Namespace
) -> None:
    from importlib import metadata

    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("mindformers", "mindspore", "safetensors")
    )
    print(f"{versions}; one process, CPU; the {options.save} save is tested\n")
    print(
        "| configuration | format | keep_checkpoint_max | operations | other threads | runs | "
        + " | ".join(VERDICTS)
        + " |"
    )
    print("|---|---|---|---|---|---|" + "---|" * len(VERDICTS))
    for setup, operations, counts in table:
        runs = sum(counts[verdict] for verdict in VERDICTS)
        behind = sum(line["thread"] != "MainThread" for line in operations)
        print(
            f"| {setup.name} | {setup.format} | {setup.keep} | {len(operations)} | {behind} | "
            f"{runs} | " + " | ".join(str(counts[verdict]) for verdict in VERDICTS) + " |"
        )


if __name__ == "__main__":
    main()
