"""Selects and loads the checkpoint of a PyNative training.

    load_path ─▶ the selection by all ranks ─▶ plan ─▶ counters of the trainer, position in its data
        ─▶ regions of this rank
    ─▶ parameters of models and optimizer ─▶ float32 copies that the checkpoint does not have

Sources are the same as for the graph trainer with Checkpoint 2.0: iteration folders of any layout,
written by mindresume or by mindformers, by the PyNative trainer or by the graph trainer. Names and
shapes of both are equal, so the map between them is the identity, if both arrange the elements
within the tensors equally.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mindresume.coordination.collectives import run_on_rank0
from mindresume.coordination.rank_heartbeat import LOADING
from mindresume.errors import ConfigError, TrainingCompleteError
from mindresume.events import Notice
from mindresume.mindformers import adapter, heartbeat, loading
from mindresume.mindformers.configuration import request_of_pynative
from mindresume.mindformers.counters import begin_fresh, continue_after, selected_state
from mindresume.mindformers.job_start import is_pretrained, select_plan
from mindresume.mindformers.loading import COUNTER
from mindresume.mindformers.pynative.training_run import (
    MASTER,
    TrainingRun,
    all_parameters,
    layouts_of,
    local,
    model_parameters,
    refresh_masters,
    restore_fields,
    restore_parameters,
    shapes_of,
)
from mindresume.mindformers.training_saves import restore_random
from mindresume.mindformers.upstream import PYNATIVE_TRAINER
from mindresume.model.layout import Layouts
from mindresume.model.training_state import DataPosition
from mindresume.reshard.region_load import LoadTarget
from mindresume.resume.job_selection import SelectionRequest, caching_storage
from mindresume.resume.progress import ResumeProgress, RunSettings, parse_data_request
from mindresume.storage.posix import PosixStorage


def is_left_to_mindformers(run: TrainingRun, path: str) -> bool:
    """Returns whether mindformers loads ``path`` with its own code: Hugging Face weights, and the
    adapters of LoRA on a base."""
    checkpoint = run.config["checkpoint"]
    if checkpoint.get("base_load_path"):
        reason = "base_load_path: the adapters of LoRA are loaded by mindformers"
    elif run_on_rank0(run.context.group, partial(is_pretrained, PosixStorage(), str(path))):
        if not hasattr(sys.modules[PYNATIVE_TRAINER], "is_hf_checkpoint"):  # before 2.1.0
            raise ConfigError(
                f"{path} holds Hugging Face weights, which the PyNative trainer of this "
                "mindformers cannot load. "
                f"Use mindformers 2.1.0, or convert the weights first and set no_load_optim: True"
            )
        reason = f"{path} holds Hugging Face weights, which mindformers loads"
    else:
        return False
    run.context.emit(Notice(reason))
    return True


def load(run: TrainingRun, path: str) -> None:
    """Selects the checkpoint and loads it into the trainer. Without one the training starts afresh.

    Raises:
        NoUsableCheckpointError, MissingCheckpointError, ConfigError, CollectiveError: On all ranks
        together. TrainingCompleteError: The checkpoint is of the last step.
    """
    context, model = run.context, run.config.get("model") or {}
    # a checkpoint of mindformers does not tell how it was made
    for key, value in adapter.ARRANGEMENT.items():
        if key in model and bool(model[key]) is not value:
            raise ConfigError(
                f"model.{key} is {model[key]}, and the PyNative trainer ignores it: it would take "
                "the elements of such a tensor of the graph trainer in another order. If the "
                "PyNative trainer saved the checkpoint, remove the key; what the graph trainer "
                "saved with this key cannot be loaded"
            )
    context.resources.storage = caching_storage(PosixStorage(), context.settings, context.group)
    request = request_of_pynative(run.config, path)
    with context.progress.timed_load():
        plan = select_plan(
            run.config,
            SelectionRequest(request.path, any_layout=True, resume=request.resume),
            context,
        )
        if plan is None:
            return
        loading.check_arrangement(
            plan,
            adapter.ARRANGEMENT,
            "The PyNative trainer has no other order: use the graph trainer",
        )
        context.plan = replace(plan, request=request)
        if request.resume:
            restore_counters(run)
        heartbeat.enter(LOADING)
        loading.load(PyNativeNetwork(run), context)


def end_without_saves(run: TrainingRun) -> None:
    """Ends the resume of a training in which nothing of mindresume saves. All ranks have loaded
    when they call it."""
    context = run.context
    if context.saves is None and context.plan.choice is not None:
        context.resources.release()
        if context.plan.resumes:
            restore_random(context, int(run.trainer.state.global_step))


# ---- counters ------------------------------------------------------------------------------------


def restore_counters(run: TrainingRun) -> None:
    """Sets step, samples and loss scale of the trainer, and where its data continues.

    Raises:
        ProgressError: As ``resume.progress.resume_progress``.
        TrainingCompleteError: No step is left.
    """
    context, trainer = run.context, run.trainer
    saved = selected_state(context.plan.choice)
    # the batch size follows from the samples
    is_dynamic = getattr(trainer, "dynamic_batch_enabled", False)
    setting = _settings(run, saved.global_batch_size if is_dynamic else trainer.global_batch_size)
    state = saved
    # of mindformers: it has read ``consumed`` samples of one data set, or its steps'
    if state.data is None and run.items:
        consumed = state.consumed
        if consumed is None:
            consumed = state.step * (state.global_batch_size or setting.global_batch_size or 1)
        state = replace(
            state,
            consumed=consumed,
            data=DataPosition(0, 0).after(
                consumed // run.item_samples, run.items, run.item_samples
            ),
        )
    progress = continue_after(state, setting, context)
    if progress.initial_step >= trainer.state.max_steps:
        raise TrainingCompleteError(
            f"the training is complete: step {progress.initial_step} is the end of training.steps: "
            f"{trainer.state.max_steps}. Nothing was trained or saved. For more, raise "
            "training.steps"
        )
    restore_fields(trainer, saved.trainer)
    trainer.state.global_step = progress.initial_step
    if state.loss_scale is not None:
        trainer.state.loss_scale = state.loss_scale
    if hasattr(trainer.state, "consumed_samples"):  # since 2.1.0
        trainer.state.consumed_samples = trainer._consumed_samples = progress.consumed or 0
    if trainer.state.epoch_step > 0:
        # it changes between two epochs only
        trainer.state.epoch = float(progress.initial_step // trainer.state.epoch_step)
    _set_position(run, progress)


def begin_data(run: TrainingRun) -> None:
    """Sets where the data of a training begins that does not resume, before its first iterator is
    made: ``data_skip_steps`` counts then too, and the first save has to know the data set, and that
    what the configuration says of its beginning was done.

    Raises:
        ProgressError: As ``resume.progress.fresh_progress``.
        ConfigError: The data set cannot skip samples.
    """
    context = run.context
    if context.plan.resumes or not run.items:
        return
    origin = begin_fresh(_settings(run, run.trainer.global_batch_size), context)
    if origin.position.samples:
        _set_position(run, origin)


def _set_position(run: TrainingRun, origin: ResumeProgress) -> None:
    """Sets where the data continues. Raises ConfigError if the data set cannot skip samples."""
    trainer, dataset = run.trainer, run.trainer.train_dataset
    if run.is_balanced:
        source = getattr(trainer, "_balance_source", None)
        if source is not None:  # a rank that only receives samples has none
            source.restore(origin.consumed or 0, origin.initial_step)
        return
    run.skip = origin.position.samples // run.item_samples
    if run.skip and not hasattr(dataset, "set_init_step"):
        raise ConfigError(
            f"the training begins {origin.position.samples} samples into a pass over the data, "
            f"and the data set, a {type(dataset).__name__}, has no set_init_step to skip them. Set "
            f"ignore_data_skip: True to begin at its first sample"
        )


def _settings(run: TrainingRun, batch: int | None) -> RunSettings:
    config = run.config
    request = parse_data_request(config.get("ignore_data_skip"), config.get("data_skip_steps"))
    return RunSettings(
        batch,
        run.items or run.steps_per_pass,
        None,
        run.context.progress.dataset_identity,
        request,
        item_samples=run.item_samples,
    )


# ---- tensors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PyNativeNetwork:
    """The models of this rank, and with a resume the optimizer, as a load sees them
    (``mindformers.loading.Network``)."""

    run: TrainingRun
    arrangement = adapter.ARRANGEMENT

    @property
    def config(self) -> Any:
        return self.run.config

    @property
    def optimizer(self) -> Any:
        """Returns the optimizer, if it is loaded; else None."""
        return self.run.trainer.optimizer if self.run.context.plan.request.resume else None

    def target(self, stored: Mapping[str, Any], what: str) -> LoadTarget:
        """Returns all parameters. The step counter of the optimizer, set separately, is int32 in
        1.9.0 and int64 later; float32 copies may all be missing."""
        model = self.run.trainer.model
        shapes = shapes_of(all_parameters(model, self.optimizer))
        if COUNTER in shapes and COUNTER in stored:
            shapes[COUNTER] = shapes[COUNTER][0], stored[COUNTER].dtype
        # they are made of the loaded parameters
        if not any(name.startswith(MASTER) for name in stored):
            shapes = {name: row for name, row in shapes.items() if not name.startswith(MASTER)}
        optional = {
            name for name in shapes if name == COUNTER or self.run.context.settings.allows(name)
        }
        return LoadTarget(shapes, {}, optional, model_parameters(model), True)

    def layouts(self, target: LoadTarget) -> Layouts:
        return layouts_of(self.run.trainer.model, self.optimizer, target.shapes, self.run.context)

    def assign(self, arrays: dict[str, np.ndarray], target: LoadTarget) -> None:
        if COUNTER in arrays:
            own = shapes_of({COUNTER: self.optimizer.parameters_dict()[COUNTER]})
            arrays[COUNTER] = arrays[COUNTER].astype(own[COUNTER][1])
        restore_parameters(self.run.trainer.model, self.optimizer, arrays)
        refresh_masters(self.run.trainer.optimizer, arrays)


def check_loaded(run: TrainingRun) -> None:
    """Compares the parameters with what was loaded, before the first step. Raises
    AlteredWeightsError as ``Resources.check_loaded``."""
    resources, trainer = run.context.resources, run.trainer
    if resources.loaded is not None:
        held = all_parameters(trainer.model, trainer.optimizer)
        resources.check_loaded(
            ((name, local(parameter)) for name, parameter in held.items()),
            trainer.callback_handler.callbacks,
            run.context.plan.resumes,
        )
