"""A folder of either format, or of both, or one iteration alone."""
import os

import rank_folders
from iteration_folders import folder_of, foreign, save, track, write_rank
from rank_folders import RUN, STORAGE, dir_at

from mindresume.formats.scan import is_root, scan, scan_one
from mindresume.model.manifest import run_name

NEXT = run_name(2, "0000bbbb")


def found(root):
    return [(c.step, c.iteration_dir) for c in scan(dir_at(root)).candidates]


def test_roots_are_recognized(tmp_path):
    for name in ("both", "ranks", "iterations", "records", "tracker", "other"):
        (tmp_path / name).mkdir()
    rank_folders.save(tmp_path / "ranks", 5, world=1)
    save(tmp_path / "iterations", 5)
    (tmp_path / "records" / ".mindresume").mkdir()
    track(tmp_path / "tracker", 5)
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    assert [name for name in sorted(os.listdir(tmp_path)) if is_root(STORAGE, str(tmp_path / name))] == [
        "iterations", "ranks", "records", "tracker"]
    assert not is_root(STORAGE, str(folder_of(tmp_path / "iterations", 5))) and not is_root(STORAGE, str(tmp_path / "none"))


def test_two_formats(tmp_path):
    rank_folders.save(tmp_path, 5, world=2)
    rank_folders.save(tmp_path, 6, world=2)
    save(tmp_path, 10, run=NEXT)
    assert found(tmp_path) == [(10, "iteration_00000010"), (6, ""), (5, "")]


def test_the_format_that_was_saved_last_comes_first(tmp_path):
    save(tmp_path, 10)
    rank_folders.save(tmp_path, 5, world=2, run=NEXT)
    assert found(tmp_path) == [(5, ""), (10, "iteration_00000010")]


def test_an_attempt_that_never_completed_does_not_put_its_format_first(tmp_path):
    rank_folders.save(tmp_path, 5, world=2)
    write_rank(tmp_path, 10, 0, run=NEXT)
    assert [step for step, _ in found(tmp_path)] == [5, 10] and scan(dir_at(tmp_path)).notes == ()


def test_an_empty_folder_and_none(tmp_path):
    assert scan(dir_at(tmp_path)).candidates == () and scan(dir_at(tmp_path)).exists
    assert not scan(dir_at(tmp_path / "none")).exists


def test_files_that_ours_and_mindformers_wrote(tmp_path):
    foreign(tmp_path, "mf190_20_single")
    save(tmp_path, 20, run=RUN, at=3e9)
    assert found(tmp_path) == [(20, "iteration_00000020"), (15, "iteration_00000015"), (10, "iteration_00000010")]
    assert scan(dir_at(tmp_path)).expected_ranks is None


def test_a_single_iteration_folder(tmp_path):
    save(tmp_path, 10, 20)
    foreign(tmp_path, "mf190_20_single", (15,), tracked=False)
    for step, run in ((10, RUN), (15, None)):
        result = scan_one(STORAGE, str(folder_of(tmp_path, step)))
        assert [(c.step, c.run) for c in result.candidates] == [(step, run)] and result.root == str(tmp_path)
    assert scan_one(STORAGE, str(tmp_path / "none")).candidates == ()
