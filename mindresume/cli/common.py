"""Contains what the commands share: arguments, the share of this process where a launcher (msrun,
mpirun, srun) runs one command in several, tables, sizes, the progress bar.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindresume import runtime
from mindresume.errors import ConfigError
from mindresume.events import SILENT, Event, Progress, ProgressReporter
from mindresume.formatting import shown, size_text, with_short_checksums
from mindresume.model.layout import MAX_RANKS
from mindresume.typed import json_value

if TYPE_CHECKING:
    from mindresume.api.maintenance import ScrubReport
    from mindresume.api.results import Problem, VerificationReport

Folder = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="The checkpoint folder (with folders rank_0 or iteration_N in it), the output folder "
        "or run folder above it, a rank folder, or one file.",
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
        metavar="NAME",
        help="Only this format: safetensors, ckpt, or iteration (Checkpoint 2.0).",
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
        show_default=False,
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
        help="Ranks of the job that would resume. Default: as many as saved.",
    ),
]


def say(text: object = "", error: bool = False) -> None:
    """Prints ``text``, of one line or several; characters that a terminal cannot show are
    escaped, and checksums are cut."""
    stream = sys.stderr if error else sys.stdout
    line = with_short_checksums(shown(text, keep="\n"))
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
    """Prints how much was read, and how fast, if anything was."""
    rate = report.bytes_read / report.seconds if report.seconds else 0
    if not report.checkpoints:
        say(f"{report.root}: no checkpoints")
    elif report.bytes_read:  # of what mindformers wrote, only headers are read
        say(f"{size_text(report.bytes_read)} read in {report.seconds:.1f} s ({size_text(rate)}/s)")


def print_table(
    rows: Sequence[Mapping[str, str]],
    right: Collection[str] = (),
    folded: Collection[str] | None = None,
    yellow: Collection[int] = (),
    hides: bool = True,
    dispensable: Sequence[str] = (),
) -> None:
    """Prints rows, {column: text}, as a table: on a terminal as wide as it is, else so wide that
    nothing is cut.

    Args:
        right: columns of numbers.
        folded: columns that may take several lines; None: all.
        yellow: numbers of the rows to point out.
        hides: columns without a text are left out.
        dispensable: columns that a narrow terminal leaves out, the first ones first.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    console = Console(
        markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else WIDE
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = [name for name in rows[0] if not hides or any(row[name] for row in rows)]
    widths = {
        name: 2 + max(cell_len(shown(text)) for text in (name, *(row[name] for row in rows)))
        for name in columns
    }
    for name in dispensable:
        if name in columns and sum(widths[column] for column in columns) > console.width:
            columns.remove(name)
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
    console.print(table)


# ---- the share of a process in a launch ----------------------------------------------------------


Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=1.0,
        metavar="SECONDS",
        help="Where msrun, mpirun or srun let several processes share the work: give up after "
        "so long without a sign of one of them.",
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="K/N",
        help="Do only the K-th of N shares of the files, and do not wait for the others. Under "
        "msrun, mpirun or srun each process takes its own share without this option.",
    ),
]
TIMEOUT = 1800.0

# (variables of the rank, the first that is set; variable of the number of processes). SLURM_NTASKS
# is that of the allocation: a batch script and the shell of salloc have it too, beside
# SLURM_PROCID=0, though only one process runs there. SLURM_STEP_NUM_TASKS is what srun started:
# absent in a batch script, 1 in the shell of salloc, which may be a step.
_LAUNCHERS = (
    (("MS_NODE_ID", "RANK_ID"), "MS_WORKER_NUM"),
    (("OMPI_COMM_WORLD_RANK",), "OMPI_COMM_WORLD_SIZE"),
    (("PMI_RANK",), "PMI_SIZE"),
    (("SLURM_PROCID",), "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True)
class LaunchedProcess:
    """Describes this process of a launch.

    Args:
        rank: its number, from 0.
        size: number of processes of the launch.
        source: the variables that say so, for messages.
    """

    rank: int
    size: int
    source: str


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Returns whether msrun started this process in addition to the workers, with the same command.
    It has nothing to do."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def launched_process(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Returns this process's place in its launch; None if no launcher started it, or this process
    alone.

    Raises:
        ConfigError: The variables of a launcher are no numbers, or the rank is not below the number
            of processes; msrun on several nodes was not told which node this is.
    """
    workers = environment.get("MS_WORKER_NUM", "1")
    if (
        environment.get("MS_ROLE") == "MS_WORKER"
        and not environment.get("MS_NODE_ID")
        and workers != "1"
    ):
        # RANK_ID is absent or that of the scheduler: MindSpore would assign ranks when the training
        # begins
        raise ConfigError(
            f"msrun started {workers} processes on several nodes and gave this one no rank (no "
            "MS_NODE_ID): give --node_rank to msrun on each node"
        )
    for ranks, count in _LAUNCHERS:
        name = next((name for name in ranks if environment.get(name)), "")
        if not name or not environment.get(count):
            continue
        source = f"{name}={environment[name]} and {count}={environment[count]}"
        try:
            rank, size = int(environment[name]), int(environment[count])
        except ValueError:
            rank, size = -1, 0
        if not 0 <= rank < size:
            raise ConfigError(
                f"the environment has {source}; expected a rank from 0 on and a larger number of "
                f"processes. Unset {count} to run one process"
            )
        return LaunchedProcess(rank, size, source) if size > 1 else None
    return None


@dataclass(frozen=True)
class ShareOfProcess:
    """What this process does of a command that several run together.

    Args:
        part: (K, N), K from 1.
        timeout: seconds to wait for the others without a sign of them.
        prints: whether it prints the result.
    """

    part: tuple[int, int] = (1, 1)
    timeout: float = 0.0
    prints: bool = True


def share_of_process(part: str | None, timeout: float = 0.0, alone: bool = False) -> ShareOfProcess:
    """Returns the share that ``part`` names, else that of this process in its launch, else all. The
    scheduler process of msrun ends here, with status 0; with ``alone`` all processes but the first
    one, too.

    Raises:
        ConfigError: ``part`` is no K/N; and as ``launched_process``.
    """
    if is_scheduler(os.environ):
        sys.exit(0)
    if part is not None:
        number, slash, count = part.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal()):
            raise ConfigError(f"--part is {part[:80]!r}; expected K/N, such as 1/4")
        return ShareOfProcess((int(number), int(count)))
    process = launched_process(os.environ)
    if process is None:
        return ShareOfProcess()
    if alone:
        if process.rank:
            sys.exit(0)
        return ShareOfProcess()
    say(
        f"this is process {process.rank} of {process.size}, as {process.source} in the environment "
        "say",
        error=True,
    )
    return ShareOfProcess((process.rank + 1, process.size), timeout, process.rank == 0)
