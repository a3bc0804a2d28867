"""Sizes and headers of weight files."""

import os
import random

import iteration_folders
import pytest
from mutations import cut, flip
from rank_folders import RUN, STORAGE, dir_at, flip_bit, path_of, save

from mindresume.errors import CorruptFileError
from mindresume.formats.records import scan_records
from mindresume.formats.weight_files import (
    KIND,
    existing,
    file_sizes,
    header_of,
    known_damage,
    publish_result,
    read_result,
    sizes_match,
    state_from_scalars,
)
from mindresume.model import manifest as codec
from mindresume.model.manifest import FOLDER, SCRUB_RESULT, FileRecord, attempt_name


def saved(root):
    iteration_folders.save(root, 10)
    return scan_records(dir_at(root))[0][0].all_files


def test_sizes_are_compared_with_the_recorded_ones(tmp_path):
    files = saved(tmp_path)
    assert file_sizes(dir_at(tmp_path), files) == [file.size for file in files]
    assert sizes_match(dir_at(tmp_path), files)
    os.truncate(tmp_path / files[0].path, 5)
    os.remove(tmp_path / files[1].path)
    assert file_sizes(dir_at(tmp_path), files[:2]) == [5, None] and not sizes_match(
        dir_at(tmp_path), files[:1]
    )
    assert not sizes_match(dir_at(tmp_path), files[1:2])
    assert sizes_match(dir_at(tmp_path), [FileRecord(files[0].path, "ckpt")])


def test_a_header_and_why_there_is_none(tmp_path):
    file, *_ = saved(tmp_path)
    assert set(header_of(dir_at(tmp_path), file).tensors) == {"embedding.weight"}
    os.truncate(tmp_path / file.path, 5)
    with pytest.raises(CorruptFileError):
        header_of(dir_at(tmp_path), file)
    os.remove(tmp_path / file.path)
    with pytest.raises(CorruptFileError, match="the file is missing"):
        header_of(dir_at(tmp_path), file)


def test_an_inaccessible_file_has_no_status(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert (
        existing(dir_at(tmp_path), [FileRecord("gone", "ckpt"), FileRecord("loop/file", "ckpt")])
        == []
    )


@pytest.mark.parametrize(
    "step, epoch, within, per_epoch",
    [(15, 2, 5, 10), (15, 2, 0, 8), (15, 1, 0, 15), (20, None, 0, 20)],
)
def test_steps_of_an_epoch_follow_from_the_counters(step, epoch, within, per_epoch):
    state = state_from_scalars(step, epoch, None, 8, None, within)
    assert (state.step, state.steps_per_epoch, state.global_step) == (step, per_epoch, step)
    assert state.epoch == (epoch or 1)


STEP, RANK = 5, 1


@pytest.fixture
def root(tmp_path):
    save(tmp_path, STEP)
    return tmp_path


def candidate_of(root):
    return scan_records(dir_at(root))[0][0]


def publish_damage(root, refusals):
    before = {row.file: STORAGE.status(str(root / row.file)) for row in refusals}
    publish_result(STORAGE, candidate_of(root), refusals, before, 1e9, RUN)


def mark(root, tensors=("layer.bias",)):
    """Publishes that the file of RANK is damaged."""
    candidate = candidate_of(root)
    file = candidate.files[RANK][0].path
    publish_damage(root, [candidate.refuse("it rotted", file, RANK, tensors)])
    return root / FOLDER / attempt_name(STEP, RUN) / SCRUB_RESULT


def damage_of(root):
    return known_damage(dir_at(root), candidate_of(root))


def test_a_missing_file_is_no_damage(root):
    mark(root)
    path_of(root, STEP, RANK).unlink()
    assert damage_of(root) is None


def test_an_intact_checkpoint_has_a_time_only(root):
    candidate = candidate_of(root)
    publish_damage(root, [])
    assert damage_of(root) is None and read_result(STORAGE, candidate_of(root)).read_at == 1e9
    assert read_result(STORAGE, candidate) is None  # the candidate was scanned before


def test_a_torn_or_altered_result_says_nothing(root):
    path, draw = mark(root), random.Random(1)
    whole = path.read_bytes()
    for change in [flip, cut] * 40:
        content = change(whole, draw)
        # the last line may lack its line break
        if content.rstrip(b"\n") != whole.rstrip(b"\n"):
            path.write_bytes(content)
            assert read_result(STORAGE, candidate_of(root)) is None and damage_of(root) is None


@pytest.mark.parametrize(
    "change",
    [
        {"records": "x"},
        {"damaged": {}},
        {"read_at": -1},
        {"path": "../x"},
        {"path": "/etc/passwd"},
        {"size": -1},
        {"tensors": [1]},
    ],
    ids=repr,
)
def test_hostile_fields_say_nothing(root, change):
    path = mark(root)
    with path.open("rb") as file:
        head, _ = codec.read_head(file, KIND)
    row = head["damaged"][0]
    (row if set(change) <= set(row) else head).update(change)
    path.write_bytes(codec.encode_head(head))
    assert read_result(STORAGE, candidate_of(root)) is None and damage_of(root) is None


def test_damage_is_listed_and_bounded(root):
    candidate = candidate_of(root)
    refusals = [
        candidate.refuse("x" * 5000, file.path, rank, [f"tensor {number}" for number in range(500)])
        for rank, files in candidate.files.items()
        for file in files
    ]
    publish_damage(root, refusals)
    found = read_result(STORAGE, candidate_of(root))
    assert len(found.damaged) == 4 and all(
        len(row.reason) == 1000 and len(row.tensors) == 100 for row in found.damaged
    )
    assert "3 more files" in damage_of(root).reason
    flip_bit(path_of(root, STEP, 0))  # another file: its times changed
    assert damage_of(root).rank == 1
