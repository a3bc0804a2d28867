"""One cell for every story, format, fault and operation."""
from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mindresume.errors import MindResumeError, SaveError
from mindresume.fault_injection.faults import FAULTS, LAG, Fault, Killed, Machine, Operation
from mindresume.fault_injection.oracle import Verdict, judge
from mindresume.fault_injection.ranks import Hang, Turns
from mindresume.fault_injection.scenarios import LAYOUTS, RUNS, STORIES, Saved, Story, World
from mindresume.fault_injection.workers import Workers
from mindresume.model.manifest import TRASH, strip_trash
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage

QUICK = 3000                    # cells of a drill that is not asked for all


@dataclass(frozen=True)
class Cell:
    """``operation``: number of the operation struck, from 1; ``name`` and ``path`` (relative to the folder) say what it was."""
    story: str
    format: str
    ranks: int
    fault: str
    operation: int
    rank: int
    name: str
    path: str
    verdict: str
    reason: str
    chosen: Saved | None
    left: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Setup:
    """``folder``: where cells make and remove theirs. ``storage``: what lies below the simulated machine."""
    folder: str
    ranks: int = 2
    seed: int = 0
    storage: Callable[[], Storage] = PosixStorage


@dataclass(frozen=True)
class Task:
    """Everything that one story in one format goes through."""
    story: str
    format: str
    operations: tuple[Operation, ...]


def prepare(setup: Setup, stories: Sequence[str] = tuple(STORIES), formats: Sequence[str] = LAYOUTS) -> list[Task]:
    """Runs every story once without a fault, to know its operations. SaveError if that does not pass already: then this is no
    file system for checkpoints."""
    return [_prepared((setup, name, fmt)) for name in stories for fmt in formats]


def _prepared(what: tuple[Setup, str, str]) -> Task:
    setup, name, fmt = what
    machine, verdict = _play(setup, STORIES[name], fmt, None)
    if verdict.verdict != "PASS":
        raise SaveError(f"{setup.folder}: {name}, {fmt}: without any fault: {verdict.verdict}: {verdict.reason}")
    return Task(name, fmt, tuple(machine.operations))


def cells(setup: Setup, task: Task, faults: Sequence[str] = FAULTS) -> Iterator[Cell]:
    for kind in faults:
        for operation in task.operations:
            fault = Fault(kind, operation.number)
            if fault.hits(operation.name):
                yield cell(setup, task, fault)


def cell(setup: Setup, task: Task, fault: Fault) -> Cell:
    machine, verdict = _play(setup, STORIES[task.story], task.format, fault)
    done = machine.operations                   # fewer than without the fault, if that changes what a rank sees
    struck = done[fault.at - 1] if fault.at <= len(done) else next(o for o in task.operations if o.number == fault.at)
    return Cell(task.story, task.format, setup.ranks, fault.kind, fault.at, struck.rank, struck.name, struck.path,
                verdict.verdict, verdict.reason, verdict.chosen, verdict.left)


def _play(setup: Setup, story: Story, fmt: str, fault: Fault | None) -> tuple[Machine, Verdict]:
    """The order of the ranks depends on the seed alone, so that a number means the same operation with and without a fault."""
    folder = tempfile.mkdtemp(prefix="cell-", dir=setup.folder)
    root = os.path.join(folder, "checkpoint")
    hook, threading.excepthook = threading.excepthook, _quiet(threading.excepthook)
    try:
        story.prepare(root, fmt, setup.ranks)
        chance = random.Random(f"{setup.seed} {story.name} {fmt} {fault}")
        machine = Machine(setup.storage(), Turns(setup.ranks, random.Random(setup.seed)), fault, chance)
        world = World(machine, root, fmt, setup.ranks)
        try:
            results = story.run(world)
        except Hang as error:
            return _relative(machine, folder), Verdict("HARD_FAIL", f"the ranks hang: {error}")
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, (Killed, OSError, MindResumeError)):
                return _relative(machine, folder), Verdict("HARD_FAIL", f"{type(error).__name__}: {error}")
        machine.sleep(LAG + 1)
        return _relative(machine, folder), judge(world, [(RUNS[run], step) for run, step in story.past])
    finally:
        threading.excepthook = hook
        shutil.rmtree(folder)


def _relative(machine: Machine, folder: str) -> Machine:
    """Paths below ``folder``, and without the digits that keep names of trash apart: the same in every run."""
    machine.operations = [replace(o, path=_plain(os.path.relpath(o.path, folder))) for o in machine.operations]
    return machine


def _plain(path: str) -> str:
    names = [TRASH + strip_trash(name) if name.startswith(TRASH) else name for name in path.split(os.sep)]
    return os.sep.join(names)


def _quiet(usual: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A writer thread that was killed says nothing."""
    return lambda args: None if issubclass(args.exc_type, Killed) else usual(args)


def prepare_by(workers: Workers, setup: Setup, stories: Sequence[str], formats: Sequence[str]) -> list[Task]:
    """``prepare``, by processes."""
    order = [(name, fmt) for name in stories for fmt in formats]
    made = {(task.story, task.format): task for task in workers.map(_prepared, [(setup, *what) for what in order])}
    return [made[what] for what in order]


def sampled(setup: Setup, task: Task, kind: str, every: int) -> list[Operation]:
    """Returns each ``every``-th operation that the fault ``kind`` can hit, at least one. Where it begins differs by story, format
    and fault, so that together they hit different operations; the same ones for the same seed."""
    hit = [operation for operation in task.operations if Fault(kind, operation.number).hits(operation.name)]
    chance = random.Random(f"{setup.seed} {task.story} {task.format} {kind}")
    return hit[chance.randrange(min(every, len(hit))):][::every] if hit else []


def count(setup: Setup, tasks: Sequence[Task], faults: Sequence[str] = FAULTS, every: int = 1) -> int:
    """Returns how many cells ``units`` will give."""
    return sum(len(sampled(setup, task, kind, every)) for task in tasks for kind in faults)


def quick(cells: int) -> int:
    """Returns the ``every`` by which so many cells take about a minute on two cores and a fast disk."""
    return max(1, -(-cells // QUICK))


def units(setup: Setup, tasks: Sequence[Task], faults: Sequence[str] = FAULTS, every: int = 1, workers: Workers | None = None
          ) -> Iterator[list[Cell]]:
    """Yields all cells, in portions as they are ready. ``every``: as of ``sampled``. ``workers``: who does it; None: this
    process."""
    work = [(setup, Task(task.story, task.format, tuple(sampled(setup, task, kind, every))), kind)
            for task in tasks for kind in faults]
    yield from workers.map(_unit, work) if workers else map(_unit, work)


def _unit(unit: tuple[Setup, Task, str]) -> list[Cell]:
    setup, task, kind = unit
    return list(cells(setup, task, (kind,)))
