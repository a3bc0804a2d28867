"""Parameters of models and optimizer: their names, the part of a rank, layouts, and how they are set."""
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

import mindspore as ms  # noqa: E402
from pynative_trainers import WIDTH, DTensor, Model, Optimizer, parameter  # noqa: E402

from mindresume.errors import LoadError  # noqa: E402
from mindresume.mindformers import adapter, network_state  # noqa: E402
from mindresume.mindformers.pynative import training_run  # noqa: E402
from mindresume.mindformers.training_context import TrainingContext  # noqa: E402
from mindresume.model.layout import TensorLayout  # noqa: E402


def value(cell, name):
    return cell.parameters_dict()[name].asnumpy().tolist()


def test_a_model_or_the_list_of_its_stages():
    one, two = Model("a"), Model("b", "accu_grads.b")
    assert training_run.cells_of(one) == [one] and training_run.cells_of([one, two]) == [one, two]
    assert training_run.cells_of((one,)) == [one]
    assert list(training_run.model_parameters([one, two])) == ["a", "b"]             # what exists within a step is left out
    assert list(training_run.model_parameters(one)) == ["a"]


def test_the_optimizer_without_the_parameters_of_the_model():
    model = [Model("a"), Model("b")]
    optimizer = Optimizer(model, masters=True)
    assert set(training_run.optimizer_parameters(optimizer, training_run.model_parameters(model))) == {
        "adam_m.a", "adam_m.b", "main_param.a", "main_param.b", "global_step"}
    assert training_run.optimizer_parameters(None, {}) == {}


def test_a_cut_parameter_has_the_shape_of_its_part():
    cut = DTensor(np.zeros((8, 2)), parameter("w", np.arange(8).reshape(4, 2)))
    whole = parameter("b", [1], np.int32)
    assert training_run.shapes_of({"w": cut, "b": whole}) == {"w": ((4, 2), "float32"), "b": ((1,), "int32")}
    found = training_run.tensors_of({"w": cut, "b": whole})
    assert np.asarray(found["w"]).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] and np.asarray(found["b"]).tolist() == [1]
    assert found["w"].shape == (4, 2)


def row(matrix, tensor_map, full):
    """A row of mindformers' LayoutAdapter. The layout is a stand-in: MindSpore makes layouts on several processes only."""
    layout = SimpleNamespace(to_dict=lambda: {"device_matrix": matrix, "tensor_map": tensor_map, "interleaved_parallel": False})
    return [layout, "float32", full]


def test_layouts_of_all_stages_and_of_the_optimizer(monkeypatch):
    tables = {"first": {"a": row((2,), (0, -1), (8, 2)), "scalar": [None, "int32", (1,)]},
              "second": {"b": row((2,), (-1,), (3,))}, "optimizer": {"adam_m.a": row((2,), (0, -1), (8, 2)),
                                                                     "odd": row((2,), (0,), (7,))}}
    monkeypatch.setattr(adapter, "pynative_layouts", tables.__getitem__)
    shapes = {name: (shape, "float32") for name, shape in {
        "a": (4, 2), "b": (3,), "adam_m.a": (4, 2), "scalar": (1,), "odd": (3,)}.items()}
    warnings = []
    context = SimpleNamespace(group=SimpleNamespace(size=2), emit=warnings.append)
    found = training_run.layouts_of(["first", "second"], "optimizer", shapes, context)
    assert found == {"a": (TensorLayout((2,), (0, -1)), (8, 2)), "b": (TensorLayout((2,), (-1,)).normalized(), (3,)),
                     "adam_m.a": (TensorLayout((2,), (0, -1)), (8, 2))}
    assert len(warnings) == 1 and warnings[0].text.startswith("odd:")
    assert "adam_m.a" not in training_run.layouts_of("first", None, shapes, context)
    arrays = {name: np.zeros(shape, np.float32) for name, (shape, _) in shapes.items()}
    shares = [network_state.own_share(arrays, found, rank) for rank in (0, 1)]
    assert all({"a", "adam_m.a"} <= share for share in shares)                     # each rank its own half
    assert [("b" in share) for share in shares].count(True) == 1                   # a replica is written once


def test_one_process_has_no_layouts(monkeypatch):
    monkeypatch.setattr(adapter, "pynative_layouts", lambda cell: pytest.fail("a collective"))
    assert training_run.layouts_of(Model("a"), None, {"a": ((WIDTH,), "float32")}, TrainingContext()) == {}


def test_each_parameter_gets_the_array_of_its_own_name():
    """MindSpore alone would give ``weight`` the array of ``adam_m.weight``, which ends like it."""
    model = Model("weight")
    optimizer = Optimizer(model)
    training_run.restore_parameters(model, optimizer, {"adam_m.weight": np.full(WIDTH, 2, np.float32)})
    assert value(model, "weight") == [0] * WIDTH and value(optimizer, "adam_m.weight") == [2] * WIDTH
    training_run.restore_parameters([model], optimizer, {"weight": np.full(WIDTH, 1, np.float32),
                                                         "global_step": np.array([9], np.int32)})
    assert (value(model, "weight"), value(optimizer, "adam_m.weight"), value(optimizer, "global_step")) == (
        [1] * WIDTH, [2] * WIDTH, [9])


def test_an_array_that_nothing_takes_is_an_error():
    model = Model("weight")
    with pytest.raises(LoadError, match="1 parameters got no value, for example other"):
        training_run.restore_parameters(model, None, {"weight": np.ones(WIDTH, np.float32), "other": np.ones(WIDTH, np.float32)})


def test_float32_copies_are_taken_from_the_model_if_the_checkpoint_has_none():
    optimizer = Optimizer(Model(), masters=True)
    training_run.refresh_masters(optimizer, ["weight", "adam_m.weight"])
    assert optimizer.reloaded == 1
    training_run.refresh_masters(optimizer, ["weight", "main_param.weight"])
    training_run.refresh_masters(SimpleNamespace(), ["weight"])
    training_run.refresh_masters(None, ["weight"])
    assert optimizer.reloaded == 1


def test_a_step_counter_of_another_width_is_set():
    """1.9.0 counts in int32, later releases in int64."""
    model = Model()
    optimizer = Optimizer(model)
    optimizer.global_step = parameter("global_step", [0], np.int64)
    training_run.restore_parameters(model, optimizer, {"global_step": np.array([7], np.int64)})
    assert value(optimizer, "global_step") == [7] and optimizer.global_step.dtype == ms.int64
