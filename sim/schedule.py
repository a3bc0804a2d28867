"""A schedule: which task continues at which operation, which faults are injected, and how the hosts
differ. A value.

    schedule = random_schedule(random.Random(7), operations=200)
    schedule.to_json();  Schedule.from_json(...)

Without switches the ranks run one after the other, each until it blocks; a switch says before which
operation another task continues instead. So a schedule holds only the exceptions of a run, and
leaving out parts of it makes it simpler.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mindresume.fault_injection import faults
from mindresume.fault_injection.faults import Fault
from sim.scheduler import TICK, Task

# operations on an object store
OF_A_STORE = ("list objects", "size", "get", "put", "upload", "download", "delete")
# kind -> (errno, operations that it can hit; (): all)
ERRORS = {**faults.ERRORS, "ESTALE after": (errno.ESTALE, faults.ERRORS["EIO after"][1])}
DEATHS = ("kill", "kill host", "kill all", "power")
SIGNALS = ("slow", "pause", "term", "term all", "clock")
KINDS = (*ERRORS, *DEATHS, *SIGNALS)
EXPLAINED = {
    **{kind: faults.EXPLAINED[kind] for kind in ("EIO", "ESTALE", "EIO after")},
    "ENOSPC": "the disk is full, for this and some later operations",
    "EDQUOT": "the quota is exhausted, for this and some later operations",
    "ESTALE after": "the operation takes effect and reports an error nevertheless, as on NFS",
    "kill": "the process is killed right before the operation",
    "kill host": "all processes of the host are killed",
    "kill all": "all processes are killed",
    "power": "power loss: unflushed data is lost, entirely or in part",
    "slow": "the operation takes AMOUNT seconds",
    "pause": "the process is suspended for AMOUNT seconds",
    "term": "SIGTERM to the process",
    "term all": "SIGTERM to all processes",
    "clock": "the clock of the host jumps by AMOUNT seconds",
    "outage": "every call to the object store fails, for this and some later operations",
    "quota": "the quota of this rank is exhausted for some operations; others can write",
    "quota of the host": "the quota of this host is exhausted for some operations; others can "
    "write",
    "memory": "the memory limit of the host becomes AMOUNT bytes",
    "kill launcher": "the launcher of the job is killed, but not its ranks",
    "unreadable": "one object in the bucket becomes unreadable",
    "rot": "one bit of a file of a checkpoint flips on a disk or in a bucket; no size and no time "
    "changes",
    "rot in memory": "one bit of a file of a save in memory of the host flips",
    "cut": "the connection on which the next bytes are sent breaks",
    "garbled": "one bit of the next bytes that are sent to another node flips",
    "own signal": "the process sends SIGTERM to itself, as MindSpore does after a failure; AMOUNT "
    "1: its training never goes on",
    "unreadable file": "the file that is opened next cannot be read, by anybody, for some "
    "operations (EIO); then it can",
    "unreadable disk": "the host can read nothing on its disk for some operations (ESTALE); then "
    "it can",
}
_PICKS = 24  # picks are drawn for the first moments at which a task blocks
_TICKS = (TICK, TICK, TICK, 0.05, 0.25)
OUTAGE = "outage"  # every call to the object store fails
QUOTA = "quota"
QUOTA_OF_HOST = "quota of the host"
MEMORY = "memory"
KILL_LAUNCHER = "kill launcher"
UNREADABLE = "unreadable"
ROT, ROT_IN_MEMORY = SILENT = "rot", "rot in memory"
# errors of reading that pass
UNREADABLE_FILE, UNREADABLE_DISK = PASSING = "unreadable file", "unreadable disk"
OWN_SIGNAL = "own signal"  # SIGTERM from itself
# of the network between nodes; a delay is "slow"
CUT, GARBLED = OF_A_NETWORK = "cut", "garbled"
_AMOUNTS = {
    OUTAGE: (3, 30, 300),
    QUOTA: (20, 200, 2000),
    QUOTA_OF_HOST: (20, 200, 2000),
    MEMORY: (0, 100, 1 << 40),
    UNREADABLE: range(1000),
    ROT: range(1000),
    ROT_IN_MEMORY: range(1000),
    UNREADABLE_FILE: (10, 100, 1000),
    UNREADABLE_DISK: (10, 50, 200),
    OWN_SIGNAL: (0, 1),
    GARBLED: range(1000),
}  # of the faults of few scenarios


@dataclass(frozen=True)
class Schedule:
    """All choices of a run.

    Args:
        switches: (number of the operation, offset of the next task in the list of those that are
            ready).
        picks: the same for the moments at which the running task blocks, counted from 1.
        faults: by operation. ``amount``: seconds of a slow operation, a pause or a clock jump;
            operations for which a full disk, quota or outage lasts, or something cannot be read;
            what is left by a power loss (0: flushed data only; else a seed); bytes of memory; the
            number of an unreadable object; the seed that draws the bit that rots.
        lag: seconds for which hosts cache listings.
        clocks: by host, seconds by which its clock is wrong.
        tick: seconds that an operation takes. Where it is long, processes that poll do so in the
            middle of what others do.
    """

    seed: int = 0
    switches: tuple[tuple[int, int], ...] = ()
    picks: tuple[tuple[int, int], ...] = ()
    faults: tuple[Fault, ...] = ()
    lag: float = 0.0
    clocks: tuple[float, ...] = ()
    tick: float = TICK

    def chooser(self) -> _ScriptedChooser:
        return _ScriptedChooser(dict(self.switches), dict(self.picks))

    @property
    def size(self) -> int:
        return (
            len(self.switches)
            + len(self.picks)
            + len(self.faults)
            + bool(self.lag)
            + bool(self.clocks)
            + (self.tick != TICK)
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Schedule:
        """Reads what ``to_json`` returns; missing keys have their defaults. Raises AttributeError,
        KeyError, TypeError or ValueError for anything else, a key of another name included: without
        it another schedule would run."""
        unknown = sorted(set(value) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(
                f"a schedule has no {unknown[0]!r}; it has "
                f"{', '.join(field.name for field in fields(cls))}"
            )
        pairs = {
            name: tuple((int(at), int(further)) for at, further in value.get(name, ()))
            for name in ("switches", "picks")
        }
        struck = tuple(
            Fault(int(row["at"]), str(row["kind"]), int(row.get("amount", 0)))
            for row in value.get("faults", ())
        )
        return cls(
            int(value.get("seed", 0)),
            **pairs,
            faults=struck,
            lag=float(value.get("lag", 0.0)),
            clocks=tuple(map(float, value.get("clocks", ()))),
            tick=float(value.get("tick", TICK)),
        )

    def shrink_candidates(self) -> list[Schedule]:
        """Returns simpler schedules, the largest reductions first."""
        found = [
            replace(self, **{name: ()})
            for name in ("switches", "picks", "faults")
            if len(getattr(self, name)) > 1
        ]
        for name in ("switches", "picks", "faults"):
            rows = getattr(self, name)
            if len(rows) > 3:
                half = len(rows) // 2
                found += [
                    replace(self, **{name: rows[:half]}),
                    replace(self, **{name: rows[half:]}),
                ]
            found += [
                replace(self, **{name: rows[:index] + rows[index + 1 :]})
                for index in range(len(rows))
            ]
        if self.lag:
            found.append(replace(self, lag=0.0))
        if self.clocks:
            found.append(replace(self, clocks=()))
        if self.tick != TICK:
            found.append(replace(self, tick=TICK))
        return found


class _ScriptedChooser:
    """Chooses the tasks that a schedule lists."""

    __slots__ = ("switches", "picks", "picked")

    def __init__(self, switches: dict[int, int], picks: dict[int, int]):
        self.switches = switches
        self.picks = picks
        self.picked = 0

    def may_switch(self, number: int) -> bool:
        return number in self.switches

    def choose(self, number: int, current: Task | None, ready: Sequence[Task]) -> Task:
        if current is None:
            self.picked += 1
            return ready[self.picks.get(self.picked, 0) % len(ready)]
        others = [task for task in ready if task is not current]
        return others[(self.switches[number] - 1) % len(others)] if others else current


def random_schedule(
    rng: random.Random,
    operations: int,
    kinds: Sequence[str] = KINDS,
    lags: Sequence[float] = (0.0, 0.0, 30.0, 60.0),
    hosts: int = 2,
    max_faults: int = 3,
) -> Schedule:
    """Draws a schedule for a run of about ``operations``."""

    def moments(count: int, most: int = operations) -> list[int]:
        return sorted(rng.randrange(1, most + 1) for _ in range(count))

    few = rng.random() < 0.5
    switches = tuple(
        (at, rng.randrange(1, 4))
        for at in sorted(set(moments(rng.randrange(5 if few else operations // 4))))
    )
    picks = tuple(
        (at, rng.randrange(1, 4)) for at in sorted(set(moments(rng.randrange(4), _PICKS)))
    )
    count = rng.choice((0, 1, 1, 1, 2, 2, max_faults))
    struck = []
    for at in sorted(set(moments(count))):
        kind = rng.choice(kinds)
        amount = {
            "pause": rng.choice((1, 20, 100, 1000)),
            "slow": rng.choice((1, 20, 100, 1000)),
            "clock": rng.choice((-3600, 3600, 10**7)),
            "power": rng.choice((0, 0, rng.randrange(1, 10**6))),
            "ENOSPC": rng.choice((0, 20, 200)),
            "EDQUOT": rng.choice((0, 20, 200)),
        }.get(kind, 0)
        if kind in _AMOUNTS:
            amount = rng.choice(_AMOUNTS[kind])
        struck.append(Fault(at, kind, amount))
    clocks = (
        tuple(rng.choice((0.0, 0.0, -7200.0, 86400.0)) for _ in range(hosts))
        if rng.random() < 0.3
        else ()
    )
    # another task continues before the affected one can react
    if rng.random() < 0.5:
        switches = tuple(
            sorted(
                {
                    **{fault.at + 1: rng.randrange(1, 4) for fault in struck},
                    **dict(switches),
                }.items()
            )
        )
    seed = rng.randrange(1 << 30)
    lag = rng.choice(lags)
    tick = rng.choice(_TICKS)
    return Schedule(seed, switches, picks, tuple(struck), lag, clocks, tick)
