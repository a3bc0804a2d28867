"""``mindresume which``"""
from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mindresume.agree import Solo
from mindresume.cli import app
from mindresume.cli.common import NOTHING, AsJson, Folder, WorldSize, locate, print_json, progress_bar, refusal_json, say
from mindresume.errors import AgreementError, UnusableError
from mindresume.formats import Candidate, Refusal
from mindresume.formats.complete import is_complete
from mindresume.formats.records import listed
from mindresume.reshard import merged
from mindresume.reshard.strategies import strategies
from mindresume.resume.prove import prove, read_size
from mindresume.resume.select import Choice, describe, select
from mindresume.resume.survey import PART, survey
from mindresume.settings import Settings
from mindresume.store.storage import PosixStorage, Storage


@app.command()
def which(folder: Folder, json: AsJson = False, world_size: WorldSize = None,
          named: Annotated[str | None, typer.Option("--name", metavar="FILE", help="Ask for this checkpoint, as "
                                                    "resume_training: FILE does; the rank in the name does not "
                                                    "matter.")] = None,
          quick: Annotated[bool, typer.Option("--quick", help="Do not read the contents: a flipped bit stays "
                                              "unseen.")] = False) -> None:
    """Prints the checkpoint a resume would take and, for each newer one, why it would not.

    Does what the job does at its start, for all ranks at once: every byte of the chosen checkpoint is checked.
    On one of several nodes that share no disk: the newest step of which this node's part is whole.
    Exit status: 0 there is one, 3 there is none (a resume would start afresh, or stop with an error).
    """
    error = part = None
    try:
        with progress_bar("checking", json) as meter:
            storage = PosixStorage()
            if named is None and os.path.isdir(path := locate(folder, must_exist=False)) and is_complete(storage, path):
                choice, error = _complete(storage, path, quick)
            else:
                choice = select(storage, folder, Solo(), world_size, named, ranks=lambda candidate: list(candidate.files),
                                strategy_of=strategies(storage),
                                progress=meter.advance, complete=not quick, poison_limit=Settings.load().poison_limit,
                                on_candidate=lambda candidate: meter.expect(read_size(candidate, list(candidate.files))))
    except UnusableError as failure:
        error = str(failure)
        part = _part(storage, folder, quick) if named is None else None
        choice = Choice(None, failure.refused, (), False, (), os.path.dirname(folder) if os.path.isfile(folder) else folder)
    if json:
        chosen = choice.chosen
        print_json({"chosen": None if chosen is None else {
            "step": chosen.step, "epoch": chosen.epoch, "format": chosen.format,
            "absent": list(chosen.absent), "files": [os.path.join(choice.root, file.path) for file in chosen.every_file],
            "remarks": list(choice.remarks)},
            "refused": [refusal_json(choice.root, refusal) for refusal in choice.refused],
            **({"part": {"step": part.step, "epoch": part.epoch, "ranks": list(part.part), "world_size": part.world_size,
                         "files": [os.path.join(choice.root, file.path) for file in part.every_file]}} if part else {}),
            **({"error": error} if error and not part else {})})
    else:
        _print(choice, error, part)
    sys.exit(0 if choice.chosen or part else NOTHING)


def _part(storage: Storage, folder: str, quick: bool) -> Candidate | None:
    """The newest step of which one node has its part, where nodes share no disk; the job asks all of them."""
    try:
        found, rows = survey(storage, folder, strategies(storage))
    except UnusableError:
        return None
    for row in rows:
        if row.state == PART and not any(isinstance(prove(storage, found.root, row.candidate, rank, None, not quick), Refusal)
                                         for rank in row.candidate.files):
            return row.candidate
    return None


def _complete(storage: Storage, path: str, quick: bool) -> tuple[Choice, str | None]:
    """Of complete weights, which are one step; damage is an error."""
    try:
        return merged.choose_complete(storage, path, Solo(), not quick, resume=True)[0], None
    except AgreementError as failure:
        return Choice(None, (), (), False, (), path), str(failure).removeprefix("rank 0: ")


def _print(choice: Choice, error: str | None, part: Candidate | None) -> None:
    for refusal in choice.refused:
        if part is not None and refusal.step == part.step and refusal.file is None:
            break                                       # that it is a part; nothing older is asked for
        say(f"refused  step {'?' if refusal.step is None else refusal.step}: {refusal.reason}"
            + (f"\n         {os.path.join(choice.root, refusal.file)}" if refusal.file else ""))
    for note in choice.notes:
        say(f"note     {note}")
    for remark in choice.remarks:
        say(f"warning  {remark}")
    if choice.chosen is not None:
        say(f"chosen   step {choice.chosen.step}, epoch {choice.chosen.epoch}: {describe(choice.chosen, choice.complete)}")
    elif choice.fresh:
        there = "no save was ever complete in" if os.path.exists(choice.root) else "there is no"
        say(f"chosen   none: {there} {choice.root}; a resume starts afresh")
    elif part is not None:
        say(f"part     step {part.step}, epoch {part.epoch}: rank {listed(part.part)} of {part.world_size}, all that this node "
            f"has. Nodes that share no disk saved it: their job takes the newest step that all of them have")
    else:
        say(f"chosen   none: a resume stops with an error\n{error}" if not choice.refused else
            "chosen   none: a resume stops with an error that lists these reasons")
