"""Compares the parameters at the first step with what was loaded. Callbacks and loaders of others run after the load, and some
load weights of their own: ``OnRequestExit`` and ``BackupAndRestore`` of MindSpore do so in ``on_train_begin``.

MindSpore copies a parameter from its device as a whole. To cut blocks out of it on the device would be a kernel, which copies the
whole parameter to the device first, beside the memory that the graph takes for it. So the largest tensors of a rank that holds
more than ``BUDGET`` are not compared; whoever replaces only those stays unnoticed.

    loaded = LoadedWeights.of(arrays)           # before the parameters receive the arrays
    loaded.difference(parameters, callbacks)    # when the first step is about to compute: "" or what is wrong
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from mindresume.formatting import listed
from mindresume.mindformers.network_state import to_numpy
from mindresume.model.layout import is_scalar

BUDGET = 1 << 30                # bytes of parameters that a rank copies from its device for the comparison, the smallest first
_WHOLE, _BLOCK, _BLOCKS = 1 << 20, 1 << 12, 64          # a larger tensor is compared in 64 blocks of 4 KiB


@dataclass(frozen=True)
class LoadedWeights:
    """Holds {name: fingerprint} of the tensors that this rank has loaded. Single numbers are left out: callbacks have reasons to
    set a learning rate, or the flag of a graceful exit, before the first step, and whoever loads other weights is noticed by the
    tensors."""
    fingerprints: Mapping[str, str]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], budget: int = BUDGET) -> LoadedWeights:
        """Fingerprints arrays. ``budget``: bytes of all tensors that are compared."""
        found = {}
        for name, array in sorted(arrays.items(), key=lambda row: (row[1].nbytes, row[0])):
            if is_scalar(array.shape):
                continue
            budget -= array.nbytes
            if budget < 0:
                break
            found[name] = _fingerprint(array)
        return cls(found)

    def difference(self, parameters: Iterable[tuple[str, Any]], callbacks: Iterable[object]) -> str:
        """Returns which parameters are not what was loaded, and which ``callbacks`` of others the training has; empty if all are.
        ``parameters``: (name, parameter), at least those that were loaded."""
        altered = [name for name, value in parameters
                   if name in self.fingerprints and _fingerprint(to_numpy(name, value)) != self.fingerprints[name]]
        if not altered:
            return ""
        others = [type(callback).__name__ for callback in callbacks if not type(callback).__module__.startswith("mindresume.")]
        return (f"{len(altered)} of {len(self.fingerprints)} tensors are not what was loaded: {listed(altered, 3)}. Something "
                f"has replaced them between the load and the first step; callbacks of this training: "
                f"{', '.join(others) or 'none'}. The checkpoint is right. Remove the callback that loads weights of its own "
                f"(OnRequestExit with save_ckpt: True and BackupAndRestore of MindSpore do), or the file that it loads")


def _fingerprint(array: np.ndarray) -> str:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if data.nbytes <= _WHOLE:
        return xxhash.xxh3_64_hexdigest(data)
    found = xxhash.xxh3_64()
    for start in np.linspace(0, data.nbytes - _BLOCK, _BLOCKS, dtype=np.int64):
        found.update(data[start:start + _BLOCK])
    return found.hexdigest()
