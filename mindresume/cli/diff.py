"""Implements ``mindresume diff``."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, print_json, print_table, progress_bar, say, step_text
from mindresume.formatting import counted, size_text

if TYPE_CHECKING:
    from mindresume.api.comparison import Comparison, TensorDifference

MOST_SHOWN = 20

A = Annotated[str, typer.Argument(metavar="A", help="A checkpoint: the folder that contains the rank folders (or the run "
                                  "folder), a rank folder, a folder of consolidated weights, or one file.")]
B = Annotated[str, typer.Argument(metavar="B", help="The other one, of any layout and format.")]
FromA = Annotated[str | None, typer.Option("--from-a", metavar="STRATEGY", help="Strategy file or folder with which A was "
                                           "saved, if A has neither layouts nor the folder 'strategy' beside it.")]
FromB = Annotated[str | None, typer.Option("--from-b", metavar="STRATEGY", help="The same for B.")]
StepA = Annotated[int | None, typer.Option("--step-a", metavar="N", help="The step of A; default: the newest complete one.")]
StepB = Annotated[int | None, typer.Option("--step-b", metavar="N", help="The same for B.")]
Pattern = Annotated[str | None, typer.Option("--tensor", metavar="PATTERN", help="Only tensors whose names match, such as "
                                             "'layers.0.*'.")]
Tolerance = Annotated[float | None, typer.Option("--tolerance", min=0, metavar="X", help="Accept differences up to X; 0: values "
                                                 "must be equal, bits need not.")]


@app.command()
def diff(a: A, b: B, json: AsJson = False, from_a: FromA = None, from_b: FromB = None, step_a: StepA = None,
         step_b: StepB = None, pattern: Pattern = None, tolerance: Tolerance = None) -> None:
    """Compares two checkpoints of any layouts and formats tensor by tensor, bit by bit, including counters.

    Bits are compared: 0.0 and -0.0 differ, two identical NaN do not. A relative difference refers to the larger value. Every byte
    of both is read once; if several ranks store the same piece, that of one rank. Recorded checksums are ignored (`verify` checks
    them). Exit status: 0 equal, or all within --tolerance; 1 different; 2 an error.
    """
    from mindresume.api import comparison
    with progress_bar("comparing", json) as progress:
        found = comparison.compare(a, b, step_a=step_a, step_b=step_b, strategy_a=from_a, strategy_b=from_b, tensors=pattern,
                                   tolerance=tolerance, progress=progress)
    if json:
        print_json(found.to_json())
    else:
        _print(found)
    sys.exit(0 if found.within_tolerance else 1)


def _print(found: Comparison) -> None:
    for label, side in (("A", found.a), ("B", found.b)):
        for refused in side.refused:
            say(f"{label}, not usable: step {step_text(refused.step)}: {refused.reason}")
    if found.differences:
        say(f"A: {found.a.source}")
        say(f"B: {found.b.source}")
        print_table(("tensor", "what differs", "elements", "largest absolute", "relative", "first at", "there, A -> B"),
                    map(_row, found.differences[:MOST_SHOWN]))
    if len(found.differences) > MOST_SHOWN:
        say(f"and {len(found.differences) - MOST_SHOWN} more (--json lists all)")
    same = f"{counted(found.compared, 'tensor')}, {size_text(found.size_bytes)}"
    outside = sum(not difference.within(found.tolerance) for difference in found.differences)
    if found.equal:
        say(f"equal: {same}, bit for bit")
    elif not outside:
        say(f"equal within {found.tolerance:g}: {same}; {len(found.differences)} of them differ in bits")
    else:
        say(f"different: {outside} of {counted(found.tensors, 'tensor')}"
            + ("" if found.tolerance is None else f" by more than {found.tolerance:g}, or in shape or dtype"))


def _row(found: TensorDifference) -> tuple[str, ...]:
    if found.first_values is None or found.first_index is None:
        forms = " -> ".join(f"{form.dtype} {form.shape}" for form in (found.a, found.b) if form)
        return found.name, f"{found.kind}: {forms}", "", "", "", "", ""
    a, b = found.first_values
    only = found.bits_only == found.differing
    return (found.name, "bits only: signs of 0, or NaN" if only else "values", f"{found.differing} of {found.elements}",
            _text(found.largest_absolute), _text(found.largest_relative), str([*found.first_index]), f"{_text(a)} -> {_text(b)}")


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
