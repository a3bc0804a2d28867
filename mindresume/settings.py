"""The settings that mindformers has no key for: the YAML's top-level ``mindresume:`` section, or environment variables.

    mindresume:
      on_save_error: warn           # a failed save is logged and the training continues; or raise
      max_failed_saves: 3           # consecutive failed saves that stop the training even with warn; 0: no limit
      commit_timeout: 600           # seconds that the end of the training waits for the records of slow ranks, and a save for the
                                    # previous one
      verify: full                  # or quick: check sizes and headers at resume without reading every byte
      async_when_busy: wait         # a background save is due while the previous one is being written: wait; or skip, on all
                                    # ranks
      staging_gib: 0                # limit of host memory for the copy that a background save writes from, and for verified files
                                    # that are to be loaded; 0: as much as they need, within the rank's share of free memory
      heartbeat: 15                 # seconds between heartbeats, by which other hosts see that a job is alive; 0: none
      keep_every_steps: 0           # besides keep_checkpoint_max: keep the first checkpoint at or after each multiple; 0: off
      keep_best: 0                  # besides keep_checkpoint_max: keep this many of the best by keep_best_metric; 0: off
      keep_best_metric: loss        # loss of the saved step, or a name given to mindresume.plugin.report_metric
      keep_best_mode: min           # the smallest are best; or max
      transform_engine: auto        # of auto_trans_ckpt: direct, mindspore (which merges safetensors to output/unified_checkpoint
                                    # first), or auto: mindspore for ckpt, direct for safetensors
      allow_missing: []             # patterns (lora_*) of parameters that a checkpoint may lack, when weights alone are loaded
                                    # and in Checkpoint 2.0; they keep their initial values. Comma-separated in the environment
      on_dataset_change: warn       # the data set differs from the checkpoint's, and the configuration does not say so; or error
      max_failed_loads: 2           # a checkpoint after whose loading this many consecutive jobs died is tried last; 0: no limit
      preemption_check_interval: 5  # seconds, approximately, between the ranks' checks for SIGTERM or graceful exit; 0: off
      unified_checkpoint: 0         # 1: auto_trans_ckpt also writes the merged weights to output/unified_checkpoint
      memory_tier:                  # saves into memory of the node, which a restart on the same nodes loads (docs/memory_tier.md)
        every_steps: 0              # saves fall on absolute multiples of it; 0: off
        dir: /dev/shm               # the tmpfs that they lie in
        limit_gib: 0                # limit of its memory for each rank; 0: the rank's share of the free memory
        keep_days: 7                # a later job removes what a dead job left here, if nothing was saved there for so long
        write_after_error: 1        # a training that ends with an error first writes the newest of these saves to disk; 0: not
      scrub:                        # re-reads kept checkpoints in the background (docs/scrub.md)
        every_hours: 0              # a checkpoint is read so many hours after its save, or its last scrub; 0: off
        rate_mb: 50                 # MB/s at most, of one node at a time
        repair: 1                   # damaged files are replaced by intact copies, from replicas or the bucket; 0: only told

``MINDRESUME_ON_SAVE_ERROR`` and so on override the file. A setting that is a frozen dataclass is a section of its own below
``mindresume:``; ``MINDRESUME_SECTION_KEY`` overrides one of its keys.
"""
from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from mindresume.errors import ConfigError

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")             # a number between the dots of a parameter name
_CHOICES = {"on_save_error": ("warn", "raise"), "verify": ("full", "quick"), "keep_best_mode": ("min", "max"),
            "async_when_busy": ("wait", "skip"), "transform_engine": ("auto", "direct", "mindspore"),
            "on_dataset_change": ("warn", "error")}


@dataclass(frozen=True)
class MemoryTierSettings:
    """Holds the settings of the tier in memory."""
    every_steps: int = 0
    dir: str = "/dev/shm"
    limit_gib: float = 0.0
    keep_days: float = 7.0
    write_after_error: int = 1


@dataclass(frozen=True)
class ScrubSettings:
    """Holds the settings of the scrub in the background."""
    every_hours: float = 0.0
    rate_mb: float = 50.0
    repair: int = 1


@dataclass(frozen=True)
class Settings:
    """Holds the settings of a run; the docstring of this module describes each."""
    on_save_error: str = "warn"
    max_failed_saves: int = 3
    commit_timeout: float = 600.0
    verify: str = "full"
    async_when_busy: str = "wait"
    staging_gib: float = 0.0
    heartbeat: float = 15.0
    keep_every_steps: int = 0
    keep_best: int = 0
    keep_best_metric: str = "loss"
    keep_best_mode: str = "min"
    transform_engine: str = "auto"
    unified_checkpoint: int = 0
    allow_missing: tuple[str, ...] = ()
    on_dataset_change: str = "warn"
    max_failed_loads: int = 2
    preemption_check_interval: float = 5.0
    memory_tier: MemoryTierSettings = MemoryTierSettings()
    scrub: ScrubSettings = ScrubSettings()

    def allows(self, name: str) -> bool:
        """Returns whether a checkpoint may lack this parameter."""
        return any(fnmatchcase(name, pattern) for pattern in self.allow_missing)

    @classmethod
    def load(cls, section: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
        """Reads the settings from the YAML ``section``; ``environment`` (default: the process's) overrides it. Raises ConfigError
        for an unknown key or an invalid value."""
        settings: Settings = _section(cls, "mindresume", section, os.environ if environment is None else environment)
        return settings


def allow_text(missing: Iterable[str], most: int = 6) -> str:
    """Returns a sentence that tells how to load without the ``missing`` parameters. Names that differ only in numbers become one
    pattern; at most ``most`` patterns are listed."""
    patterns = list(dict.fromkeys(_NUMBER.sub("*", name) for name in missing))
    quoted = ", ".join(f'"{pattern}"' for pattern in patterns[:most]) + (", ..." if len(patterns) > most else "")
    return f" To leave what is missing as it is initialised, set mindresume: {{allow_missing: [{quoted}]}}"


def _section(kind: type, where: str, section: Any, environment: Mapping[str, str]) -> Any:
    """Returns a ``kind``, a dataclass of settings. ``where``: the keys that lead to its YAML section, with dots between them."""
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"{where} is {section!r}; expected a section with the keys {', '.join(_names(kind))}")
    values = dict(section or {})
    unknown = [key for key in values if key not in _names(kind)]
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r} in the YAML section; known: {', '.join(_names(kind))}")
    found = {}
    for field in fields(kind):
        variable = f"{where}_{field.name}".replace(".", "_").upper()
        if is_dataclass(field.default):
            found[field.name] = _section(type(field.default), f"{where}.{field.name}", values.get(field.name), environment)
        elif variable in environment or field.name in values:
            value = environment.get(variable, values.get(field.name))
            found[field.name] = _value(f"{where}.{field.name}", field.name, type(field.default), value)
    return kind(**found)


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _value(where: str, name: str, kind: type, value: Any) -> Any:
    """Returns a setting converted to its type ``kind``. Raises ConfigError for an invalid value."""
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ConfigError(f"{where} is {value!r}; choose one of {', '.join(_CHOICES[name])}")
        return value
    if kind is tuple:
        rows = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(rows, (list, tuple)) or not all(isinstance(row, str) and row.strip() for row in rows):
            raise ConfigError(f"{where} is {value!r}; expected a list of patterns such as ['lora_*']")
        return tuple(rows)
    if kind is str:
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{where} is {value!r}; expected a text that is not empty")
        return value
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = -1
    if isinstance(value, bool) or not number >= 0 or (kind is int and isinstance(value, float) and number != value):
        raise ConfigError(f"{where} is {value!r}; expected a {'whole ' if kind is int else ''}number of at least 0")
    return number
