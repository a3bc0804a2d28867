"""What the installed MindSpore has, and where. The only place of this package that depends on a
release.

Each function looks for the thing itself; a version is compared only where there is nothing to look
at. Whether mindformers needs hyper_parallel is asked in ``hyper_parallel_standin.is_required``.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def executors() -> ModuleType:
    """Returns the module of ``_CellGraphExecutor`` and ``_pynative_executor``, which moved in
    MindSpore 2.9."""
    try:
        return importlib.import_module("mindspore.graph.api")
    except ImportError:
        return importlib.import_module("mindspore.common.api")


def communication_modules() -> list[ModuleType]:
    """Returns the modules from which mindformers takes ``barrier`` and collectives of objects: 1.8
    to 2.0 the first, 2.1 the others."""
    found = []
    for name in (
        "mindspore.communication.comm_func",
        "mindspore.mint.distributed",
        "mindspore.ops.communication",
    ):
        try:
            found.append(importlib.import_module(name))
        except ImportError:
            continue
    return found


def builds_models_on_meta() -> bool:
    """Returns whether there is the context of the device "meta", on which mindformers >= 2.0 builds
    PyNative models."""
    import mindspore as ms

    return hasattr(ms, "DeviceCtx")


def has_split_with_size() -> bool:
    """Returns whether SplitWithSize has a CPU kernel. There is no list of kernels to look at:
    MindSpore has it since 2.8."""
    import mindspore as ms

    return tuple(int(part) for part in ms.__version__.split(".")[:2]) >= (2, 8)
