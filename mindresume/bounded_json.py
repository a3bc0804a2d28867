"""JSON that comes from a disk, and is believed nothing: every reader of ours parses it here.

Bytes are limited by who reads them (``mindresume.storage.operations.read_bytes``). Here the number of values is, since two bytes
of text can become a hundred of memory, and the depth, since whoever prints or compares a nested value goes down into it.
"""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64              # ours have 6, those of mindformers, MindSpore and Hugging Face fewer than 10
MAX_VALUES = 1 << 23        # the header of a million tensors has 7 million

Pairs = list[tuple[str, Any]]


def unique(pairs: Pairs) -> dict[str, Any]:
    """An object. ValueError if a key occurs twice in it, or is one that UTF-8 cannot hold."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {seen.most_common(1)[0][0]!r} occurs twice"[:200])
    return encodable(found)


def encodable(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` itself. ValueError for a key that UTF-8 cannot hold: a lone surrogate is a text of JSON all the same."""
    for name in value:
        name.encode()
    return value


def parse_json(data: bytes, values: int = MAX_VALUES, pairs: Callable[[Pairs], dict[str, Any]] = unique) -> Any:
    """The JSON document in ``data``. ``pairs`` makes an object of its keys and values. ValueError, whatever the bytes, if it is
    none, has more than ``values`` values, or is nested more than MAX_DEPTH deep."""
    found = sum(map(data.count, (b",", b"[", b"{")))            # those in texts are counted too: a bound, no number
    if found > values:
        raise ValueError(f"it has some {found} values, expected at most {values}")
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


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
