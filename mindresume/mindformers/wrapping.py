"""Replaces upstream symbols by wrappers, now or when their module is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial, update_wrapper, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from types import ModuleType
from typing import Any


class Call:
    """One call of a wrapped function: ``call()`` calls the function itself, ``call["name"]`` is an
    argument or its default."""

    def __init__(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.original, self.args, self.kwargs = original, args, kwargs

    def __call__(self, **changed: Any) -> Any:
        """Calls the function, with the arguments ``changed`` instead of those of the call."""
        if not changed:
            return self.original(*self.args, **self.kwargs)
        bound = signature(self.original).bind(*self.args, **self.kwargs)
        bound.arguments.update(changed)
        return self.original(*bound.args, **bound.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an argument; ``default`` if the installed release has no such parameter."""
        return self.arguments.get(name, default)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Returns {parameter of the function: its argument}."""
        bound = signature(self.original).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return {**bound.arguments, **bound.arguments.get("kwargs", {})}


class wrapper:  # noqa: N801  a decorator
    """Makes the wrapped form of an upstream function or class, whose calls go to
    ``replacement``."""

    def __init__(self, replacement: Callable[[Call], Any]):
        self._replacement = replacement
        update_wrapper(self, replacement)

    def __call__(self, original: Any) -> Any:
        @wraps(original, updated=())
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self._replacement(Call(original, args, kwargs))

        return wrapped


def when_imported(module: str, work: Callable[[], None]) -> None:
    """Calls ``work`` when ``module`` has been imported: at once, or as the last part of its import,
    whose error is then that of ``work``. A second call for a module that is not imported yet does
    nothing."""
    if module in sys.modules:
        work()
    elif not any(
        isinstance(finder, _AfterImport) and finder.module == module for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _AfterImport(module, work))


class _AfterImport(MetaPathFinder):
    """Finds one module as the other finders do, and calls ``work`` after its code has run. It stays
    until that succeeds once: an import that fails can be tried again."""

    def __init__(self, module: str, work: Callable[[], None]):
        self.module, self.work, self._searches = module, work, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module or self._searches:
            return None
        self._searches = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searches = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, execute: Any, module: ModuleType) -> None:
        execute(module)
        self.work()
        sys.meta_path.remove(self)
