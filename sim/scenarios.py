"""A scenario, which jobs run on which disks and what was there before, and one run of it.

sim = Simulation(SCENARIOS["save"], "safetensors", schedule)            # of sim.catalogue
sim.run()
sim.findings()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mindresume.errors import MindResumeError
from mindresume.fault_injection.faults import Killed
from mindresume.fault_injection.journal import ITERATION
from sim.bucket import BUCKET, Bucket
from sim.cluster import SHARED, Cluster, Host, InjectedFault, Process, lose_power
from sim.communicator import ExchangeError
from sim.disk import Disk
from sim.jobs import History, Job, Training
from sim.machine import use_cluster
from sim.oracle import STUCK, Finding, check_disks, check_pointers
from sim.schedule import KINDS, Schedule
from sim.scheduler import TICK, Deadlock, OperationLimit

FORMATS = ("safetensors", "ckpt", ITERATION)
WAYS = ("", "thread", "process")  # ways of saving: synchronous, in a thread, in a process
LONGEST_EXCHANGE = 10.0  # seconds; ranks wait up to 20 s for records
A_COMMIT = 200  # operations of a commit and the removal after it
# rank 0 commits several steps at once if their records are listed late
SHORT_WORK = 2 * A_COMMIT


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

    def __init__(
        self, scenario: Scenario, fmt: str, schedule: Schedule, way: str = "", most: int = 20_000
    ):
        self.scenario = scenario
        self.format = fmt
        self.way = way
        self.schedule = schedule
        self.training = _in_time(
            replace(scenario.training, format=fmt, async_save=way or False), schedule.tick
        )
        disks, past = _past(
            scenario.past and replace(scenario.past, format=fmt),
            self.training.node_local,
            self.training.hosts,
            bool(self.training.url),
        )
        self.history = past.copy()
        self.history.unhealthy = scenario.training.unhealthy
        self.cluster = Cluster(schedule, {name: disk.copy() for name, disk in disks.items()}, most)
        if self.training.url:
            self.lose_pods()
        self.jobs: list[Job] = []
        self.stuck = ""
        # distinguishes disks that differ only in modification times
        self.variant = ""
        # of its jobs, as ``sim.partners`` knows them
        self.starts: list[Any] = []

    def run(self, collect: Callable[[Simulation, int], None] | None = None) -> Simulation:
        """Runs the workload to its end. ``observer(sim, number)`` is called before each operation
        before which the disks, or what the jobs were told, have changed; and at the end, with the
        number of the next operation. A power loss that the schedule has later is applied at the
        end."""
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
        return (
            sum(disk.changed for disk in self.cluster.disks.values()),
            sum(map(len, history.reported.values())),
            len(history.failed),
        )

    def findings(self, again: bool = True) -> list[Finding]:
        """Returns the violations at the end of the run. ``again``: runs the oracle of the scenario,
        which changes the disks."""
        found = [Finding(STUCK, self.stuck)] if self.stuck else []
        found += [
            Finding(STUCK, f"{job.name}: {job.communicator.mismatch}")
            for job in self.jobs
            if job.communicator.mismatch
        ]
        found += [
            Finding(STUCK, f"{process.name}: {type(process.error).__name__}: {process.error}")
            for process in self.cluster.processes
            if not _may_end_with(process.error)
        ]
        limit = LONGEST_EXCHANGE + SHORT_WORK * self.schedule.tick
        if not (
            any(injected.fault.kind in ("slow", "pause") for injected in self.cluster.injected)
            or any(process.hangs for process in self.cluster.processes)
        ):
            found += [
                Finding(
                    STUCK,
                    f"{job.name}: a rank waited in a collective for "
                    f"{job.communicator.longest_wait:.0f} s while others did file operations",
                )
                for job in self.jobs
                if job.communicator.longest_wait > limit
            ]
        if not (
            found
            or self.cluster.injected
            or self.training.node_local
            or self.training.url
            or self.training.pruned_by_others
        ):
            found += check_pointers(self.cluster.disks, self.history, self.training)
        found += self.scenario.check_run(self)
        return found + (
            self.scenario.oracle(self.cluster.disks, self.history, self.training) if again else []
        )

    def lose_pods(self) -> None:
        """Empties the disks of all nodes. A bucket stays."""
        self.history.reported.clear()
        for name in self.cluster.disks:
            if name != BUCKET:
                self.cluster.disks[name] = Disk(local=True)

    def job(self, training: Training, first: int = 0, hosts: list[Host] | None = None) -> Job:
        """Adds a job. ``first``: number of its first node, where nodes share no disk. ``hosts``:
        default new ones."""
        hosts = hosts or [self.cluster.host("", first + node) for node in range(training.hosts)]
        made = Job(self.cluster, self.history, training, hosts, f"job{len(self.jobs)}")
        self.jobs.append(made)
        return made


def _in_time(training: Training, tick: float) -> Training:
    """Returns ``training`` with a longer commit timeout where operations are slow: an upload is
    many operations. Searched are orders of operations, not timeouts that are too short for them."""
    if not training.url or tick <= TICK:
        return training
    settings = replace(
        training.settings, commit_timeout=training.settings.commit_timeout + A_COMMIT * tick
    )
    return replace(training, settings=settings)


def _may_end_with(error: BaseException | None) -> bool:
    """Returns whether a process may end with ``error``: killed, or an error that says what is
    wrong."""
    return error is None or isinstance(error, (Killed, MindResumeError, OSError, ExchangeError))


@lru_cache(maxsize=64)
def _past(
    training: Training | None, node_local: bool, hosts: int, remote: bool
) -> tuple[Mapping[str, Disk], History]:
    """Returns the disks on which ``training`` has run to its end, and its history."""
    disks = (
        {f"node{node}": Disk(local=True) for node in range(hosts)}
        if node_local or remote
        else {SHARED: Disk()}
    )
    if remote:
        disks[BUCKET] = Bucket()
    history = History()
    if training is None:
        return disks, history
    cluster = Cluster(Schedule(), disks)
    cluster._tokens = 250_000  # tokens that no later process draws
    with use_cluster(cluster):
        job = Job(
            cluster,
            history,
            training,
            [cluster.host("", node) for node in range(training.hosts)],
            "past",
        )
        job.start()
        cluster.scheduler.run()
    bad = [process for process in cluster.processes if process.error is not None or process.exit]
    if bad:
        raise AssertionError(
            f"the training before the scenario failed: {bad[0].name}: {bad[0].error!r}\n"
            + "\n".join(event.line() for _, event in bad[0].events)
        )
    for disk in disks.values():
        disk.lose_power(lambda: True)
    return disks, history
