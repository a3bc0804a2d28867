"""Restores a training: counters into the configuration, tensors into the network."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mindresume.coordination.collectives import run_on_all
from mindresume.coordination.rank_heartbeat import COMPILING, LOADING
from mindresume.errors import LoadError
from mindresume.events import ProgressRestored, WeightsLoaded, warning
from mindresume.events.progress import ProgressReporter
from mindresume.formats.rank_folder_naming import parse_name
from mindresume.mindformers import adapter, arrangement, auto_transform, heartbeat, hf_streaming
from mindresume.mindformers.load_progress import waiting_for
from mindresume.mindformers.loaded_weights import LoadedWeights
from mindresume.mindformers.network_state import check_fit, job_layouts
from mindresume.mindformers.training_context import RunOrigin, RunProgress, TrainingContext
from mindresume.model.training_state import TrainingState, may_be_absent
from mindresume.reshard.open_checkpoint import state_of
from mindresume.resume.choice import Choice, VerifiedShard
from mindresume.resume.progress import (
    ResumeProgress,
    RunSettings,
    check_skip,
    fresh_position,
    parse_data_request,
    resume_progress,
)
from mindresume.resume.resume_summary import resume_warnings, summary_rows
from mindresume.storage.interface import Storage
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import read_header, read_tensor
from mindresume.tensor_files.checksum import array_checksum


def progress_for(config: Any, dataset_size: int, context: TrainingContext) -> tuple[ResumeProgress, float | None]:
    """Returns the counters of the run and the loss scale, from the state of the selected checkpoint; sets the position at which
    mindformers continues the data.

    Raises:
        ProgressError: As ``resume.progress.resume_progress``.
    """
    state = selected_state(context.plan.choice)
    progress = continue_after(state, _run_settings(config, dataset_size, context.progress), context)
    config.data_skip_steps, config.ignore_data_skip = progress.data_skip, not progress.data_skip
    return progress, state.loss_scale


def continue_after(state: TrainingState, setting: RunSettings, context: TrainingContext) -> ResumeProgress:
    """Returns the counters of a run with ``setting`` that continues after ``state``, and records them in the context.

    Raises:
        ProgressError: As ``resume.progress.resume_progress``.
    """
    run, progress = context.progress, resume_progress(state, setting)
    run.origin, run.restored = RunOrigin(progress.initial_step, progress.position, progress.consumed), progress
    run.global_step, run.summary = progress.global_step, summary_rows(state, progress, setting)
    for sentence in resume_warnings(progress, setting, context.settings.on_dataset_change):
        context.emit(warning(sentence))
    context.emit(ProgressRestored(progress.initial_step, progress.initial_epoch, state.step, progress.step_scale,
                                  setting.global_batch_size, state.loss_scale))
    return progress


def fresh_origin(config: Any, dataset: Any, context: TrainingContext) -> RunOrigin:
    """Returns where a run begins that does not resume. ``data_skip_steps`` counts at its beginning too; mindformers ignores that
    whole passes cannot be skipped, and that in sink mode fewer steps are left then."""
    runner, setting = config.runner_config, _run_settings(config, config.data_size, context.progress)
    sentence = check_skip(setting)
    if sentence:
        context.emit(warning(sentence))
    position, skip, runner.initial_epoch = fresh_position(setting)
    hf_streaming.refuse_skip(dataset, skip)
    if setting.data_request.skip and not setting.data_request.ignore and skip != setting.data_request.skip:
        dataset.set_init_step(skip)
    return RunOrigin(0, position)


def _run_settings(config: Any, dataset_size: int, run: RunProgress) -> RunSettings:
    runner = config.runner_config
    sink_size = (dataset_size if runner.sink_size == -1 else runner.sink_size) if runner.sink_mode else None
    data_request = parse_data_request(config.get("ignore_data_skip"), config.get("data_skip_steps"))
    return RunSettings(runner.global_batch_size, dataset_size, sink_size, run.dataset_identity, data_request, _epochs(runner))


def _epochs(runner: Any) -> int | None:
    """Returns the epochs of the configuration: in sink mode mindformers later counts sinks in ``epochs``."""
    return getattr(runner, "origin_epochs", None) or getattr(runner, "epochs", None)


def restore_progress(config: Any, dataset_size: int, context: TrainingContext) -> None:
    """Sets the initial step, the initial epoch and the loss scale of the run.

    Raises:
        ProgressError: As ``progress_for``.
    """
    progress, scale = progress_for(config, dataset_size, context)
    runner = config.runner_config
    runner.step_scale, runner.initial_step = progress.step_scale, progress.initial_step
    runner.initial_epoch = progress.initial_epoch
    if scale is not None and runner_scale(config) is not None:
        if hasattr(config.runner_wrapper.scale_sense, "loss_scale_value"):
            config.runner_wrapper.scale_sense.loss_scale_value = scale
        else:
            config.runner_wrapper.scale_sense = scale


def runner_scale(config: Any) -> Any:
    """Returns the loss scale of the configuration, or None."""
    wrapper = config.get("runner_wrapper")
    return None if wrapper is None else wrapper.get("scale_sense")


def selected_state(choice: Choice) -> TrainingState:
    """Returns the training state of the selected checkpoint, from its records or from the counters in its first file."""
    chosen = choice.chosen
    found = chosen.state or state_of(choice.shards[0].scalars, parse_name(os.path.basename(chosen.first.path)))
    return found or TrainingState(0, 1, 0)              # mindformers saved before the first step


def load_chosen(config: Any, model: Any, dataset: Any, context: TrainingContext, storage: Storage) -> None:
    """Compiles where parameters are cut, then loads the selected checkpoint into the training network, optimizer included."""
    early, reporter, plan = None, ProgressReporter("loading", context.emit), context.plan
    arrangement.check(plan, arrangement.of_network(model._train_network))
    if config.load_ckpt_async and plan.open_source is None:                 # read while the graph is compiled
        early = ThreadPoolExecutor(1).submit(read_shard, storage, plan.choice.root, context.shard, reporter)
    if config.use_parallel and adapter.is_parallel():
        heartbeat.enter(COMPILING)
        adapter.compile_for_load(config, model, dataset, context.group)
    heartbeat.enter(LOADING)
    network = model._train_network
    with context.progress.timed_load():
        if plan.open_source is not None:
            found = auto_transform.read_arrays(config, network, context, storage)
            if isinstance(found, tuple):
                arrays, read_bytes, source = found
                return restore_parameters(network, arrays, False, context, may_be_absent, read_bytes, source)
            context.plan = replace(plan, choice=found)
        return load_shard(network, context, storage, early, reporter)


def load_shard(network: Any, context: TrainingContext, storage: Storage, early: Future | None = None,
               reporter: ProgressReporter | None = None) -> None:
    """Loads what this rank verified into ``network``. ``early``: a read that runs already, counted by ``reporter``.

    Raises:
        CollectiveError: On all ranks, if it does not fit on one.
    """
    choice, group, shard = context.plan.choice, context.group, context.shard
    reporter = reporter or ProgressReporter("loading", context.emit)
    read = early.result if early else partial(read_shard, storage, choice.root, shard, reporter)
    arrays, deduplicated = run_on_all(group, read, waiting_for(reporter))
    files = choice.chosen.files.get(group.rank)
    own = files[0].path if files else "the file of a rank that was lost"
    replicas = [source.file.path for source in shard.sources]
    if any(path != own for path in replicas):
        context.emit(warning(f"{own} is missing; rank {group.rank} reads its tensors from replicas, as records or layouts prove: "
                             f"{', '.join(replicas)}"))

    def check() -> None:
        wanted = adapter.parameters_to_load(network, arrays)
        check_fit(arrays, wanted, (lambda name: True) if deduplicated else may_be_absent)
        check_not_of_one_rank(network, wanted, context)
    run_on_all(group, check)
    restore_parameters(network, arrays, deduplicated, context)


def check_not_of_one_rank(network: Any, wanted: Mapping[str, tuple[tuple[int, ...], str]], context: TrainingContext) -> None:
    """Raises LoadError if all ranks load one file that fits a job which cuts tensors: it holds the slices of one rank.
    ``wanted``: {name: (shape, dtype)} of the parameters of this rank."""
    files, group = {file for row in context.plan.choice.chosen.files.values() for file in row}, context.group
    if group.size == 1 or len(files) > 1:
        return
    layouts = job_layouts(network, {name: shape for name, (shape, _) in wanted.items()}, group.size, lambda text: None)
    for name, (layout, full) in layouts.items():
        if max(layout.pieces(full), default=1) > 1:
            path = os.path.join(context.plan.choice.root, files.pop().path)
            raise LoadError(f"{path} is one file, which each of the {group.size} ranks would load, and it holds {name} as "
                            f"{wanted[name][0]}. This job cuts that tensor of {full}, so the file holds the slices of one rank. "
                            f"Give the folder with the rank folders of all ranks as load_checkpoint, or merged weights "
                            f"(mindresume merge) with auto_trans_ckpt: True")


def restore_parameters(network: Any, arrays: dict[str, np.ndarray], deduplicated: bool, context: TrainingContext,
        may_miss: Callable[[str], bool] = may_be_absent, read_bytes: int | None = None, source: str = "") -> None:
    """Assigns the arrays to the parameters.

    Args:
        deduplicated: missing parameters come from other ranks.
        may_miss: whether a parameter may stay without a value.
        read_bytes: bytes read from files.
        source: describes the weights.
    Raises:
        LoadError: A parameter that may not miss got no value.
    """
    if "global_step" in arrays:
        array = arrays["global_step"]
        arrays["global_step"] = np.full(array.shape, context.progress.global_step, array.dtype)
    wanted = adapter.parameters_to_load(network, arrays)
    for name in set(wanted) & set(arrays):
        arrays[name] = arrays[name].reshape(wanted[name][0])           # () and (1,) hold the same number
    count, size = len(arrays), sum(array.nbytes for array in arrays.values())
    context.resources.loaded = LoadedWeights.of(arrays)
    left = [name for name in adapter.load_into(network, arrays, deduplicated) if not may_miss(name)]
    if left:
        raise LoadError(f"{len(left)} parameters of the network got no value, for example {left[0]}")
    context.emit(WeightsLoaded(context.group.rank, count, size, read_bytes, source, context.progress.timed_seconds()))


def read_shard(storage: Storage, root: str, shard: VerifiedShard, reporter: ProgressReporter | None = None
               ) -> tuple[dict[str, np.ndarray], bool]:
    """Returns {name: array}, and whether the file was saved with remove_redundancy.

    Every tensor with a recorded checksum is hashed again while it is in memory, so that exactly the verified bytes are loaded.

    Raises:
        LoadError: A tensor changed since it was verified.
    """
    arrays, deduplicated, reporter = {}, False, reporter or ProgressReporter.silent()
    reporter.expect(sum(source.file.size or 0 for source in shard.sources))
    for source in shard.sources:
        path = os.path.join(root, source.file.path)
        with storage.open(path) as file:
            header = read_header(file, path)
            deduplicated = deduplicated or header.metadata.get("remove_redundancy") == "True"
            for name in source.names or header.tensors:
                if header.tensors[name].dtype == "str":
                    continue
                entry = header.tensors[name]
                kept = storage.take_part(path, entry) if isinstance(storage, ReadCache) else None
                arrays[name] = read_tensor(file, entry) if kept is None else kept
                row = shard.details.tensors.get(name) if shard.details else None
                if row is not None and array_checksum(arrays[name]) != row.checksum:
                    raise LoadError(f"{path}: {name} changed after it was checked; start the job again")
                reporter.advance(arrays[name].nbytes)
    return arrays, deduplicated
