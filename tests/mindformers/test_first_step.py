"""What every training of the graph trainer does between the load and its first step, with
MindSpore's own ``Model.train``: the parameters are compared behind all callbacks, with and without
a CheckpointMonitor."""

import signal
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

import mindspore as ms  # noqa: E402
from mindspore import nn  # noqa: E402

from mindresume.errors import AlteredWeightsError  # noqa: E402
from mindresume.events import WARNING, NetworkCompiled, Notice  # noqa: E402
from mindresume.mindformers import configuration, network_state, training_context  # noqa: E402
from mindresume.mindformers.network_state import LoadedWeights  # noqa: E402
from mindresume.mindformers.patches import WRAPPERS  # noqa: E402
from mindresume.mindformers.training_context import TrainingContext  # noqa: E402
from mindresume.settings import Settings  # noqa: E402


class Loader(ms.Callback):
    """Loads weights of its own at an event, as OnRequestExit does in ``on_train_begin``."""

    def __init__(self, event):
        setattr(self, event, self.load)

    @staticmethod
    def load(run_context):
        for parameter in run_context.original_args().train_network.trainable_params():
            parameter.set_data(ms.Tensor(np.ones(parameter.shape, np.float32)))


class Counter(ms.Callback):
    def __init__(self):
        self.steps = 0

    def on_train_step_end(self, run_context):
        self.steps += 1


def pairs():
    for row in range(4):
        yield np.full(3, row, np.float32), np.zeros(2, np.float32)


@pytest.fixture(autouse=True)
def interrupts():
    """MindSpore replaces the handler of SIGINT in C when it compiles, and Ctrl-C would end the
    process of the tests."""
    yield
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))


@pytest.fixture(params=[ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def train(request, monkeypatch):
    """Returns a function that loads a network, trains it with callbacks, and returns the events of
    the training."""
    before, mode = training_context.current(), ms.get_context("mode")
    monkeypatch.setattr(ms.Model, "train", WRAPPERS["Model.train"](ms.Model.train))
    ms.set_context(mode=request.param)

    def run(callbacks, task=configuration.TRAIN, attempt=None, **settings):
        emitted = []
        context = training_context.set_current(TrainingContext(Settings.load(settings, {}), task))
        context.resources.emit, context.plan = emitted.append, SimpleNamespace(resumes=True)
        net = nn.Dense(3, 2)
        context.resources.pending_load.attempt = attempt
        if attempt is None:
            context.resources.loaded = LoadedWeights.of(
                {it.name: it.asnumpy().copy() for it in net.get_parameters()}
            )
        else:
            context.saves = SimpleNamespace(manager=attempt)
        model = ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params()))
        model.train(
            1, ms.dataset.GeneratorDataset(pairs, ["data", "label"]).batch(1), callbacks=callbacks
        )
        return emitted

    yield run
    ms.set_context(mode=mode)
    training_context.set_current(before)


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_step_begin"])
def test_a_callback_that_loads_weights_of_its_own_ends_the_training_before_a_step(train, event):
    counter = Counter()
    with pytest.raises(AlteredWeightsError, match=f"in between: .*Loader .{event}") as found:
        train([counter, Loader(event)])
    assert counter.steps == 0 and "Counter" not in str(found.value)


def test_the_loaded_weights_train(train):
    """Only a training of the trainer is compared."""
    for several in (False, True):
        counter = Counter()
        emitted = train([counter, Counter()] if several else counter)
        assert counter.steps == 4 and [type(event) for event in emitted] == [NetworkCompiled]
        assert training_context.current().resources.loaded is None
    train(None)
    train([Loader("on_train_begin")], task="")


def test_parameters_that_mindspore_cuts_between_compilation_and_step_train(train, monkeypatch):
    """As it does with those on a device."""
    cut, digest = [], network_state._digest
    monkeypatch.setattr(network_state, "_WHOLE", 8)
    monkeypatch.setattr(network_state, "_PART", 12)
    monkeypatch.setattr(ms.Parameter, "device", property(lambda self: "Ascend:0"))
    monkeypatch.setattr(
        network_state,
        "_digest",
        lambda *given: cut.append(type(given[0]).__name__) or digest(*given),
    )
    counter = Counter()
    train(counter)
    # weight; the bias is small
    assert counter.steps == 4 and cut == ["ndarray"] * 2 + ["Parameter", "ndarray"]


def test_a_guard_that_no_monitor_asks_is_said_to_do_nothing(train):
    emitted = train(None, guard={"nan": "rollback"})
    # with the plug-in installed by another test, the training is wrapped twice
    assert {event.log_level for event in emitted if isinstance(event, Notice)} == {WARNING}


class Attempt:
    begun = 0

    def begin_load_attempt(self):
        self.begun += 1


def test_the_load_attempt_begins_once_the_network_is_compiled(train):
    attempt = Attempt()
    assert [type(event) for event in train(None, attempt=attempt)] == [NetworkCompiled]
    assert attempt.begun == 1
