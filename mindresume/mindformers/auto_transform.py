"""Implements ``auto_trans_ckpt`` in the trainer: loads any checkpoint into the layout of this job.

    at the choice   rank 0 reads the source's strategy, before the compiler writes new ones over it ─▶ all ranks
                    the folder of old strategies is set aside
    at the load     layouts of the compiled network ─▶ each rank reads the byte ranges of its own slices from the source
                    ckpt files, in another layout: transformed to output/transformed_checkpoint first, by so many processes as
                    transform_process_num says; then each rank loads its own new file
                    ``mindresume: {unified_checkpoint: 1}``: complete weights to output/unified_checkpoint besides;
                    ``{transform_engine: mindspore}``: safetensors go that way too, merged by MindSpore

Sources are only read. Outputs appear by a rename, and one that is there already is used again.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mindresume.coordination.collectives import Group, Waiting, agreed, decide, report, watched
from mindresume.errors import ConfigError, EngineError, StrategyError
from mindresume.events import Emit, Notice, warning
from mindresume.events.progress import ProgressReporter
from mindresume.formats import OURS
from mindresume.formats.consolidated import MINDSPORE
from mindresume.formats.strategy import Strategy, read_strategy
from mindresume.formatting import ranks_count
from mindresume.mindformers import adapter, upstream, upstream_check
from mindresume.mindformers.load_progress import traffic_of_load, waiting
from mindresume.mindformers.network_state import layouts as network_layouts
from mindresume.mindformers.training_context import ResumePlan, TrainingContext
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.conversion_plan import ConversionPlan, to_complete, to_ranks
from mindresume.reshard.converter import Conversion
from mindresume.reshard.direct_engine import Traffic
from mindresume.reshard.engines import engine_for, writer
from mindresume.reshard.geometry import Region, held, whole
from mindresume.reshard.open_checkpoint import OpenCheckpoint, checkpoint_of, open_complete, with_world_size
from mindresume.reshard.region_load import bytes_of, read_regions, wanted_regions
from mindresume.reshard.strategy_store import identity_of, set_aside, strategy_for
from mindresume.resume.choice import Choice
from mindresume.resume.selection_policy import SelectionPolicy
from mindresume.resume.shared_selection import select_shared
from mindresume.storage.interface import Storage

UNIFIED, TRANSFORMED, STRATEGY = "unified_checkpoint", "transformed_checkpoint", "strategy"      # below output_dir
OPENING = Waiting("opening the checkpoint")
_TRANSFORMING = Waiting("transforming by MindSpore's engine", watched)


# ---- at the choice -------------------------------------------------------------------------------------------------

def prepare(config: Any, plan: ResumePlan, context: TrainingContext, storage: Storage, aside: bool = True) -> ResumePlan:
    """Broadcasts the source's strategy, and with ``aside`` moves old strategy files aside; on all ranks, after the choice.
    Returns the plan with ``open_source``. CollectiveError."""
    choice, group = plan.choice, context.group
    given = config.get("src_strategy_path_or_dir") or None
    folder = os.path.join(config.output_dir, STRATEGY) if aside else None
    told = decide(group, partial(_decide, storage, choice, given, folder, plan.open_source is None), OPENING)
    for note in told["notes"]:
        context.emit(Notice(note))
    if plan.open_source is not None:
        return plan
    strategy = Strategy.from_json(told["strategy"]) if told["strategy"] else None
    return replace(plan, open_source=partial(_open, storage, choice, strategy, told["identity"]))


def _decide(storage: Storage, choice: Choice, given: str | None, folder: str | None, ranks: bool) -> dict[str, Any]:
    """Returns, on rank 0, the strategy of what was selected. Records know their layouts. A strategy that is given besides must
    agree with them, unless it is of another number of ranks: after a change of layout the same command finds newer checkpoints in
    the folder."""
    candidate, notes, strategy, identity = choice.chosen, [], None, None
    if candidate.iteration_dir:                                      # an iteration folder knows its layouts
        return {"strategy": None, "notes": notes, "identity": identity_of(storage, choice.root, candidate)}
    if ranks:
        identity = identity_of(storage, choice.root, candidate)
        try:
            strategy = strategy_for(storage, choice.root, candidate, given, identity)
        except StrategyError as error:
            if candidate.origin != OURS:
                raise
            notes.append(f"src_strategy_path_or_dir: {error}; the records of the checkpoint are used")
        if candidate.origin == OURS and strategy and strategy.world_size != candidate.world_size:
            notes.append(f"src_strategy_path_or_dir: {given} is of {ranks_count(strategy.world_size)}, step {candidate.step} was "
                         f"saved by {candidate.world_size}; its own records are used")
            strategy = None
        with_world_size(choice.root, candidate, strategy)
    aside = set_aside(storage, folder, strategy, identity) if folder else ""
    if aside:
        notes.append(f"the strategy files of earlier jobs are kept in {aside}")
    return {"strategy": strategy.to_json() if strategy else None, "notes": notes, "identity": identity}


def _open(storage: Storage, choice: Choice, strategy: Strategy | None, identity: Any) -> OpenCheckpoint:
    """Returns what was selected, as weights. Its bytes were verified by the selection."""
    candidate = with_world_size(choice.root, choice.chosen, strategy)
    scalars = choice.shards[0].scalars if choice.shards else {}     # with records, a rank may have had none to prove
    return checkpoint_of(storage, choice.root, candidate, strategy, identity, scalars)


# ---- at the load ---------------------------------------------------------------------------------------------------

def arrays_for(config: Any, network: Any, context: TrainingContext, storage: Storage) -> tuple[dict[str, Any], int, str] | Choice:
    """Returns, after the compilation, ({name: array} of everything this rank loads, bytes read, the source for people); or, if
    ckpt files were transformed on disk, the choice of the new ones. Whatever fails on one rank is CollectiveError on all."""
    group, emit = context.group, context.emit
    source = agreed(group, context.plan.open_source, OPENING)
    shapes = adapter.wanted_of(network, source.weights.tensors)
    table = getattr(network, "parameter_layout_dict", None) if adapter.is_parallel() else None
    layouts = network_layouts(table, {name: shape for name, (shape, _) in shapes.items()},
                              lambda text: emit(warning(text)))
    regions = agreed(group, partial(wanted_regions, source.weights, shapes, layouts, group.rank))
    engine = context.settings.transform_engine
    if source.candidate is not None and (context.settings.unified_checkpoint or (
            engine == "mindspore" and source.candidate.format == "safetensors")):
        folder = unify(config, context, storage, source)
        if engine == "mindspore":
            source = open_complete(storage, folder)
    if source.candidate is not None and source.candidate.format == "ckpt" and _needs_files(group, source.weights, regions):
        folder = transform_files(config, context, storage, source)
        emit(Notice(f"transformed to {folder}; it can be loaded later without auto_trans_ckpt"))
        return select_shared(storage, folder, group, SelectionPolicy(group.size, verify=context.settings.verify))
    traffic, until_read = traffic_of_load(bytes_of(source.weights, regions), emit)
    arrays = agreed(group, partial(read_regions, source.weights, regions, traffic=traffic), until_read)
    return arrays, traffic.read, source.what


def _needs_files(group: Group, weights: CheckpointView, regions: Mapping[str, Region]) -> bool:
    """Returns whether some rank's file is not exactly what that rank loads. The same answer on all ranks."""
    return not all(report(group, partial(_as_it_is, group.rank, group.size, weights, regions)))


def _as_it_is(rank: int, size: int, weights: CheckpointView, regions: Mapping[str, Region]) -> bool:
    path = weights.path_of(rank, next(iter(regions), ""))
    header = weights.header(path) if path and size == weights.world_size else None
    return header is not None and all(name in header.tensors and _held_by(rank, weights, name) == region
                                      for name, region in regions.items())


def _held_by(rank: int, weights: CheckpointView, name: str) -> Region | None:
    tensor = weights.tensors[name]
    if tensor.layout is None:
        return whole(tensor.shape)
    local = rank - tensor.first
    return held(tensor.layout, local, tensor.shape) if 0 <= local < tensor.layout.stage_size else None


def unify(config: Any, context: TrainingContext, storage: Storage, source: OpenCheckpoint) -> str:
    """Writes complete weights to output/unified_checkpoint, every rank a share of the parts. Returns the folder. CollectiveError
    on all ranks."""
    group = context.group
    job, folder = to_complete(source, MINDSPORE), os.path.join(config.output_dir, UNIFIED)
    if context.settings.transform_engine == "mindspore":
        answer = decide(group, lambda: _by_mindspore(storage, job, folder, group.size, context.emit), _TRANSFORMING)
        if "refused" in answer:
            raise EngineError(answer["refused"])
        return answer["folder"]
    return _by_all_ranks(storage, job, folder, context, group.size)


def transform_files(config: Any, context: TrainingContext, storage: Storage, source: OpenCheckpoint) -> str:
    """Writes ckpt files for the ranks of this job. Returns their folder. ConfigError, StrategyError; CollectiveError on all
    ranks."""
    group, emit = context.group, context.emit
    processes = config.get("transform_process_num") or 1
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1 or group.size % processes:
        raise ConfigError(f"transform_process_num is {processes!r}; expected a number that divides the {group.size} ranks of the "
                          f"job")
    told = decide(group, lambda: _target_strategy(config, storage, group.size))
    job = to_ranks(source, Strategy.from_json(told) if told else None, source.candidate.format, share=group.size // processes)
    folder = os.path.join(config.output_dir, TRANSFORMED, os.path.basename(os.path.abspath(source.weights.name)))
    engine = engine_for(context.settings.transform_engine, job.files[0].format)
    if engine == "mindspore":
        answer = decide(group, lambda: _by_mindspore(storage, job, folder, processes, emit), _TRANSFORMING)
        if "folder" in answer:
            return answer["folder"]
        if context.settings.transform_engine == "mindspore":
            raise EngineError(answer["refused"])
        emit(warning(f"MindSpore's engine cannot transform this checkpoint, the direct one does: {answer['refused']}"))
    return _by_all_ranks(storage, job, folder, context, processes)


def _target_strategy(config: Any, storage: Storage, world_size: int) -> Any:
    """Returns the strategy that the compiler wrote for this job; None for one rank."""
    if world_size == 1:
        return None
    strategy = read_strategy(os.path.join(config.output_dir, STRATEGY), storage)
    if strategy.world_size != world_size:
        raise StrategyError(f"{strategy.source} is a strategy of {ranks_count(strategy.world_size)}, this job has {world_size}")
    return strategy.to_json()


def _by_mindspore(storage: Storage, job: ConversionPlan, folder: str, processes: int, emit: Emit) -> dict[str, str]:
    """Converts on rank 0 alone, in processes of their own. Returns {"folder"}, or {"refused"} where MindSpore's engine cannot."""
    if upstream_check.is_off(upstream.TRANSFORM):
        return {"refused": f"transform_engine: mindspore was switched off at the start of the job: {upstream.TRANSFORM.without}"}
    conversion, finished = _free(storage, job, folder, emit)
    if not finished:
        try:
            conversion.run(lambda: conversion.write(writer("mindspore", conversion, processes, emit=emit)))
        except EngineError as error:
            return {"refused": str(error)}
    return {"folder": conversion.target}


def _by_all_ranks(storage: Storage, job: ConversionPlan, folder: str, context: TrainingContext, processes: int) -> str:
    """Converts with the direct engine on ``processes`` ranks, spread over all. Returns the folder. CollectiveError on all ranks
    if one fails; then nothing of it stays."""
    group, emit = context.group, context.emit
    step = max(group.size // processes, 1)

    def look() -> list[Any]:
        found, finished = _free(storage, job, folder, emit)
        return [found.target, finished]
    target, finished = decide(group, look, OPENING)
    conversion = Conversion(storage, job, target, emit)
    if finished:
        emit(Notice(f"{conversion.target} is there already, from an earlier start"))
        return conversion.target
    mine = [number for number in range(len(job.groups)) if number % processes * step == group.rank]
    progress = ProgressReporter("converting", emit)
    write = writer("direct", conversion, traffic=Traffic(progress=progress.advance))
    conversion.join(decide(group, conversion.prepare, OPENING))
    try:
        report(group, lambda: conversion.write(write, mine), waiting(progress))
        decide(group, conversion.commit, Waiting("committing the conversion"))
    except BaseException:
        if group.rank == 0:
            conversion.abandon()
        raise
    return conversion.target


def _free(storage: Storage, job: ConversionPlan, folder: str, emit: Emit) -> tuple[Conversion, bool]:
    """Returns where the conversion goes, and whether it is there already: what lies in ``folder`` and is not this conversion is
    left alone. ConfigError if the place beside it is taken too."""
    first = Conversion(storage, job, folder, emit)
    try:
        return first, first.finished()
    except ConfigError:
        step = job.source.state.step if job.source.state else 0
        beside = Conversion(storage, job, f"{folder}_step_{step}_{job.fingerprint[:8]}", emit)
        return beside, beside.finished()
