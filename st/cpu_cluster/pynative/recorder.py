"""Records every step of the PyNative trainer exactly.

What: ``CPU_CLUSTER_STEPS=path`` appends one JSON line a step, flushed, so that it survives SIGKILL.
``{rank}`` in the path becomes the rank; without it only rank 0 records.

    {"step": 7, "loss": 6.31, "hex": "40c9eb85", "norm": 1.25, "opt_step": 7, "consumed": 56,
     "epoch": 0, "batch": "5f3c...", "samples": ["9a0c...", ...], "draws": [0.61, 0.07, 42, 7],
     "state": {"skipped_steps": 0, ...}, "time": 1760000000.1}

step        ``state.global_step`` after the step
hex         the bits of the float32 loss
norm        of the gradients
opt_step    the optimizer's own count, null if it has none
consumed    ``state.consumed_samples`` (from 2.1.0 on), else null
epoch       ``state.epoch``
batch       16 digits of SHA-256 over the input ids of the step; of all micro batches of a step in
            order
samples     one id a row of them, as in the graph trainer's recorder: rows of the test data are
            distinct, so an id is a sample
state       other fields of ``TrainerState`` that change in a training, as far as the release has
            them
draws       what Python's, numpy's and MindSpore's generators gave at the beginning of the step

The recorder is the last callback: what another callback does at a step's end, a save included, is
done before the line is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.common.generator import default_generator

from ..recorder import sample_ids

FIELDS = (
    "global_batch_size",
    "num_accumulation_steps",
    "skipped_steps",
    "loss_scale",
    "total_flops",
    "best_metric",
    "best_model_checkpoint",
)

# the input ids since the last recorded step, one array a micro batch
_rows: list[np.ndarray] = []


def _number(value: Any) -> int | None:
    return (
        None
        if value is None
        else int(np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value).reshape(-1)[0])
    )


class StepRecorder:
    """A callback of the PyNative trainer. Appends to ``path``."""

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115  open as long as the process trains
        self.draws: list[float] = []

    def __getattr__(self, name: str) -> Any:
        # the events that the recorder does not use
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def on_step_begin(self, args: Any, state: Any, **_: Any) -> None:
        seed, offset = default_generator._step(ms.Tensor(1, ms.int64))
        self.draws = [
            random.random(),
            float(np.random.random()),
            int(seed.asnumpy()),
            int(offset.asnumpy()),
        ]

    def on_step_end(self, args: Any, state: Any, **values: Any) -> None:
        loss = np.float32(np.asarray(values["loss"].asnumpy()).mean())
        rows = np.concatenate(_rows) if _rows else np.zeros((0,), np.int32)
        _rows.clear()
        line = {
            "step": int(state.global_step),
            "loss": float(loss),
            "hex": loss.tobytes()[::-1].hex(),
            "norm": float(np.asarray(values["grad_norm"].asnumpy()).mean()),
            "opt_step": _number(getattr(values["optimizer"], "global_step", None)),
            "consumed": _number(getattr(state, "consumed_samples", None)),
            "epoch": getattr(state, "epoch", None),
            "batch": hashlib.sha256(rows.tobytes()).hexdigest()[:16],
            "samples": sample_ids(rows),
            "draws": self.draws,
            "state": {name: getattr(state, name) for name in FIELDS if hasattr(state, name)},
            "time": round(time.time(), 3),
        }
        self.file.write(json.dumps(line, default=str) + "\n")
        self.file.flush()


def install() -> None:
    """After ``import mindformers``. Adds the recorder behind all other callbacks of each Trainer
    that is made from now on."""
    from mindformers.pynative.trainer import Trainer

    get_batch, create = Trainer.get_batch, Trainer._create_callback_handler

    def get_recorded_batch(self, dataset_iter):
        batch = get_batch(self, dataset_iter)
        if batch.get("input_ids") is not None:
            _rows.append(batch["input_ids"].asnumpy())
        return batch

    def create_with_recorder(self, *args, **options):
        handler = create(self, *args, **options)
        rank, path = os.environ.get("RANK_ID", "0"), os.environ.get("CPU_CLUSTER_STEPS")
        if path and ("{rank}" in path or rank == "0"):
            handler.add_callback(StepRecorder(path.replace("{rank}", rank)))
        return handler

    Trainer.get_batch, Trainer._create_callback_handler = get_recorded_batch, create_with_recorder
