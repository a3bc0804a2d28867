"""The scenarios of the drill. Each has a past, which is durable on disk, and a workload that all
ranks run under the fault injector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from mindresume.coordination.lease import Lease, LeaseHolder
from mindresume.coordination.lease_acquisition import acquire
from mindresume.fault_injection.faults import FaultInjector
from mindresume.fault_injection.journal import ITERATION, Journal, make_shard
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FORMATS, run_name
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import Committer, SyncSaver
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.shard_writer import (
    Outcome,
    Save,
    SaveTarget,
    Shard,
    clean_own_folder,
    write_shard,
)
from mindresume.storage import Storage, temporary_name
from mindresume.storage.posix import PosixStorage

LAYOUTS = (*FORMATS, ITERATION)
RUNS = (run_name(1, "0000aaaa"), run_name(2, "0000bbbb"), run_name(3, "0000cccc"))
COMMITTED = 60.0  # seconds for a save in the background


@dataclass
class Sandbox:
    """One folder and the ranks that save into it. ``format``: one of LAYOUTS. ``storage``: without
    the fault injector."""

    injector: FaultInjector
    root: str
    format: str
    ranks: int
    journal: Journal = field(default_factory=Journal)
    storage: Storage = field(default_factory=PosixStorage)

    def __post_init__(self) -> None:
        self.journal.sizes = dict.fromkeys(RUNS, self.ranks)

    @property
    def directory(self) -> CheckpointDir:
        """Returns the folder without the fault injector."""
        return CheckpointDir(self.storage, self.root)

    def target(self, rank: int, run: int, storage: Storage | None = None) -> SaveTarget:
        return SaveTarget(
            storage or self.injector.storage_of(rank),
            self.root,
            RUNS[run],
            rank,
            self.ranks,
            self.format == ITERATION,
        )

    def acquire(self, run: int, storage: Storage) -> Lease:
        """Acquires the folder, as rank 0 does at the start of a run."""
        holder = LeaseHolder("saving", RUNS[run], "drill", "", 1, 1, 0.0, self.ranks)
        return acquire(
            CheckpointDir(storage, self.root),
            holder,
            1.0,
            keep_run_marker=self.format == ITERATION,
        )

    def save_without_faults(
        self,
        run: int,
        step: int,
        commit: bool = True,
        only: int | None = None,
    ) -> None:
        """Saves a step of every rank (``only``: the first ones) without the fault injector."""
        targets = [self.target(rank, run, self.storage) for rank in range(self.ranks)]
        for target in targets[:only]:
            write_shard(target, shard(target, step, self.format))
        if commit:
            Committer(targets[0]).poll(step)


def shard(target: SaveTarget, step: int, fmt: str) -> Shard:
    return make_shard(target, step, fmt, RUNS.index(target.run))


class _RecordingSaver(SyncSaver):
    """Records when this rank's part is written; for rank 0 that is before it commits."""

    def __init__(self, target: SaveTarget, committer: Committer | None, journal: Journal):
        super().__init__(target)
        self.committer, self.journal = committer, journal

    def write(self, save: Save) -> Outcome:
        outcome = super().write(save)
        if outcome.saved:
            self.journal.report((self.target.run, outcome.step), self.target.rank)
        return outcome


@dataclass(frozen=True)
class Scenario:
    """A workload: each rank saves some steps.

    Args:
        steps: what each rank saves.
        run: the number of its run.
        keep: number of checkpoints that retention keeps; 0 keeps all.
        background: a writer thread of every rank saves.
        past: (run, step) that are committed before, newest last.
        uncommitted: (step, number of ranks that have not saved it) of saves of the first run that
            nobody has committed.
        commits: rank 0 commits the first of these saves, and no rank saves.
        starts: the run has to start first: it acquires the lease, cleans up and commits.
            Half-written files are there.
    """

    name: str
    about: str
    steps: tuple[int, ...] = (20, 30)
    run: int = 0
    keep: int = 0
    background: bool = False
    past: tuple[tuple[int, int], ...] = ((0, 10),)
    uncommitted: tuple[tuple[int, int], ...] = ()
    commits: bool = False
    starts: bool = False

    def prepare(self, sandbox: Sandbox) -> None:
        """Writes the past."""
        for run, step in self.past:
            sandbox.save_without_faults(run, step)
        for step, missing in self.uncommitted:
            sandbox.save_without_faults(0, step, commit=False, only=sandbox.ranks - missing)
        for rank in range(sandbox.ranks if self.starts else 0):
            target = sandbox.target(rank, 0)
            folder = (
                target.data_dir(30)
                if target.iterations
                else os.path.join(sandbox.root, f"rank_{rank}")
            )
            with open(temporary_name(os.path.join(folder, f"x{rank}"), RUNS[0]), "wb") as file:
                file.write(b"half")

    def run_ranks(self, sandbox: Sandbox) -> list[object]:
        """Runs the workload. Returns the result of each rank; an exception is a result too."""
        results: list[object] = []
        for phase in (self.begin, self.work) if self.starts else (self.work,):
            works = [partial(phase, sandbox, rank) for rank in range(sandbox.ranks)]
            # a writer thread waits by the real clock
            with nullcontext() if self.background else sandbox.injector.clock():
                results += sandbox.injector.scheduler.run(works)
        return results

    def begin(self, sandbox: Sandbox, rank: int) -> None:
        """Rank 0 acquires the lease; the other ranks wait for the run id, as in a training."""
        if rank == 0:
            sandbox.acquire(self.run, sandbox.injector.storage_of(0))

    def work(self, sandbox: Sandbox, rank: int) -> None:
        """Runs the workload of one rank."""
        policy = KeepLast(self.keep) if self.keep else KEEP_ALL
        target = sandbox.target(rank, self.run)
        committer = Committer(target, policy) if rank == 0 else None
        if self.commits:
            step, _ = self.uncommitted[0]
            sandbox.journal.report((target.run, step), rank)
            if committer is not None:
                committer.poll(step)
                committer.finish(2.0)
            return
        if self.starts:
            clean_own_folder(target)
            if rank == 0:
                SyncSaver(target, KEEP_ALL).begin()
        if self.background:
            saver: AsyncSaver | SyncSaver = AsyncSaver(
                target, policy if rank == 0 else None, "thread"
            )
        else:
            saver = _RecordingSaver(target, committer, sandbox.journal)
        for step in self.steps:
            saver.save(Save(shard(target, step, sandbox.format)))
            outcomes = saver.wait(COMMITTED)
            # a writer thread would wait for other ranks
            if step == self.steps[-1]:
                outcomes += saver.finish(0.0 if self.background else 5.0)
            for outcome in outcomes:
                if outcome.saved:
                    sandbox.journal.report((target.run, outcome.step), rank)


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("first save", "the very first checkpoint of a folder", steps=(10,), past=()),
        Scenario("save", "two more checkpoints after a committed one"),
        Scenario(
            "save again",
            "a later run resumed from step 10 and saves step 20 again",
            run=1,
            past=((0, 10), (0, 20)),
        ),
        Scenario(
            "background", "the same as save, in a writer thread of every rank", background=True
        ),
        Scenario(
            "prune", "saves that keep only the newest checkpoint", keep=1, past=((0, 5), (0, 10))
        ),
        Scenario(
            "pointers",
            "rank 0 commits, and points meta.json or the tracker to it",
            uncommitted=((20, 0),),
            commits=True,
        ),
        Scenario(
            "start",
            "the next run acquires the lease, cleans up, commits and saves",
            steps=(30,),
            run=1,
            keep=1,
            uncommitted=((20, 0), (30, 1)),
            starts=True,
        ),
    )
}
