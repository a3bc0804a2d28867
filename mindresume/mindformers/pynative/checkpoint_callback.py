"""Makes the ``CheckpointCallback`` that takes the place of mindformers' own in its PyNative
trainer, with the same arguments.

``mindresume.saving.checkpoint_manager`` implements the protocol of saving; this module calls it at
the events of the trainer. Checkpoints of the adapters of LoRA alone (``save_trainable_only``) are
left to mindformers.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from inspect import signature
from typing import Any

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import FIRST_STEP
from mindresume.errors import ConfigError
from mindresume.events import Notice
from mindresume.mindformers import adapter, heartbeat, training_context
from mindresume.mindformers import network_state as live
from mindresume.mindformers.pynative.training_run import (
    COUNTER,
    TrainingRun,
    all_parameters,
    layouts_of,
    local,
    model_parameters,
    optimizer_parameters,
    saved_fields,
    shapes_of,
    tensors_of,
)
from mindresume.mindformers.step_proof import mean_of
from mindresume.mindformers.training_saves import TrainingSaves, loss_metric, number
from mindresume.model.layout import Layouts
from mindresume.model.training_state import DataPosition, TrainingState
from mindresume.saving.retention import policy_of
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.shard_writer import Save, Shard, StepState, iteration_shard


class RunSaver:
    """Saves the checkpoints of one PyNative training.

    Args:
        asked: the arguments of mindformers' callback by name, defaults included.
        since: time (``time.monotonic``) at which the callback was made.
    """

    def __init__(self, asked: dict[str, Any], since: float):
        self._asked, self._since = asked, since
        self.training: TrainingSaves | None = None
        self.run: TrainingRun | None = None
        self._layouts: Layouts = {}

    def begin(self, run: TrainingRun, model: Any, optimizer: Any) -> None:
        """Opens the save session together with the other ranks, cleans up, and restores the random
        state."""
        if self.training is not None and run.context.saves is self.training:
            return  # the training begins again in its process: session and state go on
        context, asked = run.context, self._asked
        options = SaveOptions(
            os.path.realpath(asked["save_path"]),
            asked["prefix"],
            asked["save_interleaved_steps"],
            async_save=asked["async_save"],
            iterations=True,
            shown=asked["save_path"],
            samples_in_common=run.samples_in_common,
            since=self._since,
            retention=policy_of(asked["save_max"], 0, context.settings.retention),
        )
        self.run = run
        self.training = TrainingSaves(context, options)
        manager = self.training.manager
        optimizer = None if asked["no_save_optim"] else optimizer
        self._layouts = layouts_of(
            model, optimizer, shapes_of(all_parameters(model, optimizer)), context
        )
        self.training.begin(int(run.trainer.state.global_step))
        manager.begin_load_attempt()
        heartbeat.enter(FIRST_STEP)

    # ---- collecting ------------------------------------------------------------------------------

    def shard(self, state: Any, objects: dict[str, Any]) -> Shard:
        """Returns everything that a resume needs."""
        optimizer = None if self._asked["no_save_optim"] else objects.get("optimizer")
        of_model = model_parameters(objects["model"])
        of_optimizer = optimizer_parameters(optimizer, of_model)
        target = self.training.manager.target
        deduplicates = bool(self._asked["remove_redundancy"]) and bool(self._layouts)
        files = [tensors_of(of_model), tensors_of(of_optimizer)]
        if deduplicates:
            share = live.own_share({**files[0], **files[1]}, self._layouts, target.rank)
            files = [
                {
                    name: array
                    for name, array in file.items()
                    if name not in self._layouts or name in share
                }
                for file in files
            ]
        training = self.training_state(state, optimizer, objects.get("loss"))
        return iteration_shard(
            self._asked["prefix"],
            target,
            training,
            files[0],
            files[1] if optimizer is not None else None,
            self._layouts,
            live.capture_random(),
            deduplicates,
        )

    def training_state(self, state: Any, optimizer: Any, loss: Any) -> TrainingState:
        """Returns the training state after the step of ``state``."""
        run, step = self.run, int(state.global_step)
        counter = getattr(optimizer, COUNTER, None)
        scale = getattr(state, "loss_scale", None)
        metrics = {
            **loss_metric(None if loss is None else local(loss)),
            **run.context.progress.metrics,
        }
        return TrainingState(
            step,
            run.steps_per_pass,
            step if counter is None else number(counter, int),
            int(run.trainer.global_batch_size),
            None if scale is None else float(scale),
            None,
            run.steps_per_pass,
            metrics,
            None,
            *run.data_at(step),
            adapter.ARRANGEMENT,
            saved_fields(run.trainer),
        )


class _PyNativeState(StepState):
    """The state of a PyNative training at the end of a step. ``objects``: what the trainer passes
    to its callbacks by name."""

    def __init__(self, saver: RunSaver, state: Any, objects: dict[str, Any]):
        self.step = int(state.global_step)
        self.saver = saver
        self.state = state
        self.objects = objects

    def collect(self) -> Save:
        shard, context = self.saver.shard(self.state, self.objects), self.saver.run.context
        return Save(shard, (), context.ledger(int(self.state.epoch), shard.state))

    def values(self) -> dict[str, float]:
        loss, norm = (self.objects.get(name) for name in ("loss", "grad_norm"))
        found = {"loss": loss, "grad_norm": norm}
        means = {name: mean_of(local(value)) for name, value in found.items() if value is not None}
        if self.saver.run.context.computation.skips_overflow and not math.isfinite(
            means.get("grad_norm") or 0.0
        ):
            return {}  # the trainer has not updated the weights
        return {name: mean for name, mean in means.items() if mean is not None}

    def window(self, steps: int) -> tuple[int, DataPosition | None, int]:
        run = self.saver.run
        batch, (_, end) = int(run.trainer.global_batch_size), run.data_at(self.step)
        if run.is_balanced:  # mindformers finds its position itself
            return self.step, None, 0
        if end is not None and end.samples >= batch:
            end = replace(end, samples=end.samples - batch)
        elif end is not None:  # the last step of a pass
            end = replace(end, passes=end.passes - 1, samples=(run.steps_per_pass - 1) * batch)
        return self.step, end, steps * batch


class RunCallback:
    """Saves the checkpoints of a training. Its arguments are those of mindformers'
    ``CheckpointCallback`` in the installed release, from which the class that is used inherits, too
    (``make_callback_class``). That one saves what is left to it.

    Raises:
        SaveError: In a step, if a save failed and ``mindresume.on_save_error`` is ``raise``, or
            after ``max_failed_saves`` failures in a row.
        LeaseHeldError: Another job saves into the folder.
    """

    built_in: type

    def __init__(self, *args: Any, **kwargs: Any):
        bound = signature(self.built_in.__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments
        super().__init__(*bound.args[1:], **bound.kwargs)
        self._mindresume = (
            None if asked.get("save_trainable_only") else RunSaver(asked, runtime.monotonic())
        )

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        context = training_context.current()
        if self._mindresume is None:
            context.emit(
                Notice(
                    "save_trainable_only: the checkpoints of adapters alone are saved by "
                    "mindformers"
                )
            )
        elif context.run is None:
            context.emit(
                Notice(
                    "this training was not started by Trainer.train, so mindformers saves its "
                    "checkpoints"
                )
            )
            self._mindresume = None
        if self._mindresume is None:
            super().on_train_begin(args, state, **kwargs)
        else:
            check_callbacks(context.run.trainer, self.built_in)
            self._mindresume.begin(context.run, kwargs.get("model"), kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        saver = self._mindresume
        if saver is None:
            super().on_step_end(args, state, **kwargs)
        elif saver.training.end_step(_PyNativeState(saver, state, kwargs)):
            # the condition of the trainer's loop: a rank was asked to stop
            state.max_steps = state.global_step

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        saver = self._mindresume
        if saver is None:
            super().on_train_end(args, state, **kwargs)
        else:
            saver.training.end(_PyNativeState(saver, state, kwargs))


def make_callback_class(built_in: type) -> type:
    """Returns the callback that takes the place of ``built_in`` in the trainer."""
    return type(
        "CheckpointCallback",
        (RunCallback, built_in),
        {"built_in": built_in, "__doc__": RunCallback.__doc__},
    )


def check_callbacks(trainer: Any, built_in: type) -> None:
    """Raises ConfigError if two callbacks would save into the same folder, for example one of the
    user's."""
    folders = [
        os.path.realpath(callback.save_path)
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, built_in)
    ]
    twice = next((folder for folder in folders if folders.count(folder) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two callbacks of type {built_in.__name__} save into {twice}: each would overwrite "
            "and remove checkpoints of the other. Remove one of them, or give it another save_path"
        )
