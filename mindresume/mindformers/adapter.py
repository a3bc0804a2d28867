"""Calls mindformers and MindSpore for the other modules. The table of ``upstream`` lists every name
that is called."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindresume.coordination.collectives import Group
from mindresume.errors import SaveError
from mindresume.events import Event, Handler, LogLines, Resumed, ResumeProved, SaveWritten
from mindresume.formats.huggingface import ATTENTION_KEY, MLP_KEY
from mindresume.mindformers import upstream
from mindresume.mindformers.network_state import is_parallel
from mindresume.model.layout import Shape
from mindresume.model.training_state import is_transient

# the trainer passes its arguments only to a callback of this name
ALIAS = "CheckpointMonitor"
Tensors = list[tuple[str, Any]]  # (name, tensor or parameter), in the order of the network


def has_loss() -> bool:
    """Returns whether this rank computes the loss of the model: with pipeline stages only the last
    stage does (mindformers core/callback/callback.py, MFLossMonitor)."""
    from mindformers.tools.utils import is_last_pipeline_stage
    from mindspore import context

    return context.get_auto_parallel_context("pipeline_stages") <= 1 or is_last_pipeline_stage()


def is_deterministic() -> bool:
    """Returns whether the same step computes the same bits again: on a CPU, and where the
    configuration asks MindSpore for it."""
    from mindspore import get_context

    return get_context("device_target") == "CPU" or get_context("deterministic") == "ON"


def load_path(config: Any) -> str:
    """Returns the path from which mindformers loads: since 1.9.0 it keeps it in the section
    ``checkpoint``."""
    return str(
        (config.get("checkpoint") or {}).get("load_path") or config.get("load_checkpoint") or ""
    )


# folder in ``output_dir`` (mindformers DEFAULT_CHECKPOINT_DIR)
CHECKPOINTS = "checkpoint"


def output_root() -> str:
    """Returns ``output_dir`` of this training."""
    from mindformers.tools.utils import get_output_root_path

    return get_output_root_path()


@dataclass(frozen=True)
class Wanted:
    """Says which parameters are saved, as MindSpore asks it: all that last longer than a step.

    Attributes:
        only: no others than these; None: all.
        left_out: names that are not saved.
    """

    only: Container[str] | None = None
    left_out: Container[str] = ()

    def __call__(self, name: str) -> bool:
        return (
            not is_transient(name)
            and name not in self.left_out
            and (self.only is None or name in self.only)
        )


def parameters_to_save(
    network: Any, integrated: bool, wanted: Wanted, known: SavedParameters | None = None
) -> Tensors:
    """Returns (name, tensor) of everything that mindspore.save_checkpoint would save of ``network``
    on this rank, in its order.

    All ranks must call it: pipeline stages exchange the parameters that they share, and with
    ``integrated`` slices are gathered. ``known``: remembers the result for later saves.
    """
    from mindspore import Tensor

    if known is not None and (rows := known.rows(network, wanted)) is not None:
        return rows
    found = _saved_by_mindspore(network, integrated, wanted)
    found += [
        (name, Tensor(parameter.data))
        for name, parameter in _unsaved_counters(network, found, wanted)
    ]
    if known is not None and not collect_is_collective(network, integrated):
        known.remember(found)
    return found


class SavedParameters:
    """Remembers which parameters MindSpore saves of a network: to find them takes it longer than a
    copy of a small network.

    It is asked again as soon as a parameter is another object, or differs in anything that the
    answer depends on.
    """

    def __init__(self) -> None:
        # also keeps them alive, so that no other object gets the id of one
        self._parameters: list[Any] = []
        self._seen: list[tuple[Any, ...]] = []
        self._rows: Tensors | None = None

    def rows(self, network: Any, wanted: Wanted) -> Tensors | None:
        """Returns the rows that were remembered; None if MindSpore has to be asked."""
        self._parameters = [parameter for _, parameter in network.parameters_and_names()]
        seen = [
            (
                id(parameter),
                parameter.name,
                parameter.sliced,
                parameter.has_init,
                _is_offloaded(parameter),
                wanted(parameter.name),
            )
            for parameter in self._parameters
        ]
        if seen != self._seen:
            self._seen, self._rows = seen, None
        return self._rows

    def remember(self, found: Tensors) -> None:
        """Remembers what MindSpore saved, right after ``rows`` returned None, if each row is the
        data of one parameter."""
        from mindspore import Tensor

        plain = {
            parameter.name: parameter
            for parameter in self._parameters
            if not parameter.has_init and not _is_offloaded(parameter)
        }
        # with it MindSpore saves copies that it has made before
        if os.getenv("MS_ENABLE_D2H_ASYNC") != "1" and all(
            name in plain and type(tensor) is Tensor and tensor.shape == plain[name].shape
            for name, tensor in found
        ):
            self._rows = [(name, plain[name]) for name, _ in found]


def _is_offloaded(parameter: Any) -> bool:
    return parameter.data.offload_file_path() != ""


def rescued_parameters(network: Any, wanted: Wanted) -> Tensors:
    """Returns what ``parameters_to_save`` does, without any exchange, for the ranks that are left
    when others are lost.

    As MindSpore does with __exception_save__ (save_checkpoint of train/serialization.py), it copies
    to the host on a separate stream, because the stream of the training may wait forever. A
    parameter that several pipeline stages share is saved by the stage that owns it; the others mark
    what they receive, and leave it out of every save.

    Raises:
        SaveError: This rank receives a parameter that has no mark: its newest value is on another
            rank.
    """
    from mindspore import Tensor, hal
    from mindspore._c_expression import TensorPy
    from mindspore.train import serialization

    parallel = serialization._is_auto_parallel_mode(network)
    chosen = serialization._convert_cell_param_and_names_to_dict(network, wanted, parallel)
    received = {name for name, row in _shared_rows(network).items() if row[8] and not row[9]} & set(
        chosen
    )
    if received:
        raise SaveError(
            f"the remaining ranks cannot save {min(received)}: another pipeline stage has its "
            "newest value, and the exchange would wait for lost ranks. The newest checkpoint stays"
        )
    found: Tensors = []
    stream = hal.Stream()
    with hal.StreamCtx(stream):
        for name, parameter in chosen.items():
            found.append(
                (
                    name,
                    parameter.data
                    if _is_offloaded(parameter)
                    else Tensor(TensorPy.move_to(parameter, "CPU", False)),
                )
            )
        found += [
            (name, Tensor(parameter.move_to("CPU", False)))
            for name, parameter in _unsaved_counters(network, found, wanted)
        ]
    stream.synchronize()
    return found


def collect_is_collective(network: Any, integrated: bool) -> bool:
    """Returns whether ``parameters_to_save``, or mindspore.save_checkpoint, waits for other
    ranks."""
    return integrated and is_parallel() or any(row[8] for row in _shared_rows(network).values())


def _shared_rows(network: Any) -> dict[str, Any]:
    """Returns {name: layout}, as mindspore.parallel.sync_pipeline_shared_parameters reads it. Item
    8 of a layout: whether stages share the parameter; item 9: whether this stage sends it."""
    from mindspore import context

    if context.get_auto_parallel_context("pipeline_stages") < 2:
        return {}
    table = network.parameter_layout_dict
    if not table:
        from mindspore.train.serialization import _get_parameter_layout

        table = _get_parameter_layout()
    return {name: row for name, row in table.items() if len(row) >= 10}


def _saved_by_mindspore(network: Any, integrated: bool, wanted: Wanted) -> Tensors:
    from mindspore.train.serialization import _convert_save_obj_to_param_list

    rows = _convert_save_obj_to_param_list(network, integrated, {}, wanted)
    # a parameter offloaded to disk comes as ["offload_parameter", tensor, shape, dtype, key]
    return [
        (row["name"], row["data"][1] if isinstance(row["data"], list) else row["data"])
        for row in rows
    ]


def _unsaved_counters(network: Any, found: Tensors, wanted: Wanted) -> Tensors:
    """Returns (name, parameter) of the counters (``_is_counter``) that MindSpore did not save."""
    saved = {name for name, _ in found}
    return (
        [
            (parameter.name, parameter)
            for _, parameter in network.parameters_and_names()
            if _is_counter(parameter) and parameter.name not in saved and wanted(parameter.name)
        ]
        if is_parallel()
        else []
    )


def _is_counter(parameter: Any) -> bool:
    """Returns whether ``parameter`` is a single number, such as ``global_step`` or ``scale_sense``.

    If several ranks compile a graph together, MindSpore marks all its parameters as sliced and
    saves the marked ones. If the graph comes from the compile cache, it marks only parameters that
    have a layout, and counters have none.
    """
    return (
        parameter.size == 1
        and not parameter.has_init
        and not parameter.param_info.is_pipeline_shared_param
    )


def own_share(network: Any, rank: int, world_size: int) -> Wanted:
    """Returns the parameters that this rank saves with the redundancy removal of Checkpoint 1.0, by
    MindSpore's own assignment of replicas (mindformers core/callback/callback.py,
    remove_redundancy)."""
    from mindspore import context
    from mindspore.train._utils import get_parameter_redundancy, remove_param_redundancy

    table = network.parameter_layout_dict
    if not table:
        return Wanted(remove_param_redundancy(get_parameter_redundancy(network)).get(rank) or ())
    stage = world_size // context.get_auto_parallel_context("pipeline_stages")
    redundancy = get_parameter_redundancy(table, rank // stage * stage)
    return Wanted(left_out=set(table) - set(remove_param_redundancy(redundancy).get(rank) or ()))


def compile_for_load(
    config: Any,
    model: Any,
    dataset: Any,
    group: Group,
    do_eval: bool = False,
    do_predict: bool = False,
) -> None:
    """Compiles the network, which cuts its parameters into slices and writes the strategy files;
    then waits for the other ranks of ``group``, as mindformers does before it loads. ``do_eval``,
    ``do_predict``: the network is not trained."""
    from mindformers.trainer.utils import compile_model

    runner = config.runner_config
    compile_model(
        model=model,
        dataset=dataset,
        mode=config.context.mode,
        sink_mode=runner.sink_mode,
        epoch=runner.epochs,
        sink_size=runner.sink_size,
        do_eval=do_eval,
        do_predict=do_predict,
    )
    group.gather(b"")


def call_when_compiled(network: Any, work: partial[None]) -> None:
    """Calls ``work`` once, when the next call of ``network`` has compiled it and is about to
    compute; at once if nothing is compiled (mindspore nn/cell.py, compile_and_run)."""
    from mindspore import context

    if context.get_context("mode") != context.GRAPH_MODE:
        work()
        return
    object.__setattr__(network, "compile", partial(_compile_once, network, work))


def _compile_once(network: Any, work: partial[None], *args: Any, **kwargs: Any) -> Any:
    network.__dict__.pop("compile", None)
    compiled = network.compile(*args, **kwargs)
    work()
    return compiled


def convert_health_keys(trainer: Any) -> None:
    """Converts the older keys of the health monitor (``use_checkpoint_health_monitor``) in the
    configuration, as mindformers does after the selection (trainer/trainer.py,
    _check_config_rules). A second conversion changes nothing. 1.8.0 has one dialect."""
    if hasattr(trainer, "_convert_health_checkpoint_config"):
        trainer._convert_health_checkpoint_config()


def pet_type(config: Any) -> str:
    """Returns ``pet_type`` of ``pet_config``, such as LoRA, for which mindformers adds parameters
    to the network; empty if it is not set."""
    found: Any = config
    for key in ("model", "model_config", "pet_config", "pet_type"):
        found = found.get(key) if hasattr(found, "get") else getattr(found, key, None)
    return str(found or "")


def reason_for_builtin_load(network: Any, names: Iterable[str], known: bool) -> str:
    """Returns why mindformers' own code must load these tensors into this network; empty if
    mindresume can. ``known``: the tensors are a Hugging Face folder that mindresume can convert."""
    if hasattr(network, "llm_boost"):
        return "llm_boost converts the weights itself"
    if (
        known
        and is_graph_training_network(core_network(network))
        or set(names) & set(network.parameters_dict())
    ):
        return ""
    origin = _translating_network(network)
    if origin is None or all(_translated(origin, name) == name for name in names):
        return ""
    return "these are names of Hugging Face, which this network translates"


def is_graph_training_network(core: Any) -> bool:
    """Returns whether a model is a training network of the graph trainer, for which Hugging Face
    weights can have rules."""
    return bool(getattr(core, "is_train_model", False)) and hasattr(
        core, "get_gpt_transformer_config"
    )


def _translating_network(network: Any) -> Any:
    """Returns the network below ``network`` that translates Hugging Face names, or None."""
    from mindformers.utils.load_checkpoint_utils import _get_origin_network

    origin, found = _get_origin_network(network)
    return origin if found else None


def _translated(origin: Any, name: str) -> str:
    try:
        return origin.convert_name(name)
    except RuntimeError:  # the base class: not implemented
        return name


def core_network(network: Any) -> Any:
    """Returns the model without the cells that a trainer wraps around it."""
    from mindformers.checkpoint.checkpoint import get_core_network

    return get_core_network(network)


# Two keys of mindformers decide how the graph trainer orders the elements within linear_qkv and
# linear_fc1. The PyNative trainer has this one order. mindformers 1.8.0, 1.9.0, 2.0.0 and 2.1.0
# have the same defaults.
ARRANGEMENT = {ATTENTION_KEY: False, MLP_KEY: True}


def arrangement_of(network: Any) -> dict[str, bool]:
    """Returns {key: value} of the keys that have an effect in a network of the graph trainer, which
    other cells may wrap; empty for a network without them. Latent attention has no linear_qkv."""
    config = next(
        (
            cell.get_gpt_transformer_config()
            for _, cell in network.cells_and_names()
            if is_graph_training_network(cell)
        ),
        None,
    )
    keys = (
        [MLP_KEY] if getattr(config, "multi_latent_attention", False) else [ATTENTION_KEY, MLP_KEY]
    )
    return {key: bool(getattr(config, key)) for key in keys if hasattr(config, key)}


def load_into(
    network: Any, arrays: dict[str, Any], remove_redundancy: bool = False
) -> tuple[list[str], list[str]]:
    """Hands the arrays to the parameters without a copy, and empties ``arrays``. With
    ``remove_redundancy`` replicas receive what other ranks loaded. Returns (names of the network's
    parameters that got no value, names of arrays that none took). MindSpore tells of a parameter
    that it skips, such as one that pipeline stages share, only in the second.

    Without ``strict_load`` MindSpore gives a parameter that has no array the array of a longer name
    with the same end: that of ``adam_m.weight`` for ``weight``.
    """
    from mindspore import load_param_into_net

    parameters = {name: _parameter(name, to_tensor(arrays.pop(name))) for name in list(arrays)}
    return load_param_into_net(
        network, parameters, strict_load=True, remove_redundancy=remove_redundancy
    )


def pynative_layouts(cell: Any) -> dict[str, Any]:
    """Returns {name: [Layout or None, dtype, global shape]} of the parameters of a PyNative cell on
    this rank."""
    from mindformers.checkpoint.layout_adapter import LayoutAdapter

    return LayoutAdapter.get_current_layout(cell) or {}


def _parameter(name: str, tensor: Any) -> Any:
    """Returns a parameter that uses the memory of ``tensor``: ``Parameter(tensor)`` would copy it,
    ``set_data`` does not."""
    from mindspore import Parameter, Tensor

    parameter = Parameter(Tensor([0], tensor.dtype), name=name)
    return parameter.set_data(tensor, slice_shape=True)


def to_tensor(array: Any) -> Any:
    """Returns a MindSpore tensor that uses the memory of ``array``, which must be C-contiguous and
    writable."""
    import ml_dtypes
    from mindspore import Tensor
    from mindspore.common import np_dtype

    if array.dtype == ml_dtypes.bfloat16:
        array = array.view(np_dtype.bfloat16)  # MindSpore's type with the same bits
    return Tensor.from_numpy(array)


def parameters_to_load(network: Any, offered: Container[str] = ()) -> dict[str, tuple[Shape, str]]:
    """Returns {name: (shape, dtype)} of the parameters that this rank holds. ``offered``: the names
    that can be loaded; of the counters that MindSpore does not mark as sliced (``_is_counter``)
    only these are returned."""
    parallel = is_parallel()
    wanted = {}
    for _, parameter in network.parameters_and_names():
        if parameter.param_info.is_pipeline_shared_param:
            continue
        if (
            parallel
            and not parameter.sliced
            and not (parameter.name in offered and _is_counter(parameter))
        ):
            continue
        wanted[parameter.name] = (tuple(parameter.shape), str(parameter.dtype).lower())
    return wanted


# ---- handlers of events --------------------------------------------------------------------------


class MindFormersLog(Handler):
    """Writes log lines to mindformers' logger."""

    def handle(self, event: Event, time_s: float) -> None:
        from mindformers.tools.logger import get_logger

        LogLines(get_logger()).handle(event, time_s)


class TensorBoard(Handler):
    """Writes scalars with mindformers' writer (``tensorboard: tensorboard_dir``), which is created
    while the training is set up; writes nothing if it is disabled. All names begin with
    ``mindresume/``:

        save-seconds  save-stall-seconds  save-MiB      at each saved step; stall: how long the
                      training thread waited
        load-seconds  steps-lost  seconds-lost          at the step from which a training resumed
        resume-steps-compared  resume-steps-different   the same
    """

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, SaveWritten):
            rows = {
                "save-seconds": event.write_seconds,
                "save-stall-seconds": event.stall_seconds,
                "save-MiB": event.size_bytes / 2**20,
            }
        elif isinstance(event, Resumed):
            rows = {
                "load-seconds": event.load_seconds,
                "steps-lost": event.lost_steps,
                "seconds-lost": event.lost_seconds,
            }
        elif isinstance(event, ResumeProved):
            rows = {
                "resume-steps-compared": event.steps,
                "resume-steps-different": event.differences,
            }
        else:
            return
        if upstream.is_off(upstream.TENSORBOARD):
            return
        from mindformers.utils.tensorboard import get_tensorboard_writer

        writer = get_tensorboard_writer()
        for name, value in rows.items():
            if writer is not None and value is not None:
                writer.add_scalar(f"mindresume/{name}", value, global_step=event.step)
