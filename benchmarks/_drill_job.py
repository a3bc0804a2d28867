"""The training of the crash drill: mindformers' own Trainer around a network that trains in a tenth
of a second.

``Trainer.train`` and ``BaseTrainer.training_process`` are the installed ones, unchanged:
configuration rules, choice of the checkpoint, counters, data skip, callbacks, loading. Only
network, data set and optimizer are small ones, passed in where a task trainer passes its own. 5
steps an epoch, 3 epochs; saves after steps 5, 10 and 15.

Every attempt is the same command (``load_checkpoint`` is its own output folder, ``resume_training``
True), as in a restart loop.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from _drill_kill import Fault, Watch

STEPS_PER_EPOCH = 5
EPOCHS = 3
INTERVAL = 5
BATCH = 8
# seconds: background writers get time, as steps of a real model give it
STEP_TIME = 0.02
LOGGED = ("resume", "resuming", "fresh start", "checkpoint", "meta.json", "tracker", "mindresume")


@dataclass(frozen=True)
class Setup:
    """A configuration. ``library``: "mindformers" or "mindresume". ``version``: "1.0" or "2.0"."""

    library: str
    version: str
    asynchronous: bool
    format: str
    keep: int

    @property
    def name(self) -> str:
        return f"{self.library} {self.version} {'async' if self.asynchronous else 'sync'}"

    @property
    def key(self) -> str:
        return f"{self.name} {self.format} keep={self.keep}".replace(" ", "-")


def settings(setup: Setup) -> dict[str, Any]:
    """Returns the configuration that a user would write. ``use_parallel`` is True for 1.0:
    mindformers reads rank folders of safetensors only then, also with one rank; the parallel mode
    stays stand-alone."""
    legacy = setup.version == "1.0"
    return {
        "seed": 42,
        "output_dir": "./output",
        "load_checkpoint": "./output/checkpoint",
        "resume_training": True,
        "load_ckpt_format": setup.format,
        "auto_trans_ckpt": False,
        "only_save_strategy": False,
        "run_mode": "train",
        "use_parallel": legacy,
        "use_legacy_format": legacy,
        "trainer": {"type": "DrillTrainer", "model_name": "drill"},
        "runner_config": {
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "sink_mode": False,
            "sink_size": 1,
            "gradient_accumulation_steps": 1,
        },
        "optimizer": {"type": "AdamW"},
        "train_dataset": {"batch_size": BATCH},
        "train_dataset_task": {},
        "lr_schedule": {},
        "context": {"mode": 0, "device_target": "CPU"},
        "parallel": {"parallel_mode": 0},
        "parallel_config": {},
        "recompute_config": {},
        "moe_config": {},
        "micro_batch_interleave_num": 1,
        "monitor_config": {},
        "model": {"model_config": {"hidden_size": 16, "vocab_size": 4}},
        "runner_wrapper": {"scale_sense": None},
        "callbacks": [
            {
                "type": "CheckpointMonitor",
                "prefix": "drill",
                "save_checkpoint_steps": INTERVAL,
                "keep_checkpoint_max": setup.keep,
                "integrated_save": False,
                "async_save": setup.asynchronous,
                "checkpoint_format": setup.format,
            }
        ],
    }


def train(setup: Setup, folder: str, fault: Fault, attacked: int) -> None:
    """Runs one attempt in the working directory. Writes ``book``, ``operations`` and
    ``weights.npz`` to ``folder``. ``attacked``: the step whose save is watched, until 4 steps
    later; a fault of kind "control" kills there."""
    import mindspore as ms
    from mindformers import MindFormerConfig
    from mindformers.tools.logger import get_logger
    from mindformers.trainer.trainer import Trainer

    if setup.library == "mindresume":
        import mindresume.plugin  # noqa: F401  installs the hooks and the CheckpointMonitor
    book = open(os.path.join(folder, "book"), "a", buffering=1, encoding="utf-8")  # noqa: SIM115  as long as the process
    get_logger().addHandler(_CheckpointLog(book))
    ms.set_context(mode=0, device_target="CPU")
    register()
    watch = Watch("output/checkpoint", os.path.join(folder, "operations"), fault)
    watch.install()

    def at_step_begin(step: int) -> None:
        time.sleep(STEP_TIME)
        watch.say(begins=step)
        if step == attacked:
            watch.begin()
        elif step == attacked + INTERVAL - 1:
            watch.finish()
            if fault.kind == "control":
                watch.die()

    recorder = make_recorder(book, os.path.join(folder, "weights.npz"), at_step_begin)
    Trainer(args=MindFormerConfig(**settings(setup)), task="general", callbacks=[recorder]).train()


def register() -> None:
    """Registers a task trainer with a small network, data set and optimizer in mindformers."""
    import mindspore as ms
    import mindspore.dataset as ds
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
    from mindformers.trainer.base_trainer import BaseTrainer
    from mindspore import nn, ops

    class DrillNetwork(nn.Cell):
        """(8) -> 16 -> (4), mean squared error."""

        def __init__(self):
            super().__init__()
            self.first = nn.Dense(8, 16)
            self.second = nn.Dense(16, 4)
            self.relu = ops.ReLU()
            self.loss = nn.MSELoss()
            self.config = None

        def construct(self, x, y):
            return self.loss(self.second(self.relu(self.first(x))), y)

        def get_model_parameters(self, only_trainable=True):
            return self.trainable_params() if only_trainable else self.get_parameters()

    class DrillTrainer(BaseTrainer):
        """A task trainer, as CausalLanguageModelingTrainer is for language models."""

        def __init__(self, model_name=None):
            super().__init__("general", model_name)

        def train(self, **arguments):
            self.training_process(**arguments)

        def create_train_dataset(self, default_args=None):
            random = np.random.default_rng(7)
            rows = BATCH * STEPS_PER_EPOCH
            columns = tuple(
                random.standard_normal((rows, width)).astype(np.float32) for width in (8, 4)
            )
            return ds.NumpySlicesDataset(columns, ["x", "y"], shuffle=False).batch(BATCH)

        def create_network(self, default_args=None):
            return DrillNetwork()

        def create_optimizer_scheduler(self, network, *arguments, **named):
            return nn.Adam(network.trainable_params(), learning_rate=1e-2)

        def create_model_wrapper(self, network, optimizer):
            return nn.TrainOneStepCell(network, optimizer)

    ms.set_seed(42)
    MindFormerRegister.register_cls(
        DrillTrainer, module_type=MindFormerModuleType.TRAINER, alias="DrillTrainer"
    )


def make_recorder(book: Any, result: str, at_step_begin: Callable[[int], None]) -> Any:
    """Returns the callback that writes the book: the first step, each step with the bits of its
    loss, the final weights."""
    import mindspore as ms

    class Recorder(ms.Callback):
        step = 0

        def on_train_begin(self, run_context):
            self.step = int(
                run_context.original_args().train_network.optimizer.global_step.asnumpy()[0]
            )
            book.write(json.dumps({"resumed_from": self.step}) + "\n")

        def on_train_step_begin(self, run_context):
            at_step_begin(self.step + 1)

        def on_train_step_end(self, run_context):
            self.step += 1
            loss = np.asarray(run_context.original_args().net_outputs.asnumpy(), np.float32)
            book.write(json.dumps({"step": self.step, "loss": loss.tobytes().hex()}) + "\n")

        def on_train_end(self, run_context):
            network = run_context.original_args().train_network
            arrays = {parameter.name: parameter.asnumpy() for parameter in network.get_parameters()}
            with open(result, "wb") as file:
                np.savez(file, **arrays)

    return Recorder()


class _CheckpointLog(logging.Handler):
    """Records what the library logs about checkpoints."""

    def __init__(self, book: Any):
        super().__init__(logging.INFO)
        self._book = book

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(word in text for word in LOGGED):
            self._book.write(json.dumps({"level": record.levelname, "message": text}) + "\n")
