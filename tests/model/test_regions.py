"""Regions compared with numpy: overlaps, offsets and order."""

import math

import layouts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard.plans import part_of, region_of

from mindresume.model.layout import (
    TensorLayout,
    chunks,
    cuts,
    elements,
    held,
    offset,
    overlap,
    runs,
    shape_of,
    whole,
    within,
)
from mindresume.reshard.range_reader import view

RELAXED = settings(max_examples=60)


@st.composite
def regions_of(draw, shape):
    """Draws any region of a tensor, empty ones included."""
    found = []
    for size in shape:
        start = draw(st.integers(0, size))
        found.append((start, draw(st.integers(start, size))))
    return tuple(found)


@st.composite
def regions(draw, least=0):
    """(shape, region); ``least``: elements of each dimension of both."""
    shape = tuple(draw(st.lists(st.integers(least, 5), max_size=4)))
    return shape, tuple(
        (start, draw(st.integers(start + least, size)))
        for size in shape
        for start in [draw(st.integers(0, size - least))]
    )


def numbered(shape):
    """Returns a tensor in which each element is its position."""
    return np.arange(math.prod(shape)).reshape(shape)


# ---- one region and another ----------------------------------------------------------------------


# ---- runs, positions -----------------------------------------------------------------------------


@RELAXED
@given(regions(least=1))
def test_runs_are_the_region_in_its_order(case):
    shape, region = case
    length, starts = runs(region, shape)
    starts = list(starts)
    found = [start + i for start in starts for i in range(length)]
    assert found == view(numbered(shape), region).reshape(-1).tolist()
    assert starts == sorted(starts)


# ---- chunks --------------------------------------------------------------------------------------


@RELAXED
@given(layouts.cuts(least=0), st.integers(1, 40))
def test_chunks_follow_each_other_in_every_slice(case, most):
    """This makes reading and writing sequential: each slice is covered from its first to its last
    element, in contiguous parts."""
    layout, shape = case
    for region in {region_of(shape, layout, rank) for rank in range(layout.stage_size)}:
        position = 0
        for chunk in chunks(whole(shape), most):
            part = overlap(chunk, region)
            if part is None:
                continue
            length, starts = runs(within(part, region), shape_of(region))
            in_slice = view(numbered(shape_of(region)), within(part, region)).reshape(-1)
            assert in_slice.tolist() == list(range(position, position + in_slice.size))
            assert next(starts) == offset(within(part, region), shape_of(region)) == position
            assert length == in_slice.size, "in one run, so in one call"
            position += in_slice.size
        assert position == elements(region)


@pytest.mark.parametrize(
    "shape, most, count",
    [
        ((), 1, 1),
        ((0,), 5, 0),
        ((3, 0), 5, 0),
        ((10,), 4, 3),
        ((4, 4), 4, 4),
        ((4, 4), 7, 4),
        ((4, 4), 8, 2),
        ((4, 4), 3, 8),
        ((2, 2, 8), 8, 4),
    ],
)
def test_chunks_have_the_maximum_size(shape, most, count):
    assert len(list(chunks(whole(shape), most))) == count


# ---- cuts ----------------------------------------------------------------------------------------


@RELAXED
@given(layouts.cuts(least=0), st.data())
def test_cuts_cover_a_region_exactly_once_with_slices_of_the_ranks(case, data):
    layout, shape = case
    region = data.draw(regions_of(shape))
    array, marks = numbered(shape), np.zeros(shape, int)
    owned = {rank: part_of(array, layout, rank) for rank in range(layout.stage_size)}
    for cut in cuts(layout, shape, region):
        view(marks, cut.part)[...] += 1
        assert elements(cut.part) and list(cut.holders) == sorted(set(cut.holders))
        piece = view(array, cut.stored)
        assert list(cut.holders) == [
            rank for rank, part in owned.items() if np.array_equal(part, piece)
        ]
        assert overlap(cut.stored, region) == cut.part or not shape
        for rank in cut.holders:
            assert (view(owned[rank], within(cut.part, cut.stored)) == view(array, cut.part)).all()
    wanted = np.zeros(shape, int)
    view(wanted, region)[...] = 1
    assert (marks == wanted).all()


def test_cuts_without_a_layout_are_one_piece():
    (cut,) = cuts(None, (4, 2), ((1, 2), (0, 2)))
    assert cut == (((0, 4), (0, 2)), (0,), ((1, 2), (0, 2)))
    assert cuts(None, (), ()) == (((), (0,), ()),)
    assert cuts(None, (4, 0), ((0, 4), (0, 0))) == ()


def test_cuts_of_a_large_job_cost_only_the_overlapping_pieces():
    layout = TensorLayout((128, 64), (0, -1), 128)  # 8,192 ranks
    (cut,) = cuts(layout, (8192, 16), ((5, 6), (0, 16)))
    assert cut.stored == ((5, 6), (0, 16)) and len(cut.holders) == 1
    assert len(cuts(layout, (8192, 16), ((5, 9), (3, 4)))) == 4


@pytest.mark.parametrize("shape", [(9, 4), (8,), (8, 4, 1)])
def test_a_shape_that_does_not_fit_the_layout(shape):
    layout = TensorLayout((2,), (0, -1))
    for region in (whole(shape), ((0, 0),) * len(shape)):
        with pytest.raises(ValueError, match="does not divide|dimensions"):
            cuts(layout, shape, region)
        with pytest.raises(ValueError, match="does not divide|dimensions"):
            held(layout, 0, shape)
