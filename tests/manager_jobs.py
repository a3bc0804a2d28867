"""Trainings that save a few arrays through a CheckpointManager, for the tests of the manager and of
the end of a training."""

from rank_folders import STORAGE, committed_steps, state_of, tensors_of

from mindresume.coordination.collectives import SingleProcess
from mindresume.events import SaveWritten
from mindresume.formats.rank_folders import FileName
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.crash_loop import PendingLoadAttempt, explanation
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.shard_writer import Save, StepState, iteration_shard, rank_shard
from mindresume.settings import Settings

JOBS: list["Job"] = []


def end_jobs():
    """Ends the jobs of a test: no job outlives it."""
    while JOBS:
        JOBS.pop().manager.finish_after_error()


class Arrays(StepState):
    """The state of ``job`` after its last step."""

    def __init__(self, job):
        self.step = job.step
        self.job = job

    def collect(self):
        self.job.collected.append(self.step)
        target, state = self.job.manager.target, state_of(self.step)
        tensors = tensors_of(target.rank, self.step)
        if target.iterations:
            return Save(iteration_shard("net", target, state, tensors, None))
        name = FileName(
            "net",
            target.rank,
            self.job.manager.session.suffix,
            state.epoch,
            state.step_in_epoch,
            "safetensors",
        )
        return Save(rank_shard(name, state, tensors))


class FakeLoadAttempt:
    """Stands for the load of this training: how it ended."""

    begun, result = False, None

    def begin(self):
        self.begun = True

    def passed(self):
        self.result = "passed"

    def failed(self, error):
        self.result = explanation(error)


class Job:
    """One attempt of a training, in this process."""

    def __init__(
        self,
        root,
        group=None,
        settings=None,
        load_attempt=None,
        leases=None,
        iterations=False,
        every=5,
        **options,
    ):
        self.step, self.collected, self.events, self.reason = 0, [], [], ""
        options = SaveOptions(str(root), "net", every, iterations=iterations, **options)
        pending = PendingLoadAttempt(load_attempt) if load_attempt else None
        self.manager = CheckpointManager(
            STORAGE,
            group or SingleProcess(),
            settings or Settings(),
            options,
            self.events.append,
            pending,
        )
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
            self.end_step()
        return self

    def end_step(self, state=None):
        self.reason = self.manager.end_step(state or Arrays(self))

    def end(self, state=None):
        self.manager.save_last(state or Arrays(self))
        self.manager.end(self.step)
        return self


def committed(root):
    return sorted(committed_steps(root))


def spoil(root):
    """Puts a file in place of the folder of rank 0: nothing can be written there, not even by
    root."""
    root.mkdir(parents=True, exist_ok=True)
    if (root / "rank_0").is_dir():
        (root / "rank_0").rename(root / "aside")
    (root / "rank_0").write_text("in the way")


def repair(root):
    (root / "rank_0").unlink()
