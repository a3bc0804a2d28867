"""Drives the saves of a training, for the graph trainer and for the PyNative trainer:

    begin_saving    acquire the directory (before) ─▶ clean up, commit what earlier runs completed
        ─▶ end of the resume
    end_step        save where it is due ─▶ heartbeat
    end_training    the last step, if a rank lacks it ─▶ commit of all ranks ─▶ upload ─▶ release

``mindresume.saving.checkpoint_manager`` has the parts; what a step consists of is a ``StepState``
of the trainer.
"""

from __future__ import annotations

from typing import Any

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import ENDING
from mindresume.events import Resumed
from mindresume.formatting import ranks_count
from mindresume.mindformers import heartbeat
from mindresume.mindformers import network_state as live
from mindresume.mindformers.process_group import group_of_job
from mindresume.mindformers.training_context import TrainingContext
from mindresume.resume.progress import random_state_row, source_rows
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.shard_writer import StepState
from mindresume.storage.posix import PosixStorage

# ---- start ---------------------------------------------------------------------------------------


def open_directory(context: TrainingContext, options: SaveOptions) -> CheckpointManager:
    """Acquires the checkpoint directory together with the other ranks. All ranks have loaded the
    checkpoint before they call it, so its read lock ends. Returns what saves there."""
    resources, plan = context.resources, context.plan
    resources.group = group_of_job()
    manager = CheckpointManager(
        PosixStorage(),
        resources.group,
        context.settings,
        options,
        context.emit,
        resources.pending_load,
        heartbeat,
    )
    origin = (plan.selected or plan.choice) if plan.resumes else None
    manager.open(resources.topology, origin, resources.remote)
    resources.release()
    return manager


def begin_saving(
    manager: CheckpointManager, context: TrainingContext, step: int, monitor: Any
) -> None:
    """Starts the saver, makes ``monitor`` the one that saves in this training, and ends the resume.

    Args:
        step: the step after which the training begins.
    """
    plan = context.plan
    manager.begin(step, plan.choice if plan.resumes else None, context.resources.remote)
    context.monitor = monitor
    manager.count_hosts()
    if plan.resumes:
        restore_random(context, step)


def restore_random(context: TrainingContext, step: int) -> None:
    """Restores the random state, the last part of a resume, and emits the summary of the resume."""
    details = context.shard.details if context.shard else None
    restored = live.restore_random(details.random) if details and details.random else []
    saved_by, size, lost = (
        context.plan.choice.chosen.world_size,
        context.group.size,
        context.plan.lost,
    )
    other = f"saved by {ranks_count(saved_by)}, this job has {size}" if saved_by != size else ""
    rows = (
        *context.progress.summary,
        random_state_row(restored, other),
        *source_rows(context.plan.selected),
    )
    context.emit(
        Resumed(
            step,
            tuple(tuple(row) for row in rows),
            context.progress.load_seconds,
            lost and lost.steps,
            lost and lost.seconds(runtime.time()),
        )
    )


# ---- each step and the end -----------------------------------------------------------------------


def end_step(manager: CheckpointManager, context: TrainingContext, state: StepState) -> bool:
    """Saves the step where it is due: on disk, in memory. Returns whether the training is to end
    after it, because a rank was asked to stop; then the step is saved."""
    context.progress.step = state.step
    reason = manager.end_step(state)
    if reason:
        context.progress.stop_reason = reason
    heartbeat.step(state.step)
    return bool(reason)


def end_training(manager: CheckpointManager, context: TrainingContext, state: StepState) -> None:
    """Saves the last step, and waits until everything is committed."""
    heartbeat.enter(ENDING)
    manager.save_last(state)
    context.monitor = None  # no save is possible any more
    manager.end(state.step)
