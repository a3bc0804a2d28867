"""Parses text of the command line into values.

    parse_value("1e-5") == 1e-5      parse_value("True") is True        parse_value("[1, [2, x]]") == [1, [2, "x"]]
    parse_value("None") is None      parse_value("'1'") == "1"          parse_value("{a: 1}") == {"a": 1}

Plain YAML is not used for single words: it would turn ``on`` into True, ``12:30`` into 750 and ``2024-01-01`` into a date, and
would leave ``1e-5`` a string.
"""
from __future__ import annotations

import ast
import re
from typing import Any

import yaml

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")
_WORDS = {"true": True, "false": False, "none": None, "null": None, "~": None}
_INTEGER = re.compile(r"[+-]?\d+")
_FLOAT = re.compile(r"[+-]?((\d+\.\d*|\.\d+|\d+)(e[+-]?\d+)?|inf|nan)", re.IGNORECASE)


def parse_bool(text: str) -> bool:
    """Parses true/false, 1/0 or yes/no in any case. Raises ValueError for anything else."""
    word = text.strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise ValueError(f"expected true or false (also 1/0, yes/no), got {text!r}")


def parse_bool_or_name(text: str) -> bool | str:
    """Parses a value of ``--resume_training``: a truth value, or the name of a checkpoint. Raises ValueError if it is empty."""
    if not text.strip():
        raise ValueError("expected true, false or the name of a checkpoint, got an empty value")
    return parse_bool(text) if text.strip().lower() in TRUE + FALSE else text


def parse_value(text: str, *, split_commas: bool = False) -> Any:
    """Parses the value of a configuration key: bool, None, int, float, list, tuple, dict or str. Quoted text stays a string.

    Args:
        split_commas: ``a,b`` is the list ["a", "b"], as in ``--options``.
    Raises:
        ValueError: The text begins like a list, dictionary or quoted string, but is none.
    """
    text = text.strip()
    if text[:1] in ("[", "{", "(", "'", '"'):
        return _structure(text)
    if split_commas and "," in text:
        return _structure(f"[{text}]")
    return _word(text)


def _word(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Loader(yaml.SafeLoader):
    """Loads YAML lists, dictionaries and texts only. ``_word`` parses unquoted words. Tags (``!!timestamp``) and references
    (``*a``), with which a value can contain itself, are errors."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    yaml_constructors: dict[str, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("a reference")
        return super().compose_node(parent, index)


def _construct(_: yaml.Loader, node: yaml.ScalarNode) -> Any:
    if node.style:
        return node.value
    if node.value.count("(") != node.value.count(")"):
        raise yaml.YAMLError("a tuple of unquoted words inside a list")      # YAML would split it into "(a" and "b)"
    return _word(node.value)


_Loader.add_constructor("tag:yaml.org,2002:str", _construct)
_Loader.add_constructor("tag:yaml.org,2002:seq", yaml.SafeLoader.construct_yaml_seq)
_Loader.add_constructor("tag:yaml.org,2002:map", yaml.SafeLoader.construct_yaml_map)
_Loader.add_constructor(None, yaml.SafeLoader.construct_undefined)


def _structure(text: str) -> Any:
    try:
        value = ast.literal_eval(text)           # Python notation, the only one with tuples
        if isinstance(value, (list, tuple, dict, str)):
            return value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):     # TypeError: a list as a key
        pass                                     # then it must be YAML
    if text[0] == "(" and text[-1] == ")":
        return tuple(_structure(f"[{text[1:-1]}]"))
    try:
        return yaml.load(text, Loader=_Loader)   # a SafeLoader; [true, abc] and {a: 1} are YAML
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{text[:200]!r} begins like a list, dictionary or quoted text but cannot be read as one; check the "
                         f"brackets, or put it in quotes inside the quotes: '\"...\"'") from error
