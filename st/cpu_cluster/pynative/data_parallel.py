"""Data parallel training of several processes with replicated parameters, for mindformers >= 2.0.

What: the communication is opened with the CPU library (mccl) in the place of "hccl"; each gradient
is summed over all ranks before its norm is computed, since the trainer begins backward with 1 /
number of ranks; the layouts for the checkpoint code say that each parameter is whole on every rank.
Collectives of objects that mccl lacks are made of ``all_gather_object``. Why: hyper_parallel's
``fully_shard`` needs collectives that the CPU library does not have. The trainer, its data (each
rank reads its own part), its checkpoint code and their order of calls are mindformers' own. Release
1.9.0 refuses several processes by itself.
"""

from __future__ import annotations

from typing import Any

from .. import hyper_parallel_standin, object_collectives


def _layouts(network: Any) -> dict[str, dict[str, Any]]:
    """Returns {parameter: layout} as hyper_parallel gives it. ``network``: a Cell, or the list of
    its pipeline stages."""
    from mindspore.communication import get_group_size

    size = get_group_size()
    cells = network if isinstance(network, (list, tuple)) else [network]
    return {
        name: {
            "device_matrix": (size,),
            "alias_name": ("dp",),
            "rank_list": list(range(size)),
            "tensor_map": (-1,) * len(parameter.shape),
            "type": str(parameter.dtype),
            "full_shape": tuple(parameter.shape),
        }
        for cell in cells
        for name, parameter in cell.parameters_dict().items()
    }


def get_global_layout(network: Any) -> dict[str, dict[str, Any]]:
    """Returns the layouts of all ranks: {rank as text: {parameter: layout}}."""
    from mindspore.communication import get_group_size

    return {str(rank): dict(_layouts(network)) for rank in range(get_group_size())}


def get_current_layout(network: Any) -> dict[str, dict[str, Any]]:
    """Returns the layouts of this rank in the same form."""
    from mindspore.communication import get_rank

    return {str(get_rank()): _layouts(network)}


def before_mindformers() -> None:
    """Opens the communication. Before ``import mindformers``."""
    import mindspore.mint.distributed as distributed
    from mindspore.communication import init

    init()
    # know "hccl" only
    distributed.init_process_group = distributed.destroy_process_group = lambda *_, **__: None
    object_collectives.install()
    hyper_parallel_standin.MEANINGS.update(
        get_global_layout=get_global_layout, get_current_layout=get_current_layout
    )


def after_mindformers() -> None:
    """Sums gradients, and leaves the model whole. After ``import mindformers``."""
    import mindformers.pynative.trainer.trainer as trainer
    from mindspore import ops

    norm, all_reduce = trainer._calculate_global_grad_norm, ops.AllReduce()

    def norm_of_sums(parameters, enable_parallel=False, **options):
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = all_reduce(parameter.grad)
        return norm(parameters, enable_parallel=False, **options)

    trainer._calculate_global_grad_norm = norm_of_sums
    trainer.Trainer._apply_parallelism = lambda self, model, parallelism: None
