"""Checks what must hold of tensors before they are taken from a checkpoint: none is missing, the
order of their elements does not depend on how they are cut, and copies in several pipeline stages
are alike.

    # refuses another number of slices if the meaning of the elements depends on it
    check_order(weights, {name: layout})
    check_replicas(weights)  # by the recorded checksums; tensors without are not compared
    check_replicas(weights, read=True)      # tensors without a recorded checksum are read

The order: with ``use_contiguous_weight_layout_attention: True`` each rank splits its own slice of
linear_qkv into [q, k, v], and with ``use_interleaved_weight_layout_mlp: False`` its own slice of
linear_fc1 into [gate, up]. With another number of slices, shapes and bytes would fit, and the
network would compute another function.

A ``metadata.json``, and a record of Checkpoint 2.0 by mindresume 0.1.0, does not tell the optimizer
shards of such a tensor from its tensor parallelism: data parallel 2 with optimizer shards and
tensor parallel 2 give each rank the same rows. Both cut dimension 0, but the tensor behind it,
linear_proj or linear_fc2, is cut by tensor parallelism along dimension 1, which no optimizer shard
cuts: so that one tells.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping

from mindresume.errors import ConfigError, LoadError
from mindresume.formats.huggingface import ATTENTION_KEY, FC1, MLP_KEY, QKV
from mindresume.model.layout import TensorLayout
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.geometry import whole
from mindresume.tensor_files import tensor_checksum

# ---- names: adam_m.layers.0.weight is layers.0.weight in the family adam_m -----------------------


def missing_parameters(named: Collection[str], present: Collection[str]) -> list[str]:
    """Returns the parameters that a strategy names (``named``) and a checkpoint (``present``)
    lacks, sorted. Leaves out parameters that may be absent, and families of which the checkpoint
    has no parameter: the moments, if only weights were saved."""
    families = {family for name in present for family, rest in prefix_splits(name) if rest in named}
    return sorted(
        name
        for name in named
        if name not in present
        and not may_be_absent(name)
        and not any(
            rest in present and family not in families for family, rest in prefix_splits(name)
        )
    )


def prefix_splits(name: str) -> list[tuple[str, str]]:
    """Returns every way to split a name at a dot, such as ("adam_m", "layers.0.weight")."""
    parts = name.split(".")
    return [(".".join(parts[:i]), ".".join(parts[i:])) for i in range(1, len(parts))]


# ---- the order of the elements -------------------------------------------------------------------

# tensors, the key, its value that makes them contiguous, the tensors behind them
_CONTIGUOUS = ((QKV, ATTENTION_KEY, True, "linear_proj"), (FC1, MLP_KEY, False, "linear_fc2"))


def depends_on_slices(arrangement: Mapping[str, bool]) -> bool:
    """Returns whether some tensor of a checkpoint with this ``arrangement`` must not be cut in
    another way."""
    return any(arrangement.get(key) is contiguous for _, key, contiguous, _ in _CONTIGUOUS)


def computed_slices(layout: TensorLayout | None) -> int:
    """Returns into how many slices computations cut dimension 0. An optimizer shard does not count:
    it is gathered first."""
    return (
        math.prod(layout.device_matrix[-1 - axis] for axis in layout.axes[0])
        if layout is not None and layout.axes
        else 1
    )


def check_order(weights: CheckpointView, wanted: Mapping[str, TensorLayout | None]) -> None:
    """Compares how tensors are cut in a checkpoint and where they shall be loaded or written.

    Args:
        weights: the checkpoint. Without a key in its ``arrangement`` nothing is known, and nothing
            refused.
        wanted: {name: layout there}; names of optimizer states contain that of their parameter.
    Raises:
        ConfigError: The numbers of slices differ, or are unknown, and the order of the elements
            depends on them.
    """
    for name, (part, key, contiguous, behind) in itertools.product(wanted, _CONTIGUOUS):
        if weights.arrangement.get(key) is not contiguous or f".{part}." not in name:
            continue
        stored = _computed_by(weights, name, part, behind)
        slices = computed_slices(wanted[name])
        if stored == slices:
            continue
        reason = (
            f"{weights.name}: {name} was trained with {key}: {contiguous}, so the order of its "
            f"elements depends on tensor parallelism. "
        )
        if stored is None:
            raise ConfigError(
                f"{reason}It has {computed_slices(weights.tensors[name].layout)} pieces there, "
                "optimizer shards perhaps among them: metadata.json does not tell, and no "
                f"{behind} beside it does. Only mindformers alone can continue that job"
            )
        raise ConfigError(
            f"{reason}It is cut into {stored} there and cannot be cut into {slices}: keep the "
            f"tensor parallelism of that job"
        )


def _computed_by(weights: CheckpointView, name: str, part: str, behind: str) -> int | None:
    """Returns ``computed_slices`` a tensor whose layout may contain optimizer shards, by the tensor
    ``behind`` it; None: unknown. Without that tensor the layout itself decides if it keeps them
    apart (``CheckpointView.split``)."""
    cut = computed_slices(weights.tensors[name].layout)
    if cut == 1:
        return 1
    other = weights.tensors.get(f"{name.split(f'.{part}.')[0]}.{behind}.weight")
    if other is None or len(other.shape) != 2 or weights.split and other.layout is None:
        return cut if weights.split else None
    found = other.layout.counts(other.shape)[1] if other.layout is not None else 1
    return found if cut % found == 0 else None


# ---- copies in several stages --------------------------------------------------------------------


def check_replicas(weights: CheckpointView, read: bool = False) -> None:
    """Compares tensors that several pipeline stages hold, such as an embedding that is also the
    head: all other code takes such a tensor from the first stage that holds it.

    Args:
        read: reads tensors without a recorded checksum; else they are not compared.
    Raises:
        LoadError: Copies in two stages differ in a bit; names tensor and both files. And the errors
            of ``CheckpointView.locate``.
    """
    for tensor in weights.tensors.values():
        # a counter, or alike on all ranks by the records
        if tensor.layout is None or not tensor.other_stages:
            continue
        for cut in tensor.cuts(whole(tensor.shape)):
            a, *others = (
                weights.locate(tensor.name, cut, first)
                for first in (tensor.first, *tensor.other_stages)
            )
            for b in others:
                sums = [a.checksum, b.checksum]
                if None in sums and not read:
                    continue
                if None in sums:
                    for side, place in enumerate((a, b)):
                        with weights.storage.open(place.path) as file:
                            sums[side] = tensor_checksum(file, place.entry)
                if sums[0] != sums[1]:
                    raise LoadError(
                        f"{weights.name}: {tensor.name} is held by several pipeline stages and "
                        f"differs: rank {a.rank} has checksum {sums[0]} ({a.path}), rank {b.rank} "
                        f"has {sums[1]} ({b.path}). Which one is right is unknown; take another "
                        "step"
                    )
