"""Selects the checkpoint of a job in the trainer: passes on what the configuration asks for, and keeps the read lock and the load
attempt."""
from __future__ import annotations

from typing import Any

from mindresume.mindformers import adapter, modelarts
from mindresume.mindformers.auto_transform import prepare
from mindresume.mindformers.training_context import ResumePlan, TrainingContext
from mindresume.reshard.consolidated_checkpoint import ConsolidatedSource
from mindresume.reshard.strategy_store import strategy_lookup
from mindresume.resume.job_selection import CheckpointSelector, SelectionRequest
from mindresume.resume.selection import CheckpointSources
from mindresume.storage.interface import Storage

FRESH = "are initialised at random"             # weights of a fresh start without others


def select(config: Any, path: str, requested: str | None, context: TrainingContext, storage: Storage, any_layout: bool,
           resume: bool = True, healthy: bool = False, keep_layout: bool = False, fresh_weights: str = FRESH
           ) -> ResumePlan | None:
    """Returns the plan of the checkpoint that all ranks take; None for a fresh start. Puts its read lock and its load attempt
    into the resources of ``context``.

    Args:
        path: the folder or file to load from.
        requested: the name of one checkpoint in it, or None.
        any_layout: the number of ranks may differ: all ranks together verify all files, and the plan has ``open_source``.
        resume: False: weights alone are loaded, so there is no fresh start.
        healthy: checkpoints that mindformers' health monitor found unhealthy are refused, unless they are requested.
        keep_layout: what mindformers saved on as many ranks as the job has is loaded as it is, so that it needs no layouts.
        fresh_weights: ends the message of a fresh start, ``weights ...``.
    Raises:
        NoUsableCheckpointError, MissingCheckpointError, ConfigError, CollectiveError: On all ranks together.
    """
    resources, group = context.resources, context.group
    consolidated = ConsolidatedSource(group, context.settings.verify == "full", resume)
    request = SelectionRequest(path, requested, any_layout, resume, keep_layout, fresh_weights,
                               health_dir=str(config.get("output_dir") or "") if healthy else None,
                               output_dir=adapter.output_root() if resume and _has_monitor(config) else None)
    sources = CheckpointSources(strategy_lookup(storage, config.get("src_strategy_path_or_dir") or None), consolidated,
                                saved_to=modelarts.checkpoint_roots(config) if resume else (), remote=resources.remote)
    found = CheckpointSelector(storage, group, context.settings, context.emit, sources, resources.topology).select(request)
    if found.choice is None:
        return None
    resources.read_lock, resources.pending_load.attempt = found.read_lock, found.load_attempt
    opened = consolidated.opened
    plan = ResumePlan(None, found.choice, found.choice, (lambda: opened) if opened is not None else None, found.lost_work)
    if found.uses_layouts or found.choice.chosen.iteration_dir:
        plan = prepare(config, plan, context, storage, aside=resume or adapter.is_parallel())
    return plan


def _has_monitor(config: Any) -> bool:
    """Returns whether a CheckpointMonitor will report that a step is done."""
    return any(callback.get("type") == adapter.ALIAS for callback in config.get("callbacks") or [])
