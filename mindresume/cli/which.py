"""``mindresume which``"""
from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, Folder, WorldSize, locate, print_json, progress_bar, refusal_json, world_text
from mindresume.errors import MissingCheckpointError, NoUsableCheckpointError
from mindresume.resume.prove import read_size
from mindresume.resume.select import Choice, Solo, candidates_for, describe, select
from mindresume.store.storage import PosixStorage

NOTHING = 3


@app.command()
def which(folder: Folder, json: AsJson = False, world_size: WorldSize = None,
          named: Annotated[str | None, typer.Option("--name", metavar="FILE", help="Ask for this checkpoint, as "
                                                    "resume_training: FILE does; the rank in the name does not "
                                                    "matter.")] = None,
          quick: Annotated[bool, typer.Option("--quick", help="Do not read the contents: a flipped bit stays "
                                              "unseen.")] = False) -> None:
    """Prints the checkpoint a resume would take and, for each newer one, why it would not.

    Does what the job does at its start, for all ranks at once: every byte of the chosen checkpoint is checked.
    Exit status: 0 there is one, 3 there is none (a resume would start afresh, or stop with an error).
    """
    storage, path = PosixStorage(), locate(folder)
    found, _ = candidates_for(storage, path, named) if named is None else (None, True)
    total = sum(read_size(c, list(c.files)) for c in found.candidates[:1]) if found else 0
    error = None
    try:
        with progress_bar(total, "checking", json) as progress:
            choice = select(storage, path, Solo(), world_size, named, ranks=lambda candidate: list(candidate.files),
                            progress=progress, complete=not quick)
    except (NoUsableCheckpointError, MissingCheckpointError) as failure:
        error = str(failure)
        choice = Choice(None, getattr(failure, "refused", ()), (), False, (), path)
    if json:
        chosen = choice.chosen
        print_json({"chosen": None if chosen is None else {
            "step": chosen.step, "epoch": chosen.epoch, "format": chosen.format,
            "files": [os.path.join(choice.root, file.path) for file in chosen.files.values()]},
            "refused": [refusal_json(choice.root, refusal) for refusal in choice.refused]})
    else:
        _print(choice, error)
        assumed = world_text(found, world_size) if found else ""
        if assumed:
            print(assumed)
    sys.exit(0 if choice.chosen is not None else NOTHING)


def _print(choice: Choice, error: str | None) -> None:
    from rich.console import Console
    from rich.table import Table
    if choice.refused:
        table = Table(title="refused, newest first", title_justify="left")
        for name in ("step", "rank", "reason", "file"):
            table.add_column(name, overflow="fold")
        for refusal in choice.refused:
            table.add_row(*("?" if value is None else str(value) for value in
                            (refusal.step, refusal.rank, refusal.reason, refusal.file)))
        Console().print(table)
    for note in choice.notes:
        print(f"note: {note}")
    if choice.chosen is not None:
        print(f"a resume takes step {choice.chosen.step} (epoch {choice.chosen.epoch}): {describe(choice.chosen)}")
    elif choice.fresh:
        print(f"{choice.root}: nothing was ever complete here; a resume starts afresh")
    else:
        print(error.splitlines()[0] if choice.refused and error else error or "nothing to resume from")
