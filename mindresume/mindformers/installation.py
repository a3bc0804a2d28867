"""Installs mindresume into mindformers, completely or not at all, by the table of upstream symbols.
No file is patched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replace_fields
from functools import partial
from importlib import import_module
from typing import Any

from mindresume.events import warning
from mindresume.mindformers import adapter, heartbeat, patches, training_context, upstream_check
from mindresume.mindformers.modelarts import require_moxing
from mindresume.mindformers.upstream import PYNATIVE_TRAINER, Kind, Profile, Symbol
from mindresume.mindformers.wrapping import when_imported


def install() -> None:
    """Checks the table of upstream symbols, then registers the CheckpointMonitor and wraps the
    functions that the table lists. Idempotent.

    Raises:
        ConfigError: mindformers is not installed, too old or cannot be imported, or symbols are
            absent or have another signature, which it lists. Nothing is patched then.
    """
    heartbeat.begin()
    require_moxing()
    profile, notice = upstream_check.profile_for(upstream_check.installed_versions())
    upstream_check.require_import("mindformers")
    off, notices = upstream_check.require(profile)
    for text in filter(None, [notice, *notices]):
        training_context.current().emit(warning(text))
    upstream_check.switch_off(off)
    import mindformers.core.callback  # noqa: F401
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    from mindresume.mindformers.checkpoint_monitor import (
        CheckpointMonitor,  # here: its base class is mindformers', which must be there
    )

    # the built-in class stays importable; it is registered by the import, so ours comes after it
    MindFormerRegister.register_cls(
        CheckpointMonitor, module_type=MindFormerModuleType.CALLBACK, alias=adapter.ALIAS
    )
    for symbol in profile.symbols:
        if symbol.kind in (Kind.WRAPPED, Kind.REPLACED) and symbol.feature not in off:
            replace(symbol, patches.WRAPPERS[symbol.name])
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
    _, notices = upstream_check.require(
        replace_fields(profile, symbols=profile.pynative, pynative=())
    )
    for text in notices:
        training_context.current().emit(warning(text))
    for symbol in profile.pynative:
        if symbol.kind in (Kind.WRAPPED, Kind.REPLACED):
            replace(symbol, patches.PYNATIVE_WRAPPERS[symbol.name])


def replace(symbol: Symbol, make: Callable[[Any], Any]) -> None:
    """Replaces a symbol by ``make(original)``; a static or class method stays one. Does nothing the
    second time."""
    found = upstream_check.resolve(symbol)
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
