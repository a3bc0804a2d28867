"""Collectives that the CPU communication library (mccl) lacks, made of those that it has, or of
files.

What: mccl has AllReduce(sum) on any group, AllGather on the world group, and Broadcast. Tensor and
optimizer parallelism also need

* ReduceScatter (the gradient of the AllGather of optimizer parallelism): here AllReduce, then the
  own slice is kept
* AllGather on a sub-group: here a Custom primitive that exchanges the pieces through files in
  /dev/shm. It has to be one primitive because the front end inserts it as one. Works on one host. A
  graph knows it by a number, which is the same in every process, so that a graph out of MindSpore's
  compile cache finds it.

The barrier and collectives of Python objects are in ``object_collectives``.

Why: without them dp2tp2, the smallest layout in which data and tensor parallelism meet, does not
run. Slices and copies are exact; sums run in the order of mccl's AllReduce. AlltoAll, Send and
Receive stay missing: no expert and no pipeline parallelism.

Environment: ``CPU_CLUSTER_SHM`` folder for the pieces (``launch`` makes and removes it; under msrun
see ``exchange_folder``), ``CPU_CLUSTER_GATHER_TIMEOUT`` seconds until an AllGather gives up on a
rank (120).
"""

import os
import time
import zlib

import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank
from mindspore.ops import operations as P
from mindspore.ops.operations._pyfunc_registry import CustomPyFuncRegistry

from . import exchange_folder, layouts, semi_auto

WORLD_GROUP = "mccl_world_group"
_MOST = 1000  # AllGathers of one group in a graph


class _ReduceScatter(nn.Cell):
    def __init__(self, op=None, group=WORLD_GROUP):
        super().__init__(auto_prefix=False)
        self.all_reduce = P.AllReduce(group=group)
        self.rank, self.size = get_rank(group), get_group_size(group)
        self.split = P.Split(0, self.size)

    def add_prim_attr(self, *_):
        return self

    def set_prim_instance_name(self, *_):
        return self

    def construct(self, x):
        return self.split(self.all_reduce(x))[self.rank]


class _SharedMemoryGather:
    """AllGather of one group through files: every rank publishes its piece, then reads those of the
    others.

    ``instance`` distinguishes the operators of a group; all ranks compile the same graph, so they
    count alike. Raises TimeoutError if the piece of another rank does not come.
    """

    def __init__(self, group, instance):
        self.rank, self.size = get_rank(group), get_group_size(group)
        folder = exchange_folder()
        os.makedirs(folder, exist_ok=True)
        self.stem = os.path.join(folder, f"{group}.{instance}")
        self.calls = 0
        self.timeout = float(os.environ.get("CPU_CLUSTER_GATHER_TIMEOUT", "120"))

    def __call__(self, x):
        call, self.calls = self.calls, self.calls + 1
        own = f"{self.stem}.{call}.{self.rank}"
        with open(own + ".part", "wb") as f:
            f.write(np.ascontiguousarray(x).tobytes())
        os.rename(own + ".part", own)
        pieces = [self._read(f"{self.stem}.{call}.{r}", x) for r in range(self.size)]
        # the others are in this call, so they have read the pieces before it
        if call >= 1:
            os.remove(f"{self.stem}.{call - 1}.{self.rank}")
        return np.concatenate(pieces)

    def _read(self, path, like):
        started = time.monotonic()
        while not os.path.exists(path):
            if time.monotonic() - started > self.timeout:
                raise TimeoutError(
                    f"cpu_cluster: {path} did not come within {self.timeout} s: that rank has died "
                    "or is stuck; see its log"
                )
            time.sleep(0.0002)
        with open(path, "rb") as f:
            return np.frombuffer(f.read(), like.dtype).reshape(like.shape)


def _all_gather(group, instance):
    """A primitive that stands for AllGather (dimension 0) on ``group``."""
    gather = _SharedMemoryGather(group, instance)
    size = gather.size
    scatter = _ReduceScatter(group=group)

    def all_gather(x):
        return gather(x)

    def bprop(x, out, dout):
        return (scatter(dout),)

    op = ops.Custom(
        all_gather,
        lambda shape: [shape[0] * size] + list(shape[1:]),
        lambda dtype: dtype,
        func_type="pyfunc",
        bprop=bprop,
    )
    op.group, op.rank_size = group, size
    CustomPyFuncRegistry.instance().register(_number(group, instance), all_gather)
    op.add_prim_attr("fn_id", _number(group, instance))
    return op


def _number(group, instance):
    return zlib.crc32(f"{group}.{instance}".encode())


def _find_of_cached_graphs():
    """Creates the operators that a graph from the compile cache asks for: no process has created
    them. MindSpore has created the groups of that graph, through ``semi_auto``."""
    original = CustomPyFuncRegistry.get

    def get(self, number):
        if number not in self._func_dict:
            found = next(
                (
                    (group, instance)
                    for group in semi_auto.CREATED_GROUPS
                    for instance in range(1, _MOST)
                    if _number(group, instance) == number
                ),
                None,
            )
            if found:
                self.register(number, _SharedMemoryGather(*found))
        return original(self, number)

    CustomPyFuncRegistry.get = get


def install() -> None:
    """Needs the communication to be initialised: group sizes are read."""
    import mindspore.parallel._utils as parallel_utils
    from mindspore.ops._grad_experimental import grad_comm_ops

    grad_comm_ops.ReduceScatter = _ReduceScatter
    original = parallel_utils._get_python_op
    keep_alive, instances = [], {}
    layouts.install(lambda: bool(keep_alive))
    _find_of_cached_graphs()

    def _get_python_op(op_name, op_path, instance_name, arglist):
        if op_name == "AllGather" and arglist and arglist[0] != WORLD_GROUP:
            instances[arglist[0]] = instances.get(arglist[0], 0) + 1
            op = _all_gather(arglist[0], instances[arglist[0]])
            op.set_prim_instance_name(instance_name)
            keep_alive.append(op)
            return op
        return original(op_name, op_path, instance_name, arglist)

    parallel_utils._get_python_op = _get_python_op


def install_when_connected() -> None:
    """Runs ``install`` right after mindformers has initialised the communication."""
    from mindformers.core.context.parallel import ParallelOperator

    original = ParallelOperator.init_communication

    def init_communication(self):
        result = original(self)
        install()
        return result

    ParallelOperator.init_communication = init_communication
