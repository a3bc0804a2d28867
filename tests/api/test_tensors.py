"""Facts about a tensor that are known without reading it, as numbers and as text."""

import pytest

from mindresume.api.tensors import TensorInfo, TensorSlice, cut_text, slices_of, tensors_of_strategy
from mindresume.formats.strategy import Strategy
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


def test_sizes_and_shapes():
    row = TensorInfo("w", "bfloat16", (8, 4), TensorLayout((2, 2), (0, -1), -1), (0,), 1)
    assert (row.local_shape, row.size_bytes, row.cut) == (
        (2, 4),
        64,
        "dim 0 / 2 over axis 0 of [2, 2]; optimizer shard 2",
    )
    assert {**row.to_json(), "layout": None} == {
        "name": "w",
        "dtype": "bfloat16",
        "shape": [8, 4],
        "layout": None,
        "stages": [0],
        "copies": 1,
        "file": None,
        "cut": row.cut,
        "local_shape": [2, 4],
        "size_bytes": 64,
    }
    unknown = TensorInfo("w", None, None, row.layout, (0,), 1)
    assert unknown.local_shape is unknown.size_bytes is None


def test_a_strategy_has_pieces():
    layout = TensorLayout((2, 2), (0, -1))
    strategy = Strategy(({"w": layout}, {"w": layout, "v": layout}), "test")
    rows = tensors_of_strategy(strategy)
    assert [(row.name, row.stages, row.shape) for row in rows] == [
        ("w", (0, 1), None),
        ("v", (1,), None),
    ]
    assert slices_of(strategy, rows[1], range(8)) == [
        TensorSlice("v", ((0, 1), (0, 1)), (2, 1), (4, 6), unit="pieces"),
        TensorSlice("v", ((1, 2), (0, 1)), (2, 1), (5, 7), unit="pieces"),
    ]
