"""Reads and writes the lines of records, manifests and leases, a checksum followed by JSON, and checks their fields.

    <xxh3_128 of the second line>
    {one JSON object on one line}

A checksum is not a signature: anyone who can write the file can compute it. So reading stops at a size limit, every field is
checked, and every function that reads raises RecordError for content that mindresume cannot have written.
"""
from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import xxhash

from mindresume.bounded_json import parse_json
from mindresume.errors import RecordError
from mindresume.model.layout import MAX_AXES
from mindresume.model.training_state import is_count, is_number

VERSION = 1                            # newest version of the format that can be read
# Limits of a line in bytes. A head has a few hundred bytes. A manifest has about 200 for each rank; the limit allows 600 for each
# of MAX_RANKS. The details of a tensor are about as long as its entry in a safetensors header, which may have 100 MB.
HEAD_LIMIT, MANIFEST_LIMIT, DETAILS_LIMIT = 1 << 20, 64 << 20, 128 << 20
MAX_TIME = 10**11                      # seconds since 1970 (year 5138); later times cannot be formatted
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


def encode_head(head: Mapping[str, Any], limit: int = HEAD_LIMIT) -> bytes:
    """Returns the checksum line and the head line. Raises ValueError if the head has more than ``limit`` bytes, as it could
    not be read back."""
    line = dump_line(head, limit)
    return xxhash.xxh3_128_hexdigest(line).encode() + b"\n" + line + b"\n"


def read_head(file: BinaryIO, kind: str, limit: int = HEAD_LIMIT) -> tuple[dict[str, Any], bytes]:
    """Reads the checksum line and the head line, and leaves ``file`` after them. Returns the head and its line. Raises
    RecordError unless they are complete, of this kind and of a known version."""
    checksum = file.readline(64).rstrip(b"\n")
    line = read_line(file, limit, kind)
    if xxhash.xxh3_128_hexdigest(line).encode() != checksum:
        raise RecordError(f"not a {kind}: it is empty, truncated or altered")
    with field_errors(kind):
        head = parse_line(line, kind)
        if not isinstance(head, dict):
            raise RecordError(f"expected a {kind}, found {type(head).__name__}")
        if head.get("kind") != kind:
            raise RecordError(f"expected a {kind}, found {head.get('kind')!r}"[:400])
        version = head.get("version")
        if type(version) is not int or version < 1:
            raise RecordError(f"{kind} of version {version!r}"[:400] + ", expected a whole number of at least 1")
        if version > VERSION:
            raise RecordError(f"{kind} of version {version}"[:400] + f", this mindresume reads up to {VERSION}: install a newer "
                              f"one")
        return head, line


def read_line(file: BinaryIO, limit: int, kind: str) -> bytes:
    """Reads one line of at most ``limit`` bytes and returns it without its line break, which the last line may lack."""
    line = file.readline(limit + 1)
    if len(line) > limit and not line.endswith(b"\n"):
        raise RecordError(f"not a {kind}: a line has more than {limit} bytes")
    return line.removesuffix(b"\n")


def parse_line(line: bytes, kind: str) -> Any:
    """Parses one line of JSON. Raises RecordError if it is not JSON, has too many values or keys, is nested too deeply, repeats a
    key, or has a key that UTF-8 cannot encode."""
    try:
        return parse_json(line)
    except ValueError as error:
        raise RecordError(f"{kind}: not JSON as mindresume writes it: {error}"[:400]) from error


def dump_line(value: Any, limit: int) -> bytes:
    """Returns ``value`` as JSON without a line break. Raises ValueError if it has more than ``limit`` bytes."""
    line = json.dumps(value, separators=(",", ":")).encode()
    if len(line) > limit:
        raise ValueError(f"a line of {len(line)} bytes; at most {limit} can be read back")
    return line


class field_errors:                                    # noqa: N801  a context manager, used as a statement
    """Converts the errors of missing, ill-typed or impossible fields into RecordError."""

    def __init__(self, kind: str):
        self.kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)):
            raise RecordError(f"{self.kind}: a field is missing or wrong ({type(error).__name__}: {error}"[:400] + ")") from error


# ---- single fields -------------------------------------------------------------------------------------------------

def expect_list(value: Any, what: str, length: int | None = None) -> list[Any]:
    """Returns ``value`` if it is a list, with ``length`` values if that is given. ``what`` names it in the error."""
    if not isinstance(value, list) or length not in (None, len(value)):
        found = f"{len(value)} values" if isinstance(value, list) else type(value).__name__
        raise RecordError(f"{what}"[:200] + f": expected a list{f' of {length} values' if length else ''}, found {found}")
    return value


def expect_count(head: Mapping[str, Any], field: str, least: int, most: int) -> int:
    """Returns the integer in ``field``, from ``least`` to ``most``."""
    value = head[field]
    if not is_count(value, least, most):
        raise RecordError(f"{field} is {value!r}"[:200] + f", expected a whole number from {least} to {most}")
    return value


def expect_flag(head: Mapping[str, Any], field: str) -> bool:
    """Returns the boolean in ``field``."""
    value = head[field]
    if not isinstance(value, bool):
        raise RecordError(f"{field} is {value!r}"[:200] + ", expected true or false")
    return value


def expect_time(value: Any) -> float:
    """Returns ``value`` if it is a time, in seconds since 1970."""
    if not is_number(value) or not 0 <= value <= MAX_TIME:
        raise RecordError(f"saved_at is {value!r}"[:200] + ", expected seconds since 1970")
    return float(value)


def expect_checksum(value: Any, what: str) -> None:
    """Checks that ``value`` is an xxh3_128 checksum in hex; ``what`` names it in the error."""
    if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
        raise RecordError(f"{what}"[:200] + f": the checksum is {value!r}"[:200] + ", expected 32 hex digits")


def expect_shape(name: str, value: Any) -> tuple[int, ...]:
    """Returns the shape of tensor ``name``, of at most MAX_AXES dimensions."""
    if not isinstance(value, list) or len(value) > MAX_AXES or not all(map(is_count, value)):
        raise RecordError(f"tensor {name}: the shape is {value!r}"[:400] + f", expected up to {MAX_AXES} sizes")
    return tuple(value)


def set_fields(**fields: Any) -> dict[str, Any]:
    """Returns the fields that are not empty. Readers treat an absent field as empty."""
    return {name: value for name, value in fields.items() if value}


def rank_ranges(ranks: Sequence[int]) -> list[list[int]]:
    """Returns [first, last] of each contiguous range of the ascending ``ranks``: short, as thousands of records hold it."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def parse_ranks(value: Any, world_size: int) -> tuple[int, ...]:
    """Returns a proper subset of the ``world_size`` ranks, ascending; () for None. ``value`` lists ranks (in a manifest) or
    ranges (in a record)."""
    if value is None:
        return ()
    bounds = [row if isinstance(row, list) and len(row) == 2 else [row, row] for row in expect_list(value, "part")]
    if not all(is_count(bound, 0, world_size - 1) for row in bounds for bound in row) or any(
            first > last for first, last in bounds) or any(
            last >= first for (_, last), (first, _) in itertools.pairwise(bounds)) or not 0 < sum(
            last - first + 1 for first, last in bounds) < world_size:
        raise RecordError(f"part is {value!r}"[:200] + f", expected some of the {world_size} ranks, ascending")
    return tuple(itertools.chain.from_iterable(range(first, last + 1) for first, last in bounds))
