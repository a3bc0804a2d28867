"""``mindresume which``"""
from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mindresume.agree import Solo
from mindresume.cli import app
from mindresume.cli.common import NOTHING, AsJson, Folder, WorldSize, print_json, progress_bar, refusal_json, say
from mindresume.formats import Candidate
from mindresume.formats.records import listed
from mindresume.reshard import merged
from mindresume.reshard.strategies import strategies
from mindresume.resume.select import Choice, describe
from mindresume.resume.selection import CheckpointSources, preview_selection
from mindresume.resume.selection_policy import FULL, QUICK, SelectionPolicy, every_rank
from mindresume.settings import Settings
from mindresume.store.storage import PosixStorage


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
    storage = PosixStorage()
    policy = SelectionPolicy(world_size, named, QUICK if quick else FULL, every_rank,
                             max_failed_loads=Settings.load().poison_limit)
    sources = CheckpointSources(strategies(storage), lambda storage, path: merged.choose_complete(
        storage, path, Solo(), policy.verifies_bytes, resume=True)[0])
    with progress_bar("checking", json) as meter:
        preview = preview_selection(storage, folder, policy, sources, meter)
    choice, error, part = preview.choice, preview.error, preview.node_local
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


def _print(choice: Choice, error: str, part: Candidate | None) -> None:
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
