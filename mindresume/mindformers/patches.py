"""Wraps functions of mindformers' graph trainer: selection at the start, counters, loading. Nothing is patched on disk.

    MindFormerRegister.get_cls       ─▶ the documented data keys below `trainer:` do not reach the trainer's constructor
    Trainer.train / finetune
      _check_config_rules             ─▶ select_checkpoint: scan, verify, agree; or a fresh start
      get_resume_checkpoint           ─▶ the chosen file's name
      load_resume_context_from_...    ─▶ restore_progress: initial step and epoch, loss scale
      _resume_hf_iterable_dataset     ─▶ streaming data goes on at its own place
      check_runner_config             ─▶ remembers data and sink size; ends a training that is complete already
      transform_and_load_checkpoint   ─▶ load_shard: reads what this rank verified, and verifies it again meanwhile

With ``auto_trans_ckpt`` and for complete weights the last one is ``mindresume.mindformers.auto_transform``. Checkpoint 2.0
(``use_legacy_format: False``) has places of its own, and ``mindresume.mindformers.load_iteration``. Weights alone, for a training
of Checkpoint 1.0 that does not resume, an evaluation or a prediction, are ``mindresume.mindformers.weights_only``.
"""
from __future__ import annotations

import functools
import os
from collections.abc import Callable
from inspect import signature
from typing import Any

from mindresume.coordination import preemption
from mindresume.coordination.collectives import agreed, report
from mindresume.errors import TrainingCompleteError
from mindresume.events import Notice
from mindresume.formats.rank_folder_naming import name_for_rank
from mindresume.mindformers import (
    adapter,
    hf_streaming,
    job_start,
    load_iteration,
    state_restorer,
    training_context,
    weights_only,
)
from mindresume.mindformers.monitor_arguments import check_section
from mindresume.resume.data_skip import DATA_KEYS, lift_data_skip
from mindresume.storage.mounts import is_shared
from mindresume.storage.posix import PosixStorage


def _binder(original: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Returns a function that gives the arguments of a call by the names of ``original``, defaults included."""
    parameters = signature(original)

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return {**bound.arguments, **bound.arguments.get("kwargs", {})}
    return named


# ---- the wrappers --------------------------------------------------------------------------------------------------

def _training(original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result, stopped = None, ""
        with training_context.training(self.config) as context:
            result = original(self, *args, **kwargs)
            stopped = context.progress.stop_reason
            if stopped:                                     # until all ranks are done: who ends first would end the others
                report(context.group, lambda: None)
        if stopped == preemption.BY_SIGNAL:
            raise SystemExit(preemption.STATUS)
        return result
    return run


def _inference(task: str, original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with training_context.inference(task, self.config):
            return original(self, *args, **kwargs)
    return run


def _rules(original: Any) -> Any:
    @functools.wraps(original)
    def check(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = training_context.current()
        for note in lift_data_skip(self.config):
            context.emit(Notice(note))
        if context.task == training_context.TRAIN:
            check_section(adapter.built_in_monitor().__init__, self.config.get("callbacks") or ())
            context.progress.dataset_identity = job_start.fingerprint(self.config, context)
            with context.progress.timed_load():
                job_start.select_checkpoint(self.config, context)
        elif context.task and not getattr(getattr(self, "trainer", None), "pipeline_task", None):    # else it is loaded already
            weights_only.select(self.config, context.task, context, PosixStorage())
        return original(self, *args, **kwargs)
    return check


def _trainer_class(original: Any) -> Any:
    """Keeps ``ignore_data_skip`` and ``data_skip_steps`` below ``trainer:`` (documents 002 and 003) from its constructor, which
    would raise a TypeError. The registry is asked for the class after a plug-in named in that block was loaded; so both ways in
    work."""
    from mindformers.tools.register import MindFormerModuleType
    named = _binder(original)

    @functools.wraps(original)
    def get_cls(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if named(args, kwargs)["module_type"] != MindFormerModuleType.TRAINER:
            return found

        @functools.wraps(found, updated=())
        def build(*args: Any, **kwargs: Any) -> Any:
            return found(*args, **{key: value for key, value in kwargs.items() if key not in DATA_KEYS})
        return build
    return get_cls


def _resume_name(original: Any) -> Any:
    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> Any:
        context = training_context.current()
        plan = context.plan
        if not plan.resumes:
            return original(*args, **kwargs)
        if plan.open_source is not None:
            return True                                     # of another number of ranks, or no file of one rank at all
        name = os.path.basename(plan.choice.chosen.first.path)
        return name_for_rank(name, context.group.rank, plan.choice.chosen.format)
    return get


def _only_folders(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def is_hf(*args: Any, **kwargs: Any) -> bool:
        # 1.9.0 raises for a file and refuses to resume from one
        return os.path.isdir(named(args, kwargs)["checkpoint_path"]) and original(*args, **kwargs)
    return is_hf


def _shared(original: Any) -> Any:
    """Compares SHARED_PATHS by folders (mindformers takes /data01 for a part of /data), and knows file systems beyond NFS. For a
    job of one node, and in ModelArts, mindformers answers before it looks at the path: it is asked about ``/``."""
    parameters = signature(original)

    @functools.wraps(original)
    def is_accessible(*args: Any, **kwargs: Any) -> bool:
        given = parameters.bind(*args, **kwargs)
        if is_shared(given.arguments["path"], os.environ.get("SHARED_PATHS", "")):
            return True
        given.arguments["path"] = os.sep
        return original(*given.args, **given.kwargs)
    return is_accessible


def _path_with_strategy(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def find(*args: Any, **kwargs: Any) -> Any:
        # With MS_ENABLE_TFT mindformers looks for the newest file by time; the choice is already made.
        if training_context.current().plan.resumes:
            return named(args, kwargs)["config"].checkpoint.load_path
        return original(*args, **kwargs)
    return find


def _context(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> None:
        context = training_context.current()
        if not context.plan.resumes:
            return original(*args, **kwargs)
        given = named(args, kwargs)
        return state_restorer.restore_progress(given["config"], given["dataset"].get_dataset_size(), context)
    return load


def _streaming(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def resume(*args: Any, **kwargs: Any) -> None:
        context = training_context.current()
        if context.progress.restored is None:
            return original(*args, **kwargs)
        return agreed(context.group, lambda: hf_streaming.resume_data(named(args, kwargs)["dataset"], context.progress.restored))
    return resume


def _runner_config(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def check(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        given, context = named(args, kwargs), training_context.current()
        config, run, resumes = given["config"], context.progress, context.plan.resumes
        runner, run.dataset_size = config.runner_config, config.data_size
        if not resumes:
            run.origin = state_restorer.fresh_origin(config, given["dataset"], context)
        run.sink_size = runner.sink_size if runner.sink_mode else None
        if resumes and runner.initial_epoch >= runner.epochs:
            raise TrainingCompleteError(f"the training is complete: step {runner.initial_step} is the end of "
                                        f"{runner.origin_epochs} epochs of {config.data_size} steps. Nothing was trained or "
                                        f"saved. For more, raise runner_config.epochs")
    return check


def _preload(original: Any) -> Any:
    @functools.wraps(original)
    def preload(*args: Any, **kwargs: Any) -> Any:
        plan = training_context.current().plan
        return None if plan.resumes or plan.weights_only else original(*args, **kwargs)
    return preload


def _load(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        given, context = named(args, kwargs), training_context.current()
        config, model, dataset, resources = given["config"], given["model"], given["dataset"], context.resources
        if context.plan.weights_only and weights_only.load(config, model, given["network"], dataset, context, resources.storage,
                                                           given.get("do_eval", False), given.get("do_predict", False)):
            return None
        if not context.plan.resumes or config.only_save_strategy:
            return original(*args, **kwargs)
        try:
            return state_restorer.load_chosen(config, model, dataset, context, resources.storage)
        finally:
            resources.drop_verified_bytes()
    return load


def _clear(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def clear(*args: Any, **kwargs: Any) -> Any:
        given = named(args, kwargs)
        job_start.check_not_cleared(adapter.output_root(), given.get("load_checkpoint"), given.get("src_strategy_path_or_dir"),
                                    load_ckpt_format=given.get("load_ckpt_format", "ckpt"))
        return original(*args, **kwargs)
    return clear


# ---- Checkpoint 2.0: where mindformers looks at common.json and loads ------------------------------------------------------

def _folder(original: Any) -> Any:
    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> str:
        request = training_context.current().plan.iterations
        return request.path if request else original(*args, **kwargs)
    return get


def _healthy(original: Any) -> Any:
    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> str:
        request = training_context.current().plan.iterations    # mindformers would replace the path that the user gave
        return request.path if request else original(*args, **kwargs)
    return get


def _dataset(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def postprocess(*args: Any, **kwargs: Any) -> Any:
        dataset, context = original(*args, **kwargs), training_context.current()
        if request := context.plan.iterations:
            config = context.objects.config = named(args, kwargs)["config"]
            if request.resume:
                context.objects.common = load_iteration.common_for(config, dataset.get_dataset_size(), context)
        return dataset
    return postprocess


def _common(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def load_common(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given, request, objects = named((cls, *args),
                                        kwargs), training_context.current().plan.iterations, training_context.current().objects
        if not request or objects.common is None or os.path.dirname(given["common_filename"]) != request.path:
            return original(cls, *args, **kwargs)
        common, objects.common = objects.common, None   # once: a fault-tolerant job loads later checkpoints from the same place
        return cls(**common)
    return load_common


def _model(original: Any) -> Any:
    @functools.wraps(original, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        made, context = original(*args, **kwargs), training_context.current()
        if context.plan.iterations:
            context.objects.model = made
        return made
    return make


def _compile(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def compile_model(*args: Any, **kwargs: Any) -> Any:
        context = training_context.current()
        if not context.plan.iterations:
            return original(*args, **kwargs)
        if adapter.is_parallel():
            given = named(args, kwargs)
            adapter.compile_for_load(context.objects.config, given["model"], given["dataset"])
        return None
    return compile_model


def _load_online(original: Any) -> Any:
    named = _binder(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        context = training_context.current()
        if not context.plan.iterations:
            return original(*args, **kwargs)
        given = named(args, kwargs)
        try:
            with context.progress.timed_load():
                return load_iteration.load(given["network"], given.get("optimizer"), context)
        finally:
            context.resources.drop_verified_bytes()
    return load


WRAPPERS: dict[str, Callable[[Any], Any]] = {           # by the name of a symbol; some names are used in several modules
    "Trainer.train": _training,
    "Trainer.finetune": _training,
    "Trainer.evaluate": functools.partial(_inference, training_context.EVALUATE),
    "Trainer.predict": functools.partial(_inference, training_context.PREDICT),
    "Trainer._check_config_rules": _rules,
    "MindFormerRegister.get_cls": _trainer_class,
    "get_resume_checkpoint": _resume_name,
    "clear_auto_trans_output": _clear,
    "is_hf_checkpoint": _only_folders,
    "is_publicly_accessible_path": _shared,
    "BaseTrainer.resume_ckpt_path_with_strategy": _path_with_strategy,
    "load_resume_context_from_checkpoint": _context,
    "_resume_hf_iterable_dataset": _streaming,
    "check_runner_config": _runner_config,
    "preload_ckpt": _preload,
    "transform_and_load_checkpoint": _load,
    "get_checkpoint_path": _folder,
    "get_healthy_checkpoint_path": _healthy,
    "BaseTrainer._train_dataset_postprocess": _dataset,
    "CommonInfo.load_common": _common,
    "Model": _model,
    "compile_model": _compile,
    "load_checkpoint": _load_online,
    "load_hf_checkpoint": _load_online,
}
