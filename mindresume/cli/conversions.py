"""What ``convert`` and ``merge`` share: options, the plan of a dry run, carrying out, and what is said afterwards."""
from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer

from mindresume.cli.common import locate, print_json, progress_bar, say
from mindresume.errors import ConfigError, EngineError
from mindresume.formatting import size_text
from mindresume.reshard.conversion import Conversion, Job
from mindresume.reshard.copies import check_copies
from mindresume.reshard.direct import BUFFERS, Traffic
from mindresume.reshard.engine import ENGINES, engine_for, tile_for, writer
from mindresume.reshard.source import Source, open_source, reading
from mindresume.store.storage import PosixStorage

MAX_WORKERS = 256               # more threads or processes at once help no disk

Src = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: the folder of the rank folders (or the folder of the "
                                                        "run), a rank folder, a folder of complete weights, or one file. It is "
                                                        "only read.")]
Dst = Annotated[str, typer.Argument(metavar="DST", help="The folder to make. It appears when everything in it is there; one that "
                                                        "holds something else already is refused.")]
From = Annotated[str | None, typer.Option("--from", metavar="STRATEGY", help="Strategy file or folder SRC was saved with. Needed "
                                          "only for what mindformers wrote on several ranks without the folder 'strategy' "
                                          "beside it; what mindresume wrote knows its layouts.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="The step to take; default the newest that is whole.")]
Engine = Annotated[str, typer.Option("--engine", metavar="|".join(ENGINES), help="direct reads only the bytes that are needed "
                                     "and checks them against the recorded checksums; mindspore goes through "
                                     "mindspore.transform_checkpoints. auto: mindspore for ckpt sources, where it can.")]
Workers = Annotated[int, typer.Option("--workers", min=1, max=MAX_WORKERS, metavar="N",
                                      help="Threads of the direct engine, processes of the other one.")]
Memory = Annotated[str | None, typer.Option("--memory-limit", metavar="SIZE", help="Most memory for buffers of the direct "
                                            "engine, such as 64MiB or 4GiB; by default 12 MiB a worker.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be read and written.")]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def bytes_of(text: str, option: str) -> int:
    """``"4GiB"`` -> 4294967296. ConfigError."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?i?)b?", text.strip().lower())
    if not found or found[2] not in _UNITS or float(found[1]) * _UNITS[found[2]] < 1:
        raise ConfigError(f"{option} is {text[:80]!r}; expected a size such as 512MiB or 4GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def checked_engine(engine: str) -> str:
    if engine not in ENGINES:
        raise ConfigError(f"--engine is {engine!r}; choose one of {', '.join(ENGINES)}")
    return engine


@contextmanager
def opened(path: str, step: int | None, strategy: str | None, dry_run: bool) -> Iterator[Source]:
    """Returns the source; unless in a dry run, which writes nothing, it is held until the end of the block."""
    storage, where = PosixStorage(), locate(path)
    if dry_run:
        yield open_source(storage, where, step, strategy)
        return
    notes: list[str] = []
    with reading(storage, where, step, strategy, notes.append) as source:
        yield replace(source, notes=(*source.notes, *notes))


def run(job: Job, target: str, fmt: str, engine: str, workers: int, memory: str | None, dry_run: bool, json: bool) -> None:
    """Shows the plan, or carries it out and says what was done."""
    storage, notes = PosixStorage(), list(job.source.notes)
    conversion = Conversion(storage, job, target, notes.append)
    tile = tile_for(bytes_of(memory, "--memory-limit") if memory is not None else None, workers)
    chosen = engine_for(checked_engine(engine), fmt)
    plan = {"source": job.source.what, "target": os.path.abspath(target), "engine": chosen, "files": len(job.files),
            **numbers(job), "memory_bytes": BUFFERS * workers * tile, "notes": notes,
            "refused": [refusal.to_json() for refusal in job.source.refused]}
    finished = conversion.finished()
    if dry_run or finished:
        _show(plan | {"dry_run": dry_run, "finished": finished}, json)
        return
    traffic = Traffic()

    def write() -> None:
        check_copies(job.source.weights, read=True)
        try:
            conversion.write(writer(chosen, conversion, workers, tile, traffic, notes.append))
        except EngineError as error:
            if engine != "auto":
                raise
            notes.append(f"MindSpore's engine cannot do this, the direct one did: {error}")
            plan["engine"] = "direct"
            conversion.write(writer("direct", conversion, workers, tile, traffic, notes.append))
    _show(plan | {"dry_run": False, "finished": True, **carry_out(conversion, "converting", json, traffic, write)}, json)


def carry_out(conversion: Conversion, doing: str, json: bool, traffic: Traffic, write: Callable[[], None],
              check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """``check`` and ``write``, with a progress bar of the latter, and the commit; whatever fails, nothing is left. Returns what
    was done."""
    started = time.monotonic()
    try:
        conversion.prepare()
        check()
        with progress_bar(doing, json) as meter:
            meter.expect(numbers(conversion.job)["bytes_to_write"])
            traffic.progress = meter.advance
            write()
        conversion.commit()
    except BaseException:
        conversion.abandon()
        raise
    return {"bytes_read": traffic.read, "bytes_written": traffic.written, "bytes_verified": traffic.verified,
            "seconds": round(time.monotonic() - started, 3)}


def numbers(job: Job) -> dict[str, Any]:
    """Bytes of tensors: needed (each once), to be read (once in every group of files that needs them), and to be written."""
    tensors = job.source.weights.tensors
    groups = [{name for i in group for name in job.files[i].holds} for group in job.groups]
    read = sum(tensors[name].nbytes for names in groups for name in names)
    needed = sum(tensors[name].nbytes for name in set().union(*groups))
    written = sum(sum(count for rows in file.blueprint(tensors).tensors.values() for _, _, count in rows) for file in job.files)
    return {"tensors": len(set().union(*groups)), "bytes_needed": needed, "bytes_to_read": read, "bytes_to_write": written,
            "over_read": round(read / needed, 4) if needed else 1.0}


def _show(value: dict[str, Any], json: bool) -> None:
    if json:
        print_json(value)
        return
    for refusal in value["refused"]:
        say(f"not taken: step {refusal['step']}: {refusal['reason']}")
    say(f"{value['source']}\n  -> {value['target']}")
    say(f"  {value['tensors']} tensors in {value['files']} files, engine {value['engine']}")
    if "seconds" in value:
        rate = value["bytes_written"] / value["seconds"] if value["seconds"] else 0
        say(f"  {size_text(value['bytes_read'])} read, {size_text(value['bytes_written'])} written in {value['seconds']:.1f} s "
            f"({size_text(rate)}/s); {size_text(value['bytes_verified'])} of it compared with recorded checksums")
    else:
        say(f"  {size_text(value['bytes_to_read'])} to read (over-read {value['over_read']:.2f}), "
            f"{size_text(value['bytes_to_write'])} to write, {size_text(value['memory_bytes'])} of memory for buffers")
        say("  it is there already, nothing was done" if value["finished"] else "  this is a dry run, nothing was written")
    for note in value["notes"]:
        say(f"  note: {note}")
