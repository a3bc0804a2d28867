"""Saves of one rank in memory, death after each operation included."""

import os
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from memory_tiers import StepRequest
from rank_folders import STORAGE, dir_at, tensors_of

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.lease import acquire_read_lock
from mindresume.events import TierRefused, TierSaved
from mindresume.fault_injection.faults import READS, Fault, FaultInjector, Killed, Scheduler
from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.model.manifest import attempt_name, run_name
from mindresume.resume.verifier import Verifier
from mindresume.saving.memory_tier import slots
from mindresume.saving.memory_tier.directory import SLOTS
from mindresume.saving.memory_tier.slots import MappedFile
from mindresume.saving.memory_tier.tier import MemoryTier
from mindresume.saving.shard_writer import SaveTarget
from mindresume.settings import MemoryTierSettings, Settings
from mindresume.storage.posix import PosixStorage

RUN = run_name(1, "0000aaaa")


class Training:
    """Ranks 0 to ``world`` - 1 of one node, in one thread."""

    def __init__(
        self,
        root,
        every=2,
        world=1,
        run=RUN,
        iterations=False,
        loaded=None,
        storage=STORAGE,
        fmt="safetensors",
        **options,
    ):
        self.events, self.step, self.fmt = [], 0, fmt
        settings = Settings(
            memory_tier=MemoryTierSettings(every, str(root), limit_gib=options.pop("limit_gib", 0))
        )
        self.tiers = [
            MemoryTier(
                SaveTarget(storage, str(root), run, rank, world, iterations, (), run),
                SingleProcess(),
                settings,
                self.events.append,
                loaded=loaded,
                **options,
            )
            for rank in range(world)
        ]

    def steps(self, count, ranks=None):
        for _ in range(count):
            self.step += 1
            for rank, tier in enumerate(self.tiers):
                if ranks is None or rank in ranks:
                    tier.step_end(StepRequest(tier.slots.target, self.step, self.fmt))
        return self

    def stop(self):
        for tier in self.tiers:
            tier.stop()
        return self

    def saved(self):
        return [event.step for event in self.events if isinstance(event, TierSaved)]

    def refused(self):
        return [event for event in self.events if isinstance(event, TierRefused)]


def whole(root, ranks=1, storage=STORAGE):
    """Returns the steps in a tier that are whole, newest first, after a check of every byte."""
    found = []
    for candidate in scan_records(CheckpointDir(storage, str(root)))[0]:
        if candidate.problem is None:
            shards = [
                Verifier(CheckpointDir(storage, str(root)), candidate).verify(rank)
                for rank in range(ranks)
            ]
            assert all(getattr(shard, "details", None) for shard in shards), shards
            found.append(candidate.step)
    return found


@pytest.mark.parametrize("iterations", [False, True])
@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
@pytest.mark.parametrize("every, held", [(1, [7, 6, 5]), (2, [6, 4]), (3, [6, 3])])
def test_the_newest_saves_are_whole_and_their_files_are_used_again(
    memory, every, held, fmt, iterations
):
    job = Training(memory, every, world=2, fmt=fmt, iterations=iterations).steps(7).stop()
    assert whole(memory, 2) == held and not job.refused()
    inodes = {
        os.stat(os.path.join(folder, name)).st_ino
        for folder, _, names in os.walk(memory)
        for name in names
        if name.endswith(fmt) or iterations and name.endswith("safetensors")
    }
    for tier in job.tiers:
        tier._is_off = False
    job.steps(6).stop()
    again = {
        os.stat(os.path.join(folder, name)).st_ino
        for folder, _, names in os.walk(memory)
        for name in names
        if name.endswith(fmt) or iterations and name.endswith("safetensors")
    }
    assert again == inodes and len(whole(memory, 2)) == len(held)


def faulty(kind="", at=0):
    """Injects a fault at an operation of the only rank."""
    chance = random.Random(0)
    fault = Fault(at, kind) if kind else None
    return FaultInjector(STORAGE, Scheduler(1, chance), fault, chance)


def changes(injector):
    """Returns the numbers of the operations that change something."""
    reads = (*READS, "free_space")
    return [row.number for row in injector.operations if row.name not in reads]


def mortal_job(memory, injector, **options):
    """Returns a training that runs its background work at once, so that the order of operations is
    the same each time."""
    job = Training(memory, storage=injector.storage_of(0), **options)
    for tier in job.tiers:
        tier._background.start = lambda work, *values: work(*values)
    return job


class Torn(MappedFile):
    """A file whose content changes in two operations."""

    def __init__(self, path, size, injector):
        self.injector = injector
        super().__init__(path, size)

    def resize(self, size):
        with self.injector.operation(0, "write", self.path):
            super().resize(size)
            self.data[: len(self.data) // 2] = 7
        with self.injector.operation(0, "write", self.path):
            pass


@pytest.mark.parametrize("every, steps, iterations", [(1, 6, False), (2, 8, True)])
def test_death_before_each_operation_leaves_a_whole_save(
    memory, monkeypatch, every, steps, iterations
):
    memory, disk, seen = Path(memory), faulty(), set()
    monkeypatch.setattr(slots, "mapped_file", lambda path, size: Torn(path, size, disk))
    mortal_job(memory / "all", disk, every=every, iterations=iterations).steps(steps)
    operations = changes(disk)
    assert len(operations) > 40
    for at in operations:
        root, disk = memory / str(at), faulty("kill all", at)
        job = mortal_job(root, disk, every=every, iterations=iterations)
        with suppress(Killed):
            job.steps(steps)
        disk = faulty()
        found = whole(root)
        # in every step before, the work was done at once
        ended = job.step - 1
        due = [step for step in range(2, ended + 1) if step % every == 0]
        if due:
            assert found and max(found) >= due[-1] and found[0] in (due[-1], due[-1] + every), (
                at,
                found,
                due,
            )
        seen.add(tuple(found))
        loaded = next((c for c in scan_records(dir_at(root))[0] if c.problem is None), None)
        resumed = (
            Training(root, every, run=run_name(2, "0000bbbb"), iterations=iterations, loaded=loaded)
            .steps(5)
            .stop()
        )
        assert not resumed.refused() and len(whole(root)) == (3 if every == 1 else 2)
        assert scan_records(dir_at(root))[0][0].run == run_name(2, "0000bbbb")
        assert not [name for name in os.listdir(root) if name.startswith("stale-")]
        assert all(RUN not in name for name in os.listdir(root / SLOTS))
    assert len(seen) > 3


@pytest.mark.parametrize("kind", ["EIO", "EIO after"])
def test_an_error_of_any_operation_leaves_no_record_of_overwritten_files(memory, kind):
    """The process may die between the copy and the background work, too."""

    def run(root, disk):
        job, work = Training(root, storage=disk.storage_of(0)), []
        # returns None: nothing to wait for
        job.tiers[0]._background.start = lambda *row: work.append(row)
        begun = 0
        for step in range(1, 11):
            begun = len(disk.operations) if step == 6 else begun
            job.steps(1)
            if step in (6, 8, 10):
                # what has all of its records is as it was written
                whole(root)
            while work:
                function, *values = work.pop()
                function(*values)
            if step == 6:
                ended = len(disk.operations)
        return job, [at for at in changes(disk) if begun < at <= ended]

    _, operations = run(os.path.join(memory, "all"), faulty())
    assert len(operations) >= 10
    # those of the first save that overwrites another
    for at in operations:
        job, _ = run(os.path.join(memory, str(at)), faulty(kind, at))
        assert len(job.refused()) <= 1 and whole(os.path.join(memory, str(at))) == [10, 8], at


def test_a_save_that_one_rank_lacks_is_overwritten_and_the_older_one_stays(memory):
    job = Training(memory, 2, world=2).steps(4)
    for tier in job.tiers:
        tier._join(tier._work)
    job.steps(2, ranks=[0])  # rank 1 does not save step 6
    assert whole(memory, 2) == [4]
    job.tiers[1]._last_step = 6
    job.steps(2).stop()
    assert whole(memory, 2) == [8, 4]


def test_the_loaded_save_stays_until_a_newer_one_is_common(memory):
    Training(memory, 2).steps(4).stop()
    loaded = scan_records(dir_at(memory))[0][0]
    path = os.path.join(memory, loaded.first.path)
    with open(path, "rb") as file:
        content = file.read()
        job = Training(memory, 2, run=run_name(2, "0000bbbb"), loaded=loaded)
        job.step = 4
        job.tiers[0].begin(4)
        job.steps(3)
        job.tiers[0]._join(job.tiers[0]._work)
        # step 2 of the first run is gone
        assert whole(memory) == [6, 4]
        job.steps(5).stop()
        assert whole(memory) == [12, 10] and not os.path.exists(path)
        file.seek(0)
        # whoever maps it still sees the same bytes
        assert file.read() == content


def test_a_save_that_is_being_read_is_not_written_into(memory):
    job = Training(memory, 2).steps(5)
    job.tiers[0]._join(job.tiers[0]._work)
    older = scan_records(dir_at(memory))[0][1]
    assert older.step == 2
    lock = acquire_read_lock(dir_at(memory), older.name, older.commit_dir)
    with open(os.path.join(memory, older.first.path), "rb") as file:
        content = file.read()
        job.steps(1).stop()
        file.seek(0)
        assert file.read() == content and whole(memory) == [6, 4]
    lock.release()


def test_a_full_tmpfs_while_a_save_is_read_costs_one_save(memory, monkeypatch):
    job = Training(memory, 2).steps(5)
    tier = job.tiers[0]
    tier._join(tier._work)
    older = scan_records(dir_at(memory))[0][1]
    lock = acquire_read_lock(dir_at(memory), older.name, older.commit_dir)
    with monkeypatch.context() as patch:
        patch.setattr(slots, "mapped_file", full)
        job.steps(1)
    job.steps(5).stop()
    assert whole(memory) == [10, 8] and [event.step for event in job.refused()] == [6]
    lock.release()


def test_what_is_written_to_disk_after_an_error_has_the_bytes_of_the_save(memory):
    for fmt in ("safetensors", "ckpt"):
        job = Training(memory, 2, fmt=fmt).steps(7).stop()
        assert job.tiers[0].newest(after=6) is None
        shard = job.tiers[0].newest(after=3)
        assert shard.state.step == 6
        for name, array in tensors_of(0, 6, 1).items():
            stored = shard.files[0].tensors[name]
            assert stored.dtype == array.dtype and np.array_equal(stored, array)
        assert shard.files[0].metadata == {} and shard.random == {"python": "of rank 0"}


def test_there_is_no_tier_without_memory_for_it_on_all_ranks(memory):
    for options in ({"share": 100}, {"limit_gib": 1e-7}):
        job = Training(memory, 2, **options).steps(4).stop()
        assert job.saved() == [] and len(job.refused()) == 1 and job.refused()[0].step is None
        assert not os.path.exists(os.path.join(memory, SLOTS))


@pytest.mark.parametrize("share, has", [(1.05, False), (1.2, True)])
def test_a_part_of_the_tmpfs_stays_free_for_others(memory, share, has):
    """Semaphores and the buffers of other programs lie in /dev/shm, too. ``share``: free space, of
    what the slots need."""
    storage = PosixStorage()
    job = Training(memory, 2).steps(2).stop()
    needed = sum(mapped.size for slot in job.tiers[0].slots._slots for mapped in slot.files)
    storage.free_space = lambda folder: int(needed * share)
    job = Training(os.path.join(memory, "other"), 2, storage=storage).steps(4).stop()
    assert bool(job.saved()) is has and len(job.refused()) == (not has)


def full(path, size):
    raise OSError(28, "No space left on device", path)


def test_a_full_tmpfs_costs_the_tier_and_not_the_training(memory, monkeypatch):
    monkeypatch.setattr(slots, "mapped_file", full)
    job = Training(memory, 2).steps(20).stop()
    (refused,) = job.refused()
    assert job.saved() == [] and refused.step is None and "No space" in refused.reason


def test_a_rank_that_saves_nothing_more_still_takes_part_in_a_collective_collect(memory):
    job = Training(memory, 2)
    tier = job.tiers[0]
    for step in range(1, 12):
        tier.step_end(StepRequest(tier.slots.target, step, bad=step > 1, collective=True))
    assert len(job.refused()) == 5
    request = StepRequest(tier.slots.target, 12, collective=True)
    tier.step_end(request)
    assert request.collected == 1 and tier._is_off
    alone = StepRequest(tier.slots.target, 14)
    tier.step_end(alone)
    assert alone.collected == 0
    job.stop()


def test_a_later_run_in_the_tier_stops_the_saves_of_an_earlier_one(memory):
    first = Training(memory, 2).steps(3)
    Training(memory, 2, run=run_name(2, "0000bbbb")).steps(3).stop()
    first.steps(5).stop()
    assert first.saved() == [2] and first.refused()
    assert {candidate.run for candidate in scan_records(dir_at(memory))[0]} == {
        run_name(2, "0000bbbb")
    }


def test_a_folder_that_somebody_removed_costs_one_save(memory):
    job = Training(memory, 2).steps(5)
    job.tiers[0]._join(job.tiers[0]._work)
    for name in (attempt_name(2, RUN), attempt_name(4, RUN)):
        for entry in os.listdir(os.path.join(memory, ".mindresume", name)):
            os.remove(os.path.join(memory, ".mindresume", name, entry))
    for name in os.listdir(os.path.join(memory, "rank_0")):
        os.remove(os.path.join(memory, "rank_0", name))
    assert whole(memory) == []
    job.steps(5).stop()
    assert whole(memory)[0] == 10


def test_a_target_of_one_of_several_nodes_has_the_records_of_its_ranks(memory):
    job = Training(memory, 2, world=2)
    for tier in job.tiers:
        tier.slots.target = replace(tier.slots.target, world_size=4, local_ranks=(0, 1))
    job.steps(4).stop()
    candidate = scan_records(dir_at(memory))[0][0]
    assert (candidate.step, candidate.world_size, candidate.local_ranks, candidate.problem) == (
        4,
        4,
        (0, 1),
        None,
    )


def test_a_step_ends_only_when_earlier_background_work_is_done(memory):
    job = Training(memory, 2).steps(1)
    tier, order, threads = job.tiers[0], [], []
    tier._join(tier._reserving)

    class Slow:
        def __init__(self, *work):
            self.work = work
            threads.append(self)

        def wait(self, timeout):
            if self.work:
                order.append("background")
                function, *values = self.work
                function(*values)
                self.work = ()
            return True

    tier._background.start = Slow
    for _ in range(3):
        job.steps(1)
        order.append(job.step)
    assert order == [2, "background", 3, 4] and job.saved() == [2]
    threads[-1].wait(0)
