"""Names of parameters that belong together: ``adam_m.layers.0.weight`` is of the family ``adam_m`` of ``layers.0.weight``."""
from __future__ import annotations

from collections.abc import Collection

from mindresume.state import is_transient


def missing(named: Collection[str], present: Collection[str]) -> list[str]:
    """What a strategy names and a checkpoint does not have, sorted. A whole family may be absent (the moments, where only the
    weights were saved), and what lives only within a step."""
    families = {family for name in present for family, rest in splits(name) if rest in named}
    return sorted(name for name in named if name not in present and not is_transient(name)
                  and not any(rest in present and family not in families for family, rest in splits(name)))


def splits(name: str) -> list[tuple[str, str]]:
    """("adam_m", "layers.0.weight") and every other way to split a name at a dot."""
    parts = name.split(".")
    return [(".".join(parts[:i]), ".".join(parts[i:])) for i in range(1, len(parts))]
