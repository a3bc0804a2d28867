"""A folder of either format, or of both, or one iteration alone."""

import rank_folders
from iteration_folders import foreign, save, write_rank
from rank_folders import LATER_RUN, RUN

import mindresume


def found(root):
    return [(row.step, row.iteration_dir or "") for row in mindresume.open(root).list()]


def test_two_formats(tmp_path):
    rank_folders.save(tmp_path, 5, world=2)
    rank_folders.save(tmp_path, 6, world=2)
    save(tmp_path, 10, run=LATER_RUN)
    assert found(tmp_path) == [(10, "iteration_00000010"), (6, ""), (5, "")]


def test_the_format_that_was_saved_last_comes_first(tmp_path):
    save(tmp_path, 10)
    rank_folders.save(tmp_path, 5, world=2, run=LATER_RUN)
    assert found(tmp_path) == [(5, ""), (10, "iteration_00000010")]


def test_an_attempt_that_never_completed_does_not_put_its_format_first(tmp_path):
    rank_folders.save(tmp_path, 5, world=2)
    write_rank(tmp_path, 10, 0, run=LATER_RUN)
    assert [step for step, _ in found(tmp_path)] == [5, 10] and mindresume.open(tmp_path).list().notes == ()


def test_files_that_ours_and_mindformers_wrote(tmp_path):
    foreign(tmp_path, "mf190_20_single")
    save(tmp_path, 20, run=RUN, at=3e9)
    assert found(tmp_path) == [(20, "iteration_00000020"), (15, "iteration_00000015"), (10, "iteration_00000010")]
