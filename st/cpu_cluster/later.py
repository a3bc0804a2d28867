"""What mindformers imports for evaluation and for data of Hugging Face is imported when it is used.

What: ``datasets``, ``jieba`` and two functions of ``nltk``, with scipy and pandas behind them, are
stand-ins that import the real ones at the first use. Why: that is a third of ``import
mindformers``, in every process of every test, and a training uses neither.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

FUNCTIONS = {
    "datasets.distributed": ("split_dataset_by_node",),
    "nltk.translate.bleu_score": ("sentence_bleu", "SmoothingFunction"),
}
PACKAGES = ("datasets", "jieba")


def real(name: str) -> ModuleType:
    """Returns the real module, which replaces the stand-ins of its package."""
    for other in (*FUNCTIONS, *PACKAGES):
        if other.partition(".")[0] == name.partition(".")[0] and isinstance(
            sys.modules.get(other), _Later
        ):
            del sys.modules[other]
    return importlib.import_module(name)


class _Later(ModuleType):
    """Asked for anything that every module has, it answers by itself: inspect asks all modules for
    their file."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(real(self.__name__), name)


def _function(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        return getattr(real(module), name)(*args, **more)

    return call


def install() -> None:
    """Must run before ``import mindformers``. Modules that are already imported, or not installed,
    are not replaced."""
    for name in PACKAGES:
        if name not in sys.modules and (spec := find_spec(name)) is not None:
            sys.modules[name] = module = _Later(name)
            module.__spec__, module.__file__, module.__path__ = (
                spec,
                spec.origin,
                spec.submodule_search_locations,
            )
    for name, functions in FUNCTIONS.items():
        package = name.partition(".")[0]
        if (
            isinstance(sys.modules.get(package), _Later)
            or package not in sys.modules
            and find_spec(package) is not None
        ):
            sys.modules[name] = module = _Later(name)
            module.__dict__.update({function: _function(name, function) for function in functions})
