"""The barrier, and collectives of Python objects, on the CPU communication library (mccl).

What: ``barrier`` becomes an AllReduce of one number; ``gather_object`` and
``broadcast_object_list`` become ``all_gather_object``. Why: mccl has no barrier, and those of
objects ask for the group "hccl_world_group" by name. Where they are depends on the release:
mindformers 1.8 to 2.0 take the barrier from ``mindspore.communication.comm_func``, 2.1 from
``mindspore.mint.distributed`` and ``mindspore.ops.communication``. Each module that exists is
patched."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import capabilities


def barrier(group: str | None = None, *_: Any, **__: Any) -> None:
    """Returns once all ranks of the job are here, whatever the group is."""
    from mindspore import Tensor, ops
    from mindspore.communication import get_group_size

    if get_group_size() > 1:
        ops.AllReduce()(Tensor(np.ones(1, np.float32))).asnumpy()


def _all_gather(value: Any, group: str | None) -> list[Any]:
    """Returns the values of all ranks in order. A group other than the world needs what mccl has
    not and fails."""
    from mindspore.communication import get_group_size
    from mindspore.mint.distributed import all_gather_object

    of_group = () if group is None or group.endswith("world_group") else (group,)
    values = [None] * get_group_size(*of_group)
    all_gather_object(values, value, *of_group)
    return values


def gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: str | None = None
) -> None:
    """Fills ``object_gather_list``, where there is one, with the objects of all ranks."""
    values = _all_gather(obj, group)
    if object_gather_list is not None:
        object_gather_list[:] = values


def broadcast_object_list(
    object_list: list[Any], src: int = 0, group: str | None = None, device: str | None = None
) -> None:
    """Makes ``object_list`` that of rank ``src``."""
    object_list[:] = _all_gather(object_list, group)[src]


def install() -> None:
    """Before ``import mindformers``, whose modules bind the names."""
    for module in capabilities.communication_modules():
        for function in (barrier, gather_object, broadcast_object_list):
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
