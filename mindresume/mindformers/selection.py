"""Selects the checkpoint of a job in the trainer: passes on what the configuration asks for, keeps what protects the answer."""
from __future__ import annotations

from functools import partial
from typing import Any

from mindresume.mindformers import adapter, modelarts
from mindresume.mindformers.auto_transform import prepare
from mindresume.mindformers.training_context import ResumePlan, TrainingContext
from mindresume.reshard import consolidated_checkpoint
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.reshard.strategy_store import strategy_lookup
from mindresume.resume.choice import Choice
from mindresume.resume.job_selection import CheckpointSelector, SelectionRequest
from mindresume.storage.interface import Storage


def select(config: Any, path: str, named: str | None, context: TrainingContext, storage: Storage, converts: bool,
           resume: bool = True, healthy: bool = False, as_it_is: bool = False, instead: str = "are initialised at random"
           ) -> ResumePlan | None:
    """Returns the plan of the checkpoint that all ranks take, None: a fresh start. Its read lock and its load attempt go into the
    resources of ``context``.

    ``converts``: the number of ranks may differ, so all files are verified by all ranks together, and the plan has
    ``open_source``. ``resume`` False: weights alone are wanted, so there is no fresh start. ``healthy``: what mindformers' health
    monitor found unhealthy is not taken, unless it is named. ``as_it_is``: what mindformers saved on as many ranks as there are
    is not converted, so that it needs no layouts. ``instead``: ends a sentence on the weights of a fresh start.

    Raises NoUsableCheckpointError, MissingCheckpointError or CollectiveError on all ranks together."""
    resources, group, complete = context.resources, context.group, []

    def take_complete(storage: Storage, path: str) -> Choice:
        choice, source = consolidated_checkpoint.choose_complete(storage, path, group, context.settings.verify == "full", resume)
        complete.append(source)
        return choice
    request = SelectionRequest(path, named, converts, resume, as_it_is, instead,
                               health_dir=str(config.get("output_dir") or "") if healthy else None,
                               output_dir=adapter.output_root() if resume and _has_monitor(config) else None)
    selector = CheckpointSelector(storage, group, context.settings, context.emit, take_complete,
                                  strategy_lookup(storage, config.get("src_strategy_path_or_dir") or None),
                                  resources.remote, partial(modelarts.saved_to, config), resources.topology)
    found = selector.select(request)
    if found.choice is None:
        return None
    resources.read_lock, resources.load_attempt.load_attempt = found.read_lock, found.load_attempt
    plan = ResumePlan(None, found.choice, found.choice, partial(_last, complete) if complete else None, found.lost_work)
    if found.uses_layouts or found.choice.chosen.iteration_dir:
        plan = prepare(config, plan, context, storage, aside=resume or adapter.is_parallel())
    return plan


def _last(sources: list[OpenCheckpoint]) -> OpenCheckpoint:
    return sources[-1]


def _has_monitor(config: Any) -> bool:
    """Whether a CheckpointMonitor will report that a step is done."""
    return any(callback.get("type") == adapter.ALIAS for callback in config.get("callbacks") or [])
