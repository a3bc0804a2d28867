"""A step that cannot be committed, or not yet: its events, and records that are listed late."""

import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rank_folders import RUN, dir_at, path_of, target_of, write_rank

from mindresume.events import CommitDelayed, SaveAbandoned
from mindresume.formats.scan import scan
from mindresume.model.manifest import attempt_name, record_name
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KeepLast
from mindresume.storage.posix import PosixStorage


def test_the_reason_is_emitted_once_and_again_at_the_end(tmp_path):
    for rank in range(2):
        write_rank(tmp_path, 5, rank, 2)
    path_of(tmp_path, 5, 1).write_bytes(b"short")
    now, events = [0.0], []
    committer = Committer(
        target_of(tmp_path, 0, 2),
        emit=events.append,
        time=SimpleNamespace(
            monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
        ),
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


def test_at_the_end_a_record_that_is_listed_late_is_looked_for(tmp_path):
    committer = Committer(written(tmp_path, 5))
    committer.poll(5)
    assert (
        committer.pending == [5]
        and committer.finish(timeout=0.0) == {}
        and committer.committed == [5]
    )


class UnreadableWeights(PosixStorage):
    """Fails each access to the weights of rank 1 and counts how often a record is opened."""

    opened = 0

    def open(self, path):
        self.opened += os.path.basename(path).startswith("rank_0000")
        return super().open(path)

    def status(self, path):
        if f"{os.sep}rank_1{os.sep}" in path:
            raise OSError(errno.EIO, "Input/output error", path)
        return super().status(path)


def test_steps_that_cannot_be_committed_are_each_tried_once_a_poll(tmp_path):
    disk = UnreadableWeights()
    committer = Committer(replace(target_of(tmp_path, 0, 2), storage=disk))
    for step in range(1, 9):
        for rank in range(2):
            write_rank(tmp_path, step, rank, 2)
        committer.poll(step)
    disk.opened = 0
    assert committer.poll() == list(range(1, 9)) and disk.opened == 2 * 8
    committer.target = replace(committer.target, storage=PosixStorage())
    assert committer.poll() == [] and sorted(committer.committed) == list(range(1, 9))


def test_a_folder_that_cannot_be_read_at_the_end_is_an_error_after_the_event(tmp_path):
    class Gone(PosixStorage):
        def list(self, folder):
            raise OSError(errno.ESTALE, "Stale file handle", folder)

    events, now = [], iter(range(100))
    committer = Committer(
        replace(target_of(tmp_path, 0, 1), storage=Gone()),
        emit=events.append,
        time=SimpleNamespace(monotonic=lambda: float(next(now)), sleep=lambda seconds: None),
    )
    committer.poll(5)
    with pytest.raises(OSError, match="Stale file handle"):
        committer.finish(timeout=3.0)
    assert (
        isinstance(events[-1], SaveAbandoned)
        and "the next start commits it if all ranks have saved it" in events[-1].reason
    )
