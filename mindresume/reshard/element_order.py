"""Refuses to cut a tensor in another way if the meaning of its elements depends on the number of its pieces.

With ``use_contiguous_weight_layout_attention: True`` each rank splits its own piece of linear_qkv into [q, k, v], and with
``use_interleaved_weight_layout_mlp: False`` its own piece of linear_fc1 into [gate, up]. With another number of pieces, shapes
and bytes would fit, and the network would compute another function.
"""
from __future__ import annotations

import math
from collections.abc import Mapping

from mindresume.errors import ConfigError
from mindresume.formats.huggingface import ATTENTION_KEY, FC1, MLP_KEY, QKV
from mindresume.formats.slices import ordinals
from mindresume.model.layout import TensorLayout
from mindresume.reshard.checkpoint_view import CheckpointView

_CONTIGUOUS = ((QKV, ATTENTION_KEY, True), (FC1, MLP_KEY, False))      # tensors, the key, its value that makes them contiguous


def depends_on_pieces(arrangement: Mapping[str, bool]) -> bool:
    """Returns whether some tensor of a checkpoint with this ``arrangement`` must not be cut in another way."""
    return any(arrangement.get(key) is contiguous for _, key, contiguous in _CONTIGUOUS)


def pieces_of(layout: TensorLayout | None) -> int:
    """Returns into how many pieces computations cut dimension 0. An optimizer shard does not count: it is gathered first."""
    return math.prod(layout.device_matrix[-1 - axis] for axis in layout.axes()[0]) if layout is not None and layout.axes() else 1


def check_order(weights: CheckpointView, name: str, wanted: TensorLayout | None) -> None:
    """Compares how a tensor is cut in a checkpoint and where it shall be loaded or written.

    Args:
        weights: the checkpoint. Without a key in its ``arrangement`` nothing is known, and nothing refused.
        name: of the tensor; optimizer states contain that of their parameter.
    Raises:
        ConfigError: The numbers of pieces differ, and the order of the elements depends on them. Where it is unknown which of the
            pieces are optimizer shards (``CheckpointView.split``), each rank must keep the part that it has.
    """
    tensor = weights.tensors[name]
    for part, key, contiguous in _CONTIGUOUS:
        if f".{part}." not in name or weights.arrangement.get(key) is not contiguous:
            continue
        pieces = pieces_of(tensor.layout), pieces_of(wanted)
        if weights.split and pieces[0] == pieces[1] or not weights.split and _same_parts(tensor.layout, wanted, tensor.shape):
            continue
        raise ConfigError(f"{weights.name}: {name} was trained with {key}: {contiguous}, so the order of its elements depends on "
                          f"tensor parallelism. It is cut into {pieces[0]} there"
                          + ("" if weights.split else ", optimizer shards perhaps among them (metadata.json does not tell),")
                          + f" and cannot be cut into {pieces[1]}: keep the tensor parallelism of that job"
                          + ("" if weights.split else " and its optimizer shards"))


def _same_parts(stored: TensorLayout | None, wanted: TensorLayout | None, shape: tuple[int, ...]) -> bool:
    """Returns whether each rank holds the same part of a tensor by both layouts, or all of it."""
    if stored is None or wanted is None or stored.stage_size != wanted.stage_size:
        return pieces_of(stored) == 1 and pieces_of(wanted) == 1
    return ordinals(stored, shape) == ordinals(wanted, shape)
