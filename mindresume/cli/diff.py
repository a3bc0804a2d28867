"""``mindresume diff``"""
from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, locate, print_json, progress_bar, say
from mindresume.cli.inspect import is_strategy, print_table
from mindresume.errors import ConfigError
from mindresume.formats.complete import is_complete
from mindresume.formatting import size_text
from mindresume.reshard.compare import ONLY_A, ONLY_B, VALUES, Difference, by_size, comparable, compare
from mindresume.reshard.copies import check_copies
from mindresume.reshard.counters import with_counters
from mindresume.reshard.geometry import elements, whole
from mindresume.reshard.source import Source, open_source
from mindresume.reshard.weights import Tensor
from mindresume.store.storage import PosixStorage, Storage

MOST_SHOWN = 20


A = Annotated[str, typer.Argument(metavar="A", help="A checkpoint: the folder of the rank folders (or of the run), a rank "
                                  "folder, a folder of complete weights, or one file.")]
B = Annotated[str, typer.Argument(metavar="B", help="The other one, of any layout and format.")]
FromA = Annotated[str | None, typer.Option("--from-a", metavar="STRATEGY", help="Strategy file or folder A was saved with, where "
                                           "A neither knows its layouts nor has the folder 'strategy' beside it.")]
FromB = Annotated[str | None, typer.Option("--from-b", metavar="STRATEGY", help="The same for B.")]
StepA = Annotated[int | None, typer.Option("--step-a", metavar="N", help="This step of A; default the newest that is whole.")]
StepB = Annotated[int | None, typer.Option("--step-b", metavar="N", help="The same for B.")]
Pattern = Annotated[str | None, typer.Option("--tensor", metavar="PATTERN", help="Only tensors called like this, such as "
                                             "'layers.0.*'.")]
Tolerance = Annotated[float | None, typer.Option("--tolerance", min=0, metavar="X", help="Differences up to X are accepted; 0: "
                                                 "values must be equal, bits need not.")]


@app.command()
def diff(a: A, b: B, json: AsJson = False, from_a: FromA = None, from_b: FromB = None, step_a: StepA = None,
         step_b: StepB = None, pattern: Pattern = None, tolerance: Tolerance = None) -> None:
    """Compares two checkpoints tensor by tensor, bit by bit, whatever their layouts and formats; counters too.

    Bits are compared: 0.0 and -0.0 differ, the same NaN does not. Relative differences are to the larger one of both values.
    Every byte of both is read once, of ranks with the same piece that of one; recorded checksums are not looked at (`verify`
    does). Exit status: 0 equal, or all within --tolerance; 1 different; 2 an error.
    """
    storage = PosixStorage()
    sources = _opened(storage, a, step_a, from_a), _opened(storage, b, step_b, from_b)
    if sources[0].is_iteration != sources[1].is_iteration:      # one has as tensors what the other has in common.json
        sources = with_counters(sources[0]), with_counters(sources[1])
    mine, other = (source.weights for source in sources)
    for weights in (mine, other):
        check_copies(weights, read=True)
    names = {name for name in (*mine.tensors, *other.tensors) if pattern is None or fnmatchcase(name, pattern)}
    if pattern is not None and not names:
        raise ConfigError(f"neither {a} nor {b} has a tensor that is called like {pattern!r}")
    tensors, size = comparable(mine, other, names)
    with progress_bar("comparing", json) as meter:
        meter.expect(size)
        found = by_size(compare(mine, other, names, progress=meter.advance))
    outside = [difference for difference in found if not difference.within(tolerance)]
    if json:
        print_json({"a": _side(sources[0]), "b": _side(sources[1]), "equal": not found, "within_tolerance": not outside,
                    "tolerance": _finite(tolerance), "tensors": len(names), "compared": tensors, "bytes": size,
                    "differences": [_row(difference) for difference in found]})
    else:
        for label, source in zip("AB", sources, strict=True):
            for refusal in source.refused:
                say(f"{label}, not taken: {refusal}")
        if found:
            _print(sources, found)
        same = f"{tensors} tensors, {size_text(size)}"
        if not found:
            say(f"equal: {same}, bit for bit")
        elif not outside:
            say(f"equal within {tolerance:g}: {same}; {len(found)} of them not bit for bit")
        else:
            say(f"different: {len(outside)} of {len(names)} tensors"
                + ("" if tolerance is None else f", in more than values up to {tolerance:g}"))
    sys.exit(1 if outside else 0)


def _opened(storage: Storage, path: str, step: int | None, strategy: str | None) -> Source:
    if os.path.exists(path) and is_strategy(storage, path):
        raise ConfigError(f"{path} is a strategy, which has no tensors to compare; `mindresume inspect` shows it")
    return open_source(storage, path if is_complete(storage, path) else locate(path), step, strategy)


def _side(source: Source) -> dict[str, Any]:
    return {"what": source.what, "step": source.state.step if source.state else None, "tensors": len(source.weights.tensors),
            "ranks": source.weights.world_size if source.candidate else None,
            "refused": [refusal.to_json() for refusal in source.refused], "notes": source.notes}


def _row(found: Difference) -> dict[str, Any]:
    row = {"name": found.name, "kind": found.kind, "a": _tensor(found.a), "b": _tensor(found.b)}
    if found.kind != VALUES:
        return row
    return {**row, "elements": elements(whole(found.a.shape)), "differing": found.count, "bits_only": found.bits_only,
            "largest_absolute": _finite(found.absolute), "largest_relative": _finite(found.relative), "first_index": found.first,
            "first_values": [_finite(value) for value in found.values]}


def _tensor(tensor: Tensor | None) -> dict[str, Any] | None:
    return {"dtype": tensor.dtype, "shape": tensor.shape} if tensor else None


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become texts."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print(sources: Sequence[Source], found: Sequence[Difference]) -> None:
    for label, source in zip("AB", sources, strict=True):
        say(f"{label}: {source.what}")
    rows = []
    for difference in found[:MOST_SHOWN]:
        if difference.kind != VALUES:
            rows.append((difference.name, _structure(difference), "", "", "", "", ""))
            continue
        a, b = difference.values
        only = difference.bits_only == difference.count
        rows.append((difference.name, "bits only: signs of 0, or NaN" if only else "values",
                     f"{difference.count} of {elements(whole(difference.a.shape))}", _text(difference.absolute),
                     _text(difference.relative), str(list(difference.first)), f"{_text(a)} -> {_text(b)}"))
    print_table(("tensor", "what differs", "elements", "largest absolute", "relative", "first at", "there, A -> B"), rows)
    if len(found) > MOST_SHOWN:
        say(f"and {len(found) - MOST_SHOWN} more (--json lists all)")


def _structure(found: Difference) -> str:
    if found.kind in (ONLY_A, ONLY_B):
        tensor = found.a or found.b
        return f"{found.kind}: {tensor.dtype} {tensor.shape}"
    return f"{found.kind}: {found.a.dtype} {found.a.shape} -> {found.b.dtype} {found.b.shape}"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
