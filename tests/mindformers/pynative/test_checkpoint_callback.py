"""What a save of a PyNative training contains, and whose callback saves. Whole trainings:
test_training.py."""

import time
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

from pynative_trainers import BATCH, BuiltIn, Callback, DataSet, Model, Optimizer, State  # noqa: E402

from mindresume.mindformers import training_context  # noqa: E402
from mindresume.mindformers.pynative.checkpoint_callback import RunSaver  # noqa: E402
from mindresume.mindformers.pynative.training_run import TrainingRun  # noqa: E402
from mindresume.mindformers.training_context import TrainingContext  # noqa: E402
from mindresume.model.layout import TensorLayout  # noqa: E402
from mindresume.model.training_state import DataPosition  # noqa: E402

ASKED = {
    "save_path": "",
    "save_max": 5,
    "save_interleaved_steps": 4,
    "no_save_optim": False,
    "async_save": False,
    "prefix": "net",
    "remove_redundancy": False,
}


def saver_of(rank=0, layouts=None, **asked):
    """A saver in the middle of a training, without a folder."""
    state = State(global_step=7, max_steps=20, epoch_step=6, epoch=1.0)
    trainer = SimpleNamespace(
        global_batch_size=BATCH, train_dataset=DataSet(BATCH), train_epoch_step=6, state=state
    )
    saver = RunSaver({**ASKED, **asked}, time.monotonic())
    saver.run, saver._layouts = TrainingRun(trainer, {}, TrainingContext()), layouts or {}
    target = SimpleNamespace(rank=rank, world_size=2 if layouts else 1, iterations=True)
    saver.training = SimpleNamespace(manager=SimpleNamespace(target=target))
    return saver, state


def optimizer_at(step, model=None):
    optimizer = Optimizer(model or Model())
    optimizer.global_step.set_data(ms.Tensor([step], ms.int32))
    return optimizer


def test_the_training_state_after_a_step():
    saver, state = saver_of()
    found = saver.training_state(state, optimizer_at(6), ms.Tensor(2.5, ms.float32))
    assert (found.step, found.global_step, found.global_batch_size) == (7, 6, BATCH)
    assert (found.steps_per_epoch, found.dataset_size) == (6, 6)
    assert (found.metrics, found.loss_scale, found.consumed, found.data) == (
        {"loss": 2.5},
        None,
        28,
        DataPosition(1, 4),
    )


@pytest.mark.parametrize(
    "loss, metrics",
    [
        (None, {}),
        (ms.Tensor(np.nan), {}),
        (ms.Tensor([1.5], ms.float32), {"loss": 1.5}),
        # a stand-in of a DTensor
        (SimpleNamespace(to_local=lambda: ms.Tensor(1.25)), {"loss": 1.25}),
    ],
)
def test_the_loss_and_what_the_user_reported_are_recorded(loss, metrics):
    saver, state = saver_of()
    saver.run.context.progress.metrics["eval_loss"] = 3.0
    state.loss_scale = 1024
    found = saver.training_state(state, SimpleNamespace(), loss)  # an optimizer without a counter
    assert found.metrics == {"eval_loss": 3.0, **metrics}
    assert (found.loss_scale, found.global_step) == (1024.0, 7)


def names_of(saver, model, optimizer):
    _, state = saver_of()
    shard = saver.shard(state, {"model": model, "optimizer": optimizer, "loss": None})
    return [set(file.tensors) for file in shard.files], shard


def test_model_and_optimizer_are_two_files():
    stages = [Model("a"), Model("b", "accu_grads.b")]
    saver, _ = saver_of()
    (of_model, of_optimizer), shard = names_of(saver, stages, Optimizer(stages[:1]))
    assert of_model == {"a", "b"} and of_optimizer == {"adam_m.a", "global_step"}
    assert shard.random and shard.random["numpy"]
    files, _ = names_of(saver_of(no_save_optim=True)[0], stages, Optimizer(stages[:1]))
    assert files == [{"a", "b"}]


@pytest.mark.parametrize("remove", [True, False])
def test_each_rank_saves_its_share_of_replicas(remove):
    """Tensors without a layout are saved by every rank."""
    model = Model("a", "b", "c")
    layouts = {
        name: (TensorLayout((2,), (-1,)).normalized(), (3,))
        for name in ("a", "b", "adam_m.a", "adam_m.b")
    }
    found = [
        names_of(saver_of(rank, layouts, remove_redundancy=remove)[0], model, Optimizer(model))[0]
        for rank in (0, 1)
    ]
    model_files, optimizer_files = ([files[index] for files in found] for index in (0, 1))
    assert set.union(*model_files) == {"a", "b", "c"}
    assert set.union(*optimizer_files) == {"adam_m.a", "adam_m.b", "adam_m.c", "global_step"}
    both = set.intersection(*(set.union(*files) for files in found))
    assert both == (
        {"c", "adam_m.c", "global_step"} if remove else set(Optimizer(model).parameters_dict())
    )


def test_a_callback_outside_of_a_training_is_mindformers_own():
    """A user may drive the callback without ``Trainer.train``."""
    assert training_context.current().run is None
    callback = Callback(save_path="/nowhere")
    callback.on_train_begin(None, State())
    callback.on_step_end(None, State(global_step=1))
    callback.on_train_end(None, State())
    assert callback.events == ["begin", "step", "end"] and isinstance(callback, BuiltIn)


def test_it_takes_the_arguments_of_the_installed_release():
    with pytest.raises(TypeError):
        Callback(folder="/nowhere")
    asked = Callback("/somewhere", 3)._mindresume._asked
    assert (asked["save_path"], asked["save_max"], asked["save_interleaved_steps"]) == (
        "/somewhere",
        3,
        1,
    )
