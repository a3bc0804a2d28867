"""Read locks: a checkpoint that is read is neither removed nor moved."""

import os
from dataclasses import replace

import pytest
from lease_holders import ELSEWHERE, ManualClock, acquire_lease, dead_holder, publish_lease
from rank_folders import STORAGE, by_clock, dir_at, records_of, save
from storages import Hooked, os_error

from mindresume.coordination.lease import (
    BEAT,
    GIVEN_UP,
    ReadLocks,
    acquire_read_lock,
    announce_removal,
    fence,
    lease_holders,
    lease_path,
    read_locks,
)
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import run_name


def reads(root, step=5, also=lambda now: None, storage=STORAGE, **options):
    """Reads a step. Returns its lock, released; None: it is gone; and the seconds of the wait, in
    which ``also`` is called."""
    records, time = records_of(root, step), ManualClock(also)
    with by_clock(time):
        lease = acquire_read_lock(
            CheckpointDir(storage, str(root)),
            records.name,
            str(records),
            sleep=time.sleep,
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
