"""What a collector remembers between two saves."""

from types import SimpleNamespace

import numpy as np
import pytest

from mindresume.mindformers import network_state
from mindresume.mindformers.training_saves import StateCollector, step_values


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


@pytest.mark.parametrize(
    "overflow, skips_overflow, known",
    [(True, True, False), (True, False, True), (False, True, True)],
)
def test_only_with_a_dynamic_loss_scale_an_overflow_is_no_bad_step(overflow, skips_overflow, known):
    """With a fixed scale the gradients of each bad step overflow."""
    outputs = [np.float32([2.0, 4.0]), np.array([overflow]), 1.0, 1e-3, np.float32(np.inf)]
    expected = {"loss": 3.0, "grad_norm": np.inf} if known else {}
    assert step_values(outputs, skips_overflow) == expected


def test_outputs_without_a_norm_have_a_loss():
    assert step_values(np.float32(2.0), True) == {"loss": 2.0}
