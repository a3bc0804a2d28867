"""``mindresume drill``"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume import runtime
from mindresume.cli import app
from mindresume.cli.common import (
    CORES,
    AsJson,
    Explain,
    Jobs,
    OnlyFormats,
    OnlyScenarios,
    Stopped,
    print_explanations,
    print_json,
    progress_bar,
    say,
    stopped_by_signals,
)
from mindresume.errors import ConfigError

if TYPE_CHECKING:
    from mindresume.fault_injection.runner import Cell, Task


@app.command()
def drill(
    folder: Annotated[
        str | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="A folder on the file system to test, for example the shared one of the training. "
            "The drill creates its own folder there and removes it. Default: the folder for "
            "temporary files.",
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="NAME", help="Only this fault (repeat for more)."),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=64, help="Simulated ranks.")] = 2,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Inject a fault at every operation: nine times as many cells as the default, a "
            "sample of the operations of each scenario, format and fault.",
        ),
    ] = False,
    every: Annotated[
        int | None,
        typer.Option("--every", min=1, metavar="K", help="Inject a fault at every K-th operation."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", help="Seed: order of the ranks, which ranks die, which data survives."
        ),
    ] = 0,
    scenario: OnlyScenarios = None,
    fmt: OnlyFormats = None,
    jobs: Jobs = CORES,
    explain: Explain = False,
    json: AsJson = False,
) -> None:
    """Tests on your file system that no crash loses a checkpoint, or shows which one does.

    Saves tiny checkpoints in every way mindresume knows (--explain), each time with one fault at
    one file operation: an I/O error, a full disk, a killed rank, a power loss that drops unflushed
    data, names that other hosts see late. Then it selects as a resume would, compares every tensor,
    and lets the next run save and clean up.

    PASS: the newest complete checkpoint, bit for bit. LOST_WORK: an older one. HARD_FAIL: none,
    though one is complete. SILENT_DIVERGENCE: a wrong one.

    The default is a sample of about 3,000 cells. Two idle cores take one minute on /dev/shm (50
    cells a second), four on ext4 (13 a second; 5 beside other work), longer over a network.
    --every 100 is a short try. Ctrl-C stops it and prints the results so far.

    Exit status: 0 all PASS, 1 not, 130 stopped by Ctrl-C.
    """
    if explain:
        from mindresume.fault_injection.faults import EXPLAINED
        from mindresume.fault_injection.scenarios import SCENARIOS

        print_explanations(
            {
                "scenario": {name: it.about for name, it in SCENARIOS.items()},
                "fault at an operation": EXPLAINED,
            }
        )
        return
    if full and every is not None:
        raise ConfigError("--full takes every operation; it does not go with --every")
    from mindresume.fault_injection import runner
    from mindresume.fault_injection.faults import FAULTS
    from mindresume.fault_injection.scenarios import LAYOUTS, SCENARIOS

    scenarios = _chosen("scenario", scenario, tuple(SCENARIOS))
    faults, formats = _chosen("fault", fault, FAULTS), _chosen("format", fmt, LAYOUTS)
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(f"{folder} is not a folder; give a folder on the file system to test")
    started = runtime.monotonic()
    every = 1 if full else every
    cells: list[Cell] = []
    tasks: list[Task] = []
    expected = 0
    possible = 0
    stopped = None
    with stopped_by_signals():
        own = tempfile.mkdtemp(prefix="mindresume-drill-", dir=folder)
        setup = runner.Setup(own, ranks, seed)
        try:
            with (
                runner.Workers(jobs, own) as workers,
                progress_bar("injecting faults", json, unit="cells") as meter,
            ):
                tasks = runner.prepare(setup, scenarios, formats, workers)
                possible = runner.count(setup, tasks, faults)
                every = every or runner.sampling_interval(possible)
                expected = runner.count(setup, tasks, faults, every)
                meter.expect(expected)
                for portion in runner.run_cells(setup, tasks, faults, every, workers):
                    cells += portion
                    meter.advance(len(portion))
        except Stopped as error:
            stopped = error
    order = {name: index for index, name in enumerate((*scenarios, *formats, *faults))}
    cells.sort(
        key=lambda cell: (
            order[cell.scenario],
            order[cell.format],
            order[cell.fault],
            cell.operation,
        )
    )
    if json:
        print_json(
            {"cells": [cell.to_json() for cell in cells], "possible": possible, "every": every}
        )
    else:
        _print(
            tasks,
            cells,
            runtime.monotonic() - started,
            f"{ranks} rank(s), seed {seed}, {folder or tempfile.gettempdir()}",
        )
        if expected < possible:
            say(
                f"{len(cells):,} of {possible:,} cells, sampled: one of {every} operations for "
                "each scenario, format and fault; "
                f"--full takes every operation, another --seed takes others"
            )
    if stopped:
        raise Stopped(
            stopped.signal,
            f"the drill was stopped after {len(cells)} of {expected} cells"
            if expected
            else "the drill was stopped before its first cell",
        )
    sys.exit(0 if all(cell.verdict == "PASS" for cell in cells) else 1)


def _chosen(what: str, asked: list[str] | None, known: Sequence[str]) -> list[str]:
    for name in asked or ():
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}; choose from: {', '.join(known)}")
    return [name for name in known if not asked or name in asked]


def _print(tasks: Sequence[Task], cells: Sequence[Cell], seconds: float, where: str) -> None:
    from mindresume.fault_injection.scenarios import VERDICTS

    say("| scenario | format | operations | cells | " + " | ".join(VERDICTS) + " | left behind |")
    say("|---|---|---|---|" + "---|" * (len(VERDICTS) + 1))
    total: Counter[str] = Counter()
    for task in tasks:
        own = [
            cell for cell in cells if (cell.scenario, cell.format) == (task.scenario, task.format)
        ]
        counts = Counter(cell.verdict for cell in own)
        counts["left"] = sum(bool(cell.left) for cell in own)
        counts["cells"] = len(own)
        total += counts
        say(_row(task.scenario, task.format, len(task.operations), counts))
    say(_row("all", "", sum(len(task.operations) for task in tasks), total))
    for cell in [cell for cell in cells if cell.verdict != "PASS" or cell.left][:20]:
        say(
            f"\n{cell.verdict}: {cell.scenario}, {cell.format}: {cell.fault} at operation "
            f"{cell.operation} (rank {cell.rank}, "
            f"{cell.name} {cell.path})\n    {cell.reason or 'left behind: ' + ', '.join(cell.left)}"
        )
    say(f"\n{len(cells)} cells in {seconds:.0f} s: {where}")


def _row(scenario: str, fmt: str, operations: int, counts: Counter[str]) -> str:
    from mindresume.fault_injection.scenarios import VERDICTS

    numbers = [
        operations,
        counts["cells"],
        *(counts[verdict] for verdict in VERDICTS),
        counts["left"],
    ]
    return f"| {scenario} | {fmt} | " + " | ".join(map(str, numbers)) + " |"
