"""``ls``, ``verify`` and the report agree with what a resume selects."""

import shutil

import iteration_folders
import pytest
from rank_folders import STORAGE, dir_at
from reshard.plans import MODEL, Plan, foreign, random_tensors

from mindresume.api.results import info_of
from mindresume.coordination.collectives import SingleProcess
from mindresume.formats.scan import scan
from mindresume.reshard.strategy_store import StrategyLookup, identity_of, set_aside, strategy_for
from mindresume.resume.candidates import COMPLETE, UNUSABLE, CheckpointStatus, list_checkpoints
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.resume.sources import CheckpointSources
from mindresume.storage.posix import PosixStorage
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


def next_job(root, folder, plan):
    """Sets the strategy aside, compiles, and is killed."""
    candidate = scan(dir_at(root)).candidates[0]
    identity = identity_of(dir_at(root), candidate)
    set_aside(STORAGE, folder, strategy_for(dir_at(root), candidate, None), identity)
    write_strategy(plan.strategy(), folder)


@pytest.mark.parametrize("lost", [(), (1, 2)])
def test_the_ranks_are_those_of_the_strategy_that_was_set_aside(root, lost):
    root, folder, plan = root
    for rank in lost:
        shutil.rmtree(root / f"rank_{rank}")
    next_job(root, folder, plan)
    _, (seen,) = list_checkpoints(STORAGE, str(root), StrategyLookup(STORAGE))
    assert (seen.state, seen.candidate.missing_ranks) == (COMPLETE, lost)
    choice = select_checkpoint(
        STORAGE,
        str(root),
        SingleProcess(),
        SelectionPolicy(every_rank=True),
        CheckpointSources(StrategyLookup(STORAGE)),
    )
    assert choice.chosen == seen.candidate and choice.refused == ()


def test_another_number_of_ranks_can_be_requested(root):
    root, folder, plan = root
    next_job(root, folder, plan)
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


def test_a_job_that_replaces_all_that_was_listed_hides_no_checkpoint(tmp_path):
    """It keeps one, and has saved another one since the folder was listed."""
    iteration_folders.save(tmp_path, 5)

    class Beside(PosixStorage):
        def list(self, folder):
            listed = iteration_folders.folder_of(tmp_path, 5)
            if folder.startswith(str(listed)) and listed.exists():
                iteration_folders.save(tmp_path, 10)
                shutil.rmtree(listed)
            return super().list(folder)

    found, rows = list_checkpoints(Beside(), str(tmp_path), StrategyLookup(STORAGE))
    assert [(row.candidate.step, row.state) for row in rows] == [
        (10, COMPLETE)
    ] and not found.fresh_start_refusal
