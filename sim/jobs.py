"""A job: its launcher, and what each rank does, in the order in which the trainer calls the
product.

    job = Job(cluster, history, Training(ranks=2), hosts)
    job.start()  # starts a launcher and its ranks as processes of the cluster

A rank selects and loads a checkpoint, acquires the folder, trains (each step is a collective of all
ranks), saves, and ends, as ``mindresume.mindformers`` drives it. What it observes is recorded in a
``History``, which the oracle checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindresume.coordination.collectives import Group, gather_results
from mindresume.errors import BadStepError, LeaseHeldError, MindResumeError
from mindresume.events import TierSaved
from mindresume.fault_injection.faults import Killed
from mindresume.fault_injection.journal import (
    ITERATION,
    Journal,
    Saved,
    make_shard,
    save_order,
    wrong_content,
)
from mindresume.model.manifest import Manifest
from mindresume.model.training_state import DataPosition
from mindresume.resume.eligible import Choice
from mindresume.resume.job_selection import (
    CheckpointSelector,
    SelectedCheckpoint,
    SelectionRequest,
)
from mindresume.resume.progress import (
    ResumeProgress,
    RunSettings,
    fresh_progress,
    resume_progress,
)
from mindresume.resume.sources import CheckpointSources
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.crash_loop import PendingLoadAttempt
from mindresume.saving.guard import GO_ON, WINDOW
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.shard_writer import Outcome, Save, Shard, StepState
from mindresume.settings import Settings
from sim.bit_rot import rotted_saves, saves_on
from sim.bucket import PodStore
from sim.cluster import Cluster, Host, Process, current_cluster, current_process
from sim.communicator import LIMIT, Communicator, ExchangeError
from sim.disk import Disk
from sim.mount import Mount
from sim.schedule import ERRORS, PASSING, SILENT
from sim.threads import Event

# prefix of the names of files, steps of an epoch
NAMED = "sim", 100
BATCH = 8  # samples of a step, as in ``make_shard``


@dataclass(frozen=True)
class Training:
    """The command and configuration of a job.

    Args:
        format: "safetensors" or "ckpt" in rank folders, or "iteration".
        steps: the last step.
        every: steps between two saves.
        keep: number of checkpoints to keep; 0 keeps all.
        fresh: start without a checkpoint.
        allow_reshard: the number of ranks may differ from that of the checkpoint.
        node_local: the hosts share no disk.
        replicated: all ranks hold the same tensors, as data parallelism does.
        bad: batches, from 0, with which a step gives NaN on one rank.
        rescue: when ranks are lost, the others save what they have (MindIO TTP).
        url: where checkpoints are uploaded to; empty for nowhere.
    """

    ranks: int = 2
    hosts: int = 1
    format: str = "safetensors"
    async_save: bool | str = False
    steps: int = 4
    every: int = 2
    keep: int = 0
    fresh: bool = False
    allow_reshard: bool = False
    root: str = "/out/checkpoint"
    output: str = "/out"
    url: str = ""
    node_local: bool = False
    replicated: bool = False
    bad: tuple[int, ...] = ()
    rescue: bool = False
    settings: Settings = Settings(commit_timeout=20.0, preemption_check_interval=3.0)
    # seconds from the first death of a rank to SIGTERM for the others
    patience: float = 5.0
    leave: float = 30.0  # seconds from SIGTERM to SIGKILL
    pace: float = 1.0  # seconds of a training step
    health_monitored: bool = False  # checkpoints have a health record
    unhealthy: tuple[int, ...] = ()  # steps whose checkpoints are unhealthy
    dies_in_first_step: bool = False  # all ranks are killed in their first step
    pruned_by_others: bool = False  # another process removes checkpoints too


@dataclass
class History(Journal):
    """What the jobs have observed, besides what their ranks were told.

    ``failed``: ((run, step), rank) -> reason of a failed save. ``chosen``: run -> the checkpoint
    from which it resumed, None for a fresh start. ``wrong``: violations that a job has seen.
    ``ended``: runs that ended with status 0. ``uploaded``: saves that rank 0 was told are at the
    url.
    """

    failed: dict[tuple[Saved, int], str] = field(default_factory=dict)
    chosen: dict[str, Saved | None] = field(default_factory=dict)
    began: set[Saved] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    # checkpoints of another training, which must never be removed
    protected: list[Saved] = field(default_factory=list)
    # jobs that took something older than the newest acknowledged save
    stale_choices: list[str] = field(default_factory=list)
    # run -> when it had acquired its folder
    opened: dict[str, float] = field(default_factory=dict)
    # jobs that lost their lease although no fault affected them
    lease_losses: list[str] = field(default_factory=list)
    uploaded: set[Saved] = field(default_factory=set)
    # runs that have begun their first step
    started_runs: set[str] = field(default_factory=set)

    def hear(self, run: str, rank: int, outcomes: Sequence[Outcome]) -> None:
        """Records what ``rank`` is told about its saves."""
        for outcome in outcomes:
            saved = (run, outcome.step)
            if outcome.saved:
                self.report(saved, rank)
                self.failed.pop((saved, rank), None)
            else:
                self.failed[saved, rank] = str(outcome.error)

    def copy(self) -> History:
        """Returns a copy that shares no mutable state."""
        made = History(**{name: type(value)(value) for name, value in vars(self).items()})
        made.reported = {saved: set(ranks) for saved, ranks in self.reported.items()}
        return made


def intact_saves(history: History, disks: Mapping[str, Disk], keep: int) -> list[Saved]:
    """Returns the acknowledged saves of which no file has rotted. Where something has rotted, one
    that is gone counts only if there are fewer than ``keep`` later ones: retention does not know
    what nobody has read, and counts what is damaged."""
    acknowledged = sorted(history.complete(), key=save_order, reverse=True)
    rotted = rotted_saves(disks.values())
    if not rotted:
        return acknowledged
    present = saves_on(disks.values())

    def may_be_gone(saved: Saved) -> bool:
        return (
            bool(keep)
            and sum(save_order(other) > save_order(saved) for other in present.union(acknowledged))
            >= keep
        )

    return [
        saved
        for saved in acknowledged
        if saved not in rotted and (saved in present or not may_be_gone(saved))
    ]


class _StepState(StepState):
    """The state of a rank."""

    def __init__(
        self,
        step: int,
        manager: CheckpointManager,
        training: Training,
        history: History,
        batch: int = 0,
    ):
        self.step = step
        self.batch = batch
        self.manager = manager
        self.training = training
        self.history = history

    def collect(self) -> Save:
        """Collects this rank's shard. It is a collective, as where pipeline stages share a
        parameter."""
        self.manager.group.gather(b"")
        return Save(self.collect_local())

    def needs_collectives(self) -> bool:
        """Returns whether ``collect`` is a collective also for a rank that saves nothing into
        memory any more."""
        return self.training.settings.memory_tier.every_steps > 0

    def collect_local(self) -> Shard:
        session, training = self.manager.session, self.training
        saved = (session.target.run, self.step)
        self.history.began.add(saved)
        # a repeated save replaces a failed one
        self.history.failed.pop((saved, session.target.rank), None)
        health = (
            (1 if self.step in training.unhealthy else 0) if training.health_monitored else None
        )
        shard = make_shard(
            session.target,
            self.step,
            training.format,
            session.suffix,
            *NAMED,
            health,
            training.replicated,
        )
        if not training.bad:
            return shard
        return replace(shard, state=replace(shard.state, data=_position(self.batch + 1)))

    def values(self) -> dict[str, float]:
        is_here = self.batch % self.training.ranks == self.manager.target.rank
        return {"loss": math.nan if is_here and self.batch in self.training.bad else 2.0}

    def window(self, steps: int) -> tuple[int, DataPosition | None, int]:
        return self.step, _position(self.batch), steps * BATCH


def _position(batch: int) -> DataPosition:
    return DataPosition(0, batch * BATCH)


class _RemoteCheckpoints(RemoteCheckpoints):
    """Records committed uploads in the history."""

    history: History

    def committed(self, attempt: str, manifest: Manifest) -> None:
        super().committed(attempt, manifest)
        self.history.uploaded.add((manifest.run, manifest.state.step))


class _Manager(CheckpointManager):
    """Records the outcome of saves in the history. ``uploader``: the uploader, also after its
    end."""

    history: History
    uploader: Any = None

    def _start_uploader(self, remote: RemoteCheckpoints) -> Any:
        self.uploader = super()._start_uploader(remote)
        return self.uploader

    def _end_after_own_signal(self) -> None:
        """Ends this process. What it overrides ends the real one, after it has said so."""
        self.pending.end(MindResumeError("SIGTERM of its own"))
        current_cluster().kill(current_process(), 1)
        raise Killed

    def _handle(self, outcomes: Sequence[Outcome], raises: bool = True) -> None:
        self.history.hear(self.target.run, self.target.rank, outcomes)
        super()._handle(outcomes, raises)


class Job:
    """A launcher and its ranks. The launcher ends all ranks when one has died. ``name``: prefix of
    the process names."""

    def __init__(
        self,
        cluster: Cluster,
        history: History,
        training: Training,
        hosts: list[Host],
        name: str = "job",
    ):
        self.cluster = cluster
        self.history = history
        self.training = training
        self.hosts = hosts
        self.name = name
        self.communicator = Communicator(
            training.ranks, 2.0 + 400 * cluster.scheduler.tick if training.rescue else LIMIT
        )
        self.ranks: list[Process] = []
        self.launcher: Process | None = None

    def start(self) -> Process:
        """Starts and returns the launcher, which ends when all ranks have ended."""
        self.launcher = self.cluster.process(self.hosts[0], f"{self.name}.launcher", self._launch)
        return self.launcher

    def is_affected(self, kinds: tuple[str, ...]) -> bool:
        """Returns whether a fault hit one of its processes, or a fault of ``kinds`` or one for all
        processes hit the cluster."""
        return any(
            row.process.startswith(f"{self.name}.")
            or row.fault.kind in (*kinds, "kill all", "term all", "power")
            for row in self.cluster.injected
            if row.fault.kind not in SILENT
        )

    @property
    def over(self) -> bool:
        return bool(self.ranks) and all(process.dead for process in self.ranks)

    def _launch(self) -> None:
        changed, training = Event(), self.training
        per_host = -(-training.ranks // training.hosts)
        for rank in range(training.ranks):
            process = self.cluster.process(
                self.hosts[rank // per_host],
                f"{self.name}.{rank}",
                lambda rank=rank: _run_rank(self, rank),
            )
            process.on_death.append(lambda _: changed.set())
            self.ranks.append(process)
        mine = current_process()
        mine.sigterm_handler = lambda: (
            [self.cluster.terminate(process) for process in self.ranks] and None
        )
        while not self.over:
            changed.wait(None)
            changed.clear()
            if any(process.dead and process.exit for process in self.ranks):
                break
        if not self.over:
            self.cluster.scheduler.sleep(training.patience)
            for process in self.ranks:
                self.cluster.terminate(process)
            self.cluster.scheduler.sleep(training.leave)
            for process in self.ranks:
                self.cluster.kill(process)


def _run_rank(job: Job, rank: int) -> None:
    """Runs a rank. Records a violation if the job loses its lease although no fault affected it."""
    opened: list[str] = []
    try:
        _train_as_rank(job, rank, opened)
    except LeaseHeldError as error:
        if opened and not job.is_affected(("ENOSPC", "EDQUOT", *PASSING)):
            job.history.lease_losses.append(
                f"{job.name}, which no fault affected, has lost its lease: {error}"
            )
        raise


def _train_as_rank(job: Job, rank: int, opened: list[str]) -> None:
    """Trains as one rank. ``opened``: receives the run id as soon as there is one."""
    training, history = job.training, job.history
    process, known = current_process(), _Known(job)
    group = job.communicator.member(rank, process)
    storage = Mount(job.cluster, process)
    choice, found = None, SelectedCheckpoint()
    load_attempt = None
    hold = None
    shared_groups: dict[str, Any] = {}
    remote = _remote_of(job, process) if training.url else None
    if not training.fresh:
        sources = CheckpointSources(
            consolidated=_NoConsolidatedWeights(), saved_to={training.root}, remote=remote
        )
        found = CheckpointSelector(
            storage, group, training.settings, process.emit, sources, shared_groups
        ).select(
            SelectionRequest(
                training.root,
                output_dir=training.output,
                any_layout=training.allow_reshard,
                health_dir=training.output if training.health_monitored else None,
            )
        )
        choice = found.choice
        load_attempt = found.load_attempt
        hold = found.read_lock
        if choice is None and history.uploaded:
            history.wrong.append(
                f"{job.name} starts fresh, though {max(history.uploaded, key=save_order)} is at "
                "the url"
            )
    start = _loaded(job, choice, storage, rank, known) if choice is not None else 0
    options = SaveOptions(
        training.root,
        "sim",
        training.every,
        async_save=training.async_save,
        iterations=training.format == ITERATION,
        retention=KeepLast(training.keep) if training.keep else KEEP_ALL,
    )
    manager = _Manager(
        storage, group, training.settings, options, process.emit, PendingLoadAttempt(load_attempt)
    )
    manager.history, process.own = history, manager
    manager.open(shared_groups, choice, remote, leases={})
    opened.append(manager.target.run)
    history.opened.setdefault(manager.target.run, current_cluster().scheduler.now)
    history.sizes[manager.target.run] = training.ranks
    if rank == 0 and not training.fresh:
        _check_choice(job, choice, known)
    if rank == 0:
        history.chosen[manager.target.run] = (
            (choice.chosen.run or "", choice.chosen.step or 0) if choice is not None else None
        )
    if hold is not None:
        hold.release()
    read = start
    if training.bad:
        progress = _continued(job, found)
        read, manager.window_step = progress.data_skip, progress.window_step
        manager.bad_before = found.bad_steps
    manager.begin(start, choice, remote)
    manager.count_hosts()
    manager.handle_preemption()
    step, left = start, ""
    history.started_runs.add(manager.target.run)
    manager.begin_load_attempt()
    for step in range(start + 1, training.steps + 1):
        try:
            _train(group, training.pace)
            if training.dies_in_first_step:
                job.cluster.kill(process)
                raise Killed
        except ExchangeError:
            if training.rescue and step > start + 1:
                manager.emergency_save(_StepState(step - 1, manager, training, history))
            raise
        state = _StepState(step, manager, training, history, read + step - start - 1)
        left = manager.end_step(state)
        if left:
            break
    manager.save_last(_StepState(step, manager, training, history, read + step - start - 1))
    manager.end(step)
    if left:
        # as mindresume.mindformers.patches: the first rank to end would end the others
        gather_results(group, lambda: None)
    if left == WINDOW:
        raise BadStepError(left, GO_ON)
    if rank == 0:
        history.ended.append(manager.target.run)


def _continued(job: Job, found: SelectedCheckpoint) -> ResumeProgress:
    """Returns where the data continue. Records a violation unless each step so far had a good batch
    of its own."""
    data, chosen = RunSettings(BATCH, 10_000), found.choice and found.choice.chosen
    progress = (
        resume_progress(chosen.state, data, found.bad_steps)
        if chosen
        else fresh_progress(data, found.bad_steps)
    )
    step, read = progress.initial_step, progress.data_skip
    good = read - sum(batch < read for batch in job.training.bad)
    if good != step:
        job.history.wrong.append(
            f"{job.name} goes on after step {step} with batch {read}, of {good} good ones before"
        )
    return progress


def _remote_of(job: Job, process: Process) -> RemoteCheckpoints:
    made = _RemoteCheckpoints(PodStore(job.cluster, process), job.training.url)
    made.history = job.history
    return made


class _NoConsolidatedWeights:
    def choose(self, storage: Any, path: str) -> Choice:
        raise AssertionError(f"{path} was selected as consolidated weights")


class _Known:
    """What was acknowledged and intact when a rank started."""

    def __init__(self, job: Job):
        self.cluster, self._rots = job.cluster, len(job.cluster.rots)
        self._acknowledged = intact_saves(job.history, job.cluster.disks, job.training.keep)

    def rotted_since(self) -> set[str]:
        """Returns the paths of files that have rotted since the start. Their bytes may have been
        verified before."""
        return {row.path for row in self.cluster.rots[self._rots :]}

    def required(self) -> Saved | None:
        """Returns the newest save that was acknowledged at the start and has been intact ever
        since."""
        rotted = set().union(*(row.saves for row in self.cluster.rots[self._rots :]))
        return max(
            (saved for saved in self._acknowledged if saved not in rotted),
            key=save_order,
            default=None,
        )


def _check_choice(job: Job, choice: Choice | None, known: _Known) -> None:
    """Records a violation if the job resumes from something older than what is required. After an
    I/O error, or if jobs have died after loading it, a checkpoint may be skipped; no error makes a
    fresh start of a resume."""
    refused, required = choice.refused if choice is not None else (), known.required()
    chosen = (choice.chosen.run or "", choice.chosen.step or 0) if choice is not None else None
    may_skip = job.is_affected((*ERRORS, *PASSING)) or any(
        "suspected" in row.reason for row in refused
    )
    if required is None or chosen is not None and may_skip:
        return
    if chosen is None or save_order(chosen) < save_order(required):
        job.history.stale_choices.append(
            f"{job.name} takes {chosen}, though all ranks were told that {required} is saved"
        )


def _train(group: Group, seconds: float) -> None:
    """Trains one step: a collective that ends with the slowest rank."""
    current_cluster().scheduler.sleep(seconds)
    if current_process().hangs:
        current_cluster().scheduler.block(None, "waits for a data set that has failed")
    group.gather(b"")


def _loaded(job: Job, choice: Choice, storage: Mount, rank: int, known: _Known) -> int:
    """Reads the selected checkpoint as this rank, records what is wrong with it, and returns its
    step. What rots after it was verified and before it is read here is not seen: the trainer loads
    the verified bytes if the budget of the cache allows it."""
    chosen = choice.chosen
    saved = (chosen.run or "", chosen.step or 0)
    proven = [proof.rank for proof in choice.shards] if job.training.allow_reshard else [rank]
    paths = {
        f"{choice.root}/{source.file.path}" for proof in choice.shards for source in proof.sources
    }
    wrong = wrong_content(storage, choice, proven, job.training.replicated)
    if paths.isdisjoint(known.rotted_since()):  # asked last: a file can rot as it is read
        job.history.wrong += wrong
    return saved[1]


def common_saves(job: Job) -> list[Saved]:
    """Returns the saves in memory of a job that each of its ranks knows to be whole."""
    ranks = [
        process
        for process in job.ranks
        if process.own is not None and process.own.session is not None
    ]
    if not ranks or len(ranks) < job.training.ranks:
        return []
    steps = [
        {event.step for _, event in process.events if isinstance(event, TierSaved)}
        for process in ranks
    ]
    return [(ranks[0].own.target.run, step) for step in sorted(set.intersection(*steps))]
