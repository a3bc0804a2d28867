"""``mindresume merge``: consolidated weights of both kinds, its output, and its refusals."""

import json
import os

import pytest
from rank_folders import tensors_at
from reshard.plans import (
    COUNTERS,
    MODEL,
    Plan,
    complete,
    foreign,
    put,
    random_tensors,
    recorded,
)

CONVERSION = "conversion.json"
# without the empty one
SOLID = {name: spec for name, spec in MODEL.items() if name != "layers.1.none"}
TENSORS = random_tensors(SOLID)
EVERYTHING = {**TENSORS, **COUNTERS}
PLAN = Plan.parse("dp2tp2pp2opt2", SOLID)


COMMAND = "merge"


@pytest.fixture
def source(tmp_path):
    recorded(tmp_path / "run" / "checkpoint", PLAN, TENSORS)
    return tmp_path / "run" / "checkpoint"


def bits(tensors):
    # by name: MindSpore, where it was imported, brings a bfloat16 of its own
    return {
        name: (array.dtype.name, array.shape, array.tobytes()) for name, array in tensors.items()
    }


# ---- results and output --------------------------------------------------------------------------


def test_weights_of_hugging_face(source, tmp_path, call):
    library = pytest.importorskip("safetensors.numpy")
    new, drop = tmp_path / "new", ("--drop", "adam_*", "--drop", "accu_*")
    status, out, err = call(source, new, "--hf-index", "--part-size", "3kB", *drop)
    assert (status, err) == (0, "") and f"{source}, step 15, 8 ranks\n  -> {new}" in out
    wanted = {
        name: array for name, array in TENSORS.items() if not name.startswith(("adam_", "accu_"))
    }
    index = json.loads((new / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in wanted.values())
    assert len(files) > 1 and files == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert {*os.listdir(new)} == {CONVERSION, *files, "model.safetensors.index.json"}
    found = {}
    for file in files:
        held = library.load_file(new / file)
        assert {index["weight_map"][name] for name in held} == {file}
        found |= held
    assert bits(found) == bits(wanted)


def test_merge_writes_one_file_for_hugging_face(source, tmp_path, call):
    assert call(source, tmp_path / "new", "--hf-index", "--drop", "a*.*")[0] == 0
    assert "model.safetensors" in os.listdir(tmp_path / "new")


def test_consolidated_weights_in_other_parts(tmp_path, call):
    complete(tmp_path / "a", TENSORS)
    assert call(tmp_path / "a", tmp_path / "b", "--part-size", "500")[0] == 0
    assert bits(tensors_at(tmp_path / "b")) == bits(EVERYTHING)
    put(tmp_path / "one" / "net.ckpt", EVERYTHING)
    foreign(tmp_path / "two", Plan.parse("dp1", SOLID), TENSORS)
    for src in ("one/net.ckpt", "two"):
        assert call(tmp_path / src, tmp_path / f"new {src[:3]}", "--engine", "direct")[0] == 0
        assert bits(tensors_at(tmp_path / f"new {src[:3]}")) == bits(EVERYTHING)
