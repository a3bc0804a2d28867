"""Implements ``mindresume ls``."""
from __future__ import annotations

import io
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mindresume.cli import app
from mindresume.cli.common import (
    CHECKPOINT_COLUMNS,
    RIGHT_ALIGNED,
    AsJson,
    Folder,
    Stopped,
    WorldSize,
    checkpoint_cells,
    new_table,
    print_json,
    say,
    show_table,
    step_text,
    stopped_by_signals,
)

if TYPE_CHECKING:
    from mindresume.api.results import CheckpointInfo, Listing, Problem


@app.command()
def ls(folder: Folder, json: AsJson = False, world_size: WorldSize = None,
       watch: Annotated[bool, typer.Option("--watch", help="Repeat it until Ctrl-C. On a terminal: one screen with the running "
                                           "job, its speed, saves in progress and free space. Elsewhere: a new listing "
                                           "whenever something changed; with --json, one JSON object a line.")] = False,
       every: Annotated[float | None, typer.Option("--every", min=0.1, metavar="SECONDS", show_default=False,
                                                   help="Pause between two looks of --watch. Default: 5. It is longer where "
                                                   "one look takes long.")] = None) -> None:
    """Lists every saved step, newest first, complete or not, with its problems.

    It checks names, records and sizes; `verify` checks the contents. With --watch the folder need not exist yet; it takes no lock
    and disturbs no job. Exit status of --watch: 130 after Ctrl-C.
    """
    if watch:
        _watch(folder, json, world_size, every)
    if every is not None:
        raise typer.BadParameter("it needs --watch", param_hint="--every")
    from mindresume.api import catalog
    listing = catalog.open(folder, world_size=world_size).list()
    if json:
        print_json(listing.to_json())
    else:
        _print_listing(listing)


def _watch(folder: str, as_json: bool, world_size: int | None, every: float | None) -> NoReturn:
    """Repeats the listing until a signal or the end of a reader's pipe."""
    from mindresume.api.observation import observe
    from mindresume.cli.watch import EVERY, Lines, watch
    pause = EVERY if every is None else every
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")       # a name, or an ellipsis, that its encoding lacks
        with stopped_by_signals():
            if as_json or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
                watch(lambda: observe(folder, world_size), Lines(folder, as_json, _print_listing), pause)
            else:
                from mindresume.cli.watch_screen import Screen
                with Screen(folder, pause) as screen:
                    watch(lambda: observe(folder, world_size), screen, pause)
    except Stopped as stopped:                  # the usual way to end it: nothing to say
        sys.exit(128 + stopped.signal)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # the interpreter flushes once more
        sys.exit(128 + signal.SIGPIPE)


def _print_listing(listing: Listing) -> None:
    """Prints a listing as text."""
    from mindresume.formats import MINDFORMERS
    _print(listing, listing.root, listing.checkpoints)
    if listing.memory:
        _print(listing, "memory (this node): lost with the node", listing.memory)
    foreign = any(row.origin == MINDFORMERS for row in listing)
    for note in (*(["run -: written by mindformers, without records"] if foreign else []), *listing.notes):
        say(note)
    for user in listing.in_use_by:
        state = {True: "alive", False: "dead, the next job takes over the folder", None: "on another machine, see its heartbeat"}
        say(f"{user.holder.purpose}: {user.holder}; {state[user.alive]}")


def _print(listing: Listing, title: str, checkpoints: tuple[CheckpointInfo, ...]) -> None:
    if not checkpoints:
        say(f"{title}: no checkpoints")
        return
    say(title)                               # not as a title, which would wrap at spaces
    table = new_table(CHECKPOINT_COLUMNS, RIGHT_ALIGNED)
    for row in checkpoints:
        *cells, state = checkpoint_cells(row)
        table.add_row(*cells, state + (", see below" if row.warnings else ""),
                      style="yellow" if row.problem or row.warnings else "")
    show_table(table)
    for row in checkpoints:
        if row.problem:
            say(_problem_text(listing.root, row.problem))
        for text in row.warnings:
            say(f"step {step_text(row.step)}: {text}")


def _problem_text(root: str, problem: Problem) -> str:
    file = os.path.relpath(problem.file, root) if problem.file else ""
    return f"step {step_text(problem.step)}: {problem.reason}" + (f" [{file}]" if file and file not in problem.reason else "")
