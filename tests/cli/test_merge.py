"""``mindresume merge``: consolidated weights of both kinds, its output, and its refusals."""

import json
import os

import pytest
from rank_folders import folder_contents, tensors_at, tensors_in
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

CONVERSION, HYPER, MAP = "conversion.json", "hyper_param.safetensors", "param_name_map.json"
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


@pytest.mark.parametrize("part", ["1KB", "3GiB", "2500"])
def test_weights_of_mindspore(source, tmp_path, read, part):
    before = folder_contents(source)
    status, found = read(source, tmp_path / "new", "--part-size", part)
    assert status == 0 and folder_contents(source) == before
    assert bits(tensors_at(tmp_path / "new")) == bits(EVERYTHING)
    holds = {path.name: tensors_in(path) for path in (tmp_path / "new").glob("*.safetensors")}
    parts = [f"part{number}.safetensors" for number in range(len(holds) - 1)]
    assert sorted(os.listdir(tmp_path / "new")) == sorted([CONVERSION, HYPER, MAP, *parts])
    assert (len(parts) == 1) is (part == "3GiB")
    index = json.loads((tmp_path / "new" / MAP).read_text())
    assert index["weight_map"] == {
        name: file for file, held in holds.items() for name in held if file != HYPER
    }
    assert set(index["weight_map"]) == set(TENSORS)
    total = sum(array.nbytes for array in EVERYTHING.values())
    seconds = found.pop("seconds")
    assert found == {
        "source": f"{source}, step 15, 8 ranks",
        "target": str(tmp_path / "new"),
        "engine": "direct",
        "files": len(parts) + 1,
        "tensors": len(EVERYTHING),
        "dtypes": found["dtypes"],
        "model_type": None,
        "bytes_needed": total,
        "bytes_to_read": total,
        "bytes_to_write": total,
        "over_read": 1.0,
        "memory_bytes": found["memory_bytes"],
        "dry_run": False,
        "finished": True,
        "bytes_read": total,
        "bytes_written": total,
        "bytes_verified": total,
        "notes": [],
        "refused": [],
    }
    assert 0 <= seconds < 60


def test_weights_of_hugging_face(source, tmp_path, call):
    library = pytest.importorskip("safetensors.numpy")
    status, out, err = call(
        source,
        tmp_path / "new",
        "--hf-index",
        "--part-size",
        "3kB",
        "--drop",
        "adam_*",
        "--drop",
        "accu_*",
    )
    assert (status, err) == (0, "") and f"{source}, step 15, 8 ranks\n  -> {tmp_path}/new" in out
    wanted = {
        name: array for name, array in TENSORS.items() if not name.startswith(("adam_", "accu_"))
    }
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert set(index["weight_map"]) == set(wanted) and len(files) > 1
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in wanted.values())
    assert files == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert sorted(os.listdir(tmp_path / "new")) == sorted(
        [CONVERSION, *files, "model.safetensors.index.json"]
    )
    for file in files:
        found = library.load_file(tmp_path / "new" / file)
        assert bits(found) == bits(
            {name: wanted[name] for name, at in index["weight_map"].items() if at == file}
        )


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


def test_weights_only(tmp_path, call):
    foreign(tmp_path / "checkpoint", PLAN, TENSORS, extra={})
    PLAN.write(tmp_path / "strategy")
    status, out, err = call(tmp_path / "checkpoint", tmp_path / "new")
    assert (
        (status, err) == (0, "")
        and "weights only" in out
        and not (tmp_path / "new" / HYPER).exists()
    )
    assert bits(tensors_at(tmp_path / "new")) == bits(TENSORS)


# ---- refusals ------------------------------------------------------------------------------------


def test_other_sources(tmp_path, refused):
    assert "missing does not exist" in refused(tmp_path / "missing")
    foreign(tmp_path / "checkpoint", Plan.parse("tp2", SOLID), TENSORS)
    assert "have no layout" in refused(tmp_path / "checkpoint")
    complete(tmp_path / "consolidated", TENSORS)
    PLAN.write(tmp_path / "strategy")
    assert "holds consolidated weights, which have no layout" in refused(
        tmp_path / "consolidated", "--from", tmp_path / "strategy"
    )
    os.remove(tmp_path / "consolidated" / "part0.safetensors")
    assert f"part0.safetensors: the file is missing; {MAP} says that it holds tensor " in refused(
        tmp_path / "consolidated"
    )
