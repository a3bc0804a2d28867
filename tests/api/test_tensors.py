"""Facts about a tensor that are known without reading it, as numbers and as text."""

import pytest

from mindresume.api.checkpoint import cut_text
from mindresume.model.layout import TensorLayout


@pytest.mark.parametrize(
    "layout, text",
    [
        (None, "not cut"),
        (TensorLayout((2, 2), (-1, -1)), "not cut"),
        (TensorLayout((1, 4), (1, -1)), "not cut"),
        (TensorLayout((2, 2), (0, -1)), "dim 0 / 2 over axis 0 of [2, 2]"),
        (TensorLayout((2, 2), (0, -1), -1), "dim 0 / 2 over axis 0 of [2, 2]; optimizer shard 2"),
        (TensorLayout((4, 2), (-1, -1), 4), "optimizer shard 4 of [4, 2]"),
        (
            TensorLayout((2, 3, 4), (1, (2, 0))),
            "dim 0 / 3 over axis 1, dim 1 / 2 x 4 over axes 2, 0 of [2, 3, 4]",
        ),
    ],
)
def test_cut_text(layout, text):
    assert cut_text(layout) == text
