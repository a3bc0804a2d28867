"""Checkpoint 2.0 folders between mindformers 1.8.0 and 1.9.0: what each writes, what each reads,
and what a folder must be so that both read it.

The readers and writers are the built-in ones, see st/versions.py; expect_readable is also what
holds for our own folders. Tests beginning with ``test_the_built_in`` state what mindformers does,
so that a version that does otherwise is noticed.
"""

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies

from mindresume.formats.strategy import Strategy
from mindresume.model.layout import TensorLayout, held
from mindresume.reshard.geometry import whole
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.region_load import read_regions
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import encode, read_header, read_tensor
from st.builtin_versions import (
    VERSIONS,
    builtin,
    device_axes,
    differences,
    expect_readable,
    fixture,
    is_optimizer,
    parts,
    python_of,
)
from st.training_run import ROOT

FIXTURES = {"mf190_20_dp2tp2opt": "1.9.0", "mf190_20_single": "1.9.0", "mf180_20_tp2": "1.8.0"}
STEP = 15


def some_tensors() -> dict[str, np.ndarray]:
    """A small network, its moments, and a counter."""
    draw = np.random.default_rng(1)
    shapes = {
        "rows.weight": (16, 8),
        "columns.weight": (8, 16),
        "both.weight": (8, 8),
        "norm.weight": (16,),
    }
    tensors = {
        prefix + name: draw.standard_normal(shape).astype(np.float32)
        for prefix in ("", "adam_m.", "adam_v.")
        for name, shape in shapes.items()
    }
    return {**tensors, "global_step": np.array([STEP], np.int32)}


TENSORS = some_tensors()


def job(matrix: tuple[int, ...], shards: int = 0, **cuts: tuple) -> dict[str, TensorLayout]:
    """Layouts of TENSORS: ``cuts`` by the first part of the name, which hold for the moments
    too."""
    return {
        name: TensorLayout(
            matrix,
            cuts[name.removeprefix("adam_m.").removeprefix("adam_v.").partition(".")[0]],
            shards,
        )
        for name in TENSORS
        if name != "global_step"
    }


def two_stages() -> Strategy:
    layouts = job((1, 2), rows=(0, -1), columns=(-1, 0), both=(0, -1), norm=(-1,))
    last = {name for name in layouts if "columns" in name or "norm" in name}
    return Strategy(
        tuple(
            {name: layout for name, layout in layouts.items() if (name in last) is stage}
            for stage in (False, True)
        )
    )


JOBS: dict[str, Any] = {
    "one": None,
    "dp2tp2": job((2, 2), rows=(0, -1), columns=(-1, 0), both=(-1, 0), norm=(-1,)),
    "dp2tp2opt": job((2, 2), -1, rows=(0, -1), columns=(-1, 0), both=(-1, 0), norm=(-1,)),
    "dp4shards2": job((4,), 2, rows=(-1, -1), columns=(-1, -1), both=(-1, -1), norm=(-1,)),
    "tp2x2": job((2, 2), rows=((1, 0), -1), columns=((0, 1), -1), both=(1, 0), norm=(0,)),
    "pp2tp2": two_stages(),
}
# every job is also read by the one before it
OTHER = dict(zip(JOBS, [*list(JOBS)[1:], "one"], strict=True))


@pytest.fixture(scope="module", autouse=True)
def both() -> None:
    """Both processes import mindformers at the same time."""
    for each in VERSIONS:
        builtin(each)


@pytest.fixture(params=VERSIONS)
def version(request) -> str:
    return request.param


@pytest.fixture(params=VERSIONS)
def writer(request) -> str:
    return request.param


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrites a JSON file with what ``change`` returns, or did to it."""
    value = json.loads(path.read_text(encoding="utf-8"))
    result = change(value)
    path.write_text(json.dumps(value if result is None else result), encoding="utf-8")


def without_status(common: dict[str, Any]) -> None:
    common.pop("ckpt_status", None)


def copied(root: Path, to: Path) -> Path:
    """A copy that may be changed (mindformers makes files 0400), with a common.json that 1.8.0
    reads."""
    shutil.copytree(root, to)
    for path in [to, *to.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    for path in to.rglob("common.json"):
        edited(path, without_status)
    return to


def tensors_in(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        return {
            name: read_tensor(file, entry)
            for name, entry in read_header(file, str(path)).tensors.items()
        }


def put(path: Path, tensors: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        file.writelines(piece for _, piece in encode("safetensors", tensors, {}))


# ---- the other environment -----------------------------------------------------------------------


def test_the_other_python_is_made_once():
    python = python_of("1.8.0")
    again = subprocess.run(
        [ROOT / "scripts" / "release_env.sh", "1.8.0"], capture_output=True, text=True, check=True
    )
    assert Path(again.stdout.strip()) == python and "making" not in again.stderr
    said = subprocess.run(
        [
            python,
            "-c",
            "import importlib.metadata as m, importlib.util as u; print(m.version('mindformers'), "
            "m.version('mindspore'), bool(u.find_spec('mindresume')))",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert said.stdout.split() == ["1.8.0", "2.7.2", "True"]


def test_an_unknown_version_is_refused():
    said = subprocess.run(
        [ROOT / "scripts" / "release_env.sh", "1.7.0"], capture_output=True, text=True
    )
    assert said.returncode == 2 and "1.8.0" in said.stderr


@given(strategies.data())
def test_device_axes_describe_the_same_slices_without_optimizer_shards(data):
    """``device_axes``, with which all layouts here are handed over."""
    matrix = tuple(
        data.draw(strategies.lists(strategies.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    )
    axes = data.draw(strategies.permutations([*range(len(matrix)), -1, -1]))[:2]
    layout = TensorLayout(matrix, tuple(axes))
    shards = data.draw(
        strategies.sampled_from(
            [n for n in range(1, layout.replicas + 1) if layout.replicas % n == 0]
        )
    )
    layout, shape = (
        TensorLayout(matrix, tuple(axes), shards),
        (math.prod(matrix), math.prod(matrix)),
    )
    try:
        plain = TensorLayout(
            *(
                tuple(tuple(m) if isinstance(m, list) else m for m in part)
                for part in device_axes(layout)
            )
        )
    except ValueError:
        assert shards not in (1, layout.replicas)
        return
    assert plain.optimizer_shards == 0 and plain.stage_size == layout.stage_size
    for rank in range(layout.stage_size):
        assert held(plain, rank, shape) == held(layout, rank, shape)


# ---- folders of real trainings -------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXTURES)
def test_the_built_in_reads_what_a_training_wrote(name, version, tmp_path):
    """Reads every fixture in its own layout and in another one: this proves the readers here, for
    both versions."""
    tensors, _ = fixture(name)
    root = copied(
        ROOT / "st" / "fixtures" / name / "output" / "checkpoint", tmp_path / "checkpoint"
    )
    for other in (name, "mf180_20_tp2" if name == "mf190_20_dp2tp2opt" else "mf190_20_dp2tp2opt"):
        answer = expect_readable(root, tensors, fixture(other)[1], version)
        assert (
            answer["folder"] == str(root / "iteration_00000015")
            and answer["common"]["step_num"] == STEP
        )
        assert answer["mindformers"] == version


@pytest.mark.parametrize(
    "name", [name for name, written_by in FIXTURES.items() if written_by == "1.9.0"]
)
def test_the_built_in_of_180_does_not_resume_from_190(name):
    """1.9.0 always writes ckpt_status, and an unknown key of common.json ends the resume of
    1.8.0."""
    root = ROOT / "st" / "fixtures" / name / "output" / "checkpoint"
    tensors, strategy = fixture(name)
    assert (
        "unexpected keyword argument 'ckpt_status'"
        in builtin("1.8.0").read(root, tensors, strategy)["common"]
    )
    with pytest.raises(AssertionError, match="ckpt_status"):
        expect_readable(root, tensors, strategy, "1.8.0")
    expect_readable(root, tensors, strategy, "1.9.0")


# ---- written by one, read by the other -----------------------------------------------------------


@pytest.mark.parametrize("remove_redundancy", [False, True], ids=["all", "nodup"])
@pytest.mark.parametrize("name", JOBS)
def test_each_version_reads_what_the_other_writes(name, writer, remove_redundancy, tmp_path):
    """In its own layout and in another. Except what 1.8.0 wrote without replicas, see below."""
    builtin(writer).write(
        tmp_path / "written",
        TENSORS,
        JOBS[name],
        iteration=STEP,
        remove_redundancy=remove_redundancy,
    )
    root = copied(tmp_path / "written", tmp_path / "copy")
    readers = VERSIONS if writer == "1.9.0" or not remove_redundancy or name == "one" else ["1.8.0"]
    for reader in readers:
        for other in (name, OTHER[name]):
            expect_readable(root, TENSORS, JOBS[other], reader)


@pytest.mark.parametrize("remove_redundancy", [False, True], ids=["all", "nodup"])
@pytest.mark.parametrize("name", JOBS)
def test_we_read_what_either_wrote(name, writer, remove_redundancy, tmp_path):
    """Compares global tensors. The counter that is in none of its files comes from common.json."""
    builtin(writer).write(
        tmp_path, TENSORS, JOBS[name], iteration=STEP, remove_redundancy=remove_redundancy
    )
    source = open_checkpoint(PosixStorage(), str(tmp_path), None, None)
    found = read_regions(
        source.weights,
        {name: whole(tensor.shape) for name, tensor in source.weights.tensors.items()},
    )
    missing = {"global_step"} if remove_redundancy and name != "one" else set()
    assert set(TENSORS) - set(found) == missing
    assert [name for name in found if found[name].tobytes() != TENSORS[name].tobytes()] == []


def test_the_built_in_of_190_cannot_read_what_180_wrote_without_replicas(tmp_path):
    """1.9.0 needs the lowest rank of a slice, or the file that has it in rank_group; 1.8.0 writes
    no rank_group."""
    folder = builtin("1.8.0").write(
        tmp_path, TENSORS, JOBS["dp2tp2"], iteration=STEP, remove_redundancy=True
    )
    found = differences(
        builtin("1.9.0").read(folder, TENSORS, JOBS["dp2tp2"]), TENSORS, JOBS["dp2tp2"]
    )
    assert len(found) == 1 and "Cannot find storage file" in found[0]


@pytest.mark.parametrize("name", JOBS)
def test_the_built_in_puts_all_of_the_optimizer_in_the_opt_file(name, writer, tmp_path):
    """Also the counter, which has no layout and is in no metadata.json; one process writes no
    metadata.json."""
    folder, layouts = (
        builtin(writer).write(tmp_path, TENSORS, JOBS[name], iteration=STEP),
        JOBS[name],
    )
    ranks = {"one": 1}.get(name, 4)
    for rank in range(ranks):
        expected = parts(TENSORS, layouts, rank)
        for kind, optimizer in (("model", False), ("opt", True)):
            found = tensors_in(folder / f"qwen3-{kind}-{rank:07d}-{ranks:07d}.safetensors")
            assert set(found) == {
                name for name in expected if is_optimizer(name, TENSORS) is optimizer
            }
            for tensor, array in found.items():
                np.testing.assert_array_equal(array, expected[tensor])
    assert len(list(folder.glob("*.safetensors"))) == 2 * ranks
    if ranks == 1:
        assert not (folder / "metadata.json").exists()
        return
    metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    assert set(metadata["state_dict_metadata"]) == set(TENSORS) - {"global_step"}
    entries = [entry for entries in metadata["storage_data"].values() for entry in entries]
    keys = ("file_name", "storage_rank", "rank_group")
    assert {tuple(entry) for entry in entries} == {keys if writer == "1.9.0" else keys[:2]}


def test_the_built_in_writes_no_counter_without_replicas(writer, tmp_path):
    """With remove_redundancy and several ranks only tensors with a layout are written; a resume
    reads the step from common.json."""
    folder = builtin(writer).write(
        tmp_path, TENSORS, JOBS["dp2tp2"], iteration=STEP, remove_redundancy=True
    )
    written = [name for path in folder.glob("*.safetensors") for name in tensors_in(path)]
    assert len(set(written)) == len(TENSORS) - 1 and "global_step" not in written


def test_the_built_in_writes_these_keys_of_common_json(writer, tmp_path):
    folder = builtin(writer).write(
        tmp_path, TENSORS, None, iteration=STEP, common={"epoch_num": 2, "loss_scale": 8.0}
    )
    assert json.loads((folder / "common.json").read_text(encoding="utf-8")) == {
        "epoch_num": 2,
        "step_num": STEP,
        "global_step": STEP,
        "loss_scale": 8.0,
        "global_batch_size": 8,
        **({"ckpt_status": None} if writer == "1.9.0" else {}),
    }
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == str(STEP)


def test_the_built_in_of_180_prunes_what_others_wrote(writer, tmp_path):
    """1.8.0 counts the folders that are there and removes the lowest numbers before it writes;
    1.9.0 only those that this training wrote."""
    (tmp_path / "iteration_00000003").mkdir(parents=True)
    (tmp_path / "iteration_00000020").mkdir()
    for iteration in (4, 5):
        builtin(writer).write(tmp_path, TENSORS, None, iteration=iteration, keep=3)
    kept = [path.name[-2:] for path in sorted(tmp_path.glob("iteration_*"))]
    assert kept == (["04", "05", "20"] if writer == "1.8.0" else ["03", "04", "05", "20"])


# ---- requirements of both versions ---------------------------------------------------------------


@pytest.fixture(scope="module", params=["one", "dp2tp2"])
def written(request, tmp_path_factory) -> tuple[Path, Any]:
    """A folder of 1.9.0 as 1.8.0 reads it, and the layouts of its job. Not to be changed."""
    root = tmp_path_factory.mktemp("written")
    builtin("1.9.0").write(root / "first", TENSORS, JOBS[request.param], iteration=STEP)
    return copied(root / "first", root / "checkpoint"), JOBS[request.param]


@pytest.fixture()
def folder(written, tmp_path) -> Path:
    """Iteration folder of a copy of ``written``."""
    return copied(written[0], tmp_path / "checkpoint") / "iteration_00000015"


def of_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def change_all(metadata: dict[str, Any]) -> None:
        for entry in metadata["state_dict_metadata"].values():
            change(entry)

    return change_all


def of_storage(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def change_all(metadata: dict[str, Any]) -> None:
        for entry in sum(metadata["storage_data"].values(), []):
            change(entry)

    return change_all


def test_files_and_folders_of_others_do_not_matter(written, folder, version):
    """Ours beside the weights, whatever is in them, and temporary files."""
    inside = folder / ".mindresume" / "0"
    inside.mkdir(parents=True)
    for path in (
        inside / "x.safetensors",
        folder / ".x.safetensors",
        folder / "mindresume.json",
        folder / "x.safetensors.tmp",
    ):
        path.write_bytes(b"not a tensor")
    for name in (".mindresume", ".iteration_00000020", "iteration_00000020.tmp"):
        (folder.parent / name).mkdir()
    expect_readable(folder.parent, TENSORS, written[1], version)


def test_the_built_in_reads_every_safetensors_file_of_one_process(written, folder, version):
    """Without metadata.json it reads all *.safetensors of the folder; with it, those that it
    names."""
    (folder / "x.safetensors").write_bytes(b"not a tensor")
    found = differences(builtin(version).read(folder, TENSORS, written[1]), TENSORS, written[1])
    assert bool(found) is (written[1] is None)


@pytest.mark.parametrize(
    "change, accepted",
    [
        (lambda common: {**common, "ckpt_status": None}, ["1.9.0"]),
        (lambda common: {**common, "mindresume": 1}, []),
        (lambda common: {"step_num": STEP, "global_step": STEP}, VERSIONS),
    ],
    ids=["ckpt_status", "unknown", "few"],
)
def test_the_built_in_uses_these_keys_of_common_json(folder, version, change, accepted):
    edited(folder / "common.json", change)
    assert isinstance(builtin(version).read(folder, {}, None)["common"], dict) is (
        version in accepted
    )


HARMLESS = {
    "more at the top": lambda metadata: {"mindresume": {"a": [1]}, **metadata},
    "more of a tensor": of_tensors(
        lambda entry: (entry.update(x=1), entry["properties"].update(x=1))
    ),
    "more of a chunk": of_tensors(lambda entry: [chunk.update(x=1) for chunk in entry["chunk"]]),
    "more of a file": of_storage(lambda entry: entry.update(x=1)),
    "no rank_group, all replicas": of_storage(lambda entry: entry.pop("rank_group")),
    "one replica_id": of_tensors(lambda entry: entry["properties"].update(replica_id=0)),
    "Float32": of_tensors(lambda entry: entry["properties"].update(dtype="Float32")),
    "no type": of_tensors(lambda entry: entry["properties"].update(dtype="?")),
    "no local shape": of_tensors(
        lambda entry: [chunk.update(local_shape=[]) for chunk in entry["chunk"]]
    ),
    "other aliases": of_tensors(
        lambda entry: entry["layout"].update(
            alias_name=[f"axis{n}" for n in range(len(entry["layout"]["device_matrix"]))]
        )
    ),
}
SHAPES, UNPACK = "Global shapes of source and destination tensors do not match", "unpack"
# change, what 1.8.0 says, what 1.9.0 says
HARMFUL: dict[str, tuple[Callable, str | None, str | None]] = {
    "more of a layout": (of_tensors(lambda entry: entry["layout"].update(x=1)), UNPACK, UNPACK),
    "layout by name": (
        of_tensors(lambda entry: entry.update(layout=dict(sorted(entry["layout"].items())))),
        "alias_name",
        "alias_name",
    ),
    "no layout": (of_tensors(lambda entry: entry.update(layout=None)), "NoneType", "NoneType"),
    "uncut fragments": (
        of_tensors(
            lambda entry: entry.update(axis_fragmentations=[1] * len(entry["global_shape"]))
        ),
        "no corresponding parameter offset|was not loaded|same shape",
        None,
    ),
    "wrong type": (
        of_tensors(lambda entry: entry["properties"].update(dtype="float16")),
        "same type",
        None,
    ),
    "wrong shape": (
        of_tensors(
            lambda entry: entry.update(global_shape=[2 * size for size in entry["global_shape"]])
        ),
        SHAPES,
        "incorrect shape|same shape",
    ),
    "a slice nowhere": (
        lambda metadata: {**metadata, "storage_data": {}},
        "KeyError|Failed to load",
        "Storage info not found",
    ),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
@pytest.mark.parametrize("written", ["dp2tp2"], indirect=True)
def test_unknown_fields_of_metadata_are_ignored(written, folder, version, change):
    # and it is compact now, without line breaks
    edited(folder / "metadata.json", change)
    for layouts in (written[1], None):
        expect_readable(folder.parent, TENSORS, layouts, version)


@pytest.mark.parametrize("change, of_180, of_190", HARMFUL.values(), ids=HARMFUL)
@pytest.mark.parametrize("written", ["dp2tp2"], indirect=True)
def test_the_built_in_needs_this_of_metadata(written, folder, version, change, of_180, of_190):
    """Reads in another layout than the folder's, where every field is used."""
    edited(folder / "metadata.json", change)
    reason = of_180 if version == "1.8.0" else of_190
    if reason is None:
        expect_readable(folder, TENSORS, None, version)
    else:
        with pytest.raises(AssertionError, match=reason):
            expect_readable(folder, TENSORS, None, version)


# ---- more in the files than is asked for ---------------------------------------------------------

MORE = {
    "learning_rate": np.array(0.5, np.float32),
    "scale_sense": np.array(8.0, np.float32),
    "x": np.array([7], np.int64),
}


def test_more_in_the_opt_file_does_not_matter(written, folder, version):
    """Counters that metadata.json does not name and this optimizer does not have; also what has no
    dimensions."""
    for path in folder.glob("*-opt-*"):
        put(path, {**tensors_in(path), **MORE})
    for layouts in (written[1], None, JOBS["dp2tp2opt"]):
        answer = expect_readable(folder, TENSORS, layouts, version)
        assert all(not rank["unused"] for rank in answer["ranks"].values())


def test_the_built_in_loads_a_counter_of_one_process_only(written, folder, version):
    """Tensors outside metadata.json are not found in a folder of several ranks; an optimizer that
    has one keeps its value. From a folder of one process, one process loads it, and several ranks
    do not request tensors without a layout."""
    tensors = {**TENSORS, "learning_rate": MORE["learning_rate"]}
    for path in folder.glob("*-opt-*"):
        put(path, {**tensors_in(path), **MORE})
    answer = builtin(version).read(folder, tensors, None)
    assert answer["error"] is None
    assert answer["ranks"]["0"]["not_loaded"] == ([] if written[1] is None else ["learning_rate"])
    answer = builtin(version).read(folder, tensors, JOBS["dp2tp2"])
    assert all(rank["not_loaded"] == ["learning_rate"] for rank in answer["ranks"].values())


def test_the_built_in_reads_the_step_from_common_json_if_no_file_has_it(written, folder, version):
    """In a folder of several ranks no file has it, according to metadata.json."""
    edited(folder / "common.json", lambda common: {**common, "global_step": 4})
    given = {**TENSORS, "global_step": np.array([4 if written[1] else STEP], np.int32)}
    expect_readable(folder, given, None, version)
    expect_readable(
        folder, {**TENSORS, "global_step": np.array([4], np.int32)}, JOBS["dp2tp2"], version
    )


@pytest.mark.parametrize("written", ["one"], indirect=True)
def test_the_built_in_refuses_a_name_in_both_files(written, folder, version):
    path = next(folder.glob("*-model-*"))
    put(path, {**tensors_in(path), "global_step": TENSORS["global_step"]})
    assert "Duplicate parameter_name" in builtin(version).read(folder, TENSORS)["error"]


@pytest.mark.parametrize("written", ["one"], indirect=True)
def test_the_built_in_requires_a_step_of_one_dimension(written, folder, version):
    path = next(folder.glob("*-opt-*"))
    put(path, {**tensors_in(path), "global_step": np.array(STEP, np.int32)})
    assert (SHAPES if version == "1.8.0" else "same shape") in builtin(version).read(
        folder, TENSORS
    )["error"]


# ---- the checks here can fail --------------------------------------------------------------------


def test_one_flipped_bit_in_a_file_is_detected(written, folder, version):
    path = sorted(folder.glob("*-model-*"))[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(AssertionError, match="expected .* found"):
        expect_readable(folder, TENSORS, written[1], version)


def test_a_moment_that_keeps_its_old_value_is_detected(written, folder, version):
    """The built-in reports it only by one line in the log."""
    for path in folder.glob("*-opt-*"):
        put(
            path,
            {
                name: array
                for name, array in tensors_in(path).items()
                if name != "adam_m.rows.weight"
            },
        )
    if written[1]:
        edited(
            folder / "metadata.json",
            lambda metadata: metadata["state_dict_metadata"].pop("adam_m.rows.weight") and None,
        )
    with pytest.raises(AssertionError, match=r"adam_m\.rows\.weight was not loaded"):
        expect_readable(folder, TENSORS, written[1], version)


def test_weights_alone_are_read(written, version):
    """Loads without an optimizer, as for a fine-tuning."""
    weights = {name: array for name, array in TENSORS.items() if not is_optimizer(name, TENSORS)}
    answer = builtin(version).read(written[0], weights, written[1], optimizer=False)
    assert differences(answer, weights, written[1]) == []
