"""One look at a folder in which a job saves: saves in progress, heartbeats, free space."""
from dataclasses import replace

import iteration_folders
from lease_holders import ELSEWHERE, ME, dead_holder, publish_lease
from rank_folders import RUN, folder_contents, save, write_rank

from mindresume.api.observation import observe


def test_a_folder_that_does_not_exist_is_none(tmp_path):
    assert observe(tmp_path / "new") is None


def test_an_empty_folder_has_no_checkpoints(tmp_path):
    found = observe(tmp_path)
    assert (found.listing.checkpoints, found.saves, found.heartbeats) == ((), (), ()) and found.free_bytes > 0


def test_it_shows_which_ranks_have_recorded_a_save_of_a_running_job(tmp_path):
    publish_lease(tmp_path, ME)
    save(tmp_path, 10)
    for rank in (1, 3):
        write_rank(tmp_path, 20, rank, 4)
    (found,) = observe(tmp_path).saves
    assert (found.step, found.run_id, found.world_size, found.recorded_ranks) == (20, RUN, 4, (1, 3))


def test_it_shows_a_save_of_checkpoint_2_in_progress(tmp_path):
    publish_lease(tmp_path, ELSEWHERE)
    iteration_folders.write_rank(tmp_path, 20, 1)
    (found,) = observe(tmp_path).saves
    assert (found.step, found.world_size, found.recorded_ranks) == (20, 2, (1,))


def test_what_a_dead_job_left_is_no_save_in_progress(tmp_path):
    write_rank(tmp_path, 20, 1, 4)
    assert observe(tmp_path).saves == ()
    publish_lease(tmp_path, dead_holder())
    found = observe(tmp_path)
    assert (found.saves, found.heartbeats, found.listing.in_use_by[0].alive) == ((), (), False)


def test_a_heartbeat_has_the_step_and_the_time_of_its_file(tmp_path):
    lease = publish_lease(tmp_path, replace(ME, every=7.0))
    lease.step = 12
    lease.beat()
    (beat,) = observe(tmp_path).heartbeats
    path = tmp_path / ".mindresume" / f"claim-{lease.run}.json"
    assert (beat.run_id, beat.count, beat.step, beat.every, beat.written_at) == (lease.run, 1, 12, 7.0, path.stat().st_mtime)


def test_it_writes_nothing(tmp_path):
    publish_lease(tmp_path, ME)
    save(tmp_path, 10)
    write_rank(tmp_path, 20, 1, 4)
    before = folder_contents(tmp_path)
    observe(tmp_path)
    assert folder_contents(tmp_path) == before
