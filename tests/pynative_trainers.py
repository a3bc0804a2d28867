"""A stand-in for mindformers' PyNative trainer, which takes real cells of MindSpore, for the tests
of the front end.

``Trainer`` has mindresume's wrappers. Its loop calls in the order of the real one (1.9.0, or with
``micro_batches`` 2.1.0). Its data set is the numbers 0, 1, ...; a step adds them to the weight,
with a random number and a learning rate that falls, so that a resume at a wrong place, or with a
wrong counter, ends with another weight. The real trainer is in st/test_pynative.py.
"""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import mindspore as ms
import numpy as np
from mindspore import nn

from mindresume.mindformers.patches import PYNATIVE_WRAPPERS as WRAPPERS

SAMPLES, BATCH, WIDTH = 24, 4, 3  # a pass has 6 steps


def parameter(name, values, dtype=np.float32):
    return ms.Parameter(ms.Tensor(np.asarray(values, dtype)), name=name)


class Model(nn.Cell):
    def __init__(self, *names):
        super().__init__()
        for name in names or ("weight",):
            self.insert_param_to_cell(name.replace(".", "_"), parameter(name, np.zeros(WIDTH)))


class Optimizer(nn.Cell):
    """Holds the model's parameters too, as the real one. ``masters``: float32 copies of them."""

    def __init__(self, model, masters=False):
        super().__init__()
        self.reloaded = 0
        for stage in model if isinstance(model, list) else [model]:
            for name, held in stage.parameters_dict().items():
                self.insert_param_to_cell(name.replace(".", "_"), held)
                for prefix in ("adam_m.", *(("main_param.",) if masters else ())):
                    self.insert_param_to_cell(
                        f"{prefix}{name}".replace(".", "_"),
                        parameter(prefix + name, np.zeros(WIDTH)),
                    )
        self.global_step = parameter("global_step", [0], np.int32)

    def reload_main_params_from_model(self):
        self.reloaded += 1


class DTensor:
    """A stand-in for a parameter that hyper_parallel has cut."""

    def __init__(self, whole, part):
        self.whole, self.part, self.shape, self.dtype = whole, part, tuple(whole.shape), part.dtype

    def to_local(self):
        return self.part


class DataSet:
    """Items of ``size`` numbers. ``set_init_step`` is for all iterators that follow, as in
    MindSpore."""

    def __init__(self, size, samples=SAMPLES):
        self.items = [
            list(range(first, first + size)) for first in range(0, samples - size + 1, size)
        ]
        self.first, self.began = 0, []

    def set_init_step(self, step):
        assert step < len(self.items), "reset step must be less than dataset_size * num_epochs"
        self.first = step

    def create_dict_iterator(self, **_):
        self.began.append(self.first)
        return iter(self.items[self.first :])


@dataclass
class State:
    global_step: int = 0
    max_steps: int = 0
    epoch_step: int = 0
    epoch: float = 0.0
    skipped_steps: int = 0
    best_metric: float | None = None

    def update_epoch(self):
        self.epoch = self.global_step / self.epoch_step


@dataclass
class LaterState(State):
    """Since mindformers 2.1.0."""

    consumed_samples: int = 0


class BuiltIn:
    """mindformers' CheckpointCallback. ``events``: those that it has handled itself."""

    def __init__(
        self,
        save_path="",
        save_max=5,
        save_interleaved_steps=1,
        no_save_optim=False,
        async_save=False,
        prefix="net",
        remove_redundancy=False,
        save_trainable_only=False,
    ):
        self.save_path, self.events = save_path, []

    def on_train_begin(self, args, state, **kwargs):
        self.events.append("begin")

    def on_step_end(self, args, state, **kwargs):
        self.events.append("step")

    def on_train_end(self, args, state, **kwargs):
        self.events.append("end")


Callback = WRAPPERS["CheckpointCallback"](BuiltIn)


class Handler:
    """mindformers' CallbackHandler, with mindresume. Its callbacks here need not have
    ``on_step_begin``."""

    def __init__(self, callbacks):
        self.callbacks = callbacks

    def on_step_begin(self, args, state, **objects):
        for callback in self.callbacks:
            if hasattr(callback, "on_step_begin"):
                callback.on_step_begin(args, state, **objects)


Handler.on_step_begin = WRAPPERS["CallbackHandler.on_step_begin"](Handler.on_step_begin)


class Plain:
    """Trains ``training.steps`` steps. ``callbacks``: more of them; ``fails_at``: a step that
    raises; ``sections``: more of the configuration."""

    def __init__(
        self,
        steps,
        callbacks=(),
        dataset=None,
        batch=BATCH,
        micro_batches=1,
        fails_at=None,
        model=None,
        sections=(),
        **checkpoint,
    ):
        self.checkpoint = {
            "enable_save": True,
            "save_path": "",
            "save_max": 9,
            "save_interleaved_steps": 4,
            "no_save_optim": False,
            "async_save": False,
            "prefix": "net",
            "remove_redundancy": False,
            "load_path": "",
            "no_load_optim": False,
            **checkpoint,
        }
        self.sections = {
            "training": {"steps": steps, "seed": 1},
            "checkpoint": self.checkpoint,
            **dict(sections),
        }
        self.config = SimpleNamespace(to_dict=lambda: copy.deepcopy(self.sections))
        self.global_batch_size, self.micro_batches, self.fails_at = batch, micro_batches, fails_at
        self.model = model or Model()
        self.optimizer, self.lr_scheduler = Optimizer(self.model), None
        self.train_dataset = dataset or DataSet(batch // micro_batches)
        self.train_epoch_step = len(self.train_dataset.items)
        if micro_batches > 1:
            self._base_units, self._consumed_samples = batch // micro_batches, 0
        names = (
            "save_path",
            "save_max",
            "save_interleaved_steps",
            "no_save_optim",
            "async_save",
            "prefix",
            "remove_redundancy",
            "save_trainable_only",
        )
        mine = [
            Callback(**{name: self.checkpoint[name] for name in names if name in self.checkpoint})
        ]
        self.callback_handler = Handler(
            [*(mine if self.checkpoint["enable_save"] else []), *callbacks]
        )
        self.losses, self.loaded_by_mindformers = {}, []

    @property
    def weight(self):
        return self.model.parameters_dict()["weight"].asnumpy().copy()

    def call(self, event, **more):
        for callback in self.callback_handler.callbacks:
            getattr(callback, event)(
                self.config, self.state, model=self.model, optimizer=self.optimizer, **more
            )

    def train(self, checkpoint_path=None, mode="pretrain"):
        self.state = (LaterState if self.micro_batches > 1 else State)(
            max_steps=self.sections["training"]["steps"], epoch_step=self.train_epoch_step
        )
        if self.micro_batches > 1:
            self._consumed_samples = 0
        path = checkpoint_path or self.checkpoint["load_path"]
        if path:
            self._load_checkpoint(path, self.model, self.optimizer)
        self.call("on_train_begin")
        self.iterator = self._create_dataset_iterator(self.train_dataset)
        while self.state.global_step < self.state.max_steps:
            if self.state.global_step % self.state.epoch_step == 0 and self.state.global_step > 0:
                self.state.update_epoch()
            self.callback_handler.on_step_begin(
                self.config, self.state, model=self.model, optimizer=self.optimizer
            )
            if self.state.global_step + 1 == self.fails_at:
                raise RuntimeError(f"Error in training step {self.fails_at}.")
            loss = self.step(
                [number for _ in range(self.micro_batches) for number in self.next_item()]
            )
            if self.micro_batches > 1:
                self._consumed_samples += self.global_batch_size
                self.state.consumed_samples = self._consumed_samples
            self.state.global_step += 1
            self.losses[self.state.global_step] = (
                loss,
                self.state.epoch,
                getattr(self.state, "consumed_samples", None),
            )
            self.call("on_step_end", loss=ms.Tensor(loss, ms.float32))
        self.call("on_train_end")
        return "trained"

    def step(self, numbers):
        step = self.state.global_step
        gradient = (
            np.asarray(numbers, np.float32).sum()
            + np.float32(np.random.random())
            + np.arange(WIDTH, dtype=np.float32)
        )
        held = self.optimizer.parameters_dict()
        moment = held["adam_m.weight"].asnumpy() * np.float32(0.9) + gradient
        held["adam_m.weight"].set_data(ms.Tensor(moment))
        held["weight"].set_data(ms.Tensor(self.weight - np.float32(0.1 / (step + 1)) * moment))
        held["global_step"].set_data(ms.Tensor([step + 1], ms.int32))
        return float(self.weight.sum())

    def next_item(self):
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = self._create_dataset_iterator(self.train_dataset)
            return next(self.iterator)

    def _load_checkpoint(self, checkpoint_path, model, optimizer=None, global_step=None):
        self.loaded_by_mindformers.append(str(checkpoint_path))

    def _create_dataset_iterator(self, dataset):
        return dataset.create_dict_iterator()


class Trainer(Plain):
    """``Plain`` with mindresume."""

    train = WRAPPERS["Trainer.train"](Plain.train)
    _load_checkpoint = WRAPPERS["Trainer._load_checkpoint"](Plain._load_checkpoint)
    _create_dataset_iterator = WRAPPERS["Trainer._create_dataset_iterator"](
        Plain._create_dataset_iterator
    )
