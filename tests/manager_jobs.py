"""Trainings that save a few arrays through a CheckpointManager, for the tests of the manager and of the end of a training."""
from rank_folders import STORAGE, dir_at, state_of, tensors_of

from mindresume.coordination.collectives import SingleProcess
from mindresume.events import SaveWritten
from mindresume.formats.rank_folders import FileName
from mindresume.formats.scan import scan
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.shard_writer import Save, iteration_shard, rank_shard
from mindresume.settings import Settings

JOBS: list["Job"] = []


def end_jobs():
    """Ends the jobs of a test: no job outlives it."""
    while JOBS:
        JOBS.pop().manager.finish_after_error()


class Arrays:
    """The state of ``job`` after its last step."""

    def __init__(self, job):
        self.job, self.step = job, job.step

    def collect(self):
        self.job.collected.append(self.step)
        target, state = self.job.manager.target, state_of(self.step)
        tensors = tensors_of(target.rank, self.step)
        if target.iterations:
            return Save(iteration_shard("net", target, state, tensors, None))
        name = FileName("net", target.rank, self.job.manager.session.suffix, state.epoch, state.step_in_epoch, "safetensors")
        return Save(rank_shard(name, state, tensors))

    def collect_local(self):
        return self.collect().shard

    def needs_collectives(self):
        return False


class Job:
    """One attempt of a training, in this process."""

    def __init__(self, root, group=None, settings=None, pending=None, leases=None, iterations=False, every=5, **options):
        self.step, self.collected, self.events, self.reason = 0, [], [], ""
        options = SaveOptions(str(root), "net", every, iterations=iterations, **options)
        self.manager = CheckpointManager(
            STORAGE, group or SingleProcess(), settings or Settings(), options, self.events.append, pending)
        self.manager.open(leases=leases)
        self.manager.begin(0)
        JOBS.append(self)
        self.is_first_on_host = self.manager.count_hosts()
        self.manager.handle_preemption()

    def emitted(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def saved(self):
        return [(event.step, event.stall_seconds) for event in self.emitted(SaveWritten)]

    def steps(self, count):
        for _ in range(count):
            self.step += 1
            self.end_step()
        return self

    def end_step(self, state=None):
        """Ends a step as ``mindresume.mindformers.training_saves`` does."""
        manager, state = self.manager, state or Arrays(self)
        manager.begin_step_end(self.step)
        if manager.is_due(self.step):
            with manager.saving(self.step):
                manager.save(state.collect())
        manager.save_in_memory(state)
        self.reason = manager.stop_reason(self.step)
        if self.reason:
            self._save_last(state)

    def end(self, state=None):
        self._save_last(state or Arrays(self))
        self.manager.end(self.step)
        return self

    def _save_last(self, state):
        if self.manager.is_last_missing(self.step):
            with self.manager.saving_last(self.step):
                self.manager.save(state.collect())


def committed(root):
    return sorted(c.step for c in scan(dir_at(root)).candidates if c.committed)


def spoil(root):
    """Puts a file in place of the folder of rank 0: nothing can be written there, not even by root."""
    root.mkdir(parents=True, exist_ok=True)
    if (root / "rank_0").is_dir():
        (root / "rank_0").rename(root / "aside")
    (root / "rank_0").write_text("in the way")


def repair(root):
    (root / "rank_0").unlink()
