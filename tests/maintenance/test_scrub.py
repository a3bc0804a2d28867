"""The scrub: every flipped bit is found and no other, repairs are byte for byte, and nothing that
happens meanwhile is damage."""

import errno
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import iteration_folders
import pytest
from lease_holders import ManualClock
from rank_folders import (
    RUN,
    STORAGE,
    by_clock,
    dir_at,
    flip_bit,
    folder_contents,
    path_of,
    save,
    target_of,
)
from storages import Hooked, failing

from mindresume import runtime
from mindresume.coordination import lease as leases
from mindresume.coordination.lease import (
    SCRUBBING,
    LeaseHolder,
    acquire_read_lock,
    lease_holders,
    read_locks,
)
from mindresume.errors import RemoteError
from mindresume.formats import CheckpointDir
from mindresume.maintenance.scrub import (
    DAMAGED,
    INTACT,
    REMOVED,
    REPAIRED,
    SKIPPED,
    UNREADABLE,
    Scrubber,
    ScrubOptions,
)
from mindresume.model.manifest import FOLDER, SCRUB_RESULT, attempt_name, record_name
from mindresume.resume.candidates import COMPLETE, list_checkpoints
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.replicas import unknown_strategy
from mindresume.resume.selection import preview_selection
from mindresume.saving.garbage_collector import carry_out
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.retention import KeepLast, plan
from mindresume.saving.shard_writer import clean_own_folder
from mindresume.storage import temporary_name
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header


def rows_of(root, storage=STORAGE):
    return list_checkpoints(storage, str(root), unknown_strategy)[1]


def scrubbed(root, storage=STORAGE, progress=lambda count: None, rows=None, **options):
    """Returns {step: result}."""
    scrubber = Scrubber(CheckpointDir(storage, str(root)), ScrubOptions(**options), progress)
    with by_clock(ManualClock()):
        return {
            found.candidate.step: found
            for found in scrubber.scrub(rows_of(root, storage) if rows is None else rows)
        }


def states(root, **options):
    return {step: found.state for step, found in scrubbed(root, **options).items()}


def chosen(root, full=True):
    """Returns the step that a resume takes."""
    policy = SelectionPolicy(4, every_rank=True, full=full)
    found = preview_selection(STORAGE, str(root), policy).choice.chosen
    return found and found.step


def result_path(root, step):
    return Path(root) / FOLDER / attempt_name(step, RUN) / SCRUB_RESULT


def flip_in(path, name):
    """Flips a bit of one tensor."""
    with path.open("rb") as file:
        start, _ = read_header(file, str(path)).tensors[name].ranges[0]
    flip_bit(path, start)


def without_results(root):
    return {
        path: content
        for path, content in folder_contents(root).items()
        if path.name != SCRUB_RESULT
    }


# ---- finding -------------------------------------------------------------------------------------


def test_an_error_on_the_way_is_no_rot(tmp_path):
    """A bit that flips in memory or in a cable is right in the second reading."""
    save(tmp_path, 5)
    path, flips = path_of(tmp_path, 5, 1), [1]

    class Flaky(PosixStorage):
        def open(self, name):
            file = super().open(name)
            if name == str(path) and flips:
                flips.pop()
                content = bytearray(file.read())
                content[-3] ^= 1
                import io

                return io.BytesIO(bytes(content))
            return file

    (found,) = scrubbed(tmp_path, Flaky()).values()
    assert (
        not flips
        and (found.state, found.damaged) == (INTACT, ())
        and str(path.name) in found.notes[0]
    )


def test_records_that_a_removal_moves_for_a_moment_are_not_damaged(tmp_path):
    """A removal renames the folder of records, sees the read lock of the scrub, and renames it
    back."""
    save(tmp_path, 5)
    moved = [4 * 2]  # two readings of four ranks

    class Moved(PosixStorage):
        def open(self, name):
            if (
                os.path.basename(name).startswith("rank_0000")
                and any(row.purpose == SCRUBBING for row in lease_holders(dir_at(tmp_path)))
                and moved[0]
            ):
                moved[0] -= 1
                raise FileNotFoundError(2, "No such file or directory", name)
            return super().open(name)

    (found,) = scrubbed(tmp_path, Moved(), repairs=True).values()
    assert (
        moved == [0]
        and (found.state, found.damaged) == (SKIPPED, ())
        and not result_path(tmp_path, 5).exists()
    )
    assert states(tmp_path) == {5: INTACT} and chosen(tmp_path, full=False) == 5


def test_an_error_in_the_second_reading_of_another_file_is_no_damage(tmp_path):
    iteration_folders.save(tmp_path, 5)
    damaged, intact = (
        str(iteration_folders.weights_of(tmp_path, 5, 1, kind)) for kind in ("model", "opt")
    )
    flip_bit(Path(damaged))
    opened = []

    class Failing(PosixStorage):
        def open(self, name):
            opened.append(name)
            if name == intact and opened.count(damaged) == 2 and opened.count(intact) == 2:
                raise OSError(5, "Input/output error", name)
            return super().open(name)

    (found,) = scrubbed(tmp_path, Failing()).values()
    assert opened.count(intact) > 2 and [row.file for row in found.damaged] == [
        os.path.relpath(damaged, tmp_path)
    ]


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_cannot_be_read_is_not_damaged(tmp_path, error):
    """Whatever is known of it before stays known, and the next scrub and start read it again."""
    for step in (5, 10):
        save(tmp_path, step)
    storage = failing(path_of(tmp_path, 10, 3).name, "open", number=error)
    found = scrubbed(tmp_path, storage)
    assert (found[5].state, found[10].state) == (INTACT, UNREADABLE) and found[10].damaged[
        0
    ].is_unreadable
    assert chosen(tmp_path) == 10 and rows_of(tmp_path)[0].state == COMPLETE
    assert states(tmp_path) == {5: INTACT, 10: INTACT}
    flip_bit(path_of(tmp_path, 10, 3))
    assert states(tmp_path)[10] == DAMAGED
    # what was proved stays
    assert scrubbed(tmp_path, storage)[10].state == UNREADABLE and chosen(tmp_path, full=False) == 5


# ---- repair --------------------------------------------------------------------------------------


class Bucket:
    """An object store of a copy of the folder."""

    def __init__(self, root, step, copy):
        self.name, self.copy = attempt_name(step, RUN), shutil.copytree(root, copy)
        self.remote = RemoteCheckpoints(self, "s3://bucket/checkpoint")

    def _path(self, url):
        return self.copy / url.removeprefix(f"s3://bucket/checkpoint/{self.name}/")

    def read(self, url):
        try:
            return self._path(url).read_bytes()
        except OSError as error:
            raise RemoteError(str(error)) from error

    def download(self, url, path):
        Path(path).write_bytes(self.read(url))


def test_the_bucket_repairs_weights_without_replicas_and_records(tmp_path):
    root = tmp_path / "checkpoint"
    save(root, 5, replicas=4)
    bucket, before = Bucket(root, 5, tmp_path / "bucket"), folder_contents(root)
    flip_in(path_of(root, 5, 1), "layer.bias")
    flip_bit(root / FOLDER / attempt_name(5, RUN) / record_name(3))
    assert (
        states(root, repairs=True, bucket=bucket.remote) == {5: REPAIRED}
        and without_results(root) == before
    )
    flip_in(path_of(root, 5, 1), "layer.bias")
    flip_bit(path_of(bucket.copy, 5, 1))
    found = scrubbed(root, repairs=True, bucket=bucket.remote)[5]
    assert found.state == DAMAGED and any("other bytes" in note for note in found.notes)
    path_of(bucket.copy, 5, 1).unlink()
    assert states(root, repairs=True, bucket=bucket.remote) == {5: DAMAGED}
    assert [path for path in root.rglob("*.mindresume-tmp")] == []


def test_an_iteration_is_repaired_from_the_bucket(tmp_path):
    root = tmp_path / "checkpoint"
    iteration_folders.save(root, 5)
    base = iteration_folders.folder_of(root, 5)
    bucket, before = Bucket(base, 5, tmp_path / "bucket"), folder_contents(root)
    flip_bit(iteration_folders.weights_of(root, 5, 1, "opt"))
    assert (
        states(root, repairs=True, bucket=bucket.remote) == {5: REPAIRED}
        and without_results(root) == before
    )


class DiedError(BaseException):
    """The process died."""


class Dying(Hooked):
    """Performs so many changes, and the last of them half; then the process is dead."""

    def __init__(self, changes):
        super().__init__(self._change)
        self.left = changes

    def _change(self, operation, path):
        if operation in ("write", "rename", "sync", "remove", "make_folder"):
            if self.left == 0:
                if operation == "write":
                    Path(path).write_bytes(b"7 bytes")  # nothing removes it
                raise DiedError
            self.left -= 1


def test_a_death_at_any_operation_leaves_the_old_file_or_the_repaired_one(tmp_path):
    whole = tmp_path / "whole"
    save(whole, 5)
    good = path_of(whole, 5, 1).read_bytes()
    for changes in range(100):
        root = shutil.copytree(whole, tmp_path / str(changes))
        path = path_of(root, 5, 1)
        flip_bit(path)
        bad = path.read_bytes()
        try:
            finished = scrubbed(root, Dying(changes), repairs=True)[5].state == REPAIRED
        except DiedError:
            finished = False
        assert path.read_bytes() in (good, bad)
        others = {
            name.relative_to(root): content
            for name, content in without_results(root).items()
            if "claim-" not in name.name and not name.name.endswith("-tmp") and name != path
        }
        assert others == {
            name.relative_to(whole): content
            for name, content in folder_contents(whole).items()
            if name != path_of(whole, 5, 1)
        }
        # of this process, which is alive after all
        for holder in lease_holders(dir_at(root)):
            leases.Lease(dir_at(root), replace(holder, pid=2**22 + 1)).publish()
        assert states(root, repairs=True)[5] in (REPAIRED, INTACT) and path.read_bytes() == good
        assert lease_holders(dir_at(root)) == []
        clean_own_folder(replace(target_of(root, 1, 4), run="0009-0000aaaa"))  # the next job
        assert [name for name in (root / "rank_1").iterdir() if name.name.endswith("-tmp")] == []
        if finished:
            break
    assert finished and changes > 5


# ---- meanwhile -----------------------------------------------------------------------------------


def test_retention_removes_nothing_that_is_being_read(tmp_path):
    for step in (5, 10):
        save(tmp_path, step)
    seen = []

    def remove(count):
        if not seen:
            made = plan(dir_at(tmp_path), KeepLast(1), read_locks(dir_at(tmp_path)))
            seen.append([c.step for c in made.read_locked])
            carry_out(dir_at(tmp_path), made)

    (old,) = [row for row in rows_of(tmp_path) if row.candidate.step == 5]
    assert scrubbed(tmp_path, progress=remove, rows=[old])[5].state == INTACT and seen == [[5]]
    assert [row.candidate.step for row in rows_of(tmp_path)] == [10, 5]
    assert read_locks(dir_at(tmp_path)) == {}
    carry_out(dir_at(tmp_path), plan(dir_at(tmp_path), KeepLast(1)))
    # and no result is left over
    assert [row.candidate.step for row in rows_of(tmp_path)] == [10]
    assert scrubbed(tmp_path, rows=[old])[5].state == REMOVED


def test_what_is_removed_by_hand_is_not_brought_back_from_the_bucket(tmp_path):
    root = tmp_path / "checkpoint"
    iteration_folders.save(root, 5)
    base = iteration_folders.folder_of(root, 5)
    bucket, rows = Bucket(base, 5, tmp_path / "bucket"), rows_of(root)
    found = scrubbed(
        root,
        progress=lambda count: shutil.rmtree(base, ignore_errors=True),
        rows=rows,
        repairs=True,
        bucket=bucket.remote,
    )[5]
    assert found.state == REMOVED and not base.exists()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_signal_leaves_no_result_and_no_lock(tmp_path, count):
    """The command ends with an exception at any moment (``stopped_by_signals``)."""
    save(tmp_path, 5)
    flip_bit(path_of(tmp_path, 5, 1))
    before, left = folder_contents(tmp_path), [count]

    def read(size):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scrubbed(tmp_path, progress=read, repairs=True)
    assert folder_contents(tmp_path) == before


def test_a_full_disk_is_an_error_of_the_scrub_and_no_damage(tmp_path, monkeypatch):
    save(tmp_path, 5)
    flip_bit(path_of(tmp_path, 5, 1))
    bad = path_of(tmp_path, 5, 1).read_bytes()

    full = failing("net_rank", "write", number=errno.ENOSPC)
    found = scrubbed(tmp_path, full, repairs=True)[5]
    assert found.state == DAMAGED and any("No space left" in note for note in found.notes)
    assert path_of(tmp_path, 5, 1).read_bytes() == bad


# ---- one at a time -------------------------------------------------------------------------------


def other_lock(root, step, **fields):
    """Publishes the lock of another scrub; returns its path."""
    holder = leases.holder_of_this_process(SCRUBBING, holds=(attempt_name(step, RUN),))
    holder = replace(holder, run="0000-00000000", **fields)
    lock = leases.Lease(dir_at(root), holder)
    lock.publish()
    return Path(leases.lease_path(dir_at(root), holder.run))


def test_a_second_scrub_leaves_the_folder_to_the_first(tmp_path):
    save(tmp_path, 5)
    path = other_lock(tmp_path, 5, beat=1)
    found = scrubbed(tmp_path)[5]
    assert (
        found.state == SKIPPED
        and str(os.getpid()) in found.reason
        and not result_path(tmp_path, 5).exists()
    )
    assert [holder.purpose for holder in lease_holders(dir_at(tmp_path))] == [SCRUBBING]
    path.unlink()
    assert states(tmp_path) == {5: INTACT}


def test_the_lock_of_a_dead_scrub_is_removed(tmp_path):
    save(tmp_path, 5)
    path = other_lock(tmp_path, 5, pid=2**22 + 1)
    assert states(tmp_path) == {5: INTACT} and not path.exists()


@pytest.mark.parametrize("is_alive", [True, False])
def test_the_scrub_of_another_machine_is_watched(tmp_path, clock, is_alive):
    save(tmp_path, 5)
    path = other_lock(tmp_path, 5, machine="another", beat=4)

    def beat(now):
        holder = LeaseHolder.read(STORAGE, str(path))
        leases.Lease(dir_at(tmp_path), replace(holder, beat=holder.beat + 1)).publish()

    if is_alive:
        clock.also = beat
    found = list(Scrubber(dir_at(tmp_path)).scrub(rows_of(tmp_path)))
    assert clock.now == 3 * 15.0 and [row.state for row in found] == [
        SKIPPED if is_alive else INTACT
    ]
    assert path.exists() == is_alive


def test_of_two_that_begin_together_one_goes_on(tmp_path, clock):
    save(tmp_path, 5)
    candidate = rows_of(tmp_path)[0].candidate
    locks = [
        acquire_read_lock(dir_at(tmp_path), candidate.name, candidate.commit_dir, purpose=SCRUBBING)
        for _ in range(2)
    ]
    first, second = sorted(locks, key=lambda lock: lock.run)
    assert Scrubber(dir_at(tmp_path)).other_scrub(second).run == first.run
    assert Scrubber(dir_at(tmp_path)).other_scrub(first) is None and clock.now == 0.0
    for lock in locks:
        lock.release()


def test_a_new_checkpoint_is_left_out_until_it_is_old(tmp_path):
    save(tmp_path, 5)  # at 1005 s
    for now, state in ((2000.0, SKIPPED), (9000.0, INTACT), (9100.0, SKIPPED)):
        with runtime.answers({runtime.time: lambda now=now: now}):
            scrubber = Scrubber(dir_at(tmp_path), ScrubOptions(older_than=3600))
            assert [found.state for found in scrubber.scrub(rows_of(tmp_path))] == [state]


def test_a_replaced_file_is_read_soon(tmp_path):
    save(tmp_path, 5)
    path = path_of(tmp_path, 5, 0)
    good = path.read_bytes()
    flip_bit(path)
    options = {"older_than": 1e6}
    assert states(tmp_path) == {5: DAMAGED} and states(tmp_path, **options) == {5: DAMAGED}
    path.with_name("new").write_bytes(good)
    os.replace(path.with_name("new"), path)
    assert states(tmp_path, **options) == {5: INTACT} and states(tmp_path, **options) == {
        5: SKIPPED
    }


@pytest.mark.parametrize("linked", ["the folder of records", "the iteration folder"])
def test_nothing_is_written_through_a_link(tmp_path, linked):
    """An archive that is linked into the folder of checkpoints is not ours."""
    root, archive = tmp_path / "checkpoint", tmp_path / "archive"
    if linked == "the folder of records":
        save(root, 5, replicas=1)
        folder = root / FOLDER / attempt_name(5, RUN)
        flip_bit(path_of(root, 5, 1))
    else:
        iteration_folders.save(root, 5, 10)
        folder = iteration_folders.folder_of(root, 5)
    folder.rename(archive)
    folder.symlink_to(archive)
    before = folder_contents(archive)
    found = scrubbed(root, repairs=True)[5]
    assert (
        found.state == SKIPPED
        and "symbolic link" in found.reason
        and folder_contents(archive) == before
    )


@pytest.mark.parametrize("fmt", ["rank folders", "iteration"])
def test_what_a_killed_repair_left_is_removed_by_the_next_scrub_or_job(tmp_path, fmt):
    """A repair leaves a file as large as a shard. In an iteration folder nothing ever removed
    it."""
    if fmt == "iteration":
        iteration_folders.save(tmp_path, 5)
        path, target = (
            iteration_folders.weights_of(tmp_path, 5),
            iteration_folders.target_of(tmp_path, run="0002-0000bbbb"),
        )
    else:
        save(tmp_path, 5, replicas=1)
        path, target = path_of(tmp_path, 5, 0), target_of(tmp_path, 0, 4, "0002-0000bbbb")
    left = Path(temporary_name(str(path), "0000-0000cccc"))

    left.write_bytes(b"half of a shard")
    assert states(tmp_path) == {5: INTACT} and not left.exists()
    left.write_bytes(b"half of a shard")
    assert clean_own_folder(target) == [left.name] and not left.exists()
    left.write_bytes(b"of a reader that goes on")
    leases.Lease(
        dir_at(tmp_path), replace(leases.holder_of_this_process("loading"), run="0000-0000cccc")
    ).publish()
    assert states(tmp_path) == {5: INTACT} and left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_repair_by_root_leaves_the_files_to_their_owner(tmp_path):
    """A job of that user could neither read nor replace them later."""
    save(tmp_path, 5)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 1234, 2345)
    os.chmod(path_of(tmp_path, 5, 1), 0o640)
    flip_bit(path_of(tmp_path, 5, 1))
    path_of(tmp_path, 5, 2).unlink()
    before = os.umask(0o077)
    try:
        assert states(tmp_path, repairs=True) == {5: REPAIRED}
    finally:
        os.umask(before)
    found = [
        os.stat(path)
        for path in (path_of(tmp_path, 5, 1), path_of(tmp_path, 5, 2), result_path(tmp_path, 5))
    ]
    assert [(status.st_uid, status.st_gid) for status in found] == [(1234, 2345)] * 3
    assert [stat.S_IMODE(status.st_mode) for status in found] == [0o640, 0o644, 0o644]
