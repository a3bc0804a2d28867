"""Starts the saves of a training, for the graph trainer and for the PyNative trainer, and ends a resume."""
from __future__ import annotations

from functools import partial
from typing import Any

from mindresume import runtime
from mindresume.events import Resumed
from mindresume.formatting import ranks_count
from mindresume.mindformers import network_state as live
from mindresume.mindformers.training_context import TrainingContext
from mindresume.resume.background_scrub import BackgroundScrub
from mindresume.resume.resume_summary import random_state_row, source_rows
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.remote_run_number import number_runs
from mindresume.saving.save_session import SaveSession


def open_directory(manager: CheckpointManager, context: TrainingContext) -> SaveSession:
    """Acquires the checkpoint directory together with the other ranks. All ranks have loaded the checkpoint before they call it,
    so its read lock ends."""
    resources, plan = context.resources, context.plan
    origin = (plan.selected or plan.choice) if plan.resumes else None
    session = manager.open(resources.topology, origin, partial(number_runs, resources.remote, context.emit))
    resources.release()
    return session


def begin_saving(manager: CheckpointManager, context: TrainingContext, step: int, monitor: Any) -> None:
    """Starts the saver, makes ``monitor`` the one that saves in this training, and ends the resume.

    Args:
        step: the step after which the training begins.
    """
    plan = context.plan
    manager.begin(step, plan.choice if plan.resumes else None, context.resources.remote)
    context.monitor = monitor
    manager.count_hosts()
    start_scrub(manager, context)
    if plan.resumes:
        restore_random(context, step)


def start_scrub(manager: CheckpointManager, context: TrainingContext) -> None:
    """Starts the scrub in the background, on the first rank of each host, if it is configured."""
    if context.settings.scrub.every_hours and manager.is_first_on_host:
        scrub = BackgroundScrub(manager.storage, manager.target.root, context.settings.scrub, context.emit,
                                context.resources.remote)
        context.emit.add(scrub)
        context.resources.scrub = scrub.start()


def restore_random(context: TrainingContext, step: int) -> None:
    """Restores the random state, the last part of a resume, and emits the summary of the resume."""
    details = context.shard.details if context.shard else None
    restored = live.restore_random(details.random) if details and details.random else []
    saved_by, size, lost = context.plan.choice.chosen.world_size, context.group.size, context.plan.lost
    other = f"saved by {ranks_count(saved_by)}, this job has {size}" if saved_by != size else ""
    rows = (*context.progress.summary, random_state_row(restored, other), *source_rows(context.plan.selected))
    context.emit(Resumed(step, tuple(tuple(row) for row in rows), context.progress.load_seconds,
                         lost and lost.steps, lost and lost.seconds(runtime.time())))
