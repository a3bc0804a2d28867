"""Turns untrusted JSON into typed values: text into JSON values with bounded memory, and JSON values into dataclasses.

    record = decode(DamagedFile, parse_json(data), "scrub")     # RecordError: "scrub: size is -1, expected ..."

The caller limits the number of bytes (``mindresume.storage.operations.read_bytes``). ``parse_json`` limits the number of values
and of keys, since two bytes of text can become a hundred bytes of memory, and the nesting depth, since printing or comparing a
nested value recurses. ``decode`` checks each value against the annotation of its field.
"""
from __future__ import annotations

import functools
import json
import math
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mindresume.errors import RecordError

MAX_DEPTH = 64              # files of mindresume nest 6 deep; those of mindformers, MindSpore and Hugging Face less than 10
MAX_TENSORS = 1 << 19       # of one file. Kimi K2 has 139,000 in all of its files, quantized 207,000, with Adam's moments 417,000
MAX_KEYS = 4 * MAX_TENSORS  # a header has four for each tensor; an index, a record and a manifest have fewer
MAX_VALUES = 16 * MAX_TENSORS       # a record has 13 for each tensor, a header 8

MAX_COUNT = 2**63 - 1       # steps, samples, bytes: the largest number that a file system, MindSpore and a message can hold
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"

Pairs = list[tuple[str, Any]]
Value = TypeVar("Value")


def unique(pairs: Pairs) -> dict[str, Any]:
    """Makes an object of ``pairs``. Raises ValueError if a key occurs twice, or UTF-8 cannot encode it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {seen.most_common(1)[0][0]!r} occurs twice"[:200])
    return encodable(found)


def encodable(value: dict[str, Any]) -> dict[str, Any]:
    """Returns ``value`` unchanged. Raises ValueError if UTF-8 cannot encode a key: JSON text can hold a lone surrogate."""
    for name in value:
        name.encode()
    return value


def parse_json(data: bytes, values: int = MAX_VALUES, pairs: Callable[[Pairs], dict[str, Any]] = unique, keys: int = MAX_KEYS
               ) -> Any:
    """Parses the JSON document in ``data``.

    Args:
        data: untrusted bytes.
        values: upper limit for the number of values.
        pairs: makes an object of its keys and values.
        keys: upper limit for the number of keys, which need more memory than other values.

    Raises:
        ValueError: ``data`` is not JSON, has more than ``values`` values or ``keys`` keys, or is nested deeper than MAX_DEPTH.
    """
    # upper bounds: the signs within strings are counted too
    for found, most, what in ((sum(map(data.count, (b",", b"[", b"{"))), values, "values"), (data.count(b":"), keys, "keys")):
        if found > most:
            raise ValueError(f"it has some {found} {what}, expected at most {most}")
    try:
        value = json.loads(data.decode(), object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level if isinstance(outer, (dict, list))
                 for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def finite(value: Any) -> Any:
    """Returns ``value`` with null for every number that is nan or infinite: JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value



# ---- values of a type ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Limits:
    """Bounds a value, in an annotation: ``Annotated[int, Limits(1, 8)]``. ``least``, ``most``: of a number, of the length of
    anything else. ``pattern``: of a whole text. ``what``: describes what is allowed, for people."""
    least: float = 0
    most: float = math.inf
    pattern: str = ""
    what: str = ""

    def accept(self, value: Any) -> bool:
        size = value if isinstance(value, (int, float)) else len(value)
        return self.least <= size <= self.most and (not self.pattern or re.fullmatch(self.pattern, value) is not None)


Count = Annotated[int, Limits(0, MAX_COUNT)]
Number = Annotated[float, Limits(-sys.float_info.max, sys.float_info.max)]
Time = Annotated[float, Limits(0, 10**11, what="seconds since 1970")]       # until 5138: later times cannot be formatted
Checksum = Annotated[str, Limits(pattern="[0-9a-f]{32}", what="32 hex digits")]       # xxh3_128
_NUMBERS = {int: Limits(-MAX_COUNT, MAX_COUNT), float: Limits(-1e18, 1e18)}
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list", Mapping: "an object"}


def decode(kind: type[Value], value: Any, where: str, *, is_closed: bool = False) -> Value:
    """Returns the JSON ``value`` as a ``kind``: int, float, str, bool, Any, Literal, ``X | None``, ``tuple[X, ...]``,
    ``tuple[X, Y]``, ``Mapping[str, X]``, ``Mapping[int, X]`` (whose keys are digits), or a dataclass with such fields, whose
    value is an object. A field that is absent has its default, or is None. ``field(metadata={"key": "..."})`` names another key
    than that of the field.

    Args:
        kind: a type, or ``Annotated[type, Limits(...)]``.
        value: of ``parse_json``.
        where: names the value in an error.
        is_closed: unknown keys are refused; else they are ignored.

    Raises:
        RecordError: ``value`` has another type, is out of range, or lacks a field: says where, what was found and expected.
    """
    decoded: Value = _decode(kind, value, f"{where}: ", is_closed)
    return decoded


def _decode(kind: Any, value: Any, at: str, is_closed: bool) -> Any:
    origin, inner, limits = _parts(kind)
    if origin in _NUMBERS:
        limits = limits or _NUMBERS[origin]
        is_valid = type(value) is int or origin is float and type(value) is float
    elif origin is Union:
        return None if value is None else _decode(inner[0], value, at, is_closed)
    elif origin is Mapping or is_dataclass(origin):
        is_valid = isinstance(value, dict)
    elif origin is tuple:
        is_valid = isinstance(value, list) and (inner[-1] is ... or len(inner) == len(value))
    elif origin is Literal:
        is_valid = isinstance(value, str) and value in inner
    else:
        is_valid = origin is Any or isinstance(value, origin)
    if not is_valid or limits and not limits.accept(value):
        raise RecordError(f"{at.removesuffix(': ')} is {value!r}"[:300] + f", expected {_expected(origin, inner, limits)}")
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return tuple(_decode(kinds[index], row, f"{at}[{index}]", is_closed) for index, row in enumerate(value))
    if origin is Mapping:
        return {_key(inner[0], key, at): _decode(inner[1], row, f"{at}.{key}", is_closed) for key, row in value.items()}
    if is_dataclass(origin):
        return _object(origin, value, at, is_closed)
    return float(value) if origin is float else value


def _object(kind: Any, value: Mapping[str, Any], at: str, is_closed: bool) -> Any:
    known = _fields(kind)
    unknown = is_closed and [key for key in value if key not in known]
    if unknown:
        raise RecordError(f"{at}unknown key {unknown[0]!r}"[:300] + f", expected {', '.join(known)}")
    given, at = {}, at if at[-1] == " " else f"{at}."
    for key, (field, annotation) in known.items():
        if key in value:
            given[field.name] = _decode(annotation, value[key], f"{at}{key}", is_closed)
        elif field.default is MISSING and field.default_factory is MISSING:
            if _parts(annotation)[0] is not Union:
                raise RecordError(f"{at}{key} is missing"[:300])
            given[field.name] = None
    return kind(**given)


def _key(kind: Any, key: str, at: str) -> str | int:
    if kind is str:
        return key
    if not re.fullmatch("[0-9]{1,18}", key):
        raise RecordError(f"{at} has the key {key!r}"[:300] + ", expected a whole number")
    return int(key)


def _expected(origin: Any, inner: tuple[Any, ...], limits: Limits | None) -> str:
    if limits and limits.what:
        return limits.what
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    text = _WORDS.get(origin, "an object")
    if origin is tuple and inner[-1] is not ...:
        return f"{text} of {len(inner)} values"
    if not limits or limits.most == math.inf:
        return text
    return f"{text} from {limits.least} to {limits.most}" if origin in _NUMBERS else f"{text} of at most {limits.most}"


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...], Limits | None]:
    """Returns the type without its parameters, the parameters, and the limits."""
    limits = None
    if get_origin(kind) is Annotated:
        kind, limits = get_args(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return Union, inner, limits
    return (Mapping if isinstance(origin, type) and issubclass(origin, Mapping) else origin or kind), inner, limits


@functools.cache
def _fields(kind: type) -> dict[str, tuple[Field[Any], Any]]:
    """Returns {key: (field, annotation)} of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.metadata.get("key", field.name): (field, hints[field.name]) for field in fields(kind)}
