"""A balanced load gives each rank what it needs, and each piece is read by one rank."""

from types import SimpleNamespace

import numpy as np
import pytest
from rank_folders import Ranks

from mindresume.mindformers import loading
from mindresume.mindformers.configuration import LoadRequest
from mindresume.model.layout import TensorLayout, held
from mindresume.reshard.range_reader import view
from sim.threads import Condition

RANKS = 4
WHOLE = {
    "rows": np.arange(48, dtype=np.float32).reshape(8, 6),
    "copied": np.arange(5, dtype=np.float32),
}
COPIED = {
    "rows": (TensorLayout((2, 2), (0, -1)), (8, 6)),
    "copied": (TensorLayout((2, 2), (-1,)), (5,)),
}
CUT = {"rows": (TensorLayout((4,), (0, -1)), (8, 6))}


@pytest.fixture
def broadcaster(monkeypatch):
    """Replaces the communication groups of MindSpore by a table in memory."""
    ready, sent = Condition(), {}

    class Broadcaster:
        def __init__(self):
            self.counts = {}

        def __call__(self, ranks, owner, data, count):
            self.counts[ranks] = self.counts.get(ranks, 0) + 1
            key = ranks, self.counts[ranks]
            with ready:
                if data is not None:
                    sent[key] = data
                    ready.notify_all()
                assert ready.wait_for(lambda: key in sent, 10)
                return sent[key]

        def close(self):
            pass

    monkeypatch.setattr(loading, "TensorBroadcaster", Broadcaster)
    monkeypatch.setattr(loading, "read_regions", read_regions)


def read_regions(weights, regions, *_):
    weights.read.update(regions)
    return {
        name: np.ascontiguousarray(view(WHOLE[name], region)) for name, region in regions.items()
    }


def load(layouts, enabled=True):
    """Returns {rank: (names that it read, its arrays, its regions, texts of notices)}."""
    results = {}

    def work(group):
        notices = []
        regions = {
            name: held(layout, group.rank, shape) for name, (layout, shape) in layouts.items()
        }
        weights = SimpleNamespace(
            tensors=dict.fromkeys(regions, SimpleNamespace(dtype="float32")), read=set()
        )
        context = SimpleNamespace(
            group=group,
            emit=lambda event: notices.append(event.text),
            plan=SimpleNamespace(request=LoadRequest("", balanced=enabled)),
        )
        arrays, _ = loading.read_balanced(weights, regions, layouts, context)
        results[group.rank] = weights.read, arrays, regions, notices

    assert Ranks(RANKS).run(work) == [None] * RANKS
    return results


def same(results):
    for _, arrays, regions, _ in results.values():
        assert {name: array.tolist() for name, array in arrays.items()} == {
            name: view(WHOLE[name], region).tolist() for name, region in regions.items()
        }


def test_each_piece_is_read_once_and_reaches_all(broadcaster):
    found = load(COPIED)
    same(found)
    # two halves of the rows, and the vector
    assert sum(len(read) for read, _, _, _ in found.values()) == 3
    assert all(len(notices) == 1 for _, _, _, notices in found.values())


def test_without_replicas_it_has_no_effect(broadcaster):
    found = load(CUT)
    same(found)
    assert all(read == {"rows"} and len(notices) == 1 for read, _, _, notices in found.values())


def test_it_is_off_by_default(broadcaster):
    found = load(COPIED, enabled=False)
    same(found)
    assert all(len(read) == 2 and not notices for read, _, _, notices in found.values())
