"""Hooks into the graph trainer of mindformers: choosing at the start, counters, loading. Nothing is patched on disk.

    MindFormerRegister.get_cls       ─▶ the documented data keys below `trainer:` do not reach the trainer's constructor
    Trainer.train / finetune
      _check_config_rules             ─▶ choose_checkpoint: scan, prove, agree; or a fresh start
      get_resume_checkpoint           ─▶ the chosen file's name
      load_resume_context_from_...    ─▶ set_progress: initial step and epoch, loss scale
      check_runner_config             ─▶ remembers data and sink size; ends a training that is complete already
      transform_and_load_checkpoint   ─▶ load_shard: reads what this rank proved, verified again while it is read

With ``auto_trans_ckpt`` and for complete weights the last one is ``mindresume.plugin.convert``. A training that does not resume
and Checkpoint 2.0 (``use_legacy_format: False``) pass through to mindformers.
"""
from __future__ import annotations

import functools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mindresume.agree import Group, decide
from mindresume.errors import ConfigError, LoadError, TrainingCompleteError
from mindresume.files import read_header, read_tensor
from mindresume.files.checksum import array_checksum
from mindresume.formats import Candidate
from mindresume.formats.names import name_for_rank
from mindresume.launch.overrides import DATA_KEYS, lift_data_skip
from mindresume.network import check_fit
from mindresume.plugin import adapter, session
from mindresume.plugin.convert import (
    STRATEGY,
    TRANSFORMED,
    UNIFIED,
    arrays_for,
    choose_complete,
    is_complete_resume,
    prepare,
)
from mindresume.plugin.group import group_of_job
from mindresume.reshard.strategies import saved_by
from mindresume.resume.progress import check_sink, progress_of
from mindresume.resume.prove import ProvenShard
from mindresume.resume.select import Choice, describe, select
from mindresume.resume.witness import settle
from mindresume.settings import Settings
from mindresume.state import is_transient
from mindresume.store.claim import hold
from mindresume.store.storage import PosixStorage, Storage


def install() -> None:
    """Idempotent. ConfigError if a place to hook in is not there."""
    for method in ("train", "finetune"):
        adapter.replace(adapter.TRAINER, f"Trainer.{method}", _training)
    adapter.replace(adapter.TRAINER, "Trainer._check_config_rules", _rules)
    adapter.replace(adapter.REGISTER, "MindFormerRegister.get_cls", _trainer_class)
    adapter.replace(adapter.TRAINER, "get_resume_checkpoint", _resume_name)
    adapter.replace(adapter.TRAINER, "clear_auto_trans_output", _clear)
    adapter.replace(adapter.TRAINER_UTILS, "is_hf_checkpoint", _only_folders)
    adapter.replace(adapter.BASE_TRAINER, "BaseTrainer.resume_ckpt_path_with_strategy", _path_with_strategy)
    adapter.replace(adapter.BASE_TRAINER, "load_resume_context_from_checkpoint", _context)
    adapter.replace(adapter.BASE_TRAINER, "check_runner_config", _runner_config)
    adapter.replace(adapter.BASE_TRAINER, "preload_ckpt", _preload)
    adapter.replace(adapter.BASE_TRAINER, "transform_and_load_checkpoint", _load)


# ---- the wrappers --------------------------------------------------------------------------------------------------

def _training(original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = session.begin(session.Session(Settings.load(self.config.get("mindresume")), group_of_job()))
        started.training = True
        try:
            return original(self, *args, **kwargs)
        except TrainingCompleteError as error:
            adapter.logger().info("mindresume: %s", error)
            return None
        finally:
            started.release()
            started.training = False
            started.choice = None           # an evaluation or another training after this one loads its own checkpoint
    return run


def _rules(original: Any) -> Any:
    @functools.wraps(original)
    def check(self: Any) -> Any:
        for note in lift_data_skip(self.config):
            adapter.logger().info("mindresume: %s", note)
        if session.current().training:
            choose_checkpoint(self.config, session.current())
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
        name = os.path.basename(next(iter(current.choice.chosen.files.values())).path)
        return name_for_rank(name, current.group.rank, current.choice.chosen.format)
    return get


def _only_folders(original: Any) -> Any:
    @functools.wraps(original)
    def is_hf(path: str) -> bool:
        return os.path.isdir(path) and original(path)      # 1.9.0 raises for a file and refuses to resume from one
    return is_hf


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
        return set_progress(config, dataset.get_dataset_size(), current)
    return load


def _runner_config(original: Any) -> Any:
    @functools.wraps(original)
    def check(config: Any, dataset: Any) -> None:
        original(config, dataset)
        current, runner = session.current(), config.runner_config
        current.dataset_size = config.data_size
        current.sink_size = runner.sink_size if runner.sink_mode else None
        if current.resumes and runner.initial_epoch >= runner.epochs:
            raise TrainingCompleteError(f"the training is complete: step {runner.initial_step} is the end of "
                                        f"{runner.origin_epochs} epochs of {config.data_size} steps. Nothing was trained or "
                                        f"saved. For more, raise runner_config.epochs")
    return check


def _preload(original: Any) -> Any:
    @functools.wraps(original)
    def preload(config: Any) -> Any:
        return None if session.current().resumes else original(config)
    return preload


def _load(original: Any) -> Any:
    @functools.wraps(original)
    def load(config: Any, model: Any, network: Any, dataset: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        current = session.current()
        if not current.resumes or config.only_save_strategy:
            return original(config, model, network, dataset, optimizer=optimizer, **kwargs)
        return load_chosen(config, model, dataset, current, PosixStorage())
    return load


def _clear(original: Any) -> Any:
    @functools.wraps(original)
    def clear(load_checkpoint: Any = None, src_strategy_path_or_dir: Any = None, load_ckpt_format: str = "ckpt") -> None:
        check_not_cleared(adapter.output_root(), load_checkpoint, src_strategy_path_or_dir, load_ckpt_format=load_ckpt_format)
        original(load_checkpoint, src_strategy_path_or_dir, load_ckpt_format)
    return clear


# ---- what they do --------------------------------------------------------------------------------------------------

def choose_checkpoint(config: Any, current: session.Session) -> None:
    """Sets ``load_checkpoint``, ``resume_training`` and ``load_ckpt_format`` of ``config`` to what was chosen by all ranks.

    Raises NoUsableCheckpointError, MissingCheckpointError or AgreementError on all ranks together.
    """
    if not config.resume_training or not decide(current.group, lambda: applies(config)):
        return
    path, named = str(config.load_checkpoint), config.resume_training if isinstance(config.resume_training, str) else None
    log, storage = adapter.logger(), PosixStorage()
    if named and os.path.isfile(path):
        log.warning("mindresume: resume_training: %s is ignored, load_checkpoint is a file: %s", named, path)
        named = None
    waited = settle(storage, path, current.group)
    if waited >= 1:
        log.info("mindresume: waited %.0f s until this host lists what the others have saved", waited)
    converts = bool(config.auto_trans_ckpt)                 # then the number of ranks may differ, and all files are read by all
    if decide(current.group, lambda: is_complete_resume(storage, config)):
        converts, choice = True, choose_complete(storage, path, current)
    else:
        choice = select(storage, path, current.group, None if converts else current.group.size, named,
                        ranks=functools.partial(_share, current.group) if converts else None,
                        complete=current.settings.verify == "full",
                        saved_by=functools.partial(saved_by, storage, config.get("src_strategy_path_or_dir") or None))
    for refusal in choice.refused:
        log.warning("mindresume: not resuming from %s", refusal)
    for note in choice.notes:
        log.info("mindresume: %s", note)
    if choice.chosen is None:
        known = storage.status(path) is not None
        (log.info if known else log.warning)(
            "mindresume: fresh start: %s %s; weights are initialised at random", path,
            "holds no checkpoint that was ever complete" if known else "does not exist")
        config.resume_training, config.load_checkpoint, config.auto_trans_ckpt = False, "", False
        return
    current.choice = choice
    hold_chosen(current, storage)
    log.info("mindresume: resume from step %d, epoch %d, %s", choice.chosen.step, choice.chosen.epoch,
             describe(choice.chosen, choice.complete))
    if not os.path.isfile(path):
        config.load_checkpoint = choice.root
    if config.get("load_ckpt_format", "ckpt") != choice.chosen.format:
        log.info("mindresume: load_ckpt_format is set to %s, the format of the chosen files", choice.chosen.format)
        config.load_ckpt_format = choice.chosen.format
    config.resume_training = True
    if converts:
        prepare(config, current, storage)
        config.auto_trans_ckpt = False                      # mindformers has nothing left to do, to require, or to clear


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


def hold_chosen(current: session.Session, storage: Storage) -> None:
    """Rank 0 says that the chosen checkpoint is being read, so that neither retention of a job that still saves there nor
    ``mindresume prune`` removes it. A folder that cannot be written to is read all the same. LoadError on all ranks if it was
    removed between the choice and now."""
    chosen = current.choice.chosen
    if chosen.attempt is None:
        return

    def work() -> bool:
        try:
            current.hold = hold(storage, current.choice.root, os.path.basename(chosen.attempt))
        except OSError as error:
            adapter.logger().info("mindresume: %s is read without a claim on it: %s", current.choice.root, error)
            return True
        return current.hold is not None
    if not decide(current.group, work):
        raise LoadError(f"{chosen.attempt} was removed while it was chosen; start the job again")


def _share(group: Group, candidate: Candidate) -> list[int]:
    """Ranks of a checkpoint to convert that this rank proves. What mindformers wrote has its counters in the files alone."""
    own = [rank for rank in candidate.files if rank % group.size == group.rank]
    return own if candidate.state else sorted({min(candidate.files), *own})


def applies(config: Any) -> bool:
    """Whether this is a resume of Checkpoint 1.0; anything else is left to mindformers."""
    return not config.get("checkpoint") and config.get("use_legacy_format", True) is not False and bool(config.load_checkpoint)


def set_progress(config: Any, dataset_size: int, current: session.Session) -> None:
    """Initial step, epoch and loss scale of the run, from the state of the chosen checkpoint. ProgressError: see progress."""
    runner, log = config.runner_config, adapter.logger()
    state = counters(current.choice)
    sink_size = (dataset_size if runner.sink_size == -1 else runner.sink_size) if runner.sink_mode else None
    progress = progress_of(state["step_num"], state["global_step"], state["global_batch_size"], runner.global_batch_size,
                           sink_size or dataset_size)
    if sink_size:
        check_sink(progress, sink_size)
    runner.step_scale, runner.initial_step = progress.step_scale, progress.initial_step
    runner.initial_epoch = progress.initial_epoch
    current.global_step = progress.global_step
    scale = state["loss_scale"]
    if scale is not None and runner_scale(config) is not None:
        if hasattr(config.runner_wrapper.scale_sense, "loss_scale_value"):
            config.runner_wrapper.scale_sense.loss_scale_value = scale
        else:
            config.runner_wrapper.scale_sense = scale
    log.info("mindresume: continues after step %d (epoch %d done), global batch size %s, loss scale %s%s",
             progress.initial_step, progress.initial_epoch, runner.global_batch_size, scale,
             "" if progress.step_scale == 1 else f"; steps scaled by {progress.step_scale:g} from {state['step_num']}")


def runner_scale(config: Any) -> Any:
    wrapper = config.get("runner_wrapper")
    return None if wrapper is None else wrapper.get("scale_sense")


def counters(choice: Choice) -> dict[str, Any]:
    """step_num, global_step, global_batch_size and loss_scale of the chosen checkpoint, from its records or its files."""
    state = choice.chosen.state
    if state is not None:
        return {"step_num": state.step, "global_step": state.global_step, "global_batch_size": state.global_batch_size,
                "loss_scale": state.loss_scale}
    scalars = dict(choice.shards[0].scalars)
    step = scalars.get("step_num", choice.chosen.step)
    return {"step_num": step, "global_step": int(scalars.get("global_step", step)),
            "global_batch_size": scalars.get("global_batch_size"), "loss_scale": scalars.get("loss_scale")}


def load_chosen(config: Any, model: Any, dataset: Any, current: session.Session, storage: Storage) -> None:
    """Compiles where parameters are cut, then loads what was chosen into the training network, its optimizer included."""
    early = None
    if config.load_ckpt_async and current.open_source is None:              # read while the graph is compiled
        early = ThreadPoolExecutor(1).submit(read_shard, storage, current.choice.root, current.shard)
    if config.use_parallel and adapter.is_parallel():
        adapter.compile_for_load(config, model, dataset)
    network = model._train_network
    if current.open_source is not None:
        arrays = arrays_for(config, network, current, storage)
        if arrays is not None:
            return put(network, arrays, False, current)
    return load_shard(network, current, storage, early)


def load_shard(network: Any, current: session.Session, storage: Storage, early: Future | None = None) -> None:
    """Loads what this rank proved into ``network``. ``early``: reads it already. LoadError if it does not fit."""
    log, choice = adapter.logger(), current.choice
    arrays, deduplicated = early.result() if early else read_shard(storage, choice.root, current.shard)
    own = choice.chosen.files[current.group.rank].path
    if any(source.file.path != own for source in current.shard.sources):
        log.warning("mindresume: %s is missing; rank %d reads its tensors from replicas, proven bit for bit by the records: %s",
                    own, current.group.rank, ", ".join(source.file.path for source in current.shard.sources))
    check_fit(arrays, adapter.wanted_of(network), (lambda name: True) if deduplicated else is_transient)
    put(network, arrays, deduplicated, current)


def put(network: Any, arrays: dict[str, np.ndarray], deduplicated: bool, current: session.Session) -> None:
    """Hands the arrays to the parameters. ``deduplicated``: what is missing comes from other ranks. LoadError if something is
    left."""
    if "global_step" in arrays:
        arrays["global_step"] = np.full(arrays["global_step"].shape, current.global_step, arrays["global_step"].dtype)
    wanted = adapter.wanted_of(network)
    for name in set(wanted) & set(arrays):
        arrays[name] = arrays[name].reshape(wanted[name][0])           # () and (1,) are the same number
    count, size = len(arrays), sum(array.nbytes for array in arrays.values())
    left = [name for name in adapter.load_into(network, arrays, deduplicated) if not is_transient(name)]
    if left:
        raise LoadError(f"{len(left)} parameters of the network got no value, for example {left[0]}")
    adapter.logger().info("mindresume: loaded %d tensors of rank %d, %.1f MiB", count, current.group.rank, size / 2**20)


def read_shard(storage: Storage, root: str, shard: ProvenShard) -> tuple[dict[str, np.ndarray], bool]:
    """{name: array}, and whether the file was saved with remove_redundancy. Every tensor with a recorded checksum is hashed
    again while it is in memory: what was proven is what is loaded. LoadError if it changed in between."""
    arrays, deduplicated = {}, False
    for source in shard.sources:
        path = os.path.join(root, source.file.path)
        with storage.open(path) as file:
            header = read_header(file, path)
            deduplicated = deduplicated or header.metadata.get("remove_redundancy") == "True"
            for name in source.names or header.tensors:
                if header.tensors[name].dtype == "str":
                    continue
                arrays[name] = read_tensor(file, header.tensors[name])
                row = shard.details.tensors.get(name) if shard.details else None
                if row is not None and array_checksum(arrays[name]) != row.checksum:
                    raise LoadError(f"{path}: {name} changed after it was checked; start the job again")
    return arrays, deduplicated
