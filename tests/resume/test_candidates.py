"""``ls``, ``verify`` and the report agree with what a resume selects; what ``verify`` reads."""

import os
import shutil

import iteration_folders
import pytest
from rank_folders import STORAGE, dir_at, path_of, records_of, save, target_of, write_rank
from reshard.plans import MODEL, Plan, foreign, random_tensors

from mindresume.api.results import info_of
from mindresume.formats import weight_files
from mindresume.formats.scan import scan
from mindresume.reshard.strategy_store import StrategyLookup, identity_of, set_aside, strategy_for
from mindresume.resume.candidates import (
    UNUSABLE,
    CheckpointStatus,
    list_checkpoints,
    verify_checkpoints,
)
from mindresume.resume.replicas import unknown_strategy
from mindresume.saving.committer import Committer
from tests.strategy_files import write_strategy

TENSORS = random_tensors(MODEL)
FOUR = Plan.parse("dp2tp2", MODEL)


@pytest.fixture(params=["dp4tp2", "tp2"])
def root(tmp_path, request):
    """Returns (a save of mindformers on 4 ranks, its strategy folder, the layout of the job that
    resumes from it)."""
    folder = str(tmp_path / "strategy")
    foreign(tmp_path / "checkpoint", FOUR, TENSORS)
    write_strategy(FOUR.strategy(), folder)
    return tmp_path / "checkpoint", folder, Plan.parse(request.param, MODEL)


def next_job(root, folder, made):
    """Sets the strategy aside, compiles, and is killed."""
    candidate = scan(dir_at(root)).candidates[0]
    identity = identity_of(dir_at(root), candidate)
    set_aside(STORAGE, folder, strategy_for(dir_at(root), candidate, None), identity)
    write_strategy(made.strategy(), folder)


def test_another_number_of_ranks_can_be_requested(root):
    root, folder, made = root
    next_job(root, folder, made)
    assert list_checkpoints(STORAGE, str(root), StrategyLookup(STORAGE), 4)[1][0].problem is None
    for world_size, said in (
        (8, "no file of rank 4"),
        (2, "saved by at least 4 ranks, this job has 2"),
    ):
        seen = list_checkpoints(STORAGE, str(root), StrategyLookup(STORAGE), world_size)[1][0]
        assert seen.state == UNUSABLE and said in seen.problem.reason


def test_size_is_of_the_files_that_are_there(root):
    root, _, _ = root
    candidate = scan(dir_at(root)).candidates[0]
    files = [root / file.path for file in candidate.all_files]
    row = CheckpointStatus(candidate, None)
    assert info_of(dir_at(root), row).size_bytes == sum(file.stat().st_size for file in files) > 0
    files[0].unlink()
    assert info_of(dir_at(root), row).size_bytes == sum(file.stat().st_size for file in files[1:])


# ---- every byte compared with what was written, also while a job saves and removes ---------------


def looked(root):
    return list_checkpoints(STORAGE, str(root), unknown_strategy)[1]


def verdicts(root, rows, again=None):
    return [
        (candidate.step, bool(bad))
        for candidate, bad in verify_checkpoints(
            dir_at(root), rows, again or (lambda: looked(root))
        )
    ]


def test_a_removal_hidden_by_an_old_listing_is_not_damage(tmp_path):
    for step in (5, 10):
        save(tmp_path, step)
    rows = looked(tmp_path)
    shutil.rmtree(records_of(tmp_path, 5))
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
            Committer(target_of(tmp_path, 0, 4)).poll(10)
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
