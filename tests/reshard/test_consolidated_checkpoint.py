"""Consolidated weights that mindresume wrote: checked like any other checkpoint, by a job and by
the commands."""

import json
import os
from pathlib import Path

import pytest
from rank_folders import STORAGE, flip_bit
from reshard.plans import COUNTERS, STEP, Plan, Spec, complete, random_tensors, recorded

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import CollectiveError, CorruptFileError
from mindresume.formats.consolidated import (
    CONVERSION,
    HUGGINGFACE,
    MAP,
    MAX_CONVERSION,
    MINDSPORE,
    read_conversion_manifest,
)
from mindresume.model.manifest import encode_head
from mindresume.reshard.conversion_plan import to_consolidated
from mindresume.reshard.converter import Conversion
from mindresume.reshard.direct_engine import Engine
from mindresume.reshard.open_checkpoint import (
    ConsolidatedSource,
    open_checkpoint,
    open_consolidated,
    survey_consolidated,
    verify_consolidated,
)
from mindresume.resume.eligible import describe_candidate
from mindresume.tensor_files import read_header

TINY = {
    "embedding.weight": Spec((16, 8), 0, "first"),
    "layers.0.weight": Spec((8, 8), 1, 0),
    "layers.1.weight": Spec((8, 8), 1, 1),
}
TENSORS = random_tensors(TINY)


@pytest.fixture(params=[MINDSPORE, HUGGINGFACE])
def kind(request):
    return request.param


def merge(root: Path, kind: str = MINDSPORE) -> Path:
    recorded(root / "a", Plan.parse("tp2", TINY), TENSORS)
    job = to_consolidated(open_checkpoint(STORAGE, str(root / "a")), kind, 520)
    conversion = Conversion(STORAGE, job, str(root / "merged"))
    conversion.run(Engine())
    return root / "merged"


def damage(folder: Path, tensor: str) -> str:
    """Flips a bit of it; returns the name of the file."""
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            entry = read_header(file, str(path)).tensors.get(tensor)
        if entry is not None:
            flip_bit(path, entry.ranges[0][0] + 5)
            return path.name
    raise AssertionError(tensor)


def verify(path):
    read = []
    _, (row,) = survey_consolidated(STORAGE, str(path))
    return *verify_consolidated(STORAGE, str(path), row, read.append), sum(read)


def test_a_flipped_bit_is_named_with_file_and_tensor(tmp_path, kind):
    folder = merge(tmp_path, kind)
    name = damage(folder, "layers.1.weight")
    # names, headers and sizes are right
    assert survey_consolidated(STORAGE, str(folder))[1][0].problem is None
    _, (problem,), _ = verify(folder)
    assert problem.file == name and "damaged: layers.1.weight (checksum " in problem.reason
    assert verify(folder / name)[1] == [problem]  # one file of it
    other = next(path for path in folder.glob("*.safetensors") if path.name != name)
    assert verify(other)[1] == []
    with pytest.raises(CollectiveError, match=f"{name}.*layers.1.weight"):
        ConsolidatedSource(SingleProcess(), True, False).choose(STORAGE, str(folder))
    ConsolidatedSource(SingleProcess(), False, False).choose(STORAGE, str(folder))


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes"),
        (os.remove, "is missing"),
        (lambda path: flip_bit(path, 20), ""),
    ],
)
def test_other_damage_of_a_file(tmp_path, kind, spoil, says):
    folder = merge(tmp_path, kind)
    path = sorted(folder.glob("*.safetensors"))[-1]
    spoil(path)
    _, (problem,), _ = verify(folder)
    assert problem.file == path.name and says in problem.reason


def test_a_damaged_conversion_manifest_is_reported(tmp_path):
    folder = merge(tmp_path)
    flip_bit(folder / CONVERSION)
    _, (problem,), _ = verify(folder)
    assert problem.file == CONVERSION and "cannot be read" in problem.reason
    with pytest.raises(CorruptFileError, match="To go by their headers and sizes alone, remove it"):
        open_consolidated(STORAGE, str(folder))
    os.remove(folder / CONVERSION)
    assert verify(folder)[1] == [] and open_consolidated(STORAGE, str(folder)).made is None


def test_a_tensor_that_an_altered_index_leaves_out(tmp_path):
    folder = merge(tmp_path)
    index = json.loads((folder / MAP).read_text())
    del index["weight_map"]["layers.1.weight"]
    (folder / MAP).write_text(json.dumps(index))
    _, (problem,), _ = verify(folder)
    assert "layers.1.weight is not found" in problem.reason
    with pytest.raises(CorruptFileError, match="layers.1.weight is not found"):
        open_consolidated(STORAGE, str(folder))


@pytest.mark.parametrize(
    "field, value",
    [
        ("files", [["../a", 1, "0" * 32]]),
        ("files", [["a", 1, "x"]]),
        ("files", None),
        ("tensors", {"a": 5}),
        ("what", None),
    ],
)
def test_fields_that_cannot_be(tmp_path, field, value):
    good = {"version": 1, "kind": "conversion", "fingerprint": "f", "what": "w", "files": []}
    (tmp_path / CONVERSION).write_bytes(encode_head(good, MAX_CONVERSION))
    assert read_conversion_manifest(STORAGE, str(tmp_path)).files == ()
    (tmp_path / CONVERSION).write_bytes(encode_head({**good, field: value}, MAX_CONVERSION))
    with pytest.raises(CorruptFileError, match="conversion.json"):
        read_conversion_manifest(STORAGE, str(tmp_path))


def test_weights_of_others_have_no_checksums(tmp_path):
    folder = complete(tmp_path / "theirs", TENSORS)
    candidate, problems, read = verify(folder)
    assert (candidate.origin, candidate.step, problems, read) == ("mindformers", STEP, [], 0)
    assert "written by mindformers without records" in describe_candidate(candidate)
    ours = survey_consolidated(STORAGE, str(merge(tmp_path)))[1][0].candidate
    assert (
        "consolidated weights that mindresume wrote, every byte of the tensors checked"
        in describe_candidate(ours)
    )
    assert set(COUNTERS) <= set(open_consolidated(STORAGE, str(folder)).weights.tensors)
