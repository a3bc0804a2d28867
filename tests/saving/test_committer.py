import os
from dataclasses import replace

import pytest
from rank_folders import (
    RUN,
    dir_at,
    name_of,
    path_of,
    save,
    state_of,
    target_of,
    tensors_of,
    write_rank,
)
from storages import Hooked, failing

from mindresume.events import CommitDelayed, SaveAbandoned
from mindresume.formats import OURS
from mindresume.formats.scan import scan
from mindresume.model.manifest import MANIFEST, attempt_name, record_name, run_name
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import clean_own_folder, rank_shard, write_shard
from mindresume.storage.posix import PosixStorage

NEXT_RUN = run_name(2, "0000bbbb")


def steps(root):
    return [c.step for c in scan(dir_at(root)).candidates if c.committed]


def test_the_end_waits_until_the_deadline_and_names_the_missing_ranks(tmp_path, clock):
    events = []
    committer = Committer(
        target_of(tmp_path, 0, 4),
        emit=events.append,
    )
    write_rank(tmp_path, 5, 0, 4)
    write_rank(tmp_path, 5, 2, 4)
    committer.poll(5)
    assert committer.finish(timeout=10.0, pause=0.5) == {5: [1, 3]}
    assert 10.0 <= clock.now <= 11.0
    assert [(type(event), event.step, event.missing_ranks) for event in events] == [
        (SaveAbandoned, 5, (1, 3))
    ]


def test_a_commit_reads_no_manifest_that_it_has_read_before(tmp_path):
    """Each commit read those of all kept checkpoints again, twice: seconds for thousands."""
    disk = Hooked()
    committer = Committer(replace(target_of(tmp_path, 0, 2), storage=disk), KeepLast(4))
    for step in range(5, 55, 5):
        for rank in range(2):
            write_rank(tmp_path, step, rank, 2)
        committer.poll(step)
    opened = [path for what, path in disk.asked if what == "open" and path.endswith(MANIFEST)]
    assert steps(tmp_path) == [50, 45, 40, 35] and len(opened) == len(set(opened)) == 10


def test_where_all_is_kept_a_commit_lists_no_former_save_and_still_finds_incomplete_ones(tmp_path):
    disk = Hooked()
    save(tmp_path, 5, world=1)  # of an earlier run
    committer = Committer(replace(target_of(tmp_path, 0, 1, NEXT_RUN), storage=disk))
    listed = []
    for step in (10, 15, 20):
        write_rank(tmp_path, step, 0, 1, NEXT_RUN)
        disk.asked.clear()
        committer.poll(step)
        listed.append({path for operation, path in disk.asked if operation == "list"})
    older, *others = [committer.target.attempt(step) for step in (10, 15)]
    of_an_earlier_run = target_of(tmp_path, 0, 1).attempt(5)
    assert of_an_earlier_run in listed[0]
    assert not {of_an_earlier_run, older, *others} & listed[2]

    write_rank(tmp_path, 22, 0, 2, NEXT_RUN)  # a rank is missing, and none has polled for it
    write_rank(tmp_path, 25, 0, 1, NEXT_RUN)
    committer.poll(25)
    assert not os.path.exists(committer.target.attempt(22))
    assert steps(tmp_path) == [25, 20, 15, 10, 5]


def test_temporary_files_of_dead_runs_are_removed_and_those_of_this_run_kept(tmp_path):
    folder = tmp_path / "rank_0"
    folder.mkdir()
    for name in (
        f".a.safetensors.{RUN}.mindresume-tmp",
        f".b.safetensors.{NEXT_RUN}.mindresume-tmp",
        ".c.tmp",
        "d.ckpt",
    ):
        (folder / name).write_text("x")
    assert clean_own_folder(target_of(tmp_path, 0, 1, NEXT_RUN)) == [
        f".a.safetensors.{RUN}.mindresume-tmp"
    ]
    assert len(os.listdir(folder)) == 3


def test_a_manifest_from_records_of_two_world_sizes_is_refused(tmp_path):
    write_rank(tmp_path, 5, 0, 2)
    write_rank(tmp_path, 5, 1, 4)
    events = []
    assert Committer(target_of(tmp_path, 0, 2), emit=events.append).poll(5) == [5]
    assert "4 ranks; expected" in events[0].reason
    found = scan(dir_at(tmp_path)).candidates[0]
    assert (
        found.origin == OURS
        and found.problem is not None
        and MANIFEST not in os.listdir(found.records_dir)
    )


def test_the_manifest_merges_the_metrics_of_all_ranks_and_rank_0_wins(tmp_path):
    """With pipeline stages only the last stage has the loss."""
    for rank, metrics in ((0, {"accuracy": 0.5}), (1, {"accuracy": 0.9, "loss": 3.0})):
        write_shard(
            target_of(tmp_path, rank, 2),
            rank_shard(
                name_of(rank, 5), replace(state_of(5), metrics=metrics), tensors_of(rank, 5)
            ),
        )
    Committer(target_of(tmp_path, 0, 2)).poll(5)
    assert scan(dir_at(tmp_path)).candidates[0].metrics == {"accuracy": 0.5, "loss": 3.0}


# ---- a step that cannot be committed, or not yet -------------------------------------------------


def test_the_reason_is_emitted_once_and_again_at_the_end(tmp_path, clock):
    for rank in range(2):
        write_rank(tmp_path, 5, rank, 2)
    path_of(tmp_path, 5, 1).write_bytes(b"short")
    events = []
    committer = Committer(
        target_of(tmp_path, 0, 2),
        emit=events.append,
    )
    committer.poll(5)
    assert committer.finish(timeout=60.0) == {5: []}
    delayed, abandoned = events
    assert isinstance(delayed, CommitDelayed) and isinstance(abandoned, SaveAbandoned)
    assert delayed.step == abandoned.step == 5 and abandoned.missing_ranks == ()
    assert all("rank_1/net_rank_1-1_5.safetensors" in event.reason for event in events)


class ListedLate(PosixStorage):
    """Does not list the record of rank 1 of step 5 until this folder changes here; opening it by
    name works, as on NFS."""

    late = True

    def list(self, folder):
        names = super().list(folder)
        return (
            [name for name in names if name != record_name(1)]
            if self.late and attempt_name(5, RUN) in folder
            else names
        )

    def rename(self, old, new):
        super().rename(old, new)
        self.late = self.late and attempt_name(5, RUN) not in new


def written(root, *steps):
    for step in steps:
        for rank in range(2):
            write_rank(root, step, rank, 2)
    return replace(target_of(root, 0, 2), storage=ListedLate())


def test_a_step_whose_records_are_listed_late_is_committed_before_a_later_one(tmp_path):
    """The later commit would otherwise remove it as an incomplete save."""
    events, target = [], written(tmp_path, 5, 10)
    committer = Committer(target, KeepLast(2), events.append)
    committer.poll(5)
    assert committer.pending == [5]
    committer.poll(10)
    assert (committer.committed, committer.pending) == ([5, 10], [])
    assert not any(isinstance(event, SaveAbandoned) for event in events)
    assert [c.step for c in scan(dir_at(tmp_path)).candidates if c.committed] == [10, 5]


def test_steps_that_cannot_be_committed_are_each_tried_once_a_poll(tmp_path):
    disk = failing("net_rank_1", "status")
    committer = Committer(replace(target_of(tmp_path, 0, 2), storage=disk))
    for step in range(1, 9):
        for rank in range(2):
            write_rank(tmp_path, step, rank, 2)
        committer.poll(step)
    disk.asked.clear()
    assert committer.poll() == list(range(1, 9))
    opened = [path for what, path in disk.asked if what == "open"]
    assert len(opened) == 2 * 8 and all("rank_0000" in path for path in opened)
    committer.target = replace(committer.target, storage=PosixStorage())
    assert committer.poll() == [] and sorted(committer.committed) == list(range(1, 9))


def test_a_folder_that_cannot_be_read_at_the_end_is_an_error_after_the_event(tmp_path, clock):
    events = []
    committer = Committer(
        replace(target_of(tmp_path, 0, 1), storage=failing("", "list")),
        emit=events.append,
    )
    committer.poll(5)
    with pytest.raises(OSError, match="Stale file handle"):
        committer.finish(timeout=3.0)
    assert (
        isinstance(events[-1], SaveAbandoned)
        and "the next start commits it if all ranks have saved it" in events[-1].reason
    )
