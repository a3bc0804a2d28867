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
from mindresume.events import NetworkCompiled  # noqa: E402
from mindresume.mindformers import checkpoint_monitor, configuration, training_context  # noqa: E402
from mindresume.mindformers.network_state import LoadedWeights  # noqa: E402
from mindresume.mindformers.patches import WRAPPERS  # noqa: E402
from mindresume.mindformers.training_context import TrainingContext  # noqa: E402


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

    def run(callbacks, task=configuration.TRAIN):
        emitted = []
        context = training_context.set_current(TrainingContext(task=task))
        context.resources.emit, context.plan = emitted.append, SimpleNamespace(resumes=True)
        net = nn.Dense(3, 2)
        context.resources.loaded = LoadedWeights.of(
            {it.name: it.asnumpy().copy() for it in net.get_parameters()}
        )
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
    with pytest.raises(AlteredWeightsError, match="callbacks of this training: .*Counter, Loader"):
        train([counter, Loader(event)])
    assert counter.steps == 0


def test_the_loaded_weights_train(train):
    """Only a training of the trainer is compared."""
    for several in (False, True):
        counter = Counter()
        emitted = train([counter, Counter()] if several else counter)
        assert counter.steps == 4 and [type(event) for event in emitted] == [NetworkCompiled]
        assert training_context.current().resources.loaded is None
    train(None)
    train([Loader("on_train_begin")], task="")


# ---- the load attempt ----------------------------------------------------------------------------


def test_the_load_attempt_begins_when_the_network_is_compiled(monkeypatch):
    compiled, begun = [], []
    monkeypatch.setattr(
        checkpoint_monitor.adapter,
        "call_when_compiled",
        lambda network, work: compiled.append((network, work)),
    )
    before, context = (
        training_context.current(),
        training_context.set_current(TrainingContext(task=configuration.TRAIN)),
    )
    try:
        attempt = context.resources.pending_load.attempt = SimpleNamespace(begun=False)
        manager = SimpleNamespace(begin_load_attempt=lambda: begun.append(True))
        context.saves = SimpleNamespace(manager=manager)
        net = nn.Dense(3, 2)
        cb_params = SimpleNamespace(train_network=net, list_callback=[])
        callback, run_context = (
            checkpoint_monitor.FirstStep(),
            SimpleNamespace(original_args=lambda: cb_params),
        )
        callback.on_train_step_begin(run_context)
        assert compiled[0][0] is net and not begun
        compiled[0][1]()
        attempt.begun = True
        callback.on_train_step_begin(run_context)
        assert begun == [True] and len(compiled) == 1
    finally:
        training_context.set_current(before)
