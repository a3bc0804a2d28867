"""Bounded JSON: accepted documents, and refusals before or after parsing; then typed values of
them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.errors import RecordError
from mindresume.typed import (
    MAX_DEPTH,
    MAX_KEYS,
    MAX_VALUES,
    Count,
    Limits,
    Time,
    decode,
    parse_json,
)


@pytest.mark.parametrize("value", [None, 1, "a", [], {}, {"a": [1, {"b": "[,{"}]}, [[]] * 1000])
def test_output_of_json_is_parsed(value):
    assert parse_json(json.dumps(value).encode()) == value


def nested(depth, opening="[", closing="]"):
    return (opening * depth + "0" * (opening != "[") + closing * depth).encode()


def test_the_deepest_allowed_nesting():
    assert parse_json(nested(MAX_DEPTH))
    assert parse_json(nested(MAX_DEPTH, '{"a":', "}"))


@pytest.mark.parametrize(
    "content",
    [
        nested(MAX_DEPTH + 2),
        nested(MAX_DEPTH + 2, '{"a":', "}"),
        nested(900),
        nested(100_000),
        nested(300, "[0,", "]"),
    ],
    ids=lambda content: str(len(content)),
)
def test_deeper_is_refused(content):
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parse_json(content)


@pytest.mark.parametrize("piece", [b"[],", b"{},", b"0,"])
def test_too_many_values_are_refused_before_parsing(piece):
    with pytest.raises(ValueError, match=f"expected at most {MAX_VALUES}"):
        # not JSON: refused before it is parsed
        parse_json(b"[" + piece * (MAX_VALUES + 1))


def test_too_many_keys_are_refused_before_parsing():
    """A key with an empty value needs a hundred bytes of memory and more."""
    with pytest.raises(ValueError, match=f"some {MAX_KEYS + 1} keys, expected at most {MAX_KEYS}"):
        parse_json(b"{" + b'"a":1,' * (MAX_KEYS + 1))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b'{"a":1,"a":1}', b'{"\\ud800":1}', b"9" * 5000]
)
def test_other_content_is_a_value_error(content):
    with pytest.raises(ValueError, match="."):
        parse_json(content)


@dataclass(frozen=True)
class Inner:
    size: Count
    at: Time = 0.0


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, Limits(1, 8)]
    state: Literal["ready", "left"]
    rows: Annotated[tuple[Inner, ...], Limits(0, 2)] = ()
    seen: Mapping[int, str] = field(default_factory=dict)
    pair: tuple[int, bool] | None = None
    kind: str = field(default="", metadata={"key": "end"})


GOOD = {
    "name": "a",
    "state": "ready",
    "rows": [{"size": 3, "at": 5}],
    "seen": {"7": "x"},
    "pair": [1, True],
    "end": "z",
}


def test_a_dataclass_is_decoded():
    assert decode(Outer, GOOD, "x") == Outer(
        "a", "ready", (Inner(3, 5.0),), {7: "x"}, (1, True), "z"
    )
    assert decode(Outer, {"name": "a", "state": "left", "more": 1}, "x") == Outer("a", "left")


@pytest.mark.parametrize(
    "keys, value, says",
    [
        (["name"], 3, "x: name is 3, expected a text of at most 8"),
        (["name"], "", "x: name is ''"),
        (["state"], "gone", "x: state is 'gone', expected one of ready, left"),
        (["state"], ["ready"], "x: state is"),
        (["rows"], {}, "x: rows is {}, expected a list of at most 2"),
        (["rows"], [{"size": 1}] * 3, "x: rows is"),
        (["rows", 0], 5, r"x: rows\[0\] is 5, expected an object"),
        (["rows", 0, "size"], True, r"x: rows\[0\].size is True"),
        (["rows", 0, "size"], 2**63, "expected a whole number from 0 to"),
        (["rows", 0], {}, r"x: rows\[0\].size is missing"),
        (["rows", 0, "at"], float("nan"), "expected seconds since 1970"),
        (["rows", 0, "at"], 10**400, "seconds since 1970"),
        (["seen"], {"-7": "x"}, "x: seen has the key '-7'"),
        (["seen", "7"], 5, "x: seen.7 is 5"),
        (["seen"], [], "an object"),
        (["pair"], [1], "expected a list of 2 values"),
        (["pair", 1], 1, r"x: pair\[1\] is 1, expected true or false"),
        (["end"], None, "x: end is None, expected a text"),
    ],
)
def test_the_error_says_where_and_what(keys, value, says):
    document = json.loads(json.dumps(GOOD))
    target = document
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    with pytest.raises(RecordError, match=says):
        decode(Outer, document, "x")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*GOOD, "size", "at", "7"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values, st.dictionaries(st.sampled_from(list(GOOD)), json_values, max_size=3))
def test_anything_is_decoded_or_refused_in_one_short_sentence(value, changes):
    for document in (value, {**GOOD, **changes}):
        try:
            assert isinstance(decode(Outer, document, "x"), Outer)
        except RecordError as error:
            assert str(error).startswith("x") and len(str(error)) < 1000
