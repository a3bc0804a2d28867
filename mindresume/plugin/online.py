"""Loading in Checkpoint 2.0 (``use_legacy_format: False``, or a ``checkpoint:`` section): any checkpoint into the layout of this
job, while it is loaded; nothing is converted on disk.

    at the start   both dialects of the keys -> one wish ─▶ the choice, agreed by all ranks ─▶ both dialects are set to it
    the counters   mindformers computes them from common.json: it is given numbers that come out as ours
    at the load    network compiled ─▶ layouts of this job ─▶ regions of this rank ─▶ byte ranges ─▶ read, verified, loaded

Sources are iteration folders and, so that a job can go over to Checkpoint 2.0 in the middle, rank folders and complete weights.
"""
from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindresume.agree import agreed, decide, report
from mindresume.errors import ConfigError, LoadError
from mindresume.files.model import DTYPES
from mindresume.formats.complete import is_complete
from mindresume.formats.huggingface import ARCHITECTURES
from mindresume.formats.iteration_files import COMMON
from mindresume.formats.records import listed
from mindresume.network import job_layouts
from mindresume.plugin import adapter, choosing, loading, session, telling
from mindresume.plugin.convert import OPENING
from mindresume.plugin.group import Passing
from mindresume.reshard.balanced import Exchange, pass_on, plan
from mindresume.reshard.geometry import Region
from mindresume.reshard.huggingface import CONFIG, read_network
from mindresume.reshard.load import WORKERS, bytes_of, read_regions, wanted_regions
from mindresume.reshard.source import Source
from mindresume.reshard.target import is_counter
from mindresume.reshard.weights import Weights
from mindresume.state import is_transient
from mindresume.store.storage import PosixStorage, Storage


@dataclass(frozen=True)
class Wish:
    """What the configuration asks to be loaded. ``path``: empty: nothing. ``resume``: with optimizer and counters; else the
    weights alone. ``balanced``: replicas read once, and pass on."""
    path: str
    resume: bool
    balanced: bool = False
    workers: int = 0


def applies(config: Any) -> bool:
    """Whether the job uses Checkpoint 2.0 (mindformers trainer/utils.py:convert_checkpoint_config)."""
    return bool(config.get("checkpoint")) or config.get("use_legacy_format", True) is False


def wish_of(config: Any) -> Wish:
    """Of both dialects: what one does not say, the other does. ConfigError that names both if they contradict each other: to pass
    over one of them silently, as mindformers does, would load other weights than were asked for."""
    section, asked = config.get("checkpoint") or {}, config.get("resume_training")
    path, old = str(section.get("load_path") or ""), str(config.get("load_checkpoint") or "")
    if path and old and os.path.realpath(path) != os.path.realpath(old):
        raise ConfigError(f"checkpoint.load_path is {path}, load_checkpoint is {old}, and both mean the same thing: "
                          f"remove one of them")
    path = path or old
    without = section.get("no_load_optim")
    if asked and without is True:
        raise ConfigError("resume_training is set, and checkpoint.no_load_optim: True, which loads weights alone and starts at "
                          "step 0; remove one of them")
    # Without any of the keys in a configuration made in Python, mindformers resumes.
    resume = bool(asked) or without is False or (without is None and "resume_training" not in config and bool(path))
    if isinstance(asked, str):
        raise ConfigError(f"The resume_training must be a boolean value in Checkpoint 2.0, found {asked!r}. To resume from a "
                          f"certain iteration give its folder as load_checkpoint (checkpoint.load_path), or its number in the "
                          f"tracker")
    balanced = section.get("load_balanced")
    workers = section.get("reshard_worker_num") or config.get("reshard_worker_num") or 0
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ConfigError(f"reshard_worker_num is {workers!r}; expected a whole number of at least 1")
    return Wish(path, resume, bool(config.get("balanced_load") if balanced is None else balanced), workers)


def choose(config: Any, current: session.Session, storage: Storage) -> None:
    """Sets the keys of both dialects to what was chosen by all ranks, or to a fresh start. Errors as ``choosing.choose``;
    ConfigError for keys that contradict each other."""
    wish = wish_of(config)
    for callback in config.get("callbacks") or []:
        if callback.get("type") == adapter.ALIAS and callback.get("checkpoint_format", "ckpt") == "ckpt":
            callback["checkpoint_format"] = "safetensors"           # document 004: converted by itself
    pretrained = str(config.get("pretrained_model_dir") or "")
    if not wish.path and not pretrained:
        return
    choice, resume = None, False
    if wish.path and not decide(current.group, lambda: is_pretrained(storage, wish.path)):
        choice = choosing.choose(config, wish.path, None, current, storage, converts=True, resume=wish.resume,
                                 healthy=wish.resume and _health_matters(config), instead=f"of {pretrained}" if pretrained else
                                 "are initialised at random")
        resume = wish.resume and choice is not None
        folder = _shown(choice.root, choice.chosen.base) if choice else pretrained
    elif wish.resume and wish.path:
        raise ConfigError(f"{wish.path} holds weights of Hugging Face, from which no training can be resumed: they have no "
                          f"optimizer state and no step. To begin with them set resume_training: False (no_load_optim: True), or "
                          f"give them as pretrained_model_dir and the folder of checkpoints as load_checkpoint")
    else:
        folder = wish.path or pretrained
    if choice is None and folder:
        adapter.logger().info("mindresume: weights of Hugging Face to begin with: %s", folder)
    current.online = session.Online(resume, wish.balanced, folder, choice is None, wish.workers) if folder else None
    config.load_checkpoint, config.resume_training, config.load_ckpt_format = folder, resume, "safetensors"
    if config.get("checkpoint"):
        config.checkpoint.load_path, config.checkpoint.no_load_optim = folder, not resume
    config.auto_trans_ckpt = False                                  # there is nothing left to be converted, or cleared


def _shown(root: str, base: str) -> str:
    """The folder that mindformers is shown. It looks for ``common.json`` there: where there is none, in one of our own."""
    folder = os.path.abspath(os.path.join(root, base))
    if os.path.isfile(os.path.join(folder, COMMON)):
        return folder
    folder = tempfile.mkdtemp(prefix="mindresume-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with open(os.path.join(folder, COMMON), "w") as file:
        file.write("{}")
    return folder


def is_pretrained(storage: Storage, path: str) -> bool:
    """Whether it is a folder of Hugging Face: complete weights, and the configuration of the model beside them."""
    return storage.status(os.path.join(path, CONFIG)) is not None and is_complete(storage, path)


def _health_matters(config: Any) -> bool:
    monitor = config.get("monitor_config") or {}
    return bool((monitor.get("health_checkpoint") or {}).get("embedding_local_norm_threshold"))


# ---- counters --------------------------------------------------------------------------------------------------------

def common_for(config: Any, dataset_size: int, current: session.Session) -> dict[str, Any]:
    """Numbers of ``common.json`` with which the formulas of mindformers (trainer/base_trainer.py, training_process) give the
    progress of this run: at its own global batch size nothing is scaled any more. ProgressError: see
    ``loading.progress_for``."""
    progress, scale = loading.progress_for(config, dataset_size, current)
    runner, epoch = config.runner_config, progress.initial_epoch
    if not runner.sink_mode:                                        # it subtracts one within an epoch
        epoch += progress.initial_step % dataset_size != 0
    if scale is None:                                               # it would be set to that
        scale = loading.runner_scale(config)
        scale = getattr(scale, "loss_scale_value", scale)
    return {"epoch_num": epoch, "step_num": progress.initial_step, "global_step": progress.global_step, "loss_scale": scale,
            "global_batch_size": runner.global_batch_size}


# ---- at the load -----------------------------------------------------------------------------------------------------

def load(network: Any, optimizer: Any, current: session.Session) -> None:
    """Loads what was chosen: all parameters of the train network, or without resume those of ``network``. AgreementError on all
    ranks for whatever fails on one."""
    if current.online.pretrained:
        return load_pretrained(current.online.model._train_network, network, current.online.folder, current)
    train, source = current.online.model._train_network, agreed(current.group, current.open_source, OPENING)
    shapes, of_model = adapter.wanted_of(train, source.weights.tensors), set(network.parameters_dict())
    of_optimizer = set(optimizer.parameters_dict()) if optimizer is not None else set()
    names = set(shapes) if current.online.resume else of_model & set(shapes)
    optional = _optional(current, names - of_model - of_optimizer)
    arrays = _arrays(train, source, {name: shapes[name] for name in names}, of_model, current, optional)
    return loading.put(train, arrays, False, current, lambda name: name not in names or optional(name))


def load_pretrained(train: Any, network: Any, folder: str, current: session.Session) -> None:
    """Weights of Hugging Face, of this rank's slices only. ``train``: what was compiled, with ``network`` in it."""
    core = adapter.core_network(network)
    template = getattr(core, "template", None)
    if template is None:
        raise ConfigError(f"{folder}: {type(core).__name__} has no conversion of Hugging Face weights in mindformers; there is "
                          f"one for {', '.join(ARCHITECTURES)}. Convert the weights first, and load them as load_checkpoint")
    names = set(network.parameters_dict())
    wanted = {name: row for name, row in adapter.wanted_of(train).items() if name in names and not is_transient(name)}
    layouts = job_layouts(train, {name: shape for name, (shape, _) in wanted.items()}, current.group.size,
                          lambda text: adapter.logger().warning("mindresume: %s", text))
    traffic, waiting = telling.traffic_of_load(sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in wanted.values()))
    arrays = agreed(current.group, lambda: read_network(
        PosixStorage(), folder, wanted, layouts, current.group.rank, network=core.get_gpt_transformer_config(),
        tied=core.config.tie_word_embeddings, converters=template.weight_converters, traffic=traffic), waiting)
    loaded = set(arrays)
    adapter.logger().info("mindresume: rank %d loads %d tensors of %s: %.1f MiB read", current.group.rank, len(arrays), folder,
                          traffic.read / 2**20)
    loading.put(train, arrays, False, current, lambda name: name not in loaded)


def _arrays(network: Any, source: Source, shapes: Mapping[str, tuple[tuple[int, ...], str]], of_model: Collection[str],
            current: session.Session, optional: Callable[[str], bool]) -> dict[str, Any]:
    """{name: array} of the parameters ``shapes`` of this rank, of a compiled network."""
    log, group = adapter.logger(), current.group
    layouts = job_layouts(network, {name: shape for name, (shape, _) in shapes.items()}, group.size,
                          lambda text: log.warning("mindresume: %s", text))
    regions = agreed(group, lambda: _regions(source.weights, shapes, layouts, of_model, group.rank, optional))
    initialised = [name for name in shapes if name not in regions and not is_transient(name)]
    if initialised and group.rank == 0:
        log.warning("mindresume: not in %s, and left as they are initialised: %s", source.what, listed(initialised))
    mine, exchanges = _shared(source.weights, regions, layouts, current)
    traffic, waiting = telling.traffic_of_load(bytes_of(source.weights, mine))
    arrays = agreed(group, partial(read_regions, source.weights, mine, max(WORKERS, current.online.workers), traffic), waiting)
    received = 0
    if exchanges:
        passing = Passing()
        dtypes = {name: source.weights.tensors[name].dtype for name in regions}
        received = pass_on(arrays, exchanges, regions, dtypes, group.rank, passing)
        passing.close()
    log.info("mindresume: rank %d loads %d tensors, %.1f MiB, of %s: %.1f MiB read%s", group.rank, len(regions),
             sum(array.nbytes for array in arrays.values()) / 2**20, source.what, traffic.read / 2**20,
             f", {received / 2**20:.1f} MiB from other ranks" if exchanges else "")
    return arrays


def _shared(weights: Weights, regions: Mapping[str, Region], layouts: Mapping[str, Any], current: session.Session
            ) -> tuple[Mapping[str, Region], list[Exchange]]:
    """With balanced load: what this rank reads, and what the ranks pass on to each other."""
    if not current.online.balanced:
        return regions, []
    mine, exchanges = plan(regions, layouts, {name: DTYPES[weights.tensors[name].dtype].itemsize for name in regions},
                           current.group.rank)
    if not any(report(current.group, lambda: bool(exchanges))):
        adapter.logger().info("mindresume: load_balanced (balanced_load) has no effect: no two ranks of this job hold the same "
                              "part of a tensor")
    return mine, exchanges


def _regions(weights: Weights, shapes: Mapping[str, tuple[tuple[int, ...], str]], layouts: Mapping[str, Any],
             of_model: Collection[str], rank: int, optional: Callable[[str], bool]) -> dict[str, Region]:
    absent = [name for name in shapes if name not in weights.tensors and not optional(name)]
    weights_alone = all(name in of_model or is_counter(tensor) for name, tensor in weights.tensors.items())
    if absent and weights_alone and not any(name in of_model for name in absent):
        raise LoadError(f"{weights.name} holds no optimizer state: it was saved with no_save_optim (save_optimizer: False). To "
                        f"take the weights alone and start at step 0, set no_load_optim: True (resume_training: False)")
    return wanted_regions(weights, shapes, layouts, rank, optional, allow=True)


def _optional(current: session.Session, of_step: Collection[str]) -> Callable[[str], bool]:
    """Parameters that a checkpoint need not have: those that live within a step, those that the user allows, the optimizer's
    counter of steps, which is set anyway, and ``of_step``, those of the train step, which mindformers never saves."""
    def optional(name: str) -> bool:
        return is_transient(name) or name == "global_step" or name in of_step or current.settings.allows(name)
    return optional
