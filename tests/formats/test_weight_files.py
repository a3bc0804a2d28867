"""Sizes and headers of weight files."""
import os

import pytest
from iteration_folders import save
from rank_folders import dir_at

from mindresume.errors import CorruptFileError
from mindresume.formats.records import scan_records
from mindresume.formats.weight_files import existing, file_sizes, header_of, sizes_match
from mindresume.model.manifest import FileRecord


def saved(root):
    save(root, 10)
    return scan_records(dir_at(root))[0][0].all_files


def test_sizes_are_compared_with_the_recorded_ones(tmp_path):
    files = saved(tmp_path)
    assert file_sizes(dir_at(tmp_path), files) == [file.size for file in files]
    assert sizes_match(dir_at(tmp_path), files)
    os.truncate(tmp_path / files[0].path, 5)
    os.remove(tmp_path / files[1].path)
    assert file_sizes(dir_at(tmp_path), files[:2]) == [5, None] and not sizes_match(dir_at(tmp_path), files[:1])
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
    assert existing(dir_at(tmp_path), [FileRecord("gone", "ckpt"), FileRecord("loop/file", "ckpt")]) == []
