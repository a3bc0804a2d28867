"""Searches for a schedule that breaks a promise, at random or systematically, and shrinks it.

    counts, found = search_seeds(SearchRequest((0, 1000)))
    for failure in systematic(SCENARIOS["save"], "ckpt", switches=2): ...
    simple = shrink(failure);  replay(simple)

A run is checked at its end, and also as if every process had been killed, or the power had failed,
before each operation: these are schedules of their own that share a prefix. A state of the disks
that was checked before, with the same history, is not checked again (``KnownStates``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import xxhash

from mindresume.fault_injection.faults import Fault
from mindresume.storage import TEMPORARY
from sim.catalogue import SCENARIOS
from sim.cluster import lose_power
from sim.disk import Disk
from sim.jobs import History
from sim.oracle import Finding
from sim.scenarios import FORMATS, WAYS, Scenario, Simulation
from sim.schedule import Schedule, random_schedule
from sim.scheduler import Task

SHARE = 4  # the command is restarted on one of so many states


@dataclass(frozen=True)
class Failure:
    """A schedule and its violations. ``how``: the death after which the disks were checked; empty
    for the end of the run."""

    scenario: Scenario
    format: str
    way: str
    schedule: Schedule
    findings: tuple[Finding, ...]
    how: str = ""

    @property
    def kind(self) -> tuple[str, str]:
        """Returns what identifies equivalent failures, of which one is reported."""
        return self.scenario.name, self.findings[0].kind

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario.name,
            "format": self.format,
            "way": self.way,
            "schedule": self.schedule.to_json(),
            "how": self.how,
            "findings": [str(finding) for finding in self.findings],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Failure:
        """Reads what ``to_json`` returns; "how" and "findings" are optional. Raises KeyError,
        TypeError or ValueError for anything else."""
        scenario = SCENARIOS[value["scenario"]]
        fmt = value["format"]
        way = value["way"]
        if fmt not in scenario.formats or way not in scenario.ways:
            raise ValueError(f"scenario {scenario.name!r} has no format {fmt!r} with way {way!r}")
        findings = tuple(Finding(*text.split(": ", 1)) for text in value.get("findings", ()))
        return cls(
            scenario,
            fmt,
            way,
            Schedule.from_json(value["schedule"]),
            findings,
            value.get("how", ""),
        )


@dataclass
class Counts:
    """Size of a search. ``runs``: runs of scenarios. ``schedules``: those and each moment of death.
    ``states``: states that were checked."""

    runs: int = 0
    schedules: int = 0
    states: int = 0

    def add(self, other: Counts) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True)
class _State:
    """The disks if every process had died ``how``."""

    how: str
    schedule: Schedule
    disks: dict[str, Disk]
    history: History
    signature: int


@dataclass
class KnownStates:
    """Signatures of states that were checked without a violation; forgotten when there are
    ``most``."""

    signatures: set[int] = field(default_factory=set)
    most: int = 2_000_000

    def is_new(self, signature: int) -> bool:
        if signature in self.signatures:
            return False
        if len(self.signatures) >= self.most:
            self.signatures.clear()
        self.signatures.add(signature)
        return True


def _copied(disks: dict[str, Disk]) -> dict[str, Disk]:
    return {name: disk.copy() for name, disk in disks.items()}


def apply_death(disks: Mapping[str, Disk], kind: str, amount: int) -> None:
    """Changes ``disks`` to what the fault ``kind`` leaves."""
    if kind == "power":
        lose_power(disks, amount)
    else:
        for disk in disks.values():
            disk.lose_power(lambda: True, lambda data: data)


def state_signature(
    sim: Simulation, disks: dict[str, Disk], history: History, power: bool = False
) -> int:
    """Returns a hash that is equal for states that the oracle cannot tell apart; with ``power``
    also after any power loss. The content of a temporary file does not count: no process reads
    it."""
    text = (
        f"{sorted(history.complete())} {sorted(history.failed)} {sorted(history.uploaded)} "
        f"{sorted(history.started_runs)} "
    )
    text += f"{history.wrong} {history.stale_choices} {history.lease_losses}"
    return xxhash.xxh3_64_intdigest(f"{text} {_disks_signature(sim, disks, power)}".encode())


def _disks_signature(sim: Simulation, disks: Mapping[str, Disk], power: bool = False) -> int:
    """Returns a hash that is equal for disks on which the same command, started again, does the
    same."""
    text = f"{sim.scenario.name} {sim.variant} {sim.format} {sim.way} {power} "
    text += " ".join(
        f"{name} {disk.signature(power, TEMPORARY)}" for name, disk in sorted(disks.items())
    )
    return xxhash.xxh3_64_intdigest(text.encode())


def ending_with(schedule: Schedule, death: Fault, begun: int) -> Schedule:
    """Returns ``schedule``, ended by ``death`` when ``begun`` operations had begun. Faults with
    higher numbers than its own may have been injected by then: one process can wait before its
    operation while another does many."""
    before = (fault for fault in schedule.faults if fault.at != death.at and fault.at <= begun)
    return replace(schedule, faults=(*before, death))


def run(
    scenario: Scenario,
    fmt: str,
    way: str,
    schedule: Schedule,
    known: KnownStates,
    counts: Counts,
    deaths: bool = True,
    share: int = 1,
    recorder: BranchRecorder | None = None,
) -> Failure | None:
    """Runs a scenario once and returns its first failure, or None.

    Args:
        deaths: also checks the disks after each change, as if all processes had died.
        share: restarts the command on one of ``share`` different states only, once for equal disks
            whatever the history: what it takes is what ``which`` says, and that is compared with
            the history. The other states are only inspected. Where hosts share no disk, an
            inspection shows nothing, so every second state is checked, with a restart.
        recorder: records which other tasks could have continued; deaths before its last switch are
            not checked.
    """
    states: list[_State] = []
    seen: list[int] = []  # signatures that this run has added
    last = recorder.last if recorder is not None else 0

    def collect(sim: Simulation, at: int) -> None:
        cluster = sim.cluster
        injected = cluster.injected
        if injected and injected[-1].fault.kind in ("kill all", "power"):
            return
        if (
            share > 1
            and sim.training.node_local
            and not sim.training.url
            and (at + schedule.seed) % 2
        ):
            # needs a restart, which takes three times as long as an inspection
            return
        if cluster.scheduler.operations < last:
            return
        counts.schedules += 3
        whole = state_signature(sim, cluster.disks, sim.history, power=True)
        if not known.is_new(whole):  # and so are all states after a power loss
            return
        seen.append(whole)
        pending = any(disk.pending() for disk in cluster.disks.values())
        for kind, amount in (("kill all", 0), ("power", 0), ("power", 1 + whole % 10**6)):
            if kind == "power" and not pending:
                # everything is flushed: the same state as after "kill all"
                continue
            disks = cluster.disks
            if kind == "power":
                disks = _copied(disks)
                apply_death(disks, kind, amount)
            signature = state_signature(sim, disks, sim.history)
            if known.is_new(signature):
                seen.append(signature)
                if kind == "kill all":  # copied only now: most states are known
                    disks = _copied(disks)
                    apply_death(disks, kind, amount)
                ends = ending_with(schedule, Fault(at, kind, amount), cluster.scheduler.operations)
                states.append(
                    _State(
                        f"{kind} before operation {at}", ends, disks, sim.history.copy(), signature
                    )
                )

    sim = Simulation(scenario, fmt, schedule, way)
    if recorder is not None:
        sim.cluster.scheduler.chooser = recorder
    sim.run(collect if deaths else None)
    counts.runs += 1
    counts.schedules += 1
    shared = not sim.training.node_local and not sim.training.url
    for state in states:
        counts.states += 1
        restart_signature = _disks_signature(sim, state.disks) if shared else state.signature
        again = not restart_signature % share and (not shared or known.is_new(restart_signature))
        findings = scenario.oracle(state.disks, state.history, sim.training, restart=again)
        if findings:
            known.signatures.discard(restart_signature)
            known.signatures.difference_update(seen)  # they were not all checked
            return Failure(scenario, fmt, way, state.schedule, tuple(findings), state.how)
    # The end is checked with a restart whatever ``share``; its signature differs from the same
    # disks after a death.
    signature = ~state_signature(sim, sim.cluster.disks, sim.history)
    new = known.is_new(signature)
    counts.states += new
    findings = sim.findings(again=new)
    if findings:
        known.signatures.discard(signature)
    return Failure(scenario, fmt, way, schedule, tuple(findings)) if findings else None


def count_operations(scenario: Scenario, fmt: str, way: str) -> int:
    """Returns the number of operations of a run without faults."""
    return Simulation(scenario, fmt, Schedule(), way).run().cluster.scheduler.operations


@dataclass(frozen=True)
class SearchRequest:
    """What to search. ``seeds``: (first, count) of random schedules. Empty names mean all.
    ``share``: as for ``run``."""

    seeds: tuple[int, int]
    scenarios: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    share: int = SHARE

    def configurations(self) -> list[tuple[Scenario, str, str]]:
        """Returns the requested (scenario, format, way)."""
        return [
            (scenario, fmt, way)
            for scenario in SCENARIOS.values()
            for fmt, way in product(scenario.formats, scenario.ways)
            if scenario.name in (self.scenarios or SCENARIOS)
            and fmt in (self.formats or FORMATS)
            and way in (self.ways or WAYS)
        ]


known_states = KnownStates()  # shared by all searches of this process
_sizes: dict[tuple[str, str, str], int] = {}


def search_seeds(
    wanted: SearchRequest, seen: set[tuple[str, str]] | None = None
) -> tuple[Counts, list[tuple[int, Failure]]]:
    """Runs the schedules of all seeds. Returns the counts and (seed, failure) of the first failure
    of each kind, shrunk. ``seen``: kinds that are not reported again; new ones are added."""
    counts = Counts()
    found = []
    configurations = wanted.configurations()
    seen = set() if seen is None else seen
    first, count = wanted.seeds
    for seed in range(first, first + count):
        rng = random.Random(seed)
        scenario, fmt, way = configurations[rng.randrange(len(configurations))]
        size = _sizes.setdefault((scenario.name, fmt, way), 0) or count_operations(
            scenario, fmt, way
        )
        _sizes[scenario.name, fmt, way] = size
        failure = run(
            scenario,
            fmt,
            way,
            random_schedule(rng, size, scenario.kinds),
            known_states,
            counts,
            share=wanted.share,
        )
        if failure is not None and failure.kind not in seen:
            seen.add(failure.kind)
            found.append((seed, shrink(failure)))
    return counts, found


class BranchRecorder:
    """A chooser that follows ``switches`` and records the alternatives: ``others``, {number of an
    operation: other ready tasks}."""

    def __init__(self, switches: tuple[tuple[int, int], ...]):
        self.switches, self._scripted = switches, Schedule(switches=switches).chooser()
        self.others: dict[int, int] = {}
        self.last = max((at for at, _ in switches), default=0)

    def may_switch(self, number: int) -> bool:
        return number >= self.last or self._scripted.may_switch(number)

    def choose(self, number: int, current: Task | None, ready: Sequence[Task]) -> Task:
        if current is None or self._scripted.may_switch(number):
            return self._scripted.choose(number, current, ready)
        self.others[number] = len(ready) - 1
        return current

    def further(self, every: int) -> list[tuple[tuple[int, int], ...]]:
        """Returns ``switches`` extended by one more, at each ``every``-th operation."""
        return [
            (*self.switches, (at, further))
            for at, others in self.others.items()
            if not (at - 1) % every
            for further in range(1, others + 1)
        ]


def systematic(
    scenario: Scenario,
    fmt: str,
    way: str = "",
    switches: int = 2,
    counts: Counts | None = None,
    every: int = 1,
    deaths: bool = False,
    part: tuple[int, int] = (0, 1),
    known: KnownStates | None = None,
) -> Iterator[Failure]:
    """Yields the failures of every schedule with at most ``switches`` switches, at each
    ``every``-th operation, to each ready task. Before its last switch such a schedule equals the
    one without that switch. ``part`` (i, n): only schedules whose first switch is at operation i
    modulo n, for processes that share the work."""
    known, counts = known or KnownStates(), counts or Counts()
    stack: list[tuple[tuple[int, int], ...]] = [()]
    while stack:
        chosen = stack.pop()
        recorder, mine = BranchRecorder(chosen), bool(chosen) or part[0] == 0
        found = run(
            scenario,
            fmt,
            way,
            Schedule(switches=chosen),
            known,
            counts if mine else Counts(),
            deaths and mine,
            recorder=recorder,
        )
        if found is not None and mine:
            yield found
        if len(chosen) < switches:
            stack += [
                more
                for more in recorder.further(every)
                if chosen or (more[-1][0] - 1) // every % part[1] == part[0]
            ]


def replay(failure: Failure) -> list[Finding]:
    """Returns the violations of a failure's schedule, run again from the start."""
    sim = Simulation(failure.scenario, failure.format, failure.schedule, failure.way).run()
    return sim.findings()


def shrink(failure: Failure, tries: int = 400) -> Failure:
    """Returns the simplest schedule that was found to break the same promise, after at most
    ``tries`` runs."""
    kinds = {finding.kind for finding in failure.findings}
    best, left = failure, tries
    while left > 0:
        for schedule in best.schedule.shrink_candidates():
            left -= 1
            findings = replay(Failure(best.scenario, best.format, best.way, schedule, ()))
            if kinds & {finding.kind for finding in findings}:
                best = Failure(best.scenario, best.format, best.way, schedule, tuple(findings))
                break
            if left <= 0:
                break
        else:
            break
    return best


# ---- shards for worker processes -----------------------------------------------------------------
# Each process keeps its known states, so that it checks no state twice. Failures are returned as
# JSON, which ``Failure.from_json`` replays anywhere.

# seeds of a shard: about a second, which is lost if the search is stopped
SEEDS = 4
PARTS = 16  # number of shards of one scenario, format and way
Found = tuple[Counts, list[dict[str, Any]]]

# kinds that this process has found: shrinking takes long
_seen: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Switches:
    """A shard of all schedules of one scenario with at most ``switches`` switches. ``part``: as for
    ``systematic``."""

    scenario: str
    format: str
    way: str
    switches: int
    part: tuple[int, int]


def random_shards(wanted: SearchRequest) -> Iterator[SearchRequest]:
    """Yields requests for a few seeds each."""
    first, count = wanted.seeds
    for begin in range(first, first + count, SEEDS):
        yield replace(wanted, seeds=(begin, min(SEEDS, first + count - begin)))


def systematic_shards(wanted: SearchRequest, switches: int) -> Iterator[Switches]:
    """Yields the shards of a systematic search."""
    for scenario, fmt, way in wanted.configurations():
        for part in range(PARTS):
            yield Switches(scenario.name, fmt, way, switches, (part, PARTS))


def search_random(wanted: SearchRequest) -> Found:
    """Runs a shard of seeds. Returns the counts and the failures as JSON."""
    counts, found = search_seeds(wanted, _seen)
    return counts, [{"seed": seed, **failure.to_json()} for seed, failure in found]


def search_switches(wanted: Switches) -> Found:
    """Runs a shard of a systematic search. Returns the counts and the failures as JSON."""
    counts, found = Counts(), []
    for failure in systematic(
        SCENARIOS[wanted.scenario],
        wanted.format,
        wanted.way,
        wanted.switches,
        counts,
        deaths=True,
        part=wanted.part,
        known=known_states,
    ):
        if failure.kind not in _seen:
            _seen.add(failure.kind)
            found.append({"seed": None, **shrink(failure).to_json()})
    return counts, found
