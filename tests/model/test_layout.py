import json
import math

import numpy as np
import pytest
from hypothesis import given
from layouts import cuts, representable

from mindresume.model.layout import (
    TensorLayout,
    fold_optimizer_shards,
    held,
    holders,
    is_scalar,
    ordinals,
    same_shape,
)
from mindresume.reshard.geometry import view


@pytest.mark.parametrize(
    "tensor_map, shards, stride, shape, regions",
    [
        ((0, -1), 0, 0, (8, 4), "0:4,0:4 4:8,0:4 0:4,0:4 4:8,0:4"),
        ((0, -1), 2, 2, (8, 4), "0:2,0:4 4:6,0:4 2:4,0:4 6:8,0:4"),
        ((-1, 0), -1, 2, (8, 4), "0:4,0:2 0:4,2:4 4:8,0:2 4:8,2:4"),
        ((-1,), -1, 1, (8,), "0:2 2:4 4:6 6:8"),
        (((0, 1), -1), 0, 0, (8, 4), "0:2,0:4 4:6,0:4 2:4,0:4 6:8,0:4"),
        ((), -1, 0, (), "   "),
    ],
)
def test_dp2_tp2(tensor_map, shards, stride, shape, regions):
    layout = TensorLayout((2, 2), tensor_map, shards)
    expected = [
        tuple(tuple(map(int, part.split(":"))) for part in region.split(",") if part)
        for region in regions.split(" ")
    ]
    assert [held(layout, rank, shape) for rank in range(4)] == expected
    assert layout.optimizer_stride == stride
    assert layout.local_shape(shape) == tuple(stop - start for start, stop in expected[0])
    assert layout.global_shape(layout.local_shape(shape)) == shape
    for rank, number in enumerate(ordinals(layout, shape)):
        assert holders(layout, shape)[number] == tuple(
            other for other in range(4) if expected[other] == expected[rank]
        )


@given(cuts(least=0, tuples=True))
def test_every_element_has_as_many_ranks_as_copies(case):
    layout, shape = case
    count = np.zeros(shape, int)
    for rank in range(layout.stage_size):
        view(count, held(layout, rank, shape))[...] += 1
    assert (count == layout.copies).all()


@given(cuts(least=0, tuples=True))
def test_json_round_trip(case):
    found = TensorLayout.from_json(
        json.loads(json.dumps({**case[0].to_json(), "of a later version": 1}))
    )
    assert found == case[0] and hash(found) == hash(case[0])


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {},
        {"device_matrix": [2], "tensor_map": [0]},
        {"device_matrix": ["2"], "tensor_map": [0], "optimizer_shards": 0},
        {"device_matrix": [2], "tensor_map": [[True]], "optimizer_shards": 0},
    ],
)
def test_broken_json_is_a_value_error(broken):
    with pytest.raises(ValueError):
        TensorLayout.from_json(broken)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (((), ()), "at least one axis"),
        (((2,), (1,)), "does not have"),
        (((2,), (-2,)), "does not have"),
        (((2, 2), ((1, 0), 1)), "an axis twice"),
        (((4,), (-1,), 3), "3 optimizer shards do not divide 4 replicas"),
        (((4,), (-1,), -2), "-2 optimizer shards"),
    ],
)
def test_impossible_layouts_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        TensorLayout(*arguments)


def test_a_shape_that_does_not_divide_is_refused_by_dimension_size_pieces_and_layout():
    layout = TensorLayout((2, 4), (0, -1), 2)
    expected = (
        r"dimension 0 of shape \(12, 3\) has 12 elements and does not divide into 8 equal pieces: "
        r"TensorLayout\(device_matrix=\(2, 4\), tensor_map=\(0, -1\), optimizer_shards=2\)"
    )
    for function in (layout.counts, layout.local_shape, lambda shape: held(layout, 0, shape)):
        with pytest.raises(ValueError, match=expected):
            function((12, 3))


def test_ranks_and_dimensions_must_fit():
    layout = TensorLayout((2, 2), (0, -1))
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank {rank} is not one of the 4 ranks"):
            held(layout, rank, (8, 4))
    with pytest.raises(ValueError, match=r"shape \(8,\) has 1 dimensions, tensor_map has 2"):
        held(layout, 0, (8,))


def test_a_tensor_of_one_element_has_any_number_of_dimensions():
    assert is_scalar(()) and is_scalar((1, 1)) and is_scalar((0,)) and not is_scalar((2,))
    assert same_shape((), (1,)) and same_shape((2, 3), [2, 3])
    assert not same_shape((2, 3), (3, 2)) and not same_shape((0,), (0, 1))


# ---- ordinals ------------------------------------------------------------------------------------


@given(cuts())
def test_ordinals_number_the_regions_of_the_ranks(case):
    layout, shape = case
    numbers, counts = ordinals(layout, shape), layout.counts(shape)
    assert set(numbers) == set(range(math.prod(counts)))
    for number, ranks in enumerate(holders(layout, shape)):
        assert ranks == tuple(rank for rank, other in enumerate(numbers) if other == number)
        assert len(ranks) == layout.copies
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
        (TensorLayout((2, 8), (1,), 4), (2, 2, 4), ((2, 0),)),
        (TensorLayout((2, 2), ((0,), (-1,))), (2, 2), (0, -1)),
    ],
)
def test_folded(layout, matrix, maps):
    assert fold_optimizer_shards(layout) == TensorLayout(matrix, maps)
