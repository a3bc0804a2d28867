"""What a collector remembers between two saves."""

from types import SimpleNamespace

from mindresume.mindformers import network_state
from mindresume.mindformers.training_saves import StateCollector


def test_layouts_are_computed_again_only_after_a_change(monkeypatch):
    computed, real = [], network_state.layouts
    monkeypatch.setattr(network_state, "layouts", lambda *what: computed.append(1) or real(*what))
    session = SimpleNamespace(target=SimpleNamespace(rank=0), suffix=0)
    collector = StateCollector(
        SimpleNamespace(_config=None), session, SimpleNamespace(emit=lambda event: None)
    )
    row = [[2, 2], [0, -1], [4, 8], 0, True, "", [8, 8]]
    table, shapes = {"a": row}, {"a": (4, 8)}

    def is_computed():
        del computed[:]
        found = collector._layouts(table, shapes)
        fresh = real(table, shapes, lambda text: None)
        assert found == fresh
        found.clear()  # whoever gets it may change it
        return bool(computed)

    assert is_computed() and not is_computed()
    row[1] = [1, -1]  # in place
    assert is_computed() and not is_computed()
    shapes = {"a": (4, 4)}
    assert is_computed() and not is_computed()
    table = {}
    assert is_computed() and not is_computed()
