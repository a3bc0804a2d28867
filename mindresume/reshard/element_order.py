"""Refuses to cut a tensor in another way if the meaning of its elements depends on the number of its pieces.

With ``use_contiguous_weight_layout_attention: True`` each rank splits its own piece of linear_qkv into [q, k, v], and with
``use_interleaved_weight_layout_mlp: False`` its own piece of linear_fc1 into [gate, up]. With another number of pieces, shapes
and bytes would fit, and the network would compute another function.

A ``metadata.json``, and a record of Checkpoint 2.0 by mindresume 0.1.0, does not tell the optimizer shards of such a tensor from
its tensor parallelism: data parallel 2 with optimizer shards and tensor parallel 2 give each rank the same rows. Both cut
dimension 0, but the tensor behind it, linear_proj or linear_fc2, is cut by tensor parallelism along dimension 1, which no
optimizer shard cuts: so that one tells.
"""
from __future__ import annotations

import math
from collections.abc import Mapping

from mindresume.errors import ConfigError
from mindresume.formats.huggingface import ATTENTION_KEY, FC1, MLP_KEY, QKV
from mindresume.model.layout import TensorLayout
from mindresume.reshard.checkpoint_view import CheckpointView

# tensors, the key, its value that makes them contiguous, the tensors behind them
_CONTIGUOUS = ((QKV, ATTENTION_KEY, True, "linear_proj"), (FC1, MLP_KEY, False, "linear_fc2"))


def depends_on_pieces(arrangement: Mapping[str, bool]) -> bool:
    """Returns whether some tensor of a checkpoint with this ``arrangement`` must not be cut in another way."""
    return any(arrangement.get(key) is contiguous for _, key, contiguous, _ in _CONTIGUOUS)


def pieces_of(layout: TensorLayout | None) -> int:
    """Returns into how many pieces computations cut dimension 0. An optimizer shard does not count: it is gathered first."""
    return math.prod(layout.device_matrix[-1 - axis] for axis in layout.axes()[0]) if layout is not None and layout.axes() else 1


def check_order(weights: CheckpointView, name: str, wanted: TensorLayout | None) -> None:
    """Compares how a tensor is cut in a checkpoint and where it shall be loaded or written.

    Args:
        weights: the checkpoint. Without a key in its ``arrangement`` nothing is known, and nothing refused.
        name: of the tensor; optimizer states contain that of their parameter.
    Raises:
        ConfigError: The numbers of pieces differ, or are unknown, and the order of the elements depends on them.
    """
    for part, key, contiguous, behind in _CONTIGUOUS:
        if f".{part}." not in name or weights.arrangement.get(key) is not contiguous:
            continue
        layout = weights.tensors[name].layout
        stored = _pieces_by(weights, name, part, behind)
        if stored == pieces_of(wanted):
            continue
        reason = (f"{weights.name}: {name} was trained with {key}: {contiguous}, so the order of its elements depends on "
                  f"tensor parallelism. ")
        if stored is None:
            raise ConfigError(f"{reason}It has {pieces_of(layout)} pieces there, optimizer shards perhaps among them: "
                              f"metadata.json does not tell, and no {behind} beside it does. Only mindformers alone can "
                              f"continue that job")
        raise ConfigError(f"{reason}It is cut into {stored} there and cannot be cut into {pieces_of(wanted)}: keep the tensor "
                          f"parallelism of that job")


def _pieces_by(weights: CheckpointView, name: str, part: str, behind: str) -> int | None:
    """Returns ``pieces_of`` a tensor whose layout may contain optimizer shards, by the tensor ``behind`` it; None: unknown.
    Without that tensor the layout itself decides if it keeps them apart (``CheckpointView.split``)."""
    cut = pieces_of(weights.tensors[name].layout)
    if cut == 1:
        return 1
    other = weights.tensors.get(f"{name.split(f'.{part}.')[0]}.{behind}.weight")
    if other is None or len(other.shape) != 2 or weights.split and other.layout is None:
        return cut if weights.split else None
    found = other.layout.pieces(other.shape)[1] if other.layout is not None else 1
    return found if cut % found == 0 else None
