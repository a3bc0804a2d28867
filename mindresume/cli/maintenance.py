"""Implements ``mindresume prune``, ``scrub`` and ``flush``: what is removed from a disk, what
is corrupted there, and what memory brings to it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import (
    NOTHING,
    AsJson,
    Folder,
    OnlyStep,
    print_json,
    print_table,
    progress_bar,
    say,
    say_checkpoint,
    say_read,
    stopped_by_signals,
    time_text,
)
from mindresume.errors import ConfigError
from mindresume.formatting import size_text

if TYPE_CHECKING:
    from mindresume.api.maintenance import PruneResult, ScrubbedCheckpoint
    from mindresume.saving.retention import Policy

Root = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="The checkpoint folder (with folders rank_0 or iteration_N in it), or the output "
        "folder or run folder above it.",
    ),
]


@app.command()
def prune(
    folder: Root,
    json: AsJson = False,
    last: Annotated[
        int | None, typer.Option("--keep-last", min=1, metavar="N", help="Keep the N newest.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--keep-every-steps",
            min=1,
            metavar="N",
            help="Keep the first checkpoint at or after every multiple of N steps.",
        ),
    ] = None,
    best: Annotated[
        int | None,
        typer.Option(
            "--keep-best",
            min=1,
            metavar="N",
            help="Keep the N best by a metric, of those that have it recorded.",
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help="For --keep-best; default: loss.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="min|max",
            help="For --keep-best: min (default): small values are better; max: large ones.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--keep-minutes", metavar="M", help="Keep one every M minutes.")
    ] = None,
    all_trainings: Annotated[
        bool,
        typer.Option(
            "--all-trainings",
            help="Count and remove the checkpoints of all trainings "
            "in this folder, not only of the one that saved last.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
) -> None:
    """Removes the checkpoints that no --keep option keeps, and saves that never completed.

    [bold]mindresume prune output/checkpoint --keep-last 3 --dry-run[/bold]      only shows it

    At least one --keep option is needed; a checkpoint stays if any of them keeps it. If several
    trainings started afresh in the folder, only the checkpoints of the one that saved last are
    counted and removed. These always stay: the newest checkpoint whose files are complete, what a
    job is reading, incomplete saves of a job that may still run, and everything that mindformers
    wrote alone.
    """
    from mindresume.api import maintenance

    policy = _policy(last, every, best, metric, mode, minutes)
    result = maintenance.prune(folder, policy=policy, all_trainings=all_trainings, dry_run=dry_run)
    if json:
        print_json(result.to_json())
    else:
        _print(result)


def _policy(
    last: int | None,
    every: int | None,
    best: int | None,
    metric: str | None,
    mode: str | None,
    minutes: float | None,
) -> Policy:
    from mindresume.saving.retention import (
        KeepBest,
        KeepEverySteps,
        KeepLast,
        KeepPerMinutes,
        any_of,
    )

    if best is None and (metric is not None or mode is not None):
        raise ConfigError("--metric and --mode belong to --keep-best, which is not given")
    policies: list[Policy] = [] if last is None else [KeepLast(last)]
    policies += [] if every is None else [KeepEverySteps(every)]
    policies += [] if best is None else [KeepBest(metric or "loss", best, mode or "min")]
    policies += [] if minutes is None else [KeepPerMinutes(minutes)]
    if not policies:
        raise ConfigError(
            "prune: no policy is given; give at least one of --keep-last, --keep-every-steps, "
            "--keep-best, --keep-minutes"
        )
    return any_of(policies)


def _print(result: PruneResult) -> None:
    from mindresume.model.manifest import run_sequence

    words = {
        "kept": "kept",
        "held": "held",
        "removed": "would be removed" if result.dry_run else "removed",
    }
    rows = [(name, row) for name in words for row in getattr(result, name)]
    if not rows:
        say(
            f"{result.root}: mindresume saved nothing here; what mindformers wrote alone is never "
            "removed"
        )
    else:
        say(result.root)
        # as a resume orders them: by run, then by step
        rows.sort(
            key=lambda row: (run_sequence(str(row[1].run_id)), row[1].step or 0), reverse=True
        )
        table = [
            {
                "step": str(row.step),
                "run": str(run_sequence(str(row.run_id))),
                "saved at": time_text(row.saved_at),
                "size": size_text(row.size_bytes),
                "state": words[name],
                "why": row.reason,
            }
            for name, row in rows
        ]
        yellow = [i for i, (name, _) in enumerate(rows) if name == "removed"]
        print_table(table, ("step", "size"), ("why",), yellow)
    if result.resumed_removals:
        say(
            f"{'would also finish' if result.dry_run else 'also finished'} "
            f"{len(result.resumed_removals)} interrupted "
            f"removal(s) ({', '.join(result.resumed_removals)})"
        )
    freed = size_text(result.freed_bytes)
    say(
        f"{freed} would be freed; dry run, nothing was changed"
        if result.dry_run
        else f"{freed} freed"
    )


# ---- flush ---------------------------------------------------------------------------------------


@app.command()
def flush(folder: Folder, json: AsJson = False) -> None:
    """Writes the newest save in memory of this node to disk, if the disk is older.

    For a training with memory_tier that has ended and is not started again on this node. Every byte
    is verified first. On several nodes call it on each; the last one completes the checkpoint.

    Exit status: 0 the disk is up to date, 3 there is nothing in memory of this node.
    """
    from mindresume.api import maintenance

    with progress_bar("writing", json) as progress:
        result = maintenance.flush(folder, progress=progress)
    if json:
        print_json(result.to_json())
    elif result.step is None:
        say(f"{result.root}: {result.reason}")
    else:
        say(
            f"{result.root}: step {result.step}, {size_text(result.size_bytes)} written"
            + (
                ""
                if result.committed
                else "; it counts once the other nodes have written their parts"
            )
        )
    sys.exit(NOTHING if result.step is None and not result.up_to_date else 0)


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
            help="Replace damaged files by intact copies: of the same tensors on other ranks, or "
            "from --remote.",
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
    step: OnlyStep = None,
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
    """Re-reads every kept checkpoint from the disk, names damaged files and tensors, and can repair
    them.

    [bold]mindresume scrub output/checkpoint --rate 200 --repair[/bold]

    A checkpoint that stays damaged is marked: no resume takes it, and `which`, `ls` and the report
    name it, until its files are replaced. `verify` reads the same and writes nothing. A running job
    is not disturbed: what it is writing is left out, and it removes nothing that is being read.
    docs/scrub.md has the details.

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
                "drop them: these bytes may not have come from the disk"
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
