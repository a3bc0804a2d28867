"""Wraps functions of mindformers' graph trainer: selection at the start, counters, and load. No file of mindformers is changed.

    MindFormerRegister.get_cls       ─▶ removes the documented data keys below `trainer:` before the trainer's constructor
    Trainer.train / finetune
      _check_config_rules             ─▶ select_checkpoint: scan, verify, agree; or a fresh start
      get_resume_checkpoint           ─▶ the name of the selected file
      load_resume_context_from_...    ─▶ restore_progress: initial step and epoch, loss scale
      _resume_hf_iterable_dataset     ─▶ streaming data continues at its own position
      check_runner_config             ─▶ records the dataset and sink size; ends a training that is already complete
      transform_and_load_checkpoint   ─▶ load_resume: loads what this rank verified, and verifies it again while it is read
      Model.train                     ─▶ FirstStep: the parameters are compared with what was loaded

Checkpoint 2.0 (``use_legacy_format: False``) has wrappers of its own. ``mindresume.mindformers.graph_load`` loads.
"""
from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

from mindresume.coordination import preemption
from mindresume.coordination.collectives import gather_results, run_on_all
from mindresume.coordination.rank_heartbeat import COMPILING, LOADING
from mindresume.errors import TrainingCompleteError
from mindresume.events import Notice
from mindresume.formats.rank_folder_naming import name_for_rank
from mindresume.formatting import counted
from mindresume.mindformers import (
    adapter,
    counters,
    graph_load,
    heartbeat,
    hf_streaming,
    job_start,
    load_request,
    training_context,
)
from mindresume.mindformers.monitor_arguments import check_callbacks
from mindresume.mindformers.pretrained_config import without_foreign_keys
from mindresume.mindformers.wrapping import argument_binder
from mindresume.resume.data_skip import DATA_KEYS, lift_data_skip
from mindresume.storage.mounts import is_shared
from mindresume.storage.posix import PosixStorage

# ---- the wrappers ----------------------------------------------------------------------------------------------------

def _wrap_train(original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result, stopped = None, ""
        with training_context.training(self.config) as context:
            result = original(self, *args, **kwargs)
            stopped = context.progress.stop_reason
            if stopped:                                     # a barrier: the first rank that exits would end the others
                gather_results(context.group, lambda: None)
        if stopped in preemption.SIGNALS:
            raise SystemExit(preemption.STATUS)
        return result
    return run


def _wrap_inference(task: str, original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with training_context.inference(task, self.config):
            return original(self, *args, **kwargs)
    return run


def _wrap_check_config_rules(original: Any) -> Any:
    @functools.wraps(original)
    def check(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = training_context.current()
        for note in lift_data_skip(self.config):
            context.emit(Notice(note))
        if context.task == load_request.TRAIN:
            check_callbacks(adapter.built_in_monitor().__init__, self.config.get("callbacks") or ())
            context.progress.dataset_identity = job_start.fingerprint(self.config, context)
            with context.progress.timed_load():
                adapter.convert_health_keys(self)
                job_start.select_checkpoint(self.config, context)
        elif context.task and not getattr(getattr(self, "trainer", None), "pipeline_task", None):
            # if there is a pipeline_task, it has loaded the weights already
            job_start.select_weights(self.config, context.task, context, PosixStorage())
        return original(self, *args, **kwargs)
    return check


def _wrap_get_last_checkpoint(original: Any) -> Any:
    """Returns the checkpoint folder in a training with ``resume_from_checkpoint=True``. mindformers takes the newest file of its
    rank by modification time, which after a crash is one of a save that never completed."""
    @functools.wraps(original)
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        if training_context.current().task != load_request.TRAIN:
            return original(self, *args, **kwargs)
        return os.path.join(self.config.output_dir, adapter.CHECKPOINTS)
    return get


def _wrap_get_cls(original: Any) -> Any:
    """Removes ``ignore_data_skip`` and ``data_skip_steps`` below ``trainer:`` (documents 002 and 003) from the arguments of the
    trainer's constructor, which would raise a TypeError. The section ``trainer:`` can also name mindresume as a plug-in; this
    works too, because the registry loads the plug-in before it looks up the class."""
    from mindformers.tools.register import MindFormerModuleType
    bind = argument_binder(original)

    @functools.wraps(original)
    def get_cls(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if bind(args, kwargs)["module_type"] != MindFormerModuleType.TRAINER:
            return found

        @functools.wraps(found, updated=())
        def build(*args: Any, **kwargs: Any) -> Any:
            return found(*args, **{key: value for key, value in kwargs.items() if key not in DATA_KEYS})
        return build
    return get_cls


def _wrap_get_resume_checkpoint(original: Any) -> Any:
    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> Any:
        context = training_context.current()
        plan = context.plan
        if not plan.resumes:
            return original(*args, **kwargs)
        if plan.open_source is not None:
            return True                                     # another number of ranks, or the file of a rank is missing
        name = os.path.basename(plan.choice.chosen.first.path)
        return name_for_rank(name, context.group.rank, plan.choice.chosen.format)
    return get


def _wrap_is_hf_checkpoint(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def is_hf(*args: Any, **kwargs: Any) -> bool:
        # mindformers 1.9.0 raises an error if the path is a file, so it could not resume from one
        return os.path.isdir(bind(args, kwargs)["checkpoint_path"]) and original(*args, **kwargs)
    return is_hf


def _wrap_is_publicly_accessible_path(original: Any) -> Any:
    """Compares SHARED_PATHS folder by folder (mindformers treats /data01 as a part of /data), and recognises shared file systems
    other than NFS. For other paths mindformers is asked about ``/``: in a job of one node and in ModelArts its answer does not
    depend on the path."""
    parameters = signature(original)

    @functools.wraps(original)
    def is_accessible(*args: Any, **kwargs: Any) -> bool:
        given = parameters.bind(*args, **kwargs)
        if is_shared(given.arguments["path"], os.environ.get("SHARED_PATHS", "")):
            return True
        given.arguments["path"] = os.sep
        return original(*given.args, **given.kwargs)
    return is_accessible


def _wrap_resume_ckpt_path_with_strategy(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def find(*args: Any, **kwargs: Any) -> Any:
        # With MS_ENABLE_TFT mindformers would take the newest file by modification time instead of the selected one.
        if training_context.current().plan.resumes:
            return adapter.load_path(bind(args, kwargs)["config"])
        return original(*args, **kwargs)
    return find


def _wrap_load_resume_context(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> None:
        context = training_context.current()
        if not context.plan.resumes:
            return original(*args, **kwargs)
        given = bind(args, kwargs)
        return counters.restore_progress(given["config"], given["dataset"].get_dataset_size(), context)
    return load


def _wrap_resume_hf_iterable_dataset(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def resume(*args: Any, **kwargs: Any) -> None:
        context = training_context.current()
        if context.progress.restored is None:
            return original(*args, **kwargs)
        return run_on_all(context.group,
                          lambda: hf_streaming.resume_data(bind(args, kwargs)["dataset"], context.progress.restored))
    return resume


def _wrap_check_runner_config(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def check(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        given, context = bind(args, kwargs), training_context.current()
        config, run, resumes = given["config"], context.progress, context.plan.resumes
        runner, run.dataset_size = config.runner_config, config.data_size
        if not resumes:
            run.origin = counters.fresh_origin(config, given["dataset"], context)
        run.sink_size = runner.sink_size if runner.sink_mode else None
        if resumes and runner.initial_epoch >= runner.epochs:
            raise TrainingCompleteError(f"the training is complete: step {runner.initial_step} is the end of "
                                        f"{counted(runner.origin_epochs, 'epoch')} of {counted(config.data_size, 'step')}. "
                                        f"Nothing was trained or saved. To train longer, raise runner_config.epochs")
    return check


def _wrap_preload_ckpt(original: Any) -> Any:
    @functools.wraps(original)
    def preload(*args: Any, **kwargs: Any) -> Any:
        plan = training_context.current().plan
        return None if plan.resumes or plan.weights_only else original(*args, **kwargs)
    return preload


def _wrap_transform_and_load_checkpoint(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        given, context = bind(args, kwargs), training_context.current()
        config, model, dataset, resources = given["config"], given["model"], given["dataset"], context.resources
        if context.plan.weights_only and graph_load.load_weights(config, model, given["network"], dataset, context,
                                                                 given.get("do_eval", False), given.get("do_predict", False)):
            return None
        if not context.plan.resumes or config.only_save_strategy:
            return original(*args, **kwargs)
        try:
            return graph_load.load_resume(config, model, dataset, context)
        finally:
            resources.drop_verified_bytes()
    return load


def _wrap_clear_auto_trans_output(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def clear(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        job_start.check_not_cleared(adapter.output_root(), given.get("load_checkpoint"), given.get("src_strategy_path_or_dir"),
                                    load_ckpt_format=given.get("load_ckpt_format", "ckpt"))
        return original(*args, **kwargs)
    return clear


# ---- Checkpoint 2.0 ---------------------------------------------------------------------------------------------------

def _wrap_get_checkpoint_path(original: Any) -> Any:
    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> str:
        request = training_context.current().plan.iterations    # mindformers itself might select another iteration
        return request.path if request else original(*args, **kwargs)
    return get


def _wrap_train_dataset_postprocess(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def postprocess(*args: Any, **kwargs: Any) -> Any:
        dataset, context = original(*args, **kwargs), training_context.current()
        if request := context.plan.iterations:
            config = context.objects.config = bind(args, kwargs)["config"]
            if request.resume:
                context.objects.common = counters.common_info(config, dataset.get_dataset_size(), context)
        return dataset
    return postprocess


def _wrap_load_common(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def load_common(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given, context = bind((cls, *args), kwargs), training_context.current()
        request, objects = context.plan.iterations, context.objects
        if not request or objects.common is None or os.path.dirname(given["common_filename"]) != request.path:
            return original(cls, *args, **kwargs)
        common, objects.common = objects.common, None   # once: a fault-tolerant job may load other checkpoints later
        return cls(**common)
    return load_common


def _wrap_model(original: Any) -> Any:
    @functools.wraps(original, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        made, context = original(*args, **kwargs), training_context.current()
        if context.plan.iterations:
            context.objects.model = made
        return made
    return make


def _wrap_model_train(original: Any) -> Any:
    from mindresume.mindformers.first_step import FirstStep  # here: its base class is MindSpore's
    bind = argument_binder(original)

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        if training_context.current().task == load_request.TRAIN:
            asked = given["callbacks"]
            others = asked if isinstance(asked, Iterable) else [] if asked is None else [asked]
            given["callbacks"] = [*others, FirstStep()]             # behind all others: what they change is seen
        return original(**given)
    return train


def _wrap_compile_model(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def compile_model(*args: Any, **kwargs: Any) -> Any:
        context = training_context.current()
        if not context.plan.iterations:
            return original(*args, **kwargs)
        if adapter.is_parallel():
            given = bind(args, kwargs)
            heartbeat.enter(COMPILING)
            adapter.compile_for_load(context.objects.config, given["model"], given["dataset"], context.group)
        return None
    return compile_model


def _wrap_load_checkpoint(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        context = training_context.current()
        if not context.plan.iterations:
            return original(*args, **kwargs)
        given = bind(args, kwargs)
        heartbeat.enter(LOADING)
        try:
            with context.progress.timed_load():
                return graph_load.load_iterations(given["network"], given.get("optimizer"), context)
        finally:
            context.resources.drop_verified_bytes()
    return load


def _wrap_merge_model_config(original: Any) -> Any:
    bind = argument_binder(original)

    @functools.wraps(original)
    def merge(*args: Any, **kwargs: Any) -> Any:
        merged = original(*args, **kwargs)
        return without_foreign_keys(merged, bind(args, kwargs)["config"] or {}) if isinstance(merged, dict) else merged
    return merge


WRAPPERS: dict[str, Callable[[Any], Any]] = {           # {name of a symbol: its wrapper}; several modules may import a symbol
    "Trainer.train": _wrap_train,
    "Trainer.finetune": _wrap_train,
    "Trainer.evaluate": functools.partial(_wrap_inference, load_request.EVALUATE),
    "Trainer.predict": functools.partial(_wrap_inference, load_request.PREDICT),
    "Trainer._check_config_rules": _wrap_check_config_rules,
    "Trainer.get_last_checkpoint": _wrap_get_last_checkpoint,
    "MindFormerRegister.get_cls": _wrap_get_cls,
    "get_resume_checkpoint": _wrap_get_resume_checkpoint,
    "clear_auto_trans_output": _wrap_clear_auto_trans_output,
    "is_hf_checkpoint": _wrap_is_hf_checkpoint,
    "is_publicly_accessible_path": _wrap_is_publicly_accessible_path,
    "BaseTrainer.resume_ckpt_path_with_strategy": _wrap_resume_ckpt_path_with_strategy,
    "load_resume_context_from_checkpoint": _wrap_load_resume_context,
    "_resume_hf_iterable_dataset": _wrap_resume_hf_iterable_dataset,
    "check_runner_config": _wrap_check_runner_config,
    "preload_ckpt": _wrap_preload_ckpt,
    "transform_and_load_checkpoint": _wrap_transform_and_load_checkpoint,
    "get_checkpoint_path": _wrap_get_checkpoint_path,
    "get_healthy_checkpoint_path": _wrap_get_checkpoint_path,
    "BaseTrainer._train_dataset_postprocess": _wrap_train_dataset_postprocess,
    "CommonInfo.load_common": _wrap_load_common,
    "Model": _wrap_model,
    "Model.train": _wrap_model_train,
    "compile_model": _wrap_compile_model,
    "load_checkpoint": _wrap_load_checkpoint,
    "load_hf_checkpoint": _wrap_load_checkpoint,
    "merge_model_config": _wrap_merge_model_config,
}
