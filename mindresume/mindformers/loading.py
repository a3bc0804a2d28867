"""Loads what was selected into the network of this job, from a checkpoint of any layout.

    network ─▶ its parameters on this rank, and what the checkpoint may lack ─▶ layouts of this job
        ─▶ regions of this rank
    ─▶ (balanced) those that it reads itself ─▶ byte ranges, read and verified ─▶ the parameters

A checkpoint in the layout of the job is loaded file by file: each rank takes what it verified,
hashed while it is in memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from mindresume.coordination.collectives import Watchdog, gather_results, run_on_all
from mindresume.errors import ConfigError, LoadError
from mindresume.events import (
    SILENT,
    Emit,
    Notice,
    Progress,
    ProgressReporter,
    WeightsLoaded,
    warning,
)
from mindresume.formats import CheckpointDir
from mindresume.formats.weight_files import header_of
from mindresume.formatting import counted, listed
from mindresume.mindformers import auto_transform
from mindresume.mindformers.network_state import LoadedWeights
from mindresume.mindformers.process_group import TensorBroadcaster
from mindresume.mindformers.training_context import ResumePlan, TrainingContext
from mindresume.model.layout import Layouts, Region
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.reshard.range_reader import Traffic
from mindresume.reshard.region_load import (
    WORKERS,
    LoadTarget,
    bytes_of,
    exchange_slices,
    holds_wanted,
    plan_reads,
    read_regions,
    wanted_regions,
)
from mindresume.resume.eligible import Choice
from mindresume.resume.verifier import VerifiedShard
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import array_checksum, read_header, read_tensor
from mindresume.tensor_files.header import DTYPES

COUNTER = "global_step"  # of the optimizer: it is set to the step of this run


class Network(Protocol):
    """What takes a checkpoint: a ``GraphNetwork``, or the models and the optimizer of a PyNative
    trainer.

    ``config``: the configuration of the training.
    """

    config: Any

    @property
    def arrangement(self) -> Mapping[str, bool]:
        """How it orders the elements within its tensors."""

    def target(self, stored: Mapping[str, Any], what: str) -> LoadTarget:
        """Returns what this rank takes of the tensors ``stored`` in the checkpoint ``what``,
        without layouts. Exchanges no message."""

    def layouts(self, target: LoadTarget) -> Layouts:
        """Returns the layouts of the parameters of ``target`` in this job. All ranks call it
        together."""

    def assign(self, arrays: dict[str, np.ndarray], target: LoadTarget) -> None:
        """Hands the arrays to the parameters. Raises LoadError if a parameter got no value."""


# ---- the load ------------------------------------------------------------------------------------


def load(network: Network, context: TrainingContext, source: OpenCheckpoint | None = None) -> None:
    """Loads the selected checkpoint into ``network``, from any layout into that of the job.

    Args:
        source: the checkpoint, if it is open; None: it is opened as the plan says.
    Raises:
        CollectiveError: On all ranks, if one fails.
    """
    plan, group = context.plan, context.group
    if source is None and plan.open_source is None:
        return load_own_files(network, context)
    source = source or run_on_all(group, plan.open_source, auto_transform.OPENING)
    target = target_of(network, source, context)
    # Each rank has opened what it saved itself: another layout needs the parts of all nodes. All
    # ranks say the same of ``is_in_parts`` (``MemorySource.newest``).
    if (choice := plan.choice) is not None and choice.is_in_parts:
        own = partial(holds_wanted, source.weights, target, group.rank)
        if not all(gather_results(group, own)):
            source = auto_transform.open_on_disk(context)
            target = target_of(network, source, context)
    return load_regions(network, source, target, context)


def target_of(network: Network, source: OpenCheckpoint, context: TrainingContext) -> LoadTarget:
    """Returns what this rank takes of ``source``, with the layouts of the job. All ranks call it;
    raises CollectiveError on all, if one fails."""
    # the ranks' files: mindformers records none, and its job had the same model
    if not source.weights.is_consolidated:
        source.weights.arrangement = {**network.arrangement, **source.weights.arrangement}
    stored = source.weights.tensors
    target = run_on_all(context.group, partial(network.target, stored, source.what))
    return replace(target, layouts=network.layouts(target))


def check_arrangement(
    plan: ResumePlan,
    own: Mapping[str, bool],
    remedy: str = "Set {key}: {value} in the model configuration",
) -> None:
    """Compares the selected checkpoint with the network that loads it. Names and shapes of the
    tensors do not depend on the order of their elements, so without this a load would succeed and
    give another function.

    Args:
        own: the arrangement of the network.
        remedy: what the user can do.
    Raises:
        ConfigError: Both have a key, with different values.
    """
    choice = plan.selected or plan.choice
    chosen = choice.chosen if choice is not None else None
    saved = (
        dict(chosen.state.arrangement) if chosen is not None and chosen.state is not None else {}
    )
    for key, value in own.items():
        if saved.get(key, value) is not value:
            folder = os.path.join(choice.root, chosen.records_dir or chosen.iteration_dir)
            raise ConfigError(
                f"{folder}: the network that saved this checkpoint has {key}: {saved[key]}, this "
                f"one {value}, so the elements within its tensors are in another order. "
                f"{remedy.format(key=key, value=saved[key])}"
            )


def load_regions(
    network: Network, source: OpenCheckpoint, target: LoadTarget, context: TrainingContext
) -> None:
    """Loads the regions of ``source`` that this rank takes. A resume in Checkpoint 1.0 may write
    files in its layout before.

    Raises:
        CollectiveError: On all ranks, if one fails.
    """
    plan, group = context.plan, context.group
    regions = run_on_all(group, partial(wanted_regions, source.weights, target, group.rank))
    if plan.request.resumes_from_files:
        rewritten = auto_transform.rewrite(network.config, context, source, regions)
        if isinstance(rewritten, Choice):
            context.plan = replace(plan, choice=rewritten)
            return load_own_files(network, context)
        source = rewritten
    arrays, read_bytes = read_balanced(source.weights, regions, target.layouts, context)
    return restore(network, arrays, target, context, source.what, read_bytes)


def read_balanced(
    weights: CheckpointView,
    regions: Mapping[str, Region],
    layouts: Layouts,
    context: TrainingContext,
) -> tuple[dict[str, np.ndarray], int]:
    """Returns ({tensor: array of its region}, bytes that this rank read). With ``balanced``, one
    rank reads what several need, and broadcasts it. All ranks call it; raises CollectiveError on
    all."""
    group = context.group
    request = context.plan.request
    mine = regions
    exchanges = []
    dtypes = {name: weights.tensors[name].dtype for name in regions}
    if request.balanced:
        mine, exchanges = plan_reads(
            regions,
            layouts,
            {name: DTYPES[dtype].itemsize for name, dtype in dtypes.items()},
            group.rank,
        )
    reporter = ProgressReporter("loading", context.emit)
    reporter.expect(bytes_of(weights, mine))
    traffic = Traffic(progress=reporter.advance)
    read = partial(read_regions, weights, mine, max(WORKERS, request.workers), traffic)
    arrays = run_on_all(group, read, Watchdog(reporter.what, reporter))
    if not request.balanced:
        return arrays, traffic.read
    if not any(gather_results(group, partial(bool, exchanges))):
        context.emit(
            Notice(
                "load_balanced (balanced_load) has no effect: no two ranks of this job hold the "
                "same part of a tensor"
            )
        )
    elif exchanges:
        broadcaster = TensorBroadcaster()
        received = exchange_slices(arrays, exchanges, regions, dtypes, group.rank, broadcaster)
        broadcaster.close()
        context.emit(
            Notice(
                f"balanced load of rank {group.rank}: {traffic.read / 2**20:.1f} MiB read, "
                f"{received / 2**20:.1f} MiB from other ranks"
            )
        )
    return arrays, traffic.read


def restore(
    network: Network,
    arrays: dict[str, np.ndarray],
    target: LoadTarget,
    context: TrainingContext,
    what: str = "",
    read_bytes: int | None = None,
) -> None:
    """Assigns the arrays to the parameters, in their dtypes, and remembers them for the comparison
    before the first step. Warns about those that keep their initial values.

    Args:
        arrays: by names in the checkpoint.
        what: describes the weights.
        read_bytes: bytes read from files; None: unknown.
    Raises:
        CollectiveError: On all ranks, if weights alone do not fit the dtype of a parameter on one.
    """
    request, group = context.plan.request, context.group
    if context.plan.weights_only:
        run_on_all(group, partial(convert, arrays, target, context.emit))
    absent = [
        target.parameter(name)
        for name in target.shapes
        if name not in arrays and not may_be_absent(name)
    ]
    if (
        absent
        and not target.deduplicated
        and (group.rank == 0 if request.iterations else not request.resume)
    ):
        context.emit(warning(f"not in {what}, so they keep their initial values: {listed(absent)}"))
    if COUNTER in arrays:
        arrays[COUNTER] = np.full(
            arrays[COUNTER].shape, context.progress.origin.global_step, arrays[COUNTER].dtype
        )
    for name in target.shapes.keys() & arrays.keys():
        array = arrays.pop(name)
        # () and (1,) hold the same number
        arrays[target.parameter(name)] = array.reshape(target.shapes[name][0])
    count, size = len(arrays), sum(array.nbytes for array in arrays.values())
    context.resources.loaded = LoadedWeights.of(arrays, context.settings.proof)
    network.assign(arrays, target)
    context.emit(
        WeightsLoaded(group.rank, count, size, read_bytes, what, context.progress.timed_seconds())
    )


# ---- the layout of the job: each rank loads the files that it verified ---------------------------


def load_own_files(
    network: Network,
    context: TrainingContext,
    early: Future | None = None,
    reporter: ProgressReporter | None = None,
) -> None:
    """Loads what this rank verified. ``early``: a ``read_shard`` of all its tensors that runs
    already, counted by ``reporter``.

    Raises:
        CollectiveError: On all ranks, if it does not fit on one.
    """
    plan = context.plan
    group = context.group
    reporter = reporter or ProgressReporter("loading", context.emit)
    directory = CheckpointDir(context.resources.storage, plan.choice.root)
    what = plan.request.path if plan.weights_only else ""
    target = run_on_all(
        group, partial(_target_of_files, network, context, directory, what), auto_transform.OPENING
    )
    names = target.shapes if plan.weights_only else None
    read = early.result if early else partial(read_shard, directory, context.shard, reporter, names)
    arrays = run_on_all(group, read, Watchdog(reporter.what, reporter))
    restore(network, arrays, target, context, what)


def _target_of_files(
    network: Network, context: TrainingContext, directory: CheckpointDir, what: str
) -> LoadTarget:
    """Returns what this rank takes of the files that it verified.

    Raises:
        LoadError: The files do not fit.
    """
    choice, shard = context.plan.choice, context.shard
    headers = {source: header_of(directory, source.file) for source in shard.sources}
    stored = {
        name: header.tensors[name]
        for source, header in headers.items()
        for name in source.names or header.tensors
    }
    deduplicated = any(
        header.metadata.get("remove_redundancy") == "True" for header in headers.values()
    )
    target = replace(network.target(stored, what), deduplicated=deduplicated)
    if problems := target.misfits(stored):
        proposal = target.proposal(target.missing(stored))
        raise LoadError(
            f"the checkpoint does not fit the network {problems}. Was the model configuration or "
            "the parallel strategy changed? For another strategy set auto_trans_ckpt: True"
            + (f".{proposal}" if proposal else "")
        )
    _check_not_of_one_rank(network, target, context)
    own = (
        files[0].path
        if (files := choice.chosen.files.get(context.group.rank))
        else "the file of a rank that was lost"
    )
    replicas = [source.file.path for source in shard.sources]
    if any(path != own for path in replicas):
        context.emit(
            warning(
                f"{own} is missing; rank {context.group.rank} reads its tensors from replicas, as "
                f"records or layouts prove: {', '.join(replicas)}"
            )
        )
    return target


def _check_not_of_one_rank(network: Network, target: LoadTarget, context: TrainingContext) -> None:
    """Raises LoadError if all ranks load one file that fits a job which cuts tensors: it holds the
    slices of one rank."""
    files = {file for row in context.plan.choice.chosen.files.values() for file in row}
    group = context.group
    if group.size == 1 or len(files) > 1:
        return
    for name, (layout, full) in network.layouts(target).items():
        if max(layout.counts(full), default=1) > 1:
            path = os.path.join(context.plan.choice.root, files.pop().path)
            raise LoadError(
                f"{path} is one file, which each of the {group.size} ranks would load, and it "
                f"holds {name} as {target.shapes[name][0]}. This job cuts that tensor of {full}, "
                "so the file holds the slices of one rank. Give the folder with the rank folders "
                "of all ranks as load_checkpoint, or merged weights (mindresume merge) with "
                "auto_trans_ckpt: True"
            )


def read_shard(
    directory: CheckpointDir,
    shard: VerifiedShard,
    reporter: Progress = SILENT,
    names: Collection[str] | None = None,
) -> dict[str, np.ndarray]:
    """Returns {name: array} of the tensors ``names`` of a shard; None: of all.

    Every tensor with a recorded checksum is hashed again while it is in memory, so that exactly the
    verified bytes are loaded.

    Raises:
        LoadError: A tensor changed since it was verified.
    """
    arrays = {}
    reporter.expect(sum(source.file.size or 0 for source in shard.sources))
    for source in shard.sources:
        path = directory.path(source.file.path)
        with directory.storage.open(path) as file:
            header = read_header(file, path)
            for name in source.names or header.tensors:
                entry = header.tensors[name]
                if entry.dtype == "str" or names is not None and name not in names:
                    continue
                kept = (
                    directory.storage.take_part(path, entry)
                    if isinstance(directory.storage, ReadCache)
                    else None
                )
                arrays[name] = read_tensor(file, entry) if kept is None else kept
                row = shard.details.tensors.get(name) if shard.details else None
                if row is not None and array_checksum(arrays[name]) != row.checksum:
                    raise LoadError(
                        f"{path}: {name} changed after it was checked; start the job again"
                    )
                reporter.advance(arrays[name].nbytes)
    return arrays


# ---- names and dtypes of weights alone -----------------------------------------------------------

_FLOATS, _INTS = ("float16", "float32", "float64", "bfloat16"), ("int8", "int16", "int32", "int64")
# first part of the names of the states of the optimizers of MindSpore and mindformers (nn/optim,
# mint/optim, core/optim)
_STATES = frozenset(
    (
        "adam_m",
        "adam_v",
        "lamb_m",
        "lamb_v",
        "muon_m",
        "momentum_buf",
        "moments",
        "moment",
        "moment1",
        "moment2",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "accum",
        "accum_update",
        "mean_grad",
        "mean_square",
        "step_size",
        "vhat",
    )
)
# in the names of parameters that mindformers adds for pet_config
_ADAPTERS = ("lora", "mindpet_delta")


def new_adapters(wanted: Collection[str], stored: Collection[str]) -> set[str]:
    """Returns the parameters that mindformers adds for ``pet_config``, if the checkpoint, saved
    from the network alone, has none of them: they may be missing at the begin of a training."""
    return (
        set() if any(map(_is_adapter, stored)) else {name for name in wanted if _is_adapter(name)}
    )


def _is_adapter(name: str) -> bool:
    return any(word in name for word in _ADAPTERS)


def renamed(target: LoadTarget, stored: Mapping[str, Any], what: str, emit: Emit) -> LoadTarget:
    """Returns a target with the names of the checkpoint, by the rules of MindSpore and mindformers:
    tk_delta for mindpet_delta, and one common prefix of all parameters that are not found, but none
    of optimizer states. Its dtypes are those of the checkpoint, where ``convert`` converts them.

    Args:
        target: with the names and dtypes of the parameters.
        stored: the tensors of the checkpoint ``what``.
    Raises:
        LoadError: No parameter is in the checkpoint.
    """
    old = {name.replace("tk_delta", "mindpet_delta"): name for name in stored if "tk_delta" in name}
    names = {name: old[name] for name in target.shapes if name not in stored and name in old}
    unknown = [name for name in target.missing(stored) if name not in names]
    if unknown:
        ends = (name for name in stored if name.endswith(f".{unknown[0]}"))
        prefixes = [
            prefix
            for prefix in (name.removesuffix(unknown[0]) for name in ends)
            if prefix.partition(".")[0] not in _STATES
            and all(prefix + name in stored for name in unknown)
        ]
        if len(prefixes) == 1:
            emit(
                warning(
                    f"{what} has {len(unknown)} parameters under another name, with the prefix "
                    f"{prefixes[0]}"
                )
            )
            names |= {name: prefixes[0] + name for name in unknown}
    if not names and not any(name in stored for name in target.shapes):
        raise LoadError(
            f"{what} holds none of the {len(target.shapes)} parameters of the network, expected "
            f"names such as {listed(sorted(target.shapes), 3)}; it holds "
            f"{listed(sorted(stored), 3) or 'nothing'}. If these are weights of another model or "
            "framework, convert them first, or give another load_checkpoint"
        )
    shapes, dtypes = {}, {}
    for parameter, (shape, dtype) in target.shapes.items():
        name = names.get(parameter, parameter)
        kept = stored[name].dtype if name in stored else dtype
        # as mindspore _type_convert
        if kept != dtype and any({kept, dtype} <= set(kind) for kind in (_FLOATS, _INTS)):
            dtypes[name], dtype = dtype, kept
        shapes[name] = shape, dtype
    return replace(
        target,
        shapes=shapes,
        optional={names.get(name, name) for name in target.optional},
        names={name: parameter for parameter, name in names.items()},
        dtypes=dtypes,
    )


def convert(arrays: dict[str, np.ndarray], target: LoadTarget, emit: Emit) -> None:
    """Converts the arrays to the dtypes of the parameters. Raises LoadError if a value would become
    infinite, or an integer would change."""
    kinds: Counter[str] = Counter()
    for name, dtype in target.dtypes.items():
        if name not in arrays:
            continue
        array = arrays[name]
        with np.errstate(over="ignore", invalid="ignore"):
            converted = array.astype(DTYPES[dtype])
        if (
            not np.array_equal(converted, array)
            if dtype in _INTS
            else np.any(np.isinf(converted) & ~np.isinf(array))
        ):
            raise LoadError(
                f"{target.parameter(name)} is {array.dtype.name} in the checkpoint and has values "
                f"that {dtype}, the dtype of the parameter, cannot hold; set param_init_type of "
                f"the model to {array.dtype.name}"
            )
        kinds[f"{array.dtype.name} to {dtype}"] += 1
        arrays[name] = converted
    for kind, count in kinds.items():
        emit(Notice(f"converted {counted(count, 'tensor')} from {kind}, the dtype of the network"))
