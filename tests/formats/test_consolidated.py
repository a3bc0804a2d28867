"""Folders of consolidated weights: reading, refusals, and names and contents of new ones."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_folders import STORAGE, counters, path_of, save, tensors_of, write_foreign

from mindresume.errors import ConfigError, CorruptFileError
from mindresume.formats.consolidated import (
    FILES,
    HUGGINGFACE,
    HYPER,
    MAP,
    MINDSPORE,
    index_document,
    is_hyper,
    part_name,
    read_consolidated,
    split,
)
from mindresume.formats.scan import CONSOLIDATED, ROOT, kind_of
from mindresume.tensor_files import encode

FIXTURE = Path(__file__).parents[2] / "st" / "fixtures" / "mf190_unified_from_dp2tp2"
STEP = 15
SCALARS = {
    "epoch_num": 2,
    "step_num": STEP,
    "global_step": STEP,
    "global_batch_size": 8,
    "loss_scale": 1.0,
}
WEIGHTS = {name: array for name, array in tensors_of(0, STEP).items() if name not in SCALARS}
SIZES = {name: array.nbytes for name, array in WEIGHTS.items()}
EMBEDDING, ADAM, BIAS = WEIGHTS  # 128, 128 and 20 bytes
HF_INDEX = "model.safetensors.index.json"
HF_FIRST = "model-00001-of-00002.safetensors"


def put(path, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(bytes(piece) for _, piece in encode(path.suffix[1:], tensors, {})))


def write(folder, kind, part_bytes=150, hyper=True):
    """Writes WEIGHTS in two parts with their index, and the counters as MindSpore has them."""
    parts = split(SIZES, part_bytes)
    weight_map = {}
    for index, names in enumerate(parts):
        file = part_name(index, len(parts), kind)
        put(folder / file, {name: WEIGHTS[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    name, document = index_document(kind, weight_map, sum(SIZES.values()))
    (folder / name).write_text(json.dumps(document, indent=4))
    if hyper:
        put(folder / HYPER, {**counters(STEP), "lm_loss": np.ones(1, np.float32)})
    return folder


def read(path):
    return read_consolidated(STORAGE, str(path))


def complete(path):
    return kind_of(STORAGE, str(path)) in CONSOLIDATED


def edit(path, change):
    document = json.loads(path.read_text())
    change(document["weight_map"])
    path.write_text(json.dumps(document))


def refused(path, error=CorruptFileError, file=None, tensor=None, says=None):
    """Checks that the folder is refused, naming file and tensor, and is not changed."""
    before = sorted(os.listdir(path)) if path.is_dir() else None
    with pytest.raises(error, match=says) as caught:
        read(path)
    if file:
        assert caught.value.path == str(path / file)
    assert getattr(caught.value, "tensor", None) == tensor
    assert before is None or sorted(os.listdir(path)) == before


@pytest.fixture()
def unified(tmp_path):
    return write(tmp_path / "unified", MINDSPORE)


@pytest.fixture()
def hub(tmp_path):
    return write(tmp_path / "hub", HUGGINGFACE, hyper=False)


# ---- accepted folders ----------------------------------------------------------------------------


def test_counters_beside_an_index_of_huggingface_are_read(tmp_path):
    assert read(write(tmp_path, HUGGINGFACE)).scalars == SCALARS


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_without_an_index_all_files_count(tmp_path, fmt):
    put(tmp_path / f"a.{fmt}", {EMBEDDING: WEIGHTS[EMBEDDING]})
    put(tmp_path / f"b.{fmt}", counters(STEP))
    put(tmp_path / f".c.{fmt}", {EMBEDDING: WEIGHTS[EMBEDDING]})  # half-written
    (tmp_path / "config.json").write_text("{}")
    found = read(tmp_path)
    assert complete(tmp_path) and (found.kind, found.files, found.notes) == (
        FILES,
        (f"a.{fmt}", f"b.{fmt}"),
        (),
    )
    assert found.scalars == SCALARS and found.tensors[EMBEDDING] == f"a.{fmt}"


def test_a_map_without_weight_map_is_read_as_mindspore_reads_it(unified):
    before = read(unified)
    (unified / MAP).write_text(json.dumps(json.loads((unified / MAP).read_text())["weight_map"]))
    assert read(unified) == before


def test_files_missing_from_the_index_are_ignored_with_a_note(unified):
    put(unified / "consolidated.safetensors", WEIGHTS)
    put(unified / "old.ckpt", WEIGHTS)
    (unified / "broken.safetensors").write_bytes(b"")
    found = read(unified)
    assert found.files == ("part0.safetensors", "part1.safetensors", HYPER)
    assert (
        len(found.notes) == 1
        and "broken.safetensors and 2 more not named by param_name_map.json" in found.notes[0]
    )


def test_tensors_missing_from_the_index_are_ignored_with_a_note(unified):
    edit(unified / MAP, lambda table: table.pop(BIAS))
    found = read(unified)
    assert BIAS not in found.tensors and list(found.tensors)[:2] == [EMBEDDING, ADAM]
    assert len(found.notes) == 1 and f"{BIAS} not named" in found.notes[0]


def test_a_counter_that_the_index_leaves_out_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    put(path, {"w": np.zeros(4), "global_step": np.array([7]), "loss_scale": np.zeros(2)})
    index = {"weight_map": {"w": path.name, "global_step": path.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read(tmp_path)
    assert found.scalars == {"global_step": 7} and "loss_scale not named" in found.notes[0]


def test_partial_gradient_buffers_are_noted(unified):
    put(unified / HYPER, {**counters(STEP), "accu_grads.a": np.zeros(4, np.float32)})
    found = read(unified)
    assert (
        found.tensors["accu_grads.a"] == HYPER
        and len(found.notes) == 1
        and "does not merge" in found.notes[0]
    )


def test_written_by_mindformers():
    """Reads only the output of mindformers 1.9.0; every tensor and value is known from its
    source."""
    expected = json.loads((FIXTURE / "expected.json").read_text())
    found = read(FIXTURE / "unified_checkpoint")
    assert (
        found.kind == MINDSPORE
        and found.files == ("part0.safetensors", HYPER)
        and found.notes == ()
    )
    assert {name: row["file"] for name, row in expected["tensors"].items()} == found.tensors
    assert found.scalars == {
        **SCALARS,
        "step_num": expected["step"],
        "global_step": expected["step"],
    }
    entries = {name: found.headers[file].tensors[name] for name, file in found.tensors.items()}
    for name, row in expected["tensors"].items():
        assert (entries[name].dtype, list(entries[name].shape)) == (
            row["dtype"],
            row["global_shape"],
        )
        elements = int(np.prod(row["global_shape"], dtype=int))
        # of a job, and of one process, which has no strategy
        for layout_known in (row["file"] != HYPER, True):
            assert is_hyper(name, layout_known, elements) == (row["file"] == HYPER), name
    document = json.loads((FIXTURE / "unified_checkpoint" / MAP).read_text())
    size = sum(entry.nbytes for name, entry in entries.items() if found.tensors[name] != HYPER)
    weight_map = {name: file for name, file in found.tensors.items() if file != HYPER}
    assert index_document(MINDSPORE, weight_map, size) == (MAP, document)


# ---- refused folders -----------------------------------------------------------------------------


def test_folders_of_ranks_are_not_complete(tmp_path):
    save(tmp_path / "ours", 5, world=2)
    write_foreign(tmp_path / "theirs", 5, world=2)
    put(tmp_path / "theirs" / "model.safetensors", WEIGHTS)
    shutil.copytree(tmp_path / "ours" / ".mindresume", tmp_path / "records" / ".mindresume")
    put(tmp_path / "records" / "model.safetensors", WEIGHTS)
    for path in (tmp_path / "ours", tmp_path / "theirs", tmp_path / "records"):
        assert kind_of(STORAGE, str(path)) == ROOT and not complete(path)
        refused(path, ConfigError, says="files of ranks")


def test_files_in_a_rank_folder_are_not_complete(tmp_path, monkeypatch):
    write_foreign(tmp_path, 5, world=1)
    path = path_of(tmp_path, 5, 0)
    assert not complete(path) and not complete(path.parent) and not complete(f"{path.parent}/")
    refused(path, ConfigError, says="files of ranks")
    monkeypatch.chdir(path.parent)
    assert not complete(path.name) and not complete(".")


def test_a_missing_or_empty_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for path, says in (
        (tmp_path, "no file with extension"),
        (tmp_path / "absent", "no such"),
        (tmp_path / "notes.txt", "extension"),
        (tmp_path / "model.safetensors", "no such"),
    ):
        assert not complete(path)
        refused(path, ConfigError, says=says)
    put(tmp_path / "model.safetensors", {})
    refused(tmp_path, ConfigError, says="no tensor")


def test_two_formats(tmp_path):
    put(tmp_path / "a.ckpt", {EMBEDDING: WEIGHTS[EMBEDDING]})
    put(tmp_path / "b.safetensors", {BIAS: WEIGHTS[BIAS]})
    refused(tmp_path, ConfigError, says="a.ckpt and b.safetensors")


@pytest.mark.parametrize("kind, part", [(MINDSPORE, "part0.safetensors"), (HUGGINGFACE, HF_FIRST)])
def test_a_missing_file(tmp_path, kind, part):
    write(tmp_path, kind)
    (tmp_path / part).unlink()
    refused(
        tmp_path,
        file=part,
        tensor=EMBEDDING,
        says="missing.*index.json|missing.*param_name_map.json",
    )


def test_a_truncated_file(unified):
    part = unified / "part1.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    refused(unified, file=part.name, says="truncated")


def test_a_counter_that_is_no_single_number(unified):
    put(unified / HYPER, {**counters(STEP), "step_num": np.array([STEP, STEP])})
    refused(unified, file=HYPER, tensor="step_num", says="one number")


def test_a_folder_in_the_place_of_a_file(unified):
    (unified / "part1.safetensors").unlink()
    (unified / "part1.safetensors").mkdir()
    refused(unified, file="part1.safetensors", says="cannot be read")


def test_a_tensor_that_its_file_lacks(unified):
    edit(unified / MAP, lambda table: table.update(absent="part1.safetensors"))
    refused(
        unified, file="part1.safetensors", tensor="absent", says="no file of the index holds it"
    )
    edit(
        unified / MAP,
        lambda table: (table.pop("absent"), table.update({BIAS: "part0.safetensors"})),
    )
    refused(unified, file="part0.safetensors", tensor=BIAS, says="it is in part1.safetensors")


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("second", ["part1.safetensors", HYPER])
def test_a_tensor_in_two_files(unified, second, indexed):
    put(
        unified / second,
        {EMBEDDING: WEIGHTS[EMBEDDING], BIAS if second != HYPER else "more": WEIGHTS[BIAS]},
    )
    put(
        unified / "part1.safetensors",
        {
            ADAM: WEIGHTS[ADAM],
            BIAS: WEIGHTS[BIAS],
            **({} if second == HYPER else {EMBEDDING: WEIGHTS[EMBEDDING]}),
        },
    )
    if not indexed:
        (unified / MAP).unlink()
    refused(unified, tensor=EMBEDDING, says="is in .* too")


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "not JSON"),
        ("[]", "JSON object"),
        ('{"weight_map": null}', "weight_map"),
        ('{"weight_map": {"w": "part0.safetensors", "w": "part1.safetensors"}}', "twice"),
    ],
)
@pytest.mark.parametrize("kind", [MINDSPORE, HUGGINGFACE])
def test_a_damaged_index(tmp_path, kind, text, says):
    name = index_document(kind, {}, 0)[0]
    (write(tmp_path, kind) / name).write_text(text)
    refused(tmp_path, file=name, says=says)


@pytest.mark.parametrize(
    "file",
    [
        7,
        "",
        "../part0.safetensors",
        "/part0.safetensors",
        "a/part0.safetensors",
        "..safetensors",
        "part0.bin",
        "a\0.safetensors",
    ],
)
@pytest.mark.parametrize("kind", [MINDSPORE, HUGGINGFACE])
def test_an_index_that_leaves_the_folder_or_names_no_tensor_file(tmp_path, kind, file):
    name = index_document(kind, {}, 0)[0]
    edit(write(tmp_path, kind) / name, lambda table: table.update({EMBEDDING: file}))
    refused(tmp_path, file=name, tensor=EMBEDDING, says="file of this folder")


def test_an_index_of_huggingface_has_a_weight_map(hub):
    (hub / HF_INDEX).write_text(json.dumps(json.loads((hub / HF_INDEX).read_text())["weight_map"]))
    refused(hub, file=HF_INDEX, says="weight_map")


def test_an_index_larger_than_any(hub):
    with open(hub / HF_INDEX, "r+b") as file:
        file.truncate(1 << 40)  # sparse
    refused(hub, file=HF_INDEX, says="at most")


# ---- two indexes ---------------------------------------------------------------------------------


def test_two_indexes_of_huggingface(hub):
    shutil.copy(hub / HF_INDEX, hub / "model.fp16.safetensors.index.json")
    refused(
        hub, ConfigError, says="model.fp16.safetensors.index.json and model.safetensors.index.json"
    )


def test_two_equal_indexes_are_accepted(hub):
    shutil.copy(hub / HF_INDEX, hub / MAP)
    found = read(hub)
    assert (found.kind, list(found.tensors), found.notes) == (MINDSPORE, list(WEIGHTS), ())


@pytest.mark.parametrize("flat", [True, False])
def test_two_different_indexes_are_an_error(hub, flat):
    table = dict(json.loads((hub / HF_INDEX).read_text())["weight_map"])
    table[BIAS] = HF_FIRST
    (hub / MAP).write_text(json.dumps(table if flat else {"weight_map": table}))
    refused(hub, file=MAP, tensor=BIAS, says=HF_INDEX)


def test_two_indexes_of_different_tensors(hub):
    table = dict(json.loads((hub / HF_INDEX).read_text())["weight_map"])
    del table[BIAS]
    (hub / MAP).write_text(json.dumps({"weight_map": table}))
    refused(hub, file=MAP, tensor=BIAS, says="same tensors")
    # flat, but not of all the files
    (hub / MAP).write_text(json.dumps({"other": HF_FIRST}))
    refused(hub, file=MAP, tensor="other", says="same tensors")


def test_names_that_mindformers_translated_are_ignored_with_a_note(hub):
    table = {
        f"model.{name}": file
        for name, file in json.loads((hub / HF_INDEX).read_text())["weight_map"].items()
    }
    (hub / MAP).write_text(json.dumps(table, indent=2))
    found = read(hub)
    assert (found.kind, list(found.tensors)) == (HUGGINGFACE, list(WEIGHTS))
    assert len(found.notes) == 1 and "translated" in found.notes[0]


# ---- writing -------------------------------------------------------------------------------------

SIZE_MAPS = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 50))


@given(SIZE_MAPS, st.integers(1, 60))
def test_split(sizes, limit):
    parts = split(sizes, limit)
    assert [name for part in parts for name in part] == list(sizes) and all(parts)
    for part in parts:
        assert sum(sizes[name] for name in part) <= limit or len(part) == 1
    # a part ends only where the next one did not fit
    for part, following in zip(parts, parts[1:], strict=False):
        assert sum(sizes[name] for name in (*part, following[0])) > limit


@pytest.mark.parametrize("part_bytes", [0, -1])
def test_split_into_nothing(part_bytes):
    with pytest.raises(ValueError, match="part_bytes"):
        split({"a": 1}, part_bytes)


@pytest.mark.parametrize(
    "name, layout_known, elements, expected",
    [
        ("buffer", False, 32, True),
        ("lm_loss", False, 1, True),
        ("global_step", True, 1, True),
        ("step_num", True, 2, True),
        ("accu_grads.embedding.weight", True, 32, False),
    ],
)
def test_hyper_parameters(name, layout_known, elements, expected):
    assert is_hyper(name, layout_known, elements) is expected
