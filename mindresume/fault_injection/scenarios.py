"""The scenarios of the drill. Each has a past, which is durable on disk, and a workload that all ranks run under the fault
injector.

Weights differ by rank, step and run, so that a wrong file is never taken for the right one.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from mindresume.coordination.lease import LeaseHolder
from mindresume.coordination.lease_acquisition import acquire
from mindresume.errors import SaveError
from mindresume.fault_injection.faults import FaultInjector
from mindresume.fault_injection.tiny_checkpoints import ITERATION, Saved, build_shard
from mindresume.model.manifest import FORMATS, run_name
from mindresume.model.training_state import TrainingState
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import Committer, SyncSaver
from mindresume.saving.retention import KEEP_ALL, KeepLast, Policy
from mindresume.saving.shard_writer import Outcome, Save, SaveTarget, Shard, clean_own_folder, write_shard
from mindresume.storage.atomic_publish import temporary_name
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage

LAYOUTS = (*FORMATS, ITERATION)
PER_EPOCH = 10
RUNS = (run_name(1, "0000aaaa"), run_name(2, "0000bbbb"), run_name(3, "0000cccc"))


@dataclass
class Sandbox:
    """One folder and the ranks that save into it.

    ``format``: one of LAYOUTS. ``recorded``: (run, step) -> ranks that have finished this save.
    """
    injector: FaultInjector
    root: str
    format: str
    ranks: int
    recorded: dict[Saved, set[int]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def target(self, rank: int, run: int, storage: Storage | None = None) -> SaveTarget:
        return target_of(storage or self.injector.storage_of(rank), self.root, self.format, self.ranks, run, rank)

    def record_saved(self, rank: int, run: int, step: int) -> None:
        self.recorded.setdefault((RUNS[run], step), set()).add(rank)

    @property
    def complete(self) -> list[Saved]:
        """Returns the saves that all ranks have finished. From then on a resume must take nothing older."""
        return [saved for saved, ranks in self.recorded.items() if len(ranks) == self.ranks]

    def committer(self, run: int, policy: Policy = KEEP_ALL) -> Committer:
        return Committer(self.target(0, run), policy, clock=self.injector.monotonic, sleep=self.injector.sleep)


def tensors(run: int, step: int, rank: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([run, step, rank])
    return {"embedding.weight": random.standard_normal((6, 4)).astype(np.float32),
            "adam_m.embedding.weight": random.standard_normal((6, 4)).astype(np.float32),
            "step_num": np.array(step, np.int64), "global_step": np.array([step], np.int32)}


def target_of(storage: Storage, root: str, fmt: str, ranks: int, run: int, rank: int) -> SaveTarget:
    return SaveTarget(storage, root, RUNS[run], rank, ranks, fmt == ITERATION)


def shard(target: SaveTarget, step: int, fmt: str) -> Shard:
    run, state = RUNS.index(target.run), TrainingState(step, PER_EPOCH, step, 8)
    return build_shard("drill", target, state, tensors(run, step, target.rank), fmt, run)


def save_without_faults(root: str, fmt: str, ranks: int, run: int, step: int, commit: bool = True, only: int | None = None,
                        storage: Storage | None = None) -> None:
    """Saves a step of every rank (``only``: the first ones) without the fault injector."""
    places = [target_of(storage or PosixStorage(), root, fmt, ranks, run, rank) for rank in range(ranks)]
    for target in places[:only]:
        write_shard(target, shard(target, step, fmt))
    if commit:
        Committer(places[0]).saved(step)


class _RecordingSaver(SyncSaver):
    """Records when this rank's part is written; for rank 0 that is before it commits."""

    def __init__(self, target: SaveTarget, committer: Committer | None, sandbox: Sandbox, run: int):
        super().__init__(target, committer)
        self.sandbox, self.run = sandbox, run

    def write(self, save: Save) -> Outcome:
        outcome = super().write(save)
        if outcome.saved:
            self.sandbox.record_saved(self.target.rank, self.run, outcome.step)
        return outcome


# ---- workloads of one rank -----------------------------------------------------------------------------------------

def _save_steps(sandbox: Sandbox, rank: int, run: int, steps: list[int], policy: Policy = KEEP_ALL,
                background: bool = False) -> None:
    target = sandbox.target(rank, run)
    if background:
        saver: AsyncSaver | SyncSaver = AsyncSaver(target, policy if rank == 0 else None, "thread")
    else:
        saver = _RecordingSaver(target, sandbox.committer(run, policy) if rank == 0 else None, sandbox, run)
    for number, step in enumerate(steps):
        saver.save(Save(shard(target, step, sandbox.format)))
        outcomes = saver.wait(60.0)
        if number == len(steps) - 1:            # a writer thread would wait for other ranks by the real clock
            outcomes += saver.finish(0.0 if background else 5.0)
        for outcome in outcomes:
            if outcome.saved:
                sandbox.record_saved(rank, run, outcome.step)
            else:
                sandbox.errors.append(str(outcome.error))


def _finish(sandbox: Sandbox, rank: int, background: bool = False, run: int = 0, policy: Policy = KEEP_ALL) -> None:
    _save_steps(sandbox, rank, run, [20, 30], policy, background)


def _first(sandbox: Sandbox, rank: int) -> None:
    _save_steps(sandbox, rank, 0, [10])


def _save(sandbox: Sandbox, rank: int) -> None:
    _finish(sandbox, rank)


def _again(sandbox: Sandbox, rank: int) -> None:
    """Run 2 resumed from step 10 and saves step 20 a second time."""
    _finish(sandbox, rank, run=1)


def _background(sandbox: Sandbox, rank: int) -> None:
    _finish(sandbox, rank, background=True)


def _prune(sandbox: Sandbox, rank: int) -> None:
    _finish(sandbox, rank, policy=KeepLast(1))


def _commit_only(sandbox: Sandbox, rank: int) -> None:
    """Rank 0 commits step 20, which all ranks have saved."""
    sandbox.record_saved(rank, 0, 20)
    if rank == 0:
        committer = sandbox.committer(0)
        committer.saved(20)
        committer.finish(2.0)


def _acquire_lease(sandbox: Sandbox, rank: int) -> None:
    """Rank 0 acquires the lease; the other ranks wait for the run id, as in a training."""
    if rank == 0:
        holder = LeaseHolder("saving", RUNS[1], "drill", "", 1, 1, 0.0, sandbox.ranks)
        acquire(sandbox.target(0, 1).storage, sandbox.root, holder, 1.0, time=sandbox.injector,
                keep_run_marker=sandbox.format == ITERATION)


def _start(sandbox: Sandbox, rank: int) -> None:
    """The next run cleans up, commits what was complete, and saves."""
    target = sandbox.target(rank, 1)
    clean_own_folder(target)
    if rank == 0:
        SyncSaver(target, sandbox.committer(1)).begin()
    _save_steps(sandbox, rank, 1, [30], KeepLast(1))


@dataclass(frozen=True)
class Scenario:
    """A workload.

    Args:
        workload: what each rank runs.
        past: (run, step) that are committed before, newest last.
        leave_behind: adds further files to the past.
        before: a first phase of the workload that all ranks end before the rest begins.
    """
    name: str
    about: str
    workload: Callable[[Sandbox, int], None]
    past: tuple[tuple[int, int], ...] = ((0, 10),)
    leave_behind: Callable[[str, str, int], None] = lambda root, fmt, ranks: None
    before: Callable[[Sandbox, int], None] | None = None

    def prepare(self, root: str, fmt: str, ranks: int) -> None:
        for run, step in self.past:
            save_without_faults(root, fmt, ranks, run, step)
        self.leave_behind(root, fmt, ranks)

    def run(self, sandbox: Sandbox) -> list[object]:
        def work(workload: Callable[[Sandbox, int], None], rank: int) -> object:
            try:
                return workload(sandbox, rank)
            except (SaveError, OSError) as error:           # the training continues, or ends with this error
                sandbox.errors.append(str(error))
                return error
        results: list[object] = []
        for workload in filter(None, (self.before, self.workload)):
            results += sandbox.injector.scheduler.run([lambda rank=rank, workload=workload: work(workload, rank)
                                                       for rank in range(sandbox.ranks)])
        return results


def _records_only(root: str, fmt: str, ranks: int) -> None:
    save_without_faults(root, fmt, ranks, 0, 20, commit=False)


def _one_rank_missing(root: str, fmt: str, ranks: int) -> None:
    """Leaves step 20 of the previous run complete but not committed, and step 30 incomplete."""
    save_without_faults(root, fmt, ranks, 0, 20, commit=False)
    save_without_faults(root, fmt, ranks, 0, 30, commit=False, only=ranks - 1)
    for rank in range(ranks):
        target = target_of(PosixStorage(), root, fmt, ranks, 0, rank)
        folder = target.data_dir(30) if target.iterations else os.path.join(root, f"rank_{rank}")
        with open(temporary_name(os.path.join(folder, f"x{rank}"), RUNS[0]), "wb") as file:
            file.write(b"half")


SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in (
    Scenario("first save", "the very first checkpoint of a folder", _first, ()),
    Scenario("save", "two more checkpoints after a committed one", _save),
    Scenario("save again", "a later run resumed from step 10 and saves step 20 again", _again, ((0, 10), (0, 20))),
    Scenario("background", "the same as save, in a writer thread of every rank", _background),
    Scenario("prune", "saves that keep only the newest checkpoint", _prune, ((0, 5), (0, 10))),
    Scenario("pointers", "rank 0 commits, and points meta.json or the tracker to it", _commit_only,
             leave_behind=_records_only),
    Scenario("start", "the next run acquires the lease, cleans up, commits and saves", _start,
             leave_behind=_one_rank_missing, before=_acquire_lease),
)}
