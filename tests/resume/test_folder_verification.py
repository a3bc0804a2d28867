"""Every byte compared with what was written, also while a job completes and removes checkpoints."""

import os
import shutil

import iteration_folders
import pytest
from rank_folders import RUN, STORAGE, dir_at, path_of, save, write_rank

from mindresume.formats import weight_files
from mindresume.model.manifest import FOLDER, attempt_name
from mindresume.resume.candidates import list_checkpoints, verify_checkpoints
from mindresume.resume.replicas import unknown_strategy
from mindresume.saving.committer import Committer
from mindresume.saving.garbage_collector import carry_out
from mindresume.saving.retention import KeepLast, plan
from mindresume.saving.shard_writer import SaveTarget


def looked(root):
    return list_checkpoints(STORAGE, str(root), unknown_strategy)[1]


def verdicts(root, rows, again=None):
    return [
        (candidate.step, bool(bad))
        for candidate, bad in verify_checkpoints(
            dir_at(root), rows, again or (lambda: looked(root))
        )
    ]


def test_a_checkpoint_removed_meanwhile_is_not_damaged(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    rows = looked(tmp_path)
    carry_out(dir_at(tmp_path), plan(dir_at(tmp_path), KeepLast(2)))
    assert verdicts(tmp_path, rows) == [(15, False), (10, False)]


def test_a_removal_hidden_by_an_old_listing_is_not_damage(tmp_path):
    for step in (5, 10):
        save(tmp_path, step)
    rows = looked(tmp_path)
    shutil.rmtree(tmp_path / FOLDER / attempt_name(5, RUN))
    path_of(tmp_path, 5, 0).unlink()
    assert verdicts(tmp_path, rows, lambda: rows) == [(10, False)]


def test_a_checkpoint_completed_meanwhile_is_verified_in_its_new_state(tmp_path):
    save(tmp_path, 5)
    for rank in range(4):
        write_rank(tmp_path, 10, rank, 4, replicas=4)
    rows, aside = looked(tmp_path), tmp_path / "aside"
    path_of(tmp_path, 10, 1).rename(aside)

    def again():
        if aside.exists():
            aside.rename(path_of(tmp_path, 10, 1))
            Committer(SaveTarget(STORAGE, str(tmp_path), RUN, 0, 4)).poll(10)
        return looked(tmp_path)

    assert verdicts(tmp_path, rows, again) == [(10, False), (5, False)]


def test_the_folder_is_listed_again_once_for_all_damage(tmp_path):
    save(tmp_path, 5)
    rows, looks = looked(tmp_path), []
    path_of(tmp_path, 5, 0).unlink()
    path_of(tmp_path, 5, 2).unlink()

    def again():
        looks.append(1)
        return looked(tmp_path)

    assert verdicts(tmp_path, rows, again) == [(5, True)] and len(looks) == 1


def test_a_metadata_file_of_another_size_is_not_read(tmp_path, monkeypatch):
    """A file can be sparse, of terabytes."""
    iteration_folders.save(tmp_path, 5)
    path = iteration_folders.folder_of(tmp_path, 5) / "common.json"
    os.truncate(path, 1 << 42)
    read = weight_files.file_checksum
    monkeypatch.setattr(
        weight_files,
        "file_checksum",
        lambda file: read(file) if file.seek(0, 2) < 1 << 42 else pytest.fail("its bytes are read"),
    )
    ((candidate, (bad,)),) = verify_checkpoints(
        dir_at(tmp_path), looked(tmp_path), lambda: looked(tmp_path)
    )
    assert f"it has {1 << 42} bytes" in bad.reason and candidate.step == 5
