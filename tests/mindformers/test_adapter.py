"""Handing arrays to real MindSpore parameters. No operator runs here: the first takes over the
SIGINT of the process."""

import math

import numpy as np
import pytest

ms = pytest.importorskip("mindspore")
pytest.importorskip("ml_dtypes")  # its dtypes have names in numpy then

from mindresume.errors import SaveError  # noqa: E402
from mindresume.mindformers import adapter  # noqa: E402


class Holder(ms.nn.Cell):
    def __init__(self, arrays):
        super().__init__()
        for name, (shape, dtype) in arrays.items():
            self.insert_param_to_cell(
                name.replace(".", "_"), ms.Parameter(ms.Tensor(np.zeros(shape), dtype), name=name)
            )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64"])
@pytest.mark.parametrize("shape", [(1 << 8, 1 << 8), (1,), ()])
def test_all_bits_are_restored_without_a_copy(shape, dtype):
    array = (np.arange(math.prod(shape)) % 1000).astype(dtype).reshape(shape)
    if shape and array.size > 1 and dtype == "bfloat16":
        array.view(np.uint16)[0, 3] = 0x7F81  # a signalling NaN
    network = Holder({"a": (shape, getattr(ms, dtype)), "b": ((2,), ms.float32)})
    arrays = {"a": array, "other": np.ones(1, np.float32)}
    assert adapter.load_into(network, arrays, False) == (["b"], ["other"]) and not arrays
    found = network.parameters_dict()["a"]
    assert found.dtype == getattr(ms, dtype) and tuple(found.shape) == shape
    assert found.asnumpy().tobytes() == array.tobytes()
    assert array.size == 1 or found.data_ptr() == array.ctypes.data


def test_a_parameter_never_gets_the_array_of_another_name():
    """MindSpore's default gives ``w`` the array of ``adam_m.w``, and does not name it as left
    out."""
    shape = ((2,), ms.float32)
    network = Holder({"w": shape, "adam_m.w": shape})
    assert adapter.load_into(network, {"adam_m.w": np.ones(2, np.float32)}, False)[0] == ["w"]
    assert network.parameters_dict()["w"].asnumpy().tolist() == [0, 0]


# ---- a graph out of MindSpore's compile cache: there the counters are not marked as sliced -------

COUNTERS = {"global_step": ((1,), ms.int32), "scale_sense": ((), ms.float32)}


def cached_network(monkeypatch):
    """Returns a network as after the compilation of a job of several ranks (mindspore 2.9.0 on four
    processes, MS_COMPILER_CACHE_ENABLE=1)."""
    monkeypatch.setattr(adapter, "is_parallel", lambda: True)
    network = Holder(
        {"w": ((4, 2), ms.float32), "of_another_stage": ((4, 2), ms.float32), **COUNTERS}
    )
    network.parameters_dict()["w"].sliced = True
    return network


def test_counters_of_a_cached_graph_are_saved(monkeypatch):
    network = cached_network(monkeypatch)
    weight = network.parameters_dict()["w"]
    monkeypatch.setattr(adapter, "_saved_by_mindspore", lambda *_: [("w", weight)])
    assert [name for name, _ in adapter.parameters_to_save(network, False, lambda name: True)] == [
        "w",
        *COUNTERS,
    ]
    assert [
        name
        for name, _ in adapter.parameters_to_save(
            network, False, lambda name: name != "scale_sense"
        )
    ] == ["w", "global_step"]
    network.parameters_dict()["global_step"].set_data(ms.Tensor([7], ms.int32))
    saved = dict(adapter.parameters_to_save(network, False, lambda name: True))
    assert saved["global_step"].asnumpy().tolist() == [7]
    # a single rank compiles
    monkeypatch.setattr(adapter, "is_parallel", lambda: False)
    assert list(dict(adapter.parameters_to_save(network, False, lambda name: True))) == ["w"]


def test_counters_of_a_cached_graph_are_loaded_if_they_are_offered(monkeypatch):
    network = cached_network(monkeypatch)
    assert adapter.parameters_to_load(network) == {"w": ((4, 2), "float32")}
    assert adapter.parameters_to_load(network, {"w", "global_step", "of_another_stage"}) == {
        "w": ((4, 2), "float32"),
        "global_step": ((1,), "int32"),
    }


# ---- what is saved is remembered -----------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Returns a list that grows each time MindSpore is asked what it saves."""
    found, real = [], adapter._saved_by_mindspore
    monkeypatch.setattr(
        adapter, "_saved_by_mindspore", lambda *what: found.append(1) or real(*what)
    )
    return found


def saved_bytes(network, known, choose=lambda name: True):
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), tensor.asnumpy().tobytes())
        for name, tensor in adapter.parameters_to_save(network, False, choose, known)
    }


def set_value(network, name, value):
    parameter = network.parameters_dict()[name]
    parameter.set_data(ms.Tensor(np.full(parameter.shape, value), parameter.dtype))


def test_mindspore_is_asked_once_and_later_saves_are_the_same(asked):
    network = Holder(
        {"a": ((2, 3), ms.float32), "b.c": ((4,), ms.bfloat16), "step": ((), ms.int32)}
    )
    known = adapter.SavedParameters()
    for value in range(3):
        for name in ("a", "b.c", "step"):
            set_value(network, name, value)
        assert list(saved_bytes(network, known).items()) == list(saved_bytes(network, None).items())
    assert len(asked) == 1 + 3


def test_mindspore_is_asked_again_after_any_change(asked):
    network, known = (
        Holder({"a": ((2,), ms.float32), "b": ((2,), ms.float32)}),
        adapter.SavedParameters(),
    )

    def is_asked(choose=lambda name: True):
        del asked[:]
        assert saved_bytes(network, known, choose) == saved_bytes(network, None, choose)
        return len(asked) == 2

    assert is_asked() and not is_asked()
    assert is_asked(lambda name: name == "a") and not is_asked(lambda name: name == "a")
    assert is_asked() and not is_asked()
    network.insert_param_to_cell("new", ms.Parameter(ms.Tensor([3.0], ms.float32), name="new"))
    assert is_asked() and not is_asked()
    network._params["b"] = ms.Parameter(ms.Tensor([5.0, 6.0], ms.float32), name="b")
    assert is_asked() and not is_asked()
    network.parameters_dict()["a"].name = "other"
    assert is_asked() and not is_asked()
    network.parameters_dict()["b"].sliced = True
    assert is_asked() and not is_asked()


@pytest.mark.parametrize("what", ["exchange", "gathered", "copies", "not of the network"])
def test_what_may_differ_the_next_time_is_not_remembered(monkeypatch, what):
    network, known = Holder({"a": ((2,), ms.float32)}), adapter.SavedParameters()
    name, calls = "a.__param_key__1" if what == "not of the network" else "a", []
    data = ms.Tensor(np.zeros(4 if what == "gathered" else 2), ms.float32)
    monkeypatch.setattr(
        adapter, "_saved_by_mindspore", lambda *_: calls.append(1) or [(name, data)]
    )
    if what == "exchange":
        monkeypatch.setattr(adapter, "collect_is_collective", lambda *_: True)
    if what == "copies":
        monkeypatch.setenv("MS_ENABLE_D2H_ASYNC", "1")
    for _ in range(2):
        assert adapter.parameters_to_save(network, False, lambda name: True, known) == [
            (name, data)
        ]
    assert len(calls) == 2


# ---- the remaining ranks when others are lost ----------------------------------------------------


@pytest.fixture
def alone(monkeypatch):
    """Makes any exchange with other ranks fail the test, as no rank answers."""
    from mindspore.train import serialization

    def ask(*arguments):
        raise AssertionError("this waits for ranks that are gone")

    for name in ("sync_pipeline_shared_parameters", "_get_merged_param_data", "get_allgather_cell"):
        monkeypatch.setattr(serialization, name, ask)


def row(shared=False, is_send=False):
    """Returns a row of ``parameter_layout_dict``."""
    return ((2,), (0, -1), (2, 2), 0, True, "", (4, 2), (2, 2), shared, is_send, 4, 0)


def test_a_rescue_has_no_exchange(alone):
    network = Holder({"a": ((2, 2), ms.float32), "b": ((3,), ms.int32)})
    network.parameter_layout_dict = {"a": row()}
    # of an earlier save with integrated_save
    network.parallel_parameter_merge_net_dict = {"a": lambda tensor: 1 / 0}
    found = adapter.rescued_parameters(network, lambda name: True)
    assert [(name, tensor.shape) for name, tensor in found] == [("a", (2, 2)), ("b", (3,))]


@pytest.fixture
def stages(monkeypatch):
    get = ms.context.get_auto_parallel_context
    monkeypatch.setattr(
        ms.context,
        "get_auto_parallel_context",
        lambda name: 2 if name == "pipeline_stages" else get(name),
    )


@pytest.mark.parametrize("is_owner", [True, False])
def test_a_shared_parameter_is_rescued_by_its_owner(alone, stages, is_owner):
    """The other stage has marked what it receives."""
    network = Holder({"embedding": ((2, 2), ms.float32), "a": ((2,), ms.float32)})
    network.parameters_dict()["embedding"].param_info.is_pipeline_shared_param = not is_owner
    network.parameter_layout_dict = {"embedding": row(shared=True, is_send=is_owner)}
    found = [name for name, _ in adapter.rescued_parameters(network, lambda name: True)]
    assert found == (["embedding", "a"] if is_owner else ["a"])
    assert adapter.collect_is_collective(network, False)


def test_a_stale_shared_parameter_is_not_saved_in_an_emergency(alone, stages):
    network = Holder({"embedding": ((2, 2), ms.float32)})
    network.parameter_layout_dict = {"embedding": row(shared=True)}
    with pytest.raises(
        SaveError, match="cannot save embedding: another pipeline stage has its newest value"
    ):
        adapter.rescued_parameters(network, lambda name: True)


def test_collecting_is_collective_only_in_parallel(stages, monkeypatch):
    network = Holder({"a": ((2, 2), ms.float32)})
    network.parameter_layout_dict = {"a": row()}
    assert not adapter.collect_is_collective(network, False)
    assert not adapter.collect_is_collective(network, True)
    monkeypatch.setattr(adapter, "is_parallel", lambda: True)
    assert adapter.collect_is_collective(network, True)


# ---- between compiling and computing -------------------------------------------------------------


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
def test_work_is_called_between_compiling_and_computing(mode):
    done = []

    class Network(Holder):
        def compile(self, *args, **kwargs):
            if args == ("fails",):
                raise ValueError("For primitive[Add]")
            done.append(("compiled", args, kwargs))
            return "phase"

    network, before = Network({}), ms.get_context("mode")
    ms.set_context(mode=mode)
    try:
        # asked again before anything was compiled: still once
        for _ in range(2):
            adapter.call_when_compiled(network, lambda: done.append("work"))
        if mode == ms.PYNATIVE_MODE:  # nothing will ever be compiled
            assert done == ["work", "work"]
            return
        assert done == [] and network.compile(1, a=2) == "phase"
        assert done == [("compiled", (1,), {"a": 2}), "work"] and "compile" not in network.__dict__
        network.compile()
        adapter.call_when_compiled(network, lambda: done.append("work"))
        with pytest.raises(ValueError, match="primitive"):
            network.compile("fails")
        assert done[2:] == [("compiled", (), {})]
    finally:
        ms.set_context(mode=before)


def test_only_training_networks_have_rules_for_hugging_face_weights():
    """Not mindformers' older models, nor its inference networks, which convert names themselves."""

    class Old:
        is_train_model = True

    class Inference:
        def get_gpt_transformer_config(self):
            return None

    class Training(Old, Inference):
        pass

    assert [
        adapter.is_graph_training_network(network()) for network in (Old, Inference, Training)
    ] == [False, False, True]
