"""Adds counters as tensors to checkpoints that keep them elsewhere; Checkpoint 1.0 keeps them as tensors in every file."""
from __future__ import annotations

import io
import os
from dataclasses import replace
from functools import partial

import numpy as np

from mindresume.model.training_state import TrainingState
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.tensor_files import encode, read_header


def with_counters(source: OpenCheckpoint) -> OpenCheckpoint:
    """Returns ``source``; if it is an iteration folder, with the counters of its ``common.json`` added as tensors."""
    if not source.is_iteration or source.state is None:
        return source
    return replace(source, weights=_with(source.weights, counters_of(source.state)))


def counters_of(state: TrainingState) -> dict[str, np.ndarray]:
    """Returns the counters that mindformers appends to each file (core/callback/callback.py:save_checkpoint). Leaves out counters
    that are not known."""
    found: dict[str, np.ndarray] = {"epoch_num": np.array(state.epoch, np.int64), "step_num": np.array(state.step, np.int64),
                                    "global_step": np.array([state.global_step], np.int32)}
    if state.loss_scale is not None:
        found["loss_scale"] = np.array(state.loss_scale, np.float32)
    if state.global_batch_size is not None:
        found["global_batch_size"] = np.array(state.global_batch_size, np.int64)
    return found


def _with(weights: CheckpointView, arrays: dict[str, np.ndarray]) -> CheckpointView:
    """Adds tensors. They are in a file in memory, because readers read ranges of files."""
    arrays = {name: array for name, array in arrays.items() if name not in weights.tensors}
    content = b"".join(piece for _, piece in encode("safetensors", arrays, {}))
    memory = _Memory(content)
    header = read_header(io.BytesIO(content), "counters.safetensors")
    tensors = {**weights.tensors, **{name: Tensor(name, entry.dtype, entry.shape) for name, entry in header.tensors.items()}}
    return replace(weights, tensors=tensors, headers={**weights.headers, memory.path: header},
                   path_of=partial(_file_of, weights, arrays, memory))


class _Memory:
    """Holds an anonymous file in memory, and closes it when the object is deleted."""

    def __init__(self, content: bytes):
        self._handle = os.memfd_create("counters")
        os.write(self._handle, content)
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"

    def __del__(self) -> None:
        os.close(self._handle)


def _file_of(weights: CheckpointView, arrays: dict[str, np.ndarray], memory: _Memory, rank: int, name: str) -> str | None:
    return memory.path if name in arrays else weights.path_of(rank, name)
