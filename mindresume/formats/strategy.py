"""Reads and writes MindSpore's strategy files, which describe the sharding of every parameter of a
job. Neither mindspore nor protobuf is imported; field numbers are those of
``mindspore/train/node_strategy_pb2.py``.

    strategy = read_strategy("output/strategy")  # a folder, or one file: .ckpt (protobuf) or .json
    held(strategy.of_rank(5)["embedding.weight"], 5 % strategy.stage_size, (8, 4))
    encode_strategy({0: strategy.stages[0]})                    # a file that MindSpore reads

MindSpore writes one file per rank, ``ckpt_strategy_rank_<R>.ckpt``, with the parameters of that
rank's pipeline stage. A merged file (``mindspore.merge_pipeline_strategys``) holds all stages; its
parameters are named ``<stage>-<name>``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from mindresume.errors import StrategyError
from mindresume.formatting import listed
from mindresume.model.layout import MAX_AXES, MAX_RANKS, TensorLayout
from mindresume.storage import Storage, parallel, read_bytes
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files.ckpt import decode_varint, encode_varint, signed
from mindresume.typed import is_count, parse_json, unique

# fields of a message; a file has one for each operator and parameter
MAX_FIELDS = 1 << 22
_PREFIX = re.compile(r"(0|[1-9]\d{0,5})-(.+)", re.ASCII | re.DOTALL)

Layouts = Mapping[str, TensorLayout]
MAX_BYTES = 256 << 20  # of a file; 2,000 parameters need 200 kB
_RANK = re.compile(r"(?!merged|\.).*rank_(\d{1,9})(.*)\.(?:ckpt|json)", re.ASCII)
_WHOLE = re.compile(r"(?!\.)(?:merged.*|.*strategy.*)\.(?:ckpt|json)")


@dataclass(frozen=True)
class Strategy:
    """The sharding of all parameters of a job.

    Attributes:
        stages: for each pipeline stage {parameter: layout}.
        source: where it was read, for messages.

    Raises:
        StrategyError: A stage has no parameter, or layouts differ in ``stage_size``.
    """

    stages: tuple[Layouts, ...]
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.stages or not all(self.stages):
            raise StrategyError(
                f"{self._where}{len(self.stages)} stages, {sum(map(bool, self.stages))} of them "
                "with parameters; expected at least one stage, each with parameters"
            )
        one_form = {
            layout: layout.normalized() for stage in self.stages for layout in stage.values()
        }
        stages = tuple(
            {name: one_form[layout] for name, layout in stage.items()} for stage in self.stages
        )
        object.__setattr__(self, "stages", stages)
        if len({layout.stage_size for layout in one_form}) > 1:
            sizes = {
                layout.stage_size: f"{layout.stage_size} ({name} of stage {number})"
                for number, stage in enumerate(self.stages)
                for name, layout in stage.items()
            }
            raise StrategyError(
                f"{self._where}all layouts of a job must have the same number of ranks per stage, "
                "found " + listed(list(sizes.values()), 5)
            )
        if self.world_size > MAX_RANKS:
            raise StrategyError(
                f"{self._where}{len(self.stages)} stages of {self.stage_size} ranks; a job has up "
                f"to {MAX_RANKS}"
            )

    @property
    def _where(self) -> str:
        return f"{self.source}: " if self.source else ""

    @property
    def stage_size(self) -> int:
        """Returns the number of ranks in each pipeline stage."""
        return next(iter(self.stages[0].values())).stage_size

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of the job."""
        return len(self.stages) * self.stage_size

    def of_rank(self, rank: int) -> Layouts:
        """Returns {parameter: layout} of the tensors that ``rank`` holds; its number within the
        stage is ``rank % stage_size``. Raises StrategyError for a rank that does not exist."""
        if not 0 <= rank < self.world_size:
            raise StrategyError(
                f"{self._where}rank {rank} is not one of the {self.world_size} ranks of this "
                "strategy"
            )
        return self.stages[rank // self.stage_size]

    def stage_of(self, name: str) -> int | None:
        """Returns the first stage that holds the parameter; None if no stage does."""
        return next((number for number, stage in enumerate(self.stages) if name in stage), None)

    def fit_dimensions(self, dimensions: Mapping[str, int]) -> Strategy:
        """Returns the strategy with its layouts adapted to the given numbers of dimensions. A file
        has ``[1, 0]`` both for a matrix and for a vector sharded by two axes, and no dimensions at
        all if a stage is one rank. Raises StrategyError if a layout does not fit."""
        stages = []
        for stage in self.stages:
            fitted = {}
            for name, layout in stage.items():
                count = dimensions.get(name, len(layout.tensor_map))
                form = _fitted(layout, count)
                if form is None:
                    raise StrategyError(
                        f"{self._where}parameter {name} has {count} dimensions, the strategy has "
                        f"{len(layout.tensor_map)}: {layout}; does it belong to this model?"
                    )
                fitted[name] = form
            stages.append(fitted)
        return Strategy(tuple(stages), self.source)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that ``from_json`` reads; it contains each distinct layout once."""
        layouts: dict[TensorLayout, int] = {}
        stages = [
            {name: layouts.setdefault(layout, len(layouts)) for name, layout in stage.items()}
            for stage in self.stages
        ]
        return {
            "source": self.source,
            "layouts": [layout.to_json() for layout in layouts],
            "stages": stages,
        }

    @classmethod
    def from_json(cls, value: Any) -> Strategy:
        """Reads the result of ``to_json``, which another rank of the job sent."""
        layouts = [TensorLayout.from_json(layout) for layout in value["layouts"]]
        stages = (
            {name: layouts[index] for name, index in stage.items()} for stage in value["stages"]
        )
        return cls(tuple(stages), value["source"])


@lru_cache(maxsize=1 << 12)
def _fitted(layout: TensorLayout, count: int) -> TensorLayout | None:
    """Returns the layout for ``count`` dimensions, see ``fit_dimensions``; None if it does not
    fit."""
    cuts = layout.tensor_map
    axes = tuple(axis for axis in cuts if isinstance(axis, int))
    if count == len(cuts):
        return layout
    if count == 1 and cuts and len(axes) == len(cuts):
        cuts = (axes,)
    elif not cuts and layout.stage_size == 1:
        cuts = (-1,) * count
    else:
        return None
    return TensorLayout(layout.device_matrix, cuts, layout.optimizer_shards).normalized()


# ---- reading -------------------------------------------------------------------------------------


# the storage has no state
def read_strategy(path: str, storage: Storage = PosixStorage()) -> Strategy:  # noqa: B008
    """Reads the strategy of a file, or of a folder of files. In a folder, a merged file is used
    only if there are no files of ranks.

    One file per stage is enough. Not detected: missing files of all of the last stages.

    Raises:
        StrategyError: A file is damaged, files of different jobs are mixed, stages are missing, or
            a tensor is sharded unevenly.
        OSError: Reading failed.
    """
    found = storage.status(path)
    if found is None:
        raise StrategyError(f"{path}: there is no such strategy file or folder")
    if not found.is_folder:
        return _complete(decode_strategy(_content(storage, path), path), path)
    names = storage.list(path)
    ranked = [(int(match[1]), name) for name in names if (match := _rank_of(name))]
    wholes = [name for name in names if _WHOLE.fullmatch(name) and not _rank_of(name)]
    if ranked:
        return _of_ranks(path, sorted(ranked), storage)
    contents = {_content(storage, os.path.join(path, name)): name for name in reversed(wholes)}
    if len(contents) != 1:
        raise StrategyError(
            f"{path}: no file of a rank (ckpt_strategy_rank_<R>.ckpt or .json), "
            + (
                f"but {len(wholes)} others that differ: {listed(wholes, 5)}; give one of them"
                if wholes
                else f"and no merged file; found {listed(names, 5) or 'nothing'}"
            )
        )
    ((content, name),) = contents.items()
    return _complete(decode_strategy(content, os.path.join(path, name)), path)


def _rank_of(name: str) -> re.Match[str] | None:
    """Returns the match of a file name with a rank; None for any other name."""
    found = _RANK.fullmatch(name)
    # net_rank_0-1_10.ckpt holds weights
    return found if found and (not found[2] or "strategy" in name) else None


def _of_ranks(folder: str, files: list[tuple[int, str]], storage: Storage) -> Strategy:
    """Reads the files of ranks. ``files``: (rank, name). Parses files with the same bytes once."""
    parsed: dict[int, Mapping[int, Layouts]] = {}
    first: dict[int, tuple[str, Layouts]] = {}
    held: dict[int, tuple[str, int]] = {}
    paths = [os.path.join(folder, name) for _, name in files]
    contents = parallel(storage, partial(_content, storage, known={}), paths)
    for (rank, name), content in zip(files, contents, strict=True):
        if id(content) not in parsed:
            parsed[id(content)] = decode_strategy(content, os.path.join(folder, name))
        if len(parsed[id(content)]) != 1:
            raise StrategyError(
                f"{folder}: {name} has the name of rank {rank}'s file, but holds "
                f"{len(parsed[id(content)])} stages; remove it, or give the path of this file"
            )
        ((stage, layouts),) = parsed[id(content)].items()
        if rank in held:
            raise StrategyError(
                f"{folder}: {held[rank][0]} and {name} are both the file of rank {rank}; keep "
                "those of one job"
            )
        held[rank] = name, stage
        other, known = first.setdefault(stage, (name, layouts))
        if known is not layouts and known != layouts:
            differing = next(
                name for name in [*known, *layouts] if known.get(name) != layouts.get(name)
            )
            raise StrategyError(
                f"{folder}: {other} and {name} are both of stage {stage} and differ in "
                f"{differing}: {known.get(differing, 'absent')} and "
                f"{layouts.get(differing, 'absent')}; are files of different jobs mixed? Keep "
                "those of one job"
            )
    strategy = _complete({stage: layouts for stage, (_, layouts) in first.items()}, folder)
    for rank, (name, stage) in held.items():
        if rank // strategy.stage_size != stage:
            raise StrategyError(
                f"{folder}: {name} is of stage {stage}; with {strategy.stage_size} ranks a stage "
                f"and {len(strategy.stages)} stages, rank {rank} "
                + (
                    f"is of stage {rank // strategy.stage_size}"
                    if rank < strategy.world_size
                    else f"is one too many, there are {strategy.world_size}"
                )
                + "; keep the files of one job"
            )
    return strategy


def _complete(stages: Mapping[int, Layouts], source: str) -> Strategy:
    """Returns the strategy of all stages. Raises StrategyError if a stage is missing."""
    missing = max(stages) + 1 - len(stages)
    if missing:
        gap = next(stage for stage in range(max(stages)) if stage not in stages)
        raise StrategyError(
            f"{source}: the highest pipeline stage is {max(stages)}, and {missing} below it are "
            "missing, the "
            f"first is {gap}: give the folder with the files of all ranks, or a merged file"
        )
    return Strategy(tuple(stages[stage] for stage in range(len(stages))), source)


def _content(storage: Storage, path: str, known: dict[bytes, bytes] | None = None) -> bytes:
    """Reads a strategy file. Raises StrategyError if it is too large to be one. ``known``: keeps
    one object for all files with the same bytes."""
    found = storage.status(path)
    if found is not None and found.size > MAX_BYTES:
        raise StrategyError(
            f"{path}: {found.size} bytes, expected a strategy file of at most {MAX_BYTES}"
        )
    content = read_bytes(storage, path, MAX_BYTES)
    return content if known is None else known.setdefault(content, content)


# ---- one file ------------------------------------------------------------------------------------


def decode_strategy(content: bytes, path: str) -> Mapping[int, Layouts]:
    """Returns {stage: {parameter: layout}} for the bytes of one file. There is one stage, unless it
    is a merged file. Raises StrategyError for any invalid bytes.

    Args:
        content: the bytes.
        path: decides the format (.json, else protobuf), and is named in errors.
    """
    try:
        if not content:
            raise ValueError("it is empty; a failed compile leaves such a file")
        is_json = path.endswith(".json")
        stage, rows = _json_rows(content) if is_json else _protobuf_rows(content)
        layouts: dict[str, TensorLayout] = {}
        # a model has thousands of parameters but few layouts
        known: dict[bytes, TensorLayout] = {}
        for name, row in rows:
            try:
                layout = (
                    _json_layout(row)
                    if is_json
                    else known.get(row) or known.setdefault(row, _protobuf_layout(row))
                )
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"parameter {name!r}"[:300] + f": {_reason(error)}"[:500]
                ) from error
            if layouts.setdefault(name, layout) != layout:
                raise ValueError(
                    f"parameter {name!r}"[:200]
                    + f" occurs twice, as {layouts[name]} and as {layout}"
                )
        if not layouts:
            raise ValueError("it names no parameter; a failed compile leaves such a file")
        prefixed = {name: found for name in layouts if (found := _PREFIX.fullmatch(name))}
        if prefixed and len(prefixed) < len(layouts):
            odd = next(name for name in layouts if name not in prefixed)
            raise ValueError(
                f"{next(iter(prefixed))!r} begins with a stage, as in a merged file, but {odd!r} "
                "does not"[:400]
            )
        if not prefixed:
            return {stage: layouts}
        stages: dict[int, dict[str, TensorLayout]] = {}
        for name, found in prefixed.items():
            stages.setdefault(int(found[1]), {})[found[2]] = layouts[name]
        return stages
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StrategyError(
            f"{path}: not a usable strategy file: {_reason(error)}"[:1000]
        ) from error


def _reason(error: Exception) -> str:
    """Returns the text of an error; with its type unless mindresume raised it."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _layout(matrix: list[Any], cuts: list[Any], step: Any, size: Any, uneven: bool) -> TensorLayout:
    """Makes a layout. ``size``, ``step``: optimizer shards and their distance in ranks; none if
    either is 0. Raises ValueError if the layout is impossible or not supported."""
    if uneven:
        raise ValueError(
            "it is sharded unevenly (field, param_split_shape or indices_offset is set), which is "
            "not supported"
        )
    if not is_count(step, 0, MAX_RANKS):
        raise ValueError(
            f"opt_weight_shard_step is {step!r}"[:200] + ", expected a number of ranks"
        )
    # The matrix of a stage with one rank is empty.
    layout = TensorLayout.from_json(
        {
            "device_matrix": matrix or [1],
            "tensor_map": cuts,
            "optimizer_shards": size if step else 0,
        }
    )
    if layout.optimizer_slices > 1 and step != layout.optimizer_stride:
        raise ValueError(
            f"opt_weight_shard_step is {step}, expected {layout.optimizer_stride} ranks: {layout}"
        )
    return layout.normalized()


def _json_rows(content: bytes) -> tuple[int, Iterable[tuple[str, Any]]]:
    """Returns the stage, and of each parameter the name and what describes its layout."""
    value = parse_json(content, pairs=_unique)
    operators = value.get("parallel_strategy_item")
    if not operators:
        raise ValueError(
            "it has no strategy items (parallel_strategy_item); a failed compile leaves such a file"
        )
    return _stage(next(iter(operators.values()))["stage"]), (
        value.get("parallel_layout_item") or {}
    ).items()


def _json_layout(row: Mapping[str, Any]) -> TensorLayout:
    uneven = any(row.get(key) for key in ("field", "param_split_shape", "indices_offset"))
    return _layout(
        row["dev_matrix"],
        row["tensor_map"],
        row["opt_weight_shard_step"],
        row["opt_weight_shard_size"],
        uneven,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"{name!r}"[:200] + " occurs twice, with different values")
    return unique(list(found.items()))


def _protobuf_rows(content: bytes) -> tuple[int, Iterable[tuple[str, Any]]]:
    """Works like ``_json_rows``."""
    top = _message(content, {2, 3})
    if not top[2]:
        raise ValueError(
            "it has no strategy items (parallel_strategy_item); a failed compile leaves such a file"
        )
    stage = _stage(_one(_message(_one(_message(top[2][0], {2}), 2), {1}), 1, int))
    return stage, (
        (_one(row, 1).decode(), _one(row, 2)) for row in (_message(item, {1, 2}) for item in top[3])
    )


def _protobuf_layout(body: bytes) -> TensorLayout:
    row = _message(body, {1, 2, 3, 4, 5, 6, 7})
    if not 1 <= len(row[2]) <= MAX_AXES:
        raise ValueError(
            f"{len(row[2])} tensor maps, expected one, or one for each of up to {MAX_AXES} "
            "dimensions"
        )
    maps = [_numbers(part) for part in row[2]]
    # One message for all dimensions; or one for each, if several axes shard one of them.
    cuts = maps[0] if len(maps) == 1 else [axes for axes in maps if axes]
    uneven = any(_numbers(part) for part in row[3] + row[4]) or _one(row, 5, int) != 0
    return _layout(_numbers(_one(row, 1)), cuts, _one(row, 6, int), _one(row, 7, int), uneven)


def _stage(value: Any) -> int:
    if not is_count(value, 0, MAX_RANKS):
        raise ValueError(f"the stage is {value!r}"[:200] + f", expected a number up to {MAX_RANKS}")
    return value


# ---- protobuf ------------------------------------------------------------------------------------


def _message(data: Any, wanted: set[int]) -> dict[int, list[Any]]:
    """Returns {field: values in order} of the wanted fields, [] for absent ones. Values are
    integers or bytes. Skips other fields. Raises ValueError if a length exceeds the message."""
    if not isinstance(data, bytes):
        raise ValueError(f"expected a message, found the number {data}")
    found: dict[int, list[Any]] = {number: [] for number in wanted}
    position, end = 0, len(data)
    value: int | bytes
    for _ in range(MAX_FIELDS):
        if position >= end:
            return found
        tag, position = _varint(data, position)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, position = _varint(data, position)
        elif kind in (1, 2, 5):
            length, position = (
                _varint(data, position) if kind == 2 else (8 if kind == 1 else 4, position)
            )
            if not 0 <= length <= end - position:
                raise ValueError(
                    f"damaged or truncated: field {number} has {length} bytes at {position} of a "
                    f"message of {end}"
                )
            value, position = data[position : position + length], position + length
        else:
            raise ValueError(
                f"damaged: wire type {kind} before byte {position} of a message of {end}"
            )
        if number < 1:
            raise ValueError(
                f"damaged: field {number} before byte {position} of a message of {end}"
            )
        if number in found:
            found[number].append(value)
    raise ValueError(f"a message of more than {MAX_FIELDS} fields")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the signed 64-bit integer at ``position``, and the position after it."""
    try:
        value, position = decode_varint(data, position)
    except ValueError as error:
        raise ValueError(
            f"damaged or truncated: {error} of a message of {len(data)} bytes"
        ) from None
    return signed(value), position


def _one(message: Mapping[int, list[Any]], number: int, kind: type = bytes) -> Any:
    """Returns the value of a field that must occur exactly once."""
    values = message[number]
    if len(values) != 1 or not isinstance(values[0], kind):
        raise ValueError(
            f"field {number} of a message occurs {len(values)} times, expected one "
            f"{'number' if kind is int else 'message or text'}"
        )
    return values[0]


def _numbers(data: Any) -> list[int]:
    """Returns the numbers of a message ``repeated dim = 1``, packed or not."""
    found: list[int] = []
    for value in _message(data, {1})[1]:
        position = 0
        while isinstance(value, bytes) and position < len(value) and len(found) <= MAX_AXES:
            number, position = _varint(value, position)
            found.append(number)
        if isinstance(value, int):
            found.append(value)
    return found


def _field(number: int, value: int | str | bytes | Iterable[int]) -> bytes:
    """Encodes one field: an integer, a string, an encoded message, or integers (a message
    ``repeated dim = 1``)."""
    if isinstance(value, int):
        return encode_varint(number << 3) + encode_varint(value)
    data = value.encode() if isinstance(value, str) else value
    if not isinstance(data, bytes):
        data = b"".join(_field(1, item) for item in data)
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


# ---- bytes of one file ---------------------------------------------------------------------------


def encode_strategy(stages: Mapping[int, Layouts]) -> bytes:
    """Returns the bytes of the file of one stage, or of a merged file for several, in protobuf.

    Raises:
        StrategyError: MindSpore's files cannot hold a parameter, which the message names, or its
            reader cannot read it.
    """
    if not stages or not all(stages.values()):
        raise StrategyError("a strategy file needs at least one stage, each with parameters")
    pieces = [_field(1, 1)]  # current_stage: required but unused
    for stage in stages:
        pieces.append(
            _field(
                2, _field(1, f"operator_{stage}") + _field(2, _field(1, stage) + _field(2, (1,)))
            )
        )
    bodies: dict[TensorLayout, bytes] = {}
    for stage, layouts in stages.items():
        for name, layout in layouts.items():
            layout = layout.normalized()
            maps = _maps(name, layout)
            if layout not in bodies:
                bodies[layout] = b"".join(
                    [
                        _field(1, layout.device_matrix),
                        *(_field(2, part) for part in maps),
                        _field(3, ()),
                        _field(4, ()),
                        _field(5, 0),
                        _field(6, layout.optimizer_stride),
                        _field(7, layout.optimizer_shards),
                    ]
                )
            row = f"{stage}-{name}" if len(stages) > 1 else name
            pieces.append(_field(3, _field(1, row) + _field(2, bodies[layout])))
    return b"".join(pieces)


def _maps(name: str, layout: TensorLayout) -> list[tuple[int, ...]]:
    """Returns the TensorMap messages of a layout: one, or one for each dimension if a dimension
    needs several axes."""
    if "-" in name:
        raise StrategyError(
            f"parameter {name}: MindSpore cannot read a name with '-', its separator after the "
            "stage"
        )
    if not name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise StrategyError(f"parameter {name!r}: a name must be UTF-8 and not empty")
    plain = tuple(cut for cut in layout.tensor_map if isinstance(cut, int))
    if len(plain) == len(layout.tensor_map):
        return [plain]
    if len(layout.tensor_map) == 1:
        raise StrategyError(
            f"parameter {name}: no strategy file can express a vector sharded by several axes: "
            f"{layout}"
        )
    return [cut if isinstance(cut, tuple) else (cut,) for cut in layout.tensor_map]
