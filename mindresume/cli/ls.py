"""Implements ``mindresume ls`` and ``mindresume which``: what a folder holds, and which checkpoint
a resume takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import (
    NOTHING,
    AsJson,
    Folder,
    WorldSize,
    print_json,
    print_table,
    problem_text,
    progress_bar,
    say,
    step_text,
    time_text,
)
from mindresume.formatting import size_text

if TYPE_CHECKING:
    from mindresume.api.catalog import Selection
    from mindresume.api.results import CheckpointInfo, Listing


@app.command()
def ls(folder: Folder, json: AsJson = False, world_size: WorldSize = None) -> None:
    """Lists every saved step, newest first, complete or not, with its problems.

    It checks names, records and sizes; `verify` checks the contents. It takes no lock and disturbs
    no job: `watch mindresume ls DIR` repeats it.
    """
    from mindresume.api import catalog

    listing = catalog.open(folder, world_size=world_size).list()
    if json:
        print_json(listing.to_json())
        return
    from mindresume.formats import MINDFORMERS

    _say_rows(listing, listing.root, listing.checkpoints)
    if listing.memory:
        _say_rows(listing, "memory (this node): lost with the node", listing.memory)
    if any(row.origin == MINDFORMERS for row in listing):
        say("run -: written by mindformers, without records")
    for note in listing.notes:
        say(note)
    for user in listing.in_use_by:
        state = {
            True: "alive",
            False: "dead, the next job takes over the folder",
            None: "on another machine, see its heartbeat",
        }
        say(f"{user.holder.purpose}: {user.holder}; {state[user.alive]}")


def _say_rows(listing: Listing, title: str, checkpoints: tuple[CheckpointInfo, ...]) -> None:
    from mindresume.formats import MERGED
    from mindresume.model.manifest import run_sequence

    if not checkpoints:
        say(f"{title}: no checkpoints")
        return
    say(title)  # not as a title, which would wrap at spaces
    rows = [
        {
            "step": step_text(row.step),
            "epoch": step_text(row.epoch),
            "ranks": str(row.world_size),
            "size": size_text(row.size_bytes),
            "format": "iteration" if row.iteration_dir else row.format,
            "run": str(run_sequence(row.run_id))
            if row.run_id
            else MERGED
            if row.origin == MERGED
            else "-",
            "saved": time_text(row.saved_at),
            "state": row.state + (", see below" if row.warnings else ""),
        }
        for row in checkpoints
    ]
    yellow = [i for i, row in enumerate(checkpoints) if row.problem or row.warnings]
    print_table(rows, ("step", "epoch", "ranks", "size"), (), yellow)
    for row in checkpoints:
        if row.problem:
            file = os.path.relpath(row.problem.file, listing.root) if row.problem.file else ""
            say(
                problem_text(row.problem)
                + (f" [{file}]" if file and file not in row.problem.reason else "")
            )
        for text in row.warnings:
            say(f"step {step_text(row.step)}: {text}")


# ---- which ---------------------------------------------------------------------------------------


@app.command()
def which(
    folder: Folder,
    json: AsJson = False,
    world_size: WorldSize = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="FILE",
            help="Request this checkpoint, as "
            "resume_training: FILE does; the rank in the name is "
            "ignored.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Do not read the contents, so that a flipped bit is not found."
        ),
    ] = False,
) -> None:
    """Prints the checkpoint that a resume would take, and why it would refuse each newer one.

    It selects as a job does at its start, for all ranks at once, and checks every byte of the
    chosen checkpoint. On one of several nodes that share no disk: the newest step of which this
    node's part is complete. Exit status: 0 there is one, 3 there is none (a resume would start
    afresh, or stop with an error).
    """
    from mindresume.api import catalog

    with progress_bar("checking", json) as progress:
        opened = catalog.open(folder, world_size=world_size, missing_ok=True)
        found = opened.select(name=name, verify=not quick, progress=progress)
    if json:
        print_json(found.to_json())
    else:
        _say_selection(found, opened.list().checkpoints if found.source == "memory" else ())
    sys.exit(0 if found.chosen or found.local else NOTHING)


def _say_selection(found: Selection, on_disk: Sequence[CheckpointInfo]) -> None:
    for refused in found.refused:
        if found.local is not None and refused.step == found.local.step and refused.file is None:
            # the refusal only says that it is a part; older ones are not needed
            break
        say(
            f"refused  {problem_text(refused)}"
            + (f"\n         {refused.file}" if refused.file else "")
        )
    for note in found.notes:
        say(f"note     {note}")
    if found.chosen is not None:
        chosen = found.chosen.info
        for warning in chosen.warnings:
            say(f"warning  {warning}")
        say(f"chosen   step {chosen.step}, epoch {chosen.epoch}: {found.description}")
        if found.source == "memory":
            is_there = any(
                (row.step, row.run_id, row.state) == (chosen.step, chosen.run_id, "complete")
                for row in on_disk
            )
            say(
                f"memory   it lies in memory of this node, {found.root}; "
                + (
                    "the same step is on disk, too"
                    if is_there
                    else "and is lost with it; a job without memory_tier takes the disk. "
                    "mindresume flush writes it to disk"
                )
            )
    elif found.fresh:
        there = "no save was ever complete in" if os.path.exists(found.root) else "there is no"
        say(f"chosen   none: {there} {found.root}; a resume starts afresh")
    elif found.local is not None:
        from mindresume.formatting import listed

        say(
            f"part     step {found.local.step}, epoch {found.local.epoch}: rank "
            f"{listed(found.local.local_ranks)} of "
            f"{found.local.world_size}, which are on this node. Nodes that share no disk saved it; "
            "their job takes the "
            f"newest step that all of them have"
        )
    else:
        say(
            f"chosen   none: a resume stops with an error\n{found.error}"
            if not found.refused
            else "chosen   none: a resume stops with an error that lists these reasons"
        )
