"""``mindresume ls``"""
from __future__ import annotations

import os
from dataclasses import asdict

from mindresume.cli import app
from mindresume.cli.common import AsJson, Folder, WorldSize, locate, print_json, size_text, time_text
from mindresume.formats import MINDFORMERS, Candidate, Refusal
from mindresume.manifest import run_sequence
from mindresume.resume.prove import quick
from mindresume.resume.select import assumption, candidates_for
from mindresume.store.claim import claims, lives
from mindresume.store.storage import PosixStorage


@app.command()
def ls(folder: Folder, json: AsJson = False, world_size: WorldSize = None) -> None:
    """Lists every saved step, newest first: complete or not, and what is wrong with it.

    Names, records and sizes are checked, contents are not (that is `verify`).
    """
    storage = PosixStorage()
    found, _ = candidates_for(storage, locate(folder))
    rows = []
    for candidate in found.candidates:
        ranks = world_size or (found.expected_ranks if candidate.origin == MINDFORMERS else None)
        rows.append((candidate, quick(storage, found.root, candidate, ranks)))
    users = claims(storage, found.root)
    if json:
        print_json({"root": found.root, "checkpoints": [_row(found.root, *row) for row in rows], "notes": list(found.notes),
                    "in_use_by": [{**asdict(owner), "alive": lives(owner)} for owner in users]})
        return
    _print(storage, found.root, rows)
    foreign = any(candidate.run is None for candidate in found.candidates)
    for note in (*found.notes, *(["run -: written by mindformers, without records"] if foreign else []),
                 *assumption(found, world_size)):
        print(note)
    for owner in users:
        state = {True: "alive", False: "dead, the next job takes over", None: "on another machine: its heartbeat tells"}
        print(f"{owner.purpose}: {owner}; {state[lives(owner)]}")


def _row(root: str, candidate: Candidate, problem: Refusal | None) -> dict[str, object]:
    return {"step": candidate.step, "epoch": candidate.epoch, "format": candidate.format, "ranks": candidate.world_size,
            "iteration": candidate.base or None, "origin": candidate.origin, "run": candidate.run,
            "committed": candidate.committed, "usable": problem is None,
            "problem": problem.reason if problem else None, "saved_at": candidate.saved_at,
            "files": [os.path.join(root, file.path) for file in candidate.every_file]}


def _print(storage: PosixStorage, root: str, rows: list[tuple[Candidate, Refusal | None]]) -> None:
    from rich.console import Console
    from rich.table import Table
    if not rows:
        print(f"{root}: no checkpoints")
        return
    table = Table(title=root, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("step", "epoch", "ranks", "size", "format", "run", "saved", "state"):
        table.add_column(name, justify="right" if name in ("step", "epoch", "ranks", "size") else "left", no_wrap=True)
    for candidate, problem in rows:
        sizes = [storage.status(os.path.join(root, file.path)) for file in candidate.every_file]
        table.add_row(_text(candidate.step), _text(candidate.epoch), str(candidate.world_size),
                      size_text(sum(status.size for status in sizes if status)),
                      "iteration" if candidate.base else candidate.format,
                      str(run_sequence(candidate.run)) if candidate.run else "-",
                      time_text(candidate.saved_at), _state(candidate, problem), style="yellow" if problem else "")
    Console().print(table)
    for _, problem in rows:
        if problem:
            print(problem)


def _state(candidate: Candidate, problem: Refusal | None) -> str:
    if problem is None:
        return "complete"
    return "unusable" if candidate.existed else "incomplete"


def _text(value: int | None) -> str:
    return "?" if value is None else str(value)
