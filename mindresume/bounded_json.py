"""Parses JSON from untrusted files with bounded memory: every reader of mindresume uses it. Makes numbers fit for JSON.

The caller limits the number of bytes (``mindresume.storage.operations.read_bytes``). This module limits the number of values and
of keys, since two bytes of text can become a hundred bytes of memory, and the nesting depth, since printing or comparing a nested
value recurses.
"""
from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64              # files of mindresume nest 6 deep; those of mindformers, MindSpore and Hugging Face less than 10
MAX_TENSORS = 1 << 19       # of one file. Kimi K2 has 139,000 in all of its files, quantized 207,000, with Adam's moments 417,000
MAX_KEYS = 4 * MAX_TENSORS  # a header has four for each tensor; an index, a record and a manifest have fewer
MAX_VALUES = 16 * MAX_TENSORS       # a record has 13 for each tensor, a header 8

Pairs = list[tuple[str, Any]]


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


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
