"""Moves the configuration keys by which a resumed run skips data from ``trainer:``, where they are documented, to the top
level."""
from __future__ import annotations

from collections.abc import MutableMapping

from mindresume.errors import ConfigError

DATA_KEYS = {"ignore_data_skip": (None, False), "data_skip_steps": (None,)}       # {key: values that mean "not set"}


def lift_data_skip(config: MutableMapping) -> list[str]:
    """Moves ``ignore_data_skip`` and ``data_skip_steps`` from ``trainer:``, where mindformers documents them, to the top level,
    where its code reads them. Returns a note for each. ConfigError if the two places hold different values."""
    trainer, notes = config.get("trainer"), []
    for key, defaults in DATA_KEYS.items():
        if not isinstance(trainer, MutableMapping) or key not in trainer:
            continue
        value, top = trainer[key], config.get(key)
        if top not in defaults and top != value:
            raise ConfigError(f"{key} is {top!r} at the top level of the configuration but {value!r} in trainer:; "
                              f"keep one of them")
        config[key] = value
        del trainer[key]
        notes.append(f"trainer.{key}: {value!r} is used as {key} of the top level")
    return notes
