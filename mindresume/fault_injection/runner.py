"""Runs one cell for every scenario, format, fault and operation, in worker processes that never
outlive this one.

    with Workers(2, folder) as workers:
        tasks = prepare(setup, workers=workers)
        for cells in run_cells(setup, tasks, workers=workers): ...      # in the order of completion

The end of the block, by completion, Ctrl-C or an error, ends the workers at once and removes
``folder``. If this process is killed, each worker ends by itself, and a small shell process that
waits for that removes ``folder``. ``folder`` is optional.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

from mindresume import runtime
from mindresume.errors import MindResumeError, SaveError
from mindresume.fault_injection.faults import (
    FAULTS,
    LAG,
    Fault,
    FaultInjector,
    Hang,
    Killed,
    Operation,
    Scheduler,
)
from mindresume.fault_injection.journal import Saved
from mindresume.fault_injection.scenarios import (
    LAYOUTS,
    RUNS,
    SCENARIOS,
    Sandbox,
    Scenario,
    Verdict,
    check_resume,
)
from mindresume.model.manifest import TRASH, strip_trash
from mindresume.storage import Storage
from mindresume.storage.posix import PosixStorage

QUICK = 3000  # cells of a sampled drill


@dataclass(frozen=True)
class Cell:
    """The result of one fault. ``operation``: number of the operation that it hit, from 1; ``name``
    and ``path`` (relative to the folder) describe that operation."""

    scenario: str
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
    """Where cells run. ``folder``: each cell creates and removes its own folder there. ``storage``:
    the storage below the injector."""

    folder: str
    ranks: int = 2
    seed: int = 0
    storage: Callable[[], Storage] = PosixStorage


@dataclass(frozen=True)
class Task:
    """One scenario in one format and its operations."""

    scenario: str
    format: str
    operations: tuple[Operation, ...]


def prepare(
    setup: Setup,
    scenarios: Sequence[str] = tuple(SCENARIOS),
    formats: Sequence[str] = LAYOUTS,
    workers: Workers | None = None,
) -> list[Task]:
    """Runs every scenario once without a fault to list its operations. ``workers``: None runs them
    in this process. Raises SaveError if one fails: then the file system is not suitable for
    checkpoints."""
    order = [(setup, name, fmt) for name in scenarios for fmt in formats]
    tasks = {
        (task.scenario, task.format): task
        for task in (workers.map(_prepared, order) if workers else map(_prepared, order))
    }
    return [tasks[name, fmt] for _, name, fmt in order]


def _prepared(what: tuple[Setup, str, str]) -> Task:
    setup, name, fmt = what
    operations, verdict = run_scenario(setup, SCENARIOS[name], fmt, None)
    if verdict.verdict != "PASS":
        raise SaveError(
            f"{setup.folder}: {name}, {fmt}: without any fault: {verdict.verdict}: {verdict.reason}"
        )
    return Task(name, fmt, tuple(operations))


def cell(setup: Setup, task: Task, fault: Fault) -> Cell:
    """Runs a task with one fault."""
    done, verdict = run_scenario(setup, SCENARIOS[task.scenario], task.format, fault)
    # fewer operations than without the fault if that changes what a rank sees
    hit = (
        done[fault.at - 1]
        if fault.at <= len(done)
        else next(o for o in task.operations if o.number == fault.at)
    )
    return Cell(
        task.scenario,
        task.format,
        setup.ranks,
        fault.kind,
        fault.at,
        hit.rank,
        hit.name,
        hit.path,
        **vars(verdict),
    )


def run_scenario(
    setup: Setup, scenario: Scenario, fmt: str, fault: Fault | None
) -> tuple[list[Operation], Verdict]:
    """Runs a scenario and checks the result. Returns the operations, with paths relative to the
    folder and without the random digits of trash names: they are equal in every run. The order of
    the ranks depends on the seed alone, so that a number means the same operation with and without
    a fault."""
    folder = tempfile.mkdtemp(prefix="cell-", dir=setup.folder)
    struck = f"Fault(kind={fault.kind!r}, at={fault.at})" if fault else None
    rng = random.Random(f"{setup.seed} {scenario.name} {fmt} {struck}")
    injector = FaultInjector(
        setup.storage(), Scheduler(setup.ranks, random.Random(setup.seed)), fault, rng, folder
    )
    sandbox = Sandbox(injector, os.path.join(folder, "checkpoint"), fmt, setup.ranks)
    hook, threading.excepthook = threading.excepthook, _quiet(threading.excepthook)
    try:
        scenario.prepare(sandbox)
        try:
            wrong = [
                error
                for error in scenario.run_ranks(sandbox)
                if isinstance(error, BaseException)
                and not isinstance(error, (Killed, OSError, MindResumeError))
            ]
            reason = f"{type(wrong[0]).__name__}: {wrong[0]}" if wrong else ""
        except Hang as error:
            reason = f"the ranks hang: {error}"
        operations = [
            replace(o, path=_plain(os.path.relpath(o.path, folder))) for o in injector.operations
        ]
        if reason:
            return operations, Verdict("HARD_FAIL", reason)
        injector.sleep(LAG + 1)
        return operations, check_resume(sandbox, [(RUNS[run], step) for run, step in scenario.past])
    finally:
        threading.excepthook = hook
        shutil.rmtree(folder)


def _plain(path: str) -> str:
    names = [
        TRASH + strip_trash(name) if name.startswith(TRASH) else name for name in path.split(os.sep)
    ]
    return os.sep.join(names)


def _quiet(usual: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns an excepthook for threads that does not report killed ones."""
    return lambda args: None if issubclass(args.exc_type, Killed) else usual(args)


def sampled(setup: Setup, task: Task, kind: str, every: int) -> list[Operation]:
    """Returns each ``every``-th operation that the fault ``kind`` can hit, at least one. The first
    one differs by scenario, format and fault, so that together they hit different operations; it is
    the same for the same seed."""
    hit = [
        operation
        for operation in task.operations
        if Fault(operation.number, kind).hits(operation.name)
    ]
    rng = random.Random(f"{setup.seed} {task.scenario} {task.format} {kind}")
    return hit[rng.randrange(min(every, len(hit))) :][::every] if hit else []


def count(
    setup: Setup, tasks: Sequence[Task], faults: Sequence[str] = FAULTS, every: int = 1
) -> int:
    """Returns the number of cells of ``run_cells``."""
    return sum(len(sampled(setup, task, kind, every)) for task in tasks for kind in faults)


def sampling_interval(cells: int) -> int:
    """Returns the interval of operations with which ``cells`` cells take about a minute on two
    cores and a fast disk."""
    return max(1, -(-cells // QUICK))


def run_cells(
    setup: Setup,
    tasks: Sequence[Task],
    faults: Sequence[str] = FAULTS,
    every: int = 1,
    workers: Workers | None = None,
) -> Iterator[list[Cell]]:
    """Yields all cells in batches as they are ready. ``every``: as for ``sampled``. ``workers``:
    None runs them in this process."""
    units = [
        (setup, task, kind, sampled(setup, task, kind, every)) for task in tasks for kind in faults
    ]
    yield from workers.map(_run_unit, units) if workers else map(_run_unit, units)


def _run_unit(unit: tuple[Setup, Task, str, list[Operation]]) -> list[Cell]:
    setup, task, kind, operations = unit
    return [cell(setup, task, Fault(operation.number, kind)) for operation in operations]


# ---- worker processes ----------------------------------------------------------------------------


# `read` ends with an error when the other end of the pipe is gone; workers may still be in a file
# operation for a moment.
_CLEANER = 'read -r word && exit 0; for n in 1 2 3 4 5; do rm -rf -- "$0"; sleep 0.3; done'


class Workers:
    """A pool of ``count`` processes, started by spawn, so that no thread or lock of this process is
    copied into them."""

    def __init__(self, count: int, folder: str | None = None):
        self.count, self.folder = count, folder
        self._cleaner: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Workers:
        if self.folder is not None:
            self._cleaner = subprocess.Popen(
                ["sh", "-c", _CLEANER, self.folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._processes, self._connections = [], []
        context = multiprocessing.get_context("spawn")
        try:
            with _later():
                for _ in range(self.count):
                    ours, theirs = context.Pipe()
                    self._connections.append(ours)
                    process = context.Process(target=_work, args=(theirs,), daemon=True)
                    process.start()
                    self._processes.append(process)
                    theirs.close()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._cleaner is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._cleaner.communicate(b"done\n")

    def map(self, function: Callable[[Any], Any], arguments: Iterable[Any]) -> Iterator[Any]:
        """Yields the results in the order of completion. ``function``: a function at the top level
        of a module; its exceptions are raised here. Raises ChildProcessError if a worker dies."""
        left, busy = iter(arguments), set()
        # there may be fewer, or more
        for connection, argument in zip(self._connections, left, strict=False):
            connection.send((function, argument))
            busy.add(connection)
        while busy:
            for connection in wait(list(busy)):
                try:
                    error, result = connection.recv()
                except (EOFError, ConnectionError):
                    raise ChildProcessError(
                        "a worker process of the drill died; was it killed for its memory?"
                    ) from None
                if error is not None:
                    raise error
                busy.discard(connection)
                for argument in islice(left, 1):
                    connection.send((function, argument))
                    busy.add(connection)
                yield result


@contextmanager
def _later() -> Iterator[None]:
    """Delays signals until the end of the block: a process that is half started would end with a
    traceback."""
    caught: list[int] = []
    # inherited: Ctrl-C in the terminal is ours to handle
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with runtime.interrupts_to(lambda number, frame: caught.append(number)):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if caught:
        signal.raise_signal(caught[0])


def _work(connection: Connection) -> None:
    runtime.Thread(target=_end_with_parent, daemon=True).start()
    # the parent is gone; the thread may not have noticed yet
    with suppress(EOFError, ConnectionError):
        while True:
            function, argument = connection.recv()
            try:
                answer = None, function(argument)
            except Exception as error:  # any error: the parent raises it
                answer = error, None
            connection.send(answer)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
