"""Trainings with our CheckpointMonitor, the real mindformers and a tiny real network, without its
Trainer.

``Job`` mimics the contract of mindspore.train.Model.train towards a callback: ``on_train_begin``,
``step_end`` with ``cur_step_num`` counted from the start of the process (1, 2, ...) and
``cur_epoch_num``, ``end``. CPU, one process.
"""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from rank_folders import committed_steps, dir_at

pytest.importorskip("mindformers.tools")

import mindspore as ms
from mindformers.core.callback.build_callback import build_callback
from mindformers.core.callback.callback import CheckpointMonitor as BuiltIn
from mindspore import nn

import mindresume.plugin  # noqa: F401  registers ours
from mindresume.formats.scan import scan
from mindresume.mindformers import adapter, training_context
from mindresume.resume.eligible import Choice
from mindresume.settings import Settings

PER_EPOCH = 10
INJECTED = {
    "append_info": [{"epoch_num": 0, "step_num": 0, "global_step": 0, "loss_scale": 1}],
    "global_batch_size": 8,
    "remove_redundancy": False,
    "checkpoint_format": "safetensors",
    "embedding_size": 64,
    "embedding_local_norm_threshold": 1.0,
    "use_checkpoint_health_monitor": False,
    "use_legacy_format": True,
}
UNFINISHED: list["Job"] = []


def finish_all():
    """No job of a test outlives it: at the exit of the interpreter its monitor would write to a log
    that is closed."""
    while UNFINISHED:
        training = getattr(UNFINISHED.pop().monitor, "_training", None)
        if training is not None:
            training.manager.finish_after_error()


class Job:
    """One run of a training process."""

    def __init__(self, monitor, done=0, per_epoch=PER_EPOCH):
        net = nn.Dense(3, 2)
        self.optimizer = nn.Adam(net.trainable_params(), 0.1)
        train = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), self.optimizer)
        self.net, self.train = net, train
        self.monitor, self.done = monitor, done
        self.params = SimpleNamespace(
            cur_step_num=0,
            cur_epoch_num=0,
            batch_num=per_epoch,
            list_callback=[],
            train_network=train,
            network=train,
            optimizer=self.optimizer,
            net_outputs=(ms.Tensor(0.5), ms.Tensor(False), ms.Tensor(1024.0)),
        )
        self.context = SimpleNamespace(original_args=lambda: self.params)
        UNFINISHED.append(self)
        monitor.on_train_begin(self.context)

    def steps(self, count, stride=1):
        for _ in range(count):
            self.params.cur_step_num += stride
            step = self.done + self.params.cur_step_num
            self.params.cur_epoch_num = (step - 1) // self.params.batch_num + 1
            self.optimizer.global_step.set_data(ms.Tensor([step], ms.int32))
            self.net.weight.set_data(ms.Tensor(np.full((2, 3), step, np.float32)))
            self.monitor.step_end(self.context)
        return self

    def end(self):
        self.monitor.end(self.context)
        return self


def build(folder, done=0, **options):
    """Builds the callback as base_trainer.py does: the YAML block and the injected arguments."""
    injected = {**INJECTED, "health_ckpts_record_dir": str(folder)}
    injected.update({key: options.pop(key) for key in list(options) if key in injected})
    if done:
        injected["append_info"] = [
            {"step_num": done, "epoch_num": done // PER_EPOCH, "loss_scale": 1}
        ]
    block = {
        "type": "CheckpointMonitor",
        "prefix": "net",
        "directory": str(folder),
        "save_checkpoint_steps": 5,
        "keep_checkpoint_max": 99,
        **options,
    }
    return build_callback(dict(block), default_args=injected)


def resume(root, step):
    """Sets the state that the hooks leave before the training starts: step ``step`` is selected.
    Without it a training is a fresh start."""
    found = next(c for c in scan(dir_at(root)).candidates if c.step == step)
    training_context.current().plan = training_context.ResumePlan(
        choice=Choice(found, (), (), False, (), str(root))
    )


def files(folder, kind="checkpoint", fmt="safetensors"):
    path = folder / kind / "rank_0"
    return sorted(name for name in os.listdir(path) if name.endswith(fmt)) if path.is_dir() else []


def committed(folder):
    return (
        sorted(committed_steps(folder / "checkpoint")) if (folder / "checkpoint").exists() else []
    )


@pytest.fixture(autouse=True)
def own_context(tmp_path_factory, monkeypatch):
    output = tmp_path_factory.mktemp("output")
    monkeypatch.setattr(adapter, "output_root", lambda: str(output))
    before = training_context.current()
    yield training_context.set_current(training_context.TrainingContext(Settings()))
    finish_all()
    training_context.set_current(before)


def spoil(folder):
    """Puts a file in place of the folder of rank 0: nothing can be written there, not even by
    root."""
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint" / "rank_0").write_text("in the way")


@pytest.fixture
def calls(monkeypatch):
    """Returns the names of the called methods of the built-in; they do nothing."""
    called = []
    for name in (
        "on_train_begin",
        "step_end",
        "end",
        "_save_ckpt",
        "save_checkpoint",
        "save_checkpoint_network",
    ):
        monkeypatch.setattr(
            BuiltIn, name, lambda self, *args, name=name: called.append(name), raising=False
        )
    return called


def emergency(job, monitor=None):
    """Saves as mindformers base_trainer.py, ckpt_save_func, with the arguments of MindIO TTP."""
    monitor = monitor or job.monitor
    monitor._append_dict.update({"__exception_save__": True})
    monitor._save_ckpt(job.params, True)
    assert "__exception_save__" not in monitor._append_dict


class Writer:
    def __init__(self):
        self.rows = {}

    def add_scalar(self, tag, value, global_step):
        self.rows.setdefault(tag, {})[global_step] = value
