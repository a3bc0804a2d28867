"""Implements ``mindresume verify`` and ``mindresume scrub``, which read every byte of
checkpoints."""

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
    say_checkpoint,
    say_read,
    stopped_by_signals,
)
from mindresume.cli.launch import Part, share_of_process
from mindresume.formatting import size_text

if TYPE_CHECKING:
    from mindresume.api.maintenance import ScrubbedCheckpoint
    from mindresume.api.results import CheckpointVerification


@app.command()
def verify(
    folder: Folder,
    json: AsJson = False,
    world_size: WorldSize = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Only this step.")] = None,
    part: Part = None,
) -> None:
    """Reads every byte of every checkpoint and names the damaged file and tensor.

    What mindformers wrote has no checksums: its headers, sizes and counters are checked, and the
    output says so. What a job removes while it is read is no damage. Under msrun, mpirun or srun,
    each process reads a share of the files and prints what it found there.
    Exit status: 0 everything is as written, 1 something is damaged, missing or cannot be read, 3
        there is no checkpoint.
    """
    from mindresume.api import catalog

    share = share_of_process(part)
    with progress_bar("verifying", json or not share.prints) as progress:
        report = catalog.open(folder, world_size=world_size).verify(
            step, progress=progress, part=share.part
        )
    if json:
        print_json(report.to_json())
    else:
        for found in report.checkpoints:
            _say_verified(found)
        for found in report.memory:
            _say_verified(found, "memory (this node), ")
        say_read(report)
        if report.removed_steps:
            say(f"step {', '.join(map(str, report.removed_steps))}: was removed while it was read")
        for note in report.notes:
            say(note)
    sys.exit(NOTHING if not report.checkpoints else 1 if report.damaged or report.unreadable else 0)


def _say_verified(found: CheckpointVerification, where: str = "") -> None:
    from mindresume.formatting import listed, ranks_count

    text = {
        "incomplete": "the save never completed; nothing is lost with it",
        "damaged": "DAMAGED" + ", but a resume takes it" * found.is_usable,
        "unreadable": "some files CANNOT BE READ now, which is no damage; verify it again",
        "unverifiable": "headers and sizes are right; mindformers wrote no checksums",
        "verified": f"every byte of {ranks_count(found.world_size)} is as it was written"
        if not found.local_ranks
        else f"every byte of rank {listed(found.local_ranks)} of {found.world_size}, which are on "
        "this node, is as it was written",
    }[found.state]
    text = "; ".join([text, *(() if found.problems else found.notes)])
    say_checkpoint(
        found.step,
        origin_text(found.origin, found.run_id),
        text,
        [(problem.reason, problem.file) for problem in found.problems],
        where,
    )


# ---- scrub ---------------------------------------------------------------------------------------


@app.command()
def scrub(
    folder: Folder,
    json: AsJson = False,
    rate: Annotated[
        float,
        typer.Option(
            "--rate",
            min=0,
            metavar="MB/s",
            help="Read at most so many megabytes (10^6 bytes) a second. Default: no limit.",
        ),
    ] = 0.0,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Replace damaged files by intact copies: of the same tensors on "
            "other ranks, or from --remote.",
        ),
    ] = False,
    remote: Annotated[
        str | None,
        typer.Option(
            "--remote",
            metavar="URL",
            help="remote_save_url of the training: repair from there, too.",
        ),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Only this step.")] = None,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            min=0,
            metavar="HOURS",
            help="Leave out what was saved, or read by a scrub, in the last HOURS.",
        ),
    ] = 0.0,
) -> None:
    """Re-reads every kept checkpoint from the disk, names what rotted by file and tensor, and can
    repair it.

    What stays damaged is recorded beside the checkpoint: resumes, `which`, `ls` and the report
    refuse it from then on without a new reading, until its files are replaced. `verify` reads the
    same and writes nothing. A running job is not disturbed: what it is writing is left out, and it
    removes nothing that is being read. docs/scrub.md has the details.
    Exit status: 0 all is as written or repaired, 1 damage is left or files cannot be read, 3 there
        is no checkpoint.
    """
    from mindresume.api.maintenance import scrub as scrub_folder

    with stopped_by_signals(), progress_bar("scrubbing", json) as progress:
        report = scrub_folder(
            folder,
            rate_mb=rate,
            repair=repair,
            remote=remote,
            step=step,
            older_than_hours=older_than,
            progress=progress,
        )
    if json:
        print_json(report.to_json())
    else:
        for found in report.checkpoints:
            _say_scrubbed(found)
        say_read(report)
        cached = sum(found.cached_bytes for found in report.checkpoints)
        if cached > report.bytes_read // 2:
            say(
                f"the kernel kept about {size_text(cached)} in its cache although it was asked to "
                "drop them: these bytes may not "
                f"have come from the disk"
            )
    sys.exit(NOTHING if not report.checkpoints else 1 if report.damaged or report.unreadable else 0)


def _say_scrubbed(found: ScrubbedCheckpoint) -> None:
    text = {
        "intact": "every byte is as it was written",
        "repaired": "was damaged, and is as it was written again",
        "damaged": "DAMAGED, and refused from now on",
        "removed": "was removed while it was read",
        "unreadable": "some files CANNOT BE READ; nothing is recorded of them, the next scrub "
        "reads them again",
        "skipped": f"skipped: {found.reason}",
    }[found.state]
    left = "unreadable" if found.state == "unreadable" else "damaged"
    rows = [
        (f"{name}: {problem.reason}", str(problem.file))
        for name, problems in ((left, found.damaged), ("repaired", found.repaired))
        for problem in problems
    ]
    say_checkpoint(
        found.step,
        "mindformers" if found.run_id is None else f"run {found.run_id}",
        text,
        [*rows, *((note, None) for note in found.notes)],
    )
