"""What a job does: its launcher, and the life of each rank, in the order in which the trainer calls the product.

    job = Job(world, Training(ranks=2))
    job.start()                                 # a launcher and its ranks, as processes of the cluster

A rank chooses and loads a checkpoint, acquires the folder, trains (each step is an exchange between all ranks), saves, and ends,
as ``mindresume.plugin`` has it done. What it learns is told to ``World.history``, by which the oracle judges.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import xxhash

from mindresume.coordination.collectives import Group, report
from mindresume.errors import LeaseHeldError, MindResumeError
from mindresume.formats.rank_folder_naming import FileName
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import run_sequence
from mindresume.model.training_state import TrainingState
from mindresume.resume.choice import Choice
from mindresume.resume.job_selection import CheckpointSelector, SelectionRequest
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.crash_loop import PendingLoadAttempt
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.remote_run_number import number_runs
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.save_request import SaveOptions, Step
from mindresume.saving.shard_writer import SaveTarget, Shard, iteration_shard, rank_shard
from mindresume.saving.sync_saver import Outcome, Save
from mindresume.settings import Settings
from mindresume.simulation.bucket import PodStore
from mindresume.simulation.cluster import Cluster, Host, Process
from mindresume.simulation.group import LIMIT, Communicator, ExchangeError
from mindresume.simulation.mount import Mount
from mindresume.simulation.schedule import ERRORS
from mindresume.simulation.scheduler import Killed
from mindresume.simulation.standins import here, running
from mindresume.tensor_files import read_header, read_tensor

ITERATION = "iteration"
PER_EPOCH = 100
Saved = tuple[str, int]                     # (run, step)


@dataclass(frozen=True)
class Training:
    """One command. ``format``: "safetensors" or "ckpt" in rank folders, or "iteration". ``steps``: that it trains in all.
    ``every``: steps between two saves. ``keep``: checkpoints that stay, 0: all. ``fresh``: it is asked to begin anew.
    ``converts``: the number of ranks may differ from that of the checkpoint. ``apart``:
    its hosts share no disk. ``rescue``: when ranks are lost the others save what they have (MindIO TTP). ``url``: where
    checkpoints are uploaded to, empty: nowhere."""
    ranks: int = 2
    hosts: int = 1
    format: str = "safetensors"
    async_save: bool | str = False
    steps: int = 4
    every: int = 2
    keep: int = 0
    fresh: bool = False
    converts: bool = False
    root: str = "/out/checkpoint"
    output: str = "/out"
    url: str = ""
    apart: bool = False
    rescue: bool = False
    settings: Settings = Settings(commit_timeout=20.0, preemption_check_interval=3.0)
    patience: float = 5.0                   # seconds between the first death of a rank and SIGTERM to the others
    leave: float = 30.0                     # and from that to SIGKILL
    pace: float = 1.0                       # seconds of a step
    monitored: bool = False                 # it is known of each checkpoint whether it is healthy
    sick: tuple[int, ...] = ()              # and these are not
    dies: bool = False                      # its ranks are killed in their first step
    pruned: bool = False                    # somebody else removes checkpoints, too


@dataclass
class History:
    """What the jobs were told. ``reported``: ranks that were told that a step is saved; ``failed``: that it is not, with the
    reason; ``chosen``: of each run, the checkpoint that it went on from (None: a fresh start); ``wrong``: what no job may see.
    ``ended``: runs that ended by themselves, with status 0. ``uploaded``: rank 0 was told that all of it is at the url."""
    reported: dict[Saved, set[int]] = field(default_factory=dict)
    failed: dict[tuple[Saved, int], str] = field(default_factory=dict)
    chosen: dict[str, Saved | None] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)         # ranks of each run
    began: set[Saved] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    protected: list[Saved] = field(default_factory=list)        # of another training: to be there at any time
    sick: tuple[int, ...] = ()                                  # steps that are saved and not to be taken
    older: list[str] = field(default_factory=list)              # jobs that took something older than they had to
    opened: dict[str, float] = field(default_factory=dict)      # when each run had acquired its folder
    expelled: list[str] = field(default_factory=list)           # jobs that lived, and lost their folder to another one
    uploaded: set[Saved] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)                # runs that had begun their first step

    def complete(self) -> list[Saved]:
        """All ranks were told that it is saved, and it can be taken."""
        return [saved for saved, those in self.reported.items()
                if len(those) == self.sizes[saved[0]] and saved[1] not in self.sick]

    def copy(self) -> History:
        return History({saved: set(ranks) for saved, ranks in self.reported.items()}, dict(self.failed), dict(self.chosen),
                       dict(self.sizes), set(self.began), list(self.ended), list(self.wrong), list(self.protected),
                       self.sick, list(self.older), dict(self.opened), list(self.expelled), set(self.uploaded),
                       set(self.tried))


def newer(saved: Saved) -> tuple[int, int]:
    """Of two saves the one of the later run counts, then the later step."""
    return run_sequence(saved[0]) if saved[0] else 0, saved[1]          # one without records is of no run


def due(history: History) -> Saved | None:
    """The newest that all ranks were told is saved: nothing older may be taken from then on."""
    return max(history.complete(), key=newer, default=None)


@lru_cache(maxsize=4096)
def tensors(run: str, step: int, rank: int) -> dict[str, np.ndarray]:
    """What a rank holds. Weights differ by rank, step and run, so that a file of another one is never taken for the right one."""
    key = xxhash.xxh3_128_digest(f"{run} {step} {rank}".encode())
    weight = np.frombuffer(key, np.float32).reshape(2, 2)
    return {"embedding.weight": weight, "adam_m.embedding.weight": weight[::-1].copy(),
            "step_num": np.array(step, np.int64), "global_step": np.array([step], np.int32)}


def shard_of(place: SaveTarget, step: int, fmt: str, suffix: int, health: int | None = None) -> Shard:
    state, arrays = TrainingState(step, PER_EPOCH, step, 8, health=health), tensors(place.run, step, place.rank)
    random = {"rank": place.rank}
    if not place.iterations:
        name = FileName("sim", place.rank, suffix, state.epoch, state.step_in_epoch, fmt)
        return rank_shard(name, state, arrays, random=random, metadata={"format": "ms"})
    cut = TensorLayout((place.world_size,), (0, -1)), (2 * place.world_size, 2)
    weights = {name: array for name, array in arrays.items() if name == "embedding.weight"}
    others = {name: array for name, array in arrays.items() if name not in weights}
    return iteration_shard("sim", place, state, weights, others, {name: cut for name in arrays if "embedding" in name}, random)


class _Step(Step):
    def __init__(self, number: int, manager: CheckpointManager, training: Training, history: History):
        super().__init__(number)
        self.manager, self.training, self.history = manager, training, history

    def collect(self) -> Save:
        """Collecting is an exchange, as where pipeline stages share a parameter."""
        self.manager.group.gather(b"")
        return Save(self.rescue())

    def rescue(self) -> Shard:
        session, training = self.manager.session, self.training
        saved = (session.place.run, self.number)
        self.history.began.add(saved)
        self.history.failed.pop((saved, session.place.rank), None)      # it is saved once more
        health = (1 if self.number in training.sick else 0) if training.monitored else None
        return shard_of(session.place, self.number, training.format, session.suffix, health)


class _RemoteCheckpoints(RemoteCheckpoints):
    """Tells the history of uploads."""
    history: History

    def commit(self, place: SaveTarget, step: int, data_dir: str) -> None:
        super().commit(place, step, data_dir)
        self.history.uploaded.add((place.run, step))


class _Manager(CheckpointManager):
    """Tells the history of failed saves. ``uploader``: what uploads, also after its end."""
    history: History
    uploader: Any = None

    def _start_uploader(self, remote: RemoteCheckpoints) -> Any:
        self.uploader = super()._start_uploader(remote)
        return self.uploader

    def _hear(self, outcome: Outcome) -> None:
        key = (self.place.run, outcome.step)
        if outcome.saved:
            self.history.reported.setdefault(key, set()).add(self.place.rank)
            self.history.failed.pop((key, self.place.rank), None)
        else:
            self.history.failed[key, self.place.rank] = str(outcome.error)
        super()._hear(outcome)


class Job:
    """``name``: of its processes. The launcher ends all ranks when one of them has died."""

    def __init__(self, cluster: Cluster, history: History, training: Training, hosts: list[Host], name: str = "job"):
        self.cluster, self.history, self.training, self.hosts, self.name = cluster, history, training, hosts, name
        self.communicator = Communicator(training.ranks, 2.0 + 400 * cluster.scheduler.tick if training.rescue else LIMIT)
        self.ranks: list[Process] = []
        self.launcher: Process | None = None

    def start(self) -> Process:
        """Returns the launcher, which ends when all ranks have."""
        self.launcher = self.cluster.process(self.hosts[0], f"{self.name}.launcher", self._launch)
        return self.launcher

    def struck(self, kinds: tuple[str, ...]) -> bool:
        """Whether anything has struck one of its processes, or one of ``kinds`` or a strike at all the cluster."""
        return any(row.process.startswith(f"{self.name}.") or row.strike.kind in (*kinds, "kill all", "term all", "power")
                   for row in self.cluster.struck)

    @property
    def over(self) -> bool:
        return bool(self.ranks) and all(process.dead for process in self.ranks)

    def _launch(self) -> None:
        from mindresume.simulation.standins import Event
        changed, training = Event(), self.training
        per_host = -(-training.ranks // training.hosts)
        for rank in range(training.ranks):
            process = self.cluster.process(self.hosts[rank // per_host], f"{self.name}.{rank}",
                                           lambda rank=rank: _life(self, rank))
            process.when_dead.append(lambda _: changed.set())
            self.ranks.append(process)
        mine = running()
        mine.on_term = lambda: [self.cluster.terminate(process) for process in self.ranks] and None
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


def _life(job: Job, rank: int) -> None:
    opened: list[str] = []
    try:
        _live(job, rank, opened)
    except LeaseHeldError as error:
        if opened and not job.struck(("ENOSPC", "EDQUOT")):
            job.history.expelled.append(f"{job.name}, which nothing has struck, has lost its folder: {error}")
        raise


def _live(job: Job, rank: int, opened: list[str]) -> None:
    """``opened``: is told the run, as soon as there is one."""
    training, history = job.training, job.history
    process, least = running(), due(job.history)
    group = job.communicator.member(rank, process)
    storage = Mount(job.cluster, process)
    choice, load_attempt, hold = None, None, None
    shared_groups: dict[str, Any] = {}
    remote = _remote_of(job, process) if training.url else None
    if not training.fresh:
        found = CheckpointSelector(storage, group, training.settings, process.emit, _no_complete_weights, remote=remote,
                                   saved_to=lambda: {training.root}, shared_groups=shared_groups).select(
            SelectionRequest(training.root, output_dir=training.output, any_layout=training.converts,
                             health_dir=training.output if training.monitored else None))
        choice, load_attempt, hold = found.choice, found.load_attempt, found.read_lock
        if choice is None and history.uploaded:
            history.wrong.append(f"{job.name} begins afresh, though {max(history.uploaded, key=newer)} is at the url")
    start = _loaded(job, choice, storage, rank) if choice is not None else 0
    options = SaveOptions(training.root, "sim", training.every, async_save=training.async_save,
                          iterations=training.format == ITERATION)
    manager = _Manager(storage, group, training.settings, options, KeepLast(training.keep) if training.keep else KEEP_ALL,
                       process.emit, pending=PendingLoadAttempt(load_attempt))
    manager.history, process.own = history, manager
    manager.open(shared_groups, choice, partial(number_runs, remote, process.emit), leases={})
    opened.append(manager.place.run)
    history.opened.setdefault(manager.place.run, here().scheduler.now)
    history.sizes[manager.place.run] = training.ranks
    if rank == 0 and not training.fresh:
        _judge_choice(job, choice, least)
    if rank == 0:
        history.chosen[manager.place.run] = (choice.chosen.run or "", choice.chosen.step or 0) if choice is not None else None
    if hold is not None:
        hold.release()
    manager.begin(start, choice, remote)
    manager.meet()
    manager.listen()
    step, left = start, ""
    history.tried.add(manager.place.run)
    manager.begin_load_attempt()
    for step in range(start + 1, training.steps + 1):
        try:
            _train(group, training.pace)
            if training.dies:
                job.cluster.kill(process)
                raise Killed
        except ExchangeError:
            if training.rescue and step > start + 1:
                manager.rescue(_Step(step - 1, manager, training, history))
            raise
        left = manager.step_end(_Step(step, manager, training, history))
        if left:
            break
    manager.end(_Step(step, manager, training, history))
    if left:
        report(group, lambda: None)             # as mindresume.mindformers.patches does: who ends first would end the others
    if rank == 0:
        history.ended.append(manager.place.run)


def _remote_of(job: Job, process: Process) -> RemoteCheckpoints:
    made = _RemoteCheckpoints(PodStore(job.cluster, process), job.training.url)
    made.history = job.history
    return made


def _no_complete_weights(storage: Any, path: str) -> Choice:
    raise AssertionError(f"{path} is taken for complete weights")


def _judge_choice(job: Job, choice: Choice | None, least: Saved | None) -> None:
    """Of a job that has acquired the folder. ``least``: what all ranks had been told is saved when it began. With an error it may
    be passed over, and so may one on which jobs have died."""
    refused = choice.refused if choice is not None else ()
    if least is None or job.struck(tuple(ERRORS)) or any("suspected" in row.reason for row in refused):
        return
    chosen = (choice.chosen.run or "", choice.chosen.step or 0) if choice is not None else None
    if chosen is None or newer(chosen) < newer(least):
        job.history.older.append(f"{job.name} takes {chosen}, though all ranks were told that {least} is saved")


def _train(group: Group, seconds: float) -> None:
    """One step: nobody is faster than the slowest."""
    here().scheduler.sleep(seconds)
    group.gather(b"")


def _loaded(job: Job, choice: Choice, storage: Mount, rank: int) -> int:
    """Reads what was chosen, as this rank. Returns its step; what is wrong with it is told."""
    chosen = choice.chosen
    saved = (chosen.run or "", chosen.step or 0)
    proven = [proof.rank for proof in choice.shards] if job.training.converts else [rank]
    for text in wrong_content(storage, choice, proven):
        job.history.wrong.append(text)
    return saved[1]


def wrong_content(storage: Any, choice: Choice, ranks: list[int]) -> list[str]:
    """What of the chosen checkpoint is not, bit for bit, what was saved. OSError if that cannot be read now."""
    chosen, found = choice.chosen, []
    shards = {proof.rank: proof for proof in choice.shards}
    for rank in ranks:
        if rank not in shards:
            found.append(f"step {chosen.step} of {chosen.run}: rank {rank} proved nothing")
            continue
        read: dict[str, np.ndarray] = {}
        for source in shards[rank].sources:
            path = f"{choice.root}/{source.file.path}"
            try:
                with storage.open(path) as file:
                    header = read_header(file, path)
                    read.update({name: read_tensor(file, header.tensors[name]) for name in source.names or header.tensors})
            except MindResumeError as error:
                found.append(f"step {chosen.step} of {chosen.run} was chosen and cannot be read by rank {rank}: {error}")
        for name, array in tensors(chosen.run or "", chosen.step or 0, rank).items():
            if name not in read or read[name].tobytes() != array.tobytes():
                found.append(f"{name} of rank {rank} is not what was saved in step {chosen.step} of {chosen.run}")
    return found


__all__ = ["ExchangeError", "History", "Job", "Training", "tensors", "wrong_content"]
Work = Callable[[], Any]
