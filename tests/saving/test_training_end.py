"""The end of a training on several ranks: the last step, its commit and upload, and errors that all
ranks get."""

import json
import threading
from types import SimpleNamespace

import pytest
from manager_jobs import Arrays, Job, committed, end_jobs, repair, spoil
from rank_folders import PER_EPOCH, leases

from mindresume.errors import LeaseHeldError, RemoteError, SaveError
from mindresume.settings import Settings


@pytest.fixture(autouse=True)
def settled():
    yield
    end_jobs()


# ---- the last step, on several ranks -------------------------------------------------------------


class Peer:
    """The group of this rank and one other, which is busy for some exchanges, and then sends
    ``row`` (or is lost)."""

    rank, size = 0, 2

    def __init__(self, row, busy=0):
        self.row, self.busy, self.sent = row, busy, []

    def gather(self, message):
        if isinstance(self.row, Exception):
            raise self.row
        if isinstance(json.loads(message), list):  # who is done?
            self.busy -= 1
            return [message, json.dumps([self.busy < 0, 0, 0]).encode()]
        self.sent.append(json.loads(message)["value"])
        return [message, json.dumps({"value": self.row}).encode()]


SAVED, UNSAVED, RAISES = [True, False, None], [False, False, None], [False, True, None]


def lonely_failure(root, row):
    """Fails the last step on this rank alone; then its disk works again."""
    job = Job(root).steps(4)
    job.manager.group = Peer(row)
    spoil(root)
    job.steps(1)
    repair(root)
    return job


def test_a_rank_that_did_not_save_the_last_step_repeats_it_with_the_others(tmp_path):
    assert lonely_failure(tmp_path, SAVED).end().collected == [5, 5] and committed(tmp_path) == [5]


def test_no_rank_repeats_it_if_one_ends_with_an_error(tmp_path):
    job = lonely_failure(tmp_path, RAISES)
    with pytest.raises(SaveError, match="rank 1 ends with an error"):
        job.end()
    assert job.collected == [5] and committed(tmp_path) == []


def test_a_preempted_rank_does_not_wait_for_a_rank_that_ended_with_an_error(tmp_path):
    """After a signal the end of the training has one exchange more."""
    job = Job(tmp_path).steps(5)
    job.manager.group = Peer(RAISES)
    job.manager.preemption.close()
    job.manager.preemption = SimpleNamespace(check=lambda step: "SIGTERM", close=lambda: None)
    with pytest.raises(SaveError, match="rank 1 ends with an error"):
        job.steps(1)
    assert len(job.manager.group.sent) == 1
    job.manager.finish_after_error()
    assert committed(tmp_path) == [5]


def test_a_rank_that_ends_with_an_error_notifies_the_others_first(tmp_path):
    job = Job(tmp_path, settings=Settings(on_save_error="raise"), async_save="thread").steps(4)
    spoil(tmp_path)
    job.manager.group = Peer(SAVED)
    job.steps(1)
    with pytest.raises(SaveError, match="step 5"):
        job.end()
    assert job.manager.group.sent == [RAISES] and job.collected == [5]


def test_no_save_is_repeated_if_all_ranks_saved_the_last_step(tmp_path):
    job = Job(tmp_path).steps(PER_EPOCH)
    job.manager.group = Peer(SAVED)
    assert job.end().collected == [5, 10]


def test_a_rank_takes_part_when_another_repeats_the_last_step_and_waits_in_short_exchanges(
    tmp_path,
):
    job = Job(tmp_path).steps(5)
    peer = job.manager.group = Peer(UNSAVED, busy=1)
    job.end()
    assert job.collected == [5, 5] and committed(tmp_path) == [5]
    assert [path.name for path in (tmp_path / "rank_0").glob("*.safetensors")] == [
        "net_rank_0-1_5.safetensors"
    ]
    # exchanges of who is done: three, and more if the work takes longer
    assert peer.busy <= -3 and peer.sent == [SAVED, None, None, SAVED[:2]]


def test_a_rank_lost_at_the_end_is_the_error_of_the_training(tmp_path):
    job = Job(tmp_path).steps(5)
    job.manager.group = Peer(RuntimeError("the other rank is gone"))
    with pytest.raises(RuntimeError, match="the other rank is gone"):
        job.end()
    assert job.collected == [5] and committed(tmp_path) == [5]


# ---- the end -------------------------------------------------------------------------------------


class Uploads:
    """Replaces an Uploader."""

    def __init__(self, work=lambda: []):
        self.work, self.done = work, []

    def poll(self):
        return []

    def enqueue(self, step):
        self.done.append(step)

    def finish(self, timeout):
        self.done.append("finished")
        return self.work()


@pytest.mark.parametrize(
    "error", [LeaseHeldError("taken over"), SaveError("no room"), ValueError("a defect")]
)
def test_the_other_parts_of_the_end_run_after_an_error_of_one(tmp_path, error):
    job = Job(tmp_path).steps(5)
    uploads = job.manager._uploads = Uploads(lambda: [RemoteError("no such bucket")])

    def finish(timeout):
        raise error

    job.manager._saver.finish = finish
    with pytest.raises(type(error), match=str(error)):
        job.end()
    assert uploads.done[-1] == "finished" and leases(tmp_path) == []


def test_an_error_of_the_last_save_is_raised_after_the_end(tmp_path):
    """Only this rank has the error, so the others continue with the end."""
    job = Job(tmp_path, settings=Settings(on_save_error="raise")).steps(5)
    job.manager.group = Peer(SAVED)
    uploads = job.manager._uploads = Uploads()
    job.step += 1
    (tmp_path / "rank_0").rename(tmp_path / "aside")
    (tmp_path / "rank_0").write_text("in the way")
    with pytest.raises(SaveError, match="step 6"):
        job.end()
    assert job.manager.group.sent == [UNSAVED, None, None, None, [True, True]] and uploads.done == [
        "finished"
    ]


class Other(Peer):
    """``last``: the message of the other rank in the last exchange of the end."""

    last = RAISES

    def gather(self, message):
        if not isinstance(json.loads(message), list) and len(self.sent) == 3:
            self.row = self.last
        return super().gather(message)


def test_an_error_of_one_rank_at_the_end_is_raised_on_all(tmp_path):
    """A rank that leaves after a signal makes one exchange more, and would wait there for the rank
    that raised."""
    job = Job(tmp_path).steps(5)
    job.manager.group = Other(SAVED)
    with pytest.raises(SaveError, match="rank 1 does: its log names it"):
        job.end()
    assert committed(tmp_path) == [5] and leases(tmp_path) == []


class Broken(Arrays):
    def collect(self):
        raise MemoryError("no room for a copy")


def test_the_others_are_notified_before_any_error_of_the_last_save(tmp_path):
    job = Job(tmp_path).steps(5)
    job.manager.group = Peer(SAVED)
    job.step += 1
    with pytest.raises(MemoryError, match="no room for a copy"):
        job.end(Broken(job))
    assert job.manager.group.sent == [UNSAVED, None, None, [True, True]]


def test_a_rank_that_fails_in_the_save_of_others_notifies_them_first(tmp_path):
    job = Job(tmp_path).steps(5)
    job.manager.group = Peer(UNSAVED)
    with pytest.raises(MemoryError, match="no room for a copy"):
        job.end(Broken(job))
    assert job.manager.group.sent == [SAVED, None, None, [True, True]]


@pytest.mark.parametrize("part", ["commits", "uploads"])
def test_the_others_follow_the_end_in_short_exchanges(tmp_path, monkeypatch, part):
    """The work ends only after ten exchanges: if another rank waited for it in one exchange, it
    would never end."""
    job, enough = (
        Job(tmp_path, settings=Settings(on_save_error="raise")).steps(5),
        threading.Event(),
    )

    class Counting(Peer):
        exchanges = 0

        def gather(self, message):
            self.exchanges += 1
            if self.exchanges == 10:
                enough.set()
            return super().gather(message)

    job.manager.group = Counting(SAVED)
    monkeypatch.setattr("mindresume.coordination.collectives.LONGEST_PAUSE", 0.01)

    def work(*timeout):
        return [] if enough.wait(60) else [RemoteError("nobody followed")]

    if part == "commits":
        job.manager._saver.finish = work
    else:
        job.manager._uploads = Uploads(work)
    job.end()
    assert job.manager.group.exchanges > 10


def test_a_rank_that_is_lost_while_this_one_commits_does_not_stop_it(tmp_path):
    job, done = Job(tmp_path).steps(5), []

    class Leaving(Peer):
        def gather(self, message):
            # it has reported its step as saved
            if self.sent:
                raise RuntimeError("the other rank is gone")
            return super().gather(message)

    job.manager.group = Leaving(SAVED)
    left = threading.Event()

    def finish(timeout):
        left.wait(0.1)
        done.append("committed")
        return []

    job.manager._saver.finish = finish
    job.manager._uploads = Uploads()
    with pytest.raises(RuntimeError, match="the other rank is gone"):
        job.end()
    assert done == ["committed"] and leases(tmp_path) == []


@pytest.mark.parametrize("raises", [False, True])
def test_a_failed_upload_stops_the_training_only_with_on_save_error_raise(tmp_path, raises):
    job = Job(
        tmp_path, settings=Settings(on_save_error="raise" if raises else "warn", max_failed_saves=1)
    )
    job.steps(4).manager._uploads = SimpleNamespace(
        poll=lambda: [RemoteError("one"), RemoteError("two")], enqueue=lambda step: None
    )
    if raises:
        with pytest.raises(RemoteError, match="one"):
            job.steps(1)
    else:
        job.steps(1)
    # also the step that was due then
    assert committed(tmp_path) == [5]
    job.manager._uploads = None
