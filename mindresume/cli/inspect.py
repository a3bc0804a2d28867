"""``mindresume inspect``"""
from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, locate, origin_text, print_json, say
from mindresume.errors import ConfigError
from mindresume.formats.complete import is_complete
from mindresume.formats.records import ranks_count
from mindresume.formats.scan import is_root
from mindresume.formatting import shown, size_text
from mindresume.layout import TensorLayout
from mindresume.reshard.geometry import Region, held, shape_of, whole
from mindresume.reshard.source import Source, open_source
from mindresume.reshard.weights import Tensor
from mindresume.store.storage import PosixStorage, Storage, parallel
from mindresume.strategy import Strategy, read_strategy

WIDE = 1000                     # columns of a table that goes into a file or a pipe: nothing is wrapped
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


Path = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint (the folder of the rank folders or of the run, a rank "
                                                        "folder, a folder of complete weights, one file), or a strategy file or "
                                                        "folder.")]
From = Annotated[str | None, typer.Option("--from", metavar="STRATEGY", help="Strategy file or folder the checkpoint was saved "
                                          "with, where it neither knows its layouts nor has the folder 'strategy' beside it.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="This step; default the newest that is whole.")]
Rank = Annotated[int | None, typer.Option("--rank", min=0, metavar="R", help="What this rank holds: the slice of each tensor.")]
Pattern = Annotated[str | None, typer.Option("--tensor", metavar="PATTERN", help="Only tensors called like this, such as "
                                             "'layers.0.*', and which ranks hold which slice of them.")]
All = Annotated[bool, typer.Option("--all", help="One row a tensor: names that differ only in a number are not folded into one.")]


@app.command()
def inspect(path: Path, json: AsJson = False, strategy: From = None, step: Step = None, rank: Rank = None,
            pattern: Pattern = None, everything: All = False) -> None:
    """Shows what a checkpoint or strategy holds: every tensor in its whole shape, how it is cut, and who holds what.

    Only headers and records are read. How to read a cut: "dim 0 / 2 over axis 0 of [2, 2]; optimizer shard 2": the ranks of a
    stage are a matrix of 2 x 2, numbered row by row; dimension 0 is halved along its axis 0, the last one (axes count from the
    right); each half is halved again, in dimension 0, among the ranks that would hold the same. stage: the pipeline stages that
    have it; copies: ranks of one of them that hold each element. Slices are written as in Python: [0:4, :].
    """
    storage = PosixStorage()
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist")
    if is_strategy(storage, path):
        if strategy is not None or step is not None:
            raise ConfigError(f"{path} is a strategy; --from and --step belong to a checkpoint")
        subject: _Strategy | _Checkpoint = _Strategy(read_strategy(path, storage))
    else:
        subject = _Checkpoint(storage, open_source(storage, path if is_complete(storage, path) else locate(path), step, strategy))
    asked = rank is not None or pattern is not None
    rows = [row for row in subject.rows if pattern is None or fnmatchcase(row.name, pattern)]
    if not rows:
        raise ConfigError(f"{path}: none of its {len(subject.rows)} tensors is called like {pattern!r}")
    if rank is not None and not rank < subject.world_size:
        raise ConfigError(f"{path}: there is no rank {rank}, it is of {ranks_count(subject.world_size)}")
    if rank is not None and rows[0].file is not None:
        raise ConfigError(f"{path} holds complete weights, which belong to no rank; leave --rank away")
    ranks = range(subject.world_size) if rank is None else range(rank, rank + 1)
    parts = [part for row in rows for part in subject.parts(row, ranks)] if asked else []
    if json:
        print_json({**subject.summary, "tensors": [row.to_json() for row in rows],
                    **({} if rank is None else {"rank": rank}),
                    **({"slices": [part.to_json() for part in parts]} if asked else {})})
        return
    for line in subject.lines:
        say(line)
    say()
    if asked and not parts:
        say(f"rank {rank} holds none of {len(rows)} tensors")
    elif asked:
        _print_parts(rows, parts, rank)
    else:
        _print_rows([(row.name, [row]) for row in rows] if everything else folded(rows))


def is_strategy(storage: Storage, path: str) -> bool:
    """Whether it is a strategy, or a folder of them. Files of weights have the extension .ckpt too, but begin otherwise."""
    status = storage.status(path)
    names = [path]
    if status is not None and status.is_folder:
        names = sorted(storage.list(path))
        if is_root(storage, path) or any(name.endswith(".safetensors") for name in names):
            return False
        names = [os.path.join(path, name) for name in names if not name.startswith(".")]
    for name in sorted(names, key=lambda name: name.endswith(".json")):
        if name.endswith(".ckpt"):
            with storage.open(name) as file:
                first = file.read(1)
            return first in (b"\x08", b"\x12") or first != b"\n" and "strategy" in os.path.basename(name)
        if name.endswith(".json"):
            return True
    return False


# ---- what there is ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Row:
    """One tensor. ``dtype`` and ``shape`` None: only its layout is known; ``layout`` None: it is not cut. ``stages``: none if all
    have it. ``file``: of complete weights."""
    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    layout: TensorLayout | None
    stages: tuple[int, ...]
    copies: int
    file: str | None = None

    @property
    def local_shape(self) -> tuple[int, ...] | None:
        return self.shape if self.shape is None or self.layout is None else self.layout.local_shape(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": self.shape, "cut": cut_text(self.layout),
                "layout": self.layout.to_json() if self.layout else None, "stages": self.stages, "local_shape": self.local_shape,
                "copies": self.copies, **({"file": self.file} if self.file else {})}


@dataclass(frozen=True)
class Part:
    """A slice of a tensor and who has it. ``region`` None: unknown. ``of``: the whole shape in elements; for a strategy, that
    knows none, in pieces. ``absent``: ranks whose file lacks it, though they hold it: a copy that was left away, or a lost
    file."""
    name: str
    region: Region | None
    of: tuple[int, ...]
    ranks: tuple[int, ...]
    absent: tuple[int, ...] = ()
    in_pieces: bool = False

    @property
    def text(self) -> str:
        if self.region is None:
            return "?"
        if self.region == whole(self.of):
            return "whole"
        if self.in_pieces:
            return f"piece {tuple(start for start, _ in self.region)} of {self.of}"
        return "[" + ", ".join(":" if (start, stop) == (0, size) else f"{start}:{stop}"
                               for (start, stop), size in zip(self.region, self.of, strict=True)) + "]"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "pieces" if self.in_pieces else "slice": self.region, "of": self.of, "ranks": self.ranks,
                "absent": self.absent}


class _Strategy:
    """Layouts only."""

    def __init__(self, strategy: Strategy):
        self.strategy, self.world_size = strategy, strategy.world_size
        stages: dict[tuple[str, TensorLayout], list[int]] = {}
        for number, stage in enumerate(strategy.stages):
            for item in stage.items():
                stages.setdefault(item, []).append(number)
        self.rows = [Row(name, None, None, layout, tuple(numbers), layout.copies) for (name, layout), numbers in stages.items()]
        self.summary = {"path": strategy.source, "kind": "strategy", "ranks": self.world_size, "stages": len(strategy.stages),
                        "stage_size": strategy.stage_size, "dtypes": None, "bytes": None}
        self.lines = [f"{strategy.source}: a strategy of {len(self.rows)} parameters, "
                      f"{_ranks_text(self.world_size, strategy.stage_size)}",
                      "A strategy knows neither shapes nor dtypes: inspect a checkpoint (--from this strategy) to see them."]

    def parts(self, row: Row, ranks: Iterable[int]) -> list[Part]:
        """Of these ranks: which piece each holds."""
        found: dict[Region, list[int]] = {}
        counts, size = row.layout.pieces((0,) * len(row.layout.tensor_map)), self.strategy.stage_size
        for rank in ranks:
            if rank // size in row.stages:
                found.setdefault(held(row.layout, rank % size, counts), []).append(rank)
        return [Part(row.name, region, counts, tuple(holders), in_pieces=True) for region, holders in sorted(found.items())]


class _Checkpoint:
    """Layouts, shapes, and what the files have."""

    def __init__(self, storage: Storage, source: Source):
        self.weights, self.storage, candidate = source.weights, storage, source.candidate
        tensors = self.weights.tensors.values()
        sizes = {tensor.layout.stage_size for tensor in tensors if tensor.layout}
        self.world_size, self.stage_size = self.weights.world_size, sizes.pop() if len(sizes) == 1 else None
        self.rows = [self._row(tensor) for tensor in tensors]
        paths = list(self.weights.headers) if candidate is None else [
            path for rank in candidate.files for path in self.weights.paths(rank)]
        found = [status.size for status in parallel(storage, storage.status, paths) if status is not None]
        counts, total = Counter(tensor.dtype for tensor in tensors), Counter[str]()
        for tensor in tensors:
            total[tensor.dtype] += tensor.nbytes
        step = candidate.step if candidate else source.state.step if source.state else None
        self.summary = {
            "path": self.weights.name, "kind": "checkpoint" if candidate else "complete weights", "what": source.what,
            "origin": candidate.origin if candidate else None, "run": candidate.run if candidate else None, "step": step,
            "ranks": self.world_size if candidate else None, "stage_size": self.stage_size,
            "stages": self.world_size // self.stage_size if self.stage_size else None,
            "dtypes": {dtype: {"tensors": count, "bytes": total[dtype]} for dtype, count in counts.items()},
            "bytes": total.total(), "bytes_on_disk": sum(found), "files": len(found), "notes": source.notes,
            "refused": [refusal.to_json() for refusal in source.refused]}
        dtypes = ", ".join(f"{count} {dtype} ({size_text(total[dtype])})" for dtype, count in counts.most_common())
        self.lines = [
            *(f"not taken: {refusal}" for refusal in source.refused), source.what,
            *([f"written by {origin_text(candidate)}, {candidate.format}; {_ranks_text(self.world_size, self.stage_size)}"]
              if candidate else []),
            f"{len(self.rows)} tensors, whole {size_text(total.total())}: {dtypes}",
            f"{size_text(sum(found))} on disk, files: {len(found)}", *source.notes]

    def _row(self, tensor: Tensor) -> Row:
        if tensor.layout is None:
            file = os.path.basename(self.weights.found_in[tensor.name]) if self.weights.found_in is not None else None
            return Row(tensor.name, tensor.dtype, tensor.shape, None, (), self.world_size, file)
        return Row(tensor.name, tensor.dtype, tensor.shape, tensor.layout, tensor.stages, tensor.layout.copies)

    def parts(self, row: Row, ranks: Sequence[int]) -> list[Part]:
        """Of these ranks: which slice each holds, as their files say it."""
        if row.file is not None:
            return [Part(row.name, whole(row.shape), row.shape, ())]
        found: dict[Region | None, tuple[list[int], list[int]]] = {}
        for rank, entries in zip(ranks, parallel(self.storage, self.weights.entries, ranks), strict=True):
            region, entry = whole(row.shape), entries.get(row.name) if entries else None
            if row.layout is not None:
                region = held(row.layout, rank % row.layout.stage_size, row.shape)
            if entry is not None:
                found.setdefault(region if shape_of(region) == entry.shape else None, ([], []))[0].append(rank)
            elif row.layout is not None and rank // row.layout.stage_size in row.stages:
                found.setdefault(region, ([], []))[1].append(rank)
        return sorted((Part(row.name, region, row.shape, tuple(there), tuple(absent))
                       for region, (there, absent) in found.items()), key=lambda part: (part.region is None, part.region))


# ---- words -----------------------------------------------------------------------------------------------------------

def cut_text(layout: TensorLayout | None) -> str:
    """'dim 0 / 2 over axis 0 of [2, 2]; optimizer shard 2'"""
    if layout is None:
        return "not cut"
    matrix, words = layout.device_matrix, []
    for dim, axes in enumerate(layout.axes()):
        axes = [axis for axis in axes if matrix[len(matrix) - 1 - axis] > 1]
        if axes:
            lengths = " x ".join(str(matrix[len(matrix) - 1 - axis]) for axis in axes)
            words.append(f"dim {dim} / {lengths} over {'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}")
    shards = f"optimizer shard {layout.optimizer_pieces}" if layout.optimizer_pieces > 1 else ""
    if not words:
        return f"{shards} of {list(matrix)}" if shards else "not cut"
    return f"{', '.join(words)} of {list(matrix)}" + (f"; {shards}" if shards else "")


def folded(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that differ only in numbers between the dots of their names, and in the stage, as one: 'layers.*.weight'."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("*", row.name), row.dtype, row.shape, row.layout), []).append(row)
    return [(".".join(words[0] if len(set(words)) == 1 else "*"
                      for words in zip(*(row.name.split(".") for row in group), strict=True)), group)
            for group in groups.values()]


def ranges_text(numbers: Iterable[int]) -> str:
    """'0,2,4-7'"""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, ends)) if len(ends) == 1 or ends[1] > ends[0] + 1 else f"{ends[0]},{ends[1]}"
                    for ends in found)


def _ranks_text(ranks: int, stage_size: int | None) -> str:
    if stage_size is None:
        return ranks_count(ranks) + ("" if ranks == 1 else ", no layouts: every tensor is whole on every rank")
    stages = ranks // stage_size
    return f"{ranks_count(ranks)} = {stages} stage{'' if stages == 1 else 's'} x {stage_size}"


def _print_rows(groups: Sequence[tuple[str, list[Row]]]) -> None:
    """``groups``: (name, rows that are alike)."""
    known = groups[0][1][0].shape is not None
    table = []
    for name, rows in groups:
        row, stages = rows[0], sorted({stage for row in rows for stage in row.stages})
        shape, local = (str(row.shape), str(row.local_shape)) if known else ("", "")
        table.append((name + (f"  x{len(rows)}" if len(rows) > 1 else ""), row.dtype or "", shape, cut_text(row.layout),
                      ranges_text(stages) if stages else "all", local, str(row.copies)))
    columns = ("tensor", "dtype", "shape", "cut", "stage", "local shape", "copies")
    print_table(columns, table, () if known else ("dtype", "shape", "local shape"))


def _print_parts(rows: Sequence[Row], parts: Sequence[Part], rank: int | None) -> None:
    by_name = {row.name: row for row in rows}
    table, last = [], None
    for part in parts:
        row = by_name[part.name]
        first = (row.name, row.dtype or "", str(row.shape), cut_text(row.layout)) if part.name != last else ("",) * 4
        table.append((*first, part.text, row.file or ranges_text(part.ranks), ranges_text(part.absent)))
        last = part.name
    hidden = () if rows[0].shape is not None else ("dtype", "shape")
    hidden += () if any(part.absent for part in parts) else ("not in the file of",)
    hidden += () if rank is None else ("ranks",)
    print_table(("tensor", "dtype", "shape", "cut", "slice", "file" if rows[0].file else "ranks", "not in the file of"), table,
                hidden)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], hidden: Sequence[str] = ()) -> None:
    from rich.console import Console
    from rich.table import Table
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    visible = [index for index, name in enumerate(columns) if name not in hidden]
    for index in visible:
        table.add_column(columns[index], overflow="fold")
    for row in rows:
        table.add_row(*(shown(row[index]) for index in visible))
    Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else WIDE).print(table)
