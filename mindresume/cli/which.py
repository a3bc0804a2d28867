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
    storage, path = PosixStorage(), locate(folder, must_exist=False)
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
    for refusal in choice.refused:
        print(f"refused  step {'?' if refusal.step is None else refusal.step}: {refusal.reason}"
              + (f"\n         {os.path.join(choice.root, refusal.file)}" if refusal.file else ""))
    for note in choice.notes:
        print(f"note     {note}")
    if choice.chosen is not None:
        print(f"chosen   step {choice.chosen.step}, epoch {choice.chosen.epoch}: {describe(choice.chosen)}")
    elif choice.fresh:
        there = "no save was ever complete in" if os.path.exists(choice.root) else "there is no"
        print(f"chosen   none: {there} {choice.root}; a resume starts afresh")
    else:
        print(f"chosen   none: a resume stops with an error\n{error}" if not choice.refused else
              "chosen   none: a resume stops with an error that lists these reasons")
