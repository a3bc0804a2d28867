"""Saving behind the training, in a thread and in a process: nothing torn, nothing silent, no memory
beyond one buffer."""

import os
import signal
import threading
import time
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from rank_folders import (
    RUN,
    STORAGE,
    dir_at,
    name_of,
    path_of,
    save,
    state_of,
    target_of,
    tensors_of,
    write_rank,
)

from mindresume.coordination import host_memory
from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import LeaseHeldError
from mindresume.events import SaveAbandoned, SaveNotStaged, WriterDied
from mindresume.fault_injection.faults import Fault
from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.model.manifest import LAST_STEPS, run_name
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving import async_saver
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import SyncSaver
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.shard_writer import (
    ExtraWeights,
    Outcome,
    Save,
    SaveTarget,
    rank_shard,
    write_shard,
)
from mindresume.saving.staging import Staging, StagingLimits
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header, read_tensor
from sim.cluster import Cluster, current_cluster, current_process
from sim.machine import use_cluster
from sim.mount import Mount
from sim.schedule import Schedule

KINDS = ["thread", "process"]
ROOT = "/out/checkpoint"
PATIENCE = 600.0


def shard(step, rank=0, fmt="safetensors", tensors=None):
    return rank_shard(
        name_of(rank, step, 0, fmt), state_of(step), tensors or tensors_of(rank, step)
    )


def save_of(step, rank=0, **how):
    return Save(shard(step, rank, **how))


def saver_in(root, kind, world=1, rank=0, policy=KEEP_ALL, **options):
    return AsyncSaver(target_of(root, rank, world), policy if rank == 0 else None, kind, **options)


def steps(root):
    return [candidate.step for candidate in scan_records(dir_at(root))[0] if candidate.committed]


@pytest.mark.parametrize("kind", KINDS)
def test_values_at_the_time_of_the_call_are_saved(tmp_path, kind):
    """Parameters change at once after the call, as the next step changes them."""
    saver = saver_in(tmp_path, kind)
    for step in (5, 10):
        tensors = tensors_of(0, step)
        expected = {name: array.copy() for name, array in tensors.items()}
        saver.save(replace(save_of(step, tensors=tensors), ledger=b"rows"))
        for array in tensors.values():
            array[...] = 0
        (outcome,) = saver.wait(PATIENCE)
        assert outcome.saved and outcome.error is None and outcome.size > 0
        path = path_of(tmp_path, step, 0)
        with open(path, "rb") as file:
            header = read_header(file, str(path))
            for name, array in expected.items():
                assert read_tensor(file, header.tensors[name]).tobytes() == array.tobytes(), name
    assert saver.finish(PATIENCE) == []
    assert steps(tmp_path) == [10, 5]
    assert [path.read_bytes() for path in tmp_path.rglob(LAST_STEPS)] == [b"rows"] * 2
    assert (
        select_checkpoint(STORAGE, str(tmp_path), SingleProcess(), SelectionPolicy(1)).chosen.step
        == 10
    )


def test_every_dtype_text_and_shape_survives_the_buffer(tmp_path):
    tensors = {
        "bf16": np.arange(7, dtype=np.float32).astype(ml_dtypes.bfloat16),
        "zero": np.array(3, np.int64),
        "empty": np.zeros((0, 4), np.float16),
        "columns": np.arange(12, dtype=np.float64).reshape(3, 4).T,
        "flag": np.array([True, False]),
        "text": np.array("dynamic"),
    }
    saver = saver_in(tmp_path, "process")
    saver.save(save_of(5, fmt="ckpt", tensors=tensors))
    assert saver.finish(PATIENCE)[0].error is None
    with open(path_of(tmp_path, 5, 0, fmt="ckpt"), "rb") as file:
        header = read_header(file, "x.ckpt")
        for name, array in tensors.items():
            found = read_tensor(file, header.tensors[name])
            assert (found.shape, found.tobytes()) == (array.shape, array.tobytes()), name


def test_a_foreign_bfloat16_keeps_its_bits():
    """MindSpore brings a numpy type of its own of that name; values must not pass through a
    cast."""
    # a NaN with payload, a denormal, -infinity
    bits = np.array([0x7FC1, 0x0001, 0xFF80], np.uint16)
    staging = Staging()
    save = save_of(5, tensors={"x": bits.view(ml_dtypes.bfloat16)})
    unpacked = staging.unpack(staging.pack(save))
    assert unpacked.shard.files[0].tensors["x"].view(np.uint16).tolist() == bits.tolist()


def test_the_buffer_is_made_once_and_grows_only_for_more(tmp_path):
    staging = Staging()
    first = staging.pack(save_of(5))
    memory = staging._memory
    staging.pack(save_of(10))
    assert staging._memory is memory and staging.size == first.size == Staging.needed(save_of(5))
    staging.pack(save_of(15, tensors={**tensors_of(0, 15), "more": np.zeros(1000)}))
    assert staging.size > first.size


class Job:
    """Is rank 0 of a simulated job: its saver, and its disk."""

    def __init__(self, kind, world, policy, timeout):
        self.storage, self.world, self.events = (
            Mount(current_cluster(), current_process()),
            world,
            [],
        )
        self.saver = AsyncSaver(
            SaveTarget(self.storage, ROOT, RUN, 0, world),
            policy,
            kind,
            emit=self.events.append,
            timeout=timeout,
        )

    def write(self, step, rank, run=RUN):
        """Writes the shard of another rank."""
        write_shard(SaveTarget(self.storage, ROOT, run, rank, self.world), shard(step, rank))

    def steps(self):
        return [
            candidate.step
            for candidate in scan_records(CheckpointDir(self.storage, ROOT))[0]
            if candidate.committed
        ]

    def emitted(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def kill_writer(self):
        current_cluster().kill(self.saver._writer._process)


def simulated(work, kind, world=1, policy=KEEP_ALL, timeout=PATIENCE, slow=0):
    """``work(job)`` in simulated time. ``slow``: number of an operation on the disk that takes 100
    s."""
    cluster = Cluster(Schedule(faults=(Fault(slow, "slow", 100),) if slow else ()))
    with use_cluster(cluster):
        process = cluster.process(
            cluster.host(), "rank0", lambda: work(Job(kind, world, policy, timeout))
        )
        cluster.scheduler.run()
    if process.error is not None:
        raise process.error


def test_a_writer_that_the_training_did_not_wait_for_does_not_write_zeros():
    """The copy of the save is released at the end of the training. The same holds for a thread that
    starts the save only then."""

    def work(job):
        job.saver.save(save_of(5))
        writer = job.saver._writer
        (outcome,) = job.saver.finish(0.05)
        assert not outcome.saved and "still being written" in str(outcome.error)
        writer.close()
        writer._thread.join(PATIENCE)
        assert not writer.alive() and job.storage.list(ROOT) == [] and job.steps() == []

    simulated(work, "thread", slow=1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_continues_during_the_write(kind):
    def work(job):
        job.saver.save(save_of(5))
        assert (
            job.saver.busy() and job.saver.poll() == [] and current_cluster().scheduler.now == 0.0
        )
        assert [outcome.step for outcome in job.saver.wait(PATIENCE)] == [5]
        assert not job.saver.busy() and current_cluster().scheduler.now > 100.0
        job.saver.finish(PATIENCE)

    simulated(work, kind, slow=9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_save_waits(kind):
    def work(job):
        job.saver.save(save_of(5))
        job.saver.save(save_of(6))
        (outcome,) = job.saver.poll()
        assert not outcome.saved and "step 5 is still being written after 2 s" in str(outcome.error)
        assert 2.0 <= current_cluster().scheduler.now < 2.1
        job.saver.timeout = PATIENCE
        job.saver.save(save_of(7))
        assert [(o.step, o.saved) for o in job.saver.finish(PATIENCE)] == [(5, True), (7, True)]
        assert job.steps() == [7, 5]

    simulated(work, kind, timeout=2.0, slow=9)


class Slow(PosixStorage):
    """Blocks in the writer until the file ``go`` exists."""

    def __init__(self, go):
        self.go = go

    def write(self, path, pieces, size=0):
        while size and not os.path.exists(self.go):
            time.sleep(0.005)
        return super().write(path, pieces, size)


def slow_saver(tmp_path):
    target = SaveTarget(
        Slow(str(tmp_path / "go")), str(tmp_path / "checkpoint"), run_name(1, "0000aaaa"), 0, 1
    )
    return AsyncSaver(target, KEEP_ALL, "process")


def test_a_killed_writer_process_is_an_error_and_gets_a_successor(tmp_path):
    save(tmp_path / "checkpoint", 1, 1)
    saver = slow_saver(tmp_path)
    saver.save(save_of(5))
    os.kill(saver._writer._process.pid, signal.SIGKILL)
    (outcome,) = saver.wait(PATIENCE)
    assert not outcome.saved and "died (exit status -9)" in str(outcome.error)
    assert (
        select_checkpoint(
            STORAGE, str(tmp_path / "checkpoint"), SingleProcess(), SelectionPolicy(1)
        ).chosen.step
        == 1
    )
    (tmp_path / "go").touch()
    saver.save(save_of(10))
    assert saver.finish(PATIENCE)[0].saved
    assert steps(tmp_path / "checkpoint") == [10, 1]


class KillableWriter:
    """Reports a step as saved, unless ``silent``, and never finishes."""

    silent = False

    def __init__(self, *_):
        self.said, self.running = [], True

    def send(self, message):
        if message[0] == "save" and not self.silent:
            self.said.append(("outcome", Outcome(message[1].save.step, True)))

    def receive(self, patience):
        return self.said.pop(0) if self.said else None

    def alive(self):
        return self.running

    def end(self):
        return "killed"


class Written:
    """Receives what a saver writes in the background."""

    def __init__(self):
        self.steps, self.over = [], threading.Event()

    def writing(self, step):
        self.steps.append(step)
        if not step:
            self.over.set()


def test_a_thread_tells_that_it_has_written_although_the_training_does_not_ask(tmp_path):
    written = Written()
    saver = saver_in(tmp_path, "thread", watcher=written)
    saver.save(save_of(5))
    assert written.over.wait(PATIENCE) and written.steps == [5, 0]
    saver.finish(PATIENCE)
    assert steps(tmp_path) == [5]


def test_a_thread_tells_the_end_of_a_save_that_failed(tmp_path, monkeypatch):
    written = Written()
    saver = saver_in(tmp_path, "thread", watcher=written)
    monkeypatch.setattr(SyncSaver, "write", lambda job, save: 1 / 0)
    saver.save(save_of(5))
    assert written.over.wait(PATIENCE) and written.steps == [5, 0]
    (outcome,) = saver.finish(PATIENCE)
    assert not outcome.saved and "ZeroDivisionError: division by zero" in str(outcome.error)


def test_the_death_of_a_writing_thread_is_the_end_of_its_save(tmp_path, monkeypatch):
    monkeypatch.setitem(async_saver.WRITERS, "thread", KillableWriter)
    monkeypatch.setattr(KillableWriter, "silent", True)
    written = Written()
    saver = saver_in(tmp_path, "thread", watcher=written)
    saver.save(save_of(5))
    assert written.steps == [5]
    saver._writer.running = False
    saver.poll()
    assert written.steps == [5, 0]


def test_what_a_process_writes_is_no_work_of_this_one(tmp_path):
    written = Written()
    saver = saver_in(tmp_path, "process", watcher=written)
    saver.save(save_of(5))
    saver.finish(PATIENCE)
    assert written.steps == []


# 1: written in the training, committed by the writer
@pytest.mark.parametrize("budget", [0, 1])
def test_a_writer_killed_during_its_commit_has_saved(tmp_path, monkeypatch, budget):
    monkeypatch.setitem(async_saver.WRITERS, "thread", KillableWriter)
    saver = saver_in(tmp_path, "thread", limits=StagingLimits(budget))
    saver.save(save_of(5))
    assert [outcome.saved for outcome in saver.poll()] == [True] and saver.busy()
    saver._writer.running = False
    assert saver.poll() == [] and not saver.busy()


def test_a_writer_killed_in_the_second_save_of_a_step_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(async_saver.WRITERS, "thread", KillableWriter)
    saver = saver_in(tmp_path, "thread", world=2, rank=1)
    saver.save(save_of(5, 1))
    saver.poll()
    saver._writer.running = False
    assert saver.poll() == []
    monkeypatch.setattr(KillableWriter, "silent", True)
    saver.save(save_of(5, 1))
    saver._writer.running = False
    assert [(outcome.saved, "died (killed)" in str(outcome.error)) for outcome in saver.poll()] == [
        (False, True)
    ]


@pytest.mark.parametrize("late", ["before the next step", "after it", "at the end"])
def test_the_successor_of_a_writer_that_was_killed_commits_what_that_one_had_saved(late):
    def work(job):
        job.saver.save(save_of(5))
        assert job.saver.wait(PATIENCE)[0].saved
        writer = job.saver._writer
        job.kill_writer()
        if late == "before the next step":
            job.write(5, 1)
        if late != "at the end":
            assert job.saver.poll() == [] and job.saver._writer not in (None, writer)
        if late != "before the next step":
            job.write(5, 1)
        assert job.saver.finish(PATIENCE) == [] and job.steps() == [5]
        assert job.emitted(WriterDied) == [WriterDied("process", "exit status -9", 5)]

    simulated(work, "process", world=2)


def test_the_successor_commits_no_older_step_after_a_newer_one():
    def work(job):
        job.saver.save(save_of(5))
        job.saver.wait(PATIENCE)
        job.kill_writer()
        job.write(10, 1)
        job.saver.save(save_of(10))
        job.saver.wait(PATIENCE)
        assert job.steps() == [10]
        job.write(5, 1)  # too late
        job.saver.poll()
        assert job.saver.finish(PATIENCE) == [] and job.steps() == [10]
        assert len(job.emitted(WriterDied)) == 1 and job.emitted(SaveAbandoned) == []

    simulated(work, "process", world=2)


@pytest.mark.parametrize(
    "error",
    [OSError(11, "Resource temporarily unavailable"), RuntimeError("can't start new thread")],
)
def test_a_writer_that_cannot_be_started_is_an_error_of_the_save(tmp_path, monkeypatch, error):
    def start(*_):
        raise error

    saver = saver_in(tmp_path, "thread")
    with monkeypatch.context() as patched:
        patched.setitem(async_saver.WRITERS, "thread", start)
        saver.save(save_of(5))
        (outcome,) = saver.poll()
        assert not outcome.saved and str(error) in str(outcome.error)
    saver.save(save_of(10))
    assert saver.finish(PATIENCE)[0].saved


def test_the_end_releases_the_memory(tmp_path):
    saver = saver_in(tmp_path, "process")
    saver.save(save_of(5))
    memory = f"/proc/self/fd/{saver._staging.fd}"
    assert "memfd:mindresume" in os.readlink(memory)
    saver.finish(PATIENCE)
    assert saver._staging.fd == -1 and saver._staging.size == 0


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"budget": 64}, "staging_gib) is 0 MiB"),
        ({"share": 64}, "the share of this rank"),
        ({}, "container, has left 0 MiB"),
    ],
)
def test_the_training_thread_saves_without_memory_for_a_copy(
    tmp_path, monkeypatch, options, reason
):
    events = []
    monkeypatch.setattr(host_memory, "left", lambda: host_memory.UNKNOWN if options else 10)
    saver = saver_in(tmp_path, "thread", emit=events.append, limits=StagingLimits(**options))
    saver.save(save_of(5))
    assert path_of(tmp_path, 5, 0).exists()
    (event,) = [event for event in events if isinstance(event, SaveNotStaged)]
    assert event.step == 5 and reason in event.reason
    assert saver.finish(PATIENCE)[0].saved
    assert steps(tmp_path) == [5]


@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_commits_what_another_rank_completes_later(kind):
    def work(job):
        job.saver.save(save_of(5))
        assert job.saver.wait(PATIENCE)[0].saved and job.steps() == []
        job.saver.poll()
        current_cluster().scheduler.sleep(1.0)
        assert job.steps() == []
        job.write(5, 1)
        job.saver.poll()
        current_cluster().scheduler.sleep(1.0)
        assert job.steps() == [5]
        job.saver.finish(PATIENCE)

    simulated(work, kind, world=2, policy=KeepLast(1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_waits_for_the_other_ranks_and_names_them(kind):
    def work(job):
        job.saver.save(save_of(5))
        job.write(5, 2)
        job.saver.wait(PATIENCE)
        began = current_cluster().scheduler.now
        job.saver.finish(30.0)
        assert [(event.step, event.missing_ranks) for event in job.emitted(SaveAbandoned)] == [
            (5, (1,))
        ]
        assert 30.0 <= current_cluster().scheduler.now - began < 31.0

    simulated(work, kind, world=3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_held_by_another_job_stops_the_training(kind):
    def work(job):
        job.write(5, 0, run_name(2, "0000bbbb"))
        job.saver.save(save_of(10))
        with pytest.raises(LeaseHeldError, match="0002-0000bbbb"):
            job.saver.wait(PATIENCE)
        with pytest.raises(LeaseHeldError):
            job.saver.poll()

    simulated(work, kind)


def test_a_new_writer_commits_what_the_dead_one_completed(tmp_path):
    write_rank(tmp_path, 5, 0, 1)
    saver = saver_in(tmp_path, "thread")
    saver.save(save_of(10))
    saver.finish(PATIENCE)
    assert steps(tmp_path) == [10, 5]


def test_files_for_inference_are_written_by_the_writer_too(tmp_path):
    weights = np.arange(10, dtype=np.float32)
    saver = saver_in(tmp_path / "checkpoint", "process")
    saver.save(
        Save(
            shard(5),
            (
                ExtraWeights(
                    str(tmp_path / "network"),
                    "net_rank_0-network-1_5.safetensors",
                    "network",
                    "safetensors",
                    {"w": weights},
                    {},
                ),
            ),
        )
    )
    weights[:] = 0
    assert saver.finish(PATIENCE)[0].error is None
    with open(tmp_path / "network" / "net_rank_0-network-1_5.safetensors", "rb") as file:
        header = read_header(file, "x.safetensors")
        assert read_tensor(file, header.tensors["w"]).tolist() == list(range(10))


def test_a_rank_that_only_writes_is_no_work_for_poll(tmp_path):
    saver = saver_in(tmp_path, "thread", world=2, rank=1)
    assert saver.poll() == [] and saver._writer is None
    saver.save(save_of(5, rank=1))
    assert saver.finish(PATIENCE)[0].saved


def test_finish_without_a_save_does_nothing(tmp_path):
    assert saver_in(tmp_path, "process").finish(PATIENCE) == []


def test_an_existing_buffer_is_used_although_memory_is_short(tmp_path, monkeypatch):
    saver, events = saver_in(tmp_path, "thread"), []
    saver.emit = events.append
    saver.save(save_of(5))
    monkeypatch.setattr(host_memory, "left", lambda: 0)
    saver.save(save_of(10))
    saver.finish(PATIENCE)
    assert not [event for event in events if isinstance(event, SaveNotStaged)]
