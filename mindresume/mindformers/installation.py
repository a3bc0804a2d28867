"""Installs mindresume into mindformers, completely or not at all, by the table of upstream symbols.
No file is patched."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace as replace_fields
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mindresume.coordination.neighbours import PAGE, neighbours
from mindresume.events import INFO, WARNING, Notice, warning
from mindresume.mindformers import adapter, heartbeat, patches, training_context, upstream
from mindresume.mindformers.configuration import require_moxing
from mindresume.mindformers.upstream import PYNATIVE_TRAINER, Hooks, Profile, Symbol


def install() -> None:
    """Checks the table of upstream symbols, then registers the CheckpointMonitor and wraps the
    functions that the table lists. Idempotent.

    Raises:
        ConfigError: mindformers is not installed, too old or cannot be imported, or symbols are
            absent or have another signature, which it lists. Nothing is patched then.
    """
    heartbeat.begin()
    require_moxing()
    profile, notice = upstream.profile_for(upstream.installed_versions())
    upstream.require_import("mindformers")
    off, notices = upstream.require(profile, patches.WRAPPERS)
    _warn(filter(None, [notice, *notices]))
    tell_neighbours(os.environ)
    upstream.switch_off(off)
    import mindformers.core.callback  # noqa: F401
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    from mindresume.mindformers.checkpoint_monitor import (
        CheckpointMonitor,  # here: its base class is mindformers', which must be there
    )

    # the built-in class stays importable; it is registered by the import, so ours comes after it
    MindFormerRegister.register_cls(
        CheckpointMonitor, module_type=MindFormerModuleType.CALLBACK, alias=adapter.ALIAS
    )
    _wrap((symbol for symbol in profile.symbols if symbol.feature not in off), patches.WRAPPERS)
    if profile.pynative:
        when_imported(PYNATIVE_TRAINER, partial(install_pynative, profile))
    heartbeat.mark_imported()


def install_pynative(profile: Profile) -> None:
    """Checks the rows of the PyNative trainer, and wraps its functions. It is called when the
    trainer is imported.

    Raises:
        ConfigError: It lists all symbols that are absent or have another signature; nothing of the
            trainer is patched then.
    """
    rows = replace_fields(profile, symbols=profile.pynative, pynative=())
    _, notices = upstream.require(rows, patches.PYNATIVE_WRAPPERS)
    _warn(notices)
    _wrap(profile.pynative, patches.PYNATIVE_WRAPPERS)


def tell_neighbours(environment: Mapping[str, str]) -> None:
    """Tells in one line what else takes part in a recovery here; a warning if something does not go
    together."""
    found = list(neighbours(environment))
    if not found:
        return
    text = "; ".join(
        f"{each.name}: {each.text}" + (f" ({each.remedy})" if each.remedy else "") for each in found
    )
    level = WARNING if any(each.remedy for each in found) else INFO
    training_context.current().emit(Notice(f"beside mindresume: {text}. See {PAGE}", level))


def _warn(notices: Iterable[str]) -> None:
    for text in notices:
        training_context.current().emit(warning(text))


def _wrap(symbols: Iterable[Symbol], hooks: Hooks) -> None:
    for symbol in symbols:
        if symbol.is_wrapped:
            replace(symbol, hooks[symbol.name])


def replace(symbol: Symbol, make: Callable[[Any], Any]) -> None:
    """Replaces a symbol by ``make(original)``; a static or class method stays one. Does nothing the
    second time."""
    found = upstream.resolve(symbol)
    bound = isinstance(found, (classmethod, staticmethod))
    original = found.__func__ if bound else found
    if getattr(original, "_mindresume", False):
        return
    replacement = make(original)
    replacement._mindresume = True
    *parents, last = symbol.name.split(".")
    holder: Any = import_module(symbol.module)
    for parent in parents:
        holder = getattr(holder, parent)
    setattr(holder, last, type(found)(replacement) if bound else replacement)


# ---- modules that are imported later -------------------------------------------------------------


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
        self.module = module
        self.work = work
        self._searches = False

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
