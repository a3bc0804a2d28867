"""Comparing two checkpoints: against plain Python element by element, and across layouts and
formats."""

import math
import os
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cli.test_convert import DTYPES
from cli.test_diff import MODEL, TENSORS
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_folders import leaves_nothing, path_of
from reshard.plans import STEP, Plan, complete, foreign, put, recorded

import mindresume
from mindresume.errors import CorruptFileError

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 1.5)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def differences(folder, a, b):
    """Returns what differs between two files with these tensors."""
    return mindresume.compare(
        put(folder / "a.safetensors", a), put(folder / "b.safetensors", b)
    ).differences


# ---- values --------------------------------------------------------------------------------------


def reference(a, b):
    """(count, bits only, absolute, relative, first index), one element after the other."""
    count = bits_only = absolute = 0
    relative, first = 0.0, ()
    for index in np.ndindex(a.shape):
        if a[index].tobytes() == b[index].tobytes():
            continue
        x, y = (value[index].item() for value in (a, b))
        x, y = (int(value) if isinstance(value, bool) else value for value in (x, y))
        first = first if count else index
        count += 1
        if x == y or x != x and y != y:
            bits_only += 1
            continue
        distance = abs(x - y)
        distance = math.inf if distance != distance else distance
        ratio = (
            float(distance) / float(max(abs(x), abs(y))) if math.isfinite(distance) else math.inf
        )
        absolute, relative = max(absolute, distance), max(relative, ratio)
    return count, bits_only, absolute, relative, first


@st.composite
def pairs(draw):
    """Draws two arrays of one dtype and shape: random bits and special values, with some
    differences."""
    dtype = dtype_of(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    both = []
    for _ in range(2):
        bits = random.integers(
            0, 2 if dtype.name == "bool" else 256, math.prod(shape) * dtype.itemsize, np.uint8
        )
        array = bits.view(dtype).reshape(shape).copy()
        if dtype.kind not in "iub" and draw(st.booleans()):
            with np.errstate(all="ignore"):
                array[random.random(shape) < 0.5] = np.array(random.choice(SPECIAL)).astype(dtype)
        both.append(array)
    a, b = both
    keep = random.random(shape) < draw(st.sampled_from([0, 0.5, 0.9, 1]))
    b[keep] = a[keep]
    return a, b


@settings(max_examples=150)
@given(pairs(), st.sampled_from([1, 3, 1 << 16]))
def test_values_against_plain_python(both, portion):
    a, b = both
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindresume.api.inspection.PORTION", portion)
        found = differences(Path(folder), {"w": a}, {"w": b})
    count, bits_only, absolute, relative, first = reference(a, b)
    assert len(found) == (count > 0)
    for it in found:
        assert (it.name, it.kind, it.differing, it.bits_only, it.first_index) == (
            "w",
            "values",
            count,
            bits_only,
            first,
        )
        assert it.largest_absolute == absolute and type(it.largest_absolute) is (
            int if a.dtype.kind in "iub" else float
        )
        assert it.largest_relative == pytest.approx(relative, rel=1e-12)
        assert [
            np.array(value, a.dtype).tobytes() for value in it.first_values if value == value
        ] == [side[first].tobytes() for side in (a, b) if side[first] == side[first]]


def test_equal_nan_is_equal_and_another_nan_differs_in_bits_only(tmp_path):
    # quiet, with a payload, signalling
    bits = np.array([0x7FC00000, 0x7FC00001, 0x7F800001, 0], np.uint32)
    other = bits ^ np.array([0, 2, 2, 1 << 31], np.uint32)
    a, b = ({"w": array.view(np.float32)} for array in (bits, other))
    assert differences(tmp_path, a, a) == ()
    (it,) = differences(tmp_path, a, b)
    assert (it.differing, it.bits_only, it.largest_absolute, it.first_index) == (3, 3, 0.0, (1,))
    assert it.within(0) and not it.within(None)


# ---- layouts -------------------------------------------------------------------------------------


def written(root, kind, text, fmt="safetensors"):
    """Writes a checkpoint under a plan, with its strategy beside it. Returns its path."""
    if kind == "consolidated":
        return complete(root, TENSORS)
    plan = Plan.parse(text, MODEL)
    (foreign if "foreign" in kind else recorded)(
        root / "checkpoint", plan, TENSORS, fmt, dedup="dedup" in kind
    )
    plan.write(root / "strategy")
    return root / "checkpoint"


def test_a_truncated_file_is_an_error(tmp_path):
    a, b = written(tmp_path / "a", "recorded", "tp2"), written(tmp_path / "b", "consolidated", "")
    held = mindresume.open(a)[STEP]
    assert held.tensors  # headers are read by now
    path = path_of(a, STEP, 1)
    os.truncate(path, path.stat().st_size - 700)
    with (
        leaves_nothing(tmp_path / "b"),
        pytest.raises(CorruptFileError, match="the file ends at byte"),
    ):
        mindresume.compare(held, b)
    held.release()
