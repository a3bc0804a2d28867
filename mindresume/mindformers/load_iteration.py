"""Loads a checkpoint in Checkpoint 2.0 (``use_legacy_format: False``, or a ``checkpoint:`` section): any checkpoint into the
layout of this job, without a conversion on disk.

    at the start    both dialects of the keys ─▶ LoadRequest ─▶ the selection by all ranks ─▶ both dialects are set to it
    the counters    mindformers computes them from common.json: it receives numbers from which it computes ours
    at the load     compiled network ─▶ layouts of this job ─▶ regions of this rank ─▶ byte ranges ─▶ read, verified, loaded

Sources are iteration folders; also rank folders and consolidated weights, so that a job can switch to Checkpoint 2.0.
"""
from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import run_on_all, run_on_rank0
from mindresume.errors import ConfigError
from mindresume.events import Notice, warning
from mindresume.formats.consolidated import is_consolidated
from mindresume.formats.huggingface_families import FAMILIES
from mindresume.formats.iteration_naming import COMMON
from mindresume.formatting import listed
from mindresume.mindformers import adapter, arrangement, selection, state_restorer, upstream, upstream_check
from mindresume.mindformers.auto_transform import OPENING
from mindresume.mindformers.balanced_load import BalancedLoad
from mindresume.mindformers.load_progress import load_traffic
from mindresume.mindformers.network_state import job_layouts
from mindresume.mindformers.training_context import LoadRequest, ResumePlan, TrainingContext
from mindresume.model.training_state import is_transient, may_be_absent
from mindresume.reshard.huggingface import CONFIG, read_network
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.reshard.region_load import WORKERS, bytes_of, read_regions, resume_regions
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files.header import DTYPES


def applies(config: Any) -> bool:
    """Returns whether the job uses Checkpoint 2.0 (mindformers trainer/utils.py:convert_checkpoint_config). Raises ConfigError if
    it has a section that this release of mindformers would ignore."""
    if config.get("checkpoint"):
        upstream_check.refuse_if_off(upstream.CHECKPOINT_SECTION)
    return bool(config.get("checkpoint")) or config.get("use_legacy_format", True) is False


def load_request(config: Any) -> LoadRequest:
    """Returns what the configuration asks for. A key that one dialect leaves out is taken from the other.

    Raises:
        ConfigError: The dialects contradict each other, or a value is wrong. mindformers ignores one of them silently, and so
            could load other weights than requested.
    """
    section, asked = config.get("checkpoint") or {}, config.get("resume_training")
    path, old = str(section.get("load_path") or ""), str(config.get("load_checkpoint") or "")
    if path and old and os.path.realpath(path) != os.path.realpath(old):
        raise ConfigError(f"checkpoint.load_path is {path}, load_checkpoint is {old}; both name the checkpoint to load: "
                          f"remove one of them")
    path = path or old
    without = section.get("no_load_optim")
    if asked and without is True:
        raise ConfigError("resume_training is set, but checkpoint.no_load_optim: True loads weights alone and starts at step 0; "
                          "remove one of them")
    # If a configuration that was made in Python has none of the keys, mindformers resumes.
    resume = bool(asked) or without is False or (without is None and "resume_training" not in config and bool(path))
    if isinstance(asked, str):
        raise ConfigError(f"The resume_training must be a boolean value in Checkpoint 2.0, found {asked!r}. To resume from a "
                          f"certain iteration give its folder as load_checkpoint (checkpoint.load_path), or its number in the "
                          f"tracker")
    balanced = section.get("load_balanced")
    workers = section.get("reshard_worker_num") or config.get("reshard_worker_num") or 0
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ConfigError(f"reshard_worker_num is {workers!r}; expected a whole number of at least 1")
    return LoadRequest(path, resume, True, bool(config.get("balanced_load") if balanced is None else balanced), workers)


def select(config: Any, context: TrainingContext, storage: Storage) -> None:
    """Sets the keys of both dialects, and the plan of ``context``, to what all ranks selected.

    Raises:
        ConfigError: Keys contradict each other.
        NoUsableCheckpointError, MissingCheckpointError, CollectiveError: As ``selection.select``.
    """
    asked = load_request(config)
    for callback in config.get("callbacks") or []:
        if callback.get("type") == adapter.ALIAS and callback.get("checkpoint_format", "ckpt") == "ckpt":
            callback["checkpoint_format"] = "safetensors"           # document 004: mindformers converts it by itself
    pretrained = str(config.get("pretrained_model_dir") or "")
    if not asked.path and not pretrained:
        return
    plan, resume = None, False
    if asked.path and not run_on_rank0(context.group, lambda: is_pretrained(storage, asked.path)):
        plan = selection.select(config, asked.path, None, context, storage, any_layout=True, resume=asked.resume,
                                healthy=asked.resume and _monitors_health(config), fresh_weights=f"of {pretrained}" if pretrained
                                else selection.FRESH)
        resume = asked.resume and plan is not None
        folder = _folder_with_common(plan.choice.root, plan.choice.chosen.iteration_dir) if plan else pretrained
    elif asked.resume and asked.path:
        raise ConfigError(f"{asked.path} holds Hugging Face weights, from which no training can resume: they have no optimizer "
                          f"state and no step. To begin with them set resume_training: False (no_load_optim: True), or give them "
                          f"as pretrained_model_dir and the checkpoint folder as load_checkpoint")
    else:
        folder = asked.path or pretrained
    if plan is None and folder:
        upstream_check.refuse_if_off(upstream.PRETRAINED)
        context.emit(Notice(f"the training begins with Hugging Face weights: {folder}"))
    if folder:
        context.plan = replace(plan or ResumePlan(), request=replace(asked, path=folder, resume=resume, pretrained=plan is None))
    config.load_checkpoint, config.resume_training, config.load_ckpt_format = folder, resume, "safetensors"
    if config.get("checkpoint"):
        config.checkpoint.load_path, config.checkpoint.no_load_optim = folder, not resume
    config.auto_trans_ckpt = False                                  # mindformers must neither convert nor clear anything


def _folder_with_common(root: str, iteration_dir: str) -> str:
    """Returns the folder for mindformers, which reads ``common.json`` there: the iteration folder, or if it has no such file a
    temporary folder that has one."""
    folder = os.path.abspath(os.path.join(root, iteration_dir))
    if os.path.isfile(os.path.join(folder, COMMON)):
        return folder
    folder = tempfile.mkdtemp(prefix="mindresume-")
    runtime.at_exit(shutil.rmtree, folder, ignore_errors=True)
    with open(os.path.join(folder, COMMON), "w") as file:
        file.write("{}")
    return folder


def is_pretrained(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` is a Hugging Face folder: consolidated weights with the configuration of the model beside them."""
    return storage.status(os.path.join(path, CONFIG)) is not None and is_consolidated(storage, path)


def _monitors_health(config: Any) -> bool:
    """Returns whether the configuration sets a limit for mindformers' health monitor."""
    monitor = config.get("monitor_config") or {}
    return bool((monitor.get("health_checkpoint") or {}).get("embedding_local_norm_threshold"))


# ---- counters --------------------------------------------------------------------------------------------------------

def common_info(config: Any, dataset_size: int, context: TrainingContext) -> dict[str, Any]:
    """Returns the numbers of ``common.json`` from which mindformers (trainer/base_trainer.py, training_process) computes the
    progress of this run: with this run's own global batch size it scales nothing.

    Raises:
        ProgressError: As ``state_restorer.progress_for``.
    """
    progress, scale = state_restorer.progress_for(config, dataset_size, context)
    runner, epoch = config.runner_config, progress.initial_epoch
    if not runner.sink_mode:                                        # mindformers subtracts one within an epoch
        epoch += progress.initial_step % dataset_size != 0
    if scale is None:                                               # mindformers would set the scale to None
        scale = state_restorer.runner_scale(config)
        scale = getattr(scale, "loss_scale_value", scale)
    return {"epoch_num": epoch, "step_num": progress.initial_step, "global_step": progress.global_step, "loss_scale": scale,
            "global_batch_size": runner.global_batch_size}


# ---- at the load -----------------------------------------------------------------------------------------------------

def load(network: Any, optimizer: Any, context: TrainingContext) -> None:
    """Loads the selected checkpoint: all parameters of the train network, or without resume the parameters of ``network``.

    Raises:
        CollectiveError: On all ranks, if one fails.
    """
    plan, train = context.plan, context.objects.model._train_network
    arrangement.check(plan, arrangement.of_network(train))
    if plan.request.pretrained:
        load_pretrained(train, network, plan.request.path, context)
        return
    source = run_on_all(context.group, plan.open_source, OPENING)
    arrangement.assume(source.weights, train)
    shapes, of_model = adapter.parameters_to_load(train, source.weights.tensors), set(network.parameters_dict())
    of_optimizer = set(optimizer.parameters_dict()) if optimizer is not None else set()
    names = set(shapes) if plan.request.resume else of_model & set(shapes)
    optional = _optional(context, names - of_model - of_optimizer)
    arrays, read_bytes = _arrays(train, source, {name: shapes[name] for name in names}, of_model, context, optional)
    state_restorer.restore_parameters(train, arrays, False, context, lambda name: name not in names or optional(name), read_bytes,
                                      source.what)


def load_pretrained(train: Any, network: Any, folder: str, context: TrainingContext) -> None:
    """Loads this rank's slices of Hugging Face weights. ``train``: the compiled cell, which contains ``network``."""
    core, emit = adapter.core_network(network), context.emit
    if not adapter.is_graph_training_network(core):
        raise ConfigError(f"{folder}: no rule is known for Hugging Face weights of {type(core).__name__}, only for the training "
                          f"networks of {', '.join(FAMILIES)}. Convert the weights first, and give them as load_checkpoint")
    template = getattr(core, "template", None)              # only Qwen3 has one, since mindformers 1.9.0
    names = set(network.parameters_dict())
    wanted = {name: row for name, row in adapter.parameters_to_load(train).items() if name in names and not is_transient(name)}
    layouts = job_layouts(train, {name: shape for name, (shape, _) in wanted.items()}, context.group.size,
                          lambda text: emit(warning(text)))
    shared = BalancedLoad(layouts, context, context.plan.request.balanced)
    traffic, watchdog = load_traffic(
        sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in wanted.values()), emit)
    arrays = run_on_all(context.group, lambda: read_network(
        PosixStorage(), folder, wanted, layouts, context.group.rank, network=core.get_gpt_transformer_config(),
        tied=core.config.tie_word_embeddings, converters=template.weight_converters if template else (), traffic=traffic,
        kind=core.config.model_type, note=lambda text: emit(Notice(text)), share=shared.mine), watchdog)
    shared.receive(arrays, traffic.read)
    loaded = set(arrays)
    state_restorer.restore_parameters(train, arrays, False, context, lambda name: name not in loaded, traffic.read, folder)


def _arrays(network: Any, source: OpenCheckpoint, shapes: Mapping[str, tuple[tuple[int, ...], str]], of_model: Collection[str],
            context: TrainingContext, optional: Callable[[str], bool]) -> tuple[dict[str, Any], int]:
    """Returns ({name: array} of the parameters ``shapes`` of this rank, bytes read from files). The network is compiled."""
    emit, group, request = context.emit, context.group, context.plan.request
    layouts = job_layouts(network, {name: shape for name, (shape, _) in shapes.items()}, group.size,
                          lambda text: emit(warning(text)))
    regions = run_on_all(group, lambda: resume_regions(source.weights, shapes, layouts, group.rank, optional, of_model))
    initialised = [name for name in shapes if name not in regions and not may_be_absent(name)]
    if initialised and group.rank == 0:
        emit(warning(f"not in {source.what}, so they keep their initial values: {listed(initialised)}"))
    shared = BalancedLoad(layouts, context, request.balanced)
    mine = shared.mine(regions, {name: source.weights.tensors[name].dtype for name in regions})
    traffic, watchdog = load_traffic(bytes_of(source.weights, mine), emit)
    arrays = run_on_all(group, partial(read_regions, source.weights, mine, max(WORKERS, request.workers), traffic), watchdog)
    shared.receive(arrays, traffic.read)
    return arrays, traffic.read


def _optional(context: TrainingContext, of_step: Collection[str]) -> Callable[[str], bool]:
    """Returns which parameters may be missing in a checkpoint: those that exist only within a step, those that the user allows,
    the optimizer's step counter, which is set separately, and ``of_step``, the parameters of the train step, which mindformers
    never saves."""
    def optional(name: str) -> bool:
        return may_be_absent(name) or name == "global_step" or name in of_step or context.settings.allows(name)
    return optional
