"""Implements ``mindresume ls``, ``which`` and ``verify``: what a folder holds, which checkpoint a
resume takes, and whether every byte is as it was written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import (
    NOTHING,
    AsJson,
    Folder,
    OnlyStep,
    Part,
    WorldSize,
    origin_text,
    print_json,
    print_table,
    problem_text,
    progress_bar,
    say,
    say_checkpoint,
    say_read,
    share_of_process,
    step_text,
    time_text,
)
from mindresume.formatting import size_text

if TYPE_CHECKING:
    from mindresume.api.catalog import Selection
    from mindresume.api.results import CheckpointInfo, CheckpointVerification, Listing


@app.command()
def ls(folder: Folder, json: AsJson = False, world_size: WorldSize = None) -> None:
    """Lists every saved step, newest first, complete or not, with its problems.

    It checks names, records and sizes; `verify` checks the contents. It takes no lock and disturbs
    no job: `watch mindresume ls DIR` follows one; under `mindresume run` the last line says what
    its ranks do. A narrow terminal shows fewer columns.
    """
    from mindresume.api import catalog

    listing = catalog.open(folder, world_size=world_size).list()
    if json:
        print_json(listing.to_json())
        return
    from mindresume.coordination.lease import LOADING, REMOVING, SAVING, SCRUBBING
    from mindresume.formats import MINDFORMERS
    from mindresume.formatting import listed
    from mindresume.report.supervised import supervised_state

    _say_rows(listing, listing.root, listing.checkpoints)
    copies = tuple(row for row in listing.memory if row.is_partner_copy)
    if own := tuple(row for row in listing.memory if not row.is_partner_copy):
        _say_rows(listing, "memory (this node): lost with the node", own)
    if copies:
        ranks = listed(sorted({rank for row in copies for rank in row.local_ranks}))
        _say_rows(listing, f"partner copy (of rank {ranks}), in memory of this node", copies)
    if any(row.origin == MINDFORMERS for row in listing):
        say("run -: written by mindformers, without records")
    for note in listing.notes:
        say(note)
    users = {SAVING: "training", LOADING: "reader", SCRUBBING: "scrub", REMOVING: "clean-up"}
    states = {
        True: "alive",
        False: "dead, the next job takes over the folder",
        None: "on another machine, see its heartbeat",
    }
    for user in listing.in_use_by:
        purpose = users.get(user.holder.purpose, user.holder.purpose)
        was = "was " if user.alive is False else ""
        say(f"{was}in use by a {purpose}: {user.holder}; {states[user.alive]}")
    if supervised := supervised_state([os.path.dirname(os.path.abspath(listing.root))]):
        say(f"supervised: {supervised}")


def _say_rows(listing: Listing, title: str, checkpoints: tuple[CheckpointInfo, ...]) -> None:
    from mindresume.formats import MERGED
    from mindresume.model.manifest import run_sequence

    if not checkpoints:
        say(f"{title}: no checkpoints")
        return
    say(title)  # not as a title, which would wrap at spaces
    rows = [
        {
            "step": step_text(row.step),
            "epoch": step_text(row.epoch),
            "ranks": str(row.world_size),
            "size": size_text(row.size_bytes),
            "format": "iteration" if row.iteration_dir else row.format,
            "run": str(run_sequence(row.run_id))
            if row.run_id
            else MERGED
            if row.origin == MERGED
            else "-",
            "saved": time_text(row.saved_at),
            "state": row.state + (", see below" if row.warnings else ""),
        }
        for row in checkpoints
    ]
    yellow = [i for i, row in enumerate(checkpoints) if row.problem or row.warnings]
    dispensable = ("run", "format", "ranks", "epoch", "saved", "size")
    print_table(rows, ("step", "epoch", "ranks", "size"), (), yellow, dispensable=dispensable)
    for row in checkpoints:
        if row.problem:
            file = os.path.relpath(row.problem.file, listing.root) if row.problem.file else ""
            say(
                problem_text(row.problem)
                + (f" [{file}]" if file and file not in row.problem.reason else "")
            )
        for text in row.warnings:
            say(f"step {step_text(row.step)}: {text}")


# ---- which ---------------------------------------------------------------------------------------


@app.command()
def which(
    folder: Folder,
    json: AsJson = False,
    world_size: WorldSize = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="FILE",
            help="Request this checkpoint, as resume_training: FILE does; the rank in the name is "
            "ignored.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Do not read the contents, so that a flipped bit is not found."
        ),
    ] = False,
) -> None:
    """Prints the checkpoint that a resume would take, and why it would refuse each newer one.

    It selects as a job does at its start, for all ranks at once, and checks every byte of the
    chosen checkpoint. Nodes that share no disk: it prints the newest step of which this node's part
    is complete.

    Exit status: 0 there is one, 3 there is none (a resume would start afresh, or stop with an
    error).
    """
    from mindresume.api import catalog

    with progress_bar("checking", json) as progress:
        opened = catalog.open(folder, world_size=world_size, missing_ok=True)
        found = opened.select(name=name, verify=not quick, progress=progress)
    if json:
        print_json(found.to_json())
    else:
        _say_selection(found, opened.list().checkpoints if found.source == "memory" else ())
    sys.exit(0 if found.chosen or found.local else NOTHING)


def _say_selection(found: Selection, on_disk: Sequence[CheckpointInfo]) -> None:
    for refused in found.refused:
        if found.local is not None and refused.step == found.local.step and refused.file is None:
            # the refusal only says that it is a part; older ones are not needed
            break
        say(
            f"refused  {problem_text(refused)}"
            + (f"\n         {refused.file}" if refused.file else "")
        )
    for note in found.notes:
        say(f"note     {note}")
    if found.chosen is not None:
        chosen = found.chosen.info
        for warning in chosen.warnings:
            say(f"warning  {warning}")
        say(f"chosen   step {chosen.step}, epoch {chosen.epoch}: {found.description}")
        if found.source == "memory":
            is_there = any(
                (row.step, row.run_id, row.state) == (chosen.step, chosen.run_id, "complete")
                for row in on_disk
            )
            say(
                f"memory   it lies in memory of this node, {found.root}; "
                + (
                    "the same step is on disk, too"
                    if is_there
                    else "and is lost with it; a job without memory_tier takes the disk. "
                    "mindresume flush writes it to disk"
                )
            )
    elif found.fresh:
        there = "no save was ever complete in" if os.path.exists(found.root) else "there is no"
        say(f"chosen   none: {there} {found.root}; a resume starts afresh")
    elif found.local is not None:
        from mindresume.formatting import listed

        say(
            f"part     step {found.local.step}, epoch {found.local.epoch}: rank "
            f"{listed(found.local.local_ranks)} of {found.local.world_size}, which are on this "
            "node. Nodes that share no disk saved it; their job takes the newest step that all of "
            "them have"
        )
    else:
        end = f"chosen   none: [{found.code}] a resume stops with an error"
        say(f"{end} that lists these reasons" if found.refused else f"{end}\n{found.error}")


# ---- verify --------------------------------------------------------------------------------------


@app.command()
def verify(
    folder: Folder,
    json: AsJson = False,
    world_size: WorldSize = None,
    step: OnlyStep = None,
    part: Part = None,
) -> None:
    """Reads every byte of every checkpoint and names the damaged file and tensor.

    What mindformers wrote has no checksums: its headers, sizes and counters are checked, and the
    output says so. Checkpoints that a job removes meanwhile are not reported as damaged. Under
    msrun, mpirun or srun, each process reads a share of the files and prints what it found there.

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
