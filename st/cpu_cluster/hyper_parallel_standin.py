"""A stand-in for the package ``hyper_parallel``, where it is not installed.

What: a finder for ``import`` that answers ``hyper_parallel`` and every module below it. Each name
exists; a name that is not in ``MEANINGS`` is a class whose objects do nothing. Why: mindformers
2.0.0 cannot be imported without the package, the PyNative trainer of every release cannot build a
model without it, and the package is not on PyPI.

The contract is what mindformers needs where nothing is sharded (one process, or data parallel with
replicated parameters):

| name | here |
|---|---|
| ``DTensor`` | a class without objects: every ``isinstance`` is False, so each parameter counts as whole |
| ``SkipDTensorDispatch`` | a context manager and decorator that changes nothing |
| ``enable_mindspore_backward_compat`` | ``pynative.backward``, entered into ``MEANINGS`` by ``pynative`` |
| ``get_global_layout``, ``get_current_layout`` | ``pynative.data_parallel``, entered by it in a job of several processes |

What it cannot show: ``fully_shard``, ``distribute_tensor``, device meshes, pipeline stages, fused
operators.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import sys
import types
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

PACKAGE = "hyper_parallel"


class DTensor:
    """A sharded tensor. There are none here."""


class SkipDTensorDispatch(contextlib.ContextDecorator):
    """A context in which operators take the local part of a DTensor; without DTensors nothing
    changes."""

    def __enter__(self) -> SkipDTensorDispatch:
        return self

    def __exit__(self, *_: object) -> bool:
        return False


MEANINGS: dict[str, Any] = {"DTensor": DTensor, "SkipDTensorDispatch": SkipDTensorDispatch}


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Nothing(metaclass=_AnyAttribute):
    """Takes any arguments; as a decorator it returns the function unchanged."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, function: Any = None, *_: object, **__: object) -> Any:
        return function


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MEANINGS[name] if name in MEANINGS else type(name, (_Nothing,), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == PACKAGE or fullname.startswith(PACKAGE + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def is_required(requirements: Iterable[str] | None = None) -> bool:
    """Returns whether the installed mindformers declares that it depends on the package. False for
    1.8.0 and 1.9.0.

    ``requirements``: what it declares; None: as its metadata say.
    """
    if requirements is None:
        try:
            requirements = importlib.metadata.requires("mindformers") or ()
        except importlib.metadata.PackageNotFoundError:
            return False
    return any(
        re.match(r"hyper[-_.]parallel(?![-_.\w])", text, re.IGNORECASE) for text in requirements
    )


def install() -> bool:
    """Installs the finder before ``import mindformers``. Returns False, and changes nothing, if the
    package is there."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if find_spec(PACKAGE) is not None:
        return False
    sys.meta_path.insert(0, _Finder())
    return True
