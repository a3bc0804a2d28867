"""The scenarios of the drill, and the check after each. A scenario has a past, which is durable on
disk, and a workload that all ranks run under the fault injector; then the check selects as a
training does at its start, for all ranks, and compares every tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from mindresume.coordination.lease import PREFIX, READER, Lease, LeaseHolder
from mindresume.coordination.lease_acquisition import acquire
from mindresume.errors import MindResumeError, UnusableCheckpointError
from mindresume.fault_injection.faults import FaultInjector
from mindresume.fault_injection.journal import (
    ITERATION,
    Journal,
    Saved,
    leftovers,
    make_shard,
    save_order,
    select,
    wrong_content,
)
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import (
    COMMON,
    METADATA,
    TRACKER,
    iteration_name,
    parse_common,
    parse_tracker,
)
from mindresume.formats.metadata import read_metadata
from mindresume.formats.rank_folders import META, folder_name
from mindresume.formats.records import scan_records
from mindresume.model.manifest import FORMATS, run_name
from mindresume.resume.candidates import damaged_metadata_files
from mindresume.resume.eligible import Choice, SelectionPolicy, check_files, eligible
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
from mindresume.tensor_files import read_header

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

# ---- what a resume would take afterwards ---------------------------------------------------------


VERDICTS = PASS, LOST_WORK, HARD_FAIL, SILENT_DIVERGENCE = (
    "PASS",
    "LOST_WORK",
    "HARD_FAIL",
    "SILENT_DIVERGENCE",
)


@dataclass(frozen=True)
class Verdict:
    """The result of a check. ``chosen``: the checkpoint that a resume takes; None for a fresh
    start. ``left``: files that belong to no checkpoint after the next run has saved and cleaned
    up."""

    verdict: str
    reason: str = ""
    chosen: Saved | None = None
    left: tuple[str, ...] = ()


def check_resume(sandbox: Sandbox, past: list[Saved], tidy: bool = True) -> Verdict:
    """Checks the folder of ``sandbox``. ``past``: checkpoints committed before the workload, newest
    last. ``tidy``: also runs the next save, and checks again."""
    required = max([*past, *sandbox.journal.complete()], key=save_order, default=None)
    found = _resume(sandbox, required)
    if found.verdict == PASS:
        wrong = _wrong_committed(sandbox) or _wrong_pointer(sandbox)
        if wrong:
            return Verdict(HARD_FAIL, wrong, found.chosen)
        if tidy:
            return _check_next_run(sandbox, found)
    return found


def _resume(sandbox: Sandbox, required: Saved | None) -> Verdict:
    try:
        choice = select(sandbox.directory, sandbox.ranks)
    except UnusableCheckpointError as error:
        return Verdict(HARD_FAIL, f"no resume: {error}")
    except (MindResumeError, OSError) as error:
        return Verdict(HARD_FAIL, f"{type(error).__name__}: {error}")
    if choice.chosen is None:
        if required:
            return Verdict(HARD_FAIL, f"a fresh start, though {required} is complete")
        return Verdict(PASS, "nothing was complete")
    chosen = (choice.chosen.run or "", choice.chosen.step or 0)
    wrong = _differences(sandbox, choice)
    if wrong:
        return Verdict(SILENT_DIVERGENCE, wrong, chosen)
    if required and save_order(chosen) < save_order(required):
        refused = "; ".join(map(str, choice.refused))
        return Verdict(
            LOST_WORK, f"took {chosen}, though {required} was complete: {refused}", chosen
        )
    return Verdict(PASS, "", chosen)


def _differences(sandbox: Sandbox, choice: Choice) -> str:
    """Returns what is not, bit for bit, what was saved; empty if nothing."""
    chosen, ranks = choice.chosen, range(sandbox.ranks)
    if sorted(chosen.files) != list(ranks):
        return f"{chosen.name} has files of ranks {sorted(chosen.files)}"
    if chosen.run not in RUNS:
        return f"{chosen.name} has no run: its files have no record"
    try:
        return next(iter(wrong_content(PosixStorage(), choice, ranks)), "")
    except OSError as error:
        # it was verified, so it must be readable
        return f"{chosen.name} was selected and cannot be read: {error}"


def _wrong_committed(sandbox: Sandbox) -> str:
    """Returns which committed checkpoint is not whole, not only the newest: a user can name it, or
    it is taken if newer ones are damaged."""
    for candidate in scan_records(sandbox.directory)[0]:
        if not candidate.committed:
            continue
        refusal = eligible(sandbox.directory, candidate, SelectionPolicy()) or check_files(
            sandbox.directory, candidate, sandbox.ranks
        )
        wrong = [str(refusal)] if refusal else damaged_metadata_files(sandbox.directory, candidate)
        if wrong:
            return f"committed but incomplete: {wrong[0]}"
    return ""


def _wrong_pointer(sandbox: Sandbox) -> str:
    """Returns which pointer leads to nothing whole. mindformers alone follows ``meta.json`` of
    every rank, or the tracker."""
    names = [f"{folder_name(rank)}/{META}" for rank in range(sandbox.ranks)]
    for name in [TRACKER] if sandbox.format == ITERATION else names:
        path = os.path.join(sandbox.root, name)
        try:
            if name == TRACKER and os.path.exists(path):
                _follow_tracker(sandbox)
            elif os.path.exists(path):
                with open(path) as file:
                    _read_header(os.path.dirname(path), json.load(file)["last_ckpt_file"])
        except (OSError, ValueError, KeyError, TypeError, MindResumeError) as error:
            return f"{name} points to something unusable: {error}"
    return ""


def _read_header(folder: str, name: str) -> None:
    with open(os.path.join(folder, name), "rb") as file:
        read_header(file, name)


def _follow_tracker(sandbox: Sandbox) -> None:
    """Reads all that mindformers alone reads of the iteration that the tracker names, and compares
    it with what was saved."""
    with open(os.path.join(sandbox.root, TRACKER), "rb") as file:
        step = parse_tracker(file.read())
    if isinstance(step, str):
        raise ValueError(step)
    folder = os.path.join(sandbox.root, iteration_name(step))
    with open(os.path.join(folder, COMMON), "rb") as file:
        stored_step = parse_common(file.read(), COMMON).step_num
    if stored_step != step:
        raise ValueError(f"{COMMON} in {iteration_name(step)} is of step {stored_step}")
    if sandbox.ranks > 1:
        with open(os.path.join(folder, METADATA), "rb") as file:
            rows = read_metadata(file.read(), METADATA).values()
        for name in {
            stored.file for row in rows for copies in row.stored.values() for stored in copies
        }:
            _read_header(folder, name)
        if len(rows) != 2:
            raise ValueError(
                f"{METADATA} in {iteration_name(step)} describes {len(rows)} tensors, not 2"
            )
    choice = select(CheckpointDir(PosixStorage(), folder), sandbox.ranks)
    wrong = _differences(sandbox, replace(choice, chosen=replace(choice.chosen, step=step)))
    if wrong:
        raise ValueError(wrong)


def _check_next_run(sandbox: Sandbox, found: Verdict) -> Verdict:
    """Runs the next start, one save and a retention of one checkpoint; then a resume must take it,
    and nothing else may be left."""
    run, step = len(RUNS) - 1, 90
    targets = [sandbox.target(rank, run, sandbox.storage) for rank in range(sandbox.ranks)]
    try:
        with sandbox.injector.clock():
            lease = sandbox.acquire(run, sandbox.storage)
        for target in targets:
            clean_own_folder(target)
        Committer(targets[0]).recover()
        sandbox.save_without_faults(run, step, commit=False)
        Committer(targets[0], KeepLast(1)).poll(step)
        lease.release()
    except (MindResumeError, OSError) as error:
        return Verdict(HARD_FAIL, f"the next run cannot save: {error}", found.chosen)
    after = _resume(sandbox, (RUNS[run], step))
    if after.verdict == PASS and (wrong := _wrong_pointer(sandbox)):
        after = Verdict(HARD_FAIL, wrong)
    if after.verdict != PASS:
        return Verdict(after.verdict, f"after the next run: {after.reason}", found.chosen)
    # A read lock goes when its process is seen dead. Here that is this process, which is alive: the
    # simulation covers it.
    left = [
        path
        for path in leftovers(sandbox.directory, sandbox.format, (RUNS[run], step))
        if f"{PREFIX}{READER:04}-" not in path
    ]
    return Verdict(PASS, found.reason, found.chosen, tuple(left))
