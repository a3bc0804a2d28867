"""Comparing two checkpoints: against plain Python element by element, and across layouts and formats."""
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_folders import STORAGE, dir_at, flip_bit, leaves_nothing, path_of
from reshard.plans import COUNTERS, STEP, Plan, Spec, complete, foreign, lose, newest, part_of, put, random_tensors, recorded

from mindresume.errors import CorruptFileError, LoadError
from mindresume.formats.consolidated import read_consolidated
from mindresume.reshard import compare as module
from mindresume.reshard.checkpoint_view import view_of_consolidated
from mindresume.reshard.compare import DTYPE, ONLY_A, ONLY_B, SHAPE, VALUES, by_size, comparable, compare
from mindresume.reshard.direct_engine import Traffic
from mindresume.reshard.rank_folder_view import view_of_rank_folders
from mindresume.tensor_files import read_header
from mindresume.tensor_files.header import DTYPES

MODEL = {"embedding.weight": Spec((16, 8), 0, "first", "bfloat16"), "norm.weight": Spec((8,), None, "last"),
         **{f"layers.{i}.qkv.weight": Spec((24, 8), 0, i) for i in range(4)},
         **{f"layers.{i}.proj.weight": Spec((8, 8), 1, i, "bfloat16") for i in range(4)},
         "layers.2.experts.weight": Spec((8, 8, 8), 2, 2, "float16"), "layers.3.ids": Spec((16,), 0, 3, "int64"),
         "layers.3.mask": Spec((8, 8), 1, 3, "bool"), "layers.3.none": Spec((8, 0), 0, 3),
         "head.weight": Spec((16, 8), 0, "last")}
TENSORS = random_tensors(MODEL)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 1.5)


def uncut(path, tensors):
    """Returns weights of one file with these tensors."""
    return view_of_consolidated(STORAGE, read_consolidated(STORAGE, str(put(Path(path), tensors))))


def opened(root, kind, text, fmt="safetensors", tensors=TENSORS):
    """Returns weights of a checkpoint written under the plan."""
    if kind == "consolidated":
        return view_of_consolidated(STORAGE, read_consolidated(STORAGE, str(complete(root, tensors))))
    plan = Plan.parse(text, MODEL)
    write = foreign if "foreign" in kind else recorded
    candidate = write(root, plan, tensors, fmt, dedup="dedup" in kind)
    return view_of_rank_folders(dir_at(root), candidate, plan.strategy() if "foreign" in kind else None)


# ---- values ----------------------------------------------------------------------------------------------------------

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
        ratio = float(distance) / float(max(abs(x), abs(y))) if math.isfinite(distance) else math.inf
        absolute, relative = max(absolute, distance), max(relative, ratio)
    return count, bits_only, absolute, relative, first


@st.composite
def pairs(draw):
    """Draws two arrays of one dtype and shape: random bits and special values, with some differences."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    both = []
    for _ in range(2):
        bits = random.integers(0, 2 if dtype.name == "bool" else 256, math.prod(shape) * dtype.itemsize, np.uint8)
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
@given(pairs(), st.sampled_from([1, 16, 100, 1 << 20]), st.sampled_from([1, 3, 1 << 16]))
def test_values_against_plain_python(both, tile, portion):
    a, b = both
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PORTION", portion)
        found = compare(uncut(f"{folder}/a.safetensors", {"w": a}), uncut(f"{folder}/b.safetensors", {"w": b}), tile=tile)
    count, bits_only, absolute, relative, first = reference(a, b)
    assert len(found) == (count > 0)
    for it in found:
        assert (it.name, it.kind, it.count, it.bits_only, it.first) == ("w", VALUES, count, bits_only, first)
        assert it.absolute == absolute and type(it.absolute) is (int if a.dtype.kind in "iub" else float)
        assert it.relative == pytest.approx(relative, rel=1e-12)
        assert [np.array(value, a.dtype).tobytes() for value in it.values if value == value] == [
            side[first].tobytes() for side in (a, b) if side[first] == side[first]]


@pytest.mark.parametrize("dtype, a, b, absolute, relative", [
    ("int64", -2**63, 2**63 - 1, 2**64 - 1, 2.0), ("uint64", 0, 2**64 - 1, 2**64 - 1, 1.0),
    ("int64", 2**62, 2**62 + 1, 1, 2**-62), ("int8", -128, 127, 255, 255 / 128),
    ("bool", False, True, 1, 1.0), ("float64", 1.0, 3.0, 2.0, 2 / 3),
    ("bfloat16", 1.0, 1.0078125, 0.0078125, 0.0078125 / 1.0078125), ("float32", math.nan, 0.0, math.inf, math.inf),
    ("float16", math.inf, 1.0, math.inf, math.inf), ("float32", math.inf, -math.inf, math.inf, math.inf),
    ("float32", 0.0, -0.0, 0.0, 0.0)])
def test_extreme_values(tmp_path, dtype, a, b, absolute, relative):
    a, b = (np.array([0, value], DTYPES[dtype]) for value in (a, b))
    (it,) = compare(uncut(tmp_path / "a.safetensors", {"w": a}), uncut(tmp_path / "b.safetensors", {"w": b}))
    assert (it.absolute, it.count, it.first) == (absolute, 1, (1,)) and it.relative == pytest.approx(relative, rel=1e-12)


def test_equal_nan_is_equal_and_another_nan_differs_in_bits_only(tmp_path):
    bits = np.array([0x7fc00000, 0x7fc00001, 0x7f800001, 0], np.uint32)            # quiet, with a payload, signalling
    a, same, other = (uncut(tmp_path / f"{name}.safetensors", {"w": array.view(np.float32)})
                      for name, array in (("a", bits), ("same", bits), ("other", bits ^ np.array([0, 2, 2, 1 << 31], np.uint32))))
    assert compare(a, same) == []
    (it,) = compare(a, other)
    assert (it.count, it.bits_only, it.absolute, it.relative, it.first) == (3, 3, 0.0, 0.0, (1,))
    assert it.within(0) and not it.within(None)


# ---- names, shapes, dtypes -------------------------------------------------------------------------------------------

def test_tensors_without_comparable_values_are_reported(tmp_path):
    w = np.zeros((2, 3), np.float32)
    a = uncut(tmp_path / "a.safetensors", {"gone": w, "shape": w, "dtype": w, "same": w, "value": w})
    b = uncut(tmp_path / "b.safetensors", {"shape": w.T, "dtype": w.astype(np.float16), "same": w, "value": w + 1, "new": w})
    found = {it.name: it for it in compare(a, b)}
    assert {name: it.kind for name, it in found.items()} == {"gone": ONLY_A, "shape": SHAPE, "dtype": DTYPE, "value": VALUES,
                                                             "new": ONLY_B}
    assert found["gone"].b is None and found["new"].a is None and found["shape"].b.shape == (3, 2)
    assert [name for name, it in found.items() if it.within(math.inf)] == ["value"]
    assert [it.name for it in compare(a, b, {"gone", "same", "value"})] == ["gone", "value"]
    assert comparable(a, b) == (2, 48) and comparable(a, b, {"same", "shape"}) == (1, 24)


def test_the_largest_comes_first(tmp_path):
    a = uncut(tmp_path / "a.safetensors", {name: np.zeros(2, np.float32) for name in "abcd"})
    b = uncut(tmp_path / "b.safetensors", dict(a=np.float32([1, 1]), b=np.float32([-7, -7]), c=np.float32([3, 3])))
    assert [it.name for it in by_size(compare(a, b))] == ["d", "b", "c", "a"]


# ---- layouts ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("one, other, tile", [
    (("foreign", "dp2tp2pp2opt2", "ckpt"), ("recorded", "tp4"), 64), (("recorded dedup", "dp2tp2axes10"), ("consolidated", ""),
        200),
    (("foreign dedup", "dp4opt4"), ("recorded", "pp4", "ckpt"), 24), (("consolidated", ""), ("recorded", "tp8"), 1 << 20)])
def test_the_same_tensors_in_other_layouts_and_formats_are_equal(tmp_path, one, other, tile):
    a, b, passed = opened(tmp_path / "a", *one), opened(tmp_path / "b", *other), []
    with leaves_nothing(tmp_path):
        assert compare(a, b, workers=3, tile=tile, traffic=Traffic(progress=passed.append)) == []
    total = sum(array.nbytes for array in (*TENSORS.values(), *COUNTERS.values()))
    assert comparable(a, b) == (len(TENSORS) + len(COUNTERS), total) and sum(passed) == total


@pytest.mark.parametrize("name, rank, byte", [("layers.0.proj.weight", 3, 17), ("layers.2.experts.weight", 6, 0),
                                              ("embedding.weight", 1, 63), ("layers.0.qkv.weight", 2, 100), ("step_num", 0, 0)])
def test_one_flipped_bit_is_found_with_its_index(tmp_path, name, rank, byte):
    plan = Plan.parse("dp2tp2pp2opt2", MODEL)
    b = opened(tmp_path / "b", "recorded", "tp2pp2")
    path = path_of(tmp_path / "a", STEP, rank)
    foreign(tmp_path / "a", plan, TENSORS)
    with open(path, "rb") as file:
        flip_bit(path, read_header(file, str(path)).tensors[name].ranges[0][0] + byte)
    a = view_of_rank_folders(dir_at(tmp_path / "a"), newest(tmp_path / "a"), plan.strategy())
    (it,) = compare(a, b, tile=256)
    array = TENSORS.get(name, COUNTERS.get(name))
    indices = np.arange(array.size).reshape(array.shape)
    held = indices if name in COUNTERS else part_of(indices, plan.layouts(rank)[name], rank % plan.stage_size)
    assert (it.name, it.kind, it.count) == (name, VALUES, 1)
    assert it.first == np.unravel_index(held.reshape(-1)[byte // array.itemsize], array.shape)


MEASURED = """
import sys, tracemalloc
from mindresume.formats.consolidated import read_consolidated
from mindresume.reshard import compare
from mindresume.reshard.checkpoint_view import view_of_consolidated
from mindresume.storage.posix import PosixStorage
compare.PORTION = 4096
a, b = (view_of_consolidated(PosixStorage(), read_consolidated(PosixStorage(), path)) for path in sys.argv[1:])
tracemalloc.start()
(it,) = compare.compare(a, b, workers=1, tile=1 << 16)
print(tracemalloc.get_traced_memory()[1], it.count, it.absolute, it.relative)
"""


def test_memory_is_bounded_whatever_the_tensor(tmp_path):
    """Runs in its own process: threads of other tests may allocate memory at any time."""
    array = np.arange(1 << 21, dtype=np.float32).reshape(2048, 1024)
    paths = [put(tmp_path / "a.safetensors", {"w": array}), put(tmp_path / "b.ckpt", {"w": -array})]
    said = subprocess.run([sys.executable, "-c", MEASURED, *map(str, paths)], cwd=Path(module.__file__).parents[2], check=True,
                          capture_output=True, text=True).stdout
    peak, *found = map(float, said.split())
    assert found == [array.size, 2 * (array.size - 1), 2.0]
    assert peak < 1 << 22, peak                    # of 8 MiB on each side


# ---- trouble ---------------------------------------------------------------------------------------------------------

def test_a_truncated_file_and_a_lost_slice_are_errors(tmp_path):
    a, b = opened(tmp_path / "a", "recorded", "tp2"), opened(tmp_path / "b", "consolidated", "")
    path = path_of(tmp_path / "a", STEP, 1)
    with leaves_nothing(tmp_path):
        assert compare(a, b) == []                  # headers are read by now
        os.truncate(path, path.stat().st_size - 700)
        with pytest.raises(CorruptFileError, match="the file ends at byte"):
            compare(a, b)
        candidate = newest(tmp_path / "a")
        lose(tmp_path / "a", candidate, [1])
        with pytest.raises(LoadError, match="is nowhere"):
            compare(view_of_rank_folders(dir_at(tmp_path / "a"), candidate), b)
