"""Implements ``mindresume which``."""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import NOTHING, AsJson, Folder, WorldSize, print_json, progress_bar, say, step_text

if TYPE_CHECKING:
    from mindresume.api.catalog import Selection
    from mindresume.api.results import CheckpointInfo


@app.command()
def which(folder: Folder, json: AsJson = False, world_size: WorldSize = None,
          name: Annotated[str | None, typer.Option("--name", metavar="FILE", help="Request this checkpoint, as "
                                                   "resume_training: FILE does; the rank in the name is "
                                                   "ignored.")] = None,
          quick: Annotated[bool, typer.Option("--quick", help="Do not read the contents, so that a flipped bit "
                                              "is not found.")] = False) -> None:
    """Prints the checkpoint that a resume would take, and why it would refuse each newer one.

    It selects as a job does at its start, for all ranks at once, and checks every byte of the chosen checkpoint.
    On one of several nodes that share no disk: the newest step of which this node's part is complete.
    Exit status: 0 there is one, 3 there is none (a resume would start afresh, or stop with an error).
    """
    from mindresume.api import catalog
    with progress_bar("checking", json) as progress:
        opened = catalog.open(folder, world_size=world_size, missing_ok=True)
        found = opened.select(name=name, verify=not quick, progress=progress)
    if json:
        print_json(found.to_json())
    else:
        _print(found, opened.list().checkpoints if found.source == "memory" else ())
    sys.exit(0 if found.chosen or found.local else NOTHING)


def _print(found: Selection, on_disk: Sequence[CheckpointInfo]) -> None:
    for refused in found.refused:
        if found.local is not None and refused.step == found.local.step and refused.file is None:
            break                                       # the refusal only says that it is a part; older ones are not needed
        say(f"refused  step {step_text(refused.step)}: {refused.reason}" + (f"\n         {refused.file}" if refused.file else ""))
    for note in found.notes:
        say(f"note     {note}")
    if found.chosen is not None:
        chosen = found.chosen.info
        for warning in chosen.warnings:
            say(f"warning  {warning}")
        say(f"chosen   step {chosen.step}, epoch {chosen.epoch}: {found.description}")
        if found.source == "memory":
            is_there = any((row.step, row.run_id, row.state) == (chosen.step, chosen.run_id, "complete") for row in on_disk)
            say(f"memory   it lies in memory of this node, {found.root}; "
                + ("the same step is on disk, too" if is_there else
                   "and is lost with it; a job without memory_tier takes the disk. mindresume flush writes it to disk"))
    elif found.fresh:
        there = "no save was ever complete in" if os.path.exists(found.root) else "there is no"
        say(f"chosen   none: {there} {found.root}; a resume starts afresh")
    elif found.local is not None:
        from mindresume.formatting import listed
        say(f"part     step {found.local.step}, epoch {found.local.epoch}: rank {listed(found.local.local_ranks)} of "
            f"{found.local.world_size}, which are on this node. Nodes that share no disk saved it; their job takes the "
            f"newest step that all of them have")
    else:
        say(f"chosen   none: a resume stops with an error\n{found.error}" if not found.refused else
            "chosen   none: a resume stops with an error that lists these reasons")
