"""Merged weights whose header was changed in place: the bytes and their checksums are right, and
the tensors are others."""

import json
import struct

import pytest
from cli.test_export_hf import FIXTURES, TINY
from rank_folders import flip_bit
from reshard.plans import MODEL, Plan, random_tensors, recorded

import mindresume
from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import CollectiveError, CorruptFileError, MindResumeError
from mindresume.formats.consolidated import CONVERSION, MAX_CONVERSION
from mindresume.model.layout import whole
from mindresume.model.manifest import encode_head
from mindresume.reshard.huggingface import view_of_folder
from mindresume.reshard.open_checkpoint import (
    ConsolidatedSource,
    open_checkpoint,
    survey_consolidated,
    verify_consolidated,
)
from mindresume.reshard.region_load import read_regions
from mindresume.storage.posix import PosixStorage

STORAGE = PosixStorage()
SINGLE = FIXTURES / "mf190_10_safetensors_single" / "output" / "checkpoint"


def alter(path, change):
    """Changes the header of a safetensors file, and pads it to its length."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= length
    path.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])


def matrix(header):
    return next(
        row
        for name, row in header.items()
        if name != "__metadata__" and len(row["shape"]) == 2 and row["dtype"] == "F32"
    )


def turn(header):
    matrix(header)["shape"].reverse()


def retype(header):
    matrix(header)["dtype"] = "I32"


@pytest.fixture
def merged(tmp_path):
    recorded(tmp_path / "source", Plan.parse("dp1tp2", MODEL), random_tensors(MODEL))
    mindresume.merge(tmp_path / "source", tmp_path / "merged")
    return tmp_path / "merged"


@pytest.mark.parametrize("change", [turn, retype])
@pytest.mark.parametrize("whole", [True, False])
def test_other_shapes_and_dtypes_are_refused_by_all(merged, change, whole):
    file = merged / "part0.safetensors"
    path = str(merged if whole else file)
    assert survey_consolidated(STORAGE, path)[1][0].problem is None
    alter(file, change)
    with pytest.raises(CorruptFileError, match="was written: its header was changed"):
        open_checkpoint(STORAGE, path)
    assert "its header was changed" in survey_consolidated(STORAGE, path)[1][0].problem.reason
    assert verify_consolidated(
        STORAGE, path, survey_consolidated(STORAGE, path)[1][0], lambda count: None
    )[1]
    for target in (merged.parent / "again", merged.parent / "ranks"):
        with pytest.raises(MindResumeError):
            mindresume.merge(path, target) if target.name == "again" else mindresume.convert(
                path, target, to="tp=1"
            )
        assert not target.exists()


@pytest.mark.parametrize("more", [b"x", b"\0" * (1 << 20)])
def test_another_size_is_told_before_any_byte_is_read(merged, more):
    with open(merged / "part0.safetensors", "ab") as file:
        file.write(more)
    read = []
    _, (problem, *_) = verify_consolidated(
        STORAGE, str(merged), survey_consolidated(STORAGE, str(merged))[1][0], read.append
    )
    assert "bytes" in problem.reason and sum(read) < 1 << 20
    assert survey_consolidated(STORAGE, str(merged))[1][0].problem is not None


def earlier(folder):
    """Makes the manifest one of a version that recorded no shapes."""
    path = folder / CONVERSION
    head = json.loads(path.read_bytes().split(b"\n")[1])
    del head["shapes"]
    path.write_bytes(encode_head(head, MAX_CONVERSION))


@pytest.mark.parametrize("change", [turn, retype])
@pytest.mark.parametrize(
    "by", [lambda folder: None, earlier], ids=["this version", "an earlier version"]
)
def test_a_training_and_which_refuse_them(merged, change, by):
    """Weights of an earlier version are still loaded, and protected by the checksums of their
    files."""
    by(merged)
    source = ConsolidatedSource(SingleProcess(), full=True, resume=False)
    assert source.choose(STORAGE, str(merged)).chosen.step
    alter(merged / "part0.safetensors", change)
    with pytest.raises(
        CollectiveError, match="its header was changed|damaged: no tensor, but the header"
    ):
        source.choose(STORAGE, str(merged))
    assert mindresume.open(merged).select().chosen is None
    assert mindresume.open(merged).verify().damaged


def exported(folder, dtype):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    mindresume.export_hf(SINGLE, folder / "hf", config=folder / "model", dtype=dtype)
    return folder / "hf"


@pytest.mark.parametrize(
    "change", [lambda row: row.update(dtype="F16"), lambda row: row["shape"].reverse()]
)
def test_an_exported_folder_is_not_loaded_with_another_dtype_or_shape(tmp_path, change):
    """bfloat16 that claims to be float16 has as many bytes, and both are converted to what the
    network has."""
    target = exported(tmp_path, "bfloat16")
    assert view_of_folder(STORAGE, str(target)).tensors
    alter(target / "model.safetensors", lambda header: change(header["model.embed_tokens.weight"]))
    with pytest.raises(CorruptFileError, match="its header was changed"):
        view_of_folder(STORAGE, str(target))
    with pytest.raises(CorruptFileError, match="its header was changed"):
        open_checkpoint(STORAGE, str(target))


def test_an_exported_tensor_with_other_bytes_is_not_loaded(tmp_path):
    target = exported(tmp_path, "float32")
    flip_bit(target / "model.safetensors")
    weights = view_of_folder(STORAGE, str(target))
    with pytest.raises(CorruptFileError, match="is not what was written"):
        read_regions(
            weights, {name: whole(tensor.shape) for name, tensor in weights.tensors.items()}
        )
