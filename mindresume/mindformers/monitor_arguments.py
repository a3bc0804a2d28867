"""Checks the arguments of ``CheckpointMonitor`` before they are used: the trainer would report a wrong one late, under another
name, or not at all.

If two keys exclude each other, the one that the user wrote counts. MindSpore takes the one that has a default (every step, five
files), and ignores the other silently.
"""
from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from mindresume.errors import ConfigError
from mindresume.model.manifest import FORMATS

WRITERS = (False, True, "thread", "process")
_COUNTS = ("save_checkpoint_steps", "save_checkpoint_seconds", "keep_checkpoint_max", "keep_checkpoint_per_n_minutes")
_FLAGS = ("integrated_save", "save_network_params", "save_trainable_params", "exception_save")
_PAIRS = (("save_checkpoint_steps", "save_checkpoint_seconds"), ("keep_checkpoint_max", "keep_checkpoint_per_n_minutes"))


def checked_arguments(built_in: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments by name, defaults included.

    Raises:
        ConfigError: It names the key, its value and what is allowed.
        TypeError: There are too many positional arguments, as in Python.
    """
    signature = inspect.signature(built_in)
    known = [name for name in signature.parameters if name != "self"]
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            raise ConfigError(f"unknown key {name!r}" + (f", did you mean {near[0]!r}?" if near else ".")
                              + f" The keys are {', '.join(known)}")
    bound = signature.bind(None, *args, **kwargs)
    given = dict(bound.arguments)
    bound.apply_defaults()
    values = {name: bound.arguments[name] for name in known}
    for name in _COUNTS:
        _check(name, values[name], values[name] is None or (type(values[name]) is int and values[name] >= 0),
               "a whole number of at least 0")
    for name in _FLAGS:
        _check(name, values[name], values[name] is None or isinstance(values[name], bool), "True or False")
    _check("async_save", values["async_save"], any(values["async_save"] is choice or values["async_save"] == choice != 1
                                                   for choice in WRITERS), "one of False, True, 'thread', 'process'")
    _check("checkpoint_format", values["checkpoint_format"], values["checkpoint_format"] in FORMATS,
           f"one of {', '.join(FORMATS)}")
    _check("prefix", values["prefix"], isinstance(values["prefix"], str) and values["prefix"] != "" and
           not set(values["prefix"]) & set("/\\\0"), "a text without /, with which file names begin")
    _check_folder(values["directory"])
    for usual, other in _PAIRS:
        if given.get(usual) and given.get(other):
            raise ConfigError(f"{usual} ({given[usual]}) and {other} ({given[other]}) contradict each other; set one of them to "
                              f"0 or leave it out")
        if given.get(other) and usual not in given:
            values[usual] = 0                       # only its default contradicts what the user wrote
    _check("keep_checkpoint_max", 0, given.get("keep_checkpoint_max") != 0 or bool(given.get("keep_checkpoint_per_n_minutes")),
           "at least 1, or null (None) to keep all checkpoints")
    for name, alone in (("exception_save", False), ("enc_key", None)):
        if values.get(name, alone) != alone and values["checkpoint_format"] == "safetensors":
            raise ConfigError(f"{name} is set, and checkpoint_format is 'safetensors'; MindSpore saves such checkpoints as ckpt "
                              f"only. Leave out {name}, or set checkpoint_format: ckpt")
    return values


def check_callbacks(built_in: Callable[..., None], callbacks: Iterable[Any]) -> None:
    """Checks each ``CheckpointMonitor`` of the ``callbacks`` section before mindformers reads it: mindformers would report a
    wrong value under the name of another key.

    ``keep_checkpoint_max: 0`` beside ``keep_checkpoint_per_n_minutes`` becomes None, because mindformers 1.9.0 refuses 0
    (trainer/utils.py, validate_checkpoint_config).
    """
    for callback in callbacks:
        if not isinstance(callback, MutableMapping) or callback.get("type") != "CheckpointMonitor":
            continue
        try:
            checked_arguments(built_in, (), {key: value for key, value in callback.items() if key != "type"})
        except ConfigError as error:
            raise ConfigError(f"callbacks: CheckpointMonitor: {error}") from None
        if callback.get("keep_checkpoint_max") == 0:
            callback["keep_checkpoint_max"] = None


def _check(name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


def _check_folder(path: Any) -> None:
    _check("directory", path, path is None or isinstance(path, (str, os.PathLike)), "a path")
    while path:
        if os.path.isdir(path):
            return
        _check("directory", os.fspath(path), not os.path.lexists(path), "a folder, or a path where one can be created; this is a "
               "file")
        path = os.path.dirname(path)
