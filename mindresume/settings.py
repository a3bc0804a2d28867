"""The few choices mindformers has no key for: the YAML's top-level ``mindresume:`` section, or environment variables.

    mindresume:
      on_save_error: warn        # or raise
      max_failed_saves: 3        # so many failed saves in a row stop the training even with warn; 0: never
      commit_timeout: 600        # seconds rank 0 waits at the end of the training for the records of the other ranks
      verify: full               # or quick: trust sizes and headers at resume, do not read every byte

``MINDRESUME_ON_SAVE_ERROR`` and so on override the file.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mindresume.errors import ConfigError

ENVIRONMENT = "MINDRESUME_"
_CHOICES = {"on_save_error": ("warn", "raise"), "verify": ("full", "quick")}


@dataclass(frozen=True)
class Settings:
    on_save_error: str = "warn"
    max_failed_saves: int = 3
    commit_timeout: float = 600.0
    verify: str = "full"

    @classmethod
    def load(cls, section: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
        """ConfigError for an unknown key or a value out of range."""
        environment = os.environ if environment is None else environment
        values = dict(section or {})
        types = {field.name: type(field.default) for field in fields(cls)}
        unknown = sorted(set(values) - set(types))
        if unknown:
            raise ConfigError(f"mindresume: unknown key {unknown[0]!r} in the YAML section; known: {', '.join(types)}")
        for name in types:
            if ENVIRONMENT + name.upper() in environment:
                values[name] = environment[ENVIRONMENT + name.upper()]
        return cls(**{name: _value(name, types[name], value) for name, value in values.items()})


def _value(name: str, kind: type, value: Any) -> Any:
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ConfigError(f"mindresume.{name} is {value!r}; choose one of {', '.join(_CHOICES[name])}")
        return value
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = -1
    if isinstance(value, bool) or number < 0:
        raise ConfigError(f"mindresume.{name} is {value!r}; expected a number of at least 0")
    return number
