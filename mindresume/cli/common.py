"""What the commands share: arguments, tables, sizes, the progress bar."""
from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import typer

from mindresume.events.log_lines import progress_text
from mindresume.events.progress import ProgressReporter
from mindresume.formats import MERGED, MINDFORMERS, Candidate, Refusal
from mindresume.formats.location import locate as locate_below
from mindresume.formatting import shown
from mindresume.layout import MAX_RANKS
from mindresume.store.storage import PosixStorage

Folder = Annotated[str, typer.Argument(
    metavar="DIR", help="The checkpoint folder (that of the rank folders; the output folder above it, or the folder of "
                        "the run, will do), a rank folder, or one file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
WorldSize = Annotated[int | None, typer.Option(
    "--world-size", min=1, max=MAX_RANKS, metavar="N", help="Ranks of the job that would resume. Default: that of the manifest, "
                                                            "else of the strategy folder beside, else the number of rank "
                                                            "folders.")]


def locate(folder: str, must_exist: bool = True) -> str:
    """``folder``, or the one folder of checkpoints below it. FileNotFoundError if there is nothing and there must be;
    MissingCheckpointError if there are several."""
    if must_exist and not os.path.exists(folder):
        raise FileNotFoundError(f"{folder} does not exist")
    return locate_below(PosixStorage(), folder)


def say(text: object = "", error: bool = False) -> None:
    """Prints ``text``, of one line or several; what would be no text on a terminal is escaped."""
    stream = sys.stderr if error else sys.stdout
    line = shown(text, keep="\n")
    print(line.encode(stream.encoding or "ascii", "backslashreplace").decode(stream.encoding or "ascii"), file=stream)


NOTHING = 3                     # exit status: there is no checkpoint, or none that can be used


def print_json(value: Any) -> None:
    try:
        text = json.dumps(value, indent=1, allow_nan=False)
    except ValueError:                              # JSON has no NaN and no infinity
        text = json.dumps(_finite(value), indent=1)
    print(text)


def _finite(value: Any) -> Any:
    """``value`` with null for every number that is none."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def time_text(seconds: float | None) -> str:
    return "?" if not seconds else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def origin_text(candidate: Candidate) -> str:
    return {MINDFORMERS: "mindformers", MERGED: "mindresume, complete weights"}.get(candidate.origin, f"run {candidate.run}")


def refusal_json(root: str, refusal: Refusal) -> dict[str, Any]:
    value = refusal.to_json()
    return {**value, "file": os.path.join(root, value["file"]) if value["file"] else None}


class Meter(Protocol):
    """A progress bar: first what is to come, in bytes, then what was read."""

    def expect(self, count: int) -> None: ...

    def advance(self, count: int) -> None: ...


class _NoMeter:
    def expect(self, count: int) -> None:
        pass

    def advance(self, count: int) -> None:
        pass


class Stopped(BaseException):
    """A signal asked the command to stop. ``signal``: its number; ``str``: what was done until then."""

    def __init__(self, number: int, text: str = "stopped"):
        super().__init__(text)
        self.signal = number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise Stopped in the main thread. Only for work that cleans up after itself."""
    def stop(number: int, frame: object) -> None:
        raise Stopped(number)
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress_bar(what: str, quiet: bool, unit: str = "bytes") -> Iterator[Meter]:
    """Shows progress on stderr: a bar on a terminal, elsewhere a line every ten seconds; nothing if ``quiet``."""
    if quiet:
        yield _NoMeter()
        return
    if not sys.stderr.isatty():
        yield ProgressReporter(what, lambda event: print(progress_text(event), file=sys.stderr, flush=True), unit=unit)
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
    columns = [DownloadColumn(binary_units=True), TransferSpeedColumn()] if unit == "bytes" else \
        [MofNCompleteColumn(), TextColumn(unit)]
    with Progress(TextColumn(what), BarColumn(), *columns, TimeRemainingColumn(), console=Console(stderr=True),
                  transient=True) as progress:
        task = progress.add_task(what, total=None)

        class Bar:
            def expect(self, count: int) -> None:
                progress.update(task, total=(progress.tasks[0].total or 0) + count)

            def advance(self, count: int) -> None:
                progress.advance(task, count)
        yield Bar()
