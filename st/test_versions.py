"""Checkpoint 2.0 folders between mindformers 1.8.0 and 1.9.0, by their built-in readers and writers
(st/builtin_versions.py): what we read of theirs, and that expect_readable, which is what holds for
our own folders, can fail. Tests beginning with ``test_the_built_in`` state what mindformers does.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindresume.formats.strategy import Strategy
from mindresume.model.layout import TensorLayout, whole
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.region_load import read_regions
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import encode
from st.builtin_versions import (
    VERSIONS,
    builtin,
    differences,
    expect_readable,
    fixture,
    python_of,
)
from st.checkpoint_files import tensors_in
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


def removed(path: Path, section: str, key: str) -> None:
    """Rewrites a JSON file without ``key`` in one of its sections; section "": at the top."""
    value = json.loads(path.read_text(encoding="utf-8"))
    (value[section] if section else value).pop(key, None)
    path.write_text(json.dumps(value), encoding="utf-8")


def copied(root: Path, to: Path) -> Path:
    """A copy that may be changed (mindformers makes files 0400), with a common.json that 1.8.0
    reads."""
    shutil.copytree(root, to)
    for path in [to, *to.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    for path in to.rglob("common.json"):
        removed(path, "", "ckpt_status")
    return to


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


# ---- written by one, read by the other -----------------------------------------------------------


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


@pytest.mark.parametrize(
    "more, accepted",
    [({}, VERSIONS), ({"ckpt_status": None}, ["1.9.0"]), ({"mindresume": 1}, [])],
    ids=["none", "ckpt_status", "unknown"],
)
def test_the_built_in_accepts_these_keys_of_common_json(folder, version, more, accepted):
    common = {"step_num": STEP, "global_step": STEP, **more}
    (folder / "common.json").write_text(json.dumps(common), encoding="utf-8")
    assert isinstance(builtin(version).read(folder, {}, None)["common"], dict) is (
        version in accepted
    )


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
        removed(folder / "metadata.json", "state_dict_metadata", "adam_m.rows.weight")
    with pytest.raises(AssertionError, match=r"adam_m\.rows\.weight was not loaded"):
        expect_readable(folder, TENSORS, written[1], version)


def test_the_built_in_takes_the_step_from_common_json(written, folder, version):
    path = folder / "common.json"
    common = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**common, "global_step": 4}), encoding="utf-8")
    step = np.array([4 if written[1] else STEP], np.int32)
    expect_readable(folder, {**TENSORS, "global_step": step}, None, version)


def test_the_built_in_of_190_reads_one_process_of_180_without_replicas(tmp_path):
    folder = builtin("1.8.0").write(
        tmp_path / "a", TENSORS, None, iteration=STEP, remove_redundancy=True
    )
    expect_readable(copied(folder.parent, tmp_path / "b"), TENSORS, None, "1.9.0")
