"""Scenarios: which jobs run, on which disks, and what was there before.

    sim = Simulation(SCENARIOS["save"], "safetensors", schedule)
    sim.run()
    sim.findings()
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from mindresume.coordination.lease import ended
from mindresume.coordination.read_locks import ReadLocks, acquire_read_lock, read_locks
from mindresume.errors import MindResumeError, MissingCheckpointError
from mindresume.events.log_lines import line_of
from mindresume.fault_injection.tiny_checkpoints import ITERATION
from mindresume.formats.iteration_naming import iteration_name
from mindresume.formats.records import scan_records
from mindresume.model.manifest import FOLDER, attempt_name, record_name
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import sync_saver
from mindresume.saving.garbage_collector import carry_out, plan
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.shard_writer import Outcome, Save, SaveTarget
from mindresume.settings import MemoryTierSettings
from sim.bucket import BUCKET, Bucket
from sim.cluster import (
    SHARED,
    SHM,
    Cluster,
    Host,
    InjectedFault,
    Process,
    current_cluster,
    current_process,
    lose_power,
)
from sim.communicator import ExchangeError
from sim.disk import Disk
from sim.jobs import History, Job, Training, save_order
from sim.machine import use_cluster
from sim.memory_disk import common_saves
from sim.mount import Mount
from sim.oracle import LOST, STUCK, Finding, check_disks, check_pointers
from sim.saved_content import make_shard, wrong_content
from sim.schedule import KINDS, ROT_IN_MEMORY, Schedule
from sim.scheduler import TICK, Deadlock, Killed, OperationLimit

TIER = replace(Training().settings, memory_tier=MemoryTierSettings(1, SHM.rstrip("/")))
FORMATS = ("safetensors", "ckpt", ITERATION)
WAYS = ("", "thread", "process")            # ways of saving: synchronous, in a thread, in a process
RUN = "0002-1111aaaa"
ATTEMPTS = 3                    # number of times that a platform starts a job
LONGEST_EXCHANGE = 10.0         # seconds; ranks wait up to 20 s for records
LATER = (0.0, 0.0, 2.5)         # seconds between the starts of two jobs
A_COMMIT = 200                  # operations of a commit and the removal after it
SHORT_WORK = 2 * A_COMMIT        # rank 0 commits several steps at once if their records are listed late
SCRUBS = 600                    # operations of scrubs in the training meanwhile


@dataclass(frozen=True)
class Scenario:
    """A workload and its invariants.

    Args:
        workload: starts the processes of a simulation.
        training: the job that the workload runs, and that is started again afterwards.
        past: a training that has ended well before; None for an empty disk.
        formats: the formats in which it makes sense.
        kinds: the faults that may be injected.
        oracle: checks the disks.
        check_run: checks the run besides.
    """
    name: str
    about: str
    workload: Callable[[Simulation], None]
    training: Training = Training()
    past: Training | None = Training(steps=2)
    formats: tuple[str, ...] = FORMATS
    ways: tuple[str, ...] = WAYS
    kinds: tuple[str, ...] = KINDS
    oracle: Callable[..., list[Finding]] = check_disks
    check_run: Callable[[Simulation], list[Finding]] = lambda sim: []


class Simulation:
    """One run of a scenario in one format, one way of saving and one schedule."""

    def __init__(self, scenario: Scenario, fmt: str, schedule: Schedule, way: str = "", most: int = 20_000):
        self.scenario, self.format, self.way, self.schedule = scenario, fmt, way, schedule
        self.training = _in_time(replace(scenario.training, format=fmt, async_save=way or False), schedule.tick)
        disks, past = _past(scenario.past and replace(scenario.past, format=fmt), self.training.node_local, self.training.hosts,
                            bool(self.training.url))
        self.history = past.copy()
        self.history.unhealthy = scenario.training.unhealthy
        self.cluster = Cluster(schedule, {name: disk.copy() for name, disk in disks.items()}, most)
        if self.training.url:
            self.lose_pods()
        self.jobs: list[Job] = []
        self.stuck = ""
        self.variant = ""                           # distinguishes disks that differ only in modification times

    def run(self, collect: Callable[[Simulation, int], None] | None = None) -> Simulation:
        """Runs the workload to its end. ``observer(sim, number)`` is called before each operation before which the disks, or what
        the jobs were told, have changed; and at the end, with the number of the next operation. A power loss that the schedule
        has later is applied at the end."""
        cluster = self.cluster
        seen = [self._state_counts()]

        def observe(process: Process, name: str, path: str) -> None:
            state_counts = self._state_counts()
            if state_counts != seen[0]:
                seen[0] = state_counts
                collect(self, cluster.at)
        cluster.observe = observe if collect is not None else None
        with use_cluster(cluster):
            self.scenario.workload(self)
            try:
                cluster.scheduler.run()
            except (Deadlock, OperationLimit) as error:
                self.stuck = f"{type(error).__name__}: {error}"
            cluster.observe = None
        for give_back in cluster.cleanups:
            give_back()
        if collect is not None:
            collect(self, cluster.scheduler.operations + 1)
        for fault in self.schedule.faults:
            if fault.kind == "power" and fault.at > cluster.scheduler.operations:
                lose_power(cluster.disks, fault.amount)
                cluster.injected.append(InjectedFault(fault, fault.at, "", "the end", ""))
        return self

    def _state_counts(self) -> tuple[int, int, int]:
        """Returns counters that change with the disks and with what the jobs were told."""
        history = self.history
        return (sum(disk.changed for disk in self.cluster.disks.values()), sum(map(len, history.reported.values())),
                len(history.failed))

    def findings(self, again: bool = True) -> list[Finding]:
        """Returns the violations at the end of the run. ``again``: runs the oracle of the scenario, which changes the disks."""
        found = [Finding(STUCK, self.stuck)] if self.stuck else []
        found += [Finding(STUCK, f"{job.name}: {job.communicator.mismatch}") for job in self.jobs if job.communicator.mismatch]
        found += [Finding(STUCK, f"{process.name}: {type(process.error).__name__}: {process.error}")
                  for process in self.cluster.processes if not _may_end_with(process.error)]
        work = SHORT_WORK + (SCRUBS if self.training.settings.scrub.every_hours else 0)
        limit = LONGEST_EXCHANGE + work * self.schedule.tick
        if not (any(injected.fault.kind in ("slow", "pause") for injected in self.cluster.injected)
                or any(process.hangs for process in self.cluster.processes)):
            found += [Finding(STUCK, f"{job.name}: a rank waited in a collective for {job.communicator.longest_wait:.0f} s while "
                                     f"others did file operations")
                      for job in self.jobs if job.communicator.longest_wait > limit]
        if not (found or self.cluster.injected or self.training.node_local or self.training.url
                or self.training.pruned_by_others):
            found += check_pointers(self.cluster.disks, self.history, self.training)
        found += self.scenario.check_run(self)
        return found + (self.scenario.oracle(self.cluster.disks, self.history, self.training) if again else [])

    def lose_pods(self) -> None:
        """Empties the disks of all nodes. A bucket stays."""
        self.history.reported.clear()
        for name in self.cluster.disks:
            if name != BUCKET:
                self.cluster.disks[name] = Disk(local=True)

    def job(self, training: Training, first: int = 0, hosts: list[Host] | None = None) -> Job:
        """Adds a job. ``first``: number of its first node, where nodes share no disk. ``hosts``: default new ones."""
        hosts = hosts or [self.cluster.host("", first + node) for node in range(training.hosts)]
        made = Job(self.cluster, self.history, training, hosts, f"job{len(self.jobs)}")
        self.jobs.append(made)
        return made


def _in_time(training: Training, tick: float) -> Training:
    """Returns ``training`` with a longer commit timeout where operations are slow: an upload is many operations. Searched are
    orders of operations, not timeouts that are too short for them."""
    if not training.url or tick <= TICK:
        return training
    settings = replace(training.settings, commit_timeout=training.settings.commit_timeout + A_COMMIT * tick)
    return replace(training, settings=settings)


def _may_end_with(error: BaseException | None) -> bool:
    """Returns whether a process may end with ``error``: killed, or an error that says what is wrong."""
    return error is None or isinstance(error, (Killed, MindResumeError, OSError, ExchangeError))


@lru_cache(maxsize=64)
def _past(training: Training | None, node_local: bool, hosts: int, remote: bool) -> tuple[Mapping[str, Disk], History]:
    """Returns the disks on which ``training`` has run to its end, and its history."""
    disks = {f"node{node}": Disk(local=True) for node in range(hosts)} if node_local or remote else {SHARED: Disk()}
    if remote:
        disks[BUCKET] = Bucket()
    history = History()
    if training is None:
        return disks, history
    cluster = Cluster(Schedule(), disks)
    cluster._tokens = 250_000                                   # tokens that no later process draws
    with use_cluster(cluster):
        job = Job(cluster, history, training, [cluster.host("", node) for node in range(training.hosts)], "past")
        job.start()
        cluster.scheduler.run()
    bad = [process for process in cluster.processes if process.error is not None or process.exit]
    if bad:
        raise AssertionError(f"the training before the scenario failed: {bad[0].name}: {bad[0].error!r}\n" +
                             "\n".join(line_of(event)[1] for _, event in bad[0].events))
    for disk in disks.values():
        disk.lose_power(lambda: True)
    return disks, history


# ---- saves alone, without the start and the end of a job -----------------------------------------------------------------------

def _save_only(sim: Simulation, steps: tuple[int, ...], keep: int = 0) -> None:
    host = sim.cluster.host()
    sim.history.sizes[RUN] = sim.training.ranks
    for rank in range(sim.training.ranks):
        sim.cluster.process(host, f"rank{rank}", lambda rank=rank: _save(sim, rank, steps, keep))


def _save(sim: Simulation, rank: int, steps: tuple[int, ...], keep: int) -> None:
    training, history, process = sim.training, sim.history, current_process()
    lineage = next(iter(history.chosen), RUN)
    target = SaveTarget(Mount(sim.cluster, process), training.root, RUN, rank, training.ranks, sim.format == ITERATION, (),
                        lineage)
    mine = (KeepLast(keep) if keep else KEEP_ALL) if rank == 0 else None
    saver = AsyncSaver(target, mine, sim.way, emit=process.emit, timeout=20.0) if sim.way else sync_saver(
        target, mine, process.emit)

    def hear(outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.saved:
                history.reported.setdefault((RUN, outcome.step), set()).add(rank)
            else:
                history.failed[(RUN, outcome.step), rank] = str(outcome.error)
    for step in steps:
        history.began.add((RUN, step))
        saver.save(Save(make_shard(target, step, sim.format, 1)))
        hear(saver.poll())
    hear(saver.wait(20.0))
    hear(saver.finish(20.0, 5.0))
    current_cluster().scheduler.sleep(200.0)                    # keeps the process alive for a late writer thread


# ---- whole jobs ----------------------------------------------------------------------------------------------------------------

def _one_job(sim: Simulation) -> None:
    sim.job(sim.training).start()


def _exchanged(sim: Simulation) -> None:
    """As ``_restarted``, on hosts that keep their caches and later change places."""
    _restarted(sim, [sim.cluster.host("", node) for node in range(sim.training.hosts)])


def _restarted(sim: Simulation, hosts: list[Host] | None = None) -> None:
    """A platform restarts the same command after every error."""
    restarted(sim, lambda attempt: sim.job(sim.training, hosts=hosts and (hosts[::-1] if attempt == 2 else hosts)))


def restarted(sim: Simulation, job_of: Callable[[int], Job]) -> None:
    """Starts a platform process that runs ``job_of(attempt)``, from attempt 0, until a job ends without an error; at most
    ``ATTEMPTS``."""
    def work() -> None:
        for attempt in range(ATTEMPTS):
            job = job_of(attempt)
            job.start()
            while not job.launcher.dead or not job.over:
                current_cluster().scheduler.sleep(1.0)
                if job.launcher.dead and not job.ranks:         # killed before it started a rank
                    break
            if job.ranks and not any(process.exit for process in job.ranks):
                return
    sim.cluster.process(sim.cluster.host("platform"), "platform", work)


def _twice(sim: Simulation) -> None:
    """Two jobs are started in one folder, at the same moment or while the first one trains."""
    sim.job(sim.training).start()

    def work() -> None:
        current_cluster().scheduler.sleep(LATER[sim.schedule.seed % len(LATER)])
        sim.job(sim.training).start()
    sim.cluster.process(sim.cluster.host("platform"), "platform", work)


def _in_memory(sim: Simulation) -> None:
    """A platform restarts the same command on the same hosts, which keep what lies in their memory."""
    hosts = [sim.cluster.host("", node) for node in range(sim.training.hosts)]
    restarted(sim, lambda attempt: sim.job(sim.training, hosts=hosts))


def check_memory(sim: Simulation) -> list[Finding]:
    """A job takes nothing older than what all ranks of an earlier one had in memory, unless a host or an operation failed, or it
    has rotted."""
    if any(row.fault.kind not in ("kill", "kill all", "slow", "pause", "term", "term all", ROT_IN_MEMORY)
           for row in sim.cluster.injected):
        return []
    rotted = {saved for row in sim.cluster.rots for saved in row.saves}
    found, required = [], None
    for job in sim.jobs:
        run = next((process.own.target.run for process in job.ranks if process.own is not None and process.own.session), None)
        chosen = sim.history.chosen.get(run, required)
        if required is not None and required not in rotted and (chosen is None or save_order(chosen) < save_order(required)):
            found.append(Finding(LOST, f"{job.name} takes {chosen}, though all ranks had {required} in memory"))
        required = max([*([required] if required else []), *common_saves(job)], key=save_order, default=None)
    return found


def _rare_beats(sim: Simulation) -> None:
    """A job has a longer heartbeat interval than a second one that is started beside it."""
    sim.job(replace(sim.training, settings=replace(sim.training.settings, heartbeat=60.0))).start()
    sim.job(sim.training).start()


def _orphan(sim: Simulation) -> None:
    """An earlier version has left a folder of records under the name of one inside an iteration folder."""
    root, disk = sim.training.root, sim.cluster.disks[SHARED]
    (run, step), = sim.history.reported
    name = attempt_name(step, run)
    inner = f"{iteration_name(step)}/{FOLDER}/{name}"
    for path in ("", f"/{FOLDER}", f"/{FOLDER}/{name}"):
        disk.make_folder(f"{root}/{FOLDER}/{name}{path}")
    disk.create(f"{root}/{FOLDER}/{name}/{FOLDER}/{name}/{record_name(1)}", disk.find(f"{root}/{inner}/{record_name(1)}").data)
    disk.lose_power(lambda: True, lambda data: data)
    _one_job(sim)


def _afresh(sim: Simulation) -> None:
    """A new training is started on purpose in the folder of another one."""
    sim.history.protected = list(sim.history.reported)
    _one_job(sim)


def _with_reader(sim: Simulation) -> None:
    """Beside a job one process prunes the folder, and one reads checkpoints."""
    _one_job(sim)
    host = sim.cluster.host("user")
    sim.cluster.process(host, "prune", lambda: _prune(sim))
    sim.cluster.process(host, "reader", lambda: _read(sim))


def _readers(sim: Simulation) -> None:
    """One process prunes, another one reads, and no process saves."""
    sim.cluster.process(sim.cluster.host("user"), "prune", lambda: _prune(sim, (3, 2, 1), 0.0))
    sim.cluster.process(sim.cluster.host("user2"), "reader", lambda: _read(sim, 0.0))


def _prune(sim: Simulation, keeps: tuple[int, ...] = (1, 1, 1), pause: float = 1.5) -> None:
    """Prunes as ``mindresume prune --keep-last KEEP`` does."""
    storage, root = Mount(sim.cluster, current_process()), sim.training.root
    for keep in keeps:
        current_cluster().scheduler.sleep(pause)
        made = plan(storage, root, KeepLast(keep), read_locks(storage, root), ended=ended(storage, root))
        carry_out(storage, root, made, ReadLocks(storage, root))


def _read(sim: Simulation, pause: float = 0.8) -> None:
    """Selects and reads as a conversion does, with a read lock: alternately the newest checkpoint, and the oldest by its name."""
    from mindresume.coordination.collectives import SingleProcess
    from mindresume.resume.eligible import SelectionPolicy, every_rank
    from mindresume.resume.selection import select_checkpoint
    storage, training = Mount(sim.cluster, current_process()), sim.training
    for number in range(6):
        current_cluster().scheduler.sleep(pause)
        oldest = next(iter(scan_records(storage, training.root)[0][::-1]), None) if number % 2 else None
        named = oldest and oldest.first and (oldest.iteration_dir or os.path.basename(oldest.first.path))
        try:
            choice = select_checkpoint(storage, training.root, SingleProcess(),
                            SelectionPolicy(training.ranks, named, ranks_to_verify=every_rank))
        except MissingCheckpointError:
            continue                                            # it was pruned meanwhile
        if choice.chosen is None:
            continue
        if choice.chosen.run is None:
            sim.history.wrong.append(f"{choice.chosen.first} was selected as files without records")
            continue
        held = acquire_read_lock(storage, choice.root, choice.chosen.name, choice.chosen.commit_dir)
        if held is not None:
            try:
                sim.history.wrong += wrong_content(storage, choice, list(range(training.ranks)))
            except FileNotFoundError as error:
                if not any(row.process == current_process().name and row.fault.kind in ("slow", "pause")
                           for row in current_cluster().injected):
                    sim.history.wrong.append(f"{choice.chosen.name} has a read lock and was removed: {error}")
                raise
            held.release()


SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in (
    Scenario("save", "two ranks save one step", lambda sim: _save_only(sim, (4,))),
    Scenario("prune", "two ranks save two steps and keep the newest", lambda sim: _save_only(sim, (4, 6), keep=1)),
    Scenario("replace", "two ranks save one step, commit it, and remove the previous one",
             lambda sim: _save_only(sim, (4,), keep=1)),
    Scenario("first", "a job in an empty folder", _one_job, past=None),
    Scenario("job", "a job resumes from a checkpoint, saves twice, keeps one", _one_job, Training(steps=6, keep=1)),
    Scenario("older", "a job resumes where two checkpoints exist", _one_job, Training(steps=8, keep=1), Training(steps=4)),
    Scenario("restarts", "a platform restarts the job after every error", _restarted, Training(steps=8, keep=2)),
    Scenario("twice", "two jobs are started in one folder at the same time", _twice,
             Training(steps=6, keep=2)),
    Scenario("rare beats", "another job is started beside one with a long heartbeat interval", _rare_beats,
             Training(steps=6, keep=2, pace=25.0)),
    Scenario("same hosts", "a job is restarted on its hosts, and once more with the hosts swapped", _exchanged,
             Training(hosts=2, steps=8, keep=2)),
    Scenario("orphan", "an earlier version has left records under a name that is in use", _orphan, Training(steps=6, keep=1),
             formats=(ITERATION,)),
    Scenario("health", "the last checkpoints of a job are unhealthy", _restarted,
             Training(steps=8, keep=1, health_monitored=True, unhealthy=(6, 8)), Training(steps=2, health_monitored=True)),
    Scenario("two hosts", "a job on two hosts that share a disk", _one_job, Training(hosts=2, steps=6, keep=1)),
    Scenario("three ranks", "a job of three ranks resumes from a checkpoint of two", _one_job,
             Training(ranks=3, steps=6, keep=1, allow_reshard=True)),
    Scenario("nodes", "a job on two hosts that share no disk", _restarted,
             Training(hosts=2, steps=6, keep=1, node_local=True), Training(hosts=2, steps=2, node_local=True), FORMATS[:2]),
    Scenario("afresh", "a new training in the folder of another one", _afresh, Training(steps=4, keep=1, fresh=True)),
    Scenario("lost ranks", "after a rank has died, the others save what they have", _one_job,
             Training(steps=6, keep=2, rescue=True)),
    Scenario("tier", "a job with a tier in memory is restarted on its host", _in_memory,
             Training(steps=10, every=6, keep=2, settings=TIER), check_run=check_memory),
    Scenario("tier of two hosts", "a job with tiers in memory of two hosts is restarted on them", _in_memory,
             Training(hosts=2, steps=10, every=6, keep=2, settings=TIER), formats=FORMATS[:2], check_run=check_memory),
    Scenario("a reader", "one process prunes and another one reads", _readers, Training(steps=8, pruned_by_others=True),
             Training(steps=8), ways=("",)),
    Scenario("readers", "one process prunes and another one reads beside a job", _with_reader,
             Training(steps=6, keep=2, pruned_by_others=True)),
)}
