"""A schedule: who goes on where, what strikes where, and how the hosts differ. A value that can be drawn, printed and shrunk.

    schedule = draw(random.Random(7), operations=200)
    schedule.to_json();  Schedule.from_json(...)

Without switches the ranks run one after the other, each as far as it gets; ``switches`` says before which operations another one
goes on instead. So a schedule is what is unusual about a run, and leaving parts of it out makes it simpler.
"""
from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mindresume.simulation.scheduler import TICK, Task

_FULL = ("write", "create", "flush", "rename", "make_folder")
_EFFECTS = ("write", "create", "flush", "rename", "sync", "remove", "make_folder", "put", "delete")
OF_A_STORE = ("list objects", "size", "get", "put", "upload", "download", "delete")      # operations on objects
# kind -> (errno, operations that it can hit; (): all)
ERRORS: dict[str, tuple[int, tuple[str, ...]]] = {
    "EIO": (errno.EIO, ()), "ESTALE": (errno.ESTALE, ()), "ENOSPC": (errno.ENOSPC, _FULL), "EDQUOT": (errno.EDQUOT, _FULL),
    "EIO after": (errno.EIO, _EFFECTS), "ESTALE after": (errno.ESTALE, _EFFECTS)}
DEATHS = ("kill", "kill host", "kill all", "power")
SIGNALS = ("slow", "pause", "term", "term all", "clock")
KINDS = (*ERRORS, *DEATHS, *SIGNALS)
EXPLAINED = {
    "EIO": "the operation fails once", "ESTALE": "it fails once, as on NFS after the server forgot a file",
    "ENOSPC": "the disk is full, for this and some later operations",
    "EDQUOT": "the quota is exhausted, for this and some later operations",
    "EIO after": "it takes effect and reports an error all the same",
    "ESTALE after": "it takes effect and reports an error all the same, as on NFS",
    "kill": "the process is killed right before it", "kill host": "all processes of the host are killed",
    "kill all": "all processes are killed", "power": "power fails: nothing that was not flushed is left, or any part of it",
    "slow": "the operation takes so many seconds", "pause": "the process stands still for so many seconds, then goes on",
    "term": "SIGTERM to the process", "term all": "SIGTERM to all processes",
    "clock": "the clock of the host jumps by so many seconds",
    "outage": "no call to the object store succeeds, for this and some later operations",
    "quota": "the quota of this rank is exhausted, for some operations of all: the others can write",
    "quota of the host": "the quota of this host is exhausted, for some operations of all: other hosts can write",
    "memory": "the container of the host may use so many bytes from now on",
    "kill launcher": "the launcher of the job is killed, its ranks are not",
    "unreadable": "one of the objects in the bucket cannot be read any more"}
_PICKS = 24                     # moments at which nobody has to be interrupted, of the first of which some are drawn
_TICKS = (TICK, TICK, TICK, 0.05, 0.25)
OUTAGE = "outage"               # of an object store: no call succeeds
QUOTA, QUOTA_OF_HOST, MEMORY, KILL_LAUNCHER, UNREADABLE = "quota", "quota of the host", "memory", "kill launcher", "unreadable"
_AMOUNTS = {OUTAGE: (3, 30, 300), QUOTA: (20, 200, 2000), QUOTA_OF_HOST: (20, 200, 2000), MEMORY: (0, 100, 1 << 40),
            UNREADABLE: range(1000)}                        # of those that few scenarios have


@dataclass(frozen=True)
class Strike:
    """``at``: number of the operation, counted over all processes from 1. ``amount``: of a slow operation, a pause or a clock the
    seconds, of a full disk, a quota and an outage the operations for which it lasts, of a loss of power what is left (0: only
    what was flushed; else a seed), of memory the bytes, of an unreadable object which one."""
    at: int
    kind: str
    amount: int = 0


@dataclass(frozen=True)
class Schedule:
    """``switches``: (number of the operation, how many tasks further on in the list of those that can go on). ``picks``: the same
    for the moments at which the running task cannot go on, counted from 1. ``lag``: seconds for which hosts believe listings.
    ``clocks``: by host, seconds by which its clock is wrong. ``tick``: seconds that an operation takes: where it is long, those
    who look again after a pause do so in the middle of what others do."""
    seed: int = 0
    switches: tuple[tuple[int, int], ...] = ()
    picks: tuple[tuple[int, int], ...] = ()
    strikes: tuple[Strike, ...] = ()
    lag: float = 0.0
    clocks: tuple[float, ...] = ()
    tick: float = TICK

    def chooser(self) -> _Listed:
        return _Listed(dict(self.switches), dict(self.picks))

    @property
    def size(self) -> int:
        return len(self.switches) + len(self.picks) + len(self.strikes) + bool(self.lag) + bool(self.clocks) + (self.tick != TICK)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Schedule:
        """Reads what ``to_json`` gives; what is not there is as usual. AttributeError, KeyError, TypeError or ValueError if it
        is something else."""
        pairs = {name: tuple((int(at), int(further)) for at, further in value.get(name, ())) for name in ("switches", "picks")}
        strikes = tuple(Strike(int(row["at"]), str(row["kind"]), int(row.get("amount", 0))) for row in value.get("strikes", ()))
        return cls(int(value.get("seed", 0)), **pairs, strikes=strikes, lag=float(value.get("lag", 0.0)),
                   clocks=tuple(map(float, value.get("clocks", ()))), tick=float(value.get("tick", TICK)))

    def simpler(self) -> list[Schedule]:
        """Schedules with less, the largest steps first."""
        found = [replace(self, **{name: ()}) for name in ("switches", "picks", "strikes") if len(getattr(self, name)) > 1]
        for name in ("switches", "picks", "strikes"):
            rows = getattr(self, name)
            if len(rows) > 3:
                half = len(rows) // 2
                found += [replace(self, **{name: rows[:half]}), replace(self, **{name: rows[half:]})]
            found += [replace(self, **{name: rows[:index] + rows[index + 1:]}) for index in range(len(rows))]
        if self.lag:
            found.append(replace(self, lag=0.0))
        if self.clocks:
            found.append(replace(self, clocks=()))
        if self.tick != TICK:
            found.append(replace(self, tick=TICK))
        return found


class _Listed:
    """Who goes on, as a schedule lists it."""
    __slots__ = ("switches", "picks", "picked")

    def __init__(self, switches: dict[int, int], picks: dict[int, int]):
        self.switches, self.picks, self.picked = switches, picks, 0

    def wants(self, number: int) -> bool:
        return number in self.switches

    def choose(self, number: int, current: Task | None, ready: Sequence[Task]) -> Task:
        if current is None:
            self.picked += 1
            return ready[self.picks.get(self.picked, 0) % len(ready)]
        others = [task for task in ready if task is not current]
        return others[(self.switches[number] - 1) % len(others)] if others else current


def draw(chance: random.Random, operations: int, kinds: Sequence[str] = KINDS, lags: Sequence[float] = (0.0, 0.0, 30.0, 60.0),
         hosts: int = 2, most_strikes: int = 3) -> Schedule:
    """A random one for a run of about ``operations``."""
    def moments(count: int, most: int = operations) -> list[int]:
        return sorted(chance.randrange(1, most + 1) for _ in range(count))
    few = chance.random() < 0.5
    switches = tuple((at, chance.randrange(1, 4)) for at in sorted(set(moments(chance.randrange(5 if few else operations // 4)))))
    picks = tuple((at, chance.randrange(1, 4)) for at in sorted(set(moments(chance.randrange(4), _PICKS))))
    count = chance.choice((0, 1, 1, 1, 2, 2, most_strikes))
    strikes = []
    for at in sorted(set(moments(count))):
        kind = chance.choice(kinds)
        amount = {"pause": chance.choice((1, 20, 100, 1000)), "slow": chance.choice((1, 20, 100, 1000)),
                  "clock": chance.choice((-3600, 3600, 10**7)),
                  "power": chance.choice((0, 0, chance.randrange(1, 10**6))),
                  "ENOSPC": chance.choice((0, 20, 200)), "EDQUOT": chance.choice((0, 20, 200))}.get(kind, 0)
        if kind in _AMOUNTS:
            amount = chance.choice(_AMOUNTS[kind])
        strikes.append(Strike(at, kind, amount))
    clocks = tuple(chance.choice((0.0, 0.0, -7200.0, 86400.0)) for _ in range(hosts)) if chance.random() < 0.3 else ()
    if chance.random() < 0.5:                               # somebody else goes on before the struck one can react
        switches = tuple(sorted({**{strike.at + 1: chance.randrange(1, 4) for strike in strikes}, **dict(switches)}.items()))
    seed, lag, tick = chance.randrange(1 << 30), chance.choice(lags), chance.choice(_TICKS)
    return Schedule(seed, switches, picks, tuple(strikes), lag, clocks, tick)
