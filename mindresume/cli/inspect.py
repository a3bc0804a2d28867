"""Implements ``mindresume inspect`` and ``mindresume diff``: the tensors of a checkpoint, and those
of two compared."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindresume.cli import app
from mindresume.cli.common import (
    AsJson,
    origin_text,
    print_json,
    print_table,
    problem_text,
    progress_bar,
    say,
)
from mindresume.formatting import counted, size_text

if TYPE_CHECKING:
    from mindresume.api.checkpoint import TensorInfo, TensorSlice
    from mindresume.api.inspection import Comparison, Inspection, TensorDifference

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@app.command()
def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A checkpoint (the folder that contains the rank folders, the run folder, a rank "
            "folder, a folder of consolidated weights, one file), or a strategy file or folder.",
        ),
    ],
    json: AsJson = False,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STRATEGY",
            help="Strategy file or folder with which the "
            "checkpoint was saved, if it has neither layouts nor the folder 'strategy' beside it.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="The step; default: the newest complete one."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, metavar="R", help="Only the slices that this rank holds."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--tensor",
            metavar="PATTERN",
            help="Only tensors whose names match, such as "
            "'layers.0.*', and which ranks hold which slice of them.",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="One row per tensor: do not merge names that differ only in a number."
        ),
    ] = False,
) -> None:
    """Shows what a checkpoint or strategy holds: every tensor with its global shape, its cut, and
    the ranks that store it.

    Only headers and records are read. A cut such as "dim 0 / 2 over axis 0 of [2, 2]; optimizer
    shard 2" means: the ranks of a stage form a 2 x 2 matrix, numbered row by row; dimension 0 is
    halved along its axis 0, the last one (axes count from the right); each half is halved again, in
    dimension 0, among the ranks that would hold the same half. stage: the pipeline stages that hold
    it; copies: ranks of a stage that hold each element. Slices are written as in Python: [0:4, :].
    """
    from mindresume.api import inspection

    found = inspection.inspect(path, step=step, strategy=strategy, tensors=pattern, rank=rank)
    if json:
        print_json(found.to_json())
        return
    for line in _lines(found):
        say(line)
    say()
    if found.slices is None:
        _print_tensors(
            [(row.name, [row]) for row in found.tensors]
            if everything
            else merge_similar_rows(found.tensors)
        )
    elif not found.slices:
        say(f"rank {rank} holds none of {counted(len(found.tensors), 'tensor')}")
    else:
        _print_slices(found.tensors, found.slices, rank)


def _lines(found: Inspection) -> list[str]:
    if found.kind == "strategy":
        return [
            f"{found.source}: a strategy of {found.tensor_count} parameters, "
            f"{_ranks_text(found.world_size, found.stage_size)}",
            "A strategy has neither shapes nor dtypes: inspect a checkpoint (--from this strategy) "
            "to see them.",
        ]
    dtypes = ", ".join(
        f"{total.tensors} {dtype} ({size_text(total.size_bytes)})"
        for dtype, total in found.dtypes.items()
    )
    return [
        *(f"not usable: {problem_text(refused)}" for refused in found.refused),
        found.source,
        *(
            [
                f"written by {origin_text(found.origin, found.run_id)}, {found.format}; "
                f"{_ranks_text(found.world_size, found.stage_size)}"
            ]
            if found.origin
            else []
        ),
        f"{counted(found.tensor_count, 'tensor')}, {size_text(found.size_bytes)}: {dtypes}",
        f"{size_text(found.bytes_on_disk)} on disk, files: {found.files}",
        *found.notes,
    ]


# ---- words ---------------------------------------------------------------------------------------


def slice_text(part: TensorSlice) -> str:
    """Returns a slice in Python's notation: "[0:4, :]"; "whole"; or "?" if it is unknown."""
    if part.region is None:
        return "?"
    if part.is_whole:
        return "whole"
    if part.unit == "pieces":
        return f"piece {tuple(start for start, _ in part.region)} of {part.of}"
    return (
        "["
        + ", ".join(
            ":" if (start, stop) == (0, size) else f"{start}:{stop}"
            for (start, stop), size in zip(part.region, part.of, strict=True)
        )
        + "]"
    )


def merge_similar_rows(rows: Iterable[TensorInfo]) -> list[tuple[str, list[TensorInfo]]]:
    """Merges rows whose names differ only in the numbers between dots, and in the stage, into one:
    'layers.*.weight'."""
    groups: dict[Any, list[TensorInfo]] = {}
    for row in rows:
        groups.setdefault(
            (_NUMBER.sub("*", row.name), row.dtype, row.shape, row.layout), []
        ).append(row)
    return [
        (
            ".".join(
                words[0] if len(set(words)) == 1 else "*"
                for words in zip(*(row.name.split(".") for row in group), strict=True)
            ),
            group,
        )
        for group in groups.values()
    ]


def ranges_text(numbers: Iterable[int]) -> str:
    """Returns numbers as ranges: '0,2,4-7'."""
    from mindresume.model.manifest import rank_ranges

    return ",".join(
        str(first) if first == last else f"{first}{'-' if last > first + 1 else ','}{last}"
        for first, last in rank_ranges(sorted(numbers))
    )


def _ranks_text(ranks: int, stage_size: int | None) -> str:
    from mindresume.formatting import ranks_count

    if stage_size is None:
        return ranks_count(ranks) + (
            "" if ranks == 1 else ", no layouts: every tensor is whole on every rank"
        )
    stages = ranks // stage_size
    return f"{ranks_count(ranks)} = {stages} stage{'' if stages == 1 else 's'} x {stage_size}"


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else str(shape)


def _cells(row: TensorInfo) -> dict[str, str]:
    """Returns the first cells of a row of a table."""
    shape = _shape_text(row.shape)
    return {"tensor": row.name, "dtype": row.dtype or "", "shape": shape, "cut": row.cut}


def _print_tensors(groups: Sequence[tuple[str, list[TensorInfo]]]) -> None:
    """Prints one row per group. ``groups``: (name, tensors of the same form)."""
    table = []
    for name, (row, *others) in groups:
        stages = {stage for one in (row, *others) for stage in one.stages}
        table.append(
            {
                **_cells(row),
                "tensor": name + (f"  x{len(others) + 1}" if others else ""),
                "stage": ranges_text(stages) or "all",
                "local shape": _shape_text(row.local_shape),
                "copies": str(row.copies),
            }
        )
    print_table(table)


def _print_slices(
    rows: Sequence[TensorInfo], parts: Sequence[TensorSlice], rank: int | None
) -> None:
    by_name = {row.name: row for row in rows}
    table, last = [], None
    for part in parts:
        row = by_name[part.name]
        cells = _cells(row)
        table.append(
            {
                # once for each tensor
                **(cells if part.name != last else dict.fromkeys(cells, "")),
                "slice": slice_text(part),
                "file": row.file or "",
                "ranks": ranges_text(part.ranks) if rank is None else "",
                "not in the file of": ranges_text(part.missing_ranks),
            }
        )
        last = part.name
    print_table(table)


# ---- diff ----------------------------------------------------------------------------------------


MOST_SHOWN = 20


@app.command()
def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A checkpoint: the folder that contains the rank folders (or the run "
            "folder), a rank folder, a folder of consolidated weights, or one file.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one, of any layout and format.")],
    json: AsJson = False,
    from_a: Annotated[
        str | None,
        typer.Option(
            "--from-a",
            metavar="STRATEGY",
            help="Strategy file or folder with which A was "
            "saved, if A has neither layouts nor the folder 'strategy' beside it.",
        ),
    ] = None,
    from_b: Annotated[
        str | None, typer.Option("--from-b", metavar="STRATEGY", help="The same for B.")
    ] = None,
    step_a: Annotated[
        int | None,
        typer.Option(
            "--step-a", metavar="N", help="The step of A; default: the newest complete one."
        ),
    ] = None,
    step_b: Annotated[
        int | None, typer.Option("--step-b", metavar="N", help="The same for B.")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--tensor",
            metavar="PATTERN",
            help="Only tensors whose names match, such as 'layers.0.*'.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0,
            metavar="X",
            help="Accept differences up to X; 0: values must be equal, bits need not.",
        ),
    ] = None,
) -> None:
    """Compares two checkpoints of any layouts and formats tensor by tensor, bit by bit, including
    counters.

    Bits are compared: 0.0 and -0.0 differ, two identical NaN do not. A relative difference refers
    to the larger value. Every byte of both is read once; if several ranks store the same slice,
    that of one rank. Recorded checksums are ignored (`verify` checks them).

    Exit status: 0 equal, or all within --tolerance; 1 different; 2 an error.
    """
    from mindresume.api import inspection

    with progress_bar("comparing", json) as progress:
        found = inspection.compare(
            a,
            b,
            step_a=step_a,
            step_b=step_b,
            strategy_a=from_a,
            strategy_b=from_b,
            tensors=pattern,
            tolerance=tolerance,
            progress=progress,
        )
    if json:
        print_json(found.to_json())
    else:
        _say_differences(found)
    sys.exit(0 if found.within_tolerance else 1)


_COLUMNS = (
    "tensor",
    "what differs",
    "elements",
    "largest absolute",
    "relative",
    "first at",
    "there, A -> B",
)


def _say_differences(found: Comparison) -> None:
    for label, side in (("A", found.a), ("B", found.b)):
        for refused in side.refused:
            say(f"{label}, not usable: {problem_text(refused)}")
    if found.differences:
        say(f"A: {found.a.source}")
        say(f"B: {found.b.source}")
        print_table([*map(_row, found.differences[:MOST_SHOWN])], hides=False)
    if len(found.differences) > MOST_SHOWN:
        say(f"and {len(found.differences) - MOST_SHOWN} more (--json lists all)")
    same = f"{counted(found.compared, 'tensor')}, {size_text(found.size_bytes)}"
    outside = sum(not difference.within(found.tolerance) for difference in found.differences)
    if found.equal:
        say(f"equal: {same}, bit for bit")
    elif not outside:
        say(
            f"equal within {found.tolerance:g}: {same}; {len(found.differences)} of them differ in "
            "bits"
        )
    else:
        say(
            f"different: {outside} of {counted(found.tensors, 'tensor')}"
            + (
                ""
                if found.tolerance is None
                else f" by more than {found.tolerance:g}, or in shape or dtype"
            )
        )


def _row(found: TensorDifference) -> dict[str, str]:
    forms = " -> ".join(f"{form.dtype} {form.shape}" for form in (found.a, found.b) if form)
    row = dict.fromkeys(_COLUMNS, "")
    row |= {"tensor": found.name, "what differs": f"{found.kind}: {forms}"}
    if found.first_values is not None:
        a, b = map(_text, found.first_values)
        only = found.bits_only == found.differing
        row |= {
            "what differs": "bits only: signs of 0, or NaN" if only else "values",
            "elements": f"{found.differing} of {found.elements}",
            "largest absolute": _text(found.largest_absolute),
            "relative": _text(found.largest_relative),
            "first at": str([*(found.first_index or ())]),
            "there, A -> B": f"{a} -> {b}",
        }
    return row


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
