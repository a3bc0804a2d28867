"""One job per folder; no lease expires by the age of its file alone."""

import errno
import io
import os
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
from lease_holders import ELSEWHERE, ME, ManualClock, acquire_lease, dead_holder, publish_lease
from rank_folders import STORAGE, by_clock, dir_at, save

from mindresume.coordination import lease as lease_module
from mindresume.coordination.lease import BEAT, Lease, fence, lease_holders, lease_path
from mindresume.coordination.lease_acquisition import (
    PATIENCE,
    EndedRuns,
    acquire,
    check_no_live_job,
    next_run,
)
from mindresume.errors import LeaseHeldError
from mindresume.events import LeaseWatched, StaleLeaseRemoved
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import (
    FOLDER,
    attempt_name,
    encode_head,
    read_head,
    run_name,
    run_sequence,
)
from mindresume.storage.posix import PosixStorage


def test_an_empty_folder_is_acquired_at_once_and_released(tmp_path):
    time = ManualClock()
    lease = acquire_lease(tmp_path / "checkpoint", time=time)
    assert run_sequence(lease.run) == 1 and time.now == 0
    assert [holder.run for holder in lease_holders(dir_at(tmp_path / "checkpoint"))] == [lease.run]
    lease.release()
    lease.release()
    assert os.listdir(tmp_path / "checkpoint" / FOLDER) == []


def test_a_second_job_is_refused_and_both_are_named(tmp_path):
    first = acquire_lease(tmp_path)
    time = ManualClock()
    with pytest.raises(LeaseHeldError) as error:
        acquire_lease(tmp_path, replace(ME, host="node2", machine="m2/1", pid=77), time)
    assert first.run in str(error.value) and str(os.getpid()) in str(error.value)
    assert "host node2, process 77" in str(error.value) and "output_dir" in str(error.value)
    assert [holder.run for holder in lease_holders(dir_at(tmp_path))] == [first.run]
    assert time.now >= BEAT * PATIENCE


def test_a_process_that_is_just_ending_is_waited_for(tmp_path):
    first = acquire_lease(tmp_path)
    time = ManualClock(lambda now: first.release() if now > 10 else None)
    second = acquire_lease(tmp_path, time=time)
    assert 10 < time.now < 12
    assert run_sequence(second.run) == 1 or run_sequence(second.run) == 2


def test_a_dead_process_of_this_machine_is_detected_at_once(tmp_path):
    events, time = [], ManualClock()
    dead = publish_lease(tmp_path, dead_holder())
    (tmp_path / FOLDER / f".{attempt_name(5, dead.run)}.{dead.run}.mindresume-tmp").write_text(
        "half"
    )
    lease = acquire_lease(tmp_path, time=time, emit=events.append)
    assert time.now == 0 and run_sequence(lease.run) == 2
    assert events == [StaleLeaseRemoved(dead.run, dead.holder.host, dead.holder.pid)]
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{lease.run}.json"]


class Killed(PosixStorage):
    """Is killed while it publishes its lease, before the rename."""

    def rename(self, old, new):
        raise KeyboardInterrupt


def test_leftovers_of_a_job_killed_while_it_acquires_the_folder_are_removed(tmp_path):
    acquire_lease(tmp_path).release()
    with pytest.raises(KeyboardInterrupt):
        acquire(CheckpointDir(Killed(), str(tmp_path)), ME)
    (left,) = os.listdir(tmp_path / FOLDER)
    assert left.startswith(".claim-0001-") and next_run([left]).startswith("0002-")
    lease, time = acquire_lease(tmp_path, time=(time := ManualClock())), time
    assert run_sequence(lease.run) == 2 and time.now == 0
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{lease.run}.json"]


def test_half_written_leases_of_readers_are_removed_when_old(tmp_path):
    """The run of a reader has the number 0, which precedes every job: only the age shows that it
    has ended."""
    (tmp_path / FOLDER).mkdir()
    names = [
        f".claim-{run}.json.{run}.mindresume-tmp"
        for run in (run_name(0, "0000aaaa"), run_name(0, "0000bbbb"))
    ]
    for name, age in zip(names, (3700, 3500), strict=True):
        (tmp_path / FOLDER / name).write_text("half")
        now = (tmp_path / FOLDER / name).stat().st_mtime
        os.utime(tmp_path / FOLDER / name, (now - age, now - age))
    lease = acquire_lease(tmp_path)
    assert sorted(os.listdir(tmp_path / FOLDER)) == [names[1], f"claim-{lease.run}.json"]


def test_leftovers_that_cannot_be_removed_stop_no_job(tmp_path):
    dead = publish_lease(tmp_path, dead_holder(), 3)
    ended_one = f"ended-{run_name(2, '0000bbbb')}.json"
    for name in (ended_one, f".x.{dead.run}.mindresume-tmp"):
        (tmp_path / FOLDER / name).write_bytes(b"")

    class Kept(PosixStorage):
        def remove(self, path):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    before = set(os.listdir(tmp_path / FOLDER))
    lease = acquire(CheckpointDir(Kept(), str(tmp_path)), ME)
    assert run_sequence(lease.run) == 4 and set(os.listdir(tmp_path / FOLDER)) == {
        *before,
        f"claim-{lease.run}.json",
    }
    lease.directory = CheckpointDir(STORAGE, lease.directory.root)
    lease.release()
    later = acquire_lease(tmp_path)
    assert run_sequence(later.run) == 4 and os.listdir(tmp_path / FOLDER) == [
        f"claim-{later.run}.json"
    ]


def test_a_silent_holder_on_another_host_is_watched_then_considered_dead(tmp_path):
    dead = publish_lease(tmp_path, ELSEWHERE)
    events, time = [], ManualClock()
    lease = acquire_lease(tmp_path, time=time, emit=events.append)
    assert BEAT * PATIENCE <= time.now < BEAT * (PATIENCE + 1)
    assert run_sequence(lease.run) == 2
    assert events == [
        LeaseWatched(lease_path(dir_at(tmp_path), dead.run), dead.run, "node7", BEAT * PATIENCE),
        StaleLeaseRemoved(dead.run, "node7", ELSEWHERE.pid),
    ]


def test_a_lease_that_was_copied_with_its_folder_refuses_no_job(tmp_path):
    """Its holder lives, and saves into the folder that was copied: no heartbeat comes into the
    copy."""
    first, time = acquire_lease(tmp_path / "one"), ManualClock()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    second = acquire_lease(tmp_path / "two", time=time)
    assert run_sequence(second.run) == 2 and BEAT * PATIENCE <= time.now < BEAT * (PATIENCE + 1)
    for place in ("one", "renamed"):
        with pytest.raises(LeaseHeldError, match=first.run):
            acquire_lease(tmp_path / place)
        if place == "one":
            (tmp_path / "one").rename(tmp_path / "renamed")


def test_a_copied_lease_whose_heartbeats_come_is_alive(tmp_path):
    """A file system can give its folders other inodes while they are in use."""
    lease = acquire_lease(tmp_path)
    lease.holder = replace(lease.holder, folder="0:1")
    time = ManualClock(lambda now: lease.beat())
    with pytest.raises(LeaseHeldError, match=lease.run):
        acquire_lease(tmp_path, time=time)


def test_a_copied_lease_without_heartbeats_needs_a_person(tmp_path):
    acquire(dir_at(tmp_path / "one"), ME, beat=0)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(LeaseHeldError, match="remove .*two.* and start again"):
        acquire_lease(tmp_path / "two")


@pytest.mark.parametrize("beats", [True, False])
def test_a_holder_that_cannot_be_looked_at_is_watched(tmp_path, monkeypatch, beats):
    """hidepid=2, or no descriptor is left: such a process counted as dead, and its folder was taken
    over at once."""
    first = acquire_lease(tmp_path)
    monkeypatch.setattr(lease_module, "is_running", lambda pid, ticks: None)
    assert first.run not in EndedRuns(dir_at(tmp_path))
    time = ManualClock(lambda now: first.beat() if beats else None)
    if beats:
        with pytest.raises(LeaseHeldError, match=first.run):
            acquire_lease(tmp_path, time=time)
    else:
        assert (
            run_sequence(acquire_lease(tmp_path, time=time).run) == 2
            and time.now >= BEAT * PATIENCE
        )


class OldContent(PosixStorage):
    """Shows the content that a file had when it was first read, until this host changes the folder:
    a mount with nocto and a long actimeo."""

    def __init__(self):
        self.kept = {}

    def open(self, path):
        if path not in self.kept:
            with super().open(path) as file:
                self.kept[path] = file.read()
        return io.BytesIO(self.kept[path])

    def rename(self, old, new):
        self.kept.clear()
        super().rename(old, new)


def test_a_mount_that_shows_old_contents_makes_no_job_look_dead(tmp_path):
    other = publish_lease(tmp_path, ELSEWHERE)
    time = ManualClock(lambda now: other.beat())
    with pytest.raises(LeaseHeldError, match="node7"):
        acquire_lease(tmp_path, time=time, storage=OldContent())
    assert [holder.run for holder in lease_holders(CheckpointDir(STORAGE, str(tmp_path)))] == [
        other.run
    ]


def test_a_holder_on_another_host_that_sends_heartbeats_is_alive(tmp_path):
    other = publish_lease(tmp_path, ELSEWHERE)
    beaten = []

    def beat(now):
        if now > 20 and not beaten:
            beaten.append(other.beat())

    time = ManualClock(beat)
    with pytest.raises(LeaseHeldError, match="node7"):
        acquire_lease(tmp_path, time=time)
    assert time.now < 30


def test_a_watcher_that_was_suspended_with_the_holder_goes_on_watching(tmp_path):
    other, beaten = publish_lease(tmp_path, ELSEWHERE), []

    def sleep(now):
        if 5 < now < 1000:
            time.now += 5000  # the whole cluster was
        elif now > 5010 and not beaten:
            beaten.append(other.beat())

    time = ManualClock(sleep)
    with pytest.raises(LeaseHeldError, match="node7"):
        acquire_lease(tmp_path, time=time)


class During(PosixStorage):
    """Calls ``act`` right before its operation number ``at``."""

    def __init__(self, at, act):
        self.left, self.act = at, act

    def _count(self):
        self.left -= 1
        if self.left == 0:
            self.act()

    def list(self, folder):
        self._count()
        return super().list(folder)

    def open(self, path):
        self._count()
        return super().open(path)

    def write(self, path, pieces, size=0):
        self._count()
        return super().write(path, pieces, size)

    def rename(self, old, new):
        self._count()
        super().rename(old, new)

    def remove(self, path):
        self._count()
        super().remove(path)


@pytest.mark.parametrize("other", [ME, ELSEWHERE])
@pytest.mark.parametrize("token", ["00000000", "ffffffff"])
@pytest.mark.parametrize("at", range(1, 14))
def test_one_of_two_concurrent_jobs_acquires_the_folder_and_keeps_it(tmp_path, token, other, at):
    """The later of the two threw out one that had acquired the folder already."""
    acquired = []

    def begin(holder, storage):
        time = ManualClock(lambda now: [lease.beat() for lease in acquired])
        with suppress(LeaseHeldError):
            acquired.append(acquire_lease(tmp_path, holder, time=time, storage=storage))
        for lease in acquired:
            fence(dir_at(tmp_path), lease.run)

    mine = replace(ME, run=run_name(1, "88888888"))
    begin(mine, During(at, lambda: begin(replace(other, run=run_name(1, token)), STORAGE)))
    (lease,) = acquired
    fence(dir_at(tmp_path), lease.run)


def rival_of(root, token, holder=ELSEWHERE):
    return Lease(dir_at(root), replace(holder, run=run_name(1, token)))


def test_the_earlier_of_two_concurrent_jobs_waits_for_the_later_to_give_way(tmp_path):
    rival = rival_of(tmp_path, "ffffffff")
    time = ManualClock(lambda now: rival.release(is_acquired=False))
    holder = replace(ME, run=run_name(1, "88888888"))
    # watched, listed, written: now it gets its name
    storage = During(4, lambda: rival.publish())
    lease = acquire_lease(tmp_path, holder, time=time, storage=storage)
    assert 0 < time.now < 3 and os.listdir(tmp_path / FOLDER) == [f"claim-{lease.run}.json"]


def test_the_earlier_of_two_concurrent_jobs_gives_way_if_the_later_has_acquired_the_folder(
    tmp_path,
):
    rival = rival_of(tmp_path, "ffffffff")
    time, holder = ManualClock(lambda now: rival.beat()), replace(ME, run=run_name(1, "88888888"))
    with pytest.raises(LeaseHeldError, match="run 0001-ffffffff on host node7"):
        acquire_lease(tmp_path, holder, time=time, storage=During(4, lambda: rival.publish()))
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{rival.run}.json"] and time.now < 3


@pytest.mark.parametrize("keep_run_marker", [True, False])
def test_a_job_that_gives_way_leaves_no_files(tmp_path, keep_run_marker):
    """A number that seemed to be of a later run, which has ended, threw out the one that stayed."""
    rival = rival_of(tmp_path, "00000000")
    holder = replace(ME, run=run_name(1, "88888888"))
    with pytest.raises(LeaseHeldError, match="run 0001-00000000"):
        acquire(
            CheckpointDir(During(4, lambda: rival.publish()), str(tmp_path)),
            holder,
            keep_run_marker=keep_run_marker,
        )
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{rival.run}.json"]


@pytest.mark.parametrize("token", ["00000000", "ffffffff"])
def test_a_number_acquired_by_another_job_meanwhile_is_not_reused(tmp_path, token):
    """Another job started, saved and ended between the listing that gave the number and the lease:
    two runs had one number."""
    storage = During(3, lambda: save(tmp_path, 5, 1, run=run_name(1, token)))
    assert run_sequence(acquire(CheckpointDir(storage, str(tmp_path)), ME).run) == 2


class Remembering(PosixStorage):
    """Caches a listing until this host changes the folder itself, as on NFS. ``act`` is called
    before the first lease is published."""

    def __init__(self, act):
        self.listed, self.act = {}, act

    def list(self, folder):
        if folder not in self.listed:
            self.listed[folder] = super().list(folder)
        return self.listed[folder]

    def rename(self, old, new):
        act, self.act = self.act, lambda: None
        act()
        super().rename(old, new)
        self.listed.pop(os.path.dirname(new), None)

    def remove(self, path):
        super().remove(path)
        self.listed.pop(os.path.dirname(path), None)


def test_a_job_that_waited_for_a_later_name_lists_again(tmp_path):
    """The other job had acquired the folder, saved and ended meanwhile: both had one number, and
    the second was fenced."""
    rival = rival_of(tmp_path, "ffffffff")

    def ends(now):
        if now > 5 and lease_holders(dir_at(tmp_path))[-1].run == rival.run:
            save(tmp_path, 5, 1, run=rival.run)
            rival.release()

    def begins():
        rival.publish()
        rival.beat()

    time = ManualClock(ends)
    run = acquire_lease(tmp_path, time=time, storage=Remembering(begins)).run
    assert run_sequence(run) == 2 and 5 < time.now < 8
    fence(dir_at(tmp_path), run)


def test_a_number_that_all_nodes_have_agreed_on_and_that_is_in_use_is_refused(tmp_path):
    save(tmp_path, 5, 1, run=run_name(1, "00000000"))
    with pytest.raises(LeaseHeldError, match="run 0001-00000000"):
        acquire_lease(tmp_path, replace(ME, run=run_name(1, "88888888")))
    assert os.listdir(tmp_path / FOLDER) == [attempt_name(5, run_name(1, "00000000"))]


def test_a_job_whose_half_written_lease_is_removed_reports_the_other_job(tmp_path):
    """The other job considers it a leftover of a dead job. The error names the other job, not a
    file that has vanished."""
    first = []

    class Slow(PosixStorage):
        def rename(self, old, new):
            first.append(acquire_lease(tmp_path))
            super().rename(old, new)

    with pytest.raises(LeaseHeldError, match="is in use: run 0002"):
        acquire(CheckpointDir(Slow(), str(tmp_path)), ME)
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{first[0].run}.json"]
    fence(dir_at(tmp_path), first[0].run)


def test_a_lease_that_cannot_be_published_is_an_error_and_is_removed(tmp_path):
    class Unsettled(PosixStorage):
        def sync(self, folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    (tmp_path / FOLDER).mkdir()
    with pytest.raises(OSError, match="Input/output error"):
        acquire(CheckpointDir(Unsettled(), str(tmp_path)), ME)
    assert os.listdir(tmp_path / FOLDER) == []

    class Full(PosixStorage):
        def write(self, path, pieces, size=0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with pytest.raises(OSError, match="No space left"):
        acquire(CheckpointDir(Full(), str(tmp_path)), ME)
    assert os.listdir(tmp_path / FOLDER) == []


class Stale(PosixStorage):
    """Returns the old content of a lease ``left`` times: its holder on another host is just
    replacing the file."""

    def __init__(self, times):
        self.left = times

    def open(self, path):
        if "claim-" in path and self.left:
            self.left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return super().open(path)


def test_a_lease_that_is_unreadable_for_a_moment_counts(tmp_path):
    """The running job was fenced because the second job did not see its lease."""
    publish_lease(tmp_path, ME)
    with pytest.raises(LeaseHeldError, match="is in use: run 0001"):
        acquire_lease(tmp_path, time=(time := ManualClock()), storage=Stale(1))
    publish_lease(tmp_path, ELSEWHERE)
    time = ManualClock()
    # silent since it could be read
    lease = acquire_lease(tmp_path, time=time, storage=Stale(5))
    assert run_sequence(lease.run) == 2 and BEAT * PATIENCE + 4 <= time.now < BEAT * PATIENCE + 6


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"", lambda data: b"\0" * len(data), None]
)
def test_a_lease_that_stays_unreadable_counts_as_alive(tmp_path, damage):
    """The lease is damaged or of a later version: no job is fenced, and the error names the
    file."""
    lease = publish_lease(tmp_path, dead_holder())
    path = tmp_path / FOLDER / f"claim-{lease.run}.json"
    path.write_bytes(
        damage(path.read_bytes()) if damage else encode_head({"version": 2, "kind": "claim"})
    )
    time = ManualClock()
    with pytest.raises(LeaseHeldError) as error:
        acquire_lease(tmp_path, time=time)
    assert f"remove {path} and start again" in str(error.value) and time.now == BEAT * PATIENCE
    assert os.listdir(tmp_path / FOLDER) == [path.name]
    # its unfinished save is not an orphan
    assert lease.run not in EndedRuns(dir_at(tmp_path))
    path.unlink()
    assert run_sequence(acquire_lease(tmp_path).run) == 1


def test_an_unreadable_lease_counts_between_two_concurrent_jobs(tmp_path):
    rival = Lease(dir_at(tmp_path), replace(ME, run=run_name(1, "ffffffff")))

    class Late(Stale):
        def rename(self, old, new):
            rival.publish()
            self.left = 99
            super().rename(old, new)

    time = ManualClock()
    with pytest.raises(
        LeaseHeldError, match="by which run 0001-ffffffff says that it saves there, cannot be read"
    ):
        acquire_lease(tmp_path, time=time, storage=Late(0))
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{rival.run}.json"]


# ---- the wait for a holder on another host -------------------------------------------------------


@pytest.mark.parametrize("mine", [0.0, 0.1, BEAT, 200.0])
@pytest.mark.parametrize("theirs", [2.0, BEAT, 100.0])
def test_the_holders_own_heartbeat_interval_counts(tmp_path, mine, theirs):
    publish_lease(tmp_path, replace(ELSEWHERE, every=theirs))
    time = ManualClock()
    with by_clock(time):
        lease = acquire(dir_at(tmp_path), ME, mine)
    assert theirs * PATIENCE <= time.now < theirs * PATIENCE + 1.5
    assert (
        lease_holders(dir_at(tmp_path))[0].every == mine
        and lease.run == lease_holders(dir_at(tmp_path))[0].run
    )


@pytest.mark.parametrize("every, said", [(0.0, "there are none"), (3600.0, "only every 3600 s")])
def test_a_holder_on_another_host_without_heartbeats_is_not_considered_dead(tmp_path, every, said):
    lease, time = publish_lease(tmp_path, replace(ELSEWHERE, every=every)), ManualClock()
    with pytest.raises(LeaseHeldError) as error:
        acquire_lease(tmp_path, time=time)
    path = tmp_path / FOLDER / f"claim-{lease.run}.json"
    assert (
        said in str(error.value)
        and f"remove {path} and start again" in str(error.value)
        and "node7" in str(error.value)
    )
    assert time.now == BEAT * PATIENCE


def test_a_dead_process_of_this_machine_is_detected_without_heartbeats(tmp_path):
    publish_lease(tmp_path, replace(dead_holder(), every=0.0))
    time = ManualClock()
    assert run_sequence(acquire_lease(tmp_path, time=time).run) == 2 and time.now == 0


def test_a_lease_of_an_earlier_version_has_the_default_heartbeat_interval(tmp_path):
    lease = publish_lease(tmp_path, replace(ELSEWHERE, every=100.0))
    path = tmp_path / FOLDER / f"claim-{lease.run}.json"
    with open(path, "rb") as file:
        head, _ = read_head(file, "claim")
    del head["every"]
    path.write_bytes(encode_head(head))
    time = ManualClock()
    assert (
        run_sequence(acquire_lease(tmp_path, time=time).run) == 2
        and BEAT * PATIENCE <= time.now < BEAT * PATIENCE + 1.5
    )


def test_a_failed_training_of_this_process_does_not_count_as_another_job(tmp_path, clock):
    left = acquire_lease(tmp_path)
    check_no_live_job(dir_at(tmp_path))
    assert clock.now == 0
    left.release()
    other = publish_lease(tmp_path, ELSEWHERE, 7)
    clock.also = lambda now: other.beat()
    with pytest.raises(LeaseHeldError, match="run 0007-0000aaaa"):
        check_no_live_job(dir_at(tmp_path))
