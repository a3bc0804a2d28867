"""Loads weights alone in Checkpoint 1.0, for the begin of a fine-tuning, an evaluation or a prediction; no training resumes.

    at the start   the path, from any of its keys ─▶ the selection, verified and agreed by all ranks
    at the load    the network, compiled where parameters are cut ─▶ its parameters in the checkpoint ─▶ byte ranges of this rank
                   ─▶ read, verified, converted to the dtype of the parameters, loaded; a missing one is an error with its name

What mindformers saved on as many ranks as the job has needs no layouts: each rank loads its own file. mindformers' own code still
loads Hugging Face names that only it can translate, and networks that convert their weights themselves.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mindresume.coordination.collectives import gather_results, run_on_all, run_on_rank0
from mindresume.errors import LoadError
from mindresume.events import Emit, Notice, warning
from mindresume.events.progress import ProgressReporter
from mindresume.formats.consolidated import is_consolidated
from mindresume.formats.scan import is_root
from mindresume.formats.weight_files import header_of
from mindresume.formatting import counted, listed
from mindresume.mindformers import adapter, arrangement, load_iteration, selection, state_restorer
from mindresume.mindformers.auto_transform import OPENING
from mindresume.mindformers.balanced_load import BalancedLoad
from mindresume.mindformers.load_progress import load_traffic, waiting_for
from mindresume.mindformers.network_state import check_fit, job_layouts
from mindresume.mindformers.training_context import PREDICT, TRAIN, LoadRequest, TrainingContext
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.huggingface import is_huggingface
from mindresume.reshard.open_checkpoint import OpenCheckpoint, open_consolidated
from mindresume.reshard.region_load import bytes_of, read_regions, wanted_regions
from mindresume.resume.choice import ShardSource
from mindresume.resume.job_selection import locate_checkpoints, shared_groups_of
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files.header import DTYPES

_FLOATS, _INTS = ("float16", "float32", "float64", "bfloat16"), ("int8", "int16", "int32", "int64")
# first part of the names of the states of the optimizers of MindSpore and mindformers (nn/optim, mint/optim, core/optim)
_STATES = frozenset(("adam_m", "adam_v", "lamb_m", "lamb_v", "muon_m", "momentum_buf", "moments", "moment", "moment1", "moment2",
                     "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "accum", "accum_update", "mean_grad", "mean_square",
                     "step_size", "vhat"))
_ADAPTERS = ("lora", "mindpet_delta")           # in the names of parameters that mindformers adds for pet_config

Wanted = Mapping[str, tuple[tuple[int, ...], str]]          # {parameter: (shape, dtype)}


# ---- at the start ----------------------------------------------------------------------------------------------------

def path_of(config: Any, task: str) -> str:
    """Returns the path of the requested weights; empty if there are none, or if mindformers loads them itself: for its inference
    models, and with slora adapters, which lie elsewhere."""
    if config.get("only_save_strategy") or adapter.pet_type(config) == "slora":
        return ""
    if task == PREDICT and not config.get("use_legacy") and config.get("run_mode") != "predict_with_train_model":
        return ""
    path = config.get("load_checkpoint") or (config.get("checkpoint") or {}).get("load_path")
    if not path and (pretrained := config.get("pretrained_model_dir")) and is_consolidated(PosixStorage(), str(pretrained)):
        path = pretrained                       # mindformers trainer.py:_try_use_pretrained_model_dir_as_ckpt
    return str(path or "")


def select(config: Any, task: str, context: TrainingContext, storage: Storage) -> None:
    """Sets the keys of ``config``, and the plan of ``context``, to what all ranks selected.

    Raises:
        NoUsableCheckpointError, MissingCheckpointError, ConfigError, CollectiveError: As ``selection.select``.
    """
    path = path_of(config, task)
    if not path:
        return
    group, asked = context.group, config.get("resume_training")
    path = locate_checkpoints(storage, path, group, context.emit)
    converts = bool(config.get("auto_trans_ckpt"))
    split = not converts and group.size > 1 and any(gather_results(group, lambda: os.path.isdir(path)
                                                                   and is_root(storage, path))) and \
        shared_groups_of(storage, path, group, context.resources.topology, context.emit).is_split
    plan = selection.select(config, path, asked if isinstance(asked, str) else None, context, storage, any_layout=not split,
                            resume=False, keep_layout=not converts)
    choice, chosen = plan.choice, plan.choice.chosen
    shown = path if os.path.isfile(path) else os.path.join(choice.root,
                                                           chosen.iteration_dir) if chosen.iteration_dir else choice.root
    context.plan = replace(plan, request=LoadRequest(shown, resume=False, trains=task == TRAIN, converts=converts,
                                                     balanced=bool(config.get("balanced_load"))))
    config.load_checkpoint, config.resume_training, config.load_ckpt_format = shown, False, chosen.format
    if config.get("checkpoint"):
        config.checkpoint.load_path = shown
    config.auto_trans_ckpt = False              # mindformers must neither convert nor clear anything


# ---- at the load -----------------------------------------------------------------------------------------------------

def load(config: Any, model: Any, network: Any, dataset: Any, context: TrainingContext, storage: Storage, do_eval: bool,
         do_predict: bool) -> bool:
    """Loads the selected weights into the parameters of ``network``. Returns False, with nothing loaded, if mindformers must do
    it.

    Raises:
        CollectiveError: On all ranks, if one fails.
    """
    request, group, open_source = context.plan.request, context.group, context.plan.open_source
    path = adapter.load_path(config)
    if os.path.realpath(path) != os.path.realpath(request.path):          # mindformers wrote translated names into new files
        open_source = partial(open_consolidated, storage, path)
    source = run_on_all(group, open_source, OPENING) if open_source is not None else None
    arrangement.check(context.plan, arrangement.of_network(network))
    if not request.trains:
        network.set_train(False)
    known = run_on_rank0(group, lambda: source is not None and source.candidate is None and
                         is_huggingface(storage, source.weights.name))        # rank 0 decides, because collectives follow
    if reason := adapter.reason_for_builtin_load(network, source.weights.tensors if source else (), known):
        context.emit(warning(f"{request.path}: {reason}; mindformers loads it, and logs the parameters that got no value"))
        config.auto_trans_ckpt = request.converts
        return False
    if config.use_parallel and adapter.is_parallel():
        adapter.compile_for_load(config, model, dataset, group, do_eval, do_predict)
    cell = model._train_network if request.trains else network
    with context.progress.timed_load():
        if source is None:
            _load_own(config, cell, network, context, storage)
        elif known and not set(network.parameters_dict()) & set(source.weights.tensors):
            load_iteration.load_pretrained(cell, network, source.weights.name, context)
        else:
            _load(config, cell, network, source, context)
    context.resources.release()
    return True


def _load(config: Any, cell: Any, network: Any, source: OpenCheckpoint, context: TrainingContext) -> None:
    """Loads by regions, from any layout into that of the job."""
    emit, group, tensors = context.emit, context.group, source.weights.tensors
    arrangement.assume(source.weights, network)
    wanted = run_on_all(group, lambda: _parameters_of_network(cell, network, tensors))
    optional = _optional(config, context, tensors)
    origin = run_on_all(group, lambda: checkpoint_names(wanted, tensors, source.what, optional, emit))
    layouts = job_layouts(cell, {name: shape for name, (shape, _) in wanted.items()}, group.size,
                          lambda text: emit(warning(text)))
    stored = {origin.get(name, name): (shape, _read_as(tensors, origin.get(name, name), dtype))
              for name, (shape, dtype) in wanted.items()}
    backwards = {other: name for name, other in origin.items()}
    layouts = {origin.get(name, name): row for name, row in layouts.items()}
    regions = run_on_all(group, lambda: wanted_regions(source.weights, stored, layouts, group.rank,
                                                       lambda name: optional(backwards.get(name, name)), allow=True))
    shared = BalancedLoad(layouts, context, context.plan.request.balanced)
    mine = shared.mine(regions, {name: tensors[name].dtype for name in regions})
    traffic, until_read = load_traffic(bytes_of(source.weights, mine), emit)
    arrays = run_on_all(group, partial(read_regions, source.weights, mine, traffic=traffic), until_read)
    shared.receive(arrays, traffic.read)
    by_parameter = {backwards.get(name, name): array for name, array in arrays.items()}
    del arrays
    run_on_all(group, lambda: _convert(by_parameter, wanted, emit))
    _assign(network, by_parameter, False, wanted, optional, source.what, context, traffic.read)


def _load_own(config: Any, cell: Any, network: Any, context: TrainingContext, storage: Storage) -> None:
    """Loads the file of this rank, which a job of as many ranks saved without layouts."""
    group, what = context.group, context.plan.request.path
    held = run_on_all(group, lambda: _tensors_by_source(storage, context), OPENING)
    there = {name for names in held.values() for name in names}
    wanted = run_on_all(group, lambda: _parameters_of_network(cell, network, there))
    optional = _optional(config, context, there)
    reporter = ProgressReporter("loading", context.emit)

    def read() -> tuple[dict[str, np.ndarray], bool]:
        parts = {source: tuple(name for name in names if name in wanted) for source, names in held.items()}
        if not any(parts.values()):
            raise LoadError(_no_match_text(what, wanted, there))
        shard = replace(context.shard, sources=tuple(replace(source, names=names) for source, names in parts.items() if names))
        arrays, deduplicated = state_restorer.read_shard(storage, context.plan.choice.root, shard, reporter)
        _convert(arrays, wanted, context.emit)
        check_fit(arrays, wanted, (lambda name: True) if deduplicated else optional, allow=True)
        state_restorer.check_not_of_one_rank(cell, wanted, context)
        return arrays, deduplicated
    arrays, deduplicated = run_on_all(group, read, waiting_for(reporter))
    _assign(cell if deduplicated else network, arrays, deduplicated, wanted, optional, what, context)


def _tensors_by_source(storage: Storage, context: TrainingContext) -> dict[ShardSource, tuple[str, ...]]:
    """Returns {file that this rank verified: names of its tensors}."""
    return {source: source.names or tuple(header_of(storage, context.plan.choice.root, source.file).tensors)
            for source in context.shard.sources}


def _assign(cell: Any, arrays: dict[str, np.ndarray], deduplicated: bool, wanted: Wanted, optional: Callable[[str], bool],
            what: str, context: TrainingContext, read_bytes: int | None = None) -> None:
    """Hands the arrays to the parameters, and warns about those that keep their initial values."""
    absent = [name for name in wanted if name not in arrays and not may_be_absent(name)]
    if absent and not deduplicated:
        context.emit(warning(f"not in {what}, so they keep their initial values: {listed(absent)}"))
    state_restorer.restore_parameters(cell, arrays, deduplicated, context, lambda name: name not in wanted or optional(name),
                                      read_bytes, what)


def _parameters_of_network(cell: Any, network: Any, offered: Collection[str]) -> Wanted:
    """Returns {name: (shape, dtype)} of the network's parameters on this rank. Raises LoadError if there are none."""
    of_model = set(network.parameters_dict())
    wanted = {name: row for name, row in adapter.parameters_to_load(cell, offered).items() if name in of_model}
    if not wanted:
        raise LoadError(f"after the compilation this rank holds none of the {len(of_model)} parameters of the network, so "
                        f"nothing can be loaded")
    return wanted


# ---- names, dtypes, what may be missing ------------------------------------------------------------------------------

def checkpoint_names(wanted: Collection[str], tensors: Mapping[str, Any], what: str, optional: Callable[[str], bool],
                     emit: Emit) -> dict[str, str]:
    """Returns {parameter: its name in the checkpoint} where the names differ, by the rules of MindSpore and mindformers: tk_delta
    for mindpet_delta, and one common prefix of all parameters that are not found, but none of optimizer states.

    Raises:
        LoadError: No parameter is in the checkpoint.
    """
    old = {name.replace("tk_delta", "mindpet_delta"): name for name in tensors if "tk_delta" in name}
    found = {name: old[name] for name in wanted if name not in tensors and name in old}
    left = [name for name in wanted if name not in tensors and name not in found and not optional(name)]
    if left:
        ends = (name for name in tensors if name.endswith(f".{left[0]}"))
        prefixes = [prefix for prefix in (name.removesuffix(left[0]) for name in ends)
                    if prefix.partition(".")[0] not in _STATES and all(prefix + name in tensors for name in left)]
        if len(prefixes) == 1:
            emit(warning(f"{what} has {len(left)} parameters under another name, with the prefix {prefixes[0]}"))
            found |= {name: prefixes[0] + name for name in left}
    if not found and not any(name in tensors for name in wanted):
        raise LoadError(_no_match_text(what, wanted, tensors))
    return found


def _no_match_text(what: str, wanted: Collection[str], there: Collection[str]) -> str:
    """Returns the message of a checkpoint that has none of the parameters."""
    return (f"{what} holds none of the {len(wanted)} parameters of the network, expected names such as "
            f"{listed(sorted(wanted), 3)}; it holds {listed(sorted(there), 3) or 'nothing'}. If these are weights of another "
            f"model or framework, convert them first, or give another load_checkpoint")


def _optional(config: Any, context: TrainingContext, tensors: Collection[str]) -> Callable[[str], bool]:
    """Returns which parameters may be missing: those that exist only within a step or a request, and those that the user allows.
    At the begin of a training with ``pet_config`` also the parameters that mindformers adds for it, if the checkpoint, saved from
    the network alone, has none of them."""
    adapters = bool(adapter.pet_type(config)) and context.plan.request.trains and not any(map(_is_adapter, tensors))
    return lambda name: may_be_absent(name) or context.settings.allows(name) or adapters and _is_adapter(name)


def _is_adapter(name: str) -> bool:
    return any(word in name for word in _ADAPTERS)


def _read_as(tensors: Mapping[str, Any], name: str, dtype: str) -> str:
    """Returns the dtype in which a tensor is read: its own, if mindformers would convert it (mindspore _type_convert)."""
    stored = tensors[name].dtype if name in tensors else dtype
    return stored if any({stored, dtype} <= set(kind) for kind in (_FLOATS, _INTS)) else dtype


def _convert(arrays: dict[str, np.ndarray], wanted: Wanted, emit: Emit) -> None:
    """Converts the arrays to the dtypes of the parameters. Raises LoadError if a value would become infinite, or an integer would
    change."""
    kinds: dict[str, int] = {}
    for name, array in arrays.items():
        dtype = wanted[name][1] if name in wanted else array.dtype.name
        if array.dtype.name == dtype or not any({array.dtype.name, dtype} <= set(kind) for kind in (_FLOATS, _INTS)):
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            found = array.astype(DTYPES[dtype])
        if not np.array_equal(found, array) if dtype in _INTS else np.any(np.isinf(found) & ~np.isinf(array)):
            raise LoadError(f"{name} is {array.dtype.name} in the checkpoint and has values that {dtype}, the dtype of the "
                            f"parameter, cannot hold; set param_init_type of the model to {array.dtype.name}")
        kinds[f"{array.dtype.name} to {dtype}"] = kinds.get(f"{array.dtype.name} to {dtype}", 0) + 1
        arrays[name] = found
    for kind, count in kinds.items():
        emit(Notice(f"converted {counted(count, 'tensor')} from {kind}, the dtype of the network"))
