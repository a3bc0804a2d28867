"""Contains what ``convert``, ``merge`` and ``export-hf`` share: options, sizes, and the printed result."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.cli.common import print_json, say, step_text
from mindresume.errors import ConfigError
from mindresume.formatting import counted, size_text

if TYPE_CHECKING:
    from mindresume.api.conversion import ConversionResult

MAX_WORKERS = 256               # no disk is faster with more threads or processes
ENGINES = ("auto", "direct", "mindspore")

Src = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: the folder that contains the rank folders (or the run "
                                                        "folder), a rank folder, a folder of consolidated weights, or one file. "
                                                        "It is only read.")]
Dst = Annotated[str, typer.Argument(metavar="DST", help="The folder to create. It appears when it is complete; a folder that "
                                                        "holds something else is refused.")]
From = Annotated[str | None, typer.Option("--from", metavar="STRATEGY", help="Strategy file or folder with which SRC was "
                                          "saved. Needed only if mindformers wrote it on several ranks and there is no folder "
                                          "'strategy' beside it; checkpoints of mindresume contain their layouts.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="The step to use; default: the newest complete one.")]
Engine = Annotated[str, typer.Option("--engine", metavar="|".join(ENGINES), help="direct reads only the bytes that are needed "
                                     "and compares them with recorded checksums; mindspore calls "
                                     "mindspore.transform_checkpoints. auto: mindspore for ckpt sources, where it can.")]
Workers = Annotated[int, typer.Option("--workers", min=1, max=MAX_WORKERS, metavar="N",
                                      help="Threads of the direct engine, processes of the other one.")]
Memory = Annotated[str | None, typer.Option("--memory-limit", metavar="SIZE", help="Most memory for buffers of the direct "
                                            "engine, such as 64MiB or 4GiB; default: 12 MiB per worker.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be read and written.")]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def bytes_of(text: str, option: str) -> int:
    """Returns a size in bytes: ``"4GiB"`` is 4294967296. Raises ConfigError if it is invalid."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?i?)b?", text.strip().lower())
    if not found or found[2] not in _UNITS or float(found[1]) * _UNITS[found[2]] < 1:
        raise ConfigError(f"{option} is {text[:80]!r}; expected a size such as 512MiB or 4GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def memory_of(text: str | None) -> int | None:
    """Returns the bytes of ``--memory-limit``; None if it is not given. Raises ConfigError if it is invalid."""
    return None if text is None else bytes_of(text, "--memory-limit")


def show(result: ConversionResult, json: bool) -> None:
    """Prints what a conversion did, or would do."""
    if json:
        print_json(result.to_json())
        return
    for refused in result.refused:
        say(f"not usable: step {step_text(refused.step)}: {refused.reason}")
    say(f"{result.source}\n  -> {result.target}" + (f", {result.model_type}, {' and '.join(result.dtypes)}" if result.model_type
                                                    else ""))
    say(f"  {counted(result.tensors, 'tensor')} in {counted(result.files, 'file')}, engine {result.engine}")
    if result.seconds is not None:
        rate = result.bytes_written / result.seconds if result.seconds else 0
        say(f"  {size_text(result.bytes_read)} read, {size_text(result.bytes_written)} written in {result.seconds:.1f} s "
            f"({size_text(rate)}/s); {size_text(result.bytes_verified)} compared with recorded checksums")
    else:
        say(f"  {size_text(result.bytes_to_read)} to read (over-read {result.over_read:.2f}), "
            f"{size_text(result.bytes_to_write)} to write, {size_text(result.memory_bytes)} of memory for buffers")
        say("  it exists already, nothing was done" if result.finished else "  dry run, nothing was written")
    for note in result.notes:
        say(f"  note: {note}")
