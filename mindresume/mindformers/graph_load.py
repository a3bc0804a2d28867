"""Loads into the network of mindformers' graph trainer: a resume, weights alone, Checkpoint 2.0,
Hugging Face weights.

    load_resume         Checkpoint 1.0: compiles where parameters are cut, and loads the optimizer
                        too
    load_weights        Checkpoint 1.0, weights alone: for the begin of a training, an evaluation or
                        a prediction
    load_iterations     Checkpoint 2.0, compiled already

mindformers' own code still loads Hugging Face names that only it can translate, and networks that
convert their weights themselves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mindresume.coordination.collectives import run_on_all, run_on_rank0
from mindresume.coordination.rank_heartbeat import COMPILING, LOADING
from mindresume.errors import ConfigError, LoadError
from mindresume.events import ProgressReporter, warning
from mindresume.formats import CheckpointDir
from mindresume.formats.huggingface_families import FAMILIES
from mindresume.mindformers import adapter, heartbeat, loading
from mindresume.mindformers.auto_transform import OPENING
from mindresume.mindformers.loading import COUNTER
from mindresume.mindformers.network_state import job_layouts
from mindresume.mindformers.training_context import TrainingContext
from mindresume.model.layout import Layouts
from mindresume.model.training_state import is_transient, may_be_absent
from mindresume.reshard.huggingface import (
    NetworkModel,
    is_huggingface,
    is_no_weight,
    view_for_network,
)
from mindresume.reshard.open_checkpoint import OpenCheckpoint, open_consolidated
from mindresume.reshard.region_load import LoadTarget
from mindresume.storage.posix import PosixStorage


@dataclass(frozen=True)
class GraphNetwork:
    """The network of the graph trainer, compiled where parameters are cut.

    Attributes:
        cell: takes the parameters: the train cell with its optimizer, or the network alone.
        model: the network without the cells of a train step; None: not told apart.
    """

    context: TrainingContext
    config: Any
    cell: Any
    model: Any = None
    optimizer: Any = None

    @property
    def arrangement(self) -> Mapping[str, bool]:
        return adapter.arrangement_of(self.cell)

    def target(self, stored: Mapping[str, Any], what: str) -> LoadTarget:
        """Returns all parameters of the cell, or without a resume those of the model. A resume in
        Checkpoint 1.0 lacks nothing; in 2.0 it may lack the parameters of the train step, which
        mindformers never saves, and the optimizer's counter, which is set separately."""
        request, allows = self.context.plan.request, self.context.settings.allows
        shapes = adapter.parameters_to_load(self.cell, stored)
        if request.resumes_from_files:
            return LoadTarget(shapes, {})
        of_model = set(self.model.parameters_dict())
        if not request.resume:
            shapes = {name: row for name, row in shapes.items() if name in of_model}
            if not shapes:
                raise LoadError(
                    f"after the compilation this rank holds none of the {len(of_model)} parameters "
                    "of the network, so nothing can be loaded"
                )
        optional = {name for name in shapes if allows(name)}
        if request.iterations:
            of_optimizer = (
                set(self.optimizer.parameters_dict()) if self.optimizer is not None else set()
            )
            return LoadTarget(
                shapes,
                {},
                optional | {COUNTER} | (set(shapes) - of_model - of_optimizer),
                of_model,
                True,
            )
        if adapter.pet_type(self.config) and request.trains:
            optional |= loading.new_adapters(shapes, stored)
        return loading.renamed(
            LoadTarget(shapes, {}, optional, proposes=True), stored, what, self.context.emit
        )

    def layouts(self, target: LoadTarget) -> Layouts:
        shapes = {target.parameter(name): shape for name, (shape, _) in target.shapes.items()}
        found = job_layouts(self.cell, shapes, self.context.group.size, self.context.emit)
        return {
            name: found[parameter]
            for name in target.shapes
            if (parameter := target.parameter(name)) in found
        }

    def assign(self, arrays: dict[str, np.ndarray], target: LoadTarget) -> None:
        request = self.context.plan.request
        required = {target.parameter(name) for name in target.shapes if name not in target.optional}
        left = [
            name
            for name in adapter.load_into(self.cell, arrays, target.deduplicated)[0]
            if not may_be_absent(name) and (name in required or request.resumes_from_files)
        ]
        if left:
            raise LoadError(
                f"{len(left)} parameters of the network got no value, for example {left[0]}"
            )


# ---- the loads -----------------------------------------------------------------------------------


def load_resume(config: Any, model: Any, dataset: Any, context: TrainingContext) -> None:
    """Compiles where parameters are cut, then loads the selected checkpoint into the training
    network, optimizer included.

    Raises:
        CollectiveError: On all ranks, if one fails.
    """
    early = None
    plan = context.plan
    reporter = ProgressReporter("loading", context.emit)
    network = GraphNetwork(context, config, model._train_network)
    loading.check_arrangement(plan, network.arrangement)
    # read while the graph is compiled
    if config.load_ckpt_async and plan.open_source is None:
        early = ThreadPoolExecutor(1).submit(
            loading.read_shard,
            CheckpointDir(context.resources.storage, plan.choice.root),
            context.shard,
            reporter,
        )
    if config.use_parallel and adapter.is_parallel():
        heartbeat.enter(COMPILING)
        adapter.compile_for_load(config, model, dataset, context.group)
    heartbeat.enter(LOADING)
    with context.progress.timed_load():
        if early is not None:
            loading.load_own_files(network, context, early, reporter)
        else:
            loading.load(network, context)


def load_weights(
    config: Any,
    model: Any,
    network: Any,
    dataset: Any,
    context: TrainingContext,
    do_eval: bool = False,
    do_predict: bool = False,
) -> bool:
    """Loads the selected weights into the parameters of ``network``. Returns False, with nothing
    loaded, if mindformers must do it.

    Raises:
        CollectiveError: On all ranks, if one fails.
    """
    request = context.plan.request
    group = context.group
    storage = context.resources.storage
    open_source = context.plan.open_source
    path = adapter.load_path(config)
    # mindformers wrote translated names into new files
    if os.path.realpath(path) != os.path.realpath(request.path):
        open_source = partial(open_consolidated, storage, path)
    source = run_on_all(group, open_source, OPENING) if open_source is not None else None
    loading.check_arrangement(context.plan, adapter.arrangement_of(network))
    if not request.trains:
        network.set_train(False)
    known = run_on_rank0(
        group,
        lambda: (
            source is not None
            and source.candidate is None
            and
            # rank 0 decides, because collectives follow
            is_huggingface(storage, source.weights.name)
        ),
    )
    if reason := adapter.reason_for_builtin_load(
        network, source.weights.tensors if source else (), known
    ):
        context.emit(
            warning(
                f"{request.path}: {reason}; mindformers loads it, and logs the parameters that got "
                "no value"
            )
        )
        config.auto_trans_ckpt = request.converts
        return False
    if config.use_parallel and adapter.is_parallel():
        adapter.compile_for_load(config, model, dataset, group, do_eval, do_predict)
    graph = GraphNetwork(
        context, config, model._train_network if request.trains else network, network
    )
    with context.progress.timed_load():
        if known and not set(network.parameters_dict()) & set(source.weights.tensors):
            load_pretrained(graph, source.weights.name)
        else:
            loading.load(graph, context, source)
    context.resources.release()
    return True


def load_iterations(network: Any, optimizer: Any, context: TrainingContext) -> None:
    """Loads the selected checkpoint in Checkpoint 2.0: all parameters of the train network, or
    without resume those of ``network``.

    Raises:
        CollectiveError: On all ranks, if one fails.
    """
    plan, objects = context.plan, context.objects
    graph = GraphNetwork(context, objects.config, objects.model._train_network, network, optimizer)
    loading.check_arrangement(plan, graph.arrangement)
    if plan.request.pretrained:
        load_pretrained(graph, plan.request.path)
    else:
        loading.load(graph, context)


def load_pretrained(graph: GraphNetwork, folder: str) -> None:
    """Loads this rank's slices of Hugging Face weights."""
    context, core = graph.context, adapter.core_network(graph.model)
    if not adapter.is_graph_training_network(core):
        raise ConfigError(
            f"{folder}: no rule is known for Hugging Face weights of {type(core).__name__}, only "
            f"for the training networks of {', '.join(FAMILIES)}. Convert the weights first, and "
            "give them as load_checkpoint"
        )
    # only Qwen3 has one, since mindformers 1.9.0
    template = getattr(core, "template", None)
    model = NetworkModel(
        core.get_gpt_transformer_config(),
        core.config.tie_word_embeddings,
        template.weight_converters if template else (),
        core.config.model_type,
    )
    of_model = set(graph.model.parameters_dict())
    shapes = {
        name: row
        for name, row in adapter.parameters_to_load(graph.cell).items()
        if name in of_model and not is_transient(name)
    }
    target = LoadTarget(shapes, graph.layouts(LoadTarget(shapes, {})))
    weights = run_on_all(
        context.group,
        partial(view_for_network, PosixStorage(), folder, target, model, context.emit),
        OPENING,
    )
    shapes = {
        name: row
        for name, row in shapes.items()
        if name in weights.tensors or not is_no_weight(name)
    }
    loading.load_regions(
        graph,
        OpenCheckpoint(weights, None, None, None, folder),
        replace(target, shapes=shapes),
        context,
    )
