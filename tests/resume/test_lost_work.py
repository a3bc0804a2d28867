"""Steps that a resume lost, as far as the killed job recorded them."""

from dataclasses import replace

import pytest
from rank_folders import RUN, dir_at, save, write_rank

from mindresume.coordination.lease import SAVING, Lease, holder_of_this_process
from mindresume.coordination.lease_acquisition import acquire
from mindresume.formats.scan import scan
from mindresume.model.manifest import run_name
from mindresume.resume.job_selection import LostWork, find_lost_work

LATER = run_name(2, "0000bbbb")


def dead(run=RUN, step=0, machine=None):
    # the number of the process is in use again
    holder = replace(holder_of_this_process(SAVING), run=run, step=step, started=1)
    return replace(holder, machine=machine) if machine is not None else holder


def lost(root):
    return find_lost_work(dir_at(root), scan(dir_at(root)).candidates[0])


@pytest.mark.parametrize("machine", [None, "another"])
def test_the_last_heartbeat_gives_the_last_step(tmp_path, machine):
    save(tmp_path, 10)
    Lease(dir_at(tmp_path), dead(step=17, machine=machine)).publish()
    assert lost(tmp_path) == LostWork(7, 1010.0)


def test_a_started_save_gives_a_later_step(tmp_path):
    save(tmp_path, 10)
    Lease(dir_at(tmp_path), dead(step=12)).publish()
    write_rank(tmp_path, 15, 1, 4)
    found = [c for c in scan(dir_at(tmp_path)).candidates if c.step == 10][0]
    assert find_lost_work(dir_at(tmp_path), found).steps == 5


def test_ended_and_running_jobs_lost_nothing(tmp_path):
    save(tmp_path, 10)
    assert lost(tmp_path) is None
    lease = acquire(dir_at(tmp_path), replace(holder_of_this_process(SAVING), run=LATER))
    lease.step = 30
    lease.beat()
    assert lost(tmp_path) is None  # it is running
    lease.release()
    assert lost(tmp_path) is None  # it said that it ended


def test_the_last_of_several_dead_counts(tmp_path):
    save(tmp_path, 10)
    Lease(dir_at(tmp_path), dead(step=40)).publish()
    Lease(dir_at(tmp_path), dead(LATER, step=11)).publish()
    assert lost(tmp_path).steps == 1


@pytest.mark.parametrize("since, seconds", [(100.0, 60.0), (None, None), (200.0, 0.0)])
def test_seconds_since_the_checkpoint_was_saved(since, seconds):
    # never negative: clocks of hosts differ
    assert LostWork(7, since).seconds(160.0) == seconds
