"""Implements ``mindresume scrub``."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import NOTHING, AsJson, Folder, print_json, progress_bar, say, say_read, step_text, stopped_by_signals
from mindresume.formatting import size_text

if TYPE_CHECKING:
    from mindresume.api.scrubbing import ScrubbedCheckpoint


@app.command()
def scrub(folder: Folder, json: AsJson = False,
          rate: Annotated[float, typer.Option("--rate", min=0, metavar="MB/s", help="Read at most so many megabytes (10^6 bytes) "
                                              "a second. Default: no limit.")] = 0.0,
          repair: Annotated[bool, typer.Option("--repair", help="Replace damaged files by intact copies: of the same tensors on "
                                               "other ranks, or from --remote.")] = False,
          remote: Annotated[str | None, typer.Option("--remote", metavar="URL", help="remote_save_url of the training: repair "
                                                     "from there, too.")] = None,
          step: Annotated[int | None, typer.Option("--step", metavar="N", help="Only this step.")] = None,
          older_than: Annotated[float, typer.Option("--older-than", min=0, metavar="HOURS", help="Leave out what was saved, or "
                                                    "read by a scrub, in the last HOURS.")] = 0.0) -> None:
    """Re-reads every kept checkpoint from the disk, names what rotted by file and tensor, and can repair it.

    What stays damaged is recorded beside the checkpoint: resumes, `which`, `ls` and the report refuse it from then on without a
    new reading, until its files are replaced. `verify` reads the same and writes nothing. A running job is not disturbed: what it
    is writing is left out, and it removes nothing that is being read. docs/scrub.md has the details.
    Exit status: 0 all is as written or repaired, 1 damage is left or files cannot be read, 3 there is no checkpoint.
    """
    from mindresume.api.scrubbing import scrub as scrub_folder
    with stopped_by_signals(), progress_bar("scrubbing", json) as progress:
        report = scrub_folder(folder, rate_mb=rate, repair=repair, remote=remote, step=step, older_than_hours=older_than,
                              progress=progress)
    if json:
        print_json(report.to_json())
    else:
        for found in report.checkpoints:
            _print(found)
        say_read(report)
        cached = sum(found.cached_bytes for found in report.checkpoints)
        if cached > report.bytes_read // 2:
            say(f"the kernel kept about {size_text(cached)} in its cache although it was asked to drop them: these bytes may not "
                f"have come from the disk")
    sys.exit(NOTHING if not report.checkpoints else 1 if report.damaged or report.unreadable else 0)


def _print(found: ScrubbedCheckpoint) -> None:
    text = {"intact": "every byte is as it was written", "repaired": "was damaged, and is as it was written again",
            "damaged": "DAMAGED, and refused from now on", "removed": "was removed while it was read",
            "unreadable": "some files CANNOT BE READ; nothing is recorded of them, the next scrub reads them again",
            "skipped": f"skipped: {found.reason}"}[found.state]
    say(f"step {step_text(found.step)} ({'mindformers' if found.run_id is None else f'run {found.run_id}'}): {text}")
    left = "unreadable" if found.state == "unreadable" else "damaged"
    for name, problems in ((left, found.damaged), ("repaired", found.repaired)):
        for problem in problems:
            say(f"    {name}: {problem.reason}\n      {problem.file}")
    for note in found.notes:
        say(f"    {note}")
