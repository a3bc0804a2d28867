"""Wraps functions of mindformers: selection at the start, counters, and load. No file of
mindformers is changed.

    MindFormerRegister.get_cls        ─▶ removes the documented data keys below `trainer:` before
                                         the trainer's constructor
    Trainer.train / finetune
      _check_config_rules             ─▶ select_checkpoint: scan, verify, agree; or a fresh start
      get_resume_checkpoint           ─▶ the name of the selected file
      load_resume_context_from_...    ─▶ restore_progress: initial step and epoch, loss scale
      _resume_hf_iterable_dataset     ─▶ streaming data continues at its own position
      check_runner_config             ─▶ records the dataset and sink size; ends a training that is
                                         already complete
      transform_and_load_checkpoint   ─▶ load_resume: loads what this rank verified, and verifies it
                                         again while it is read
      Model.train                     ─▶ FirstStep: the parameters are compared with what was loaded

Checkpoint 2.0 (``use_legacy_format: False``) has wrappers of its own, and so has the PyNative
trainer. ``mindresume.mindformers.graph_load`` and ``pynative.checkpoint_load`` load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial, update_wrapper, wraps
from inspect import signature
from typing import Any

from mindresume.coordination.collectives import run_on_all
from mindresume.coordination.rank_heartbeat import COMPILING, LOADING
from mindresume.errors import TrainingCompleteError
from mindresume.events import Notice
from mindresume.formats.rank_folders import name_for_rank
from mindresume.formatting import counted
from mindresume.mindformers import (
    adapter,
    configuration,
    counters,
    graph_load,
    heartbeat,
    job_start,
    training_context,
)
from mindresume.mindformers.kept_graphs import keep_graph
from mindresume.mindformers.pynative import checkpoint_load
from mindresume.mindformers.pynative.checkpoint_callback import make_callback_class
from mindresume.mindformers.pynative.training_run import TrainingRun, configuration_of
from mindresume.mindformers.upstream import Hooks
from mindresume.resume.progress import DATA_KEYS, lift_data_skip
from mindresume.storage.posix import is_shared

# ---- calls of wrapped functions ------------------------------------------------------------------


class Call:
    """One call of a wrapped function: ``call()`` calls the function itself."""

    def __init__(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.original = original
        self.args = args
        self.kwargs = kwargs

    def __call__(self, **changed: Any) -> Any:
        """Calls the function, with the arguments ``changed`` instead of those of the call."""
        if not changed:
            return self.original(*self.args, **self.kwargs)
        bound = signature(self.original).bind(*self.args, **self.kwargs)
        bound.arguments.update(changed)
        return self.original(*bound.args, **bound.kwargs)

    @property
    def holder(self) -> Any:
        """Returns the object or class whose method is called."""
        return next(iter(self.arguments.values()))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Returns {parameter of the function: its argument}."""
        bound = signature(self.original).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return {**bound.arguments, **bound.arguments.get("kwargs", {})}


class wrapper:  # noqa: N801  a decorator
    """Makes the wrapped form of an upstream function or class, whose calls go to ``replacement``:
    it gets the call, and the arguments that it names. One with a default may be absent in the
    installed release.

    Attributes:
        looked_up: the names of these arguments.
    """

    def __init__(self, replacement: Callable[..., Any]):
        self._replacement = replacement
        _, *self.looked_up = signature(replacement).parameters
        update_wrapper(self, replacement)

    def __call__(self, original: Any) -> Any:
        @wraps(original, updated=())
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            call = Call(original, args, kwargs)
            given = {
                name: call.arguments[name] for name in self.looked_up if name in call.arguments
            }
            return self._replacement(call, **given)

        return wrapped


# ---- Checkpoint 1.0, and both formats ------------------------------------------------------------


@wrapper
def _train(call: Call) -> Any:
    result = None  # of a training that is complete already
    with training_context.training(call.holder.config) as context:
        result = call()
        # a barrier: the first rank that exits would end the others
        if context.progress.stop_reason:
            context.group.gather(b"")
    return result


@wrapper
def _evaluate(call: Call) -> Any:
    with training_context.inference(configuration.EVALUATE, call.holder.config):
        return call()


@wrapper
def _predict(call: Call) -> Any:
    with training_context.inference(configuration.PREDICT, call.holder.config):
        return call()


@wrapper
def _check_config_rules(call: Call) -> Any:
    # here: its base class is mindformers'
    from mindresume.mindformers.checkpoint_monitor import check_callbacks

    trainer, context = call.holder, training_context.current()
    for note in lift_data_skip(trainer.config):
        context.emit(Notice(note))
    if context.task == configuration.TRAIN:
        check_callbacks(trainer.config.get("callbacks") or ())
        if context.settings.keep_graphs:
            context.graph = keep_graph(
                trainer.config, adapter.output_root(), context.group, context.emit
            )
        context.progress.dataset_identity = job_start.fingerprint(trainer.config, context)
        with context.progress.timed_load():
            adapter.convert_health_keys(trainer)
            job_start.select_checkpoint(trainer.config, context)
    elif context.task and not getattr(getattr(trainer, "trainer", None), "pipeline_task", None):
        # if there is a pipeline_task, it has loaded the weights already
        job_start.select_weights(trainer.config, context.task, context)
    return call()


@wrapper
def _get_last_checkpoint(call: Call) -> Any:
    """Returns the checkpoint folder in a training with ``resume_from_checkpoint=True``. mindformers
    takes the newest file of its rank by modification time, which after a crash is one of a save
    that never completed."""
    if training_context.current().task != configuration.TRAIN:
        return call()
    return os.path.join(call.holder.config.output_dir, adapter.CHECKPOINTS)


@wrapper
def _get_cls(call: Call, module_type: Any) -> Any:
    """Removes ``ignore_data_skip`` and ``data_skip_steps`` below ``trainer:`` (documents 002 and
    003) from the arguments of the trainer's constructor, which would raise a TypeError. The section
    ``trainer:`` can also name mindresume as a plug-in; this works too, because the registry loads
    the plug-in before it looks up the class."""
    from mindformers.tools.register import MindFormerModuleType

    made = call()
    return _without_data_keys(made) if module_type == MindFormerModuleType.TRAINER else made


@wrapper
def _without_data_keys(call: Call) -> Any:
    return call.original(
        *call.args, **{key: value for key, value in call.kwargs.items() if key not in DATA_KEYS}
    )


@wrapper
def _get_resume_checkpoint(call: Call) -> Any:
    context = training_context.current()
    plan = context.plan
    if not plan.resumes:
        return call()
    if plan.open_source is not None:
        # another number of ranks, or the file of a rank is missing
        return True
    name = os.path.basename(plan.choice.chosen.first.path)
    return name_for_rank(name, context.group.rank, plan.choice.chosen.format)


@wrapper
def _is_hf_checkpoint(call: Call, checkpoint_path: Any) -> bool:
    # mindformers 1.9.0 raises an error if the path is a file, so it could not resume from one
    return os.path.isdir(checkpoint_path) and call()


@wrapper
def _is_publicly_accessible_path(call: Call, path: Any) -> bool:
    """Compares SHARED_PATHS folder by folder (mindformers treats /data01 as a part of /data), and
    recognises shared file systems other than NFS. For other paths mindformers is asked about ``/``:
    in a job of one node and in ModelArts its answer does not depend on the path."""
    return is_shared(path, os.environ.get("SHARED_PATHS", "")) or call(path=os.sep)


@wrapper
def _resume_ckpt_path_with_strategy(call: Call, config: Any) -> Any:
    # With MS_ENABLE_TFT mindformers would take the newest file by modification time instead of the
    # selected one.
    return adapter.load_path(config) if training_context.current().plan.resumes else call()


@wrapper
def _load_resume_context(call: Call, config: Any, dataset: Any) -> None:
    context = training_context.current()
    if not context.plan.resumes:
        return call()
    return counters.restore_progress(config, dataset.get_dataset_size(), context)


@wrapper
def _resume_hf_iterable_dataset(call: Call, dataset: Any) -> None:
    context = training_context.current()
    if not context.plan.resumes:
        return call()
    return run_on_all(
        context.group, partial(counters.resume_streaming, dataset, context.progress.origin)
    )


@wrapper
def _check_runner_config(call: Call, config: Any, dataset: Any) -> None:
    call()
    context = training_context.current()
    runner = config.runner_config
    run = context.progress
    resumes = context.plan.resumes
    run.dataset_size = config.data_size
    if not resumes:
        counters.skip_data(config, dataset, context)
    run.sink_size = runner.sink_size if runner.sink_mode else None
    if resumes and runner.initial_epoch >= runner.epochs:
        raise TrainingCompleteError(
            f"the training is complete: step {runner.initial_step} is the end of "
            f"{counted(runner.origin_epochs, 'epoch')} of {counted(config.data_size, 'step')}. "
            f"Nothing was trained or saved. To train longer, raise runner_config.epochs"
        )


@wrapper
def _preload_ckpt(call: Call) -> Any:
    plan = training_context.current().plan
    return None if plan.resumes or plan.weights_only else call()


@wrapper
def _transform_and_load_checkpoint(
    call: Call,
    config: Any,
    model: Any,
    dataset: Any,
    network: Any,
    do_eval: bool = False,
    do_predict: bool = False,
) -> Any:
    context = training_context.current()
    if context.plan.weights_only and graph_load.load_weights(
        config, model, network, dataset, context, do_eval, do_predict
    ):
        return None
    if not context.plan.resumes or config.only_save_strategy:
        return call()
    try:
        return graph_load.load_resume(config, model, dataset, context)
    finally:
        context.resources.drop_verified_bytes()


@wrapper
def _clear_auto_trans_output(
    call: Call,
    load_checkpoint: Any = None,
    src_strategy_path_or_dir: Any = None,
    load_ckpt_format: str = "ckpt",
) -> Any:
    job_start.check_not_cleared(
        adapter.output_root(),
        load_checkpoint,
        src_strategy_path_or_dir,
        load_ckpt_format=load_ckpt_format,
    )
    return call()


@wrapper
def _model_train(call: Call, callbacks: Any = None) -> Any:
    # here: its base class is MindSpore's
    from mindresume.mindformers.checkpoint_monitor import FirstStep

    if training_context.current().task != configuration.TRAIN:
        return call()
    others = (
        callbacks if isinstance(callbacks, Iterable) else [] if callbacks is None else [callbacks]
    )
    return call(callbacks=[*others, FirstStep()])  # behind all others: what they change is seen


@wrapper
def _get_loss_output(call: Call) -> Any:
    context, outputs = training_context.current(), call()
    if context.proof is not None:
        loss, _, scale, learning_rate, _ = outputs
        context.seen.monitor(
            loss=loss if adapter.has_loss() else None,
            loss_scale=scale,
            learning_rate=learning_rate,
        )
    return outputs


# ``config.json`` of ``pretrained_model_dir`` as transformers 4.57 and later write it has keys that
# mindformers does not know and refuses: 1.8.0 for all models, 1.9.0 and 2.0.0 for Qwen3. These are
# no settings of the network. dtype: of the stored weights, torch_dtype until transformers 4.56.
# rope_interleave: formats/huggingface.py refuses weights that need another value than mindformers'
# own.
_FOREIGN = ("dtype", "pretraining_tp", "rope_interleave")
# {size: the one that it includes}; mindformers takes them for one setting
_COMPUTED = {"qk_head_dim": "qk_nope_head_dim"}


def without_foreign_keys(
    merged: Mapping[str, Any], configured: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a model configuration without the keys above.

    Args:
        merged: the configuration that mindformers made of ``config.json`` and of the user's.
        configured: the user's configuration; its keys stay.
    """
    dropped = {*_FOREIGN, *(key for key, other in _COMPUTED.items() if other in merged)} - set(
        configured
    )
    return {key: value for key, value in merged.items() if key not in dropped}


@wrapper
def _merge_model_config(call: Call, config: Any) -> Any:
    merged = call()
    return without_foreign_keys(merged, config or {}) if isinstance(merged, dict) else merged


# ---- Checkpoint 2.0 ------------------------------------------------------------------------------


@wrapper
def _get_checkpoint_path(call: Call) -> str:
    # mindformers itself might select another iteration
    request = training_context.current().plan.iterations
    return request.path if request else call()


@wrapper
def _train_dataset_postprocess(call: Call, config: Any) -> Any:
    dataset, context = call(), training_context.current()
    if request := context.plan.iterations:
        context.objects.config = config
        if request.resume:
            context.objects.common = counters.common_info(
                config, dataset.get_dataset_size(), context
            )
    return dataset


@wrapper
def _load_common(call: Call, common_filename: Any) -> Any:
    context = training_context.current()
    request, objects = context.plan.iterations, context.objects
    if not request or objects.common is None or os.path.dirname(common_filename) != request.path:
        return call()
    # once: a fault-tolerant job may load other checkpoints later
    common, objects.common = (objects.common, None)
    return call.holder(**common)


@wrapper
def _model(call: Call) -> Any:
    made, context = call(), training_context.current()
    if context.plan.iterations:
        context.objects.model = made
    return made


@wrapper
def _compile_model(call: Call, model: Any, dataset: Any) -> Any:
    context = training_context.current()
    if not context.plan.iterations:
        return call()
    if adapter.is_parallel():
        heartbeat.enter(COMPILING)
        adapter.compile_for_load(context.objects.config, model, dataset, context.group)
    return None


@wrapper
def _load_checkpoint(call: Call, network: Any, optimizer: Any = None) -> Any:
    context = training_context.current()
    if not context.plan.iterations:
        return call()
    heartbeat.enter(LOADING)
    try:
        with context.progress.timed_load():
            return graph_load.load_iterations(network, optimizer, context)
    finally:
        context.resources.drop_verified_bytes()


# ---- the PyNative trainer ------------------------------------------------------------------------


@wrapper
def _train_pynative(call: Call) -> Any:
    trainer = call.holder
    config = configuration_of(trainer)
    with training_context.training(config) as context:
        context.progress.dataset_identity = job_start.fingerprint(config, context)
        context.run = TrainingRun(trainer, config, context)
        return call()
    return None  # a training that is complete already


def _run_of(trainer: Any) -> TrainingRun | None:
    """Returns the training of this trainer, while it trains."""
    run = training_context.current().run
    return run if run is not None and run.trainer is trainer else None


@wrapper
def _load_pynative(call: Call, checkpoint_path: Any) -> Any:
    run = _run_of(call.holder)
    if run is None or checkpoint_load.is_left_to_mindformers(run, checkpoint_path):
        return call()
    if not run.is_loaded:
        checkpoint_load.load(run, checkpoint_path)
        run.is_loaded = True
    return None


@wrapper
def _create_dataset_iterator(call: Call, dataset: Any) -> Any:
    run = _run_of(call.holder)
    if run is not None:
        if not run.iterators:
            checkpoint_load.end_without_saves(run)
            checkpoint_load.begin_data(run)
        run.begin_pass(dataset)
    return call()


@wrapper
def _step_begin(call: Call) -> Any:
    result, run = call(), training_context.current().run
    if run is not None:
        checkpoint_load.check_loaded(run)
    return result


@wrapper
def _get_batch(call: Call) -> Any:
    batch, context = call(), training_context.current()
    heartbeat.begin_step()
    # with a broadcast among ranks it is on the device
    if context.proof is not None and not getattr(call.holder, "enable_data_broadcast", False):
        context.seen.batch(batch[name] for name in sorted(batch))
    return batch


@wrapper
def _print_log(call: Call, log_info: Any) -> Any:
    context = training_context.current()
    if context.proof is not None:
        names = ("loss", "learning_rate", "loss_scale")
        context.seen.monitor(**{name: log_info.get(name) for name in names})
    return call()


@wrapper
def _step_end(call: Call, state: Any) -> Any:
    result, context = call(), training_context.current()
    run, proof = context.run, context.proof
    if run is not None and proof is not None:
        step = int(state.global_step)
        proof.end_step(context.seen.row(step, int(state.epoch), run.data_at(step)[0]))
    return result


WRAPPERS: Hooks = {  # {name of a symbol: its wrapper}; several modules may import a symbol
    "Trainer.train": _train,
    "Trainer.finetune": _train,
    "Trainer.evaluate": _evaluate,
    "Trainer.predict": _predict,
    "Trainer._check_config_rules": _check_config_rules,
    "Trainer.get_last_checkpoint": _get_last_checkpoint,
    "MindFormerRegister.get_cls": _get_cls,
    "get_resume_checkpoint": _get_resume_checkpoint,
    "clear_auto_trans_output": _clear_auto_trans_output,
    "is_hf_checkpoint": _is_hf_checkpoint,
    "is_publicly_accessible_path": _is_publicly_accessible_path,
    "BaseTrainer.resume_ckpt_path_with_strategy": _resume_ckpt_path_with_strategy,
    "load_resume_context_from_checkpoint": _load_resume_context,
    "_resume_hf_iterable_dataset": _resume_hf_iterable_dataset,
    "check_runner_config": _check_runner_config,
    "preload_ckpt": _preload_ckpt,
    "transform_and_load_checkpoint": _transform_and_load_checkpoint,
    "get_checkpoint_path": _get_checkpoint_path,
    "get_healthy_checkpoint_path": _get_checkpoint_path,
    "BaseTrainer._train_dataset_postprocess": _train_dataset_postprocess,
    "CommonInfo.load_common": _load_common,
    "Model": _model,
    "Model.train": _model_train,
    "compile_model": _compile_model,
    "_get_loss_output": _get_loss_output,
    "load_checkpoint": _load_checkpoint,
    "load_hf_checkpoint": _load_checkpoint,
    "merge_model_config": _merge_model_config,
}

PYNATIVE_WRAPPERS: Hooks = {  # one for each row of ``upstream.PYNATIVE``
    "Trainer.train": _train_pynative,
    "Trainer._load_checkpoint": _load_pynative,
    "Trainer._create_dataset_iterator": _create_dataset_iterator,
    "Trainer.get_batch": _get_batch,
    "LossCallback._print_log": _print_log,
    "CallbackHandler.on_step_begin": _step_begin,
    "CallbackHandler.on_step_end": _step_end,
    "CheckpointCallback": make_callback_class,
}
