"""Wraps functions of mindformers' PyNative trainer. ``WRAPPERS`` has one for each row of ``upstream.PYNATIVE``."""
from __future__ import annotations

from typing import Any

from mindresume.coordination import preemption
from mindresume.mindformers import job_start, training_context
from mindresume.mindformers.pynative import checkpoint_load
from mindresume.mindformers.pynative.checkpoint_callback import make_callback_class
from mindresume.mindformers.pynative.training_run import TrainingRun, configuration_of
from mindresume.mindformers.wrapping import Call, wrapper

_RUN = "_mindresume_run"                # attribute of a trainer while it trains


def _run_of(trainer: Any) -> TrainingRun | None:
    return getattr(trainer, _RUN, None)


@wrapper
def _train(call: Call) -> Any:
    trainer, result = call["self"], None                    # the result of a training that is complete already
    config = configuration_of(trainer)
    with training_context.training(config) as context:
        context.progress.dataset_identity = job_start.fingerprint(config, context)
        run = TrainingRun(trainer, config, context)
        setattr(trainer, _RUN, run)
        context.run = run
        try:
            result = call()
        finally:
            delattr(trainer, _RUN)
    if context.progress.stop_reason in preemption.SIGNALS:
        raise SystemExit(preemption.STATUS)
    return result


@wrapper
def _load_checkpoint(call: Call) -> Any:
    run = _run_of(call["self"])
    if run is None or checkpoint_load.is_left_to_mindformers(run, call["checkpoint_path"]):
        return call()
    if not run.is_loaded:
        checkpoint_load.load(run, call["checkpoint_path"])
        run.is_loaded = True
    return None


@wrapper
def _create_dataset_iterator(call: Call) -> Any:
    run = _run_of(call["self"])
    if run is not None:
        if not run.iterators:
            checkpoint_load.end_without_saves(run)
            checkpoint_load.begin_data(run)
        run.begin_pass(call["dataset"])
    return call()


@wrapper
def _step_begin(call: Call) -> Any:
    result, run = call(), training_context.current().run
    if run is not None:
        checkpoint_load.check_loaded(run)
    return result


WRAPPERS = {
    "Trainer.train": _train,
    "Trainer._load_checkpoint": _load_checkpoint,
    "Trainer._create_dataset_iterator": _create_dataset_iterator,
    "CallbackHandler.on_step_begin": _step_begin,
    "CheckpointCallback": make_callback_class,
}
