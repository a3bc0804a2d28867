"""What is known of a training: configuration, items, steps and samples of its data, parameters,
what the trainer counts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

import mindspore as ms  # noqa: E402
from pynative_trainers import WIDTH, DataSet, DTensor, Model, Optimizer, State, parameter  # noqa: E402

from mindresume.errors import LoadError  # noqa: E402
from mindresume.mindformers import adapter  # noqa: E402
from mindresume.mindformers.pynative import training_run  # noqa: E402
from mindresume.mindformers.pynative.training_run import TrainingRun, configuration_of  # noqa: E402
from mindresume.mindformers.training_context import TrainingContext  # noqa: E402
from mindresume.model.layout import TensorLayout  # noqa: E402
from mindresume.model.training_state import DataPosition  # noqa: E402
from mindresume.resume.progress import START  # noqa: E402


def run_of(batch=8, item=None, samples=160, consumed=None, origin=None, dataset=True, skip=0):
    """``item``: samples of an item, as mindformers 2.1.0 says them; None: a release before.
    ``consumed``: of its state."""
    data = DataSet(item or batch, samples) if dataset else None
    trainer = SimpleNamespace(
        global_batch_size=batch,
        train_dataset=data,
        train_epoch_step=len(data.items) if data else 30,
        state=SimpleNamespace(consumed_samples=consumed) if item else SimpleNamespace(),
    )
    if item is not None:
        trainer._base_units = item
    context = TrainingContext()
    context.progress.origin = origin or START
    return TrainingRun(trainer, {}, context, skip)


def test_a_configuration_has_the_names_of_the_graph_trainer():
    sections = {
        "training": {"seed": 5},
        "checkpoint": {"save_path": "/c"},
        "mindresume": {"verify": "full"},
    }
    config = configuration_of(
        SimpleNamespace(config=SimpleNamespace(to_dict=lambda: dict(sections)))
    )
    assert (
        config.callbacks == [{"type": "CheckpointMonitor", "directory": "/c"}] and config.seed == 5
    )
    assert config["mindresume"] == {"verify": "full"}
    with pytest.raises(AttributeError):
        _ = config.use_legacy_format


@pytest.mark.parametrize(
    "checkpoint",
    [
        None,
        {},
        {"save_path": ""},
        {"save_path": "/c", "enable_save": False},
        {"save_path": "/c", "save_trainable_only": True},
    ],
)
def test_a_training_without_saves_of_mindresume_has_no_monitor(checkpoint):
    config = configuration_of(
        SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"checkpoint": checkpoint}))
    )
    assert config.callbacks == [] and config.seed is None


@pytest.mark.parametrize(
    "run, items, item_samples, steps",
    [
        (run_of(), 20, 8, 20),
        (run_of(item=2), 80, 2, 20),
        (run_of(item=8), 20, 8, 20),
        (run_of(item=3), 53, 3, 19),
        (run_of(item=8, batch=64, samples=24), 3, 8, 1),
        (run_of(dataset=False), None, 8, 30),
    ],
)
def test_items_and_steps_of_a_pass(run, items, item_samples, steps):
    assert (run.items, run.item_samples, run.steps_per_pass) == (items, item_samples, steps)


@pytest.mark.parametrize(
    "step, consumed, passes, samples",
    [(0, 0, 0, 0), (13, 104, 0, 104), (20, 160, 1, 0), (45, 360, 2, 40)],
)
def test_the_position_after_a_step(step, consumed, passes, samples):
    assert run_of().data_at(step) == (consumed, DataPosition(passes, samples))
    assert run_of(item=2, consumed=consumed).data_at(step) == (
        consumed,
        DataPosition(passes, samples),
    )


def test_a_step_that_straddles_two_passes():
    """7 items of 2: the fourth step of 4 reads the last item and the first."""
    assert run_of(batch=4, item=2, samples=14, consumed=16).data_at(4) == (16, DataPosition(1, 2))
    assert run_of(batch=4, item=2, samples=14, consumed=12).data_at(3) == (12, DataPosition(0, 12))
    # a batch size that changes: the samples are those that the trainer counts
    assert run_of(item=8, consumed=8 * 3 + 16 * 2).data_at(5) == (56, DataPosition(0, 56))


def test_the_position_after_a_resume_counts_from_it():
    position = DataPosition(2, 24, first_epoch=1, declared="ignore_data_skip: True")
    origin = replace(START, initial_step=10, position=position, consumed=500)
    assert run_of(origin=origin).data_at(12) == (
        516,
        DataPosition(2, 40, 1, "ignore_data_skip: True"),
    )
    assert run_of(item=2, consumed=516, origin=origin).data_at(12) == (
        516,
        DataPosition(2, 40, 1, "ignore_data_skip: True"),
    )
    assert run_of(origin=replace(START, initial_step=10, consumed=None)).data_at(12) == (None, None)
    assert run_of(dataset=False).data_at(12) == (None, None)


def test_the_skip_is_for_the_first_pass():
    run = run_of(skip=3)
    data = run.trainer.train_dataset
    firsts = []
    for _ in range(3):
        run.begin_pass(data)
        firsts.append(data.first)
    # another one, such as for an evaluation
    run.begin_pass(DataSet(8))
    assert firsts == [3, 0, 0] and run.iterators == 3
    run.skip = 0
    data.set_init_step(2)  # a user may have chosen it
    run.begin_pass(data)
    assert data.first == 2


# ---- parameters ----------------------------------------------------------------------------------


def test_a_model_or_the_list_of_its_stages():
    one, two = Model("a"), Model("b", "accu_grads.b")
    assert training_run.cells_of(one) == [one] and training_run.cells_of([one, two]) == [one, two]
    assert training_run.cells_of((one,)) == [one]
    # what exists within a step is left out
    assert list(training_run.model_parameters([one, two])) == ["a", "b"]
    assert list(training_run.model_parameters(one)) == ["a"]


def test_the_optimizer_without_the_parameters_of_the_model():
    model = [Model("a"), Model("b")]
    optimizer = Optimizer(model, masters=True)
    assert set(
        training_run.optimizer_parameters(optimizer, training_run.model_parameters(model))
    ) == {"adam_m.a", "adam_m.b", "main_param.a", "main_param.b", "global_step"}
    assert training_run.optimizer_parameters(None, {}) == {}


def test_a_cut_parameter_has_the_shape_of_its_part():
    cut = DTensor(np.zeros((8, 2)), parameter("w", np.arange(8).reshape(4, 2)))
    whole = parameter("b", [1], np.int32)
    assert training_run.shapes_of({"w": cut, "b": whole}) == {
        "w": ((4, 2), "float32"),
        "b": ((1,), "int32"),
    }
    found = training_run.tensors_of({"w": cut, "b": whole})
    assert np.asarray(found["w"]).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] and np.asarray(
        found["b"]
    ).tolist() == [1]
    assert found["w"].shape == (4, 2)


def row(matrix, tensor_map, full):
    """A row of mindformers' LayoutAdapter. The layout is a stand-in: MindSpore makes layouts on
    several processes only."""
    layout = SimpleNamespace(
        to_dict=lambda: {
            "device_matrix": matrix,
            "tensor_map": tensor_map,
            "interleaved_parallel": False,
        }
    )
    return [layout, "float32", full]


def test_layouts_of_all_stages_and_of_the_optimizer(monkeypatch):
    tables = {
        "first": {"a": row((2,), (0, -1), (8, 2)), "scalar": [None, "int32", (1,)]},
        "second": {"b": row((2,), (-1,), (3,))},
        "optimizer": {"adam_m.a": row((2,), (0, -1), (8, 2)), "odd": row((2,), (0,), (7,))},
    }
    monkeypatch.setattr(adapter, "pynative_layouts", tables.__getitem__)
    shapes = {
        name: (shape, "float32")
        for name, shape in {
            "a": (4, 2),
            "b": (3,),
            "adam_m.a": (4, 2),
            "scalar": (1,),
            "odd": (3,),
        }.items()
    }
    warnings = []
    context = SimpleNamespace(group=SimpleNamespace(size=2), emit=warnings.append)
    found = training_run.layouts_of(["first", "second"], "optimizer", shapes, context)
    assert found == {
        "a": (TensorLayout((2,), (0, -1)), (8, 2)),
        "b": (TensorLayout((2,), (-1,)).normalized(), (3,)),
        "adam_m.a": (TensorLayout((2,), (0, -1)), (8, 2)),
    }
    assert len(warnings) == 1 and warnings[0].text.startswith("odd:")
    assert "adam_m.a" not in training_run.layouts_of("first", None, shapes, context)
    context.group.size = 1  # has no layouts, and asks for none: that can be a collective
    monkeypatch.setattr(adapter, "pynative_layouts", pytest.fail)
    assert training_run.layouts_of("first", None, shapes, context) == {}


def test_each_parameter_gets_the_array_of_its_own_name():
    """MindSpore alone would give ``weight`` the array of ``adam_m.weight``, which ends like it."""
    model = Model("weight")
    optimizer = Optimizer(model)
    # 1.9.0 counts in int32, later releases in int64
    optimizer.global_step = parameter("global_step", [0], np.int64)

    def held():
        names = ("weight", "adam_m.weight", "global_step")
        return [optimizer.parameters_dict()[name].asnumpy().tolist() for name in names]

    moment = {"adam_m.weight": np.full(WIDTH, 2, np.float32)}
    training_run.restore_parameters(model, optimizer, moment)
    assert held() == [[0] * WIDTH, [2] * WIDTH, [0]]
    others = {"weight": np.full(WIDTH, 1, np.float32), "global_step": np.array([9], np.int64)}
    training_run.restore_parameters([model], optimizer, others)
    assert held() == [[1] * WIDTH, [2] * WIDTH, [9]]


@pytest.mark.parametrize("name", ["other", "weight"])
def test_an_array_that_nothing_takes_is_an_error(name):
    """MindSpore skips a parameter that pipeline stages share, and names only its array."""
    model = Model("weight")
    model.weight.param_info.is_pipeline_shared_param = name == "weight"
    arrays = {each: np.ones(WIDTH, np.float32) for each in {"weight", name}}
    with pytest.raises(LoadError, match=f"1 parameters got no value, for example {name}"):
        training_run.restore_parameters(model, None, arrays)


def test_float32_copies_are_taken_from_the_model_if_the_checkpoint_has_none():
    optimizer = Optimizer(Model(), masters=True)
    training_run.refresh_masters(optimizer, ["weight", "adam_m.weight"])
    assert optimizer.reloaded == 1
    training_run.refresh_masters(optimizer, ["weight", "main_param.weight"])
    training_run.refresh_masters(SimpleNamespace(), ["weight"])
    training_run.refresh_masters(None, ["weight"])
    assert optimizer.reloaded == 1


# ---- what the trainer counts ---------------------------------------------------------------------


def test_fields_of_the_state_and_of_the_trainer():
    trainer = SimpleNamespace(
        state=State(7, 20, 6, 1.0, skipped_steps=3, best_metric=0.25), _consecutive_skipped_steps=2
    )
    saved = training_run.saved_fields(trainer)
    assert dict(saved) == {"skipped_steps": 3, "best_metric": 0.25, "consecutive_skipped_steps": 2}
    again = SimpleNamespace(state=State(), _consecutive_skipped_steps=0)
    training_run.restore_fields(again, saved)
    assert (
        again.state.skipped_steps,
        again.state.best_metric,
        again._consecutive_skipped_steps,
    ) == (3, 0.25, 2)
    assert (again.state.global_step, again.state.max_steps, again.state.epoch) == (0, 0, 0.0)


@pytest.mark.parametrize(
    "value, found",
    [
        (ms.Tensor(0.5, ms.float32), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(4), 4),
        (ms.Tensor([2], ms.int32), 2),
        (None, None),
        ("/a/path", "/a/path"),
        (float("inf"), "left out"),
        (float("nan"), "left out"),
        ([1], "left out"),
        (np.zeros(2), "left out"),
    ],
)
def test_values_of_callbacks(value, found):
    saved = dict(training_run.saved_fields(SimpleNamespace(state=State(best_metric=value))))
    assert saved.get("best_metric", "left out") == found


def test_fields_that_a_release_does_not_have():
    trainer = SimpleNamespace(state=State())
    training_run.restore_fields(
        trainer, {"of a later release": 1, "consecutive_skipped_steps": 2, "global_step": 9}
    )
    assert trainer.state == State() and not hasattr(trainer, "_consecutive_skipped_steps")
