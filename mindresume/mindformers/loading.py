"""Loads what was selected into the network of this job, from a checkpoint of any layout.

    network ─▶ its parameters on this rank, and what the checkpoint may lack ─▶ layouts of this job ─▶ regions of this rank
    ─▶ (balanced) those that it reads itself ─▶ byte ranges, read and verified ─▶ the parameters

A checkpoint in the layout of the job is loaded file by file: each rank takes what it verified, hashed while it is in memory.
"""
from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from mindresume.coordination.collectives import Watchdog, gather_results, run_on_all
from mindresume.errors import LoadError
from mindresume.events import Notice, WeightsLoaded, warning
from mindresume.events.progress import ProgressReporter
from mindresume.formats import CheckpointDir
from mindresume.formats.weight_files import header_of
from mindresume.formatting import listed
from mindresume.mindformers import arrangement, auto_transform, weight_names
from mindresume.mindformers.loaded_weights import LoadedWeights
from mindresume.mindformers.process_group import TensorBroadcaster
from mindresume.mindformers.training_context import TrainingContext
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.broadcast_load import exchange_pieces, plan_reads
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.direct_engine import Traffic
from mindresume.reshard.geometry import Region
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.reshard.region_load import WORKERS, Layouts, LoadTarget, bytes_of, read_regions, wanted_regions
from mindresume.resume.choice import Choice, VerifiedShard
from mindresume.settings import allow_text
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import read_header, read_tensor
from mindresume.tensor_files.checksum import array_checksum
from mindresume.tensor_files.header import DTYPES

COUNTER = "global_step"         # of the optimizer: it is set to the step of this run


class Network(Protocol):
    """What takes a checkpoint: a ``GraphNetwork``, or the models and the optimizer of a PyNative trainer.

    ``config``: the configuration of the training.
    """
    config: Any

    @property
    def arrangement(self) -> Mapping[str, bool]:
        """How it orders the elements within its tensors."""

    def target(self, stored: Mapping[str, Any], what: str) -> LoadTarget:
        """Returns what this rank takes of the tensors ``stored`` in the checkpoint ``what``, without layouts. Exchanges no
        message."""

    def layouts(self, target: LoadTarget) -> Layouts:
        """Returns the layouts of the parameters of ``target`` in this job. All ranks call it together."""

    def assign(self, arrays: dict[str, np.ndarray], target: LoadTarget, deduplicated: bool) -> None:
        """Hands the arrays to the parameters. ``deduplicated``: missing ones come from other ranks. Raises LoadError if a
        parameter got no value."""


# ---- the load --------------------------------------------------------------------------------------------------------

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
    arrangement.assume(source.weights, network.arrangement)
    target = run_on_all(group, partial(network.target, source.weights.tensors, source.what))
    target = replace(target, layouts=network.layouts(target))
    return load_regions(network, source, target, context)


def load_regions(network: Network, source: OpenCheckpoint, target: LoadTarget, context: TrainingContext) -> None:
    """Loads the regions of ``source`` that this rank takes. A resume in Checkpoint 1.0 may write files in its layout before.

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
    if plan.weights_only:
        run_on_all(group, partial(weight_names.convert, arrays, target, context.emit))
    return restore(network, arrays, target, context, source.what, read_bytes)


def read_balanced(weights: CheckpointView, regions: Mapping[str, Region], layouts: Layouts, context: TrainingContext
                  ) -> tuple[dict[str, np.ndarray], int]:
    """Returns ({tensor: array of its region}, bytes that this rank read). With ``balanced``, one rank reads what several need,
    and broadcasts it. All ranks call it; raises CollectiveError on all."""
    group, request, mine, exchanges = context.group, context.plan.request, regions, []
    dtypes = {name: weights.tensors[name].dtype for name in regions}
    if request.balanced:
        mine, exchanges = plan_reads(regions, layouts, {name: DTYPES[dtype].itemsize for name, dtype in dtypes.items()},
                                     group.rank)
    reporter = ProgressReporter("loading", context.emit)
    reporter.expect(bytes_of(weights, mine))
    traffic = Traffic(progress=reporter.advance)
    read = partial(read_regions, weights, mine, max(WORKERS, request.workers), traffic)
    arrays = run_on_all(group, read, Watchdog(reporter.what, reporter))
    if not request.balanced:
        return arrays, traffic.read
    if not any(gather_results(group, lambda: bool(exchanges))):
        context.emit(Notice("load_balanced (balanced_load) has no effect: no two ranks of this job hold the same part of a "
                            "tensor"))
    elif exchanges:
        broadcaster = TensorBroadcaster()
        received = exchange_pieces(arrays, exchanges, regions, dtypes, group.rank, broadcaster)
        broadcaster.close()
        context.emit(Notice(f"balanced load of rank {group.rank}: {traffic.read / 2**20:.1f} MiB read, "
                            f"{received / 2**20:.1f} MiB from other ranks"))
    return arrays, traffic.read


def restore(network: Network, arrays: dict[str, np.ndarray], target: LoadTarget, context: TrainingContext, what: str = "",
            read_bytes: int | None = None, deduplicated: bool = False) -> None:
    """Assigns the arrays to the parameters, and remembers them for the comparison before the first step. Warns about those that
    keep their initial values.

    Args:
        arrays: by names in the checkpoint.
        what: describes the weights.
        read_bytes: bytes read from files; None: unknown.
        deduplicated: missing parameters come from other ranks.
    """
    request, group = context.plan.request, context.group
    absent = [target.parameter(name) for name in target.shapes if name not in arrays and not may_be_absent(name)]
    if absent and not deduplicated and (group.rank == 0 if request.iterations else not request.resume):
        context.emit(warning(f"not in {what}, so they keep their initial values: {listed(absent)}"))
    if COUNTER in arrays:
        arrays[COUNTER] = np.full(arrays[COUNTER].shape, context.progress.global_step, arrays[COUNTER].dtype)
    for name in target.shapes.keys() & arrays.keys():
        array = arrays.pop(name)
        arrays[target.parameter(name)] = array.reshape(target.shapes[name][0])      # () and (1,) hold the same number
    count, size = len(arrays), sum(array.nbytes for array in arrays.values())
    context.resources.loaded = LoadedWeights.of(arrays)
    network.assign(arrays, target, deduplicated)
    context.emit(WeightsLoaded(group.rank, count, size, read_bytes, what, context.progress.timed_seconds()))


# ---- the layout of the job: each rank loads the files that it verified -----------------------------------------------

def load_own_files(network: Network, context: TrainingContext, early: Future | None = None,
                   reporter: ProgressReporter | None = None) -> None:
    """Loads what this rank verified. ``early``: a ``read_shard`` of all its tensors that runs already, counted by ``reporter``.

    Raises:
        CollectiveError: On all ranks, if it does not fit on one.
    """
    plan, group, reporter = context.plan, context.group, reporter or ProgressReporter("loading", context.emit)
    what = plan.request.path if plan.weights_only else ""
    target, deduplicated = run_on_all(group, partial(_target_of_files, network, context, what), auto_transform.OPENING)
    names = target.shapes if plan.weights_only else None
    read = early.result if early else partial(read_shard, CheckpointDir(context.resources.storage, plan.choice.root),
                                              context.shard,
                                              reporter, names)
    arrays = run_on_all(group, read, Watchdog(reporter.what, reporter))
    if plan.weights_only:
        run_on_all(group, partial(weight_names.convert, arrays, target, context.emit))
    restore(network, arrays, target, context, what, None, deduplicated)


def _target_of_files(network: Network, context: TrainingContext, what: str) -> tuple[LoadTarget, bool]:
    """Returns what this rank takes of the files that it verified, and whether missing tensors come from other ranks.

    Raises:
        LoadError: The files do not fit.
    """
    choice, shard = context.plan.choice, context.shard
    headers = {source: header_of(CheckpointDir(context.resources.storage, choice.root), source.file) for source in shard.sources}
    stored = {name: header.tensors[name] for source, header in headers.items() for name in source.names or header.tensors}
    deduplicated = any(header.metadata.get("remove_redundancy") == "True" for header in headers.values())
    target = network.target(stored, what)
    if problems := replace(target, optional=target.shapes if deduplicated else target.optional).misfits(stored):
        raise LoadError(f"the checkpoint does not fit the network {problems}. Was the model configuration or the parallel "
                        f"strategy changed? For another strategy set auto_trans_ckpt: True"
                        + ("." + allow_text(missing) if target.proposes and (missing := target.missing(stored)) else ""))
    _check_not_of_one_rank(network, target, context)
    own = files[0].path if (files := choice.chosen.files.get(context.group.rank)) else "the file of a rank that was lost"
    replicas = [source.file.path for source in shard.sources]
    if any(path != own for path in replicas):
        context.emit(warning(f"{own} is missing; rank {context.group.rank} reads its tensors from replicas, as records or "
                             f"layouts prove: {', '.join(replicas)}"))
    return target, deduplicated


def _check_not_of_one_rank(network: Network, target: LoadTarget, context: TrainingContext) -> None:
    """Raises LoadError if all ranks load one file that fits a job which cuts tensors: it holds the slices of one rank."""
    files, group = {file for row in context.plan.choice.chosen.files.values() for file in row}, context.group
    if group.size == 1 or len(files) > 1:
        return
    for name, (layout, full) in network.layouts(target).items():
        if max(layout.pieces(full), default=1) > 1:
            path = os.path.join(context.plan.choice.root, files.pop().path)
            raise LoadError(f"{path} is one file, which each of the {group.size} ranks would load, and it holds {name} as "
                            f"{target.shapes[name][0]}. This job cuts that tensor of {full}, so the file holds the slices of one "
                            f"rank. Give the folder with the rank folders of all ranks as load_checkpoint, or merged weights "
                            f"(mindresume merge) with auto_trans_ckpt: True")


def read_shard(directory: CheckpointDir, shard: VerifiedShard, reporter: ProgressReporter | None = None,
               names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Returns {name: array} of the tensors ``names`` of a shard; None: of all.

    Every tensor with a recorded checksum is hashed again while it is in memory, so that exactly the verified bytes are loaded.

    Raises:
        LoadError: A tensor changed since it was verified.
    """
    arrays, reporter = {}, reporter or ProgressReporter.silent()
    reporter.expect(sum(source.file.size or 0 for source in shard.sources))
    for source in shard.sources:
        path = directory.path(source.file.path)
        with directory.storage.open(path) as file:
            header = read_header(file, path)
            for name in source.names or header.tensors:
                entry = header.tensors[name]
                if entry.dtype == "str" or names is not None and name not in names:
                    continue
                kept = directory.storage.take_part(path, entry) if isinstance(directory.storage, ReadCache) else None
                arrays[name] = read_tensor(file, entry) if kept is None else kept
                row = shard.details.tensors.get(name) if shard.details else None
                if row is not None and array_checksum(arrays[name]) != row.checksum:
                    raise LoadError(f"{path}: {name} changed after it was checked; start the job again")
                reporter.advance(arrays[name].nbytes)
    return arrays
