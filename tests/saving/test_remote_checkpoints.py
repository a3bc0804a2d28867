"""The contents of the object store after every operation, and what a job on an empty disk
downloads."""

import errno
import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import iteration_folders
import pytest
import rank_folders
from fakes import moxing
from lease_holders import ManualClock
from rank_folders import STORAGE, Ranks, by_clock, dir_at, simulated
from storages import moxing_store

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.lease import holder_of_this_process
from mindresume.coordination.lease_acquisition import acquire, next_run
from mindresume.errors import CollectiveError, NoUsableCheckpointError, RemoteError
from mindresume.events import (
    WARNING,
    CandidateRefused,
    CheckpointsRemoved,
    Notice,
    UploadFailed,
    UploadsSkipped,
)
from mindresume.model.manifest import FOLDER, MANIFEST, attempt_name, run_name
from mindresume.resume import sources
from mindresume.resume.eligible import Choice, SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.resume.sources import CheckpointSources
from mindresume.saving import garbage_collector, upload
from mindresume.saving.committer import Committer
from mindresume.saving.crash_loop import FailedLoad
from mindresume.saving.remote_checkpoints import (
    RemoteCheckpoints,
    RunStatus,
    number_runs,
    record_path,
)
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.upload import AGAIN, Uploader, Uploads
from sim.cluster import current_cluster

URL = "obs://bucket/job/checkpoint"
RUN, LATER = run_name(1, "0000aaaa"), run_name(2, "0000bbbb")
FORMATS = {"1.0": rank_folders, "2.0": iteration_folders}


class Died(BaseException):
    """Kills the process."""


class World(ManualClock):
    """An object store, and jobs of two ranks on disks that can be lost. Time advances when rank 0
    sleeps, and the other ranks then run (``also``)."""

    def __init__(self, base: Path, fmt: str = "1.0", size: int = 2):
        super().__init__(lambda now: self.work())
        self.base, self.fmt, self.size = base, fmt, size
        self.events = []  # of all ranks
        self.disk, self.others = base / "disk", []
        self.remote = RemoteCheckpoints(moxing_store(), URL)

    def empty_disk(self) -> None:
        shutil.rmtree(self.disk, ignore_errors=True)
        self.disk = self.base / "disk2" if self.disk.name == "disk" else self.base / "disk"

    def target(self, rank=0, run=RUN):
        make = FORMATS[self.fmt].target_of
        return make(self.disk, rank, self.size, run)

    def save(self, step, run=RUN, policy=KEEP_ALL):
        if self.fmt == "1.0":
            rank_folders.save(self.disk, step, self.size, run, suffix=int(run[:4]) - 1)
        else:
            iteration_folders.save(self.disk, step, world=self.size, run=run)
        Committer(self.target(0, run), policy).prune()

    def work(self):
        """Lets the other ranks run."""
        for other in self.others:
            other.work()

    def wait(self, seconds):
        """Lets the workers of all ranks run, at the end."""
        self.now += min(seconds, 1.0)
        for one in (self.first, *self.others):
            if not one.queue.finished:
                one.run_once()

    def uploaders(self, run=RUN, policy=KEEP_ALL, stall_timeout=60.0):
        remotes = [RemoteCheckpoints(self.remote.store, self.remote.url) for _ in range(self.size)]
        self.first, *self.others = uploaders = [
            Uploader(
                Uploads(
                    remotes[rank],
                    self.target(rank, run),
                    None if rank else policy,
                    stall_timeout,
                    self.events.append,
                )
            )
            for rank in range(self.size)
        ]
        for one in uploaders:
            one.queue.changed.wait = self.wait
        return uploaders

    def saved(self, *steps, run=RUN, save=None):
        """Saves steps, and enqueues them."""
        for step in steps:
            (save or self.save)(step, run)
            for one in (self.first, *self.others):
                one.queue.enqueue(step)

    def upload(self, *steps, run=RUN, policy=KEEP_ALL):
        """Saves and uploads steps, one after the other."""
        uploaders = self.uploaders(run, policy)
        for step in steps:
            self.saved(step, run=run)
            self.first.work()
        return uploaders

    def committed(self):
        return [int(name[5:15]) for name in self.remote.scan().committed()]

    def restore(self, group=None, converts=None, named=None, **options):
        group = group or SingleProcess()
        converts = self.fmt == "2.0" if converts is None else converts
        size = None if converts else group.size
        policy = SelectionPolicy(size, named, every_rank=converts, **options)
        return select_checkpoint(
            STORAGE, str(self.disk), group, policy, self.sources(), self.events.append
        )

    def sources(self, remote=None):
        return CheckpointSources(
            saved_to={os.path.realpath(self.disk)}, remote=remote or self.remote
        )

    def restore_all(self, size=None, **how):
        """Selects on all ranks of a job. Returns the selection, equal on all of them; raises an
        error."""
        results = Ranks(size or self.size).run(lambda group: self.restore(group, **how))
        for result in results:
            if isinstance(result, BaseException):
                raise result
        assert len({result.chosen.name if result.chosen else None for result in results}) == 1
        return results[0]


def kinds(world, kind):
    return [event for event in world.events if isinstance(event, kind)]


@pytest.fixture
def worlds(tmp_path, monkeypatch):
    """Makes worlds, whose clock is the machine's."""
    monkeypatch.setenv("FAKE_MOXING_ROOT", str(tmp_path / "objects"))
    with ExitStack() as clocks:

        def make(fmt="1.0", size=2):
            world = World(tmp_path, fmt, size)
            clocks.enter_context(by_clock(world))
            return world

        yield make
    moxing.file.hidden.clear()


@pytest.fixture
def world(request, worlds):
    return worlds(getattr(request, "param", "1.0"))


BOTH = pytest.mark.parametrize("world", sorted(FORMATS), indirect=True)


def content(root):
    """Returns {path: bytes} of everything but pointers, leases and temporary files."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            if name not in (
                "meta.json",
                "latest_checkpointed_iteration.txt",
            ) and not name.startswith(("claim-", "ended-", ".")):
                found[os.path.relpath(os.path.join(folder, name), root)] = Path(
                    folder, name
                ).read_bytes()
    return found


def unreadable(monkeypatch, *steps, run=RUN):
    """Makes objects archived, or access denied. Returns the urls of their manifests that were
    read."""
    urls = {
        f"{URL}/{name}/{record_path(name, MANIFEST)}"
        for name in (attempt_name(step, run) for step in steps)
    }
    asked = []

    def watch(moment, operation, url):
        if (moment, operation) == ("before", "read") and url in urls:
            asked.append(url)
            raise RuntimeError("InvalidObjectState: the object is archived")

    monkeypatch.setattr(moxing.file, "watch", watch)
    return asked


def downloads(monkeypatch):
    """Returns the attempts of which something is downloaded from now on."""
    found = []

    def watch(moment, operation, url):
        if moment == "half":
            found.append(url.removeprefix(f"{URL}/").partition("/")[0])

    monkeypatch.setattr(moxing.file, "watch", watch)
    return found


def strike(monkeypatch, at):
    """Kills right after the operation with this number, or in the middle of a download. Returns the
    operations."""
    done = []

    def watch(moment, operation, url):
        if moment != "before":
            done.append((moment, operation, url))
            if len(done) == at:
                raise Died(operation)

    monkeypatch.setattr(moxing.file, "watch", watch)
    return done


# ---- round trips ---------------------------------------------------------------------------------


@BOTH
def test_a_lost_disk_is_restored_bit_for_bit(world):
    world.upload(5, 10)
    assert world.committed() == [10, 5]
    before = content(world.disk)
    world.empty_disk()
    choice = world.restore_all()
    assert choice.chosen.step == 10 and choice.chosen.committed and choice.bytes_verified
    name = attempt_name(10, RUN)
    if world.fmt == "2.0":
        assert (
            iteration_folders.tracker(world.disk) == "10"
            and choice.chosen.iteration_dir == "iteration_00000010"
        )
        assert content(world.disk) == {
            path: data for path, data in before.items() if path.startswith("iteration_00000010/")
        }
    else:
        mine = [file.path for file in choice.chosen.all_files]
        assert content(world.disk) == {
            path: data
            for path, data in before.items()
            if path in mine or f"{FOLDER}/{name}/" in path
        }


@BOTH
def test_a_damaged_local_file_is_replaced(world):
    """The store has the same bytes: the local file is refused and downloaded again, and only that
    file."""
    world.upload(5, 10)
    path = (
        rank_folders.path_of(world.disk, 10, 1)
        if world.fmt == "1.0"
        else iteration_folders.weights_of(world.disk, 10, 1)
    )
    whole = path.read_bytes()
    rank_folders.flip_bit(path)
    copies = []
    original = moxing.file.copy
    moxing.file.copy = lambda source, target: (copies.append(source), original(source, target))
    try:
        choice = world.restore_all()
    finally:
        moxing.file.copy = original
    assert choice.chosen.step == 10 and path.read_bytes() == whole
    assert [os.path.basename(source) for source in copies] == [path.name]


@BOTH
def test_a_damaged_remote_checkpoint_is_refused_and_the_next_older_one_downloaded(world, tmp_path):
    world.upload(5, 10)
    commit_dir = tmp_path / "objects" / "bucket/job/checkpoint" / attempt_name(10, RUN)
    weights = next(path for path in sorted(commit_dir.rglob("*.safetensors")))
    rank_folders.flip_bit(weights)
    world.empty_disk()
    assert world.restore_all().chosen.step == 5
    assert all(
        event.step == 10
        and str(weights.relative_to(commit_dir)) in event.reason
        and URL in event.file
        for event in kinds(world, CandidateRefused)
    ) and kinds(world, CandidateRefused)
    # nothing of it fills the disk
    assert not any("0000000010" in path or "1_10" in path for path in content(world.disk))


def test_a_file_of_another_run_with_the_same_name_is_not_overwritten(world):
    """Rank folders: two runs that both started on an empty disk use the same names."""
    rank_folders.save(world.disk, 10, 2, LATER)
    world.uploaders(LATER)
    world.saved(10, save=lambda *_: None)
    world.first.work()
    world.empty_disk()
    rank_folders.save(world.disk, 10, 2, RUN)
    before = content(world.disk)
    choice = world.restore_all()
    assert (choice.chosen.step, choice.chosen.run) == (10, RUN) and content(world.disk) == before
    assert any(
        "run 0001-0000aaaa, step 10" in event.reason for event in kinds(world, CandidateRefused)
    )


def unfinished_afresh(world, ranks):
    """Leaves the first save of a training that started afresh on an empty disk and was killed;
    ``ranks`` have written their part."""
    world.upload(5)
    world.empty_disk()
    for rank in ranks:
        rank_folders.write_rank(world.disk, 5, rank, 2, LATER)


def restored_without_it(world):
    choice = world.restore_all()
    assert (choice.chosen.step, choice.chosen.run) == (5, RUN)
    assert not [path for path in content(world.disk) if LATER in path]


@pytest.mark.parametrize("recorded", [True, False])
def test_an_unfinished_save_with_the_names_of_a_checkpoint_is_removed(world, recorded):
    unfinished_afresh(world, [1])
    if not recorded:
        next(world.disk.rglob("rank_00001.json")).unlink()
    restored_without_it(world)


def test_an_interrupted_removal_of_an_unfinished_save_is_continued(world, monkeypatch):
    unfinished_afresh(world, [1])
    with monkeypatch.context() as dying:
        dying.setattr(garbage_collector, "empty_trash", lambda *args: 1 / 0)
        with pytest.raises(CollectiveError, match="division by zero"):
            world.restore_all()
    restored_without_it(world)


def test_an_unfinished_save_of_a_running_job_is_kept(world):
    unfinished_afresh(world, [1])
    lease = acquire(dir_at(world.disk), replace(holder_of_this_process("saving"), run=LATER), 0)
    before = content(world.disk)

    with pytest.raises(CollectiveError, match="run 0002-0000bbbb on host"):
        world.restore_all()
    assert content(world.disk) == before
    lease.release()


def test_no_usable_checkpoint_is_an_error_and_not_a_fresh_start(world, tmp_path):
    world.upload(5)
    for path in (tmp_path / "objects").rglob("*.safetensors"):
        path.unlink()
    world.empty_disk()
    with pytest.raises(
        NoUsableCheckpointError,
        match="holds checkpoints, but none can be used:\n  step 5: rank 0: .*downloaded",
    ):
        world.restore_all()


def test_an_unreachable_store_is_an_error_only_without_a_local_checkpoint(world, monkeypatch):
    """Without a local checkpoint it is unknown whether this is a fresh start; with one the job
    starts."""
    world.upload(5)

    def refuse(url, recursive=False):
        raise RuntimeError("403 Forbidden")

    monkeypatch.setattr(moxing.file, "list_directory", refuse)
    assert world.restore_all().chosen.step == 5
    assert any(event.level == WARNING and "403" in event.text for event in kinds(world, Notice))
    world.empty_disk()
    with pytest.raises(RemoteError, match="newer checkpoint: .*403 Forbidden"):
        world.restore_all()


def test_missing_space_is_reported_before_the_download(world, monkeypatch):
    world.upload(5)
    world.empty_disk()
    monkeypatch.setattr(type(STORAGE), "free_space", lambda self, folder: 1 << 20)
    with pytest.raises(
        NoUsableCheckpointError, match="MiB are to be fetched, .* has room for 1.0 MiB"
    ):
        world.restore_all()
    assert not any(path.endswith("safetensors") for path in content(world.disk))


class OtherNode(type(STORAGE)):
    """The same paths, on another disk."""

    def __init__(self, root, real):
        self.root, self.real = str(root), str(real)

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name not in (
            "list",
            "status",
            "open",
            "write",
            "rename",
            "sync",
            "remove",
            "make_folder",
            "free_space",
        ):
            return method
        return lambda *args: method(
            *(arg.replace(self.root, self.real) if isinstance(arg, str) else arg for arg in args)
        )


def restored_apart(worlds, tmp_path, fetched=RemoteCheckpoints):
    """Returns the selections of two nodes without shared storage, on empty disks. ``fetched``: the
    store of rank 0."""
    world = worlds()
    world.upload(5)
    world.empty_disk()

    def work(group):
        storage, store = STORAGE, moxing_store()
        remote = fetched(store, URL) if group.rank == 0 else RemoteCheckpoints(store, URL)
        if group.rank == 1:
            storage = OtherNode(world.disk, tmp_path / "node1")
            download = store.download
            store.download = lambda url, path: download(
                url, path.replace(str(world.disk), str(tmp_path / "node1"))
            )
        return select_checkpoint(
            storage,
            str(world.disk),
            group,
            SelectionPolicy(2),
            world.sources(remote),
            world.events.append,
        )

    return world, Ranks(2).run(work)


def test_nodes_that_share_no_disk(worlds, tmp_path):
    """Rank folders: each rank downloads its own files and record; rank 0 all records, which decide
    its selection."""
    world, choices = restored_apart(worlds, tmp_path)
    for choice in choices:
        assert choice.chosen.step == 5 and len(choice.shards) == 1
    assert sorted(os.listdir(tmp_path / "node1")) == [FOLDER, "rank_1"]
    assert "rank_1" not in os.listdir(world.disk)


def test_missing_records_of_other_nodes_are_not_a_fresh_start(worlds, tmp_path):
    class Failing(RemoteCheckpoints):
        def record(self, attempt, rank):
            if rank == 1:
                raise RemoteError("Network is unreachable")
            return super().record(attempt, rank)

    _, errors = restored_apart(worlds, tmp_path, Failing)
    assert [type(error) for error in errors] == [NoUsableCheckpointError] * 2
    assert "step 5: rank 0: Network is unreachable" in str(errors[0])


def test_a_downloaded_checkpoint_that_is_refused_is_not_a_fresh_start(worlds, monkeypatch):
    world = worlds(size=1)
    world.upload(5)
    world.empty_disk()
    monkeypatch.setattr(sources.SharedDisk, "select", lambda self: Choice(None, (), (), True))
    with pytest.raises(
        NoUsableCheckpointError, match="step 5: it was fetched, but it is not complete on this disk"
    ):
        world.restore()


@BOTH
def test_another_number_of_ranks(world):
    world.upload(5)
    world.empty_disk()
    if world.fmt == "1.0":
        with pytest.raises(
            NoUsableCheckpointError, match="saved by 2 ranks, this job has 3; .*auto_trans_ckpt"
        ):
            world.restore_all(3)
    for size in (1, 3):
        choice = world.restore_all(size, converts=True)
        assert choice.chosen.step == 5 and choice.chosen.world_size == 2
        assert all((world.disk / file.path).exists() for file in choice.chosen.all_files)
        world.empty_disk()


def test_an_unreadable_manifest_is_refused_with_its_reason_and_the_others_are_used(
    world, monkeypatch
):
    world.upload(5, 10)
    world.empty_disk()
    unreadable(monkeypatch, 10)
    assert world.restore_all().chosen.step == 5
    assert {
        event.step for event in kinds(world, CandidateRefused) if "archived" in event.reason
    } == {10}


def unhealthy_from(world, monkeypatch, first):
    """Makes the health monitor report steps from this one on as unhealthy. Returns the options of a
    job that respects it."""
    write = iteration_folders.write_rank
    monkeypatch.setattr(
        iteration_folders,
        "write_rank",
        lambda root, step, *more, **how: write(
            root, step, *more, **{**how, "health": int(step >= first)}
        ),
    )
    return {
        "unhealthy": ()
        if world.fmt == "2.0"
        else {str(rank_folders.name_of(0, step)) for step in (10, 15)}
    }


@BOTH
def test_an_unhealthy_checkpoint_is_refused_by_its_manifest_before_any_download(world, monkeypatch):
    filters = unhealthy_from(world, monkeypatch, 10)
    world.upload(5, 10, 15)
    world.empty_disk()
    fetched = downloads(monkeypatch)
    assert world.restore_all(**filters).chosen.step == 5
    assert set(fetched) == {attempt_name(5, RUN)}
    assert {event.step for event in kinds(world, CandidateRefused)} >= {15, 10}

    # without a healthy one
    world.remote._delete(attempt_name(5, RUN), world.remote.scan(), [])
    world.empty_disk()
    fetched.clear()
    with pytest.raises(
        NoUsableCheckpointError, match="no healthy checkpoints yet.*none can be used"
    ):
        world.restore_all(**filters)
    assert fetched == []
    named = str(rank_folders.name_of(0, 15)) if world.fmt == "1.0" else "15"
    assert world.restore_all(named=named, **filters).chosen.step == 15


@BOTH
def test_a_checkpoint_with_failed_loads_is_downloaded_only_if_nothing_else_is_usable(
    world, monkeypatch
):
    world.upload(5, 10)
    note = (FOLDER, f"trial-{attempt_name(10, RUN)}")

    def fetched_by(job):
        world.empty_disk()
        (world.disk / FOLDER).mkdir(parents=True)
        deaths = [asdict(FailedLoad(run_name(sequence, "0000dead"))) for sequence in (3, 4)]
        world.disk.joinpath(*note).write_text(
            json.dumps({"output": "/output", "deaths": deaths, "began": None})
        )
        fetched = downloads(monkeypatch)
        assert job().chosen.step == int(fetched[-1][5:15])
        return set(fetched)

    assert fetched_by(lambda: world.restore_all(max_failed_loads=2)) == {attempt_name(5, RUN)}
    assert fetched_by(lambda: world.restore_all(max_failed_loads=3)) == {attempt_name(10, RUN)}
    world.remote._delete(attempt_name(5, RUN), world.remote.scan(), [])
    assert fetched_by(lambda: world.restore_all(max_failed_loads=2)) == {attempt_name(10, RUN)}


def test_the_next_run_is_later_than_all_at_the_url_on_an_empty_disk_too(world):
    world.upload(5, run=run_name(7, "00000007"))
    world.empty_disk()
    for _ in range(2):
        number_runs(dir_at(world.disk), world.remote)
    assert next_run(os.listdir(world.disk / FOLDER)).startswith("0008-")
    lease = acquire(dir_at(world.disk), holder_of_this_process("saving"), 0)
    assert lease.run.startswith("0008-") and not any(
        "0007-00000007" in name for name in os.listdir(world.disk / FOLDER)
    )


# ---- retention -----------------------------------------------------------------------------------


def test_the_local_policy_applies_to_the_store_and_counts_earlier_runs(world):
    world.upload(5, 10)
    world.upload(15, 20, run=LATER, policy=KeepLast(2))
    assert world.committed() == [20, 15]
    assert set(world.remote.scan().objects) == {attempt_name(15, LATER), attempt_name(20, LATER)}
    assert world.remote.scan().run_statuses == (LATER,)
    assert (5,) in [event.steps for event in kinds(world, CheckpointsRemoved)]


def test_remote_removal_deletes_the_manifest_first(world, monkeypatch):
    world.upload(5)
    removed = strike(monkeypatch, 0)
    world.upload(10, policy=KeepLast(1))
    gone = [url for moment, operation, url in removed if (moment, operation) == ("after", "remove")]
    assert gone[0].endswith(MANIFEST) and len(gone) > 3


def test_remote_retention_neither_deletes_nor_counts_unreadable_checkpoints(world, monkeypatch):
    world.upload(5, 10)
    asked = unreadable(monkeypatch, 10)
    uploaders = world.upload(15, 20, 25, run=LATER, policy=KeepLast(2))
    assert world.committed() == [25, 20, 10] and uploaders[0].queue.poll() == []
    assert (
        sum("archived" in event.text for event in kinds(world, Notice)) == 1
        and len(set(asked)) == 1
    )


def test_remote_retention_keeps_the_newest_healthy_checkpoint(world, monkeypatch):
    plain = rank_folders.state_of
    monkeypatch.setattr(
        rank_folders,
        "state_of",
        lambda step, batch=8: replace(plain(step, batch), health=int(step > 10)),
    )
    world.upload(5, 10, 15, 20, policy=KeepLast(1))
    assert world.committed() == [20, 10]


def test_orphans_are_removed_but_not_objects_that_are_listed_late(world):
    world.upload(5)
    world.remote.store.put(
        f"{URL}/{attempt_name(7, RUN)}/rank_0/torn.safetensors", b"of a rank that died"
    )
    moxing.file.hidden.add(
        f"{URL}/{attempt_name(5, RUN)}/{record_path(attempt_name(5, RUN), MANIFEST)}"
    )
    world.upload(10, run=LATER, policy=KeepLast(9))
    moxing.file.hidden.clear()
    assert world.committed() == [10, 5] and len(world.remote.scan().objects) == 2


# ---- failures ------------------------------------------------------------------------------------


def test_a_failed_upload_is_reported_counted_and_retried(world, monkeypatch):
    world.uploaders()
    original = moxing.file.copy

    def refuse(source, target):
        raise RuntimeError("503 Service Unavailable")

    monkeypatch.setattr(moxing.file, "copy", refuse)
    world.saved(5)
    assert world.first.work() is True
    errors = world.first.queue.poll()
    assert len(errors) == 1 and "step 5 is not uploaded: obs://" in str(errors[0])
    assert [(event.step, event.failed_in_total) for event in kinds(world, UploadFailed)] == [(5, 1)]
    assert world.first.queue.poll() == [] and world.first.work() is False  # not at once
    monkeypatch.setattr(moxing.file, "copy", original)
    world.now += AGAIN
    world.first.work()
    assert world.committed() == [5] and world.first.queue.poll() == []


def test_uploads_slower_than_saves_skip_steps_with_a_report(world):
    uploaders = world.uploaders()
    world.saved(5, 10, 15)
    world.first.work()
    assert world.committed() == [15]
    assert kinds(world, UploadsSkipped) == [UploadsSkipped((5, 10), 2)]
    # nothing is pending on any rank
    assert all(one.work() is False for one in uploaders)


def test_an_uncommitted_step_is_not_uploaded(world):
    world.uploaders()
    for rank in range(2):
        rank_folders.write_rank(world.disk, 5, rank, 2)
    world.saved(5, save=lambda *_: None)
    assert world.first.work() is False and world.remote.scan().objects == {}


@BOTH
def test_an_invisible_part_on_a_shared_disk_is_waited_for_until_a_limit(world):
    """Another host publishes the folder."""
    uploaders = world.uploaders(stall_timeout=600.0)
    world.saved(5)
    base = world.disk if world.fmt == "1.0" else world.disk / "iteration_00000005"
    record = base / record_path(attempt_name(5, RUN), "rank_00001.json")
    hidden = record.rename(record.with_suffix(".late"))
    world.also = lambda now: (world.work(), now == 30 and hidden.rename(record))
    uploaders[0].work()
    assert world.committed() == [5] and 30 <= world.now < 60
    world.saved(10)
    before = world.now
    base = world.disk if world.fmt == "1.0" else world.disk / "iteration_00000010"
    (base / record_path(attempt_name(10, RUN), "rank_00001.json")).unlink()
    uploaders[0].work()
    assert world.committed() == [5] and 60 <= world.now - before < 70
    for one in uploaders:
        assert "step 10 is given up: the part of rank 1 is not on its disk any more" in str(
            one.queue.poll()[0]
        )


def test_a_rank_that_never_uploads_is_named(world):
    uploaders = world.uploaders()
    world.others = []
    world.save(5)
    uploaders[0].queue.enqueue(5)
    uploaders[0].work()
    assert (
        "objects of rank 1 did not come within 60 s" in str(uploaders[0].queue.poll()[0])
        and world.committed() == []
    )


def test_an_unreadable_disk_does_not_end_the_worker(world, monkeypatch):
    world.uploaders()
    world.saved(5)

    def refuse(path):
        raise OSError("Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(type(STORAGE), "status", lambda self, path: refuse(path))
        assert world.first.work() is False and "Input/output error" in str(
            world.first.queue.poll()[0]
        )
        assert "step 5 is not" in str(world.first.queue.finish(0)[-1])
    world.now += AGAIN
    world.first.work()
    assert world.committed() == [5]


def test_the_worker_is_a_thread_that_ends_with_the_training(world):
    def work():
        uploaders = [
            Uploader(
                Uploads(
                    RemoteCheckpoints(world.remote.store, URL),
                    world.target(rank),
                    None if rank else KEEP_ALL,
                )
            ).start()
            for rank in range(2)
        ]
        world.first, *world.others = uploaders
        world.saved(5)
        current_cluster().scheduler.sleep(60.0)
        uploaded = world.committed()
        world.saved(10)
        return (
            uploaded,
            [one.queue.finish(60.0) for one in uploaders],
            current_cluster().scheduler.now,
        )

    uploaded, errors, now = simulated(work)
    assert uploaded == [5] and errors == [[], []] and now < 90.0
    assert world.committed() == [10, 5] and world.remote.read_status(RUN).ended


def test_the_end_names_what_is_missing(world):
    world.uploaders()
    world.saved(5)

    def hang(seconds):
        world.first.queue.begin(5)
        world.now += seconds

    world.first.queue.changed.wait = hang
    error = str(world.first.queue.finish(2)[-1])
    assert all(
        fact in error
        for fact in (
            "step 5 is not",
            "obs://bucket/job/checkpoint",
            "2 s",
            "rank 0 is still uploading",
        )
    )


# ---- a later run at the same url -----------------------------------------------------------------


def test_a_run_may_be_superseded_before_its_first_status(world):
    uploaders = world.uploaders()
    world.remote.publish_status(LATER, RunStatus(None, False))
    world.saved(5)
    assert (
        all(f"taken over by run {LATER}" in str(one.queue.finish(600)[0]) for one in uploaders)
        and world.now < 10
    )


def test_the_status_of_a_superseded_run_is_removed_by_the_later_run(world):
    """The other ranks then check the store themselves."""
    old = world.upload(5)
    world.saved(10)
    world.upload(15, run=LATER)
    assert world.remote.read_status(RUN) is None
    world.first, world.others = old[0], old[1:]
    old[0]._finished = True  # and it was killed
    errors = old[1].queue.finish(600)
    assert f"taken over by run {LATER}" in str(errors[0]) and world.now < 10


def test_the_status_is_retried(world, monkeypatch):
    uploaders = world.upload(5)
    world.saved(10)
    world.remote.publish_status(LATER, RunStatus(None, False))
    write = moxing.file.write
    monkeypatch.setattr(moxing.file, "write", lambda *args, **how: 1 / 0)
    assert (
        uploaders[0].run_once() is False
        and uploaders[0].run_once() is False
        and uploaders[0].run_once() is False
    )
    monkeypatch.setattr(moxing.file, "write", write)
    world.now += AGAIN
    assert uploaders[0].run_once() is None and LATER in world.remote.read_status(RUN).reason


def test_a_run_status_of_an_older_version_has_no_reason(world):
    world.remote.store.put(f"{URL}/run-{RUN}.json", b'{"step": 5, "ended": true}')
    assert world.remote.read_status(RUN) == RunStatus(5, True)
    for damaged in (b"", b"[]", b"{}", b"\xff", b'{"step": 5}'):
        world.remote.store.put(f"{URL}/run-{RUN}.json", damaged)
        with pytest.raises(RemoteError, match=f"{URL}/run-{RUN}.json is "):
            world.remote.read_status(RUN)


# ---- errors that are no undo ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation, name",
    [
        ("write", "manifest.json"),
        ("write", "rank_00000.json"),
        ("write", "rank_00001.json"),
        ("write", f"run-{RUN}.json"),
        ("copy", "safetensors"),
    ],
)
def test_a_put_that_is_reported_as_failed_after_its_effect(world, monkeypatch, operation, name):
    world.upload(5, policy=KeepLast(2))
    world.saved(10)

    def watch(moment, done, url):
        if (moment, done) == ("after", operation) and url.endswith(name):
            raise RuntimeError("504 Gateway Timeout")

    monkeypatch.setattr(moxing.file, "watch", watch)
    world.first.work()
    monkeypatch.setattr(moxing.file, "watch", lambda *what: None)
    world.now += AGAIN
    while world.first.work():
        pass
    assert world.committed() == [10, 5]
    world.empty_disk()
    assert world.restore_all().chosen.step == 10


def test_a_later_run_removes_objects_while_the_manifest_is_written(world, monkeypatch):
    """It considered this run dead, and saw no manifest shortly before."""
    world.upload(5)
    world.saved(10)
    commit_dir = f"{URL}/{attempt_name(10, RUN)}"

    def watch(moment, operation, url):
        if (moment, operation) == ("before", "write") and url.endswith(MANIFEST):
            for name in world.remote.store.list(commit_dir):
                moxing.file.remove(f"{commit_dir}/{name}")

    monkeypatch.setattr(moxing.file, "watch", watch)
    world.first.work()
    monkeypatch.setattr(moxing.file, "watch", lambda *what: None)
    assert world.committed() == [5] and "objects were removed" in str(world.first.queue.poll()[0])


def test_one_failed_remote_removal_does_not_stop_the_others(world, monkeypatch):
    world.upload(5, 10)
    remove = moxing.file.remove

    def refuse(url, recursive=False):
        if attempt_name(5, RUN) in url:
            raise RuntimeError("403 Forbidden")
        remove(url, recursive)

    monkeypatch.setattr(moxing.file, "remove", refuse)
    uploaders = world.upload(15, 20, run=LATER, policy=KeepLast(1))
    assert world.committed() == [20, 5]
    assert all("403 Forbidden" in str(error) for error in uploaders[0].queue.poll())


# ---- kill after every operation ------------------------------------------------------------------


def alone(world):
    """Selects from the disk alone."""
    return select_checkpoint(
        STORAGE, str(world.disk), SingleProcess(), SelectionPolicy(every_rank=True)
    )


@BOTH
def test_the_next_job_selects_the_same_after_a_kill_at_any_moment_of_a_download(world, monkeypatch):
    world.upload(5, 10)
    at, over = 0, False
    while not over:
        at += 1
        world.empty_disk()
        strike(monkeypatch, at)
        try:
            world.restore(SingleProcess(), converts=True)
            over = True
        except Died:
            pass
        monkeypatch.setattr(moxing.file, "watch", lambda *what: None)
        found = alone(world)
        assert found.chosen is None and found.is_fresh_start or found.chosen.step == 10
        assert world.restore_all().chosen.step == 10
    assert at > 10


# ---- what is not uploaded, and what is -----------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@BOTH
def test_a_damaged_file_is_not_uploaded_and_the_good_one_stays(world, rank):
    """Only the sizes would fit: the damaged step would be complete in the store, and the good one
    pruned."""
    world.upload(5, policy=KeepLast(1))
    world.save(10)
    find = rank_folders.path_of if world.fmt == "1.0" else iteration_folders.weights_of
    rank_folders.flip_bit(find(world.disk, 10, rank))
    world.saved(10, save=lambda *_: None)
    world.first.work()
    assert world.committed() == [5]
    assert any("is damaged" in event.reason for event in kinds(world, UploadFailed))
    assert world.upload(15, policy=KeepLast(1)) and world.committed() == [15]


@pytest.mark.parametrize(
    "error, uploaded",
    [(errno.EROFS, True), (errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)],
)
def test_a_disk_that_takes_no_lock_prevents_no_upload(world, monkeypatch, error, uploaded):
    """A committed step lies on a disk that is full, or read-only since. Another error may pass, and
    is tried again."""

    def fail(*given, **named):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(upload, "acquire_read_lock", fail)
    world.upload(5)
    assert world.committed() == ([5] if uploaded else [])
