"""``mindresume verify``"""
from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import (
    NOTHING,
    AsJson,
    Folder,
    WorldSize,
    locate,
    origin_text,
    print_json,
    progress_bar,
    refusal_json,
    say,
)
from mindresume.errors import MissingCheckpointError
from mindresume.formats import MINDFORMERS, Candidate, Refusal
from mindresume.formats.complete import is_complete
from mindresume.formats.records import absent_text, listed, offered, ranks_count
from mindresume.formatting import size_text
from mindresume.reshard import merged
from mindresume.reshard.strategies import strategies
from mindresume.resume.prove import read_size
from mindresume.resume.select import world_size_notes
from mindresume.resume.survey import CheckpointStatus, list_checkpoints
from mindresume.resume.verified import verify_checkpoints
from mindresume.store.storage import PosixStorage


@app.command()
def verify(folder: Folder, json: AsJson = False, world_size: WorldSize = None,
           step: Annotated[int | None, typer.Option("--step", metavar="N", help="Only this step.")] = None) -> None:
    """Reads every byte of every checkpoint and names the damaged file and tensor.

    What mindformers wrote has no checksums: there headers, sizes and counters are checked, and it is said so. What a job removes
    while it is read is no damage.
    Exit status: 0 all is as it was written, 1 something is damaged or missing, 3 there is no checkpoint.
    """
    storage = PosixStorage()
    path = locate(folder)
    complete = is_complete(storage, path)
    found, rows = merged.survey(storage, path) if complete else list_checkpoints(storage, path, strategies(storage), world_size)
    if found.strange:
        raise MissingCheckpointError(found.strange)
    wanted = [row for row in rows if step is None or row.candidate.step == step]
    if step is not None and not wanted:
        raise MissingCheckpointError(f"{found.root} has no step {step}; {offered(found.candidates)}")
    read, started = 0, time.monotonic()
    with progress_bar("verifying", json) as meter:
        meter.expect(sum(read_size(row.candidate, list(row.candidate.files)) for row in wanted if row.candidate.existed))

        def progress(count: int) -> None:
            nonlocal read
            read += count
            meter.advance(count)
        def again() -> list[CheckpointStatus]:
            return [row for row in list_checkpoints(storage, path, strategies(storage), world_size)[1]
                    if step is None or row.candidate.step == step]
        if complete:
            results = [merged.verify(storage, path, progress) for _ in wanted]
        else:
            results = verify_checkpoints(storage, found.root, wanted, again, progress)
    removed = sorted({row.candidate.step for row in wanted} - {candidate.step for candidate, _ in results} - {None})
    seconds = time.monotonic() - started
    damaged = any(bad for candidate, bad in results if candidate.existed)
    if json:
        print_json({"root": found.root, "damaged": damaged, "removed": removed, "bytes": read, "seconds": round(seconds, 3),
                    "checkpoints": [
            {"step": candidate.step, "run": candidate.run, "origin": candidate.origin, "state": _state(candidate, bad),
             "absent": list(candidate.absent),
             "problems": [refusal_json(found.root, refusal) for refusal in bad]} for candidate, bad in results]})
    else:
        for candidate, bad in results:
            _print(found.root, candidate, bad)
        say(f"{size_text(read)} read in {seconds:.1f} s ({size_text(read / seconds if seconds else 0)}/s)"
            if results else f"{found.root}: no checkpoints")
        if removed:
            say(f"step {', '.join(map(str, removed))}: removed by a job or by hand while it was read")
        for note in (*found.notes, *world_size_notes(found, world_size)):
            say(note)
    sys.exit(NOTHING if not results else 1 if damaged else 0)


def _state(candidate: Candidate, bad: list[Refusal]) -> str:
    if not candidate.existed:
        return "incomplete"
    return "damaged" if bad else "unverifiable" if candidate.origin == MINDFORMERS else "verified"


def _print(root: str, candidate: Candidate, bad: list[Refusal]) -> None:
    state = _state(candidate, bad)
    text = {"incomplete": "the save never completed; nothing is lost with it", "damaged": "DAMAGED",
            "unverifiable": "headers and sizes are right; mindformers wrote no checksums",
            "verified": f"every byte of {ranks_count(candidate.world_size)} is as it was written" if not candidate.part else
            f"every byte of rank {listed(candidate.part)} of {candidate.world_size}, which are on this node, is as it was written"
            }[state]
    if candidate.absent and not bad:
        text = f"{text}; {absent_text(candidate)}"
    say(f"step {'?' if candidate.step is None else candidate.step} ({origin_text(candidate)}): {text}")
    for refusal in bad:
        where = os.path.join(root, refusal.file) if refusal.file else ""
        say(f"    {refusal.reason}" + (f"\n      {where}" if where else ""))
