"""Saves and restores what the PyNative trainer counts besides steps and samples.

These are the fields of ``TrainerState`` that neither the configuration nor other counters give, also those of later releases: in
1.9.0 and 2.0.0 ``total_flops``, ``best_metric`` and ``best_model_checkpoint``; since 2.1.0 also ``skipped_steps``. And of the
trainer itself how many steps in a row were skipped, because ``max_consecutive_skipped_steps`` of them end a training.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mindresume.model.training_state import Scalar, is_scalar

# Fields from the configuration, and those that are restored together with step, samples and loss scale.
_OTHERS = frozenset({"epoch", "global_step", "max_steps", "eval_steps", "save_steps", "epoch_step", "global_batch_size",
                     "num_accumulation_steps", "consumed_samples", "loss_scale", "is_train_begin", "is_train_end"})
_IN_A_ROW = {"consecutive_skipped_steps": "_consecutive_skipped_steps"}         # {name: attribute of the trainer}


def saved(trainer: Any) -> dict[str, Scalar]:
    """Returns the value of each field by name. Values other than None, flags, texts and finite numbers are left out."""
    state, found = trainer.state, {}
    for name in _names(state):
        found[name] = getattr(state, name)
    for name, attribute in _IN_A_ROW.items():
        if hasattr(trainer, attribute):
            found[name] = getattr(trainer, attribute)
    values = ((name, value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value)
              for name, value in found.items())
    return {name: value for name, value in values if is_scalar(value)}


def restore(trainer: Any, values: Mapping[str, Scalar]) -> None:
    """Sets the fields that the trainer of this release has."""
    names = set(_names(trainer.state))
    for name, value in values.items():
        if name in names:
            setattr(trainer.state, name, value)
        elif name in _IN_A_ROW and hasattr(trainer, _IN_A_ROW[name]):
            setattr(trainer, _IN_A_ROW[name], value)


def _names(state: Any) -> list[str]:
    return [field.name for field in fields(state) if field.name not in _OTHERS]
