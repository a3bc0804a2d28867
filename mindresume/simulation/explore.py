"""Searching for a schedule that breaks a promise: at random, or all of a kind; and making it as simple as it can be.

    counts, found = search(Search((0, 1000)))
    for failure in systematic(SCENARIOS["save"], "ckpt", switches=2): ...
    simple = shrunk(failure);  replay(simple)

Each run of a scenario is judged at its end, and also as if every process had died, or the power had failed, before each of its
operations: those are schedules of their own that share their beginning. Disks that were judged before, with the same told to the
jobs, are not judged again (``Known``).
"""
from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import xxhash

from mindresume.simulation.cluster import lose_power
from mindresume.simulation.disk import Disk
from mindresume.simulation.jobs import History
from mindresume.simulation.more_scenarios import SCENARIOS
from mindresume.simulation.oracle import Finding
from mindresume.simulation.scenarios import FORMATS, WAYS, Play, Scenario
from mindresume.simulation.schedule import Schedule, Strike, draw
from mindresume.simulation.scheduler import Task
from mindresume.simulation.standins import replaced
from mindresume.storage.atomic_publish import TEMPORARY

SHARE = 4                       # the same command is started again on one of so many different disks


@dataclass(frozen=True)
class Failure:
    """``how``: the moment of the death that was judged, empty: the end of the run."""
    scenario: Scenario
    format: str
    way: str
    schedule: Schedule
    findings: tuple[Finding, ...]
    how: str = ""

    @property
    def kind(self) -> tuple[str, str]:
        """What tells apart findings of which one is enough."""
        return self.scenario.name, self.findings[0].kind

    def to_json(self) -> dict[str, Any]:
        return {"scenario": self.scenario.name, "format": self.format, "way": self.way, "schedule": self.schedule.to_json(),
                "how": self.how, "findings": [str(finding) for finding in self.findings]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Failure:
        """Reads what ``to_json`` gives; "how" and "findings" may be left out. KeyError, TypeError or ValueError if it is
        something else."""
        scenario, fmt, way = SCENARIOS[value["scenario"]], value["format"], value["way"]
        if fmt not in scenario.formats or way not in scenario.ways:
            raise ValueError(f"scenario {scenario.name!r} has no format {fmt!r} with way {way!r}")
        findings = tuple(Finding(*text.split(": ", 1)) for text in value.get("findings", ()))
        return cls(scenario, fmt, way, Schedule.from_json(value["schedule"]), findings, value.get("how", ""))


@dataclass
class Counts:
    """``runs``: of scenarios. ``schedules``: with each moment of death counted. ``states``: different disks that were judged."""
    runs: int = 0
    schedules: int = 0
    states: int = 0

    def add(self, other: Counts) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True)
class _State:
    """Disks as they would be if all had died ``how``."""
    how: str
    schedule: Schedule
    disks: dict[str, Disk]
    history: History
    signature: int


@dataclass
class Known:
    """Signatures of what was judged and found well."""
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


def died(disks: Mapping[str, Disk], kind: str, amount: int) -> None:
    """Changes ``disks`` to what is left by ``kind``."""
    if kind == "power":
        lose_power(disks, amount)
    else:
        for disk in disks.values():
            disk.lose_power(lambda: True, lambda data: data)


def signature_of(play: Play, disks: dict[str, Disk], history: History, power: bool = False) -> int:
    """Equal for what is judged equally; with ``power`` also after any loss of power. Nobody reads a file that has no name yet."""
    text = f"{sorted(history.complete())} {sorted(history.failed)} {sorted(history.uploaded)} {sorted(history.tried)} "
    text += f"{history.wrong} {history.older} {history.expelled}"
    return xxhash.xxh3_64_intdigest(f"{text} {_disks_of(play, disks, power)}".encode())


def _disks_of(play: Play, disks: Mapping[str, Disk], power: bool = False) -> int:
    """Equal for disks on which the same command, started again, does the same."""
    text = f"{play.scenario.name} {play.variant} {play.format} {play.way} {power} "
    text += " ".join(f"{name} {disk.signature(power, TEMPORARY)}" for name, disk in sorted(disks.items()))
    return xxhash.xxh3_64_intdigest(text.encode())


def dying(schedule: Schedule, death: Strike, begun: int) -> Schedule:
    """The same, until everything ends by ``death``, when ``begun`` operations had been. Strikes with higher numbers than its own
    can be over by then: of two processes one may have waited before its operation while the other did many."""
    before = (strike for strike in schedule.strikes if strike.at != death.at and strike.at <= begun)
    return replace(schedule, strikes=(*before, death))


def run(scenario: Scenario, fmt: str, way: str, schedule: Schedule, known: Known, counts: Counts, deaths: bool = True,
        share: int = 1, options: Options | None = None) -> Failure | None:
    """Runs it once. ``deaths``: judges the disks after each change, too. ``share``: the same command is started again on one of
    so many of these, and once on equal disks, whatever was told of them: what it takes is what ``which`` says, and that is
    compared with what was told. Of the others only what people are told is looked at. Where that tells nothing, because hosts
    share no disk, every second moment is judged, with a start. ``options``: are told who else could have gone on, and until when
    deaths need not be judged."""
    states: list[_State] = []
    seen: list[int] = []                                # signatures that are known since this run
    last = options.last if options is not None else 0

    def collect(play: Play, at: int) -> None:
        cluster = play.cluster
        struck = cluster.struck
        if struck and struck[-1].strike.kind in ("kill all", "power"):
            return
        if share > 1 and play.training.apart and not play.training.url and (at + schedule.seed) % 2:
            return                                      # only a start tells, which takes three times as long as a look
        if cluster.scheduler.operations < last:
            return
        counts.schedules += 3
        whole = signature_of(play, cluster.disks, play.history, power=True)
        if not known.is_new(whole):                     # and with it whatever a loss of power leaves
            return
        seen.append(whole)
        pending = any(disk.pending() for disk in cluster.disks.values())
        for kind, amount in (("kill all", 0), ("power", 0), ("power", 1 + whole % 10**6)):
            if kind == "power" and not pending:
                continue                                # nothing that is not flushed: as if all had been killed
            disks = cluster.disks
            if kind == "power":
                disks = _copied(disks)
                died(disks, kind, amount)
            signature = signature_of(play, disks, play.history)
            if known.is_new(signature):
                seen.append(signature)
                if kind == "kill all":                  # most are known already: only now a copy is needed
                    disks = _copied(disks)
                    died(disks, kind, amount)
                ends = dying(schedule, Strike(at, kind, amount), cluster.scheduler.operations)
                states.append(_State(f"{kind} before operation {at}", ends, disks, play.history.copy(), signature))
    play = Play(scenario, fmt, schedule, way)
    if options is not None:
        play.cluster.scheduler.chooser = options
    play.run(collect if deaths else None)
    counts.runs += 1
    counts.schedules += 1
    shared = not play.training.apart and not play.training.url
    for state in states:
        counts.states += 1
        live = _disks_of(play, state.disks) if shared else state.signature
        again = not live % share and (not shared or known.is_new(live))
        findings = scenario.judges(state.disks, state.history, play.training, live=again)
        if findings:
            known.signatures.discard(live)
            known.signatures.difference_update(seen)                    # these are not known to be well
            return Failure(scenario, fmt, way, state.schedule, tuple(findings), state.how)
    # Judged at the end with another life, whatever the share: to be told apart from the same disks after a death.
    signature = ~signature_of(play, play.cluster.disks, play.history)
    new = known.is_new(signature)
    counts.states += new
    findings = play.findings(again=new)
    if findings:
        known.signatures.discard(signature)
    return Failure(scenario, fmt, way, schedule, tuple(findings)) if findings else None


def operations_of(scenario: Scenario, fmt: str, way: str) -> int:
    """Of a run in which nothing strikes."""
    return Play(scenario, fmt, Schedule(), way).run().cluster.scheduler.operations


@dataclass(frozen=True)
class Search:
    """``seeds`` (the first, how many) of random schedules. Empty names: all. ``share``: as of ``run``."""
    seeds: tuple[int, int]
    scenarios: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    share: int = SHARE

    def plays(self) -> list[tuple[Scenario, str, str]]:
        return [(scenario, fmt, way) for scenario in SCENARIOS.values() for fmt, way in product(scenario.formats, scenario.ways)
                if scenario.name in (self.scenarios or SCENARIOS) and fmt in (self.formats or FORMATS)
                and way in (self.ways or WAYS)]


known_here = Known()            # of this process: what was judged in one search is known in the next
_sizes: dict[tuple[str, str, str], int] = {}


def search(wanted: Search, seen: set[tuple[str, str]] | None = None) -> tuple[Counts, list[tuple[int, Failure]]]:
    """Runs the schedules of all seeds. Returns the counts, and what was found by which seed, the first of its kind each, as
    simple as it can be. ``seen``: kinds that are not wanted again; those found are added."""
    counts, found, plays, seen = Counts(), [], wanted.plays(), set() if seen is None else seen
    first, count = wanted.seeds
    with replaced():
        for seed in range(first, first + count):
            chance = random.Random(seed)
            scenario, fmt, way = plays[chance.randrange(len(plays))]
            size = _sizes.setdefault((scenario.name, fmt, way), 0) or operations_of(scenario, fmt, way)
            _sizes[scenario.name, fmt, way] = size
            failure = run(scenario, fmt, way, draw(chance, size, scenario.kinds), known_here, counts, share=wanted.share)
            if failure is not None and failure.kind not in seen:
                seen.add(failure.kind)
                found.append((seed, shrunk(failure)))
    return counts, found


class Options:
    """Goes on as ``switches`` say, and notes who else could: ``others``, {number of an operation: how many tasks}."""

    def __init__(self, switches: tuple[tuple[int, int], ...]):
        self.switches, self._listed = switches, Schedule(switches=switches).chooser()
        self.others: dict[int, int] = {}
        self.last = max((at for at, _ in switches), default=0)

    def wants(self, number: int) -> bool:
        return number >= self.last or self._listed.wants(number)

    def choose(self, number: int, current: Task | None, ready: Sequence[Task]) -> Task:
        if current is None or self._listed.wants(number):
            return self._listed.choose(number, current, ready)
        self.others[number] = len(ready) - 1
        return current

    def further(self, every: int) -> list[tuple[tuple[int, int], ...]]:
        """With one more switch, at each ``every``-th operation."""
        return [(*self.switches, (at, further)) for at, others in self.others.items() if not (at - 1) % every
                for further in range(1, others + 1)]


def systematic(scenario: Scenario, fmt: str, way: str = "", switches: int = 2, counts: Counts | None = None,
               every: int = 1, deaths: bool = False, part: tuple[int, int] = (0, 1), known: Known | None = None
               ) -> Iterator[Failure]:
    """Every schedule with at most so many switches, at each ``every``-th operation, to each task that can go on there: what such
    a schedule does before its last switch the one without that switch does, too. ``part`` (i, n): only those whose first switch
    is at the i-th of each n operations, for processes that share the work."""
    known, counts = known or Known(), counts or Counts()
    stack: list[tuple[tuple[int, int], ...]] = [()]
    with replaced():
        while stack:
            chosen = stack.pop()
            options, mine = Options(chosen), bool(chosen) or part[0] == 0
            found = run(scenario, fmt, way, Schedule(switches=chosen), known, counts if mine else Counts(), deaths and mine,
                        options=options)
            if found is not None and mine:
                yield found
            if len(chosen) < switches:
                stack += [more for more in options.further(every)
                          if chosen or (more[-1][0] - 1) // every % part[1] == part[0]]


def replay(failure: Failure) -> list[Finding]:
    """The findings of its schedule, run again from the beginning."""
    play = Play(failure.scenario, failure.format, failure.schedule, failure.way).run()
    return play.findings()


def shrunk(failure: Failure, tries: int = 400) -> Failure:
    """The simplest schedule that was found to break the same promise."""
    kinds = {finding.kind for finding in failure.findings}
    best, left = failure, tries
    while left > 0:
        for schedule in best.schedule.simpler():
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

