"""One rank writes its shard: leftovers of errors, what an error must not undo, and a second
attempt."""

import errno
import os
from dataclasses import replace

import iteration_folders
import pytest
import rank_folders
from iteration_folders import hidden, listing
from rank_folders import RUN, STORAGE, dir_at, path_of, save

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import OutOfSpaceError, SaveError
from mindresume.formats.scan import scan
from mindresume.model.manifest import record_name, run_name
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.committer import Committer, SyncSaver
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import (
    Save,
    SaveTarget,
    iteration_shard,
    mark_emergency,
    rank_shard,
    write_shard,
)
from mindresume.storage import UnknownOutcomeError, publish
from mindresume.storage.posix import PosixStorage

WORLD = 2


def shard_of(target, step, other=0.0, suffix=0):
    """``other``: added to every weight. ``suffix``: of the name of the file, in 1.0."""
    arrays = {
        name: array + array.dtype.type(other) if "weight" in name else array
        for name, array in rank_folders.tensors_of(target.rank, step).items()
    }
    if target.iterations:
        model = {name: array for name, array in arrays.items() if name == "embedding.weight"}
        return iteration_shard(
            "net",
            target,
            rank_folders.state_of(step),
            model,
            {name: array for name, array in arrays.items() if name not in model},
        )
    return rank_shard(
        rank_folders.name_of(target.rank, step, suffix), rank_folders.state_of(step), arrays
    )


class Place:
    """A folder of rank folders, or of iterations ("2.0")."""

    def __init__(self, made, root):
        self.iterations, self.root = made == "2.0", root

    def target(self, rank, storage=STORAGE, run=RUN):
        return SaveTarget(storage, str(self.root), run, rank, WORLD, iterations=self.iterations)

    def write(self, rank, storage=STORAGE, other=0.0, step=10):
        target = self.target(rank, storage)
        return write_shard(target, shard_of(target, step, other))

    def save_all(self, *steps):
        for step in steps:
            for rank in range(WORLD):
                self.write(rank, step=step)
            assert Committer(self.target(0)).poll(step) == []

    def commits(self):
        """Returns whether step 10 is committed now, and a resume takes it."""
        return Committer(self.target(0)).poll(10) == [] and chosen(self.root) == 10


@pytest.fixture(params=["1.0", "2.0"])
def place(request, tmp_path):
    return Place(request.param, tmp_path)


def chosen(root):
    choice = select_checkpoint(
        STORAGE, str(root), SingleProcess(), SelectionPolicy(every_rank=True)
    )
    return choice.chosen and choice.chosen.step


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


class OnRecord(PosixStorage):
    """Calls ``act`` at the first ``operation`` on the record of rank 1, or on its folder once it
    exists; with ``code`` the operation fails, before or after its ``effect``."""

    name = record_name(1)

    def __init__(self, operation, code=0, effect=True, act=lambda: None):
        self.operation, self.code, self.effect, self.act, self.armed = (
            operation,
            code,
            effect,
            act,
            True,
        )

    def _strike(self, operation, path, work):
        hit = (
            self.armed
            and operation == self.operation
            and (
                self.name in os.path.basename(path) or os.path.exists(os.path.join(path, self.name))
            )
        )
        if not hit:
            return work()
        self.armed = False
        if self.effect:
            result = work()
        self.act()
        if self.code:
            raise OSError(self.code, os.strerror(self.code), path)
        return result if self.effect else work()

    def write(self, path, pieces, size=0):
        return self._strike("write", path, lambda: super(OnRecord, self).write(path, pieces, size))

    def rename(self, old, new):
        return self._strike("rename", new, lambda: super(OnRecord, self).rename(old, new))

    def sync(self, folder):
        return self._strike("sync", folder, lambda: super(OnRecord, self).sync(folder))


def test_a_rename_that_did_not_happen_removes_nothing_and_can_be_tried_again(place, tmp_path):
    storage = OnRecord("rename", errno.EIO, effect=False)
    with pytest.raises(
        SaveError,
        match="step 10 may not be saved on rank 1: Input/output error.*Nothing was removed",
    ):
        place.write(1, storage)
    left = files(tmp_path)
    assert any(name.endswith(".safetensors") for name in left)
    assert place.write(1, storage).durability_error is None
    assert set(left) < set(files(tmp_path))
    place.write(0)
    assert place.commits()


# ---- an error is not an undo ---------------------------------------------------------------------


def test_a_second_try_finds_what_the_first_one_saved(place, tmp_path):
    first = place.write(1)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)}
    # whatever it has by now: this step is saved
    assert place.write(1, other=1.0) == first
    place.write(0)
    assert Committer(place.target(0)).poll(10) == []
    assert place.write(1).record == first.record  # of 2.0 the folder has another name by now
    if not place.iterations:
        assert all(
            (tmp_path / name).stat().st_mtime_ns == moment for name, moment in before.items()
        )
    else:
        assert hidden(tmp_path) == []


def test_a_second_try_flushes_the_record_whose_flush_has_failed(place):
    """Else a loss of power could undo a save that the second try calls saved."""
    storage = OnRecord("sync", errno.EIO, effect=False)
    assert place.write(1, storage).durability_error is not None
    storage.armed = True
    assert place.write(1, storage).durability_error is not None
    assert not storage.armed and place.write(1, storage).durability_error is None


def test_a_second_try_with_other_content_replaces_nothing(place, tmp_path):
    """The first record may exist without being visible yet."""
    with pytest.raises(SaveError):
        place.write(1, OnRecord("rename", errno.EIO, effect=False))
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    with pytest.raises(SaveError, match="exists already, with other content"):
        place.write(1, other=1.0)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_a_second_try_that_fails_too_leaves_the_files_of_the_first(place, tmp_path):
    storage = OnRecord("rename", errno.EIO, effect=False)
    with pytest.raises(SaveError):
        place.write(1, storage)
    before, storage = files(tmp_path), OnRecord("write", errno.EIO, effect=False)
    with pytest.raises(SaveError, match="was not saved"):
        place.write(1, storage)
    assert not storage.armed and files(tmp_path) == before


def test_files_are_removed_if_the_record_is_not_published(place, tmp_path):
    """A disk that the weights just filled has its room back."""
    with pytest.raises(OutOfSpaceError, match="step 10 was not saved on rank 1: No space left"):
        place.write(1, OnRecord("write", errno.ENOSPC, effect=False))
    assert files(tmp_path) == []
    assert [c.maybe_completed for c in scan(dir_at(tmp_path)).candidates] == [False]
    place.write(1)
    place.write(0)
    assert place.commits()


def test_no_space_for_the_record_is_an_error(place):
    with pytest.raises(OutOfSpaceError, match="may not be saved"):
        place.write(1, OnRecord("rename", errno.ENOSPC, effect=False))


def test_a_file_of_another_run_is_never_touched(tmp_path):
    save(tmp_path, 5, world=WORLD)
    before = path_of(tmp_path, 5, 1).read_bytes()
    target = Place("1.0", tmp_path).target(1, run=run_name(2, "0000bbbb"))
    with pytest.raises(SaveError, match="exists already"):
        write_shard(target, shard_of(target, 5))
    assert path_of(tmp_path, 5, 1).read_bytes() == before


def test_a_published_name_is_unsettled_from_the_rename_on(tmp_path):
    for operation, effect in (("rename", False), ("rename", True), ("sync", True)):
        target = tmp_path / f"{operation}-{effect}-{record_name(1)}"
        storage = OnRecord(operation, errno.EIO, effect)
        storage.name = record_name(1) if operation == "rename" else target.name
        with pytest.raises(UnknownOutcomeError) as raised:
            publish(storage, str(target), [b"x"], "run")
        assert raised.value.errno == errno.EIO and target.exists() is effect
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(OSError) as raised:
        publish(OnRecord("write", errno.EIO, False), str(tmp_path / record_name(1)), [b"x"], "run")
    assert not isinstance(raised.value, UnknownOutcomeError)


# ---- committed is saved --------------------------------------------------------------------------


def test_rank_0_renames_the_folder_between_the_rename_of_the_record_and_its_flush(tmp_path):
    """No fault: only the order of the two."""
    place = Place("2.0", tmp_path)
    place.save_all(5)
    place.write(0)
    committer = Committer(place.target(0), KeepLast(1))
    storage = OnRecord("sync", effect=False, act=lambda: committer.poll(10))
    target = place.target(1, storage)
    saver = SyncSaver(target)
    saver.save(Save(shard_of(target, 10)))
    (outcome,) = saver.poll()
    assert not storage.armed and committer.committed == [10]
    assert outcome.saved and outcome.error is None
    assert hidden(tmp_path) == [] and listing(tmp_path) == [
        "iteration_00000010",
        iteration_folders.TRACKER,
    ]
    saver.save(
        Save(
            shard_of(
                target,
                # at the end of the training, as no result of the first arrived
                10,
            )
        )
    )
    assert saver.poll()[0].saved and hidden(tmp_path) == []


def test_rank_0_saves_a_step_again_that_is_committed(tmp_path, clock):
    """Its writer was killed before it could report the save."""
    place = Place("2.0", tmp_path)
    place.save_all(10)
    target = place.target(0)
    saver = SyncSaver(target)
    saver.committer = Committer(target)
    clock.also = lambda now: pytest.fail("it waits")
    saver.save(Save(shard_of(target, 10)))
    assert saver.finish(600.0)[0].saved and saver.committer.pending == [] and hidden(tmp_path) == []


def test_an_emergency_save_of_a_committed_step_changes_nothing(tmp_path):
    place = Place("2.0", tmp_path)
    place.save_all(10)
    mark_emergency(place.target(1), 10)
    assert hidden(tmp_path) == [] and chosen(tmp_path) == 10


def test_metrics_that_differ_do_not_matter_to_a_second_try(place):
    target = place.target(1)
    first = write_shard(target, shard_of(target, 10))
    again = replace(
        shard_of(target, 10), state=replace(rank_folders.state_of(10), metrics={"loss": 1.0})
    )
    assert write_shard(target, again) == first
