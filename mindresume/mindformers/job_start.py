"""Prepares the start of a job: computes the fingerprint of the data set, and writes the selected checkpoint into the
configuration."""
from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from mindresume.coordination.collectives import Watchdog, run_on_rank0
from mindresume.errors import CollectiveError, ConfigError
from mindresume.events import Notice, warning
from mindresume.mindformers import load_iteration, selection, weights_only
from mindresume.mindformers.auto_transform import STRATEGY, TRANSFORMED, UNIFIED
from mindresume.mindformers.selection import FRESH
from mindresume.mindformers.training_context import TRAIN, LoadRequest, TrainingContext
from mindresume.resume.dataset_fingerprint import dataset_identity
from mindresume.resume.job_selection import caching_storage
from mindresume.storage.posix import PosixStorage


def fingerprint(config: Any, context: TrainingContext) -> dict[str, str]:
    """Returns the fingerprint of the data set as rank 0 sees it, before mindformers changes its configuration."""
    try:
        return run_on_rank0(context.group,
                            lambda: dataset_identity(PosixStorage(), config.get("train_dataset"), config.get("seed")),
                            Watchdog("looking at the data set"))
    except CollectiveError as error:
        context.emit(warning(f"the data set has no fingerprint, so a change of it stays unnoticed: {error}"))
        return {}


def select_checkpoint(config: Any, context: TrainingContext) -> None:
    """Sets ``load_checkpoint``, ``resume_training`` and ``load_ckpt_format`` of ``config``, and the plan of ``context``, to what
    all ranks selected.

    Raises:
        NoUsableCheckpointError, MissingCheckpointError, ConfigError, CollectiveError: On all ranks together.
    """
    storage = context.resources.storage = caching_storage(PosixStorage(), context.settings, context.group)
    if load_iteration.applies(config):
        return load_iteration.select(config, context, storage)
    if not config.resume_training or config.resume_training is True and not config.load_checkpoint:
        return weights_only.select(config, TRAIN, context, storage)         # perhaps of pretrained_model_dir, as mindformers does
    if not config.load_checkpoint:
        return None
    path, requested = str(config.load_checkpoint), config.resume_training if isinstance(config.resume_training, str) else None
    pretrained = str(config.get("pretrained_model_dir") or "")
    plan = selection.select(config, path, requested, context, storage, any_layout=bool(config.auto_trans_ckpt),
                            healthy=bool(config.get("use_checkpoint_health_monitor")),
                            fresh_weights=f"of {pretrained}" if pretrained else FRESH)
    if plan is None:
        config.resume_training, config.load_checkpoint, config.auto_trans_ckpt = False, "", False
        return weights_only.select(config, TRAIN, context, storage)         # of pretrained_model_dir, if there is one
    choice = plan.choice
    if not os.path.isfile(path):
        config.load_checkpoint = choice.root
    if config.get("load_ckpt_format", "ckpt") != choice.chosen.format:
        context.emit(Notice(f"load_ckpt_format is set to {choice.chosen.format}, the format of the selected files"))
        config.load_ckpt_format = choice.chosen.format
    config.resume_training = True
    context.plan = replace(plan, request=LoadRequest(config.load_checkpoint))
    if plan.open_source is not None:
        config.auto_trans_ckpt = False                      # mindformers must neither convert nor clear anything
    return None


def check_not_cleared(output: str, *sources: Any, load_ckpt_format: str) -> None:
    """Protects sources: with auto_trans_ckpt mindformers empties folders below ``output``.

    Raises:
        ConfigError: One of ``sources`` lies in such a folder. Real paths are compared: mindformers compares texts, and misses
            ``./output/strategy`` or a trailing slash.
    """
    cleared = [os.path.realpath(os.path.join(output, name)) for name in
               (STRATEGY, TRANSFORMED if load_ckpt_format == "ckpt" else UNIFIED)]
    for source in filter(None, sources):
        for folder in cleared:
            if os.path.commonpath([folder, os.path.realpath(source)]) == folder:
                raise ConfigError(f"{source} lies in {folder}, which mindformers empties at the start of a conversion "
                                  f"(auto_trans_ckpt). Move the source, or give another output_dir")
