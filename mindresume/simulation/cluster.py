"""Hosts, processes, signals and clocks of a simulated cluster."""
from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindresume.events import Event
from mindresume.simulation.disk import Disk, File, Folder
from mindresume.simulation.schedule import (
    ERRORS,
    KILL_LAUNCHER,
    MEMORY,
    OF_A_STORE,
    OUTAGE,
    QUOTA,
    QUOTA_OF_HOST,
    UNREADABLE,
    Schedule,
    Strike,
)
from mindresume.simulation.scheduler import Killed, Scheduler, Task

SHARED = "shared"
EPOCH = 1_700_000_000.0         # seconds since 1970 at which every schedule begins


class Host:
    """``disk``: that it has mounted. ``offset``: seconds by which its clock is wrong. ``lag``: seconds for which it
    believes a listing of a shared disk, and that a name is absent which it has looked for (the negative entries of NFS)."""

    def __init__(self, cluster: Cluster, name: str, disk: Disk, offset: float = 0.0):
        self.cluster, self.name, self.disk, self.offset = cluster, name, disk, offset
        self.memory = 1 << 40                           # bytes that its container may use
        self.operations = 0                             # of its processes, until now
        self._listed: dict[str, tuple[float, list[str]]] = {}
        self._absent: dict[str, float] = {}             # names that were looked for and not there, and when

    def names(self, disk: Disk, folder: str) -> list[str]:
        """As this host lists ``folder``."""
        now, lag = self.cluster.scheduler.now, 0 if disk.local else self.cluster.lag
        if lag:
            known = self._listed.get(folder)
            if known is not None and now - known[0] < lag:
                return known[1]
        node = disk.find(folder)
        names = sorted(node.entries) if isinstance(node, Folder) else []
        if lag:
            self._listed[folder] = (now, names)
            for name in names if self._absent else ():
                self._absent.pop(f"{folder}/{name}", None)
        return names

    def look(self, disk: Disk, path: str) -> File | Folder | None:
        """What this host finds under ``path``. A name that it has looked for while it was not there it believes to be absent for
        a while; one that is new to it is looked up by the server, whatever it has listed."""
        if not self.cluster.lag or disk.local:
            return disk.find(path)
        now, part = self.cluster.scheduler.now, ""
        node: File | Folder | None = disk.root
        for name in filter(None, path.split("/")):
            part = f"{part}/{name}"
            node = node.entries.get(name) if isinstance(node, Folder) else None
            since = self._absent.get(part)
            if since is not None and now - since < self.cluster.lag:
                return None
            if node is None:
                self._absent[part] = now
                return None
            self._absent.pop(part, None)
        return node

    def changes(self, disk: Disk, path: str) -> None:
        """This host changes a name itself: it looks anew."""
        self._listed.pop(os.path.dirname(path), None)
        self._listed.pop(path, None)
        self._absent.pop(path, None)

    def moves(self, disk: Disk, old: str, new: str) -> None:
        """This host renames. What it remembers of ``new`` and below is of what was there before; of ``old``, of what has gone."""
        for path in (old, new):
            self.changes(disk, path)
            self._listed = {name: row for name, row in self._listed.items() if not name.startswith(f"{path}/")}
            self._absent = {name: since for name, since in self._absent.items() if not name.startswith(f"{path}/")}


class Process:
    """``exit``: its status; None while it runs."""

    def __init__(self, cluster: Cluster, host: Host, name: str, pid: int):
        self.cluster, self.host, self.name, self.pid = cluster, host, name, pid
        self.dead = False
        self.paused_until = 0.0
        self.exit: int | None = None
        self.error: BaseException | None = None
        self.on_term: Callable[[], None] | None = None
        self.at_exit: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.main: Task | None = None
        self.events: list[tuple[float, Event]] = []     # with the simulated time in seconds
        self.tokens = 0                                 # that were drawn by it
        self.own: Any = None                            # whatever the program of the process keeps
        self.when_dead: list[Callable[[Process], None]] = []

    def emit(self, event: Event) -> None:
        """Records ``event`` with the time of now."""
        self.events.append((self.cluster.scheduler.now, event))

    def __repr__(self) -> str:
        return self.name


@dataclass
class Struck:
    """A strike that happened: at which operation of which process."""
    strike: Strike
    number: int
    process: str
    name: str
    path: str


@dataclass
class Trace:
    """``rows``: (number, process, operation, path) of every operation, if wanted."""
    wanted: bool = False
    rows: list[tuple[int, str, str, str]] = field(default_factory=list)


class Cluster:
    """``disks``: {"shared": ...}, or of hosts that share none {"node0": ..., "node1": ...}. ``observe(process, name, path)`` is
    called before every operation: it may copy the disks."""

    def __init__(self, schedule: Schedule, disks: Mapping[str, Disk] | None = None, most: int = 20_000):
        self.schedule = schedule
        self.scheduler = Scheduler(schedule.chooser(), most, schedule.tick)
        self.disks = dict(disks) if disks is not None else {SHARED: Disk()}
        self.hosts: list[Host] = []
        self.processes: list[Process] = []
        self.lag = schedule.lag
        self.random = random.Random(schedule.seed)
        self.trace = Trace()
        self.at = 0                                     # the operation that happens now; others with higher numbers may be over
        self.struck: list[Struck] = []
        self.one_machine = False                        # every host can tell of every process whether it lives
        self.observe: Callable[[Process, str, str], None] | None = None
        self.at_end: list[Callable[[], None]] = []      # what is to be given back when nobody runs any more
        self.on_rename: Callable[[Process, str, str], None] | None = None
        self._pids = 100
        self._tokens = 0
        self._strikes = {strike.at: strike for strike in schedule.strikes}
        self._full_until = self._out_until = 0
        self._quotas: dict[str, int] = {}               # of a rank or a host, by name: exhausted until this operation
        self.scheduler.ended.append(self._ended)

    # ---- hosts and processes ---------------------------------------------------------------------------------------

    def host(self, name: str = "", node: int = 0) -> Host:
        """``node``: whose disk it has, where hosts share none."""
        number = len(self.hosts)
        offset = self.schedule.clocks[number % len(self.schedule.clocks)] if self.schedule.clocks else 0.0
        made = Host(self, name or f"host{number}", self.disks.get(SHARED) or self.disks[f"node{node}"], offset)
        self.hosts.append(made)
        return made

    def process(self, host: Host, name: str, work: Callable[[], Any]) -> Process:
        self._pids += 1
        made = Process(self, host, name, self._pids)
        self.processes.append(made)
        made.main = self.scheduler.start(made, work, name)
        return made

    def _ended(self, task: Task) -> None:
        """The main task of a process has ended: what it registered for its end runs, then its threads are gone."""
        process = task.process
        if process.dead:
            return                                      # it was killed, and is not to have ended by itself
        if task is not process.main:
            if task.error is not None and not isinstance(task.error, (Killed, Exception)):
                process.error = task.error
            return
        if process.dead:                                # killed: how it ended is known
            return
        if task.error is not None:
            process.error = process.error or task.error
        if process.at_exit:
            function, values, named = process.at_exit.pop()
            process.main = self.scheduler.start(process, lambda: function(*values, **named), f"{process.name} at exit")
            return
        process.exit = 1 if process.error is not None else 0
        self._gone(process)

    def _gone(self, process: Process) -> None:
        process.dead = True
        for tell in process.when_dead:
            tell(process)

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if not process.dead:
            process.exit = -9
            self._gone(process)

    def terminate(self, process: Process) -> None:
        """SIGTERM: the handler notes it; without one the process is gone."""
        if process.dead:
            return
        if process.on_term is not None:
            process.on_term()
        else:
            process.exit = -15
            self._gone(process)

    # ---- one operation ---------------------------------------------------------------------------------------------

    def operate(self, process: Process, name: str, path: str, also: str = "") -> tuple[int, bool]:
        """Counts an operation of ``process``; others may go on before it. Returns (errno of an error that it is to report, 0:
        none; whether it takes effect all the same). Killed if it strikes the process dead."""
        number = self.at = self.scheduler.operation()
        process.host.operations += 1
        if process.dead:
            raise Killed
        if self.trace.wanted:
            self.trace.rows.append((number, process.name, name, f"{also} -> {path}" if also else path))
        if self.observe is not None:
            self.observe(process, name, path)
        strike = self._strikes.get(number)
        if strike is None or strike.kind in ERRORS:         # anything else strikes also where nothing succeeds
            if self._full_until >= number and name in ERRORS["ENOSPC"][1]:
                return errno.ENOSPC, False
            if self._out_until >= number and name in OF_A_STORE:
                return errno.ENETUNREACH, False
            if self._quotas and name in ERRORS["EDQUOT"][1] and any(
                    self._quotas.get(whose, 0) >= number for whose in (_rank(process), process.host.name)):
                return errno.EDQUOT, False
        if strike is None:
            return 0, False
        return self._strike(strike, number, process, name, path)

    def _strike(self, strike: Strike, number: int, process: Process, name: str, path: str) -> tuple[int, bool]:
        kind = strike.kind
        if kind in ERRORS:
            code, hits = ERRORS[kind]
            if hits and name not in hits:
                return 0, False
            self.struck.append(Struck(strike, number, process.name, name, path))
            if kind in ("ENOSPC", "EDQUOT"):
                self._full_until = number + strike.amount
            return code, kind.endswith("after")
        self.struck.append(Struck(strike, number, process.name, name, path))
        if kind == "kill":
            self.kill(process)
        elif kind == "kill host":
            for other in self.processes:
                if other.host is process.host:
                    self.kill(other)
        elif kind in ("kill all", "power"):
            for other in self.processes:
                self.kill(other)
            if kind == "power":
                lose_power(self.disks, strike.amount)
        elif kind == "slow":
            self.scheduler.block(strike.amount, "waits for the disk")
        elif kind == "pause":
            process.paused_until = self.scheduler.now + strike.amount
            self.scheduler.block(0.0)
        elif kind == "term":
            self.terminate(process)
        elif kind == "term all":
            for other in self.processes:
                self.terminate(other)
        elif kind == OUTAGE:
            self._out_until = number + strike.amount
        elif kind == "clock":
            process.host.offset += strike.amount
        elif kind in (QUOTA, QUOTA_OF_HOST):
            self._quotas[_rank(process) if kind == QUOTA else process.host.name] = number + strike.amount
        elif kind == MEMORY:
            process.host.memory = strike.amount
        elif kind == KILL_LAUNCHER:
            for other in self.processes:
                if other.name == f"{process.name.partition('.')[0]}.launcher":
                    self.kill(other)
        elif kind == UNREADABLE:
            for disk in self.disks.values():
                disk.spoil(strike.amount)
        if process.dead:
            raise Killed
        return 0, False

    def renamed(self, process: Process, old: str, new: str) -> None:
        if self.on_rename is not None:
            self.on_rename(process, old, new)

    # ---- time and names --------------------------------------------------------------------------------------------

    def server_time(self) -> float:
        return EPOCH + self.scheduler.now

    def token(self, count: int) -> str:
        """A name that no other is equal to; the same for the same history of the process, whatever others do meanwhile: disks
        that differ in the order of what was done alone are equal."""
        process, number = self.running, self._tokens
        if process is not None:
            process.tokens += 1
            number += process.tokens + (process.pid << 20)
        else:
            self._tokens += 1
        return f"{number * 2654435761 % (1 << 8 * count):0{2 * count}x}"

    @property
    def running(self) -> Process | None:
        task = self.scheduler.current
        return task.process if task is not None else None


def _rank(process: Process) -> str:
    """Its name; of a writer that of the rank for which it writes."""
    return process.name.removesuffix(".writer")


def lose_power(disks: Mapping[str, Disk], seed: int) -> None:
    """0: nothing that was not flushed is left; else any part of it, of content perhaps with zeros for the rest of it."""
    chance = random.Random(seed)

    def torn(data: bytes) -> bytes:
        left = data[:chance.randrange(len(data) + 1)]
        return left + bytes(len(data) - len(left)) if chance.random() < 0.5 else left
    for disk in disks.values():
        if seed:
            disk.lose_power(lambda: chance.random() < 0.5, torn)
        else:
            disk.lose_power(lambda: False)
