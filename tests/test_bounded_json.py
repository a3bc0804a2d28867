"""Bounded JSON: accepted documents, and refusals before or after parsing."""
import json

import pytest

from mindresume.bounded_json import MAX_DEPTH, MAX_KEYS, MAX_VALUES, parse_json


@pytest.mark.parametrize("value", [None, 1, "a", [], {}, {"a": [1, {"b": "[,{"}]}, [[]] * 1000])
def test_output_of_json_is_parsed(value):
    assert parse_json(json.dumps(value).encode()) == value


def nested(depth, opening="[", closing="]"):
    return (opening * depth + "0" * (opening != "[") + closing * depth).encode()


def test_the_deepest_allowed_nesting():
    assert parse_json(nested(MAX_DEPTH))
    assert parse_json(nested(MAX_DEPTH, '{"a":', "}"))


@pytest.mark.parametrize("content", [nested(MAX_DEPTH + 2), nested(MAX_DEPTH + 2, '{"a":', "}"), nested(900), nested(100_000),
                                     nested(300, "[0,", "]")], ids=lambda content: str(len(content)))
def test_deeper_is_refused(content):
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parse_json(content)


@pytest.mark.parametrize("piece", [b"[],", b"{},", b"0,"])
def test_too_many_values_are_refused_before_parsing(piece):
    with pytest.raises(ValueError, match=f"expected at most {MAX_VALUES}"):
        parse_json(b"[" + piece * (MAX_VALUES + 1))                     # not JSON: refused before it is parsed


def test_too_many_keys_are_refused_before_parsing():
    """A key with an empty value needs a hundred bytes of memory and more."""
    with pytest.raises(ValueError, match=f"some {MAX_KEYS + 1} keys, expected at most {MAX_KEYS}"):
        parse_json(b"{" + b'"a":1,' * (MAX_KEYS + 1))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"a":1,"a":1}', b'{"\\ud800":1}', b"9" * 5000])
def test_other_content_is_a_value_error(content):
    with pytest.raises(ValueError, match="."):
        parse_json(content)
