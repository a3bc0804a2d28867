"""Wraps functions of mindformers' PyNative trainer. ``WRAPPERS`` has one for each row of ``upstream.PYNATIVE``."""
from __future__ import annotations

import functools
from typing import Any

from mindresume.coordination import preemption
from mindresume.mindformers import job_start, training_context
from mindresume.mindformers.pynative import checkpoint_load
from mindresume.mindformers.pynative.checkpoint_callback import make_callback_class
from mindresume.mindformers.pynative.training_run import TrainingRun, configuration_of
from mindresume.mindformers.wrapping import argument_binder

_RUN = "_mindresume_run"                # attribute of a trainer while it trains


def _run_of(trainer: Any) -> TrainingRun | None:
    return getattr(trainer, _RUN, None)


def _wrap_train(original: Any) -> Any:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, result = configuration_of(self), None
        with training_context.training(config) as context:
            context.progress.dataset_identity = job_start.fingerprint(config, context)
            run = TrainingRun(self, config, context)
            setattr(self, _RUN, run)
            context.run = run
            try:
                result = original(self, *args, **kwargs)
            finally:
                delattr(self, _RUN)
        if context.progress.stop_reason in preemption.SIGNALS:
            raise SystemExit(preemption.STATUS)
        return result
    return train


def _wrap_load_checkpoint(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        run = _run_of(given["self"])
        if run is None or checkpoint_load.is_left_to_mindformers(run, given["checkpoint_path"]):
            return original(*args, **kwargs)
        if not run.is_loaded:
            checkpoint_load.load(run, given["checkpoint_path"])
            run.is_loaded = True
        return None
    return load


def _wrap_create_dataset_iterator(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        run = _run_of(given["self"])
        if run is not None:
            if not run.iterators:
                checkpoint_load.end_without_saves(run)
                checkpoint_load.begin_data(run)
            run.begin_pass(given["dataset"])
        return original(*args, **kwargs)
    return create


def _wrap_step_begin(original: Any) -> Any:
    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> Any:
        result, run = original(*args, **kwargs), training_context.current().run
        if run is not None:
            checkpoint_load.check_loaded(run)
        return result
    return begin


WRAPPERS = {
    "Trainer.train": _wrap_train,
    "Trainer._load_checkpoint": _wrap_load_checkpoint,
    "Trainer._create_dataset_iterator": _wrap_create_dataset_iterator,
    "CallbackHandler.on_step_begin": _wrap_step_begin,
    "CheckpointCallback": make_callback_class,
}
