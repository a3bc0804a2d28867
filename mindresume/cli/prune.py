"""``mindresume prune``"""
from __future__ import annotations

import errno
import os
from typing import Annotated, Any, NoReturn

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, locate, print_json, say, time_text
from mindresume.errors import ConfigError
from mindresume.events import Event, RemovalPostponed
from mindresume.formats import Candidate
from mindresume.formats.iteration_files import parse_weight_file
from mindresume.formats.names import folder_rank
from mindresume.formats.records import scan_records, sizes
from mindresume.formatting import shown, size_text
from mindresume.manifest import FOLDER, TRASH, FileRecord, parse_attempt, run_sequence, untrashed
from mindresume.store.lineage import newest_lineage
from mindresume.store.removal import Plan, carry_out, holds_weights, plan, weights_of
from mindresume.store.retention import KeepBest, KeepEverySteps, KeepLast, KeepPerMinutes, Policy, any_of
from mindresume.store.storage import PosixStorage, Storage

Row = dict[str, Any]
Root = Annotated[str, typer.Argument(metavar="DIR", help="The checkpoint folder (that of the rank folders; the output folder "
                                                         "above it, or the folder of the run, will do).")]


class _LookingOnly(PosixStorage):
    """For a dry run: whatever is called, nothing can change."""

    def _refuse(self, *paths: Any) -> NoReturn:
        raise OSError(errno.EROFS, "a dry run changes nothing", *paths[:1])

    write = rename = sync = remove = make_folder = _refuse          # type: ignore[assignment]


@app.command()
def prune(folder: Root, json: AsJson = False,
          last: Annotated[int | None, typer.Option("--keep-last", min=1, metavar="N", help="The N newest stay.")] = None,
          every: Annotated[int | None, typer.Option("--keep-every-steps", min=1, metavar="N", help="The first checkpoint at or "
                                                    "behind every multiple of N steps stays.")] = None,
          best: Annotated[int | None, typer.Option("--keep-best", min=1, metavar="N", help="The N best by a metric stay, of "
                                                   "those that have it recorded.")] = None,
          metric: Annotated[str | None, typer.Option("--metric", metavar="NAME", help="For --keep-best; loss unless "
                                                     "given.")] = None,
          mode: Annotated[str | None, typer.Option("--mode", metavar="min|max", help="For --keep-best: are the smallest the "
                                                   "best (min, unless given) or the largest?")] = None,
          minutes: Annotated[float | None, typer.Option("--keep-minutes", metavar="M", help="One every M minutes "
                                                        "stays.")] = None,
          all_trainings: Annotated[bool, typer.Option("--all-trainings", help="Count and remove the checkpoints of all trainings "
                                                      "in this folder, not only of the one that saved last.")] = False,
          dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False) -> None:
    """Removes the checkpoints that no --keep option keeps, and saves that never completed.

    Where a training was begun afresh in the folder of another one, those of the training that saved last are meant.
    At least one --keep option is needed; what any of them keeps stays. Always stay: the newest checkpoint whose files are whole,
    what a job is reading now, incomplete saves of a job that may still run, and everything that mindformers wrote alone.
    """
    from mindresume.store.claim import ended
    from mindresume.store.holds import Holds, holds
    policy = _policy(last, every, best, metric, mode, minutes)
    storage, root = (_LookingOnly() if dry_run else PosixStorage()), locate(folder)
    if not os.path.isdir(root) or folder_rank(os.path.basename(os.path.abspath(root))) is not None:
        raise ConfigError(f"{root} is not a checkpoint folder; give the folder of the rank folders")
    held, records = holds(storage, root), os.path.join(root, FOLDER)
    lineage = None if all_trainings else newest_lineage(scan_records(storage, root)[0])
    made = plan(storage, root, policy, held, ended=ended(storage, root), lineage=lineage)
    begun = [name for name in storage.list(records) if name.startswith(TRASH) and untrashed(name) not in held]
    going = [*made.victims, *made.debris]
    size = {c.box: _size(storage, root, c.box) for c in (*made.kept, *made.unfinished, *made.spared, *going)}
    left = {name: _size(storage, root, os.path.join(records, name)) for name in begun}
    events: list[Event] = []
    removed = going if dry_run else carry_out(storage, root, made, Holds(storage, root), events.append)
    left = {name: count for name, count in left.items() if dry_run or storage.status(os.path.join(records, name)) is None}
    groups = _groups(made, going, removed, size, events)
    freed = sum(size[c.box] for c in removed) + sum(left.values())
    if json:
        print_json({"root": root, "dry_run": dry_run, **groups, "freed_bytes": freed})
        return
    _print(root, groups, made, dry_run)
    if left:
        say(f"{'would be finished' if dry_run else 'finished'} too: {len(left)} removal(s) cut short earlier "
            f"({', '.join(_step_text(name) for name in left)})")
    say(f"{size_text(freed)} would be freed; this is a dry run, nothing was touched" if dry_run else
          f"{size_text(freed)} freed")


def _policy(last: int | None, every: int | None, best: int | None, metric: str | None, mode: str | None,
            minutes: float | None) -> Policy:
    if best is None and (metric is not None or mode is not None):
        raise ConfigError("--metric and --mode belong to --keep-best, which is not given")
    policies: list[Policy] = [] if last is None else [KeepLast(last)]
    policies += [] if every is None else [KeepEverySteps(every)]
    policies += [] if best is None else [KeepBest(metric or "loss", best, mode or "min")]
    policies += [] if minutes is None else [KeepPerMinutes(minutes)]
    if not policies:
        raise ConfigError("prune: nothing says what to keep; give at least one of --keep-last, --keep-every-steps, --keep-best, "
                          "--keep-minutes")
    return any_of(policies)


def _size(storage: Storage, root: str, box: str) -> int:
    """Bytes of the weights of a save, recorded or not, that are there now and can be looked at. ``box``: its iteration folder, or
    its records."""
    try:
        if holds_weights(storage, box):
            paths = [os.path.join(box, name) for name in storage.list(box) if parse_weight_file(name)]
        else:
            paths = weights_of(storage, root, box)
    except OSError:
        return 0
    return sum(size or 0 for size in sizes(storage, root, [FileRecord(os.path.relpath(path, root), "") for path in paths]))


def _groups(made: Plan, going: list[Candidate], removed: list[Candidate], size: dict[str, int], events: list[Event]
            ) -> dict[str, list[Row]]:
    """Rows of what stays, goes and is held; what was to go and did not cannot be removed, or was held, or removed by somebody
    else, meanwhile. ``events``: of the removal."""
    postponed = {event.path: event.reason for event in events if isinstance(event, RemovalPostponed)}

    def row(candidate: Candidate, why: str | None = None) -> Row:
        return {"step": candidate.step, "run": candidate.run, "saved_at": candidate.saved_at, "size": size[candidate.box],
                "committed": candidate.committed, "why": why or made.reasons[candidate.box]}
    stayed = [row(c, postponed.get(c.box, "held since a moment ago, or removed by somebody else")) for c in going
              if c not in removed]
    return {"kept": [row(c) for c in sorted((*made.kept, *made.unfinished), key=lambda c: c.order, reverse=True)],
            "removed": [row(c) for c in removed], "held": [row(c) for c in made.spared] + stayed}


def _print(root: str, groups: dict[str, list[Row]], made: Plan, dry_run: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    rows = [(name, row) for name, group in groups.items() for row in group]
    if not rows:
        say(f"{root}: nothing that mindresume saved; what mindformers wrote alone is never removed")
        return
    order = {(c.step, c.run): c.order for c in (*made.kept, *made.unfinished, *made.spared, *made.victims, *made.debris)}
    rows.sort(key=lambda item: order[item[1]["step"], item[1]["run"]], reverse=True)
    say(root)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("step", "run", "saved at", "size", "state", "why"):
        table.add_column(name, justify="right" if name in ("step", "size") else "left", no_wrap=name != "why")
    words = {"kept": "kept", "held": "held", "removed": "would go" if dry_run else "removed"}
    for name, row in rows:
        table.add_row(str(row["step"]), str(run_sequence(str(row["run"]))), time_text(row["saved_at"]), size_text(row["size"]),
                      words[name], shown(row["why"]), style="yellow" if name == "removed" else "")
    Console(markup=False, emoji=False).print(table)


def _step_text(trash: str) -> str:
    found = parse_attempt(untrashed(trash))
    return f"step {found[0]}" if found else trash
