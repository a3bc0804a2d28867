"""Leases: which holders are alive, which job has taken over, the next run number; read locks."""

import json
import os
from dataclasses import replace

import pytest
from lease_holders import (
    ELSEWHERE,
    ME,
    ManualClock,
    acquire_lease,
    dead_holder,
    publish_lease,
)
from rank_folders import STORAGE, by_clock, dir_at, records_of, save, simulated
from storages import Hooked, os_error

from mindresume.coordination.lease import (
    BEAT,
    GIVEN_UP,
    LeaseHolder,
    ReadLocks,
    acquire_read_lock,
    announce_removal,
    fence,
    is_alive,
    lease_holders,
    lease_path,
    read_locks,
)
from mindresume.coordination.lease_acquisition import EndedRuns, acquire, next_run
from mindresume.errors import LeaseHeldError, RecordError
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER, encode_head, run_name, run_sequence
from sim.cluster import current_cluster


@pytest.mark.parametrize(
    "name, number",
    [
        (f".tracker-0000000004.{run_name(7, '0000aaaa')}.mindresume-tmp", 8),
        (f".emergency.12.{run_name(7, '0000aaaa')}.mindresume-tmp", 8),
        (".probe-0123abcd-0.0123abcd.mindresume-tmp", 1),
        (".x.mindresume-tmp", 1),
        (".x.0007-0000aaaa.swp", 1),
        (".x.0007-0000AAAA.mindresume-tmp", 1),
        (f".claim.{run_name(0, '0000aaaa')}.mindresume-tmp", 1),
    ],
)
def test_only_files_that_a_run_began_to_write_reserve_its_number(name, number):
    assert run_sequence(next_run([name])) == number


def test_a_reused_process_number_is_another_process():
    assert is_alive(ME) is True
    assert is_alive(replace(ME, started=ME.started + 1)) is False
    assert is_alive(ELSEWHERE) is None
    assert is_alive(replace(ME, machine="")) is None


def why_fenced(root, run):
    """Returns why a run stops saving; empty: it goes on."""
    try:
        fence(dir_at(root), run)
    except LeaseHeldError as error:
        return str(error)
    return ""


def test_a_lease_that_is_only_published_does_not_stop_the_job_that_has_acquired_the_folder(
    tmp_path,
):
    lease = acquire_lease(tmp_path)
    rival = publish_lease(tmp_path, ELSEWHERE, 2)
    assert not why_fenced(tmp_path, lease.run)
    rival.beat()
    assert "node7" in why_fenced(tmp_path, lease.run)


@pytest.mark.parametrize("token, stops", [("00000000", False), ("ffffffff", True)])
def test_the_later_name_wins_between_two_runs_with_one_number(tmp_path, token, stops):
    save(tmp_path, 5, 1, run=run_name(1, token))
    assert bool(why_fenced(tmp_path, run_name(1, "88888888"))) is stops


def test_a_job_considered_dead_stops_saving_when_it_wakes_up(tmp_path):
    first = publish_lease(tmp_path, ELSEWHERE)
    assert not why_fenced(tmp_path, first.run)
    second = acquire_lease(tmp_path)
    assert not why_fenced(tmp_path, second.run)
    said = why_fenced(tmp_path, first.run)
    assert second.run in said and first.run in said


def test_a_job_considered_dead_stops_saving_after_its_successor_has_ended(tmp_path):
    save(tmp_path, 5, 1, run=run_name(2, "0000bbbb"))
    said = why_fenced(tmp_path, run_name(1, "0000aaaa"))
    assert "run 0002-0000bbbb has taken over" in said


def test_a_lease_removed_by_hand_does_not_stop_a_job(tmp_path):
    lease = acquire_lease(tmp_path)
    for path in (tmp_path / FOLDER).iterdir():
        path.unlink()
    assert not why_fenced(tmp_path, lease.run)
    lease.beat()
    assert len(lease_holders(dir_at(tmp_path))) == 1


@pytest.mark.parametrize("every", [-1, "15", None, True, float("nan")])
def test_an_impossible_interval(tmp_path, every):
    path = tmp_path / "claim"
    head = json.loads(replace(ELSEWHERE, run=run_name(1, "0000aaaa")).encode().split(b"\n")[1])
    path.write_bytes(encode_head({**head, "every": every}))
    with pytest.raises(RecordError):
        LeaseHolder.read(STORAGE, str(path))


def test_runs_of_dead_processes_have_ended(tmp_path):
    living, dead, far = (
        publish_lease(tmp_path, ME, 1),
        publish_lease(tmp_path, dead_holder(), 2),
        publish_lease(tmp_path, ELSEWHERE, 3),
    )
    over = EndedRuns(dir_at(tmp_path))
    assert [lease.run in over for lease in (living, dead, far)] == [False, True, False]
    assert run_name(9, "00000009") in over


def test_a_lease_that_a_listing_names_twice_is_read_once(tmp_path):
    """An NFS listing of a folder that changes can name a file twice; each reading replaces it."""
    lease = publish_lease(tmp_path, ELSEWHERE)

    class ListedTwice(Hooked):
        def list(self, path):
            return sorted(2 * super().list(path))

    storage = ListedTwice(lambda operation, path: lease.beat() if operation == "open" else None)
    assert len(lease_holders(CheckpointDir(storage, str(tmp_path)))) == 1


def test_a_lease_sends_heartbeats_by_itself(tmp_path):
    def work():
        lease = acquire(dir_at(tmp_path), ME).start()
        (begun,) = lease_holders(dir_at(tmp_path))
        current_cluster().scheduler.sleep(2.5 * BEAT)
        (living,) = lease_holders(dir_at(tmp_path))
        lease.release()
        current_cluster().scheduler.sleep(2.5 * BEAT)
        return living.beat - begun.beat, lease_holders(dir_at(tmp_path))

    assert simulated(work) == (2, [])


# ---- read locks: a checkpoint that is read is neither removed nor moved --------------------------


def reads(root, step=5, also=lambda now: None, storage=STORAGE, **options):
    """Reads a step. Returns its lock, released; None: it is gone; and the seconds of the wait, in
    which ``also`` is called."""
    records, time = records_of(root, step), ManualClock(also)
    with by_clock(time):
        lease = acquire_read_lock(
            CheckpointDir(storage, str(root)),
            records.name,
            str(records),
            **options,
        )
    if lease is not None:
        lease.release()
    return lease, time.now


def published(root, holder=ELSEWHERE, purpose="loading", step=5, **more):
    """Publishes the lease of a reader or of a removal of a step."""
    held = (records_of(root, step).name,)
    return publish_lease(root, replace(holder, purpose=purpose, holds=held, **more), 0)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path, 5, 1)
    return tmp_path


def test_a_reader_locks_its_checkpoint_and_releases_it(saved):
    records = records_of(saved, 5)
    lease = acquire_read_lock(dir_at(saved), records.name, str(records))
    assert set(read_locks(dir_at(saved))) == {records.name}
    assert str(os.getpid()) in read_locks(dir_at(saved))[records.name]
    # it does not stop a job from saving
    job = acquire_lease(saved, time=(time := ManualClock()))
    fence(dir_at(saved), job.run)
    assert time.now == 0
    lease.release()
    assert reads(saved, 99)[0] is None and read_locks(dir_at(saved)) == {}


@pytest.mark.parametrize("goes", [True, False])
def test_a_reader_waits_for_an_announced_removal(saved, goes):
    records = records_of(saved, 5)
    removal = announce_removal(dir_at(saved), [records.name])
    assert read_locks(dir_at(saved)) == {}

    def act(now):
        if now > 2:
            if goes:
                records.rename(saved / "gone")
            removal.release()

    lease, waited = reads(saved, also=act)
    assert (lease is None) == goes and 2 < waited < 4
    assert lease_holders(dir_at(saved)) == []


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_reader_stops_waiting_after_a_limit(saved, is_dead):
    """The removing process may be dead: on this machine that is detected at once."""
    published(saved, dead_holder() if is_dead else ELSEWHERE, "removing", every=0.0)
    lease, waited = reads(saved)
    assert lease is not None and (waited == 0 if is_dead else 5 < waited < 20)


@pytest.mark.parametrize("is_garbage", [False, True])
def test_a_process_waits_once_for_all_announcements_that_do_not_go_away(saved, is_garbage):
    """A conversion that refused ten steps, or a scrub of ten, waited ten times as long."""
    for step in (10, 15):
        save(saved, step, 1)
    names = tuple(records_of(saved, step).name for step in (5, 10, 15))
    for number in range(20):
        run = run_name(0, f"{number:08x}")
        removal = replace(ELSEWHERE, purpose="removing", holds=names, every=0.0, run=run)
        with open(lease_path(dir_at(saved), run), "wb") as file:
            file.write(b"garbage" if is_garbage else removal.encode())
    outwaited = set()
    assert 5 < sum(reads(saved, step, outwaited=outwaited)[1] for step in (5, 10, 15)) < 20


def test_a_later_announcement_is_waited_for(saved):
    published(saved, purpose="removing", every=0.0)
    assert reads(saved, outwaited={run_name(0, "0000bbbb")})[1] > 5


def test_a_lock_of_a_dead_reader_does_not_count(tmp_path):
    published(tmp_path, dead_holder())
    assert read_locks(dir_at(tmp_path)) == {} and lease_holders(dir_at(tmp_path)) == []


@pytest.mark.parametrize("every", [BEAT, 2 * BEAT])
def test_a_lock_of_another_host_expires_without_heartbeats(tmp_path, clock, every):
    """A reader with rare heartbeats gets more time."""
    reader = published(tmp_path, every=every)
    seen = ReadLocks(dir_at(tmp_path))
    assert len(seen()) == 1
    clock.now = every * GIVEN_UP
    reader.beat()
    assert len(seen()) == 1
    clock.now += every * GIVEN_UP
    assert len(seen()) == 1
    clock.now += 1
    assert seen() == {}


def test_an_unreadable_read_lock_protects_every_checkpoint(saved, clock):
    save(saved, 10, 1)
    names = {records_of(saved, step).name for step in (5, 10)}
    path = published(saved).path
    with open(path, "r+b") as file:
        content = file.read()
        file.truncate(1)
    seen = ReadLocks(dir_at(saved))
    assert set(seen()) == names and "cannot be read" in seen()[min(names)]
    # a reader does not stop a job from saving
    acquire_lease(saved, time=clock)
    assert clock.now == 0
    clock.now = BEAT * GIVEN_UP
    assert set(seen()) == names
    clock.now += 1
    assert seen() == {} and os.path.exists(path)
    with open(path, "wb") as file:
        file.write(content)
    assert set(seen()) == {records_of(saved, 5).name}


def test_an_unreadable_lock_may_be_of_the_removing_process(saved):
    """Another user has written it with mode 0600."""
    removal = announce_removal(dir_at(saved), [records_of(saved, 5).name])

    def refuse(operation, path):
        if operation == "open" and removal.run in path:
            raise os_error(13, path)

    lease, waited = reads(
        saved, also=lambda now: removal.release() if now >= 1.5 else None, storage=Hooked(refuse)
    )
    assert lease is not None and waited == 1.5
