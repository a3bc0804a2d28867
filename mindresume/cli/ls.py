"""``mindresume ls``"""
from __future__ import annotations

import os
from dataclasses import asdict

from mindresume.cli import app
from mindresume.cli.common import AsJson, Folder, WorldSize, locate, print_json, say, time_text
from mindresume.errors import MissingCheckpointError
from mindresume.formats import MERGED, MINDFORMERS
from mindresume.formats.complete import is_complete
from mindresume.formatting import size_text
from mindresume.manifest import run_sequence
from mindresume.reshard import merged
from mindresume.reshard.strategies import strategies
from mindresume.resume.select import world_size_notes
from mindresume.resume.survey import CheckpointStatus, list_checkpoints, size_of
from mindresume.store.claim import lives, users_of
from mindresume.store.storage import PosixStorage, Storage


@app.command()
def ls(folder: Folder, json: AsJson = False, world_size: WorldSize = None) -> None:
    """Lists every saved step, newest first: complete or not, and what is wrong with it.

    Names, records and sizes are checked, contents are not (that is `verify`).
    """
    storage = PosixStorage()
    path = locate(folder)
    found, rows = (merged.survey(storage, path) if is_complete(storage, path) else
                   list_checkpoints(storage, path, strategies(storage), world_size))
    if found.strange:
        raise MissingCheckpointError(found.strange)
    users = users_of(storage, found.root)
    if json:
        print_json({"root": found.root, "checkpoints": [_row(found.root, row) for row in rows], "notes": list(found.notes),
                    "in_use_by": [{**asdict(owner), "alive": lives(owner)} for owner in users]})
        return
    _print(storage, found.root, rows)
    foreign = any(row.candidate.origin == MINDFORMERS for row in rows)
    for note in (*found.notes, *(["run -: written by mindformers, without records"] if foreign else []),
                 *world_size_notes(found, world_size)):
        say(note)
    for owner in users:
        state = {True: "alive", False: "dead, the next job takes over", None: "on another machine: its heartbeat tells"}
        say(f"{owner.purpose}: {owner}; {state[lives(owner)]}")


def _row(root: str, row: CheckpointStatus) -> dict[str, object]:
    candidate, problem = row.candidate, row.problem
    return {"step": candidate.step, "epoch": candidate.epoch, "format": candidate.format, "ranks": candidate.world_size,
            "absent": list(candidate.absent),
            "iteration": candidate.base or None, "origin": candidate.origin, "run": candidate.run,
            "committed": candidate.committed, "usable": problem is None,
            "problem": problem.reason if problem else None, "remarks": list(row.remarks), "saved_at": candidate.saved_at,
            "files": [os.path.join(root, file.path) for file in candidate.every_file]}


def _print(storage: Storage, root: str, rows: tuple[CheckpointStatus, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    if not rows:
        say(f"{root}: no checkpoints")
        return
    say(root)                                       # not as a title, which would be broken at blanks
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("step", "epoch", "ranks", "size", "format", "run", "saved", "state"):
        table.add_column(name, justify="right" if name in ("step", "epoch", "ranks", "size") else "left", no_wrap=True)
    for row in rows:
        candidate = row.candidate
        table.add_row(_text(candidate.step), _text(candidate.epoch), str(candidate.world_size),
                      size_text(size_of(storage, root, candidate)), row.kind,
                      str(run_sequence(candidate.run)) if candidate.run else MERGED if candidate.origin == MERGED else "-",
                      time_text(candidate.saved_at), row.state + (", see below" if row.remarks else ""),
                      style="yellow" if row.problem or row.remarks else "")
    Console(markup=False, emoji=False, highlight=False).print(table)
    for row in rows:
        if row.problem:
            say(row.problem)
        for text in row.remarks:
            say(f"step {_text(row.candidate.step)}: {text}")


def _text(value: int | None) -> str:
    return "?" if value is None else str(value)
