"""Read locks: a checkpoint that is read is neither removed nor moved."""

import os
from dataclasses import replace

import pytest
from lease_holders import ELSEWHERE, ManualClock, acquire_lease, dead_holder, publish_lease
from rank_folders import RUN, dir_at, save

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
from mindresume.model.manifest import FOLDER, attempt_name, run_name
from mindresume.storage.posix import PosixStorage


def test_a_reader_locks_its_checkpoint_and_releases_it(tmp_path):
    save(tmp_path, 5, 1)
    name = next(name for name in os.listdir(tmp_path / FOLDER))
    lease = acquire_read_lock(dir_at(tmp_path), name, str(tmp_path / FOLDER / name))
    assert set(read_locks(dir_at(tmp_path))) == {name}
    assert str(os.getpid()) in read_locks(dir_at(tmp_path))[name]
    lease.release()
    assert read_locks(dir_at(tmp_path)) == {}
    gone = attempt_name(99, run_name(1, "0000aaaa"))
    assert acquire_read_lock(dir_at(tmp_path), gone, str(tmp_path / FOLDER / gone)) is None
    assert read_locks(dir_at(tmp_path)) == {}


@pytest.mark.parametrize("goes", [True, False])
def test_a_reader_waits_for_an_announced_removal(tmp_path, goes):
    save(tmp_path, 5, 1)
    name = os.listdir(tmp_path / FOLDER)[0]
    commit_dir, others = tmp_path / FOLDER / name, announce_removal(dir_at(tmp_path), [name])
    assert read_locks(dir_at(tmp_path)) == {}

    def act(now):
        if now > 2:
            if goes:
                commit_dir.rename(tmp_path / "gone")
            others.release()

    time = ManualClock(act)
    lease = acquire_read_lock(dir_at(tmp_path), name, str(commit_dir), sleep=time.sleep)
    assert (lease is None) == goes and 2 < time.now < 4
    if lease:
        lease.release()
    assert [name for name in os.listdir(tmp_path / FOLDER) if name.startswith("claim")] == []


@pytest.mark.parametrize("holder, waits", [(ELSEWHERE, True), (None, False)])
def test_a_reader_stops_waiting_after_a_limit(tmp_path, holder, waits):
    """The removing process may be dead: on this machine that is detected at once."""
    save(tmp_path, 5, 1)
    name = os.listdir(tmp_path / FOLDER)[0]
    publish_lease(
        tmp_path, replace(holder or dead_holder(), purpose="removing", holds=(name,), every=0.0), 0
    )
    time = ManualClock()
    lease = acquire_read_lock(
        dir_at(tmp_path), name, str(tmp_path / FOLDER / name), sleep=time.sleep
    )
    assert lease is not None and (5 < time.now < 20 if waits else time.now == 0)
    lease.release()


@pytest.mark.parametrize("foreign", ["announcements", "garbage"])
def test_a_process_waits_once_for_all_announcements_that_do_not_go_away(tmp_path, foreign):
    """A conversion that refused ten steps, or a scrub of ten, waited ten times as long."""
    for step in (5, 10, 15):
        save(tmp_path, step, 1)
    names, time, outwaited = os.listdir(tmp_path / FOLDER), ManualClock(), set()
    for number in range(20):
        announced = replace(
            ELSEWHERE,
            purpose="removing",
            holds=tuple(names),
            every=0.0,
            run=run_name(0, f"{number:08x}"),
        )
        path = lease_path(dir_at(tmp_path), announced.run)
        with open(path, "wb") as file:
            file.write(announced.encode() if foreign == "announcements" else b"garbage")
    for name in names:
        acquire_read_lock(
            dir_at(tmp_path),
            name,
            str(tmp_path / FOLDER / name),
            sleep=time.sleep,
            outwaited=outwaited,
        ).release()
    assert 5 < time.now < 20


def test_a_later_announcement_is_waited_for(tmp_path):
    save(tmp_path, 5, 1)
    (name,), outwaited = os.listdir(tmp_path / FOLDER), {run_name(0, "0000bbbb")}
    publish_lease(tmp_path, replace(ELSEWHERE, purpose="removing", holds=(name,), every=0.0), 0)
    time = ManualClock()
    commit_dir = str(tmp_path / FOLDER / name)
    acquire_read_lock(
        dir_at(tmp_path), name, commit_dir, sleep=time.sleep, outwaited=outwaited
    ).release()
    assert time.now > 5


def test_a_reader_does_not_stop_a_job_from_saving(tmp_path):
    save(tmp_path, 5, 1)
    name = os.listdir(tmp_path / FOLDER)[0]
    lease = acquire_read_lock(dir_at(tmp_path), name, str(tmp_path / FOLDER / name))
    time = ManualClock()
    job = acquire_lease(tmp_path, time=time)
    fence(dir_at(tmp_path), job.run)
    assert time.now == 0
    lease.release()


def test_a_lock_of_a_dead_reader_does_not_count(tmp_path):
    dead = replace(dead_holder(), purpose="loading", holds=("step-x",))
    publish_lease(tmp_path, dead, sequence=0)
    assert read_locks(dir_at(tmp_path)) == {} and lease_holders(dir_at(tmp_path)) == []


def test_a_lock_of_another_host_expires_without_heartbeats(tmp_path, clock):
    reader = publish_lease(
        tmp_path, replace(ELSEWHERE, purpose="loading", holds=("step-x",)), sequence=0
    )
    seen = ReadLocks(dir_at(tmp_path))
    assert set(seen()) == {"step-x"}
    clock.now = BEAT * GIVEN_UP
    reader.beat()
    assert set(seen()) == {"step-x"}
    clock.now += BEAT * GIVEN_UP
    assert set(seen()) == {"step-x"}
    clock.now += 1
    assert seen() == {}


def test_an_unreadable_read_lock_protects_every_checkpoint(tmp_path, clock):
    save(tmp_path, 5, 1)
    save(tmp_path, 10, 1)
    names = {name for name in os.listdir(tmp_path / FOLDER)}
    reader = publish_lease(
        tmp_path, replace(ELSEWHERE, purpose="loading", holds=(min(names),)), sequence=0
    )
    path = tmp_path / FOLDER / f"claim-{reader.run}.json"
    seen, content = ReadLocks(dir_at(tmp_path)), path.read_bytes()
    path.write_bytes(b"x")
    assert set(seen()) == names and "cannot be read" in seen()[min(names)]
    # a reader does not stop a job from saving
    acquire_lease(tmp_path, time=clock)
    assert clock.now == 0
    clock.now = BEAT * GIVEN_UP
    assert set(seen()) == names
    clock.now += 1
    assert seen() == {} and path.exists()
    path.write_bytes(content)
    assert set(seen()) == {min(names)}


def test_a_reader_with_rare_heartbeats_gets_more_time(tmp_path, clock):
    publish_lease(
        tmp_path,
        replace(ELSEWHERE, purpose="loading", holds=("step-x",), every=2 * BEAT),
        sequence=0,
    )
    seen = ReadLocks(dir_at(tmp_path))
    assert set(seen()) == {"step-x"}
    clock.now = BEAT * GIVEN_UP + 1
    assert set(seen()) == {"step-x"}
    clock.now = 2 * BEAT * GIVEN_UP + 1
    assert seen() == {}


def test_an_unreadable_lock_may_be_of_the_removing_process(tmp_path):
    """Another user has written it with mode 0600."""
    save(tmp_path, 5, world=1)
    name = attempt_name(5, RUN)
    going, waits = announce_removal(dir_at(tmp_path), [name]), []

    class Private(PosixStorage):
        def open(self, path):
            if going.run in path:
                raise PermissionError(13, "Permission denied", path)
            return super().open(path)

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            going.release()

    lease = acquire_read_lock(
        CheckpointDir(Private(), str(tmp_path)), name, str(tmp_path / FOLDER / name), sleep=sleep
    )
    assert lease is not None and len(waits) == 3
    lease.release()
