"""The protocol of saving during one training, without mindformers: a few arrays instead of a network."""
import json
import threading
from types import SimpleNamespace

import pytest
from rank_folders import PER_EPOCH, STORAGE, Ranks, state_of, tensors_of

from mindresume.coordination import collectives
from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import LeaseHeldError, RemoteError, SaveError
from mindresume.events import (
    PreemptionRequested,
    RunOpened,
    SaveBegun,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    SaveWritten,
    ignore,
)
from mindresume.formats.iteration_naming import iteration_name
from mindresume.formats.rank_folder_naming import FileName
from mindresume.formats.scan import scan
from mindresume.model.manifest import EMERGENCY, FOLDER, MANIFEST, attempt_name
from mindresume.saving import checkpoint_manager as module
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.crash_loop import PendingLoadAttempt
from mindresume.saving.retention import KEEP_ALL
from mindresume.saving.save_request import SaveOptions, SaveRequest
from mindresume.saving.shard_writer import iteration_shard, rank_shard
from mindresume.saving.sync_saver import Save
from mindresume.settings import Settings

JOBS: list["Job"] = []


@pytest.fixture(autouse=True)
def settled():
    """No job of a test outlives it."""
    yield
    while JOBS:
        JOBS.pop().manager.finish_after_error()


class Arrays(SaveRequest):
    """Of ``job``, after its last step."""

    def __init__(self, job):
        super().__init__(job.step)
        self.job = job

    def collect(self):
        self.job.collected.append(self.step)
        target, state = self.job.manager.target, state_of(self.step)
        tensors = tensors_of(target.rank, self.step)
        if target.iterations:
            return Save(iteration_shard("net", target, state, tensors, None))
        name = FileName("net", target.rank, self.job.manager.session.suffix, state.epoch, state.step_in_epoch, "safetensors")
        return Save(rank_shard(name, state, tensors))

    def on_collected(self, save, name):
        self.job.told.append(("collected", name))

    def on_submitted(self, save, name):
        self.job.told.append(("submitted", name))


class Job:
    """One life of a training process."""

    def __init__(self, root, group=None, settings=None, pending=None, leases=None, iterations=False, every=5, **options):
        self.step, self.collected, self.told, self.events, self.reason = 0, [], [], [], ""
        options = SaveOptions(str(root), "net", every, iterations=iterations, **options)
        self.manager = CheckpointManager(
            STORAGE, group or SingleProcess(), settings or Settings(), options, KEEP_ALL, self.events.append, pending)
        self.manager.open(leases=leases)
        self.manager.begin(0)
        JOBS.append(self)
        self.manager.count_hosts()
        self.manager.handle_preemption()

    def emitted(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def saved(self):
        return [(event.step, event.stall_seconds) for event in self.emitted(SaveWritten)]

    def steps(self, count):
        for _ in range(count):
            self.step += 1
            self.reason = self.manager.step_end(Arrays(self))
        return self

    def end(self):
        self.manager.end(Arrays(self))
        return self


def committed(root):
    return sorted(c.step for c in scan(STORAGE, str(root)).candidates if c.committed)


# ---- saving --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("iterations", [False, True])
def test_due_steps_and_the_last_one_and_what_is_told(tmp_path, iterations):
    job = Job(tmp_path, iterations=iterations).steps(7).end()
    name = iteration_name if iterations else (lambda step: f"net_rank_0-1_{step}.safetensors")
    assert committed(tmp_path) == [5, 7] == [step for step, _ in job.saved] and job.collected == [5, 7]
    assert job.told == [(word, name(step)) for step in (5, 7) for word in ("collected", "submitted")]
    assert all(stall >= 0 for _, stall in job.saved) and not job.manager.saving and job.manager.session.lease.step == 7


@pytest.mark.parametrize("iterations", [False, True])
def test_the_events_of_a_run_tell_what_happened_to_each_step(tmp_path, iterations):
    job = Job(tmp_path, iterations=iterations).steps(5)
    opened, begun, committed, written = job.events
    assert opened == RunOpened(job.manager.target.run, str(tmp_path), "net" if iterations else "net_rank_0", 1)
    assert begun == SaveBegun(5)
    assert (committed.step, committed.ranks, committed.run_id) == (5, 1, None) and isinstance(committed, SaveCommitted)
    assert (written.step, written.size_bytes) == (5, committed.size_bytes) and 0 < written.write_seconds < written.stall_seconds


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_save_in_the_background_is_staged_before_it_is_written(tmp_path, kind):
    job = Job(tmp_path, async_save=kind).steps(5).end()
    assert [event.kind for event in job.events][:3] == ["run_opened", "save_begun", "save_staged"]
    assert {event.kind for event in job.events[3:]} == {"save_written", "save_committed"}         # both by the writer
    (staged,), (written,) = job.emitted(SaveStaged), job.emitted(SaveWritten)
    assert (staged.step, staged.name) == (5, "net_rank_0-1_5.safetensors") and staged.stall_seconds == written.stall_seconds


def test_a_step_that_is_left_out_is_counted(tmp_path):
    job = Job(tmp_path, settings=Settings(async_when_busy="skip"), async_save="thread")
    job.manager._saver.busy = lambda: True
    job.steps(10)
    assert [(event.step, event.skipped_in_total) for event in job.emitted(SaveSkipped)] == [(5, 1), (10, 2)]


def test_a_save_that_an_earlier_run_could_not_commit_is_an_event_with_its_name(tmp_path):
    first = Job(tmp_path, leases={}).steps(5).end()
    (tmp_path / FOLDER / attempt_name(5, first.manager.target.run) / MANIFEST).unlink()
    later = Job(tmp_path, leases={})
    (committed,), (written,) = later.emitted(SaveCommitted), first.emitted(SaveWritten)
    assert committed == SaveCommitted(5, 1, written.size_bytes, first.manager.target.run)


def test_an_error_of_the_record_is_a_failed_save(tmp_path):
    def on_collected(self, save, name):
        raise SaveError("no health")
    job = Job(tmp_path, settings=Settings(on_save_error="raise")).steps(4)
    job.step += 1
    with pytest.raises(SaveError, match="no health"):
        job.manager.step_end(type("Sick", (Arrays,), {"on_collected": on_collected})(job))
    assert committed(tmp_path) == [] and job.saved == []


def test_an_earlier_training_of_this_process_gives_the_folder_back_and_one_elsewhere_does_not(tmp_path):
    memory = {}
    first = Job(tmp_path, leases=memory).steps(5)
    second = Job(tmp_path, leases=memory)
    assert [one.manager.target.run[:4] for one in (first, second)] == ["0001", "0002"]
    assert memory == {str(tmp_path): second.manager.session.lease}
    with pytest.raises(LeaseHeldError, match="0002"):
        first.steps(5)


def test_all_ranks_by_seconds_of_rank_0(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def work(group):
        options = SaveOptions(str(tmp_path), "net", None, 60.0)
        manager = CheckpointManager(STORAGE, group, Settings(), options, KEEP_ALL, ignore,
                                    since=-100.0 if group.rank == 0 else 0.0)
        return [manager.should_save(step) for step in (1, 2)]
    assert Ranks(2).run(work) == [[True, False]] * 2


class FakeTrial:
    begun, told = False, None

    def begin(self):
        self.begun = True

    def passed(self):
        self.told = "passed"


@pytest.mark.parametrize("signalled", [False, True])
def test_a_trial_knows_the_run_and_ends_with_the_first_step(tmp_path, signalled):
    load_attempt = FakeTrial()
    job = Job(tmp_path, pending=PendingLoadAttempt(load_attempt))
    assert (load_attempt.run, load_attempt.hosts) == (job.manager.target.run, 1)
    job.manager.preemption.signalled = signalled
    job.manager.begin_load_attempt()
    job.manager.preemption.signalled = False
    assert load_attempt.begun is not signalled and load_attempt.told is None
    job.steps(1)
    assert load_attempt.told == "passed" and job.manager.pending.attempt is None


def test_whoever_is_asked_to_leave_saves_the_step_and_says_why(tmp_path):
    job = Job(tmp_path).steps(2)
    job.manager.preemption.signalled = True
    assert job.steps(1).reason == "SIGTERM" and committed(tmp_path) == [3]
    assert job.emitted(PreemptionRequested) == [PreemptionRequested(3, "SIGTERM")]
    assert job.end().collected == [3]


# ---- trouble -------------------------------------------------------------------------------------------------------

def spoil(root):
    """A file in the place of the folder of rank 0: nothing can be written there, not even by root."""
    root.mkdir(parents=True, exist_ok=True)
    if (root / "rank_0").is_dir():
        (root / "rank_0").rename(root / "aside")
    (root / "rank_0").write_text("in the way")


def repair(root):
    (root / "rank_0").unlink()


def test_on_save_error_raise(tmp_path):
    job = Job(tmp_path, settings=Settings(on_save_error="raise")).steps(4)
    spoil(tmp_path)
    with pytest.raises(SaveError, match="step 5 was not saved on rank 0"):
        job.steps(1)


def test_on_save_error_warn_goes_on_until_the_ceiling(tmp_path):
    job = Job(tmp_path, settings=Settings(on_save_error="warn", max_failed_saves=3)).steps(4)
    spoil(tmp_path)
    job.steps(10)                                                       # steps 5 and 10 fail
    with pytest.raises(SaveError, match="step 15"):
        job.steps(1)
    assert [(event.step, event.failures_in_a_row) for event in job.emitted(SaveFailed)] == [(5, 1), (10, 2), (15, 3)]


def test_a_success_resets_the_count_of_failures(tmp_path):
    job = Job(tmp_path, settings=Settings(on_save_error="warn", max_failed_saves=2)).steps(4)
    for _ in range(2):
        spoil(tmp_path)
        job.steps(5)
        repair(tmp_path)
        job.steps(5)
    assert committed(tmp_path) == [10, 20]


def test_no_ceiling(tmp_path):
    job = Job(tmp_path, settings=Settings(on_save_error="warn", max_failed_saves=0)).steps(4)
    spoil(tmp_path)
    job.steps(30)
    repair(tmp_path)
    job.end()
    assert committed(tmp_path) == [34]


@pytest.mark.parametrize("kind", [False, "thread", "process"])
def test_a_training_that_ends_with_an_error_commits_what_it_had_begun(tmp_path, monkeypatch, kind):
    class Late:
        def __init__(self):
            self.unregistered = []

        def register(self, function, *arguments):
            pass

        def unregister(self, function):
            self.unregistered.append(function)
    monkeypatch.setattr(module, "atexit", Late())
    job = Job(tmp_path, async_save=kind).steps(5)
    job.manager.finish_after_error()
    assert committed(tmp_path) == [5]
    job.manager.finish_after_error()                                    # at the exit of the interpreter: nothing is left to do
    assert module.atexit.unregistered == [job.manager.finish_after_error] * 2


def test_an_error_of_the_last_save_does_not_hide_that_of_the_training(tmp_path):
    job = Job(tmp_path, async_save="thread").steps(4)
    spoil(tmp_path)
    job.steps(1).manager.finish_after_error()
    assert [event.step for event in job.emitted(SaveFailed)] == [5]


def test_a_failed_upload_stops_the_training_only_with_on_save_error_raise(tmp_path):
    Job(tmp_path / "1",
        settings=Settings(max_failed_saves=1)).manager.outcomes.handle_upload_errors([RemoteError("one"), RemoteError("two")])
    with pytest.raises(RemoteError, match="one"):
        Job(tmp_path / "2", settings=Settings(on_save_error="raise")).manager.outcomes.handle_upload_errors([RemoteError("one")])


def test_a_rescue_leaves_a_mark_and_writes_nothing_twice(tmp_path):
    job = Job(tmp_path).steps(7)
    assert [job.manager.emergency_save(Arrays(job)) for _ in range(2)] == [True, True]
    newest = scan(STORAGE, str(tmp_path)).candidates[0]
    assert (newest.step, job.collected) == (7, [5, 7]) and (tmp_path / FOLDER / newest.name / EMERGENCY).exists()


@pytest.mark.parametrize("waits", [False, True])
def test_a_rescue_that_fails_is_left_to_others_unless_they_would_wait(tmp_path, waits):
    job = Job(tmp_path).steps(7)
    step = type("Broken", (Arrays,), {"collect_local": lambda self: 1 / 0, "needs_collectives": lambda self: waits})(job)
    if waits:
        with pytest.raises(SaveError, match="step 7 was not saved before the end on rank 0: division by zero"):
            job.manager.emergency_save(step)
    else:
        assert job.manager.emergency_save(step) is False


# ---- the last step, on several ranks -----------------------------------------------------------------------------------

class Peer:
    """The group of this rank and one other, which is busy for some exchanges, and then says ``row`` (or is gone)."""
    rank, size = 0, 2

    def __init__(self, row, busy=0):
        self.row, self.busy, self.told = row, busy, []

    def gather(self, message):
        if isinstance(self.row, Exception):
            raise self.row
        if isinstance(json.loads(message), list):                       # who is done?
            self.busy -= 1
            return [message, json.dumps([self.busy < 0, 0, 0]).encode()]
        self.told.append(json.loads(message)["value"])
        return [message, json.dumps({"value": self.row}).encode()]


SAVED, UNSAVED, RAISES = [True, False], [False, False], [False, True]


def lonely_failure(root, row):
    """The last step fails on this rank alone; then its disk is well again."""
    job = Job(root).steps(4)
    job.manager.training_end.group = Peer(row)
    spoil(root)
    job.steps(1)
    repair(root)
    return job


def test_who_has_saved_the_last_step_takes_part_when_another_rank_repeats_it(tmp_path):
    job = Job(tmp_path).steps(5)
    job.manager.training_end.group = Peer(UNSAVED)
    job.end()
    assert job.collected == [5, 5] and committed(tmp_path) == [5]
    assert [path.name for path in (tmp_path / "rank_0").glob("*.safetensors")] == ["net_rank_0-1_5.safetensors"]


def test_who_has_not_saved_the_last_step_repeats_it_with_the_others(tmp_path):
    assert lonely_failure(tmp_path, SAVED).end().collected == [5, 5] and committed(tmp_path) == [5]


def test_nobody_repeats_it_if_one_ends_with_an_error_and_all_end(tmp_path):
    job = lonely_failure(tmp_path, RAISES)
    with pytest.raises(SaveError, match="rank 1 ends with an error"):
        job.end()
    assert job.collected == [5] and committed(tmp_path) == []


def test_who_leaves_does_not_wait_for_a_rank_that_ended_with_an_error(tmp_path):
    """After a signal the end of the training would be one exchange more."""
    job = Job(tmp_path).steps(5)
    job.manager.training_end.group = Peer(RAISES)
    job.manager.preemption = SimpleNamespace(check=lambda step: "SIGTERM", close=lambda: None)
    with pytest.raises(SaveError, match="rank 1 ends with an error"):
        job.steps(1)
    assert len(job.manager.training_end.group.told) == 1
    job.manager.finish_after_error()
    assert committed(tmp_path) == [5]


def test_who_ends_with_an_error_tells_the_others_first(tmp_path):
    job = Job(tmp_path, settings=Settings(on_save_error="raise"), async_save="thread").steps(4)
    spoil(tmp_path)
    job.manager.training_end.group = Peer(SAVED)
    job.steps(1)
    with pytest.raises(SaveError, match="step 5"):
        job.end()
    assert job.manager.training_end.group.told == [RAISES] and job.collected == [5]


def test_all_have_saved_it(tmp_path):
    job = Job(tmp_path).steps(PER_EPOCH)
    job.manager.training_end.group = Peer(SAVED)
    assert job.end().collected == [5, 10]


def test_a_writer_that_is_busy_elsewhere_is_waited_for_in_short_exchanges(tmp_path):
    job = Job(tmp_path).steps(5)
    peer = job.manager.training_end.group = Peer(UNSAVED, busy=1)
    job.end()
    assert job.collected == [5, 5] and peer.busy == -3 and peer.told == [SAVED, None, None, SAVED]


def test_a_rank_that_is_lost_at_the_end_is_the_error_of_the_training(tmp_path):
    job = Job(tmp_path).steps(5)
    job.manager.training_end.group = Peer(RuntimeError("the other rank is gone"))
    with pytest.raises(RuntimeError, match="the other rank is gone"):
        job.end()
    assert job.collected == [5] and committed(tmp_path) == [5]


# ---- the end ---------------------------------------------------------------------------------------------------------------

class Uploads:
    """In the place of an Uploader."""

    def __init__(self, work=lambda: []):
        self.work, self.done = work, []

    def poll(self):
        return []

    def enqueue(self, step):
        self.done.append(step)

    def finish(self, timeout):
        self.done.append("finished")
        return self.work()


@pytest.mark.parametrize("error", [LeaseHeldError("taken over"), SaveError("no room"), ValueError("a defect")])
def test_after_an_error_of_one_part_of_the_end_all_others_are_done(tmp_path, error):
    job = Job(tmp_path).steps(5)
    uploads = job.manager._uploader = Uploads(lambda: [RemoteError("no such bucket")])

    def finish(timeout):
        raise error
    job.manager._saver.finish = finish
    with pytest.raises(type(error), match=str(error)):
        job.end()
    assert uploads.done[-1] == "finished" and list((tmp_path / FOLDER).glob("claim-*")) == []


def test_an_error_of_the_last_save_is_raised_when_everything_is_done(tmp_path):
    """Only this rank has it, so the others go on with the end."""
    job = Job(tmp_path, settings=Settings(on_save_error="raise")).steps(5)
    job.manager.training_end.group = Peer(SAVED)
    uploads = job.manager._uploader = Uploads()
    job.step += 1
    (tmp_path / "rank_0").rename(tmp_path / "aside")
    (tmp_path / "rank_0").write_text("in the way")
    with pytest.raises(SaveError, match="step 6"):
        job.end()
    assert job.manager.training_end.group.told == [UNSAVED, None, None, None, [True, True]] and uploads.done == ["finished"]


class Other(Peer):
    """``last``: what the other rank says in the last exchange of the end."""
    last = RAISES

    def gather(self, message):
        if not isinstance(json.loads(message), list) and len(self.told) == 3:
            self.row = self.last
        return super().gather(message)


def test_an_error_that_another_rank_alone_has_at_the_end_is_one_of_all(tmp_path):
    """Who leaves after a signal comes to one exchange more, and would wait there for the rank that raised."""
    job = Job(tmp_path).steps(5)
    job.manager.training_end.group = Other(SAVED)
    with pytest.raises(SaveError, match="rank 1 does: its log names it"):
        job.end()
    assert committed(tmp_path) == [5] and list((tmp_path / FOLDER).glob("claim-*")) == []


class Broken(Arrays):
    def collect(self):
        raise MemoryError("no room for a copy")


def test_whatever_the_last_save_raises_the_others_are_told_first(tmp_path):
    job = Job(tmp_path).steps(5)
    job.manager.training_end.group = Peer(SAVED)
    job.step += 1
    with pytest.raises(MemoryError, match="no room for a copy"):
        job.manager.end(Broken(job))
    assert job.manager.training_end.group.told == [UNSAVED, None, None, [True, True]]


def test_who_takes_part_in_a_save_of_others_and_fails_tells_them_first(tmp_path):
    job = Job(tmp_path).steps(5)
    job.manager.training_end.group = Peer(UNSAVED)
    with pytest.raises(MemoryError, match="no room for a copy"):
        job.manager.end(Broken(job))
    assert job.manager.training_end.group.told == [SAVED, None, None, [True, True]]


@pytest.mark.parametrize("part", ["commits", "uploads"])
def test_the_others_follow_the_end_in_short_exchanges(tmp_path, monkeypatch, part):
    """Its work is done only after ten exchanges: if another rank waited for it in one of them, it never would be."""
    job, enough = Job(tmp_path, settings=Settings(on_save_error="raise")).steps(5), threading.Event()

    class Counting(Peer):
        exchanges = 0

        def gather(self, message):
            self.exchanges += 1
            if self.exchanges == 10:
                enough.set()
            return super().gather(message)
    job.manager.training_end.group = Counting(SAVED)
    monkeypatch.setattr(collectives, "LONGEST_PAUSE", collectives.FIRST_PAUSE)

    def work(*timeout):
        return [] if enough.wait(60) else [RemoteError("nobody followed")]
    if part == "commits":
        job.manager._saver.finish = work
    else:
        job.manager._uploader = Uploads(work)
    job.end()
    assert job.manager.training_end.group.exchanges > 10


def test_a_rank_that_is_lost_while_this_one_commits_does_not_stop_it(tmp_path):
    job, done = Job(tmp_path).steps(5), []

    class Leaving(Peer):
        def gather(self, message):
            if self.told:                                               # it has told that its step is saved
                raise RuntimeError("the other rank is gone")
            return super().gather(message)
    job.manager.training_end.group = Leaving(SAVED)
    left = threading.Event()

    def finish(timeout):
        left.wait(0.1)
        done.append("committed")
        return []
    job.manager._saver.finish = finish
    job.manager._uploader = Uploads()
    with pytest.raises(RuntimeError, match="the other rank is gone"):
        job.end()
    assert done == ["committed"] and list((tmp_path / FOLDER).glob("claim-*")) == []
