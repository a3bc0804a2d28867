"""``mindresume drill``"""
from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, Stopped, print_json, progress_bar, say, stopped_by_signals
from mindresume.errors import ConfigError

if TYPE_CHECKING:
    from mindresume.drill.run import Cell, Task


@app.command()
def drill(folder: Annotated[str | None, typer.Option("--dir", metavar="DIR", help="Where: the file system to test, for example "
                                                     "the shared one of the training. A folder of its own is made there and "
                                                     "removed. Default: the folder for temporary files.")] = None,
          story: Annotated[list[str] | None, typer.Option("--story", metavar="NAME", help="Only this story (again for "
                                                          "more).")] = None,
          fmt: Annotated[list[str] | None, typer.Option("--format", metavar="safetensors|ckpt|iteration",
                                                        help="Only this format; iteration: Checkpoint 2.0.")] = None,
          fault: Annotated[list[str] | None, typer.Option("--fault", metavar="NAME", help="Only this fault (again for "
                                                          "more).")] = None,
          ranks: Annotated[int, typer.Option("--ranks", min=1, max=64, help="Simulated ranks.")] = 2,
          every: Annotated[int, typer.Option("--every", min=1, metavar="K", help="Strike only every K-th operation: faster, and "
                                             "no proof.")] = 1,
          seed: Annotated[int, typer.Option("--seed", help="Order of the ranks, who dies, what survives.")] = 0,
          jobs: Annotated[int, typer.Option("--jobs", min=1, max=1024, metavar="N",
                                            help="Processes. Default: one a core.")] = os.cpu_count() or 1,
          explain: Annotated[bool, typer.Option("--explain", help="Print what the stories and faults are, and stop.")] = False,
          json: AsJson = False) -> None:
    """Proves on your file system that no crash loses a checkpoint, or shows which one does.

    Saves tiny checkpoints in every way mindresume knows (--explain), each time with one fault at one file operation: an I/O
    error, a full disk, a rank killed, a power failure that forgets what was not flushed, names that other hosts see late. Then
    it asks what a resume would take, compares every tensor, and lets the next run save and clean up.

    PASS: the newest complete checkpoint, bit for bit. LOST_WORK: an older one. HARD_FAIL: none, though one is complete.
    SILENT_DIVERGENCE: a wrong one. Some minutes on a local disk. Ctrl-C ends it and prints what was found so far. Exit status:
    0 all PASS, 1 not, 130 stopped by Ctrl-C.
    """
    from mindresume.drill import run
    from mindresume.drill.faults import EXPLAINED, FAULTS
    from mindresume.drill.stories import LAYOUTS, STORIES
    from mindresume.drill.workers import Workers
    if explain:
        _explain({name: it.about for name, it in STORIES.items()}, EXPLAINED)
        return
    stories = _chosen("story", story, tuple(STORIES))
    faults, formats = _chosen("fault", fault, FAULTS), _chosen("format", fmt, LAYOUTS)
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(f"{folder} is no folder; give one on the file system to test")
    started = time.monotonic()
    cells: list[Cell] = []
    tasks: list[Task] = []
    expected, stopped = 0, None
    with stopped_by_signals():
        own = tempfile.mkdtemp(prefix="mindresume-drill-", dir=folder)
        setup = run.Setup(own, ranks, seed)
        try:
            with Workers(jobs, own) as workers, progress_bar("striking", json, unit="cells") as meter:
                tasks = run.prepare_by(workers, setup, stories, formats)
                expected = run.count(tasks, faults, every)
                meter.expect(expected)
                for portion in run.units(setup, tasks, faults, every, workers):
                    cells += portion
                    meter.advance(len(portion))
        except Stopped as error:
            stopped = error
    order = {name: index for index, name in enumerate((*stories, *formats, *faults))}
    cells.sort(key=lambda cell: (order[cell.story], order[cell.format], order[cell.fault], cell.operation))
    if json:
        print_json([cell.to_json() for cell in cells])
    else:
        _print(tasks, cells, time.monotonic() - started, f"{ranks} rank(s), seed {seed}, {folder or tempfile.gettempdir()}")
    if stopped:
        raise Stopped(stopped.signal, f"the drill was stopped after {len(cells)} of {expected} cells" if expected else
                      "the drill was stopped before its first cell")
    sys.exit(0 if all(cell.verdict == "PASS" for cell in cells) else 1)


def _chosen(what: str, asked: list[str] | None, known: Sequence[str]) -> list[str]:
    for name in asked or ():
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}; choose from: {', '.join(known)}")
    return [name for name in known if not asked or name in asked]


def _explain(stories: dict[str, str], faults: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    for title, rows in (("story", stories), ("fault at an operation", faults)):
        table = Table(box=None, pad_edge=False)
        table.add_column(title)
        table.add_column("what happens")
        for name, about in rows.items():
            table.add_row(name, about)
        Console().print(table)
        say()


def _print(tasks: Sequence[Task], cells: Sequence[Cell], seconds: float, where: str) -> None:
    from mindresume.drill.judge import VERDICTS
    say("| story | format | operations | cells | " + " | ".join(VERDICTS) + " | left behind |")
    say("|---|---|---|---|" + "---|" * (len(VERDICTS) + 1))
    total: Counter[str] = Counter()
    for task in tasks:
        own = [cell for cell in cells if (cell.story, cell.format) == (task.story, task.format)]
        counts = Counter(cell.verdict for cell in own)
        counts["left"] = sum(bool(cell.left) for cell in own)
        counts["cells"] = len(own)
        total += counts
        say(_row(task.story, task.format, len(task.operations), counts))
    say(_row("all", "", sum(len(task.operations) for task in tasks), total))
    for cell in [cell for cell in cells if cell.verdict != "PASS" or cell.left][:20]:
        say(f"\n{cell.verdict}: {cell.story}, {cell.format}: {cell.fault} at operation {cell.operation} (rank {cell.rank}, "
            f"{cell.name} {cell.path})\n    {cell.reason or 'left behind: ' + ', '.join(cell.left)}")
    say(f"\n{len(cells)} cells in {seconds:.0f} s: {where}")


def _row(story: str, fmt: str, operations: int, counts: Counter[str]) -> str:
    from mindresume.drill.judge import VERDICTS
    numbers = [operations, counts["cells"], *(counts[verdict] for verdict in VERDICTS), counts["left"]]
    return f"| {story} | {fmt} | " + " | ".join(map(str, numbers)) + " |"
