"""Slices of a tensor and their ordinals, both ways."""

import math

import pytest
from formats.layouts import cuts, representable
from hypothesis import given

from mindresume.model.layout import (
    TensorLayout,
    fold_optimizer_shards,
    ordinal,
    ordinals,
    region_of,
)


@given(cuts())
def test_ordinals_number_the_regions_of_the_ranks(case):
    layout, shape = case
    numbers = ordinals(layout, shape)
    assert set(numbers) == set(range(math.prod(layout.counts(shape))))
    for rank, number in enumerate(numbers):
        assert region_of(layout, shape, number) == layout.slices(rank, shape)
        assert ordinal(layout, shape, layout.slices(rank, shape)) == number


def test_ordinals_are_row_major_over_the_pieces():
    layout = TensorLayout((2, 2, 2), (0, -1, (2, 1)))
    assert ordinals(layout, (4, 3, 8)) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert region_of(layout, (4, 3, 8), 6) == (slice(2, 4), slice(0, 3), slice(4, 6))
    assert (
        ordinals(TensorLayout((2, 2), (), -1), ()) == (0, 0, 0, 0) and region_of(None, (), 0) == ()
    )
    assert ordinal(None, (3, 2), (slice(0, 3), slice(0, 2))) == 0


def test_slices_of_an_empty_tensor_differ_only_by_rank():
    layout = TensorLayout((2,), (0,))
    assert ordinals(layout, (0,)) == (0, 1) and region_of(layout, (0,), 1) == (slice(0, 0),)
    with pytest.raises(ValueError, match="empty"):
        ordinal(layout, (0,), (slice(0, 0),))
    assert ordinal(TensorLayout((2,), (-1,)), (0,), (slice(0, 0),)) == 0


@pytest.mark.parametrize(
    "region",
    [
        (slice(0, 3),),
        (slice(1, 5),),
        (slice(8, 12),),
        (slice(-4, 0),),
        (slice(0, 8),),
        (),
        (slice(0, 4), slice(0, 4)),
    ],
)
def test_invalid_slices(region):
    with pytest.raises(ValueError):
        ordinal(TensorLayout((2,), (0,)), (8,), region)


@pytest.mark.parametrize("number", [-1, 2])
def test_invalid_ordinals(number):
    with pytest.raises(ValueError, match="expected 0 to 1"):
        region_of(TensorLayout((2,), (0,)), (8,), number)


@given(cuts())
def test_folded_layouts_have_the_same_slices(case):
    layout, shape = case
    try:
        found = fold_optimizer_shards(layout)
    except ValueError:
        assert not representable(layout)
        return
    assert representable(layout) and found.optimizer_shards == 0
    assert [found.slices(rank, shape) for rank in range(found.stage_size)] == [
        layout.slices(rank, shape) for rank in range(layout.stage_size)
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
