"""``mindresume merge``: consolidated weights of both kinds, its output, and its refusals."""

import json
import os

import pytest
from rank_folders import RECORDS, flip_bit, folder_contents, start_of, tensors_at, tensors_in
from reshard.plans import (
    COUNTERS,
    MODEL,
    STEP,
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


def test_a_dry_run_writes_nothing_and_again_does_nothing(source, tmp_path, call, read):
    before = folder_contents(tmp_path)
    status, found = read(source, tmp_path / "new", "--dry-run")
    assert status == 0 and found["dry_run"] and not found["finished"] and found["files"] == 2
    assert folder_contents(tmp_path) == before
    assert call(source, tmp_path / "new")[0] == 0

    # the source is held for a moment
    def times():
        return {
            path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != RECORDS
        }

    before = times()
    status, found = read(source, tmp_path / "new")
    assert status == 0 and found["finished"] and found["seconds"] is None
    assert times() == before


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["0", "much", "-1", "3 apples", "1KiBs", ""])
def test_bad_sizes_of_parts(source, refused, size):
    assert f"--part-size is {size!r}; expected a size such as 512MiB or 4GiB" in refused(
        source, f"--part-size={size}"
    )


def test_less_than_a_byte(source, refused):
    assert "--part-size is '0.5'" in refused(source, "--part-size=0.5")


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


def test_a_flipped_bit_in_merged_weights_is_found_when_they_are_read_again(source, tmp_path, call):
    assert call(source, tmp_path / "merged")[0] == 0
    path = next((tmp_path / "merged").glob("part0.safetensors"))
    flip_bit(path)
    status, _, err = call(tmp_path / "merged", tmp_path / "new", "--to", "dp=2", command="convert")
    assert (
        status == 2
        and f"{path}: " in err
        and "is not what was written: checksum" in err
        and not (tmp_path / "new").exists()
    )
    (tmp_path / "merged" / CONVERSION).unlink()  # whoever changed it on purpose
    assert call(tmp_path / "merged", tmp_path / "new", "--to", "dp=2", command="convert")[0] == 0


# ---- and then ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, step",
    [([], STEP), (["--hf-index", "--drop", "adam_*", "--drop", "accu_grads.*"], None)],
)
def test_merged_weights_are_listed_verified_and_selected(source, tmp_path, call, options, step):
    folder = tmp_path / "merged"
    assert call(source, folder, *options)[0] == 0

    def ask(command):
        status, out, _ = call(folder, "--json", command=command)
        return status, json.loads(out)

    status, found = ask("ls")
    (row,) = found["checkpoints"]
    assert (status, row["step"], row["origin"], row["usable"]) == (0, step, "merged", True)
    assert sorted(row["files"]) == sorted(map(str, folder.glob("*.safetensors")))
    status, found = ask("verify")
    assert (status, found["damaged"], found["checkpoints"][0]["state"]) == (0, False, "verified")
    assert found["bytes_read"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    status, found = ask("which")
    assert (status, found["chosen"] and found["chosen"]["step"]) == (
        (0, step) if step else (3, None)
    )
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    name = next(name for name, array in tensors_in(path).items() if array.nbytes)
    flip_bit(path, start_of(path, name))
    status, found = ask("verify")
    (problem,) = found["checkpoints"][0]["problems"]
    assert (status, found["damaged"], problem["file"]) == (
        1,
        True,
        str(path),
    ) and f"damaged: {name} " in problem["reason"]
    assert ask("which")[0] == 3
    for command in ("ls", "verify", "which"):
        assert "without records" not in call(folder, command=command)[1]
    assert all(name in call(folder, command=command)[1] for command in ("verify", "which"))
