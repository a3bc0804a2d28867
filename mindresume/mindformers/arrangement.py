"""Compares how two networks order the elements within their tensors.

Two keys of mindformers decide it for linear_qkv and linear_fc1 of the graph trainer. Names and shapes of the tensors do not
depend on them, so without a record of the keys a load would succeed and give another function. The PyNative trainer has one
order, ``DEFAULTS``. mindformers 1.8.0, 1.9.0, 2.0.0 and 2.1.0 have the same defaults.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mindresume.errors import ConfigError
from mindresume.formats.huggingface import ATTENTION_KEY as ATTENTION
from mindresume.formats.huggingface import MLP_KEY as MLP
from mindresume.mindformers import adapter
from mindresume.mindformers.training_context import ResumePlan
from mindresume.reshard.checkpoint_view import CheckpointView

DEFAULTS = {ATTENTION: False, MLP: True}


def of_network(network: Any) -> dict[str, bool]:
    """Returns {key: value} of the keys that have an effect in a network of the graph trainer, which other cells may wrap; empty
    for a network without them. Latent attention has no linear_qkv."""
    config = next((cell.get_gpt_transformer_config() for _, cell in network.cells_and_names()
                   if adapter.is_graph_training_network(cell)), None)
    keys = [MLP] if getattr(config, "multi_latent_attention", False) else [ATTENTION, MLP]
    return {key: bool(getattr(config, key)) for key in keys if hasattr(config, key)}


def check(plan: ResumePlan, own: Mapping[str, bool], remedy: str = "Set {key}: {value} in the model configuration") -> None:
    """Compares the selected checkpoint with the network that loads it.

    Args:
        own: the arrangement of the network.
        remedy: what the user can do.
    Raises:
        ConfigError: Both have a key, with different values.
    """
    choice = plan.selected or plan.choice
    chosen = choice.chosen if choice is not None else None
    saved = dict(chosen.state.arrangement) if chosen is not None and chosen.state is not None else {}
    for key, value in own.items():
        if saved.get(key, value) is not value:
            folder = os.path.join(choice.root, chosen.records_dir or chosen.iteration_dir)
            raise ConfigError(f"{folder}: the network that saved this checkpoint has {key}: {saved[key]}, this one {value}, so "
                              f"the elements within its tensors are in another order. "
                              f"{remedy.format(key=key, value=saved[key])}")


def assume(weights: CheckpointView, own: Mapping[str, bool]) -> None:
    """Takes the arrangement of the network for that of the ranks' files of a checkpoint that records none: mindformers does not
    record it, and its job had the same model configuration."""
    if not weights.is_consolidated:
        weights.arrangement = {**own, **weights.arrangement}
