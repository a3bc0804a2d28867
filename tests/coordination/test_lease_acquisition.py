"""One job per folder; no lease expires by the age of its file alone."""

import errno
import io
import os
import shutil
from dataclasses import replace

import pytest
from lease_holders import ELSEWHERE, ME, ManualClock, acquire_lease, dead_holder, publish_lease
from rank_folders import dir_at, save
from storages import Hooked, failing, os_error

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

MINE = replace(ME, run=run_name(1, "88888888"))


def takes(root, number, holder=ME, also=lambda now: None, **how):
    """Asserts that a job acquires the folder as this run number. Returns its lease, and the seconds
    that it waited, in which ``also`` is called."""
    time = ManualClock(also)
    lease = acquire_lease(root, holder, time, **how)
    assert run_sequence(lease.run) == number
    return lease, time.now


def refused(root, *said, holder=ME, also=lambda now: None, **how):
    """Asserts that a job is refused with an error that says all of ``said``. Returns the seconds
    that it waited."""
    time = ManualClock(also)
    with pytest.raises(LeaseHeldError) as error:
        acquire_lease(root, holder, time, **how)
    for text in said:
        assert text in str(error.value)
    return time.now


def holds(root, *names):
    """Returns whether the folder of records has just these files; of a lease: that of it."""
    wanted = [f"claim-{name.run}.json" if isinstance(name, Lease) else name for name in names]
    return sorted(os.listdir(root / FOLDER)) == sorted(wanted)


def at_first(operation, act):
    """Returns a storage that calls ``act()`` right before the first operation of this kind."""
    acts = [act]
    return Hooked(lambda asked, path: acts.pop()() if asked == operation and acts else None)


def is_patience(waited, seconds=BEAT):
    return seconds * PATIENCE <= waited < seconds * PATIENCE + 1.5


def test_an_empty_folder_is_acquired_at_once_and_released(tmp_path):
    root = tmp_path / "checkpoint"
    lease, waited = takes(root, 1)
    assert waited == 0 and [holder.run for holder in lease_holders(dir_at(root))] == [lease.run]
    lease.release()
    lease.release()
    assert holds(root)


def test_a_second_job_is_refused_and_both_are_named(tmp_path):
    first = acquire_lease(tmp_path)
    second = replace(ME, host="node2", machine="m2/1", pid=77)
    said = (first.run, str(os.getpid()), "host node2, process 77", "output_dir")
    assert refused(tmp_path, *said, holder=second) >= BEAT * PATIENCE and holds(tmp_path, first)


def test_a_process_that_is_just_ending_is_waited_for(tmp_path):
    first = acquire_lease(tmp_path)
    assert 10 < takes(tmp_path, 1, also=lambda now: first.release() if now > 10 else None)[1] < 12


@pytest.mark.parametrize("every", [BEAT, 0.0])
def test_a_dead_process_of_this_machine_is_detected_at_once(tmp_path, every):
    events = []
    dead = publish_lease(tmp_path, replace(dead_holder(), every=every))
    (tmp_path / FOLDER / f".{attempt_name(5, dead.run)}.{dead.run}.mindresume-tmp").write_text(
        "half"
    )
    lease, waited = takes(tmp_path, 2, emit=events.append)
    assert waited == 0 and holds(tmp_path, lease)
    assert events == [StaleLeaseRemoved(dead.run, dead.holder.host, dead.holder.pid)]


def test_leftovers_of_a_job_killed_while_it_acquires_the_folder_are_removed(tmp_path):
    """It is killed while it publishes its lease, before the rename."""

    def killed():
        raise KeyboardInterrupt

    acquire_lease(tmp_path).release()
    with pytest.raises(KeyboardInterrupt):
        acquire_lease(tmp_path, storage=at_first("rename", killed))
    (left,) = os.listdir(tmp_path / FOLDER)
    assert left.startswith(".claim-0001-") and next_run([left]).startswith("0002-")
    lease, waited = takes(tmp_path, 2)
    assert waited == 0 and holds(tmp_path, lease)


def test_half_written_leases_of_readers_are_removed_when_old(tmp_path):
    """The run of a reader has the number 0, which precedes every job: only the age shows that it
    has ended."""
    (tmp_path / FOLDER).mkdir()
    names = []
    for token, age in (("0000aaaa", 3700), ("0000bbbb", 3500)):
        run = run_name(0, token)
        names.append(f".claim-{run}.json.{run}.mindresume-tmp")
        path = tmp_path / FOLDER / names[-1]
        path.write_text("half")
        now = path.stat().st_mtime
        os.utime(path, (now - age, now - age))
    lease, _ = takes(tmp_path, 1)
    assert holds(tmp_path, names[1], lease)


def test_leftovers_that_cannot_be_removed_stop_no_job(tmp_path):
    dead = publish_lease(tmp_path, dead_holder(), 3)
    for name in (f"ended-{run_name(2, '0000bbbb')}.json", f".x.{dead.run}.mindresume-tmp"):
        (tmp_path / FOLDER / name).write_bytes(b"")
    before = os.listdir(tmp_path / FOLDER)
    lease, _ = takes(tmp_path, 4, storage=failing("", "remove", number=errno.EACCES))
    assert holds(tmp_path, lease, *before)
    lease.directory = dir_at(tmp_path)
    lease.release()
    assert holds(tmp_path, takes(tmp_path, 4)[0])


def test_a_silent_holder_on_another_host_is_watched_then_considered_dead(tmp_path):
    dead = publish_lease(tmp_path, ELSEWHERE)
    events = []
    assert is_patience(takes(tmp_path, 2, emit=events.append)[1])
    assert events == [
        LeaseWatched(lease_path(dir_at(tmp_path), dead.run), dead.run, "node7", BEAT * PATIENCE),
        StaleLeaseRemoved(dead.run, "node7", ELSEWHERE.pid),
    ]


def test_a_copied_lease_whose_heartbeats_come_is_alive(tmp_path):
    """A file system can give its folders other inodes while they are in use."""
    lease = acquire_lease(tmp_path)
    lease.holder = replace(lease.holder, folder="0:1")
    refused(tmp_path, lease.run, also=lambda now: lease.beat())


def test_a_copied_lease_without_heartbeats_needs_a_person(tmp_path):
    acquire(dir_at(tmp_path / "one"), ME, beat=0)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    refused(tmp_path / "two", f"remove {tmp_path / 'two'}", " and start again")


@pytest.mark.parametrize("beats", [True, False])
def test_a_holder_that_cannot_be_looked_at_is_watched(tmp_path, monkeypatch, beats):
    """hidepid=2, or no descriptor is left: such a process counted as dead, and its folder was taken
    over at once."""
    first = acquire_lease(tmp_path)
    monkeypatch.setattr(lease_module, "is_running", lambda pid, ticks: None)
    assert first.run not in EndedRuns(dir_at(tmp_path))
    if beats:
        refused(tmp_path, first.run, also=lambda now: first.beat())
    else:
        assert takes(tmp_path, 2)[1] >= BEAT * PATIENCE


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
    refused(tmp_path, "node7", also=lambda now: other.beat(), storage=OldContent())
    assert holds(tmp_path, other)


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_holder_on_another_host_that_sends_heartbeats_is_alive(tmp_path, is_suspended):
    """A watcher that was suspended with the holder goes on watching."""
    other, beaten = publish_lease(tmp_path, ELSEWHERE), []

    def sleep(now):
        if is_suspended and 5 < now < 1000:
            time.now += 5000  # the whole cluster was
        elif now > (5010 if is_suspended else 20) and not beaten:
            beaten.append(other.beat())

    time = ManualClock(sleep)
    with pytest.raises(LeaseHeldError, match="node7"):
        acquire_lease(tmp_path, time=time)
    assert time.now < (5030 if is_suspended else 30)


def rival_of(root, token, holder=ELSEWHERE):
    return Lease(dir_at(root), replace(holder, run=run_name(1, token)))


def test_the_earlier_of_two_concurrent_jobs_waits_for_the_later_to_give_way(tmp_path):
    rival = rival_of(tmp_path, "ffffffff")
    lease, waited = takes(
        tmp_path,
        1,
        MINE,
        lambda now: rival.release(is_acquired=False),
        storage=at_first("rename", rival.publish),
    )
    assert 0 < waited < 3 and holds(tmp_path, lease)


def test_the_earlier_of_two_concurrent_jobs_gives_way_if_the_later_has_acquired_the_folder(
    tmp_path,
):
    rival = rival_of(tmp_path, "ffffffff")
    waited = refused(
        tmp_path,
        "run 0001-ffffffff on host node7",
        holder=MINE,
        also=lambda now: rival.beat(),
        storage=at_first("rename", rival.publish),
    )
    assert waited < 3 and holds(tmp_path, rival)


@pytest.mark.parametrize("keep_run_marker", [True, False])
def test_a_job_that_gives_way_leaves_no_files(tmp_path, keep_run_marker):
    """A number that seemed to be of a later run, which has ended, threw out the one that stayed."""
    rival = rival_of(tmp_path, "00000000")
    storage = at_first("rename", rival.publish)
    with pytest.raises(LeaseHeldError, match="run 0001-00000000"):
        acquire(
            CheckpointDir(storage, str(tmp_path)),
            MINE,
            keep_run_marker=keep_run_marker,
        )
    assert holds(tmp_path, rival)


@pytest.mark.parametrize("token", ["00000000", "ffffffff"])
def test_a_number_acquired_by_another_job_meanwhile_is_not_reused(tmp_path, token):
    """Another job started, saved and ended between the listing that gave the number and the lease:
    two runs had one number."""
    run = run_name(1, token)
    takes(tmp_path, 2, storage=at_first("write", lambda: save(tmp_path, 5, 1, run=run)))


class Remembering(Hooked):
    """Caches a listing until this host changes the folder itself, as on NFS. ``act`` is called
    before the first lease is published."""

    def __init__(self, act):
        super().__init__(at_first("rename", act).before)
        self.listed = {}

    def list(self, folder):
        if folder not in self.listed:
            self.listed[folder] = super().list(folder)
        return self.listed[folder]

    def rename(self, old, new):
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

    lease, waited = takes(tmp_path, 2, also=ends, storage=Remembering(begins))
    assert 5 < waited < 8
    fence(dir_at(tmp_path), lease.run)


def test_a_number_that_all_nodes_have_agreed_on_and_that_is_in_use_is_refused(tmp_path):
    run = run_name(1, "00000000")
    save(tmp_path, 5, 1, run=run)
    refused(tmp_path, f"run {run}", holder=MINE)
    assert holds(tmp_path, attempt_name(5, run))


def test_a_job_whose_half_written_lease_is_removed_reports_the_other_job(tmp_path):
    """The other job considers it a leftover of a dead job. The error names the other job, not a
    file that has vanished."""
    first = []
    storage = at_first("rename", lambda: first.append(acquire_lease(tmp_path)))
    refused(tmp_path, "is in use: run 0002", storage=storage)
    assert holds(tmp_path, *first)
    fence(dir_at(tmp_path), first[0].run)


@pytest.mark.parametrize("operation, number", [("sync", errno.EIO), ("write", errno.ENOSPC)])
def test_a_lease_that_cannot_be_published_is_an_error_and_is_removed(tmp_path, operation, number):
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(OSError, match=os.strerror(number)):
        acquire_lease(tmp_path, storage=failing("", operation, number=number))
    assert holds(tmp_path)


def stale(times, before=lambda asked, path: None):
    """Returns a storage that cannot open a lease so many times: its holder on another host is just
    replacing the file."""
    left = [errno.ESTALE] * times

    def ask(asked, path):
        before(asked, path)
        if asked == "open" and "claim-" in path and left:
            raise os_error(left.pop(), path)

    return Hooked(ask)


def test_a_lease_that_is_unreadable_for_a_moment_counts(tmp_path):
    """The running job was fenced because the second job did not see its lease."""
    publish_lease(tmp_path, ME)
    refused(tmp_path, "is in use: run 0001", storage=stale(1))
    publish_lease(tmp_path, ELSEWHERE)
    # silent since it could be read
    waited = takes(tmp_path, 2, storage=stale(5))[1]
    assert BEAT * PATIENCE + 4 <= waited < BEAT * PATIENCE + 6


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: encode_head({"version": 2, "kind": "claim"})]
)
def test_a_lease_that_stays_unreadable_counts_as_alive(tmp_path, damage):
    """The lease is damaged or of a later version: no job is fenced, and the error names the
    file."""
    lease = publish_lease(tmp_path, dead_holder())
    path = tmp_path / FOLDER / f"claim-{lease.run}.json"
    path.write_bytes(damage(path.read_bytes()))
    assert refused(tmp_path, f"remove {path} and start again") == BEAT * PATIENCE
    assert holds(tmp_path, lease)
    # its unfinished save is not an orphan
    assert lease.run not in EndedRuns(dir_at(tmp_path))
    path.unlink()
    takes(tmp_path, 1)


def test_an_unreadable_lease_counts_between_two_concurrent_jobs(tmp_path):
    rival = rival_of(tmp_path, "ffffffff", ME)
    said = "by which run 0001-ffffffff says that it saves there, cannot be read"
    refused(tmp_path, said, storage=stale(99, at_first("rename", rival.publish).before))
    assert holds(tmp_path, rival)


# ---- the wait for a holder on another host -------------------------------------------------------


@pytest.mark.parametrize("every, said", [(0.0, "there are none"), (3600.0, "only every 3600 s")])
def test_a_holder_on_another_host_without_heartbeats_is_not_considered_dead(tmp_path, every, said):
    path = publish_lease(tmp_path, replace(ELSEWHERE, every=every)).path
    assert refused(tmp_path, said, f"remove {path} and start again", "node7") == BEAT * PATIENCE


def test_a_lease_of_an_earlier_version_has_the_default_heartbeat_interval(tmp_path):
    path = publish_lease(tmp_path, replace(ELSEWHERE, every=100.0)).path
    with open(path, "rb") as file:
        head, _ = read_head(file, "claim")
    del head["every"]
    with open(path, "wb") as file:
        file.write(encode_head(head))
    assert is_patience(takes(tmp_path, 2)[1])


def test_a_failed_training_of_this_process_does_not_count_as_another_job(tmp_path, clock):
    left = acquire_lease(tmp_path)
    check_no_live_job(dir_at(tmp_path))
    assert clock.now == 0
    left.release()
    other = publish_lease(tmp_path, ELSEWHERE, 7)
    clock.also = lambda now: other.beat()
    with pytest.raises(LeaseHeldError, match="run 0007-0000aaaa"):
        check_no_live_job(dir_at(tmp_path))
