"""Prepares the start of a job: computes the fingerprint of the data set, and writes the selected
checkpoint into the configuration.

    configuration ─▶ request of its dialect ─▶ the selection by all ranks ─▶ the plan ─▶ the
        configuration is set to it

Sources of Checkpoint 2.0 are iteration folders; also rank folders and consolidated weights, so that
a job can switch to it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import Watchdog, gather_results, run_on_rank0
from mindresume.errors import CollectiveError, ConfigError
from mindresume.events import Notice, warning
from mindresume.formats.iterations import COMMON
from mindresume.formats.scan import CONSOLIDATED, ROOT, kind_of
from mindresume.mindformers import adapter, upstream
from mindresume.mindformers.auto_transform import STRATEGY, TRANSFORMED, UNIFIED, prepare
from mindresume.mindformers.configuration import (
    TRAIN,
    checkpoint_roots,
    request_of_iterations,
    request_of_resume,
    request_of_weights,
)
from mindresume.mindformers.training_context import ResumePlan, TrainingContext
from mindresume.reshard.huggingface import CONFIG
from mindresume.reshard.open_checkpoint import ConsolidatedSource
from mindresume.reshard.strategy_store import StrategyLookup
from mindresume.resume.dataset_fingerprint import dataset_identity
from mindresume.resume.job_selection import (
    CheckpointSelector,
    SelectionRequest,
    caching_storage,
    locate_checkpoints,
    shared_groups_of,
)
from mindresume.resume.sources import CheckpointSources
from mindresume.storage import Storage
from mindresume.storage.posix import PosixStorage


def fingerprint(config: Any, context: TrainingContext) -> dict[str, str]:
    """Returns the fingerprint of the data set as rank 0 sees it, before mindformers changes its
    configuration."""
    try:
        look = partial(
            dataset_identity, PosixStorage(), config.get("train_dataset"), config.get("seed")
        )
        return run_on_rank0(context.group, look, Watchdog("looking at the data set"))
    except CollectiveError as error:
        context.emit(
            warning(f"the data set has no fingerprint, so a change of it stays unnoticed: {error}")
        )
        return {}


def select_checkpoint(config: Any, context: TrainingContext) -> None:
    """Sets ``load_checkpoint``, ``resume_training`` and ``load_ckpt_format`` of ``config``, and the
    plan of ``context``, to what all ranks selected.

    Raises:
        NoUsableCheckpointError, MissingCheckpointError, ConfigError, CollectiveError: On all ranks
        together.
    """
    context.resources.storage = caching_storage(PosixStorage(), context.settings, context.group)
    if uses_iterations(config):
        return _select_iterations(config, context)
    if not config.resume_training or config.resume_training is True and not config.load_checkpoint:
        # perhaps of pretrained_model_dir, as mindformers does
        return select_weights(config, TRAIN, context)
    if not config.load_checkpoint:
        return None
    path = str(config.load_checkpoint)
    requested = config.resume_training if isinstance(config.resume_training, str) else None
    pretrained = str(config.get("pretrained_model_dir") or "")
    health_dir = (
        str(config.get("output_dir") or "") if config.get("use_checkpoint_health_monitor") else None
    )
    plan = select_plan(
        config,
        SelectionRequest(
            path,
            requested,
            bool(config.auto_trans_ckpt),
            health_dir=health_dir,
            pretrained=pretrained,
        ),
        context,
    )
    if plan is None:
        config.resume_training = False
        config.load_checkpoint = ""
        config.auto_trans_ckpt = False
        # of pretrained_model_dir, if there is one
        return select_weights(config, TRAIN, context)
    choice = plan.choice
    if not os.path.isfile(path):
        config.load_checkpoint = choice.root
    if config.get("load_ckpt_format", "ckpt") != choice.chosen.format:
        context.emit(
            Notice(
                f"load_ckpt_format is set to {choice.chosen.format}, the format of the selected "
                "files"
            )
        )
        config.load_ckpt_format = choice.chosen.format
    config.resume_training = True
    context.plan = replace(plan, request=request_of_resume(config))
    if plan.open_source is not None:
        # mindformers must neither convert nor clear anything
        config.auto_trans_ckpt = False
    return None


def select_weights(config: Any, task: str, context: TrainingContext) -> None:
    """Sets the keys of ``config``, and the plan of ``context``, to what all ranks selected.

    Raises:
        NoUsableCheckpointError, MissingCheckpointError, ConfigError, CollectiveError: As
        ``select_plan``.
    """
    request = request_of_weights(config, task)
    if not request.path:
        return
    group, storage = context.group, context.resources.storage
    requested = config.get("resume_training")
    path = locate_checkpoints(storage, request.path, group, context.emit)
    split = (
        not request.converts
        and group.size > 1
        and ROOT in gather_results(group, partial(kind_of, storage, path))
        and shared_groups_of(
            storage, path, group, context.resources.topology, context.emit
        ).is_split
    )
    plan = select_plan(
        config,
        SelectionRequest(
            path,
            requested if isinstance(requested, str) else None,
            any_layout=not split,
            resume=False,
            keep_layout=not request.converts,
        ),
        context,
    )
    choice, chosen = plan.choice, plan.choice.chosen
    shown = (
        path
        if os.path.isfile(path)
        else os.path.join(choice.root, chosen.iteration_dir)
        if chosen.iteration_dir
        else choice.root
    )
    context.plan = replace(plan, request=replace(request, path=shown))
    config.load_checkpoint = shown
    config.resume_training = False
    config.load_ckpt_format = chosen.format
    if config.get("checkpoint"):
        config.checkpoint.load_path = shown
    # mindformers must neither convert nor clear anything
    config.auto_trans_ckpt = False


# ---- Checkpoint 2.0 ------------------------------------------------------------------------------


def uses_iterations(config: Any) -> bool:
    """Returns whether the job uses Checkpoint 2.0 (mindformers
    trainer/utils.py:convert_checkpoint_config). Raises ConfigError if it has a section that this
    release of mindformers would ignore."""
    if config.get("checkpoint"):
        upstream.refuse_if_off(upstream.CHECKPOINT_SECTION)
    return bool(config.get("checkpoint")) or config.get("use_legacy_format", True) is False


def _select_iterations(config: Any, context: TrainingContext) -> None:
    """Sets the keys of both dialects, and the plan of ``context``, to what all ranks selected.

    Raises:
        ConfigError: Keys contradict each other.
        NoUsableCheckpointError, MissingCheckpointError, CollectiveError: As ``select_plan``.
    """
    asked = request_of_iterations(config)
    for callback in config.get("callbacks") or []:
        if (
            callback.get("type") == adapter.ALIAS
            and callback.get("checkpoint_format", "ckpt") == "ckpt"
        ):
            # document 004: mindformers converts it by itself
            callback["checkpoint_format"] = "safetensors"
    pretrained = str(config.get("pretrained_model_dir") or "")
    if not asked.path and not pretrained:
        return
    plan, resume = None, False
    if asked.path and not run_on_rank0(
        context.group, partial(is_pretrained, context.resources.storage, asked.path)
    ):
        health = (config.get("monitor_config") or {}).get("health_checkpoint") or {}
        is_monitored = asked.resume and health.get("embedding_local_norm_threshold")
        health_dir = str(config.get("output_dir") or "") if is_monitored else None
        plan = select_plan(
            config,
            SelectionRequest(
                asked.path,
                any_layout=True,
                resume=asked.resume,
                health_dir=health_dir,
                pretrained=pretrained,
            ),
            context,
        )
        resume = asked.resume and plan is not None
        folder = (
            _folder_with_common(plan.choice.root, plan.choice.chosen.iteration_dir)
            if plan
            else pretrained
        )
    elif asked.resume and asked.path:
        raise ConfigError(
            f"{asked.path} holds Hugging Face weights, from which no training can resume: they "
            "have no optimizer state and no step. To begin with them set resume_training: False "
            "(no_load_optim: True), or give them as pretrained_model_dir and the checkpoint folder "
            "as load_checkpoint"
        )
    else:
        folder = asked.path or pretrained
    if plan is None and folder:
        upstream.refuse_if_off(upstream.PRETRAINED)
        context.emit(Notice(f"the training begins with Hugging Face weights: {folder}"))
    if folder:
        context.plan = replace(
            plan or ResumePlan(),
            request=replace(asked, path=folder, resume=resume, pretrained=plan is None),
        )
    config.load_checkpoint = folder
    config.resume_training = resume
    config.load_ckpt_format = "safetensors"
    if config.get("checkpoint"):
        config.checkpoint.load_path, config.checkpoint.no_load_optim = folder, not resume
    # mindformers must neither convert nor clear anything
    config.auto_trans_ckpt = False


def _folder_with_common(root: str, iteration_dir: str) -> str:
    """Returns the folder for mindformers, which reads ``common.json`` there: the iteration folder,
    or if it has no such file a temporary folder that has one."""
    folder = os.path.abspath(os.path.join(root, iteration_dir))
    if os.path.isfile(os.path.join(folder, COMMON)):
        return folder
    folder = tempfile.mkdtemp(prefix="mindresume-")
    runtime.at_exit(shutil.rmtree, folder, ignore_errors=True)
    with open(os.path.join(folder, COMMON), "w") as file:
        file.write("{}")
    return folder


def is_pretrained(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` is a Hugging Face folder: consolidated weights with the
    configuration of the model beside them."""
    return (
        storage.status(os.path.join(path, CONFIG)) is not None
        and kind_of(storage, path) in CONSOLIDATED
    )


# ---- what mindformers clears ---------------------------------------------------------------------


def check_not_cleared(output: str, *sources: Any, load_ckpt_format: str) -> None:
    """Protects sources: with auto_trans_ckpt mindformers empties folders below ``output``.

    Raises:
        ConfigError: One of ``sources`` lies in such a folder. Real paths are compared: mindformers
            compares texts, and misses ``./output/strategy`` or a trailing slash.
    """
    cleared = [
        os.path.realpath(os.path.join(output, name))
        for name in (STRATEGY, TRANSFORMED if load_ckpt_format == "ckpt" else UNIFIED)
    ]
    for source in filter(None, sources):
        for folder in cleared:
            if os.path.commonpath([folder, os.path.realpath(source)]) == folder:
                raise ConfigError(
                    f"{source} lies in {folder}, which mindformers empties at the start of a "
                    "conversion (auto_trans_ckpt). Move the source, or give another output_dir"
                )


# ---- selection -----------------------------------------------------------------------------------


def select_plan(
    config: Any, request: SelectionRequest, context: TrainingContext
) -> ResumePlan | None:
    """Returns the plan of the checkpoint that all ranks take; None for a fresh start. Puts its read
    lock and its load attempt into the resources of ``context``.

    Args:
        request: without ``output_dir``. With ``any_layout`` the plan has ``open_source``.
    Raises:
        NoUsableCheckpointError, MissingCheckpointError, ConfigError, CollectiveError: On all ranks
        together.
    """
    resume = request.resume
    resources, group = context.resources, context.group
    consolidated = ConsolidatedSource(group, context.settings.verify == "full", resume)
    # Failed loads are counted if a CheckpointMonitor will report that a step is done.
    has_monitor = any(
        callback.get("type") == adapter.ALIAS for callback in config.get("callbacks") or []
    )
    request = replace(request, output_dir=adapter.output_root() if resume and has_monitor else None)
    sources = CheckpointSources(
        StrategyLookup(resources.storage, config.get("src_strategy_path_or_dir") or None),
        consolidated,
        saved_to=checkpoint_roots(config) if resume else (),
        remote=resources.remote,
    )
    found = CheckpointSelector(
        resources.storage, group, context.settings, context.emit, sources, resources.topology
    ).select(request)
    context.progress.bad_steps = found.bad_steps
    if found.choice is None:
        return None
    resources.read_lock, resources.pending_load.attempt = found.read_lock, found.load_attempt
    opened = consolidated.opened
    plan = ResumePlan(
        None,
        found.choice,
        found.choice,
        (lambda: opened) if opened is not None else None,
    )
    if found.uses_layouts or found.choice.chosen.iteration_dir:
        plan = prepare(config, plan, context, aside=resume or adapter.is_parallel())
    return plan
