"""One rank of a training: the real Trainer of mindformers with a tiny network. Only processes of
``training_host`` import it."""

import glob
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import mindspore as ms
import numpy as np
import yaml
from mindspore import dataset, nn, ops
from mindspore.train.callback import Callback

from st import cpu_cluster
from st.cpu_cluster import collectives, semi_auto

if cpu_cluster.is_distributed():
    semi_auto.install()
    collectives.install_when_connected()

from mindformers import MindFormerConfig, Trainer, build_context  # noqa: E402
from mindformers.models.configuration_utils import PretrainedConfig  # noqa: E402
from mindformers.models.modeling_utils import PreTrainedModel  # noqa: E402

BATCH, STEPS_PER_EPOCH = 8, 10
CONFIG = {
    "seed": 42,
    "output_dir": "output",
    "load_checkpoint": "output/checkpoint",
    "resume_training": True,
    "load_ckpt_format": "safetensors",
    "auto_trans_ckpt": False,
    "src_strategy_path_or_dir": "",
    "only_save_strategy": False,
    "use_parallel": False,
    "run_mode": "train",
    "use_legacy": True,
    "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "tiny"},
    "runner_config": {"epochs": 2, "batch_size": BATCH, "sink_mode": False, "sink_size": 1},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01},
    "lr_schedule": {
        "type": "CosineWithWarmUpLR",
        "learning_rate": 0.01,
        "lr_end": 0.001,
        "warmup_steps": 5,
        "total_steps": 40,
    },
    "recompute_config": {"recompute": False},
    "micro_batch_interleave_num": 1,
    "profile": False,
    "train_dataset_task": {"type": "CausalLanguageModelDataset"},
    "train_dataset": {
        "data_loader": {"type": "GeneratorDataset"},
        "input_columns": ["x", "y"],
        "batch_size": BATCH,
    },
    "context": {
        "mode": 0,
        "device_target": "CPU",
        "max_device_memory": "4GB",
        "jit_config": {"jit_level": "O0"},
    },
    "parallel_config": {
        "data_parallel": 1,
        "model_parallel": 1,
        "pipeline_stage": 1,
        "micro_batch_num": 1,
    },
    "parallel": {
        "parallel_mode": 1,
        "full_batch": False,
        "enable_parallel_optimizer": False,
        "strategy_ckpt_config": {
            "save_file": "./ckpt_strategy.ckpt",
            "only_trainable_params": False,
        },
    },
    "model": {"model_config": {"type": "tiny"}, "arch": {"type": "tiny"}},
    "callbacks": [
        {
            "type": "CheckpointMonitor",
            "prefix": "net",
            "save_checkpoint_steps": 5,
            "keep_checkpoint_max": 3,
            "integrated_save": False,
            "async_save": False,
            "checkpoint_format": "safetensors",
        }
    ],
    "runner_wrapper": {"type": "MFTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True},
}


class Network(PreTrainedModel):
    """One matrix, which tensor parallelism cuts, and a bias: 20 numbers."""

    def __init__(self, dp: int, tp: int):
        super().__init__(PretrainedConfig())
        self.weight = ms.Parameter(
            ms.Tensor(np.arange(16).reshape(4, 4) / 16, ms.float32), name="dense.weight"
        )
        self.bias = ms.Parameter(ms.Tensor(np.zeros(4), ms.float32), name="dense.bias")
        self.product = ops.MatMul(transpose_b=True).shard(((dp, 1), (tp, 1)))
        self.add = ops.Add().shard(((dp, tp), (tp,)))
        self.difference = ops.Sub().shard(((dp, 1), (dp, 1)))
        self.square = ops.Square().shard(((dp, 1),))
        self.mean = ops.ReduceMean().shard(((dp, 1),))

    def construct(self, x, y):
        return self.mean(
            self.square(self.difference(self.add(self.product(x, self.weight), self.bias), y))
        )


def samples(shard: int, shards: int, steps: int) -> dataset.Dataset:
    """Returns this rank's part of the data, of which each number follows from the number of the
    sample."""
    rows = []
    for step in range(steps):
        for number in range(
            step * BATCH * shards + shard * BATCH, step * BATCH * shards + (shard + 1) * BATCH
        ):
            random = np.random.default_rng(number)
            rows.append(
                (
                    random.standard_normal(4).astype(np.float32),
                    random.standard_normal(4).astype(np.float32),
                )
            )
    return dataset.GeneratorDataset(rows, ["x", "y"], shuffle=False).batch(
        BATCH, drop_remainder=True
    )


class Observer(Callback):
    """Writes step and loss of each step to ``path``, and does what the case wants at the end of a
    step, before it is saved."""

    def __init__(self, path: str, rank: int, actions: list[dict]):
        super().__init__()
        self.path, self.rank, self.actions = path, rank, actions

    def write(self, row: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def step_end(self, run_context: Any) -> None:
        given = run_context.original_args()
        step = int(
            (given.optimizer or given.train_network.optimizer).global_step.asnumpy().reshape(-1)[0]
        )
        outputs = given.net_outputs
        loss = (outputs[0] if isinstance(outputs, (tuple, list)) else outputs).asnumpy().mean()
        self.write({"step": step, "loss": f"{loss:.3g}", "bits": np.float32(loss).tobytes().hex()})
        for action in self.actions:
            if action["step"] == step and action.get("rank", self.rank) == self.rank:
                DEEDS[action["do"]](action)


def _fail(action: dict) -> None:
    raise ValueError(action.get("text", "the loss is not finite"))


def _block(action: dict) -> None:
    """Puts a file in the place of a folder: nothing can be written there, not even by root."""
    os.rename(action["path"], action["path"] + ".aside")
    open(action["path"], "w").close()


def _unblock(action: dict) -> None:
    os.remove(action["path"])
    os.rename(action["path"] + ".aside", action["path"])


def _wait(action: dict) -> None:
    """Waits until something in the background has made a file."""
    deadline = time.monotonic() + 60
    while not glob.glob(action["path"], include_hidden=True, recursive=True):
        if time.monotonic() > deadline:
            raise TimeoutError(action["path"])
        time.sleep(0.01)


def die_in_the_first_step(action: dict) -> None:
    """Does it when the compiled network is run for the first time."""
    executor = type(nn.cell._cell_graph_executor)
    executor.run = lambda *_, **__: DEEDS[action["do"]](action)


def _terminate(action: dict) -> None:
    """Lets another process send SIGTERM. Not through subprocess, which blocks signals in this
    thread for a moment: another thread would get it, and its sender would not be known."""
    child = os.fork()
    if not child:
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)


DEEDS = {
    "wait": _wait,
    "fail": _fail,
    "kill": lambda action: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda action: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": _terminate,
    "block": _block,
    "unblock": _unblock,
    "metric": lambda action: _plugin().report_metric(action["name"], action["value"]),
}


def _plugin() -> Any:
    import mindresume.plugin

    return mindresume.plugin


def merged(base: dict, changes: dict) -> dict:
    """Returns ``base`` with ``changes``: {keys with dots between them: value}; ``monitor.KEY``: of
    the CheckpointMonitor."""
    config = json.loads(json.dumps(base))
    for keys, value in changes.items():
        *outer, last = keys.split(".")
        section = config
        for key in outer:
            section = config["callbacks"][0] if key == "monitor" else section.setdefault(key, {})
        section[last] = value
    return config


def run(part: dict) -> None:
    """Trains; the exit status of the process is that of a script that does nothing else."""
    rank, ranks, tp = part["rank"], part["ranks"], part["tp"]
    dp = ranks // tp
    config = merged(CONFIG, part["config"])
    if ranks > 1:
        config = merged(
            config,
            {
                "use_parallel": True,
                "parallel_config.data_parallel": dp,
                "parallel_config.model_parallel": tp,
                "parallel.dataset_strategy": [[dp, 1], [dp, 1]],
            },
        )
    path = f"config_{rank}.yaml"
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    observer = Observer(part["result"], rank, part["actions"])
    try:
        if not part["plain"]:
            _plugin()
        for action in part["actions"]:
            if action["step"] == "begun":
                die_in_the_first_step(action)
        read = MindFormerConfig(path)
        build_context(read)
        trainer = Trainer(
            read,
            model=Network(dp, tp),
            train_dataset=samples(rank // tp, dp, STEPS_PER_EPOCH),
            callbacks=[observer],
        )
        trainer.train()
        observer.write({"error": "", "finished": True})
    except BaseException as error:
        traceback.print_exc()
        observer.write({"error": f"{type(error).__name__}: {error}"})
        if isinstance(error, SystemExit):
            raise
        sys.exit(1)
