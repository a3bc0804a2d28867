"""Turns untrusted JSON into typed values: text into JSON values with bounded memory, and JSON
values into dataclasses.

    # RecordError: "scrub: size is -1, expected ..."
    record = decode(DamagedFile, parse_json(data), "scrub")

The caller limits the number of bytes (``mindresume.storage.read_bytes``). ``parse_json``
limits the number of values and of keys, since two bytes of text can become a hundred bytes of
memory, and the nesting depth, since printing or comparing a nested value recurses. ``decode``
checks each value against the annotation of its field.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from mindresume.errors import RecordError

# files of mindresume nest 6 deep; those of mindformers, MindSpore and Hugging Face less than 10
MAX_DEPTH = 64
# of one file. Kimi K2 has 139,000 in all of its files, quantized 207,000, with Adam's moments
# 417,000
MAX_TENSORS = 1 << 19
# a header has four for each tensor; an index, a record and a manifest have fewer
MAX_KEYS = 4 * MAX_TENSORS
MAX_VALUES = 16 * MAX_TENSORS  # a record has 13 for each tensor, a header 8

# steps, samples, bytes: the largest number that a file system, MindSpore and a message can hold
MAX_COUNT = 2**63 - 1
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"

Pairs = list[tuple[str, Any]]
Value = TypeVar("Value")


def unique(pairs: Pairs) -> dict[str, Any]:
    """Makes an object of ``pairs``. Raises ValueError if a key occurs twice, or UTF-8 cannot encode
    it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {seen.most_common(1)[0][0]!r} occurs twice"[:200])
    for name in found:
        name.encode()  # JSON text can hold a lone surrogate
    return found


def parse_json(
    data: bytes,
    values: int = MAX_VALUES,
    pairs: Callable[[Pairs], dict[str, Any]] = unique,
    keys: int = MAX_KEYS,
) -> Any:
    """Parses the JSON document in ``data``.

    Args:
        data: untrusted bytes.
        values: upper limit for the number of values.
        pairs: makes an object of its keys and values.
        keys: upper limit for the number of keys, which need more memory than other values.

    Raises:
        ValueError: ``data`` is not JSON, has more than ``values`` values or ``keys`` keys, or is
            nested deeper than MAX_DEPTH.
    """
    # upper bounds: the signs within strings are counted too
    for found, most, what in (
        (sum(map(data.count, (b",", b"[", b"{"))), values, "values"),
        (data.count(b":"), keys, "keys"),
    ):
        if found > most:
            raise ValueError(f"it has some {found} {what}, expected at most {most}")
    try:
        value = json.loads(data.decode(), object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def json_value(value: Any, is_text: bool = False) -> Any:
    """Returns ``value`` as plain JSON values. A number that is nan or infinite, which JSON does not
    have, becomes null; or with ``is_text`` its name."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): json_value(inner, is_text) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(inner, is_text) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if is_text else None
    return value


# ---- values of a type ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Bounds a value, in an annotation: ``Annotated[int, Limits(1, 8)]``. ``least``, ``most``: of a
    number, of the length of anything else. ``pattern``: of a whole text. ``what``: describes what
    is allowed, for people. ``accepts``: says whether a value that may be Any is allowed. Either
    of the two stands alone."""

    least: float = 0
    most: float = math.inf
    pattern: str = ""
    what: str = ""
    accepts: Callable[[Any], bool] | None = None


Count = Annotated[int, Limits(0, MAX_COUNT)]
Number = Annotated[float, Limits(-sys.float_info.max, sys.float_info.max)]
# until 5138: later times cannot be formatted
Time = Annotated[float, Limits(0, 10**11, what="seconds since 1970")]
Checksum = Annotated[str, Limits(pattern="[0-9a-f]{32}", what="32 hex digits")]  # xxh3_128
RelativePath = Annotated[
    str, Limits(pattern=r"(?s)(?!/)(?!(?:.*/)?\.\.(?:/|\Z))[^\0]+", what="a path below the folder")
]
_NUMBERS = {int: Limits(-MAX_COUNT, MAX_COUNT), float: Limits(-1e18, 1e18)}
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    tuple: "a list",
}
# else an object
_JSON = {
    int: (int,),
    float: (int, float),
    str: (str,),
    bool: (bool,),
    Literal: (str,),
}


def is_count(value: Any, least: int = 0, most: int = MAX_COUNT) -> TypeGuard[int]:
    """Returns whether a JSON value is an integer (not true, not 2.0) from ``least`` to ``most``."""
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> TypeGuard[int | float]:
    """Returns whether a JSON value is a number (not true) that a float can hold: neither NaN nor
    infinite, nor 400 digits long."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def decode(kind: type[Value], value: Any, where: str) -> Value:
    """Returns the JSON ``value`` as a ``kind``: int, float, str, bool, Any, Literal, ``X | None``,
    ``tuple[X, ...]``, ``tuple[X, Y]``, a NamedTuple (a list), ``Mapping[str, X]``, ``Mapping[int,
    X]`` (whose keys are digits), or a dataclass with such fields, whose value is an object. A field
    that is absent has its default, or is None; unknown keys are ignored. ``field(metadata={"key":
    "..."})`` names another key than that of the field.

    Args:
        kind: a type, or ``Annotated[type, Limits(...)]``.
        value: of ``parse_json``.
        where: names the value in an error.

    Raises:
        RecordError: ``value`` has another type, is out of range, or lacks a field: says where, what
            was found and expected.
    """
    annotation: Any = kind
    decoded: Value = _decoder(annotation).decode(value, (where,))
    return decoded


class _Decoder:
    """Decodes the values of one annotation, which it takes apart once."""

    def __init__(self, annotation: Any):
        limits: Limits | None = None
        self.is_optional = get_origin(annotation) in (Union, types.UnionType)
        if self.is_optional:
            annotation = get_args(annotation)[0]
        if get_origin(annotation) is Annotated:
            annotation, limits = get_args(annotation)
        origin, inner = get_origin(annotation) or annotation, get_args(annotation)
        self.origin: Any = (
            Mapping if isinstance(origin, type) and issubclass(origin, Mapping) else origin
        )
        self.choices = inner if origin is Literal else ()
        self.is_any_length = origin is tuple and inner[-1] is ...
        self.inner = (
            () if self.choices else tuple(_Decoder(each) for each in inner if each is not ...)
        )
        self.is_list = isinstance(origin, type) and issubclass(origin, tuple)
        if self.is_list and origin is not tuple:
            hints = get_type_hints(origin, include_extras=True)
            self.inner = tuple(map(_Decoder, hints.values()))
        # of a list of one length: (index, or name in a NamedTuple; decoder)
        self.columns = tuple(
            zip(getattr(origin, "_fields", itertools.count()), self.inner, strict=False)
        )
        if self.is_list and not self.is_any_length:
            limits = Limits(len(self.inner), len(self.inner))
        self.limits = limits or _NUMBERS.get(origin)
        self.is_number = origin in _NUMBERS
        # says whether a value of its types is allowed; else the bounds of a number or a length do
        self.accepts: Any = None
        if self.choices:
            self.accepts = self.choices.__contains__
        elif limits and not self.is_number:
            self.accepts = limits.accepts or (
                re.compile(limits.pattern).fullmatch if limits.pattern else None
            )
        self.least, self.most = None, math.inf
        if self.limits and not self.accepts:
            self.least, self.most = self.limits.least, self.limits.most
        self.types = (
            None if origin is Any else (list,) if self.is_list else _JSON.get(origin, (dict,))
        )
        # of a dataclass: (key, name, whether it has a default, decoder)
        self.fields: list[tuple[str, str, bool, _Decoder]] = []
        if is_dataclass(origin):
            hints = get_type_hints(origin, include_extras=True)
            self.fields = [
                (
                    field.metadata.get("key", field.name),
                    field.name,
                    field.default is not MISSING or field.default_factory is not MISSING,
                    _Decoder(hints[field.name]),
                )
                for field in fields(origin)
            ]
        self.is_leaf = not self.is_list and self.origin is not Mapping and not is_dataclass(origin)

    def decode(self, value: Any, at: tuple[Any, ...]) -> Any:
        """Returns ``value``. ``at``: the keys that lead to it, as (..., key)."""
        if value is None and self.is_optional:
            return None
        allowed = self.types is None or type(value) in self.types
        if allowed:
            if self.least is not None:
                size = value if self.is_number else len(value)
                allowed = self.least <= size <= self.most
            else:
                accepts = self.accepts
                allowed = accepts is None or accepts(value)
        if not allowed:
            raise RecordError(f"{_place(at)} is {value!r}"[:300] + f", expected {self._expected()}")
        if self.is_leaf:
            return float(value) if self.origin is float else value
        if self.is_list:
            # no comprehension: it would slow down all of this method
            rows = []
            if self.is_any_length:
                one = self.inner[0]
                for row in value:
                    rows.append(one.decode(row, (at, len(rows))))
                return tuple(rows)
            for key, one in self.columns:
                rows.append(one.decode(value[len(rows)], (at, key)))
            return tuple.__new__(self.origin, rows)  # also a NamedTuple
        given: dict[Any, Any] = {}
        if self.origin is Mapping:
            of_key, of_value = self.inner
            for key, row in value.items():
                if of_key.origin is int and not re.fullmatch("[0-9]{1,18}", key):
                    raise RecordError(
                        f"{_place(at)} has the key {key!r}"[:300] + ", expected a whole number"
                    )
                given[of_key.origin(key)] = of_value.decode(row, (at, key))
            return given
        for key, name, has_default, decoder in self.fields:
            if key in value:
                given[name] = decoder.decode(value[key], (at, key))
            elif not has_default:
                if not decoder.is_optional:
                    raise RecordError(f"{_place((at, key))} is missing"[:300])
                given[name] = None
        return self.origin(**given)

    def _expected(self) -> str:
        if self.limits and self.limits.what:
            return self.limits.what
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        text = _WORDS.get(tuple if self.is_list else self.origin, "an object")
        if self.is_list and not self.is_any_length:
            return f"{text} of {len(self.inner)} values"
        if not self.limits or self.limits.most == math.inf:
            return text
        return (
            f"{text} from {self.limits.least} to {self.limits.most}"
            if self.origin in _NUMBERS
            else f"{text} of at most {self.limits.most}"
        )


def _place(at: tuple[Any, ...]) -> str:
    """Returns where a value is, such as ``scrub: damaged[3].size``."""
    keys: list[str] = []
    while len(at) > 1:
        at, key = at
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    path = "".join(reversed(keys)).removeprefix(".")
    return f"{at[0]}: {path}" if path else str(at[0])


@functools.cache
def _decoder(annotation: Any) -> _Decoder:
    return _Decoder(annotation)
