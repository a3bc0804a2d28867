"""Groups parameters into families by their names: ``adam_m.layers.0.weight`` is ``layers.0.weight`` in the family ``adam_m``."""
from __future__ import annotations

from collections.abc import Collection

from mindresume.model.training_state import may_be_absent


def missing_parameters(named: Collection[str], present: Collection[str]) -> list[str]:
    """Returns the parameters that a strategy names (``named``) and a checkpoint (``present``) lacks, sorted. Leaves out
    parameters that may be absent, and families of which the checkpoint has no parameter: the moments, if only weights were
    saved."""
    families = {family for name in present for family, rest in prefix_splits(name) if rest in named}
    return sorted(name for name in named if name not in present and not may_be_absent(name)
                  and not any(rest in present and family not in families for family, rest in prefix_splits(name)))


def prefix_splits(name: str) -> list[tuple[str, str]]:
    """Returns every way to split a name at a dot, such as ("adam_m", "layers.0.weight")."""
    parts = name.split(".")
    return [(".".join(parts[:i]), ".".join(parts[i:])) for i in range(1, len(parts))]
