import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import cuts, representable

from mindresume.model.layout import (
    TensorLayout,
    fold_optimizer_shards,
    held,
    holders,
    is_scalar,
    ordinals,
    same_shape,
    shares,
    whole,
)
from mindresume.reshard.range_reader import view


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


# ---- who writes which replica --------------------------------------------------------------------

RANKS = 8
MATRICES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4)]


@st.composite
def rows(draw):
    """(layout of 8 ranks, shape, itemsize), of every kind; now and then no layout, or an empty
    tensor."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    if draw(st.integers(0, 5)) == 0:
        return None, tuple(draw(st.lists(st.integers(0, 5), max_size=3))), itemsize
    return *draw(cuts(st.sampled_from(MATRICES), least=0)), itemsize


models = st.dictionaries(st.text("abc.é", min_size=1, max_size=4), rows(), max_size=12)


@given(models)
def test_every_element_is_written_by_exactly_one_of_its_ranks(tensors):
    found = shares(tensors, RANKS)
    assert len(found) == RANKS
    assert set().union(*found) == set(tensors)
    for name, (layout, shape, _) in tensors.items():
        writers = [rank for rank in range(RANKS) if name in found[rank]]
        written = np.zeros(shape, int)
        for rank in writers:
            part = whole(shape) if layout is None else held(layout, rank, shape)
            view(written, part)[...] += 1
        assert (written == 1).all()
        # an empty tensor too is there in all its pieces, which its elements cannot show
        assert len(writers) == (math.prod(layout.counts(shape)) if layout else 1)


@given(models, st.randoms())
def test_all_ranks_compute_the_same_for_any_order_of_tensors(tensors, random):
    names = list(tensors)
    random.shuffle(names)
    assert shares({name: tensors[name] for name in names}, RANKS) == shares(tensors, RANKS)


def written(tensors, found):
    """Returns bytes per rank."""
    return [
        sum(
            math.prod(layout.local_shape(shape) if layout else shape) * itemsize
            for layout, shape, itemsize in (tensors[name] for name in names)
        )
        for names in found
    ]


def model(dp, tp, layers, shards=0):
    """Returns the layouts of a transformer with two moments: half of its matrices cut by rows, half
    by columns, norms uncut."""
    row, column = TensorLayout((dp, tp), (0, -1), shards), TensorLayout((dp, tp), (-1, 0), shards)
    norm = TensorLayout((dp * tp,), (-1,), shards)
    found = {"embedding": (row, (32000, 512), 4)}
    for layer in range(layers):
        for kind in ("", "adam_m.", "adam_v."):
            found |= {
                f"{kind}{layer}.qkv": (row, (1536, 512), 4),
                f"{kind}{layer}.proj": (column, (512, 512), 4),
                f"{kind}{layer}.up": (row, (2048, 512), 4),
                f"{kind}{layer}.down": (column, (512, 2048), 4),
                f"{kind}{layer}.norm": (norm, (2048,), 4),
            }
    return found


@pytest.mark.parametrize(
    "dp, tp, shards",
    [(4, 2, 0), (4, 2, -1), (16, 8, 4)],
)
def test_ranks_write_equal_amounts_within_a_tenth(dp, tp, shards):
    tensors = model(dp, tp, layers=24, shards=shards)
    loads = written(tensors, shares(tensors, dp * tp))
    mean = sum(loads) / len(loads)
    assert max(abs(load - mean) for load in loads) <= 0.1 * mean
    assert sum(loads) == sum(math.prod(shape) * itemsize for _, shape, itemsize in tensors.values())


def test_widely_replicated_tensors_balance_the_others():
    """The half tensors are assigned first, to ranks 0 and 2; then the replicated one goes to the
    others, though its name sorts first."""
    tensors = {
        "half": (TensorLayout((2, 2), (1,)), (4,), 4),
        **{f"all.{n}": (None, (2,), 4) for n in range(2)},
    }
    assert written(tensors, shares(tensors, 4)) == [8, 8, 8, 8]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40), st.integers(1, 9))
def test_fully_replicated_tensors_are_spread_as_evenly_as_the_largest_piece_allows(sizes, ranks):
    tensors = {f"t{number}": (None, (size,), 2) for number, size in enumerate(sizes)}
    loads = written(tensors, shares(tensors, ranks))
    assert max(loads) - min(loads) <= 2 * max(sizes)


@pytest.mark.parametrize(
    "tensors, ranks",
    [
        ({}, 0),
        ({"w": (TensorLayout((4,), (0,)), (8,), 4)}, 8),
        ({"w": (TensorLayout((4,), (0,)), (6,), 4)}, 4),
    ],
)
def test_layouts_that_do_not_fit_are_refused(tensors, ranks):
    with pytest.raises(ValueError):
        shares(tensors, ranks)
