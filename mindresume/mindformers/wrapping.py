"""Replaces upstream symbols by wrappers, now or when their module is imported."""
from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from types import ModuleType
from typing import Any


def argument_binder(original: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Returns a function that maps the arguments of a call to the parameter names of ``original``, defaults included."""
    parameters = signature(original)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return {**bound.arguments, **bound.arguments.get("kwargs", {})}
    return bind


def when_imported(module: str, work: Callable[[], None]) -> None:
    """Calls ``work`` when ``module`` has been imported: at once, or as the last part of its import, whose error is then that of
    ``work``. A second call for a module that is not imported yet does nothing."""
    if module in sys.modules:
        work()
    elif not any(isinstance(finder, _AfterImport) and finder.module == module for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(module, work))


class _AfterImport(MetaPathFinder):
    """Finds one module as the other finders do, and calls ``work`` after its code has run. It stays until that succeeds once: an
    import that fails can be tried again."""

    def __init__(self, module: str, work: Callable[[], None]):
        self.module, self.work, self._searches = module, work, False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.module or self._searches:
            return None
        self._searches = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searches = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.work()
                sys.meta_path.remove(self)
            spec.loader.exec_module = exec_module
        return spec
