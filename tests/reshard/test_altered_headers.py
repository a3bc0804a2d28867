"""Merged weights whose header was changed in place: the bytes and their checksums are right, and the tensors are others."""
import json
import struct

import numpy as np
import pytest
from reshard.plans import MODEL, Plan, random_tensors, recorded

import mindresume
from mindresume.errors import CorruptFileError, MindResumeError
from mindresume.reshard.consolidated_checkpoint import survey, verify
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.storage.posix import PosixStorage

STORAGE = PosixStorage()


def alter(path, change):
    """Changes the header of a safetensors file, and pads it to its length."""
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= length
    path.write_bytes(data[:8] + text.ljust(length) + data[8 + length:])


def matrix(header):
    return next(row for name, row in header.items() if name != "__metadata__" and len(row["shape"]) == 2 and row["dtype"] == "F32"
                )


def turn(header):
    matrix(header)["shape"].reverse()


def retype(header):
    matrix(header)["dtype"] = "I32"


def flatten(header):
    row = matrix(header)
    row["shape"] = [int(np.prod(row["shape"]))]


@pytest.fixture
def merged(tmp_path):
    recorded(tmp_path / "source", Plan.parse("dp1tp2", MODEL), random_tensors(MODEL))
    mindresume.merge(tmp_path / "source", tmp_path / "merged")
    return tmp_path / "merged"


@pytest.mark.parametrize("change", [turn, retype, flatten])
@pytest.mark.parametrize("whole", [True, False])
def test_other_shapes_and_dtypes_are_refused_by_all(merged, change, whole):
    file = merged / "part0.safetensors"
    path = str(merged if whole else file)
    assert survey(STORAGE, path)[1][0].problem is None
    alter(file, change)
    with pytest.raises(CorruptFileError, match="was written: its header was changed"):
        open_checkpoint(STORAGE, path)
    assert "its header was changed" in survey(STORAGE, path)[1][0].problem.reason
    assert verify(STORAGE, path, lambda count: None)[1]
    for target in (merged.parent / "again", merged.parent / "ranks"):
        with pytest.raises(MindResumeError):
            mindresume.merge(path, target) if target.name == "again" else mindresume.convert(path, target, to="tp=1")
        assert not target.exists()


@pytest.mark.parametrize("more", [b"x", b"\0" * (1 << 20)])
def test_another_size_is_told_before_any_byte_is_read(merged, more):
    with open(merged / "part0.safetensors", "ab") as file:
        file.write(more)
    read = []
    _, (problem, *_) = verify(STORAGE, str(merged), read.append)
    assert "bytes" in problem.reason and sum(read) < 1 << 20
    assert survey(STORAGE, str(merged))[1][0].problem is not None
