"""Relates names of parameters: ``adam_m.layers.0.weight`` belongs to the family ``adam_m`` of ``layers.0.weight``."""
from __future__ import annotations

from collections.abc import Collection

from mindresume.model.training_state import is_transient


def missing_parameters(named: Collection[str], present: Collection[str]) -> list[str]:
    """Returns the parameters that a strategy names (``named``) and a checkpoint lacks, sorted; without families that are absent
    as a whole (the moments, where only weights were saved), and without transient parameters."""
    families = {family for name in present for family, rest in prefix_splits(name) if rest in named}
    return sorted(name for name in named if name not in present and not is_transient(name)
                  and not any(rest in present and family not in families for family, rest in prefix_splits(name)))


def prefix_splits(name: str) -> list[tuple[str, str]]:
    """Returns every way to split a name at a dot, such as ("adam_m", "layers.0.weight")."""
    parts = name.split(".")
    return [(".".join(parts[:i]), ".".join(parts[i:])) for i in range(1, len(parts))]
