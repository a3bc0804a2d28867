"""A folder that cannot be listed is refused with its reason, and the other checkpoints are used. It
never counts as absent: no training starts afresh beside it, and nothing is removed because of
it."""

import errno
import os
from pathlib import Path

import iteration_folders
import job_choices
import pytest
from rank_folders import EVERY_RUN, RUN, STORAGE, path_of, save, write_foreign, write_rank
from reshard.plans import MODEL, Plan, random_tensors
from reshard.plans import foreign as foreign_of_plan
from storages import Hooked, os_error

from mindresume.api.results import info_of
from mindresume.coordination.lease import ReadLocks, known_lease_holders
from mindresume.coordination.storage_topology import newest_committed
from mindresume.errors import CollectiveError, NoUsableCheckpointError
from mindresume.formats import MINDFORMERS, OURS, CheckpointDir
from mindresume.formats.iterations import intent_name
from mindresume.formats.scan import scan
from mindresume.model.manifest import FOLDER, TRASH, attempt_name, run_name
from mindresume.reshard.strategy_store import StrategyLookup
from mindresume.resume.candidates import list_checkpoints
from mindresume.resume.sources import CheckpointSources
from mindresume.saving import iteration_publisher
from mindresume.saving.committer import Committer
from mindresume.saving.garbage_collector import empty_trash
from mindresume.saving.retention import KeepLast, plan
from mindresume.storage.posix import PosixStorage
from tests.strategy_files import write_strategy


class Closed(PosixStorage):
    """Fails to list, stat or read ``path`` and anything below it (``nothing``: only the listing
    fails; status and contents are readable)."""

    def __init__(self, path, code=errno.EACCES, only_list=False):
        self.path, self.code, self.only_list = str(path), code, only_list

    def _check(self, path, below=False):
        if path == self.path and not below or path.startswith(self.path + os.sep):
            raise OSError(self.code, os.strerror(self.code), path)

    def list(self, folder):
        self._check(folder)
        return super().list(folder)

    def status(self, path):
        if not self.only_list:
            # its own status is a matter of the folder it is in
            self._check(path, below=True)
        return super().status(path)

    def open(self, path):
        if not self.only_list:
            self._check(path)
        return super().open(path)


def choose(storage, root, world=2):
    sources = CheckpointSources(StrategyLookup(storage))
    return job_choices.choose(root, world, storage=storage, sources=sources, max_failed_loads=2)


def listed(storage, root):
    return list_checkpoints(storage, str(root), StrategyLookup(storage))


def seen_by(storage, root):
    return CheckpointDir(storage, str(root))


def save_rank_folders(root):
    """Saves steps 5 and 10 of ours, step 20 of mindformers, and unrelated files."""
    save(root, 5, 2)
    save(root, 10, 2)
    write_foreign(root, 20, 2, suffix=1)
    (root / "rank_7").mkdir()
    (root / FOLDER / "trial-step-0000000010-run-0001-0000aaaa").write_text("1 /x")


def save_iteration_folders(root):
    """Saves steps 5 and 10 of ours, step 15 of mindformers, and an unfinished step 20 of ours."""
    iteration_folders.save(root, 5, 10)
    iteration_folders.foreign(root, steps=(15,))
    iteration_folders.write_all(root, 20)


def both(root):
    save_rank_folders(root)
    save_iteration_folders(root)


@pytest.fixture(params=[save_rank_folders, both])
def root(tmp_path, request):
    root = tmp_path / "checkpoint"
    root.mkdir()
    request.param(root)
    (tmp_path / "strategy").mkdir()
    return root


@pytest.mark.parametrize("code, only_list", [(errno.EACCES, True), (errno.EIO, False)])
def test_the_other_checkpoints_are_used_if_one_folder_is_unlistable(root, code, only_list):
    def usable_rows(storage):
        rows = list_checkpoints(storage, str(root), StrategyLookup(storage), 2)[1]
        return rows, {row.candidate.step for row in rows if not row.problem}

    _, steps = usable_rows(STORAGE)
    for folder in [root.parent / "strategy", *sorted(filter(Path.is_dir, root.rglob("*")))]:
        storage = Closed(folder, code, only_list)
        rows, usable = usable_rows(storage)
        assert all(info_of(seen_by(storage, root), row) for row in rows)
        assert known_lease_holders(seen_by(storage, root)) == []
        assert usable <= steps, folder
        try:
            assert choose(storage, root).chosen.step in steps
        except NoUsableCheckpointError as error:  # never a fresh start
            assert "cannot be" in str(error), folder
        if folder.name.startswith(("iteration_", "rank_7", "step-", "strategy")):
            lost = 0 if folder.name in ("rank_7", "strategy") else 1
            assert len(usable) >= len(steps) - lost, folder
        if folder.parent == root or folder.parent.parent == root and folder.name != "strategy":
            problems = [str(row.problem) for row in rows if row.problem]
            assert any(folder.name in text for text in problems) or usable == steps, folder


@pytest.mark.parametrize(
    "fill, code", [(save_rank_folders, errno.EACCES), (save_iteration_folders, errno.EIO)]
)
def test_an_unlistable_root_is_not_an_empty_one(tmp_path, fill, code):
    fill(tmp_path / "checkpoint")
    with pytest.raises((OSError, CollectiveError), match=os.strerror(code)):
        choose(Closed(tmp_path / "checkpoint", code), tmp_path / "checkpoint")


@pytest.mark.parametrize("name", [FOLDER, "rank_0", "iteration_00000005"])
def test_a_folder_that_cannot_be_listed_prevents_a_fresh_start(tmp_path, name):
    """No other checkpoint is visible."""
    (tmp_path / name).symlink_to(tmp_path / name)
    with pytest.raises(NoUsableCheckpointError, match=f"{name} cannot be listed"):
        choose(STORAGE, tmp_path, world=1)


def test_the_folder_of_the_job_that_is_a_link_to_itself_is_no_empty_one(tmp_path):
    """What the job saved there is unknown, so an older folder beside it is not taken."""
    (tmp_path / "checkpoint").symlink_to(tmp_path / "checkpoint")
    save_rank_folders(tmp_path / "older")
    with pytest.raises((OSError, CollectiveError), match=os.strerror(errno.ELOOP)):
        choose(STORAGE, tmp_path)


def test_a_folder_that_is_shown_late_is_searched_below(tmp_path):
    """A network file system shows it from the second look on."""
    looks = []

    class ShownLate(PosixStorage):
        def status(self, path):
            looks.append(path)
            return None if looks.count(str(tmp_path)) == 1 else super().status(path)

    save_rank_folders(tmp_path / "checkpoint")
    assert choose(ShownLate(), tmp_path).chosen is not None


@pytest.mark.parametrize("tracked", [True, False])
def test_the_newest_iteration_is_a_link_to_itself(tmp_path, tracked):
    iteration_folders.save(tmp_path, 5, 10)
    (tmp_path / "iteration_00000015").symlink_to(tmp_path / "iteration_00000015")
    if tracked:
        iteration_folders.track(tmp_path, 15)
    else:
        (tmp_path / iteration_folders.TRACKER).unlink()
    job_choices.takes(tmp_path, 10, (15, "cannot be listed"))


def test_unlistable_records_do_not_count_as_absent(tmp_path):
    """Our iteration with unlistable records is not an iteration of mindformers, which could not be
    verified."""
    iteration_folders.save(tmp_path, 5, 10)
    storage = Closed(iteration_folders.folder_of(tmp_path, 10) / FOLDER)
    choice = choose(storage, tmp_path)
    assert choice.chosen.step == 5 and choice.chosen.committed


def test_records_unlistable_a_moment_ago_do_not_count_as_absent(tmp_path):
    iteration_folders.save(tmp_path, 5, 10)
    records = str(iteration_folders.folder_of(tmp_path, 10) / FOLDER)
    errors = [os_error(errno.ESTALE)]

    def close_once(operation, path):
        if (operation, path) == ("list", records) and errors:
            raise errors.pop()

    found = scan(seen_by(Hooked(close_once), tmp_path)).candidates
    assert not errors and [(c.step, c.origin, c.listing_error) for c in found] == [
        (
            10,
            MINDFORMERS,
            f"iteration_00000010/{FOLDER} cannot be listed: it holds records that could not be "
            f"listed a moment ago",
        ),
        (5, OURS, ""),
    ]


def test_our_files_do_not_count_as_mindformers_files_if_the_records_are_unlistable(tmp_path):
    save(tmp_path, 5, 2)
    write_rank(tmp_path, 10, 0, 2)
    write_rank(tmp_path, 10, 1, 2)
    with pytest.raises(NoUsableCheckpointError, match=f"{FOLDER} cannot be listed"):
        choose(Closed(tmp_path / FOLDER, only_list=True), tmp_path)


def test_an_unlistable_folder_beside_the_checkpoints_is_ignored(tmp_path):
    """The given folder is one level too high; it contains the checkpoint directory and an unrelated
    private folder."""
    save(tmp_path / "elsewhere", 5, 2)
    (tmp_path / "private").mkdir()
    assert choose(Closed(tmp_path / "private"), tmp_path).chosen.step == 5


def test_an_unlistable_folder_alone_is_an_error(tmp_path):
    (tmp_path / "private" / "checkpoint").mkdir(parents=True)
    with pytest.raises(
        (OSError, CollectiveError, NoUsableCheckpointError), match=os.strerror(errno.EACCES)
    ):
        choose(Closed(tmp_path / "private"), tmp_path)


def test_a_strategy_that_cannot_be_listed(tmp_path):
    root = tmp_path / "checkpoint"
    save(root, 5, 2)
    four = Plan.parse("dp2tp2", MODEL)
    foreign_of_plan(root, four, random_tensors(MODEL))
    write_strategy(four.strategy(), str(tmp_path / "strategy"))
    storage = Closed(tmp_path / "strategy")
    assert listed(storage, root)[1]


# ---- removal -------------------------------------------------------------------------------------

LATER = run_name(2, "0000bbbb")


def test_retention_keeps_unlistable_saves_and_removes_the_rest(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step, 2)
    committer = save(tmp_path, 20, 2, run=LATER, suffix=1)
    closed = tmp_path / FOLDER / attempt_name(10, RUN)
    committer = Committer(committer.target, KeepLast(1))
    object.__setattr__(committer.target, "storage", Closed(closed, only_list=True))
    assert sorted(committer.prune()) == [5, 15]
    assert (
        path_of(tmp_path, 10, 0).exists()
        and closed.exists()
        and not path_of(tmp_path, 5, 0).exists()
    )


def test_a_plan_gives_reasons(tmp_path):
    for step in (5, 10):
        save(tmp_path, step, 2)
    closed = tmp_path / FOLDER / attempt_name(5, RUN)
    made = plan(seen_by(Closed(closed, only_list=True), tmp_path), KeepLast(1), ended=EVERY_RUN)
    assert not made.to_delete and not made.orphans
    assert "cannot be listed" in made.reasons[str(closed)]


def test_emptying_trash_keeps_files_that_an_unlistable_attempt_may_reference(tmp_path):
    """Rank folders were deleted by hand, so that two steps have files of one name; the records of
    the later one are closed."""
    save(tmp_path, 5, 2)
    trash = tmp_path / FOLDER / (TRASH + attempt_name(5, RUN))
    (tmp_path / FOLDER / attempt_name(5, RUN)).rename(tmp_path / "aside")
    for rank in range(2):
        path_of(tmp_path, 5, rank).unlink()
    save(tmp_path, 5, 2, run=LATER)
    (tmp_path / "aside").rename(trash)
    closed = Closed(tmp_path / FOLDER / attempt_name(5, LATER), only_list=True)
    directory = seen_by(closed, tmp_path)
    empty_trash(directory, ReadLocks(directory))
    assert (
        path_of(tmp_path, 5, 0).exists() and path_of(tmp_path, 5, 1).exists() and not trash.exists()
    )


def test_an_intent_is_kept_while_its_iteration_cannot_be_listed(tmp_path):
    """The job was killed before it changed the tracker to step 10; the next job cannot see that
    step, the one after it can."""
    iteration_folders.save(tmp_path, 5, 10)
    iteration_folders.track(tmp_path, 5)
    iteration_folders.intend(tmp_path, 10)
    committer = Committer(iteration_folders.target_of(tmp_path, run=LATER))
    storage = Closed(iteration_folders.folder_of(tmp_path, 10))
    object.__setattr__(committer.target, "storage", storage)
    committer.recover()
    assert (tmp_path / FOLDER / intent_name(10)).exists() and iteration_folders.tracker(
        tmp_path
    ) == "5"
    storage = STORAGE
    candidates = listed(storage, tmp_path)[0].candidates
    iteration_publisher.finish_tracker(seen_by(storage, tmp_path), candidates, LATER)
    assert (
        not (tmp_path / FOLDER / intent_name(10)).exists()
        and iteration_folders.tracker(tmp_path) == "10"
    )


def test_an_unlistable_attempt_is_not_offered_to_other_nodes(tmp_path):
    save(tmp_path, 5, 2)
    save(tmp_path, 10, 2)
    closed = Closed(tmp_path / FOLDER / attempt_name(10, RUN))
    assert newest_committed(seen_by(closed, tmp_path)) == [attempt_name(5, RUN)]
