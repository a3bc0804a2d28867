"""A training with a tier: opening, its end, an end with an error, left-over tiers of dead jobs."""

import errno
import os
import shutil
import threading
from dataclasses import asdict, replace

import pytest
from manager_jobs import Job, committed, end_jobs, spoil
from memory_tiers import make_owned_tier, tier_of
from rank_folders import RUN, STORAGE, Ranks, dir_at, save
from storages import Hooked, os_error

from mindresume import runtime
from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.events import Notice, TierRefused, TierSaved
from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.model.manifest import FOLDER, attempt_name, run_name
from mindresume.saving.memory_tier import directory, opening
from mindresume.saving.memory_tier.directory import (
    MARK,
    OWNER,
    DiskNote,
    DiskNotes,
    TierMark,
    TierOwner,
    find_tier,
    make_mark,
    parent_of_tiers,
    read_mark,
    this_process,
)
from mindresume.saving.memory_tier.opening import groups_of, newest_run, remove_leftovers
from mindresume.saving.remote_checkpoints import number_runs
from mindresume.settings import MemoryTierSettings, Settings
from mindresume.storage import publish_json
from mindresume.storage.posix import PosixStorage

RUN2 = run_name(2, "0000bbbb")


@pytest.fixture(autouse=True)
def settled(memory):
    """Ends the jobs before their memory is removed, or their background work would make its folders
    again."""
    yield
    end_jobs()


def job_with_tier(root, memory, every=2, disk=100, **options):
    settings = Settings(memory_tier=MemoryTierSettings(every, memory, **options.pop("tier", {})))
    return Job(root, settings=settings, every=disk, leases=options.pop("leases", {}), **options)


def held(root):
    return [
        candidate.step
        for candidate in scan_records(dir_at(tier_of(root)))[0]
        if candidate.problem is None
    ]


@pytest.mark.parametrize("iterations", [False, True])
def test_a_training_saves_into_memory_more_often_than_to_disk(tmp_path, memory, iterations):
    job = job_with_tier(tmp_path, memory, disk=5, iterations=iterations).steps(9)
    job.manager._tier.stop()
    assert committed(tmp_path) == [5] and held(tmp_path) == [8, 6]
    assert [event.step for event in job.emitted(TierSaved)] == [2, 4, 6, 8]
    assert job.collected.count(5) == 1 and find_tier(dir_at(tmp_path)) == (tier_of(tmp_path), "")


def test_the_end_of_a_training_frees_the_memory(tmp_path, memory):
    job = job_with_tier(tmp_path, memory).steps(5).end()
    assert committed(tmp_path) == [5] and not job.emitted(TierRefused)
    assert not os.path.exists(tier_of(tmp_path)) and find_tier(dir_at(tmp_path)) == ("", "")


@pytest.mark.parametrize("iterations", [False, True])
@pytest.mark.parametrize("kind", [False, "thread"])
def test_an_end_with_an_error_writes_what_memory_has_to_disk(tmp_path, memory, kind, iterations):
    job = job_with_tier(tmp_path, memory, disk=5, async_save=kind, iterations=iterations).steps(9)
    job.manager.finish_after_error()
    assert committed(tmp_path) == [5, 8] and held(tmp_path) == [8, 6]


def test_an_end_with_an_error_writes_nothing_if_the_disk_is_as_new_or_it_is_switched_off(
    tmp_path, memory
):
    job = job_with_tier(tmp_path / "a", memory, disk=4).steps(9)
    job.manager.finish_after_error()
    assert committed(tmp_path / "a") == [4, 8]
    job = job_with_tier(tmp_path / "b", memory, disk=5, tier={"write_after_error": 0}).steps(9)
    job.manager.finish_after_error()
    assert committed(tmp_path / "b") == [5]


def test_an_end_with_an_error_of_the_disk_keeps_the_memory(tmp_path, memory):
    job = job_with_tier(tmp_path, memory).steps(5)
    spoil(tmp_path)
    with pytest.raises(Exception, match="was not saved"):
        job.manager.settings = replace(job.manager.settings, on_save_error="raise")
        job.manager.policy.settings = job.manager.settings
        job.end()
    assert held(tmp_path) == [4, 2]


def test_without_a_tmpfs_one_line_says_so_and_the_training_goes_on(tmp_path, memory):
    for number, folder in enumerate((str(tmp_path), os.path.join(memory, "missing"))):
        root = tmp_path / str(number)
        job = job_with_tier(root, folder).steps(5).end()
        (refused,) = job.emitted(TierRefused)
        assert refused.step is None and folder in refused.reason and committed(root) == [5]


@pytest.mark.parametrize("looks", [5, 1000])
def test_a_mark_that_another_host_made_is_visible_later(tmp_path, memory, monkeypatch, looks):
    """A node that read the identity of its directory before would not know its own tier again."""
    seen = iter(range(looks))
    monkeypatch.setattr(
        opening,
        "read_mark",
        lambda *place: None if next(seen, None) is not None else read_mark(*place),
    )
    monkeypatch.setattr(runtime, "sleep", lambda seconds: None)
    job = job_with_tier(tmp_path, memory).steps(3)
    refused = [event.reason for event in job.emitted(TierRefused)]
    assert refused == [] if looks == 5 else "rank 0 does not see" in refused[0]
    assert (find_tier(dir_at(tmp_path))[0] != "") is (looks == 5)


def test_a_folder_of_another_user_is_not_used(tmp_path, memory):
    os.mkdir(parent_of_tiers(memory))
    os.chmod(parent_of_tiers(memory), 0o777)
    assert job_with_tier(tmp_path, memory).emitted(TierRefused)[0].reason.count("only this user")


def test_the_closed_folder_of_another_user_is_not_looked_into(tmp_path, memory):
    def closed(operation, path):
        if path.startswith(parent_of_tiers(memory) + "/"):
            raise os_error(errno.EACCES, path)

    make_owned_tier(memory, tmp_path)
    os.chmod(parent_of_tiers(memory), 0o777)  # stands for another owner
    found, problem = find_tier(CheckpointDir(Hooked(closed), str(tmp_path)))
    assert found == "" and "only this user" in problem


def test_a_run_after_one_that_saved_into_memory_alone_has_a_larger_number(tmp_path, memory):
    first = job_with_tier(tmp_path, memory, tier={"write_after_error": 0}).steps(5)
    first.manager.finish_after_error()
    # it leaves no number on disk
    first.manager.session.release()
    run = first.manager.target.run
    assert run.startswith("0001") and newest_run(dir_at(tmp_path), first.manager.group) == run
    assert job_with_tier(tmp_path, memory).manager.target.run.startswith("0002")
    before = os.listdir(tmp_path / FOLDER)
    # a larger number is there already
    number_runs(dir_at(tmp_path), in_memory=run)
    assert os.listdir(tmp_path / FOLDER) == before


def test_a_tier_that_cannot_be_read_keeps_no_training_from_saving(tmp_path, memory):
    def broken(operation, path):
        if operation == "list" and path.startswith(memory):
            raise os_error(errno.EIO, path)

    make_owned_tier(memory, tmp_path)
    assert newest_run(CheckpointDir(Hooked(broken), str(tmp_path)), SingleProcess()) == ""


def test_a_replaced_or_restored_directory_has_no_tier(tmp_path, memory):
    root, copy = tmp_path / "checkpoint", tmp_path / "copy"
    job_with_tier(root, memory).steps(5).manager._tier.stop()
    tier = tier_of(root)
    shutil.copytree(root, copy)
    root.rename(tmp_path / "aside")
    shutil.copytree(copy, root)
    for directory_ in (copy, root):
        found, problem = find_tier(dir_at(directory_))
        assert found == "" and tier in problem
    assert find_tier(dir_at(tmp_path / "aside")) == (tier, "")
    shutil.rmtree(root)
    assert find_tier(dir_at(root)) == ("", "")


def test_a_copy_never_uses_the_tier_of_the_other_training(tmp_path, memory, monkeypatch):
    """Two containers share a tmpfs, and both have their directory at the same path; devices and
    inodes are equal, too, as those of two containers of one image can be. The copy was made before
    the directory was opened."""
    root, other = tmp_path / "checkpoint", tmp_path / "of the other container"
    status = PosixStorage.status
    monkeypatch.setattr(
        PosixStorage,
        "status",
        lambda storage, path: (found := status(storage, path)) and replace(found, identity="1/1"),
    )
    root.mkdir()
    shutil.copytree(root, other)
    first = job_with_tier(root, memory).steps(5)
    first.manager._tier.stop()
    # its path leads to the copy soon
    first.manager.session.release()
    tier = tier_of(root)
    root.rename(tmp_path / "aside")
    other.rename(root)
    second = job_with_tier(root, memory).steps(3)
    second.manager._tier.stop()
    assert tier_of(root) != tier and held(root) == [2]
    assert TierOwner.read(STORAGE, tier).run == first.manager.target.run
    assert len(os.listdir(tier)) > 1


def test_a_restart_keeps_its_tier_and_a_renamed_directory_too(tmp_path, memory):
    root, tiers = tmp_path / "checkpoint", []
    for _ in range(2):
        job = job_with_tier(root, memory, tier={"write_after_error": 0}).steps(5)
        job.manager.finish_after_error()
        job.manager.session.release()
        tiers.append(tier_of(root))
        root = root.rename(tmp_path / "renamed")
    assert tiers[0] == tiers[1] and find_tier(dir_at(root)) == (tiers[0], "")


def test_a_path_that_is_not_utf8_has_a_tier(tmp_path, memory):
    root = tmp_path / "checkpoint\udcff"
    job = job_with_tier(root, memory).steps(5)
    job.manager._tier.stop()
    assert held(root) == [4, 2] and find_tier(dir_at(root)) == (tier_of(root), "")
    assert TierOwner.read(STORAGE, tier_of(root)).directory == str(root)


def test_a_token_that_is_no_token_names_no_folder(tmp_path):
    (tmp_path / FOLDER).mkdir()
    for token in ("../../x", "", "0" * 15, "\ud800" * 16):
        publish_json(
            STORAGE, str(tmp_path / FOLDER / MARK), {"token": token, "dir": "/dev/shm"}, RUN
        )
        assert read_mark(dir_at(tmp_path)) is None


def test_a_directory_that_is_restored_in_its_place_has_no_tier(tmp_path, memory):
    """It often gets the same inode. Some file systems forget fractions of seconds."""
    tier, found = str(make_owned_tier(memory, tmp_path)), []
    owner = TierOwner.read(STORAGE, tier)
    for marked in (owner.marked, int(owner.marked), owner.marked - 10, 0.0):  # 0: not known
        publish_json(STORAGE, os.path.join(tier, OWNER), asdict(replace(owner, marked=marked)), RUN)
        found.append(find_tier(dir_at(tmp_path)))
    assert (
        owner.marked > 1e9
        and [path for path, _ in found] == [tier, tier, "", tier]
        and tier in found[2][1]
    )


@pytest.mark.parametrize("iterations", [False, True])
def test_the_tier_notes_what_is_committed_on_disk(tmp_path, memory, iterations):
    job = job_with_tier(tmp_path, memory, disk=4, iterations=iterations).steps(3)
    run = job.manager.target.run
    assert DiskNote.read(STORAGE, tier_of(tmp_path)) is None
    job.steps(6)
    assert committed(tmp_path) == [4, 8]
    assert DiskNote.read(STORAGE, tier_of(tmp_path)) == DiskNote(attempt_name(8, run), run, 8)


def test_the_tier_notes_what_was_loaded_once_older_saves_are_set_aside(tmp_path, memory):
    root = tmp_path / "checkpoint"
    tier = make_owned_tier(memory, root)
    DiskNote(attempt_name(20, RUN), RUN, 20).write(STORAGE, str(tier))
    notes = DiskNotes(STORAGE, str(tier), RUN2, attempt_name(10, RUN))
    assert DiskNote.read(STORAGE, str(tier)).step == 20
    notes.loaded()
    assert DiskNote.read(STORAGE, str(tier)) == DiskNote(attempt_name(10, RUN), RUN2)
    notes.committed(30)
    notes.loaded()
    assert DiskNote.read(STORAGE, str(tier)) == DiskNote(attempt_name(30, RUN2), RUN2, 30)
    DiskNotes(STORAGE, str(tier), RUN2).loaded()  # a fresh start
    assert DiskNote.read(STORAGE, str(tier)) is None


def test_ranks_that_see_one_tmpfs_are_a_node():
    assert groups_of(["a", "a", "b", "a", "b"]) == SharedGroups((0, 0, 2, 0, 2))


def test_a_hanging_disk_of_another_training_holds_nothing_up(tmp_path, memory, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(opening, "remove_leftovers", lambda *arguments: released.wait())
    monkeypatch.setattr(opening, "_PATIENCE", 0.01)
    job = job_with_tier(tmp_path, memory).steps(5)
    job.manager._tier.stop()
    assert held(tmp_path) == [4, 2] and any("hangs" in event.text for event in job.emitted(Notice))
    released.set()


# ---- left-over tiers -----------------------------------------------------------------------------


def leftover(memory, root, processes=None, steps=(10,), age_days=0.0):
    """Makes a tier of a job that saves to ``root``. Returns it."""
    tier = make_owned_tier(memory, root, processes=processes)
    for step in steps:
        save(tier, step, world=1)
    if age_days:
        for folder, names, files in os.walk(tier):
            for name in (*names, *files, ""):
                os.utime(os.path.join(folder, name), (1e9, 1e9))
    return str(tier)


def remaining(memory, keep_days=7.0):
    """Starts a job with a tier of its own. Returns the other tiers that are left."""
    mine = os.path.join(parent_of_tiers(memory), "mine")
    os.makedirs(mine, mode=0o700)
    publish_json(STORAGE, os.path.join(mine, OWNER), {}, RUN)
    remove_leftovers(STORAGE, mine, keep_days)
    return [
        os.path.join(parent_of_tiers(memory), name)
        for name in os.listdir(parent_of_tiers(memory))
        if name != "mine"
    ]


def test_a_tier_that_may_be_the_newest_of_its_training_stays_and_a_superseded_one_goes(
    tmp_path, memory
):
    newest, _, _ = (leftover(memory, tmp_path / name) for name in "abc")
    save(tmp_path / "a", 5, world=1)
    save(tmp_path / "b", 20, world=1)
    save(tmp_path / "c", 5, world=1, run=RUN2)
    assert remaining(memory) == [newest]


def test_a_tier_without_its_directory_goes_unless_its_job_lives_or_the_disk_is_not_mounted(
    tmp_path, memory
):
    gone, unmounted = leftover(memory, tmp_path / "a"), leftover(memory, tmp_path / "b")
    alive = leftover(memory, tmp_path / "c", processes=[this_process()], age_days=1)
    owner = replace(TierOwner.read(STORAGE, unmounted), mount=str(tmp_path))
    publish_json(STORAGE, os.path.join(unmounted, OWNER), asdict(owner), RUN)
    for name in "abc":
        shutil.rmtree(tmp_path / name)
    assert sorted(remaining(memory)) == sorted([unmounted, alive]) and not os.path.exists(gone)
    assert TierOwner.read(STORAGE, alive).is_alive


def test_an_error_of_the_disk_does_not_prove_that_a_directory_is_gone(tmp_path, memory):
    tier = leftover(memory, tmp_path / "disk" / "a")
    shutil.rmtree(tmp_path / "disk")
    # each look fails (ELOOP), as on a disk with errors
    (tmp_path / "disk").symlink_to(tmp_path / "disk")
    assert remaining(memory) == [tier]


@pytest.mark.parametrize("seen", [True, False])
def test_a_path_of_another_container_says_nothing_about_a_directory(
    tmp_path, memory, monkeypatch, seen
):
    """With hostPID and hostIPC its processes and its memory are visible, and its disks are not."""
    gone, replaced, newer = (
        leftover(memory, tmp_path / "a"),
        leftover(memory, tmp_path / "b"),
        leftover(memory, tmp_path / "c"),
    )
    shutil.rmtree(tmp_path / "a")
    make_mark(dir_at(tmp_path / "b"), memory, RUN, keep=False)
    save(tmp_path / "c", 20, world=1)
    if not seen:
        monkeypatch.setattr(directory, "namespace", lambda kind: 1)
    assert sorted(remaining(memory)) == ([] if seen else sorted([gone, replaced, newer]))


@pytest.mark.parametrize("what", ["a", FOLDER + "/" + MARK])
def test_a_directory_that_cannot_be_looked_at_is_not_another_one(
    tmp_path, memory, monkeypatch, what
):
    tier, status = leftover(memory, tmp_path / "a"), PosixStorage.status

    def fails(storage, path):
        if path.endswith(what):
            raise os_error(errno.ESTALE, path)
        return status(storage, path)

    monkeypatch.setattr(PosixStorage, "status", fails)
    assert remaining(memory) == [tier]


@pytest.mark.parametrize("uptime_days", [0.1, 8])
def test_an_old_tier_is_removed_and_a_clock_that_was_set_makes_none_old(
    tmp_path, memory, monkeypatch, uptime_days
):
    """A node without a clock of its own begins at 1970, until its time is set."""
    monkeypatch.setattr(runtime, "monotonic", lambda: uptime_days * 86400.0)  # since the boot
    old, young = leftover(memory, tmp_path / "a", age_days=1), leftover(memory, tmp_path / "b")
    assert set(remaining(memory)) == ({young} if uptime_days == 8 else {old, young})


def test_an_interrupted_removal_is_continued_and_a_starting_job_is_left_alone(tmp_path, memory):
    parent = parent_of_tiers(memory)
    os.makedirs(os.path.join(parent, "removed-12345678", "rank_0"), mode=0o700)
    os.makedirs(os.path.join(parent, "starting"))
    assert remaining(memory) == [os.path.join(parent, "starting")]


def test_an_owner_file_of_another_form_is_none(tmp_path):
    for text in ("", "[]", "{}", '{"version": 1}'):
        (tmp_path / OWNER).write_text(text)
        assert TierOwner.read(STORAGE, str(tmp_path)) is None
    assert TierMark("a", "/dev/shm") == TierMark("a", "/dev/shm")


# ---- several ranks -------------------------------------------------------------------------------


def test_all_ranks_or_none_have_a_tier(tmp_path, memory):
    def work(group):
        folder = memory if group.rank == 0 else str(tmp_path)
        job = Job(
            tmp_path / "a",
            group=group,
            every=100,
            leases={},
            settings=Settings(heartbeat=0, memory_tier=MemoryTierSettings(2, folder)),
        )
        return job.manager._tier is None

    # the mark of rank 0 decides where it is
    assert Ranks(2).run(work) == [False, False]
