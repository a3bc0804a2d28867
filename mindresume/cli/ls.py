"""Implements ``mindresume ls``."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mindresume.cli import app
from mindresume.cli.common import AsJson, Folder, WorldSize, print_json, run_text, say, step_text, time_text
from mindresume.formatting import size_text

if TYPE_CHECKING:
    from mindresume.api.results import CheckpointInfo, Listing, Problem


@app.command()
def ls(folder: Folder, json: AsJson = False, world_size: WorldSize = None) -> None:
    """Lists every saved step, newest first, complete or not, with its problems.

    It checks names, records and sizes; `verify` checks the contents.
    """
    from mindresume.api import catalog
    from mindresume.formats import MINDFORMERS
    listing = catalog.open(folder, world_size=world_size).list()
    if json:
        print_json(listing.to_json())
        return
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
    from rich.console import Console
    from rich.table import Table
    if not checkpoints:
        say(f"{title}: no checkpoints")
        return
    say(title)                               # not as a title, which would wrap at spaces
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("step", "epoch", "ranks", "size", "format", "run", "saved", "state"):
        table.add_column(name, justify="right" if name in ("step", "epoch", "ranks", "size") else "left", no_wrap=True)
    for row in checkpoints:
        table.add_row(step_text(row.step), step_text(row.epoch), str(row.world_size), size_text(row.size_bytes),
                      "iteration" if row.iteration_dir else row.format, run_text(row), time_text(row.saved_at),
                      row.state + (", see below" if row.warnings else ""),
                      style="yellow" if row.problem or row.warnings else "")
    Console(markup=False, emoji=False, highlight=False).print(table)
    for row in checkpoints:
        if row.problem:
            say(_problem_text(listing.root, row.problem))
        for text in row.warnings:
            say(f"step {step_text(row.step)}: {text}")


def _problem_text(root: str, problem: Problem) -> str:
    file = os.path.relpath(problem.file, root) if problem.file else ""
    return f"step {step_text(problem.step)}: {problem.reason}" + (f" [{file}]" if file and file not in problem.reason else "")
