"""Every piece is written once, by a rank that holds it, and no rank writes much more than
another."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import cuts

from mindresume.model.layout import TensorLayout, held, shares
from mindresume.reshard.geometry import view, whole

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
