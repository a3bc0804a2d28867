"""Converts one strategy file of MindSpore between bytes and layouts: protobuf (``.ckpt``) or ``.json``. Neither mindspore nor
protobuf is imported; field numbers are those of ``mindspore/train/node_strategy_pb2.py``.

Layouts are normalized: a tuple in a tensor map has at least two axes, and a layout without optimizer shards has 0 of them.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mindresume.errors import StrategyError
from mindresume.model.layout import MAX_AXES, MAX_RANKS, TensorLayout
from mindresume.model.training_state import is_count
from mindresume.tensor_files.ckpt import decode_varint, encode_varint, signed
from mindresume.typed import encodable, parse_json

MAX_FIELDS = 1 << 22                    # fields of a message; a file has one for each operator and parameter
_PREFIX = re.compile(r"(0|[1-9]\d{0,5})-(.+)", re.ASCII | re.DOTALL)

Layouts = Mapping[str, TensorLayout]


def decode_strategy(content: bytes, path: str) -> Mapping[int, Layouts]:
    """Returns {stage: {parameter: layout}} for the bytes of one file. There is one stage, unless it is a merged file. Raises
    StrategyError for any invalid bytes.

    Args:
        content: the bytes.
        path: decides the format (.json, else protobuf), and is named in errors.
    """
    try:
        if not content:
            raise ValueError("it is empty; a failed compile leaves such a file")
        stage, items = (_json_items if path.endswith(".json") else _protobuf_items)(content)
        layouts: dict[str, TensorLayout] = {}
        for name, layout in items:
            if layouts.setdefault(name, layout) != layout:
                raise ValueError(f"parameter {name!r}"[:200] + f" occurs twice, as {layouts[name]} and as {layout}")
        if not layouts:
            raise ValueError("it names no parameter; a failed compile leaves such a file")
        prefixed = {name: found for name in layouts if (found := _PREFIX.fullmatch(name))}
        if prefixed and len(prefixed) < len(layouts):
            odd = next(name for name in layouts if name not in prefixed)
            raise ValueError(f"{next(iter(prefixed))!r} begins with a stage, as in a merged file, but {odd!r} does not"[:400])
        if not prefixed:
            return {stage: layouts}
        stages: dict[int, dict[str, TensorLayout]] = {}
        for name, found in prefixed.items():
            stages.setdefault(int(found[1]), {})[found[2]] = layouts[name]
        return stages
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StrategyError(f"{path}: not a usable strategy file: {_reason(error)}"[:1000]) from error


def _reason(error: Exception) -> str:
    """Returns the text of an error; with its type unless mindresume raised it."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _layout(matrix: list[Any], cuts: list[Any], step: Any, size: Any, uneven: bool) -> TensorLayout:
    """Makes a layout. ``size``, ``step``: optimizer shards and their distance in ranks; none if either is 0. Raises ValueError if
    the layout is impossible or not supported."""
    if uneven:
        raise ValueError("it is sharded unevenly (field, param_split_shape or indices_offset is set), which is not supported")
    if not is_count(step, 0, MAX_RANKS):
        raise ValueError(f"opt_weight_shard_step is {step!r}"[:200] + ", expected a number of ranks")
    # The matrix of a stage with one rank is empty.
    layout = TensorLayout.from_json({"device_matrix": matrix or [1], "tensor_map": cuts, "optimizer_shards": size if step else 0})
    if layout.optimizer_pieces > 1 and step != layout.optimizer_stride:
        raise ValueError(f"opt_weight_shard_step is {step}, expected {layout.optimizer_stride} ranks: {layout}")
    return layout.normalized()


Items = tuple[int, Iterator[tuple[str, TensorLayout]]]         # stage, (name, layout) of each parameter


def _json_items(content: bytes) -> Items:
    value = parse_json(content, pairs=_unique)
    operators = value.get("parallel_strategy_item")
    if not operators:
        raise ValueError("it has no strategy items (parallel_strategy_item); a failed compile leaves such a file")
    stage = _stage(next(iter(operators.values()))["stage"])

    def layout(row: Mapping[str, Any]) -> TensorLayout:
        uneven = any(row.get(key) for key in ("field", "param_split_shape", "indices_offset"))
        return _layout(row["dev_matrix"], row["tensor_map"], row["opt_weight_shard_step"], row["opt_weight_shard_size"], uneven)
    return stage, ((name, _named(name, layout, row)) for name, row in (value.get("parallel_layout_item") or {}).items())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"{name!r}"[:200] + " occurs twice, with different values")
    return encodable(found)


def _protobuf_items(content: bytes) -> Items:
    top = _message(content, {2, 3})
    if not top[2]:
        raise ValueError("it has no strategy items (parallel_strategy_item); a failed compile leaves such a file")
    stage = _stage(_one(_message(_one(_message(top[2][0], {2}), 2), {1}), 1, int))
    known: dict[bytes, TensorLayout] = {}               # a model has thousands of parameters but few layouts

    def layout(body: bytes) -> TensorLayout:
        if body not in known:
            row = _message(body, {1, 2, 3, 4, 5, 6, 7})
            if not 1 <= len(row[2]) <= MAX_AXES:
                raise ValueError(f"{len(row[2])} tensor maps, expected one, or one for each of up to {MAX_AXES} dimensions")
            maps = [_numbers(part) for part in row[2]]
            # One message for all dimensions; or one for each, if several axes shard one of them.
            cuts = maps[0] if len(maps) == 1 else [axes for axes in maps if axes]
            uneven = any(_numbers(part) for part in row[3] + row[4]) or _one(row, 5, int) != 0
            known[body] = _layout(_numbers(_one(row, 1)), cuts, _one(row, 6, int), _one(row, 7, int), uneven)
        return known[body]

    def items() -> Iterator[tuple[str, TensorLayout]]:
        for item in top[3]:
            row = _message(item, {1, 2})
            name = _one(row, 1).decode()
            yield name, _named(name, layout, _one(row, 2))
    return stage, items()


def _named(name: str, function: Callable[[Any], TensorLayout], row: Any) -> TensorLayout:
    try:
        return function(row)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"parameter {name!r}"[:300] + f": {_reason(error)}"[:500]) from error


def _stage(value: Any) -> int:
    if not is_count(value, 0, MAX_RANKS):
        raise ValueError(f"the stage is {value!r}"[:200] + f", expected a number up to {MAX_RANKS}")
    return value


# ---- protobuf --------------------------------------------------------------------------------------------------------

def _message(data: Any, wanted: set[int]) -> dict[int, list[Any]]:
    """Returns {field: values in order} of the wanted fields, [] for absent ones. Values are integers or bytes. Skips other
    fields. Raises ValueError if a length exceeds the message."""
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
            length, position = _varint(data, position) if kind == 2 else (8 if kind == 1 else 4, position)
            if not 0 <= length <= end - position:
                raise ValueError(f"damaged or truncated: field {number} has {length} bytes at {position} of a message of {end}")
            value, position = data[position:position + length], position + length
        else:
            raise ValueError(f"damaged: wire type {kind} before byte {position} of a message of {end}")
        if number < 1:
            raise ValueError(f"damaged: field {number} before byte {position} of a message of {end}")
        if number in found:
            found[number].append(value)
    raise ValueError(f"a message of more than {MAX_FIELDS} fields")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the signed 64-bit integer at ``position``, and the position after it."""
    try:
        value, position = decode_varint(data, position)
    except ValueError as error:
        raise ValueError(f"damaged or truncated: {error} of a message of {len(data)} bytes") from None
    return signed(value), position


def _one(message: Mapping[int, list[Any]], number: int, kind: type = bytes) -> Any:
    """Returns the value of a field that must occur exactly once."""
    values = message[number]
    if len(values) != 1 or not isinstance(values[0], kind):
        raise ValueError(f"field {number} of a message occurs {len(values)} times, expected one "
                         f"{'number' if kind is int else 'message or text'}")
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
    """Encodes one field: an integer, a string, an encoded message, or integers (a message ``repeated dim = 1``)."""
    if isinstance(value, int):
        return encode_varint(number << 3) + encode_varint(value)
    data = value.encode() if isinstance(value, str) else value
    if not isinstance(data, bytes):
        data = b"".join(_field(1, item) for item in data)
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


# ---- writing ---------------------------------------------------------------------------------------------------------

def encode_strategy(stages: Mapping[int, Layouts], fmt: str = "ckpt") -> bytes:
    """Returns the bytes of the file of one stage, or of a merged file for several.

    Raises:
        StrategyError: MindSpore's files cannot hold a parameter, which the message names, or its reader cannot read it.
        ValueError: The format is neither ckpt nor json.
    """
    if fmt not in ("ckpt", "json"):
        raise ValueError(f"format {fmt!r}: a strategy file is ckpt or json")
    if not stages or not all(stages.values()):
        raise StrategyError("a strategy file needs at least one stage, each with parameters")
    rows, maps = {}, {}
    for stage, layouts in stages.items():
        for name, layout in layouts.items():
            row = rows[f"{stage}-{name}" if len(stages) > 1 else name] = layout.normalized()
            maps[row] = _maps(name, row, fmt)
    if fmt == "json":
        operators = {f"operator_{stage}": {"stage": stage, "parallel_strategy": [[1]]} for stage in stages}
        items = {name: {"dev_matrix": layout.device_matrix, "tensor_map": layout.tensor_map, "param_split_shape": [],
                        "indices_offset": [], "field": 0, "opt_weight_shard_step": layout.optimizer_stride,
                        "opt_weight_shard_size": layout.optimizer_shards} for name, layout in rows.items()}
        return json.dumps({"current_stage": 1, "parallel_strategy_item": operators, "parallel_layout_item": items}).encode()
    pieces = [_field(1, 1)]                     # current_stage: required but unused
    for stage in stages:
        pieces.append(_field(2, _field(1, f"operator_{stage}") + _field(2, _field(1, stage) + _field(2, (1,)))))
    bodies = {layout: b"".join([_field(1, layout.device_matrix), *(_field(2, part) for part in parts), _field(3, ()),
                                _field(4, ()), _field(5, 0), _field(6, layout.optimizer_stride),
                                _field(7, layout.optimizer_shards)])
              for layout, parts in maps.items()}
    pieces += [_field(3, _field(1, name) + _field(2, bodies[layout])) for name, layout in rows.items()]
    return b"".join(pieces)


def _maps(name: str, layout: TensorLayout, fmt: str) -> list[tuple[int, ...]]:
    """Returns the TensorMap messages of a layout: one, or one for each dimension if a dimension needs several axes."""
    if "-" in name:
        raise StrategyError(f"parameter {name}: MindSpore cannot read a name with '-', its separator after the stage")
    if not name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise StrategyError(f"parameter {name!r}: a name must be UTF-8 and not empty")
    plain = tuple(cut for cut in layout.tensor_map if isinstance(cut, int))
    if len(plain) == len(layout.tensor_map):
        return [plain]
    if fmt == "json":
        raise StrategyError(f"parameter {name}: MindSpore cannot read a dimension sharded by several axes from json; write ckpt: "
                            f"{layout}")
    if len(layout.tensor_map) == 1:
        raise StrategyError(f"parameter {name}: no strategy file can express a vector sharded by several axes: {layout}")
    return [cut if isinstance(cut, tuple) else (cut,) for cut in layout.tensor_map]
