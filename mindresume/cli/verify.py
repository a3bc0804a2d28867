"""Implements ``mindresume verify``."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import (
    NOTHING,
    AsJson,
    Folder,
    WorldSize,
    origin_text,
    print_json,
    progress_bar,
    say,
    say_read,
    step_text,
)
from mindresume.cli.launch import Part, share_of_process

if TYPE_CHECKING:
    from mindresume.api.results import CheckpointVerification, VerificationReport


@app.command()
def verify(folder: Folder, json: AsJson = False, world_size: WorldSize = None,
           step: Annotated[int | None, typer.Option("--step", metavar="N", help="Only this step.")] = None,
           part: Part = None) -> None:
    """Reads every byte of every checkpoint and names the damaged file and tensor.

    What mindformers wrote has no checksums: its headers, sizes and counters are checked, and the output says so. What a job
    removes while it is read is no damage. Under msrun, mpirun or srun, each process reads a share of the files and prints what it
    found there.
    Exit status: 0 everything is as written, 1 something is damaged, missing or cannot be read, 3 there is no checkpoint.
    """
    from mindresume.api import catalog
    share = share_of_process(part)
    with progress_bar("verifying", json or not share.prints) as progress:
        report = catalog.open(folder, world_size=world_size).verify(step, progress=progress, part=share.part)
    if json:
        print_json(report.to_json())
    else:
        _show(report)
    sys.exit(NOTHING if not report.checkpoints else 1 if report.damaged or report.unreadable else 0)


def _show(report: VerificationReport) -> None:
    for found in report.checkpoints:
        _print(found)
    for found in report.memory:
        _print(found, "memory (this node), ")
    say_read(report)
    if report.removed_steps:
        say(f"step {', '.join(map(str, report.removed_steps))}: was removed while it was read")
    for note in report.notes:
        say(note)


def _print(found: CheckpointVerification, where: str = "") -> None:
    from mindresume.formatting import listed, ranks_count
    text = {"incomplete": "the save never completed; nothing is lost with it",
            "damaged": "DAMAGED" + ", but a resume takes it" * found.is_usable,
            "unreadable": "some files CANNOT BE READ now, which is no damage; verify it again",
            "unverifiable": "headers and sizes are right; mindformers wrote no checksums",
            "verified": f"every byte of {ranks_count(found.world_size)} is as it was written" if not found.local_ranks else
            f"every byte of rank {listed(found.local_ranks)} of {found.world_size}, which are on this node, is as it was written"
            }[found.state]
    text = "; ".join([text, *(() if found.problems else found.notes)])
    say(f"{where}step {step_text(found.step)} ({origin_text(found.origin, found.run_id)}): {text}")
    for problem in found.problems:
        say(f"    {problem.reason}" + (f"\n      {problem.file}" if problem.file else ""))
