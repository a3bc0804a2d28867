"""Networks that only have parameters: those of one rank of a job under a plan."""

import numpy as np
import pytest
from reshard.plans import MODEL, Plan, random_tensors

from mindresume.mindformers import adapter, network_state

NET = {
    name: spec
    for name, spec in MODEL.items()
    if not name.startswith("accu_grads") and 0 not in spec.shape
}
TENSORS = random_tensors(NET)


class Network:
    """Has the parameters of one rank of a job under ``plan``, its optimizer included, and their
    layouts in ``parameter_layout_dict``. ``changed``: {name: (shape, dtype)}; None removes the
    parameter."""

    def __init__(self, plan: Plan, rank: int = 0, changed=()):
        shapes = {name: array.shape for name, array in plan.shard(TENSORS, rank).items()}
        wanted = {name: (shape, TENSORS[name].dtype.name) for name, shape in shapes.items()}
        wanted |= dict(changed)
        self.wanted = {name: row for name, row in wanted.items() if row is not None}
        self.plan_layouts = plan.layouts(rank) if plan.world_size > 1 else {}
        self.parameter_layout_dict = {
            name: (
                list(layout.device_matrix),
                [list(m) if isinstance(m, tuple) else m for m in layout.tensor_map],
                list(shapes[name]),
                0,
                True,
                "" if layout.optimizer_slices == 1 else "group",
                list(TENSORS[name].shape),
            )
            for name, layout in self.plan_layouts.items()
        }
        self.training, self.loaded = True, None

    def parameters_dict(self):
        return [name for name in self.wanted if not name.startswith("adam_")]

    def cells_and_names(self):
        return [("", self)]

    def set_train(self, training):
        self.training = training


def load_into(network: Network, arrays: dict[str, np.ndarray], deduplicated: bool):
    """Takes the place of ``adapter.load_into``."""
    network.loaded = dict(arrays)
    return [name for name in network.wanted if name not in arrays], []


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Lets a ``Network`` stand for one on several devices."""
    monkeypatch.setattr(adapter, "is_parallel", lambda: True)
    monkeypatch.setattr(network_state, "is_parallel", lambda: True)
    monkeypatch.setattr(adapter, "parameters_to_load", lambda network, offered: network.wanted)
    monkeypatch.setattr(adapter, "load_into", load_into)


def assert_compared(context, network: Network):
    """What the first step is compared with is what the network has taken."""
    loaded = context.resources.loaded
    assert set(loaded.digests) == {name for name, array in network.loaded.items() if array.size > 1}
    assert loaded.difference(network.loaded.items(), ()) == ""


def contents(arrays):
    return {
        name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()
    }
