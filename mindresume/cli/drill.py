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
    from mindresume.fault_injection.runner import Cell, Task


_DISK, _SIMULATED = "On a file system", "In the simulation (--simulate)"
# parameter -> option, of those that only one of the two takes
_OF_THE_DISK = {"folder": "--dir", "story": "--story", "fault": "--fault", "ranks": "--ranks", "full": "--full",
                "every": "--every", "seed": "--seed"}
_OF_THE_SIMULATION = {"seeds": "--seeds", "first_seed": "--first-seed", "scenario": "--scenario", "way": "--way",
                      "systematic": "--systematic", "replay": "--replay"}


@app.command()
def drill(context: typer.Context,
          folder: Annotated[str | None, typer.Option("--dir", metavar="DIR", rich_help_panel=_DISK,
                                                     help="Where: the file system to test, for example "
                                                     "the shared one of the training. A folder of its own is made there and "
                                                     "removed. Default: the folder for temporary files.")] = None,
          story: Annotated[list[str] | None, typer.Option("--story", metavar="NAME", rich_help_panel=_DISK,
                                                          help="Only this story (again for more).")] = None,
          fault: Annotated[list[str] | None, typer.Option("--fault", metavar="NAME", rich_help_panel=_DISK,
                                                          help="Only this fault (again for more).")] = None,
          ranks: Annotated[int, typer.Option("--ranks", min=1, max=64, rich_help_panel=_DISK, help="Simulated ranks.")] = 2,
          full: Annotated[bool, typer.Option("--full", rich_help_panel=_DISK, help="Strike every operation: some minutes on a "
                                             "local disk. Default: a sample of them over all stories, formats and faults, which "
                                             "takes a minute or two.")] = False,
          every: Annotated[int | None, typer.Option("--every", min=1, metavar="K", rich_help_panel=_DISK,
                                                    help="Strike every K-th operation.")] = None,
          seed: Annotated[int, typer.Option("--seed", rich_help_panel=_DISK,
                                            help="Order of the ranks, who dies, what survives.")] = 0,
          simulate: Annotated[bool, typer.Option("--simulate", rich_help_panel=_SIMULATED, help="Whole jobs on a simulated "
                                                 "cluster instead, in memory.")] = False,
          seeds: Annotated[int, typer.Option("--seeds", min=1, max=10**9, metavar="N", rich_help_panel=_SIMULATED,
                                             help="So many random runs.")] = 200,
          first_seed: Annotated[int, typer.Option("--first-seed", min=0, metavar="S", rich_help_panel=_SIMULATED,
                                                  help="The seed of the first.")] = 0,
          scenario: Annotated[list[str] | None, typer.Option("--scenario", metavar="NAME", rich_help_panel=_SIMULATED,
                                                             help="Only this scenario (again for more).")] = None,
          way: Annotated[list[str] | None, typer.Option("--way", metavar="foreground|thread|process", help="Only this way of "
                                                        "saving.", rich_help_panel=_SIMULATED)] = None,
          systematic: Annotated[int | None, typer.Option("--systematic", min=0, max=5, metavar="K", rich_help_panel=_SIMULATED,
                                                         help="Of these scenarios all schedules with at most K switches between "
                                                         "ranks, none at random.")] = None,
          replay: Annotated[str | None, typer.Option("--replay", metavar="JSON|@FILE", rich_help_panel=_SIMULATED,
                                                     help="Run this one schedule and print every operation.")] = None,
          fmt: Annotated[list[str] | None, typer.Option("--format", metavar="safetensors|ckpt|iteration",
                                                        help="Only this format; iteration: Checkpoint 2.0.")] = None,
          jobs: Annotated[int, typer.Option("--jobs", min=1, max=1024, metavar="N",
                                            help="Processes. Default: one a core.")] = os.cpu_count() or 1,
          explain: Annotated[bool, typer.Option("--explain", help="Print what the stories and faults, scenarios and strikes "
                                                "are, and stop.")] = False,
          json: AsJson = False) -> None:
    """Proves on your file system that no crash loses a checkpoint, or shows which one does.

    Saves tiny checkpoints in every way mindresume knows (--explain), each time with one fault at one file operation: an I/O
    error, a full disk, a rank killed, a power failure that forgets what was not flushed, names that other hosts see late. Then
    it asks what a resume would take, compares every tensor, and lets the next run save and clean up.

    PASS: the newest complete checkpoint, bit for bit. LOST_WORK: an older one. HARD_FAIL: none, though one is complete.
    SILENT_DIVERGENCE: a wrong one. A sample of the operations is struck, in a minute or two; --full strikes every one. Ctrl-C
    ends it and prints what was found so far. Exit status: 0 all PASS, 1 not, 130 stopped by Ctrl-C.

    --simulate tests mindresume itself instead: whole jobs on hosts, disks and clocks in memory, in random orders with random
    faults, judged as if all had died before each operation. What it finds it makes as simple as it can, and prints the command
    that shows it again.
    """
    if explain:
        _explain()
        return
    given = {name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"}
    for name in sorted(given & (_OF_THE_DISK if simulate else _OF_THE_SIMULATION).keys()):
        raise ConfigError(f"{_OF_THE_DISK[name]} is of the drill on a file system, not of --simulate" if simulate else
                          f"{_OF_THE_SIMULATION[name]} needs --simulate")
    if simulate:
        from mindresume.cli.simulate import Asked, hunt
        from mindresume.cli.simulate import replay as run_again
        others = [_OF_THE_SIMULATION[name] for name in sorted(given & _OF_THE_SIMULATION.keys() - {"replay"})]
        if replay is not None and (others or fmt):
            raise ConfigError(f"--replay runs one schedule; it does not go with {', '.join(others) or '--format'}")
        asked = Asked(seeds, first_seed, tuple(scenario or ()), tuple(fmt or ()), tuple(way or ()), systematic, jobs, json)
        sys.exit(hunt(asked) if replay is None else run_again(replay, json))
    if full and every is not None:
        raise ConfigError("--full strikes every operation; it does not go with --every")
    sys.exit(_on_disk(folder, story, fmt, fault, ranks, 1 if full else every, seed, jobs, json))


def _on_disk(folder: str | None, story: list[str] | None, fmt: list[str] | None, fault: list[str] | None, ranks: int,
             every: int | None, seed: int, jobs: int, json: bool) -> int:
    """``every`` None: by the number of cells. Returns the exit status."""
    from mindresume.fault_injection import runner
    from mindresume.fault_injection.faults import FAULTS
    from mindresume.fault_injection.scenarios import LAYOUTS, STORIES
    from mindresume.fault_injection.workers import Workers
    stories = _chosen("story", story, tuple(STORIES))
    faults, formats = _chosen("fault", fault, FAULTS), _chosen("format", fmt, LAYOUTS)
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(f"{folder} is no folder; give one on the file system to test")
    started = time.monotonic()
    cells: list[Cell] = []
    tasks: list[Task] = []
    expected, possible, stopped = 0, 0, None
    with stopped_by_signals():
        own = tempfile.mkdtemp(prefix="mindresume-drill-", dir=folder)
        setup = runner.Setup(own, ranks, seed)
        try:
            with Workers(jobs, own) as workers, progress_bar("striking", json, unit="cells") as meter:
                tasks = runner.prepare_by(workers, setup, stories, formats)
                possible = runner.count(setup, tasks, faults)
                every = every or runner.quick(possible)
                expected = runner.count(setup, tasks, faults, every)
                meter.expect(expected)
                for portion in runner.units(setup, tasks, faults, every, workers):
                    cells += portion
                    meter.advance(len(portion))
        except Stopped as error:
            stopped = error
    order = {name: index for index, name in enumerate((*stories, *formats, *faults))}
    cells.sort(key=lambda cell: (order[cell.story], order[cell.format], order[cell.fault], cell.operation))
    if json:
        print_json({"cells": [cell.to_json() for cell in cells], "possible": possible, "every": every})
    else:
        _print(tasks, cells, time.monotonic() - started, f"{ranks} rank(s), seed {seed}, {folder or tempfile.gettempdir()}")
        if expected < possible:
            say(f"{len(cells):,} of {possible:,} cells, sampled: one of {every} operations for each story, format and fault; "
                f"--full strikes every operation, another --seed others")
    if stopped:
        raise Stopped(stopped.signal, f"the drill was stopped after {len(cells)} of {expected} cells" if expected else
                      "the drill was stopped before its first cell")
    return 0 if all(cell.verdict == "PASS" for cell in cells) else 1


def _chosen(what: str, asked: list[str] | None, known: Sequence[str]) -> list[str]:
    for name in asked or ():
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}; choose from: {', '.join(known)}")
    return [name for name in known if not asked or name in asked]


def _explain() -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mindresume.cli.simulate import explained
    from mindresume.fault_injection.faults import EXPLAINED
    from mindresume.fault_injection.scenarios import STORIES
    tables = {"story": {name: it.about for name, it in STORIES.items()}, "fault at an operation": EXPLAINED, **explained()}
    for title, rows in tables.items():
        table = Table(box=None, pad_edge=False)
        table.add_column(title)
        table.add_column("what happens")
        for name, about in rows.items():
            table.add_row(name, Text(about))
        Console().print(table)
        say()


def _print(tasks: Sequence[Task], cells: Sequence[Cell], seconds: float, where: str) -> None:
    from mindresume.fault_injection.oracle import VERDICTS
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
    from mindresume.fault_injection.oracle import VERDICTS
    numbers = [operations, counts["cells"], *(counts[verdict] for verdict in VERDICTS), counts["left"]]
    return f"| {story} | {fmt} | " + " | ".join(map(str, numbers)) + " |"
