"""Slices of a tensor and their ordinals, both ways."""

import math

import numpy as np
import pytest
from hypothesis import given
from layouts import cuts, representable

from mindresume.model.layout import TensorLayout, fold_optimizer_shards, held, ordinals


@given(cuts())
def test_ordinals_number_the_regions_of_the_ranks(case):
    layout, shape = case
    numbers, counts = ordinals(layout, shape), layout.counts(shape)
    assert set(numbers) == set(range(math.prod(counts)))
    for rank, number in enumerate(numbers):
        indices = np.unravel_index(number, counts) if counts else ()
        assert held(layout, rank, shape) == tuple(
            (index * size, (index + 1) * size)
            for index, size in zip(indices, layout.local_shape(shape), strict=True)
        )


def test_ordinals_are_row_major_over_the_pieces():
    layout = TensorLayout((2, 2, 2), (0, -1, (2, 1)))
    assert ordinals(layout, (4, 3, 8)) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert ordinals(TensorLayout((2, 2), (), -1), ()) == (0, 0, 0, 0)


def test_slices_of_an_empty_tensor_differ_only_by_rank():
    assert ordinals(TensorLayout((2,), (0,)), (0,)) == (0, 1)


@given(cuts())
def test_folded_layouts_have_the_same_slices(case):
    layout, shape = case
    try:
        found = fold_optimizer_shards(layout)
    except ValueError:
        assert not representable(layout)
        return
    assert representable(layout) and found.optimizer_shards == 0
    assert [held(found, rank, shape) for rank in range(found.stage_size)] == [
        held(layout, rank, shape) for rank in range(layout.stage_size)
    ]


@pytest.mark.parametrize(
    "layout, matrix, maps",
    [
        # as in the files of mindformers, ones included
        (TensorLayout((2, 1, 2), (0, -1), -1), (2, 1, 2), ((0, 2, 1), -1)),
        (TensorLayout((4, 2), (-1, 0), 2), (2, 2, 2), (1, 0)),
        (TensorLayout((4,), (-1,), 2), (2, 2), (0,)),
        (TensorLayout((2, 8), (1,), 4), (2, 2, 4), ((2, 0),)),
        (TensorLayout((2, 2), (), -1), (2, 2), ()),
        (TensorLayout((2, 2), ((0,), (-1,))), (2, 2), (0, -1)),
    ],
)
def test_folded(layout, matrix, maps):
    assert fold_optimizer_shards(layout) == TensorLayout(matrix, maps)
