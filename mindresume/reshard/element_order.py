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
from mindresume.model.layout import TensorLayout

_CONTIGUOUS = ((QKV, ATTENTION_KEY, True), (FC1, MLP_KEY, False))      # tensors, the key, its value that makes them contiguous


def pieces_of(layout: TensorLayout | None) -> int:
    """Returns into how many pieces computations cut dimension 0. An optimizer shard does not count: it is gathered first."""
    return math.prod(layout.device_matrix[-1 - axis] for axis in layout.axes()[0]) if layout is not None and layout.axes() else 1


def check_order(arrangement: Mapping[str, bool], name: str, stored: TensorLayout | None, wanted: TensorLayout | None,
                what: str) -> None:
    """Compares how a tensor is cut in a checkpoint and where it shall be loaded or written.

    Args:
        arrangement: of the checkpoint (``TrainingState.arrangement``); without a key nothing is known, and nothing refused.
        name: of the tensor; optimizer states contain that of their parameter.
        what: describes the checkpoint.
    Raises:
        ConfigError: The numbers of pieces differ, and the order of the elements depends on them.
    """
    for part, key, contiguous in _CONTIGUOUS:
        if f".{part}." in name and arrangement.get(key) is contiguous and pieces_of(stored) != pieces_of(wanted):
            raise ConfigError(f"{what}: {name} was trained with {key}: {contiguous}, so the order of its elements depends on "
                              f"tensor parallelism. It is cut into {pieces_of(stored)} there and cannot be cut into "
                              f"{pieces_of(wanted)}: keep the tensor parallelism of that job")
