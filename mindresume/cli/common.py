"""Contains what the commands share: arguments, tables, sizes, the progress bar."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindresume import runtime
from mindresume.events import Event
from mindresume.events.progress import SILENT, Progress, ProgressReporter
from mindresume.formatting import shown, size_text
from mindresume.model.layout import MAX_RANKS
from mindresume.typed import json_value

if TYPE_CHECKING:
    from mindresume.api.maintenance import ScrubReport
    from mindresume.api.results import Problem, VerificationReport

Folder = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="The checkpoint folder (which contains the rank folders; or the output folder or run "
        "folder above it), a rank folder, or one file.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
# of the drill and of the simulated cluster
OnlyScenarios = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        metavar="NAME",
        help="Only this scenario (repeat for more; --explain lists them).",
    ),
]
OnlyFormats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        metavar="safetensors|ckpt|iteration",
        help="Only this format (iteration: Checkpoint 2.0).",
    ),
]
CORES = os.cpu_count() or 1
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        min=1,
        max=1024,
        metavar="N",
        help="Number of processes. Default: one for each core.",
    ),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Describe the scenarios and faults, and stop.")
]
OnlyStep = Annotated[int | None, typer.Option("--step", metavar="N", help="Only this step.")]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size",
        min=1,
        max=MAX_RANKS,
        metavar="N",
        help="Ranks of the job that would resume. Default: as the manifest says, else the strategy "
        "folder beside it, else the number of rank folders.",
    ),
]


def say(text: object = "", error: bool = False) -> None:
    """Prints ``text``, of one line or several; characters that a terminal cannot show are
    escaped."""
    stream = sys.stderr if error else sys.stdout
    line = shown(text, keep="\n")
    print(
        line.encode(stream.encoding or "ascii", "backslashreplace").decode(
            stream.encoding or "ascii"
        ),
        file=stream,
    )


WIDE = 1000  # columns of a table in a file or a pipe: nothing is wrapped
NOTHING = 3  # exit status: there is no usable checkpoint


def print_json(value: Any) -> None:
    """Prints ``value`` as one JSON document. JSON has no NaN and no infinity: they become null."""
    print(json.dumps(json_value(value), indent=1))


def print_explanations(tables: dict[str, dict[str, str]]) -> None:
    """Prints {title: {name: what happens}} as tables."""
    for title, rows in tables.items():
        print_table([{title: name, "what happens": about} for name, about in rows.items()])
        say()


def time_text(seconds: float | None) -> str:
    """Returns a local time as text, or "?" if it is unknown."""
    return "?" if not seconds else runtime.strftime("%Y-%m-%d %H:%M", runtime.localtime(seconds))


def step_text(step: int | None) -> str:
    """Returns a step or an epoch as text, or "?" if it is unknown."""
    return "?" if step is None else str(step)


def problem_text(problem: Problem) -> str:
    """Returns why a checkpoint cannot be used."""
    return f"step {step_text(problem.step)}: {problem.reason}"


def say_checkpoint(
    step: int | None,
    written_by: str,
    state: str,
    rows: Iterable[tuple[str, str | None]],
    where: str = "",
) -> None:
    """Prints what was found out about a checkpoint.

    Args:
        written_by: as ``origin_text``.
        state: what the bytes of all of it are.
        rows: a line for each, and the file below it, or None.
        where: the begin of the line.
    """
    say(f"{where}step {step_text(step)} ({written_by}): {state}")
    for text, file in rows:
        say(f"    {text}" + (f"\n      {file}" if file else ""))


def origin_text(origin: str | None, run_id: str | None) -> str:
    """Returns who wrote a checkpoint, as a phrase."""
    from mindresume.formats import MERGED, MINDFORMERS

    return {MINDFORMERS: "mindformers", MERGED: "mindresume, consolidated weights"}.get(
        origin or "", f"run {run_id}"
    )


class Stopped(BaseException):
    """Says that a signal stopped the command. ``signal``: its number; ``str``: what was done
    before."""

    def __init__(self, number: int, text: str = "stopped"):
        super().__init__(text)
        self.signal = number


def stopped_by_signals() -> AbstractContextManager[None]:
    """Makes Ctrl-C and SIGTERM raise Stopped in the main thread. Only for work that cleans up after
    itself."""
    return runtime.interrupts_to(_stop)


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)


@contextmanager
def progress_bar(what: str, quiet: bool, unit: str = "bytes") -> Iterator[Progress]:
    """Shows progress on stderr: a bar on a terminal, else a line every ten seconds; nothing if
    ``quiet``."""
    if quiet:
        yield SILENT
        return
    if not sys.stderr.isatty():
        yield ProgressReporter(what, _print_line, unit=unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        [DownloadColumn(binary_units=True), TransferSpeedColumn()]
        if unit == "bytes"
        else [MofNCompleteColumn(), TextColumn(unit)]
    )
    with Progress(
        TextColumn(what),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        progress.add_task(what, total=None)
        yield _Bar(progress)


def _print_line(event: Event) -> None:
    print(event.line(), file=sys.stderr, flush=True)


class _Bar:
    """Shows progress in the one bar of ``display``, a ``rich.progress.Progress``."""

    def __init__(self, display: Any):
        self._display, self._task = display, display.tasks[0]

    def expect(self, count: int) -> None:
        self._display.update(self._task.id, total=(self._task.total or 0) + count)

    def advance(self, count: int) -> None:
        self._display.advance(self._task.id, count)


def say_read(report: VerificationReport | ScrubReport) -> None:
    """Prints how much was read, and how fast."""
    rate = report.bytes_read / report.seconds if report.seconds else 0
    say(
        f"{size_text(report.bytes_read)} read in {report.seconds:.1f} s ({size_text(rate)}/s)"
        if report.checkpoints
        else f"{report.root}: no checkpoints"
    )


def print_table(
    rows: Sequence[Mapping[str, str]],
    right: Collection[str] = (),
    folded: Collection[str] | None = None,
    yellow: Collection[int] = (),
    hides: bool = True,
) -> None:
    """Prints rows, {column: text}, as a table: on a terminal as wide as it is, else so wide that
    nothing is cut.

    Args:
        right: columns of numbers.
        folded: columns that may take several lines; None: all.
        yellow: numbers of the rows to point out.
        hides: columns without a text are left out.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = [name for name in rows[0] if not hides or any(row[name] for row in rows)]
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=folded is not None and name not in folded,
        )
    for number, row in enumerate(rows):
        cells = [shown(row[name]) for name in columns]
        table.add_row(*cells, style="yellow" if number in yellow else "")
    Console(
        markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else WIDE
    ).print(table)
