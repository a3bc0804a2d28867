"""Implements ``auto_trans_ckpt`` in the trainer: loads any checkpoint into the layout of this job.

    at the selection  rank 0 reads the strategy of the source, before the compiler overwrites it
                      ─▶ all ranks; the folder of old strategies is moved aside
    at the load       layouts of the compiled network ─▶ each rank reads the byte ranges of its own
                      slices from the source

    ckpt files in another layout are first converted to output/transformed_checkpoint, by as many
    processes as transform_process_num says; then each rank loads its own new file.
    ``mindresume: {unified_checkpoint: 1}``: consolidated weights are also written to
    output/unified_checkpoint. ``{transform_engine: mindspore}``: safetensors are first merged by
    MindSpore too.

Sources are only read. Outputs appear by a rename; an existing output of the same conversion is
reused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from mindresume import runtime
from mindresume.coordination.collectives import (
    Watchdog,
    gather_results,
    run_on_all,
    run_on_rank0,
)
from mindresume.coordination.storage_topology import single_group, wait_until_visible
from mindresume.errors import (
    CollectiveError,
    ConfigError,
    EngineError,
    LoadError,
    SaveError,
    StrategyError,
)
from mindresume.events import Emit, Notice, ProgressReporter, warning
from mindresume.formats import OURS, Candidate, CheckpointDir
from mindresume.formats.consolidated import MINDSPORE
from mindresume.formats.strategy import Strategy, read_strategy
from mindresume.formatting import ranks_count
from mindresume.mindformers import upstream
from mindresume.mindformers.training_context import ResumePlan, TrainingContext, write_to_disk
from mindresume.model.layout import Region, held, whole
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.conversion_plan import ConversionPlan, to_consolidated, to_ranks
from mindresume.reshard.converter import Conversion, Share
from mindresume.reshard.direct_engine import BY_MINDSPORE, Engine, engine_for
from mindresume.reshard.open_checkpoint import (
    OpenCheckpoint,
    checkpoint_of,
    open_consolidated,
    with_world_size,
)
from mindresume.reshard.range_reader import Traffic
from mindresume.reshard.strategy_store import has_layouts, identity_of, set_aside, strategy_for
from mindresume.resume.eligible import Choice, SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.storage import Storage
from mindresume.storage.read_cache import uncached

# below output_dir
UNIFIED = "unified_checkpoint"
TRANSFORMED = "transformed_checkpoint"
STRATEGY = "strategy"
OPENING = Watchdog("opening the checkpoint")
_PATIENCE = 120.0  # seconds until every host sees a folder that another one has made
_TRANSFORMING = Watchdog("transforming by MindSpore's engine", stall_timeout=math.inf)


# ---- at the selection ----------------------------------------------------------------------------


def prepare(
    config: Any, plan: ResumePlan, context: TrainingContext, aside: bool = True
) -> ResumePlan:
    """Broadcasts the strategy of the source, and with ``aside`` moves old strategy files aside. All
    ranks call it after the selection. Returns the plan with ``open_source``.

    Raises:
        CollectiveError: It failed on rank 0.
    """
    choice, is_unopened = plan.choice, plan.open_source is None
    directory = CheckpointDir(context.resources.storage, choice.root)
    given = config.get("src_strategy_path_or_dir") or None
    folder = os.path.join(config.output_dir, STRATEGY) if aside else None
    look = partial(_strategy_of_source, directory, choice.chosen, given, folder, is_unopened)
    reply = run_on_rank0(context.group, look, OPENING)
    for note in reply["notes"]:
        context.emit(Notice(note))
    if not is_unopened:
        return plan
    strategy = Strategy.from_json(reply["strategy"]) if reply["strategy"] else None
    rank = context.group.rank if choice.is_in_parts else None
    return replace(
        plan, open_source=partial(_open, directory, choice, strategy, reply["identity"], rank)
    )


def _strategy_of_source(
    directory: CheckpointDir,
    candidate: Candidate,
    given: str | None,
    folder: str | None,
    ranks: bool,
) -> dict[str, Any]:
    """Returns, on rank 0, the strategy of the selected checkpoint.

    Where records contain the layouts, a strategy that the user gives is not read: after a change of
    layout the same command finds newer checkpoints in the folder, of the new layout.
    """
    notes, strategy = [], None
    identity = identity_of(directory, candidate) if ranks or candidate.iteration_dir else None
    if candidate.iteration_dir:  # it contains its layouts
        return {"strategy": None, "notes": notes, "identity": identity}
    if ranks:
        if given and has_layouts(directory.storage, candidate):
            notes.append(
                f"src_strategy_path_or_dir: {given} is not needed; step {candidate.step} has "
                "records, which hold its layouts"
            )
            given = None
        try:
            strategy = strategy_for(directory, candidate, given)
        except StrategyError as error:
            if candidate.origin != OURS:
                raise
            notes.append(
                f"src_strategy_path_or_dir: {error}; the records of the checkpoint are used"
            )
        if candidate.origin == OURS and strategy and strategy.world_size != candidate.world_size:
            notes.append(
                f"src_strategy_path_or_dir: {given} is of {ranks_count(strategy.world_size)}, but "
                f"step {candidate.step} "
                f"was saved by {candidate.world_size}; the records of the checkpoint are used"
            )
            strategy = None
        with_world_size(directory.root, candidate, strategy)
    aside = set_aside(directory.storage, folder, strategy, identity) if folder else ""
    if aside:
        notes.append(f"the strategy files of earlier jobs are kept in {aside}")
    return {
        "strategy": strategy.to_json() if strategy else None,
        "notes": notes,
        "identity": identity,
    }


def _open(
    directory: CheckpointDir,
    choice: Choice,
    strategy: Strategy | None,
    identity: Any,
    rank: int | None = None,
) -> OpenCheckpoint:
    """Opens the selected checkpoint as weights, or the part of one ``rank``. The selection has
    verified its bytes."""
    candidate = with_world_size(directory.root, choice.chosen, strategy)
    # with records, a rank may have verified no file
    scalars = choice.shards[0].scalars if choice.shards else {}
    return checkpoint_of(directory, candidate, strategy, identity, scalars, rank=rank)


# ---- at the load ---------------------------------------------------------------------------------


def open_on_disk(context: TrainingContext) -> OpenCheckpoint:
    """Writes the selected save in memory to disk and opens it there, because its parts lie on
    several nodes and some rank takes what another one has saved. All ranks call it.

    Raises:
        CollectiveError, MissingCheckpointError, LoadError: On all ranks, if one fails.
    """
    plan, group, storage = context.plan, context.group, uncached(context.resources.storage)
    chosen, root = plan.choice.chosen, plan.choice.checkpoint_dir
    try:
        write_to_disk(
            context,
            "its parts lie in memory of several nodes, and this job takes other parts than were "
            "saved",
        )
    except CollectiveError as error:
        # else each start would fail alike, and never take what is on disk
        if (attempt := context.resources.pending_load.attempt) is not None:
            with suppress(OSError):
                attempt.refused(chosen.run, str(error).splitlines()[0][:200])
        raise
    context.resources.drop_verified_bytes()
    wait_until_visible(storage, root, group, single_group(group.size))
    is_full = context.settings.verify == "full"
    policy = SelectionPolicy(None, str(chosen.step), is_full, every_rank=True, any_layout=True)
    choice = select_checkpoint(storage, root, group, policy)
    if choice.chosen.name != chosen.name:
        raise LoadError(
            f"{root}: step {chosen.step} is {choice.chosen.name}, expected {chosen.name}, which "
            "was just written there from memory. With memory_tier.every_steps: 0 a start takes "
            "what is on disk"
        )
    context.plan = replace(plan, choice=choice)
    directory = CheckpointDir(storage, choice.root)
    return run_on_all(group, partial(_open, directory, choice, None, None), OPENING)


def rewrite(
    config: Any, context: TrainingContext, source: OpenCheckpoint, regions: Mapping[str, Region]
) -> OpenCheckpoint | Choice:
    """Writes files in another layout, where the settings or the format of the source ask for them.
    All ranks call it.

    Args:
        regions: what this rank loads.
    Returns:
        What is loaded: ``source``, the new consolidated weights, or the choice of the new ckpt
            files.
    Raises:
        CollectiveError: On all ranks, if one fails.
    """
    group = context.group
    setting = context.settings.conversion
    storage = context.resources.storage
    if source.candidate is None:
        return source
    by_mindspore = setting.transform_engine == "mindspore"
    if setting.unified_checkpoint or by_mindspore and source.candidate.format == "safetensors":
        folder = convert(
            to_consolidated(source, MINDSPORE),
            os.path.join(config.output_dir, UNIFIED),
            context,
            group.size,
            by_mindspore,
        )
        if by_mindspore:
            return open_consolidated(storage, folder)
    if source.candidate.format == "ckpt" and not all(
        gather_results(group, partial(_file_fits, group.rank, group.size, source.weights, regions))
    ):
        folder = transform_files(config, context, source)
        context.emit(
            Notice(f"transformed to {folder}; it can be loaded later without auto_trans_ckpt")
        )
        return select_checkpoint(
            storage,
            folder,
            group,
            SelectionPolicy(group.size, full=context.settings.verify == "full"),
        )
    return source


def _file_fits(
    rank: int, size: int, weights: CheckpointView, regions: Mapping[str, Region]
) -> bool:
    """Returns whether the file of ``rank`` holds exactly ``regions``."""
    path = weights.path_of(rank, next(iter(regions), ""))
    header = weights.header(path) if path and size == weights.world_size else None
    if header is None:
        return False
    for name, region in regions.items():
        tensor = weights.tensors[name]
        local, stored = rank - tensor.first, whole(tensor.shape)
        if tensor.layout is not None:
            stored = (
                held(tensor.layout, local, tensor.shape)
                if 0 <= local < tensor.layout.stage_size
                else None
            )
        if name not in header.tensors or stored != region:
            return False
    return True


def transform_files(config: Any, context: TrainingContext, source: OpenCheckpoint) -> str:
    """Writes ckpt files for the ranks of this job, and returns their folder.

    Raises:
        ConfigError: ``transform_process_num`` does not divide the ranks of the job.
        StrategyError, EngineError, CollectiveError: On all ranks.
    """
    group = context.group
    processes = config.get("transform_process_num") or 1
    if (
        isinstance(processes, bool)
        or not isinstance(processes, int)
        or processes < 1
        or group.size % processes
    ):
        raise ConfigError(
            f"transform_process_num is {processes!r}; expected a whole number that divides "
            f"{group.size}, the number of ranks of the job"
        )
    target = run_on_rank0(
        group, partial(_target_strategy, config, context.resources.storage, group.size)
    )
    job = to_ranks(
        source,
        Strategy.from_json(target) if target else None,
        source.candidate.format,
        group.size // processes,
    )
    folder = os.path.join(
        config.output_dir, TRANSFORMED, os.path.basename(os.path.abspath(source.weights.name))
    )
    engine = engine_for(context.settings.conversion.transform_engine, job.files[0].format)
    return convert(job, folder, context, processes, engine == "mindspore")


def convert(
    job: ConversionPlan, folder: str, context: TrainingContext, processes: int, by_mindspore: bool
) -> str:
    """Converts on all ranks together, and returns the folder.

    Raises:
        EngineError, CollectiveError: On all ranks.
    """
    if by_mindspore:
        work = partial(
            _by_mindspore, context.resources.storage, job, folder, processes, context.emit
        )
        answer = run_on_rank0(context.group, work, _TRANSFORMING)
        if "folder" in answer:
            return answer["folder"]
        if context.settings.conversion.transform_engine == "mindspore":
            raise EngineError(answer["refused"])
        context.emit(
            warning(
                "MindSpore's engine cannot transform this checkpoint, the direct one does: "
                f"{answer['refused']}"
            )
        )
    return _by_all_ranks(context.resources.storage, job, folder, context, processes)


def _target_strategy(config: Any, storage: Storage, world_size: int) -> Any:
    """Returns the strategy that the compiler wrote for this job, as JSON; None for one rank."""
    if world_size == 1:
        return None
    strategy = read_strategy(os.path.join(config.output_dir, STRATEGY), storage)
    if strategy.world_size != world_size:
        raise StrategyError(
            f"{strategy.source} is a strategy of {ranks_count(strategy.world_size)}, this job has "
            f"{world_size}"
        )
    return strategy.to_json()


def _by_mindspore(
    storage: Storage, job: ConversionPlan, folder: str, processes: int, emit: Emit
) -> dict[str, str]:
    """Converts with MindSpore's engine, on rank 0 alone, in processes of their own. Returns
    {"folder"}; or {"refused": reason} if the engine cannot."""
    if upstream.is_off(upstream.TRANSFORM):
        return {
            "refused": "transform_engine: mindspore was switched off at the start of the job: "
            f"{upstream.TRANSFORM.without}"
        }
    target, finished = _free_target(storage, job, folder, emit)
    if not finished:
        try:
            Conversion(storage, job, target, emit).run(Engine(BY_MINDSPORE, processes, emit=emit))
        except EngineError as error:
            return {"refused": str(error)}
    return {"folder": target}


def _by_all_ranks(
    storage: Storage, job: ConversionPlan, folder: str, context: TrainingContext, processes: int
) -> str:
    """Converts with the direct engine on ``processes`` ranks, spread over all ranks. Returns the
    folder. If one rank fails, raises CollectiveError on all and leaves nothing behind."""
    group, emit = context.group, context.emit
    step = max(group.size // processes, 1)
    target, finished = run_on_rank0(
        group, partial(_free_target, storage, job, folder, emit), OPENING
    )
    if finished:
        emit(Notice(f"{target} exists already, from an earlier start; it is used"))
        return target
    share = Share(group.rank // step + 1, processes) if group.rank % step == 0 else None
    conversion = Conversion(storage, job, target, emit, share=share or Share())
    progress = ProgressReporter("converting", emit)
    engine = Engine(traffic=Traffic(progress=progress.advance))
    try:
        gather_results(
            group, lambda: share and conversion.run(engine), Watchdog(progress.what, progress)
        )
        if not all(
            gather_results(
                group,
                partial(_appears, conversion, group.rank == 0),
                Watchdog("waiting for the target"),
            )
        ):
            raise SaveError(f"{target} is not complete, though every rank has written its share")
    except BaseException:
        if group.rank == 0:
            conversion.discard()
        raise
    return target


def _appears(conversion: Conversion, is_compared: bool) -> bool:
    """Returns whether this rank sees the target, which any rank may have committed: a host that
    looked for it before may see it half a minute later (NFS). ``is_compared``: looks at its files,
    too."""
    until = runtime.monotonic() + _PATIENCE
    while not (
        conversion.finished()
        if is_compared
        else conversion.storage.status(conversion.target) is not None
    ):
        if runtime.monotonic() > until:
            return False
        runtime.sleep(1.0)
    return True


def _free_target(
    storage: Storage, job: ConversionPlan, folder: str, emit: Emit
) -> tuple[str, bool]:
    """Returns the target folder of a conversion, and whether it is finished already. If ``folder``
    holds something else, that is left alone and another name is used.

    Raises:
        ConfigError: That name is used too.
    """
    first = Conversion(storage, job, folder, emit)
    try:
        return first.target, first.finished()
    except ConfigError:
        step = job.source.state.step if job.source.state else 0
        beside = Conversion(storage, job, f"{folder}_step_{step}_{job.fingerprint[:8]}", emit)
        return beside.target, beside.finished()
