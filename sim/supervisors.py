"""Scenarios with supervisors of several nodes (``mindresume run --rendezvous``) on a shared disk
with late listings.

The loop of ``supervisor.Supervisor`` and the files of ``supervisor.rendezvous`` run as they are; a
start of the job is simulated: its ranks train while all nodes of the generation train, hang if one
is missing, and fail as the seed says. The ranks of a node die with its supervisor. In "hanging
disk" the states are exchanged in a thread, as ``mindresume run`` does, and nobody reads what a
supervisor prints.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from mindresume.events import Emitter, Event
from mindresume.supervisor.evidence import BackgroundHandler
from mindresume.supervisor.hang import Heartbeats
from mindresume.supervisor.job import Observer
from mindresume.supervisor.members import Members
from mindresume.supervisor.rendezvous import BackgroundStates, NodeStates, Place, Rendezvous
from mindresume.supervisor.restart_policy import DIED, EXITED, JobEnd, StartOutcome
from mindresume.supervisor.supervisor import Supervisor, SupervisorSettings
from sim.cluster import Process, current_cluster, current_process
from sim.mount import Mount
from sim.oracle import STUCK, WRONG, Finding
from sim.scenarios import Simulation

FOLDER = "/out/supervisor"
# --node-timeout: a state is listed up to 65 s late, and others see the answer as late
TIMEOUT = 240.0
NODES, FEWEST = 3, 2
TRAINING = 5.0  # seconds of training after which a start has finished
# simulated seconds within which a supervisor looks at its job again, whatever its disk does
WATCHED = 5.0
# simulated seconds after which every supervisor must have ended
LIMIT, LIMIT_AFTER_DEATHS = 900.0, 3600.0


@dataclass
class _Part:
    """The ranks of one node in one generation. ``busy``: they train, or are being ended."""

    node: int
    generation: int
    members: tuple[int, ...]
    process: Process
    trained: float = 0.0
    finished: bool = False


@dataclass
class Jobs:
    """Holds what all nodes do, for the invariants.

    Attributes:
        failures: (node, seconds of training) of the failures to come.
        parts: what runs, by node.
        wrong: violations.
        ends: {node: exit statuses of its supervisors}.
        broken: generations that have lost ranks.
        lost: (node, generation) of the parts whose supervisor was killed.
        status: of the job, if no fault is injected.
    """

    failures: list[tuple[int, float]]
    parts: dict[int, _Part] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    ends: dict[int, list[int]] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    lost: set[tuple[int, int]] = field(default_factory=set)
    status: int = 0

    def bury(self) -> None:
        """Removes the parts whose supervisor is dead. Their ranks died with it, and their
        generation trains no more, unless they had finished."""
        for other in [other for other in self.parts.values() if other.process.dead]:
            self.broken |= set() if other.finished else {other.generation}
            self.lost.add((other.node, other.generation))
            del self.parts[other.node]

    def start(self, part: _Part, fewest: int) -> None:
        """Notes the start of a part. All parts that run must be of one generation with the same
        members."""
        self.bury()
        others = [other for other in self.parts.values() if other.generation == part.generation]
        if others and (part.node, part.generation) in self.lost:
            self.wrong.append(
                f"node {part.node} starts in generation {part.generation}, in which its ranks were "
                "lost"
            )
        # generations are counted anew if no supervisor is left
        if not self.parts:
            self.broken.discard(part.generation)
        for other in self.parts.values():
            if (other.generation, other.members) != (
                part.generation,
                part.members,
            ) and fewest == NODES:
                self.wrong.append(
                    f"node {part.node} starts generation {part.generation} of {part.members} while "
                    f"node {other.node} runs generation {other.generation} of {other.members}"
                )
        if part.node not in part.members or len(part.members) < fewest:
            self.wrong.append(f"node {part.node} starts with the members {part.members}")
        self.parts[part.node] = part

    def all_train(self, part: _Part) -> bool:
        """Returns whether all members run the generation of ``part``, or have finished it."""
        self.bury()
        there = {(other.node, other.generation) for other in self.parts.values()} | self.lost
        return part.generation not in self.broken and all(
            (node, part.generation) in there for node in part.members
        )


class _FullPipe:
    """An output whose reader has stopped. Who prints waits for longer than the supervisors may
    take."""

    def handle(self, event: Event, time_s: float) -> None:
        current_cluster().scheduler.sleep(LIMIT_AFTER_DEATHS)

    def close(self) -> None:
        pass


_jobs: WeakKeyDictionary[Simulation, Jobs] = WeakKeyDictionary()


class _SimulatedJob:
    """Implements what ``Supervisor`` uses of ``supervisor.job.Job``."""

    def __init__(
        self, jobs: Jobs, nodes: Rendezvous, number: int, fewest: int, chance: random.Random
    ):
        members = tuple(sorted(nodes.states.mine.members))
        self.jobs = jobs
        self.number = number
        self.fewest = fewest
        self.chance = chance
        self.part = _Part(nodes.node, nodes.generation, members, current_process())
        self.states = nodes.states
        self.heartbeats, self.members = Heartbeats(""), Members()

    def start(self) -> None:
        self.jobs.start(self.part, self.fewest)

    def watch(self, observer: Observer) -> JobEnd:
        part, jobs = self.part, self.jobs
        while True:
            current_cluster().scheduler.sleep(0.5)
            if end := self._look(observer):
                return end
            if not jobs.all_train(part):
                continue  # hangs in a collective
            part.trained += 0.5
            while jobs.failures and jobs.failures[0][0] not in part.members:
                jobs.failures.pop(0)
            if (
                jobs.failures
                and jobs.failures[0][0] == part.node
                and part.trained >= jobs.failures[0][1]
            ):
                jobs.failures.pop(0)
                return JobEnd(DIED, 137, "rank 0 was killed", noticed=0.0)
            if part.trained >= TRAINING and not jobs.failures:
                part.finished = True
                return JobEnd(EXITED, 0, "the command ended with status 0", noticed=0.0)

    def _look(self, observer: Observer) -> JobEnd | None:
        """Returns what the observer says, which must not take long."""
        began, cluster = current_cluster().scheduler.now, current_cluster()
        end, waited = observer.observe(self), cluster.scheduler.now - began
        paused = any(
            row.fault.kind == "pause" and row.process == current_process().name
            for row in cluster.injected
        )
        if (
            waited > WATCHED + 60 * cluster.schedule.tick
            and isinstance(self.states, BackgroundStates)
            and not paused
        ):
            self.jobs.wrong.append(
                f"the supervisor of node {self.part.node} did not look at its job for {waited:.0f} "
                "s"
            )
        return end

    def end(self, end: JobEnd, observer: Observer) -> tuple[StartOutcome, tuple[int, ...]]:
        for _ in range(self.chance.randrange(4)):
            observer.is_hurried()
            current_cluster().scheduler.sleep(self.chance.choice((0.1, 1.0, 10.0)))
        self.jobs.parts.pop(self.part.node, None)
        # each start leaves a later checkpoint
        committed = self.number
        return StartOutcome(self.number, 0.0, 0.0, end, committed=committed), ()


class _SimulatedSupervisor(Supervisor):
    def __init__(self, jobs: Jobs, nodes: Rendezvous, fewest: int, chance: random.Random):
        # 0: the first failure ends the job on all nodes
        settings = SupervisorSettings(max_restarts=0 if jobs.status else 5)
        printer = (
            [BackgroundHandler(_FullPipe())] if isinstance(nodes.states, BackgroundStates) else []
        )
        super().__init__(("train",), settings, Emitter(*printer), nodes)
        self.jobs = jobs
        self.fewest = fewest
        self.chance = chance

    def make_job(self, command: Sequence[str], number: int) -> _SimulatedJob:
        return _SimulatedJob(self.jobs, self.nodes, number, self.fewest, self.chance)


def supervise(sim: Simulation, fewest: int = NODES, states: type[NodeStates] = NodeStates) -> None:
    """Starts supervisors of all nodes. A platform starts a killed one again, unless the job goes on
    without it. ``states``: how they exchange their states."""
    chance = random.Random(sim.schedule.seed)
    failures = [
        (chance.randrange(NODES), chance.choice((0.5, 2.0, 4.0)))
        for _ in range(chance.randrange(3))
    ]
    jobs = _jobs[sim] = Jobs(failures, status=137 if failures and chance.random() < 0.3 else 0)
    later = [chance.choice((0.0, 0.0, 3.0, 40.0)) for _ in range(NODES)]

    def run(node: int) -> None:
        storage = Mount(sim.cluster, current_process())
        nodes = Rendezvous(
            storage,
            FOLDER,
            Place(node, NODES, fewest, TIMEOUT, f"host{node}"),
            lambda: sim.cluster.scheduler.now,
            sim.cluster.token(4),
            states,
        )
        decision = _SimulatedSupervisor(
            jobs, nodes, fewest, random.Random(sim.schedule.seed + node)
        ).supervise()
        jobs.ends.setdefault(node, []).append(decision.status)

    def platform(node: int) -> None:
        host = sim.cluster.host(f"node{node}")
        current_cluster().scheduler.sleep(later[node])
        for attempt in range(3):
            process = sim.cluster.process(host, f"supervisor{node}.{attempt}", lambda: run(node))
            while not process.dead:
                current_cluster().scheduler.sleep(1.0)
            if process.exit != -9 or fewest < NODES and node:
                return

    for node in range(NODES):
        sim.cluster.process(
            sim.cluster.host("platform"), f"platform{node}", lambda node=node: platform(node)
        )


def check(sim: Simulation) -> list[Finding]:
    """Checks the promises: together or not at all, one end for all, and an end in time."""
    jobs = _jobs[sim]
    found = [Finding(WRONG, text) for text in jobs.wrong]
    delays = any(
        row.fault.kind in ("pause", "slow", "kill", "kill host") for row in sim.cluster.injected
    )
    if sim.cluster.scheduler.now > (LIMIT_AFTER_DEATHS if delays else LIMIT):
        found.append(
            Finding(STUCK, f"the supervisors ended after {sim.cluster.scheduler.now:.0f} s")
        )
    statuses = {status for ends in jobs.ends.values() for status in ends}
    if not sim.cluster.injected and (statuses != {jobs.status} or len(jobs.ends) != NODES):
        found.append(Finding(STUCK, f"without a fault the supervisors ended with {jobs.ends}"))
    if not delays and len(statuses) > 1:
        found.append(Finding(WRONG, f"the supervisors ended with different statuses: {jobs.ends}"))
    return found
