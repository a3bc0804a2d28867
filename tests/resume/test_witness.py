"""Records that rank 0's host lists late are waited for, if the other ranks see their own."""
import os

from folders import STORAGE, Ranks, save, write_rank

from mindresume.agree import Solo
from mindresume.manifest import FOLDER, attempt_name, run_name
from mindresume.resume.witness import PATIENCE, settle
from mindresume.store.storage import PosixStorage


class Late(PosixStorage):
    """Rank 0's host: it believes what it listed first for 30 s of ``now``."""

    def __init__(self, stale):
        self.now, self.stale = 0.0, stale

    def list(self, folder):
        return self.stale.get(folder, []) if self.now < 30 and folder in self.stale else super().list(folder)

    def sleep(self, seconds):
        self.now += seconds


def ask(root, storage, ranks=3):
    def work(group):
        return settle(storage if group.rank == 0 else STORAGE, str(root), group, lambda: storage.now, storage.sleep)
    return Ranks(ranks).run(work)


def test_nothing_late_nothing_waited(tmp_path):
    save(tmp_path, 5, 3)
    assert ask(tmp_path, Late({})) == [0, 0, 0]


def test_records_that_appear_late(tmp_path):
    save(tmp_path, 5, 3)
    save(tmp_path, 10, 3)
    attempt = str(tmp_path / FOLDER / attempt_name(10, run_name(1, "0000aaaa")))
    assert ask(tmp_path, Late({attempt: ["rank_00000.json"]})) == [30, 0, 0]


def test_a_whole_folder_that_appears_late(tmp_path):
    save(tmp_path, 5, 3)
    assert ask(tmp_path, Late({str(tmp_path / FOLDER / attempt_name(5, run_name(1, "0000aaaa"))): []})) == [30, 0, 0]


def test_a_save_that_never_completed_is_not_waited_for(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path, 5, rank, 3)
    assert ask(tmp_path, Late({})) == [0, 0, 0]


def test_at_most_until_patience_is_over(tmp_path):
    save(tmp_path, 5, 3)
    attempt = str(tmp_path / FOLDER / os.listdir(tmp_path / FOLDER)[0])
    storage = Late({})
    storage.list = lambda folder: [] if folder == attempt else PosixStorage.list(storage, folder)
    assert PATIENCE <= ask(tmp_path, storage)[0] <= PATIENCE + 1


def test_an_empty_or_absent_folder(tmp_path):
    assert ask(tmp_path, Late({})) == [0, 0, 0]
    assert ask(tmp_path / "none", Late({})) == [0, 0, 0]
    assert settle(STORAGE, str(tmp_path), Solo()) == 0


def test_fewer_ranks_than_saved_it(tmp_path):
    save(tmp_path, 5, 4)
    assert ask(tmp_path, Late({}), ranks=2) == [0, 0]
