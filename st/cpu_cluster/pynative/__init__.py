"""Lets the real PyNative trainer of mindformers (1.9.0, 2.0.0, 2.1.0) run on the MindSpore CPU
backend.

Test equipment: patches in the memory of this process only. Checkpoint, resume and callback code is
not touched.

    CPU_CLUSTER_TRAINER=pynative python st/cpu_cluster/run.py program.py args...       # one process
    # >= 2.0
    CPU_CLUSTER_TRAINER=pynative python st/cpu_cluster/launch.py 2 -- python st/cpu_cluster/run.py program.py args...

Modules: ``kernels`` (operators without a CPU kernel), ``backward`` (``Tensor.backward``, which
hyper_parallel adds), ``data_parallel`` (several processes, replicated parameters), ``recorder``
(exact loss and samples of every step), ``faults`` (ends this process at an exact place).
``tiny_qwen3.yaml`` is one configuration for all three releases. The package hyper_parallel itself
is represented by ``..hyper_parallel_standin`` unless it is installed.

Measured with mindformers 1.9.0 on mindspore 2.9.0, and 2.0.0 and 2.1.0 on 2.10.0. bfloat16 weights
with float32 computation work (2.0.0, 2.1.0); computation in bfloat16 does not. Never tried: mixture
of experts, pipeline stages, LoRA, ``fully_shard``.
"""  # noqa: E501

from __future__ import annotations

import importlib
import os


def is_chosen() -> bool:
    """Returns whether the program of this process uses the PyNative trainer."""
    return os.environ.get("CPU_CLUSTER_TRAINER") == "pynative"


def before_mindformers() -> None:
    """Patches MindSpore. ``launch_blocking``: operators run one after the other, in the same order
    each time."""
    import mindspore as ms

    from .. import hyper_parallel_standin, is_distributed
    from . import backward, data_parallel, kernels

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    kernels.install()
    hyper_parallel_standin.MEANINGS["enable_mindspore_backward_compat"] = backward.enable
    hyper_parallel_standin.install()
    if is_distributed():
        data_parallel.before_mindformers()


def after_mindformers() -> None:
    """Patches the trainer."""
    from .. import is_distributed
    from . import data_parallel

    if is_distributed():
        data_parallel.after_mindformers()
    observe()


def observe() -> None:
    """Adds the recorder and the faults, and imports the plug-in under test, if
    ``CPU_CLUSTER_PLUGIN`` names a module. Works on every device."""
    from . import faults, recorder

    recorder.install()
    faults.install()
    if os.environ.get("CPU_CLUSTER_PLUGIN"):
        importlib.import_module(os.environ["CPU_CLUSTER_PLUGIN"])
