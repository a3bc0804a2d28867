"""Hooks into the graph trainer of mindformers: choosing at the start, counters, loading. Nothing is patched on disk.

    MindFormerRegister.get_cls       ─▶ the documented data keys below `trainer:` do not reach the trainer's constructor
    Trainer.train / finetune
      _check_config_rules             ─▶ choose_checkpoint: scan, prove, agree; or a fresh start
      get_resume_checkpoint           ─▶ the chosen file's name
      load_resume_context_from_...    ─▶ set_progress: initial step and epoch, loss scale
      _resume_hf_iterable_dataset     ─▶ streaming data goes on at its own place
      check_runner_config             ─▶ remembers data and sink size; ends a training that is complete already
      transform_and_load_checkpoint   ─▶ load_shard: reads what this rank proved, verified again while it is read

With ``auto_trans_ckpt`` and for complete weights the last one is ``mindresume.plugin.convert``. Checkpoint 2.0
(``use_legacy_format: False``) has places of its own, and ``mindresume.plugin.online``. Weights alone, for a training of
Checkpoint 1.0 that does not resume, an evaluation or a prediction, are ``mindresume.plugin.weights_alone``.
"""
from __future__ import annotations

import functools
import os
from inspect import signature
from typing import Any

from mindresume.agree import Waiting, agreed, decide, report
from mindresume.errors import AgreementError, ConfigError, TrainingCompleteError
from mindresume.formats.names import name_for_rank
from mindresume.launch.overrides import DATA_KEYS, lift_data_skip
from mindresume.plugin import adapter, choosing, loading, modelarts, online, session, streaming, weights_alone
from mindresume.plugin.arguments import check_section
from mindresume.plugin.convert import STRATEGY, TRANSFORMED, UNIFIED
from mindresume.plugin.group import group_of_job
from mindresume.resume.choosing import caching_storage
from mindresume.resume.dataset import dataset_identity
from mindresume.settings import Settings
from mindresume.store import preemption
from mindresume.store.shared import is_shared
from mindresume.store.storage import PosixStorage


def install() -> None:
    """Idempotent. ConfigError if a place to hook in is not there."""
    for method in ("train", "finetune"):
        adapter.replace(adapter.TRAINER, f"Trainer.{method}", _training)
    for task in (weights_alone.EVALUATE, weights_alone.PREDICT):
        adapter.replace(adapter.TRAINER, f"Trainer.{task}", functools.partial(_inference, task))
    adapter.replace(adapter.TRAINER, "Trainer._check_config_rules", _rules)
    adapter.replace(adapter.REGISTER, "MindFormerRegister.get_cls", _trainer_class)
    adapter.replace(adapter.TRAINER, "get_resume_checkpoint", _resume_name)
    adapter.replace(adapter.TRAINER, "clear_auto_trans_output", _clear)
    adapter.replace(adapter.TRAINER_UTILS, "is_hf_checkpoint", _only_folders)
    for module in adapter.SHARED_ASKED:
        adapter.replace(module, "is_publicly_accessible_path", _shared)
    adapter.replace(adapter.BASE_TRAINER, "BaseTrainer.resume_ckpt_path_with_strategy", _path_with_strategy)
    adapter.replace(adapter.BASE_TRAINER, "load_resume_context_from_checkpoint", _context)
    adapter.replace(adapter.BASE_TRAINER, "_resume_hf_iterable_dataset", _streaming)
    adapter.replace(adapter.BASE_TRAINER, "check_runner_config", _runner_config)
    adapter.replace(adapter.BASE_TRAINER, "preload_ckpt", _preload)
    for module in (adapter.BASE_TRAINER, adapter.CAUSAL_TRAINER):
        adapter.replace(module, "transform_and_load_checkpoint", _load)
    adapter.replace(adapter.TRAINER, "get_checkpoint_path", _folder)
    adapter.replace(adapter.BASE_TRAINER, "get_healthy_checkpoint_path", _healthy)
    adapter.replace(adapter.BASE_TRAINER, "BaseTrainer._train_dataset_postprocess", _dataset)
    adapter.replace(adapter.BASE_TRAINER, "CommonInfo.load_common", _common)
    adapter.replace(adapter.BASE_TRAINER, "Model", _model)
    adapter.replace(adapter.BASE_TRAINER, "compile_model", _compile)
    adapter.replace(adapter.BASE_TRAINER, "load_checkpoint", _load_online)
    adapter.replace(adapter.BASE_TRAINER, "load_hf_checkpoint", _load_online)


# ---- the wrappers --------------------------------------------------------------------------------------------------

def _training(original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = session.begin(session.Session(Settings.load(self.config.get("mindresume")), group_of_job()))
        started.training, started.remote = True, modelarts.remote_of(self.config)
        started.requests = preemption.requests(self.config)
        try:
            result = original(self, *args, **kwargs)
            if started.left:
                _leave(started)
            return result
        except TrainingCompleteError as error:
            adapter.logger().info("mindresume: %s", error)
            return None
        except BaseException as error:
            started.end_trial(error)
            raise
        finally:
            started.release()
            if started.monitor is not None:             # the training failed
                started.monitor.settle()
                started.monitor = None
            started.training = False
            # an evaluation or another training after this one loads its own
            started.choice = started.online = started.alone = None
    return run


def _inference(task: str, original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = session.begin(session.Session(Settings.load(self.config.get("mindresume")), group_of_job(), task=task))
        try:
            return original(self, *args, **kwargs)
        finally:
            started.release()
            started.task, started.choice, started.alone = "", None, None
    return run


def _leave(current: session.Session) -> None:
    """Waits until all ranks are done: who ends first would end the others. SystemExit after a signal."""
    report(current.group, lambda: None)
    adapter.logger().info("mindresume: left because of %s; start the same command again to go on", current.left)
    if current.left == preemption.BY_SIGNAL:
        raise SystemExit(preemption.STATUS)


def _rules(original: Any) -> Any:
    @functools.wraps(original)
    def check(self: Any) -> Any:
        for note in lift_data_skip(self.config):
            adapter.logger().info("mindresume: %s", note)
        current = session.current()
        if current.training:
            check_section(adapter.built_in_monitor().__init__, self.config.get("callbacks") or ())
            current.identity = identity(self.config, current)
            with current.loading():
                choose_checkpoint(self.config, current)
        elif current.task and not getattr(getattr(self, "trainer", None), "pipeline_task", None):    # else it is loaded already
            weights_alone.choose(self.config, current.task, current, PosixStorage())
        return original(self)
    return check


def _trainer_class(original: Any) -> Any:
    """Documents 002 and 003 show ``ignore_data_skip`` and ``data_skip_steps`` below ``trainer:``, whose constructor would raise
    a TypeError. The registry is asked for the class after a plug-in named in that block was loaded; so both ways in work."""
    @functools.wraps(original)
    def get_cls(cls: Any, module_type: Any, class_name: Any = None) -> Any:
        found = original(cls, module_type, class_name)
        if module_type != "trainer":
            return found

        @functools.wraps(found, updated=())
        def build(*args: Any, **kwargs: Any) -> Any:
            return found(*args, **{key: value for key, value in kwargs.items() if key not in DATA_KEYS})
        return build
    return get_cls


def _resume_name(original: Any) -> Any:
    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> Any:
        current = session.current()
        if not current.resumes:
            return original(*args, **kwargs)
        if current.open_source is not None:
            return True                                     # of another number of ranks, or no file of one rank at all
        name = os.path.basename(current.choice.chosen.first.path)
        return name_for_rank(name, current.group.rank, current.choice.chosen.format)
    return get


def _only_folders(original: Any) -> Any:
    @functools.wraps(original)
    def is_hf(path: str) -> bool:
        return os.path.isdir(path) and original(path)      # 1.9.0 raises for a file and refuses to resume from one
    return is_hf


def _shared(original: Any) -> Any:
    """Without the part of mindformers that takes /data01 for a part of /data, and with file systems beyond NFS. Jobs of one node
    and ModelArts it answers before it looks at the path: with one that is in nothing."""
    @functools.wraps(original)
    def is_accessible(path: str) -> bool:
        return is_shared(path, os.environ.get("SHARED_PATHS", "")) or original(os.sep)
    return is_accessible


def _path_with_strategy(original: Any) -> Any:
    @functools.wraps(original)
    def find(config: Any) -> Any:
        # With MS_ENABLE_TFT mindformers looks for the newest file by time; the choice is already made.
        return config.checkpoint.load_path if session.current().resumes else original(config)
    return find


def _context(original: Any) -> Any:
    @functools.wraps(original)
    def load(config: Any, dataset: Any) -> None:
        current = session.current()
        if not current.resumes:
            return original(config, dataset)
        return loading.set_progress(config, dataset.get_dataset_size(), current)
    return load


def _streaming(original: Any) -> Any:
    @functools.wraps(original)
    def resume(dataset: Any, step: int) -> None:
        current = session.current()
        if current.progress is None:
            return original(dataset, step)
        return agreed(current.group, lambda: streaming.take_up(dataset, current.progress))
    return resume


def _runner_config(original: Any) -> Any:
    @functools.wraps(original)
    def check(config: Any, dataset: Any) -> None:
        original(config, dataset)
        current, runner = session.current(), config.runner_config
        current.dataset_size = config.data_size
        if not current.resumes:
            current.origin = loading.begin(config, dataset, current)
        current.sink_size = runner.sink_size if runner.sink_mode else None
        if current.resumes and runner.initial_epoch >= runner.epochs:
            raise TrainingCompleteError(f"the training is complete: step {runner.initial_step} is the end of "
                                        f"{runner.origin_epochs} epochs of {config.data_size} steps. Nothing was trained or "
                                        f"saved. For more, raise runner_config.epochs")
    return check


def _preload(original: Any) -> Any:
    @functools.wraps(original)
    def preload(config: Any) -> Any:
        current = session.current()
        return None if current.resumes or current.alone else original(config)
    return preload


def _load(original: Any) -> Any:
    @functools.wraps(original)
    def load(config: Any, model: Any, network: Any, dataset: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        current = session.current()
        if current.alone and weights_alone.load(config, model, network, dataset, current, current.storage,
                                                kwargs.get("do_eval", False), kwargs.get("do_predict", False)):
            return None
        if not current.resumes or config.only_save_strategy:
            return original(config, model, network, dataset, optimizer=optimizer, **kwargs)
        try:
            return loading.load_chosen(config, model, dataset, current, current.storage)
        finally:
            current.loaded()
    return load


def _clear(original: Any) -> Any:
    @functools.wraps(original)
    def clear(load_checkpoint: Any = None, src_strategy_path_or_dir: Any = None, load_ckpt_format: str = "ckpt") -> None:
        check_not_cleared(adapter.output_root(), load_checkpoint, src_strategy_path_or_dir, load_ckpt_format=load_ckpt_format)
        original(load_checkpoint, src_strategy_path_or_dir, load_ckpt_format)
    return clear


# ---- Checkpoint 2.0: where mindformers looks at common.json and loads ------------------------------------------------------

def _folder(original: Any) -> Any:
    @functools.wraps(original)
    def get(checkpoint: str) -> str:
        loads = session.current().online
        return loads.folder if loads else original(checkpoint)
    return get


def _healthy(original: Any) -> Any:
    @functools.wraps(original)
    def get() -> str:
        loads = session.current().online            # mindformers would replace the path that the user gave
        return loads.folder if loads else original()
    return get


def _dataset(original: Any) -> Any:
    @functools.wraps(original)
    def postprocess(self: Any, dataset: Any, config: Any) -> Any:
        dataset, current = original(self, dataset, config), session.current()
        if current.online:
            current.online.config = config
            if current.online.resume:
                current.online.common = online.common_for(config, dataset.get_dataset_size(), current)
        return dataset
    return postprocess


def _common(original: Any) -> Any:
    @functools.wraps(original)
    def load_common(cls: Any, common_filename: str) -> Any:
        loads = session.current().online
        if not loads or loads.common is None or os.path.dirname(common_filename) != loads.folder:
            return original(cls, common_filename)
        common, loads.common = loads.common, None   # once: a fault-tolerant job loads later checkpoints from the same place
        return cls(**common)
    return load_common


def _model(original: Any) -> Any:
    @functools.wraps(original, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        made, loads = original(*args, **kwargs), session.current().online
        if loads:
            loads.model = made
        return made
    return make


def _compile(original: Any) -> Any:
    @functools.wraps(original)
    def compile_model(model: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        loads = session.current().online
        if not loads:
            return original(model, dataset, *args, **kwargs)
        if adapter.is_parallel():
            adapter.compile_for_load(loads.config, model, dataset)
        return None
    return compile_model


def _load_online(original: Any) -> Any:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        current = session.current()
        if not current.online:
            return original(*args, **kwargs)
        given = signature(original).bind(*args, **kwargs).arguments
        try:
            with current.loading():
                return online.load(given["network"], given.get("optimizer"), current)
        finally:
            current.loaded()
    return load


# ---- what they do --------------------------------------------------------------------------------------------------

def identity(config: Any, current: session.Session) -> dict[str, str]:
    """Of the data set, before mindformers takes its configuration apart. As rank 0 sees it."""
    try:
        return decide(current.group, lambda: dataset_identity(PosixStorage(), config.get("train_dataset"), config.get("seed")),
                      Waiting("looking at the data set"))
    except AgreementError as error:
        adapter.logger().warning("mindresume: a change of the data set cannot be noticed: %s", error)
        return {}


def choose_checkpoint(config: Any, current: session.Session) -> None:
    """Sets ``load_checkpoint``, ``resume_training`` and ``load_ckpt_format`` of ``config`` to what was chosen by all ranks.

    Raises NoUsableCheckpointError, MissingCheckpointError or AgreementError on all ranks together.
    """
    storage = current.storage = caching_storage(PosixStorage(), current.settings, current.group)
    if online.applies(config):
        return online.choose(config, current, storage)
    if not config.resume_training:
        return weights_alone.choose(config, weights_alone.TRAIN, current, storage)
    if not config.load_checkpoint:
        return None
    path, named = str(config.load_checkpoint), config.resume_training if isinstance(config.resume_training, str) else None
    log = adapter.logger()
    choice = choosing.choose(config, path, named, current, storage, converts=bool(config.auto_trans_ckpt),
                             healthy=bool(config.get("use_checkpoint_health_monitor")))
    if choice is None:
        config.resume_training, config.load_checkpoint, config.auto_trans_ckpt = False, "", False
        return None
    if not os.path.isfile(path):
        config.load_checkpoint = choice.root
    if config.get("load_ckpt_format", "ckpt") != choice.chosen.format:
        log.info("mindresume: load_ckpt_format is set to %s, the format of the chosen files", choice.chosen.format)
        config.load_ckpt_format = choice.chosen.format
    config.resume_training = True
    if current.open_source is not None:
        config.auto_trans_ckpt = False                      # mindformers has nothing left to do, to require, or to clear
    return None


def check_not_cleared(output: str, *sources: Any, load_ckpt_format: str) -> None:
    """With auto_trans_ckpt mindformers empties folders below ``output``. ConfigError if one of ``sources`` lies in one of them,
    also by another name of it (mindformers compares texts and misses ``./output/strategy`` or a trailing slash)."""
    cleared = [os.path.realpath(os.path.join(output, name)) for name in
               (STRATEGY, TRANSFORMED if load_ckpt_format == "ckpt" else UNIFIED)]
    for source in filter(None, sources):
        for folder in cleared:
            if os.path.commonpath([folder, os.path.realpath(source)]) == folder:
                raise ConfigError(f"{source} lies in {folder}, which mindformers empties at the start of a conversion "
                                  f"(auto_trans_ckpt). Move it, or give another output_dir")
