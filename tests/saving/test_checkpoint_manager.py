"""The protocol of saving during one training, without mindformers: a few arrays instead of a
network."""

import json
import os
import queue
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from iteration_folders import COMMON
from manager_jobs import Arrays, FakeLoadAttempt, Job, committed, end_jobs, spoil
from rank_folders import MANIFEST, records_of
from senders import from_outside

import mindresume
from mindresume.errors import LeaseHeldError, SaveError
from mindresume.events import (
    ERROR,
    FAILED,
    Notice,
    PreemptionRequested,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    SaveWritten,
    TrainingEnded,
)
from mindresume.settings import Settings


@pytest.fixture(autouse=True)
def settled():
    yield
    end_jobs()


# ---- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [False, True])
def test_due_steps_and_the_last_step_are_saved(tmp_path, iterations):
    job = Job(tmp_path, iterations=iterations).steps(7).end()
    assert committed(tmp_path) == [5, 7] == [step for step, _ in job.saved] and job.collected == [
        5,
        7,
    ]
    name = "iteration_00000007" if iterations else "net_rank_0-1_7.safetensors"
    assert Arrays(job).collect().name == name
    assert (
        all(stall >= 0 for _, stall in job.saved)
        and not job.manager.is_active
        and job.manager.session.lease.step == 7
    )


@pytest.mark.parametrize("known", [False, True])
def test_a_release_that_knows_consumed_samples_finds_them(tmp_path, known):
    job = Job(tmp_path, iterations=True, every=50, samples_in_common=known).steps(5)
    counted = Arrays(job)
    save = counted.collect()
    counted.collect = lambda: replace(
        save, shard=replace(save.shard, state=replace(save.shard.state, consumed=70))
    )
    job.end(counted)
    assert json.loads((tmp_path / "iteration_00000005" / COMMON).read_bytes()).get(
        "consumed_samples"
    ) == (70 if known else None)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_save_in_the_background_is_staged_before_it_is_written(tmp_path, kind):
    job = Job(tmp_path, async_save=kind).steps(5).end()
    assert [event.kind for event in job.events][:4] == [
        "run_opened",
        "first_step_done",
        "save_begun",
        "save_staged",
    ]
    # both by the writer
    assert {event.kind for event in job.events[4:]} == {"save_written", "save_committed"}
    (staged,), (written,) = job.emitted(SaveStaged), job.emitted(SaveWritten)
    assert (staged.step, staged.name) == (
        5,
        "net_rank_0-1_5.safetensors",
    ) and staged.stall_seconds == written.stall_seconds


def test_a_skipped_step_is_counted(tmp_path):
    job = Job(tmp_path, settings=Settings(async_when_busy="skip"), async_save="thread")
    job.manager._saver.busy = lambda: True
    job.steps(10)
    assert [(event.step, event.skipped_in_total) for event in job.emitted(SaveSkipped)] == [
        (5, 1),
        (10, 2),
    ]


def test_a_save_that_an_earlier_run_could_not_commit_is_an_event_with_its_name(tmp_path):
    first = Job(tmp_path, leases={}).steps(5).end()
    (records_of(tmp_path, 5, first.manager.target.run) / MANIFEST).unlink()
    later = Job(tmp_path, leases={})
    (committed,), (written,) = later.emitted(SaveCommitted), first.emitted(SaveWritten)
    assert committed == SaveCommitted(5, 1, written.size_bytes, first.manager.target.run)


def test_an_error_of_collecting_is_a_failed_save(tmp_path):
    def collect(self):
        raise SaveError("no health")

    job = Job(tmp_path, settings=Settings(on_save_error="raise")).steps(4)
    job.step += 1
    with pytest.raises(SaveError, match="no health"):
        job.end_step(type("Failing", (Arrays,), {"collect": collect})(job))
    assert committed(tmp_path) == [] and job.saved == []


class Tier:
    """Stands for the tier in memory: keeps what it gets, and fails once like a device."""

    def __init__(self, fails_at):
        self.fails_at, self.given, self.notes = (
            fails_at,
            {},
            SimpleNamespace(committed=lambda step: None),
        )

    def step_end(self, state, save=None):
        self.given[state.step] = getattr(save, "step", save)
        if state.step == self.fails_at:
            raise RuntimeError("the device has failed")

    def stop(self):
        pass


def test_memory_never_gets_what_was_collected_at_an_earlier_step(tmp_path):
    """MindIO repairs a device and goes on in the same process: the arrays of the earlier step have
    later values by then."""
    job = Job(tmp_path)
    job.manager._tier = tier = Tier(fails_at=5)
    with pytest.raises(RuntimeError, match="device"):
        job.steps(5)
    job.steps(1)
    job.manager._tier = None
    assert tier.given == {1: None, 2: None, 3: None, 4: None, 5: 5, 6: None}


def test_an_earlier_training_of_this_process_releases_the_folder_and_one_of_another_process_does_not(  # noqa: E501
    tmp_path,
):
    memory = {}
    first = Job(tmp_path, leases=memory).steps(5)
    second = Job(tmp_path, leases=memory)
    assert [one.manager.target.run[:4] for one in (first, second)] == ["0001", "0002"]
    assert memory == {str(tmp_path): second.manager.session.lease}
    with pytest.raises(LeaseHeldError, match="0002"):
        first.steps(5)


@pytest.mark.parametrize("signalled", [False, True])
def test_a_load_attempt_has_the_run_and_ends_with_the_first_step(tmp_path, signalled):
    load_attempt = FakeLoadAttempt()
    job = Job(tmp_path, load_attempt=load_attempt)
    assert (load_attempt.run, load_attempt.hosts) == (job.manager.target.run, 1)
    job.manager.preemption.signalled = signalled
    job.manager.begin_load_attempt()
    job.manager.preemption.signalled = False
    assert load_attempt.begun is not signalled and load_attempt.result is None
    job.steps(1)
    assert load_attempt.result == "passed" and job.manager.pending.attempt is None


def test_a_preempted_training_saves_the_step_and_reports_the_reason(tmp_path):
    job = Job(tmp_path).steps(2)
    from_outside()
    assert job.steps(1).reason == "SIGTERM" and committed(tmp_path) == [3]
    assert job.emitted(PreemptionRequested) == [PreemptionRequested(3, "SIGTERM")]
    assert job.end().collected == [3]


@pytest.mark.parametrize("done", [0, 2])
def test_a_signal_of_its_own_ends_the_process_with_a_failure(tmp_path, monkeypatch, done):
    """As without a handler, although the training thread may wait for ever. The checkpoint that was
    loaded is not the reason."""
    ended, load_attempt = queue.SimpleQueue(), FakeLoadAttempt()
    monkeypatch.setattr(os, "_exit", ended.put)
    job = Job(tmp_path, load_attempt=load_attempt).steps(done)
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended.get(timeout=60) == 1
    (event,), (line,) = job.emitted(TrainingEnded), job.emitted(Notice)
    assert (line.text, line.level) == (event.reason, ERROR)
    assert (event.outcome, event.step) == (
        FAILED,
        done or None,
    ) and "MindSpore sent SIGTERM to its own process" in event.reason
    assert load_attempt.result == ("passed" if done else "mindresume said what is wrong")
    job.end()


# ---- failures ------------------------------------------------------------------------------------


def test_on_save_error_warn_continues_until_the_limit_of_failures(tmp_path):
    job = Job(tmp_path, settings=Settings(on_save_error="warn", max_failed_saves=3)).steps(4)
    spoil(tmp_path)
    job.steps(10)  # steps 5 and 10 fail
    with pytest.raises(SaveError, match="step 15"):
        job.steps(1)
    assert [(event.step, event.failures_in_a_row) for event in job.emitted(SaveFailed)] == [
        (5, 1),
        (10, 2),
        (15, 3),
    ]


def test_an_error_of_the_last_save_does_not_hide_that_of_the_training(tmp_path):
    job = Job(tmp_path, async_save="thread").steps(4)
    spoil(tmp_path)
    job.steps(1).manager.finish_after_error()
    assert [event.step for event in job.emitted(SaveFailed)] == [5]


def test_an_emergency_save_has_a_marker_and_writes_nothing_twice(tmp_path):
    job = Job(tmp_path).steps(7)
    assert [job.manager.emergency_save(Arrays(job)) for _ in range(2)] == [True, True]
    assert mindresume.open(tmp_path).latest().step == 7 and job.collected == [5, 7]
    assert (records_of(tmp_path, 7, job.manager.target.run) / "emergency").exists()


@pytest.mark.parametrize("waits", [False, True])
def test_a_failed_emergency_save_is_left_to_the_built_in_unless_it_would_wait(tmp_path, waits):
    job = Job(tmp_path).steps(7)
    step = type(
        "Broken",
        (Arrays,),
        {"collect_local": lambda self: 1 / 0, "needs_collectives": lambda self: waits},
    )(job)
    if waits:
        with pytest.raises(
            SaveError, match="step 7 was not saved before the end on rank 0: division by zero"
        ):
            job.manager.emergency_save(step)
    else:
        assert job.manager.emergency_save(step) is False
