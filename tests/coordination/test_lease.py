"""Leases: which holders are alive, which job has taken over, and the next run number."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from lease_holders import ELSEWHERE, ME, acquire_lease, dead_holder, publish_lease
from rank_folders import STORAGE, dir_at, save, simulated

from mindresume.coordination.lease import BEAT, LeaseHolder, fence, is_alive, lease_holders
from mindresume.coordination.lease_acquisition import EndedRuns, acquire, next_run
from mindresume.errors import LeaseHeldError, RecordError
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER, encode_head, run_name, run_sequence
from mindresume.storage.posix import PosixStorage
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


def test_a_zombie_process_counts_as_dead(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open(f"/proc/{child.pid}/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19])
    holder = replace(ME, pid=child.pid, started=started)
    assert is_alive(holder) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(holder) is False
    child.communicate()


def test_a_reused_process_number_is_another_process():
    assert is_alive(ME) is True
    assert is_alive(replace(ME, started=ME.started + 1)) is False
    assert is_alive(ELSEWHERE) is None
    assert is_alive(replace(ME, machine="")) is None


def test_a_lease_that_is_only_published_does_not_stop_the_job_that_has_acquired_the_folder(
    tmp_path,
):
    lease = acquire_lease(tmp_path)
    rival = publish_lease(tmp_path, ELSEWHERE, 2)
    fence(dir_at(tmp_path), lease.run)
    rival.beat()
    with pytest.raises(LeaseHeldError, match="node7"):
        fence(dir_at(tmp_path), lease.run)


@pytest.mark.parametrize("token, stops", [("00000000", False), ("ffffffff", True)])
def test_the_later_name_wins_between_two_runs_with_one_number(tmp_path, token, stops):
    save(tmp_path, 5, 1, run=run_name(1, token))
    if stops:
        with pytest.raises(LeaseHeldError):
            fence(dir_at(tmp_path), run_name(1, "88888888"))
    else:
        fence(dir_at(tmp_path), run_name(1, "88888888"))


def test_a_job_considered_dead_stops_saving_when_it_wakes_up(tmp_path):
    first = publish_lease(tmp_path, ELSEWHERE)
    fence(dir_at(tmp_path), first.run)
    second = acquire_lease(tmp_path)
    fence(dir_at(tmp_path), second.run)
    with pytest.raises(LeaseHeldError) as error:
        fence(dir_at(tmp_path), first.run)
    assert second.run in str(error.value) and first.run in str(error.value)


def test_a_job_considered_dead_stops_saving_after_its_successor_has_ended(tmp_path):
    save(tmp_path, 5, 1, run=run_name(2, "0000bbbb"))
    with pytest.raises(LeaseHeldError, match="run 0002-0000bbbb has taken over"):
        fence(dir_at(tmp_path), run_name(1, "0000aaaa"))


def test_a_lease_removed_by_hand_does_not_stop_a_job(tmp_path):
    lease = acquire_lease(tmp_path)
    for path in (tmp_path / FOLDER).iterdir():
        path.unlink()
    fence(dir_at(tmp_path), lease.run)
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


class _ListedTwice(PosixStorage):
    """An NFS listing of a folder that changes can name a file twice; each reading replaces it."""

    lease = None

    def list(self, path):
        return sorted(2 * super().list(path))

    def open(self, path):
        self.lease.beat()
        return super().open(path)


def test_a_lease_that_a_listing_names_twice_is_read_once(tmp_path):
    lease, storage = publish_lease(tmp_path, ELSEWHERE), _ListedTwice()
    storage.lease = lease
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
