"""Reads the ``config.json`` of ``pretrained_model_dir`` as transformers 4.57 and later write it.

mindformers refuses keys that it does not know: 1.8.0 for all models, 1.9.0 and 2.0.0 for Qwen3. These keys are no settings of the
network.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# dtype: of the stored weights, torch_dtype until transformers 4.56. rope_interleave: formats/huggingface.py refuses weights that
# need another value than mindformers' own.
_FOREIGN = ("dtype", "pretraining_tp", "rope_interleave")
_COMPUTED = {"qk_head_dim": "qk_nope_head_dim"}     # {size: the one that it includes}; mindformers takes them for one setting


def without_foreign_keys(merged: Mapping[str, Any], configured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model configuration without the keys above.

    Args:
        merged: the configuration that mindformers made of ``config.json`` and of the user's.
        configured: the user's configuration; its keys stay.
    """
    dropped = {*_FOREIGN, *(key for key, other in _COMPUTED.items() if other in merged)} - set(configured)
    return {key: value for key, value in merged.items() if key not in dropped}
