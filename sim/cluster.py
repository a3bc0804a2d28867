"""Hosts, processes, signals and clocks of a simulated cluster."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindresume.events import Event
from mindresume.fault_injection.faults import READS, Fault, Killed
from sim.bit_rot import Rot, rot
from sim.disk import Disk, File, Folder
from sim.schedule import (
    ERRORS,
    KILL_LAUNCHER,
    MEMORY,
    OF_A_NETWORK,
    OF_A_STORE,
    OUTAGE,
    OWN_SIGNAL,
    QUOTA,
    QUOTA_OF_HOST,
    ROT,
    ROT_IN_MEMORY,
    UNREADABLE,
    UNREADABLE_DISK,
    UNREADABLE_FILE,
    Schedule,
)
from sim.scheduler import Scheduler, Task

SHARED = "shared"
SHM = "/dev/shm/"  # paths below it lie in memory of the host
EPOCH = 1_700_000_000.0  # start of every schedule, in seconds since 1970


class Host:
    """A machine of the cluster.

    Args:
        disk: the disk that it has mounted.
        offset: seconds by which its clock is wrong.

    The NFS client of the host caches listings of a shared disk, and names that it did not find
    (negative entries), for ``cluster.lag`` seconds.
    """

    def __init__(self, cluster: Cluster, name: str, disk: Disk, offset: float = 0.0):
        self.cluster = cluster
        self.name = name
        self.disk = disk
        self.offset = offset
        self.memory = 1 << 40  # memory limit of its container in bytes
        self.shm = Disk(local=True)  # files in its memory
        self.operations = 0  # number of operations of its processes
        # nobody can find out whether a process of others runs
        self.hides_processes = False
        self._listing_cache: dict[str, tuple[float, list[str]]] = {}
        self._negative_cache: dict[str, float] = {}  # name -> when a lookup did not find it

    def disk_of(self, path: str) -> Disk:
        """Returns what ``path`` lies on: the disk, or memory of this host."""
        return self.shm if path.startswith(SHM) else self.disk

    def names(self, disk: Disk, folder: str) -> list[str]:
        """Returns the names in ``folder`` as this host lists it: from its cache while that is
        valid."""
        now, lag = self.cluster.scheduler.now, 0 if disk.local else self.cluster.lag
        if lag:
            known = self._listing_cache.get(folder)
            if known is not None and now - known[0] < lag:
                return known[1]
        node = disk.find(folder)
        names = sorted(node.entries) if isinstance(node, Folder) else []
        if lag:
            self._listing_cache[folder] = (now, names)
            for name in names if self._negative_cache else ():
                self._negative_cache.pop(f"{folder}/{name}", None)
        return names

    def look(self, disk: Disk, path: str) -> File | Folder | None:
        """Returns what this host finds under ``path``, or None. A name that it did not find stays
        absent for ``lag`` seconds; a name that it has not looked up yet is asked of the server,
        whatever a cached listing says."""
        if not self.cluster.lag or disk.local:
            return disk.find(path)
        now, part = self.cluster.scheduler.now, ""
        node: File | Folder | None = disk.root
        for name in filter(None, path.split("/")):
            part = f"{part}/{name}"
            node = node.entries.get(name) if isinstance(node, Folder) else None
            since = self._negative_cache.get(part)
            if since is not None and now - since < self.cluster.lag:
                return None
            if node is None:
                self._negative_cache[part] = now
                return None
            self._negative_cache.pop(part, None)
        return node

    def changes(self, disk: Disk, path: str) -> None:
        """Drops the cached state of ``path``: this host changes it itself."""
        self._listing_cache.pop(os.path.dirname(path), None)
        self._listing_cache.pop(path, None)
        self._negative_cache.pop(path, None)

    def moves(self, disk: Disk, old: str, new: str) -> None:
        """Drops the cached state of ``old``, ``new`` and everything below: this host renames one to
        the other."""
        for path in (old, new):
            self.changes(disk, path)
            self._listing_cache = {
                name: row
                for name, row in self._listing_cache.items()
                if not name.startswith(f"{path}/")
            }
            self._negative_cache = {
                name: since
                for name, since in self._negative_cache.items()
                if not name.startswith(f"{path}/")
            }


class Process:
    """A simulated process. ``exit``: its exit status; None while it runs. ``own``: data of the
    program that it runs."""

    def __init__(self, cluster: Cluster, host: Host, name: str, pid: int):
        self.cluster = cluster
        self.host = host
        self.name = name
        self.pid = pid
        self.dead = False
        self.paused_until = 0.0
        self.exit: int | None = None
        self.error: BaseException | None = None
        self.sigterm_handler: Callable[[], None] | None = None
        # of each SIGTERM that it got, whether it came from this process
        self.own_signals: list[bool] = []
        # what a thread does that learns of each
        self.on_signal: Callable[[], object] | None = None
        # its main thread waits for ever in the next step of the training
        self.hangs = False
        self.at_exit: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.main: Task | None = None
        self.events: list[tuple[float, Event]] = []  # (simulated time in seconds, event)
        self.tokens = 0  # number of tokens that it has drawn
        self.own: Any = None  # data of the program
        self.on_death: list[Callable[[Process], None]] = []

    def emit(self, event: Event) -> None:
        """Records ``event`` with the current simulated time."""
        self.events.append((self.cluster.scheduler.now, event))

    @property
    def ending(self) -> str:
        return f"{self.name} ended with {self.exit}: {type(self.error).__name__}: {self.error}"

    def __repr__(self) -> str:
        return self.name


@dataclass
class InjectedFault:
    """A fault that was injected, and the operation at which it was."""

    fault: Fault
    number: int
    process: str
    name: str
    path: str


@dataclass
class Trace:
    """The operations of a run. ``wanted``: record them. ``rows``: (number, process, operation,
    path)."""

    wanted: bool = False
    rows: list[tuple[int, str, str, str]] = field(default_factory=list)


class Cluster:
    """Hosts and processes on shared or node-local disks, under one schedule.

    Args:
        disks: {"shared": disk}, or {"node0": disk, "node1": disk} for hosts that share none.
        most: the largest number of operations; ``scheduler.OperationLimit`` after it.

    ``observe(process, name, path)`` is called before every operation; it may copy the disks.
    """

    def __init__(
        self, schedule: Schedule, disks: Mapping[str, Disk] | None = None, most: int = 20_000
    ):
        self.schedule = schedule
        self.scheduler = Scheduler(schedule.chooser(), most, schedule.tick)
        self.disks = dict(disks) if disks is not None else {SHARED: Disk()}
        self.hosts: list[Host] = []
        self.processes: list[Process] = []
        self.lag = schedule.lag
        self.random = random.Random(schedule.seed)
        self.trace = Trace()
        # number of the current operation; higher ones may have ended before it
        self.at = 0
        self.injected: list[InjectedFault] = []
        self.rots: list[Rot] = []  # what has rotted, in this order
        # every host can see whether any process is alive
        self.shared_pid_namespace = False
        self.observe: Callable[[Process, str, str], None] | None = None
        self.cleanups: list[Callable[[], None]] = []  # called when no process runs any more
        self.on_rename: Callable[[Process, str, str], None] | None = None
        self._pids = 100
        self._tokens = 0
        self._faults = {fault.at: fault for fault in schedule.faults}
        self._full_until = self._out_until = 0
        # name of a rank or a host -> its quota is exhausted until this operation
        self._quotas: dict[str, int] = {}
        # path, "" for the file that is opened next, or name of a host -> the same
        self._unreadable: dict[str, int] = {}
        # what strikes the next bytes that are sent
        self.on_network: list[Fault] = []
        self.scheduler.ended.append(self._on_task_end)

    # ---- hosts and processes ---------------------------------------------------------------------

    def host(self, name: str = "", node: int = 0) -> Host:
        """Adds a host. ``node``: the number of its disk, for hosts that share none."""
        number = len(self.hosts)
        offset = (
            self.schedule.clocks[number % len(self.schedule.clocks)]
            if self.schedule.clocks
            else 0.0
        )
        made = Host(
            self,
            name or f"host{number}",
            self.disks.get(SHARED) or self.disks[f"node{node}"],
            offset,
        )
        self.hosts.append(made)
        return made

    def process(self, host: Host, name: str, work: Callable[[], Any]) -> Process:
        """Starts a process on ``host`` that runs ``work``."""
        self._pids += 1
        made = Process(self, host, name, self._pids)
        self.processes.append(made)
        made.main = self.scheduler.start(made, work, name)
        return made

    def _on_task_end(self, task: Task) -> None:
        """Ends the process of a main task that has ended: its atexit functions run first, then all
        its threads are gone."""
        process = task.process
        if process.dead:
            return  # killed: its atexit functions do not run
        if task is not process.main:
            if task.error is not None and not isinstance(task.error, (Killed, Exception)):
                process.error = task.error
            return
        if process.dead:  # killed: its exit status is set
            return
        if task.error is not None:
            process.error = process.error or task.error
        if process.at_exit:
            function, values, named = process.at_exit.pop()
            process.main = self.scheduler.start(
                process, lambda: function(*values, **named), f"{process.name} at exit"
            )
            return
        process.exit = 1 if process.error is not None else 0
        self._mark_dead(process)

    def _mark_dead(self, process: Process) -> None:
        process.dead = True
        for tell in process.on_death:
            tell(process)

    def kill(self, process: Process, status: int = -9) -> None:
        """Ends ``process`` at once, by SIGKILL."""
        if not process.dead:
            process.exit = status
            self._mark_dead(process)

    def terminate(self, process: Process, own: bool = False) -> None:
        """Sends SIGTERM to ``process``: runs its handler, or ends it if it has none. ``own``: the
        process sends it."""
        if process.dead:
            return
        process.own_signals.append(own)
        if process.sigterm_handler is not None:
            process.sigterm_handler()
            if process.on_signal is not None:
                self.scheduler.start(process, process.on_signal, f"{process.name}/signals")
        else:
            process.exit = -15
            self._mark_dead(process)

    # ---- one operation ---------------------------------------------------------------------------

    def operate(self, process: Process, name: str, path: str, also: str = "") -> tuple[int, bool]:
        """Counts one operation of ``process``, before which other tasks may run, and injects the
        fault that the schedule has there. Returns (errno that the operation must report, 0 for
        none; whether it takes effect all the same). Raises Killed if the fault kills the
        process."""
        number = self.at = self.scheduler.operation()
        process.host.operations += 1
        if process.dead:
            raise Killed
        if self.trace.wanted:
            self.trace.rows.append(
                (number, process.name, name, f"{also} -> {path}" if also else path)
            )
        if self.observe is not None:
            self.observe(process, name, path)
        fault = self._faults.get(number)
        # other faults are injected even if the operation fails anyway
        if fault is None or fault.kind in ERRORS:
            if self._full_until >= number and name in ERRORS["ENOSPC"][1]:
                return errno.ENOSPC, False
            if self._out_until >= number and name in OF_A_STORE:
                return errno.ENETUNREACH, False
            if (
                self._quotas
                and name in ERRORS["EDQUOT"][1]
                and any(
                    self._quotas.get(whose, 0) >= number
                    for whose in (_rank_name(process), process.host.name)
                )
            ):
                return errno.EDQUOT, False
        if fault is not None:
            code, after = self._inject(fault, number, process, name, path)
            if code:
                return code, after
        return errno.ESTALE if name in READS and self._unreadable.get(
            process.host.name, 0
        ) >= number else 0, False

    def is_unreadable(self, path: str) -> bool:
        """Returns whether the file at ``path``, which was opened right now, cannot be read."""
        if "" in self._unreadable:
            self._unreadable[path] = self._unreadable.pop("")
        return self._unreadable.get(path, 0) >= self.at

    def _inject(
        self, fault: Fault, number: int, process: Process, name: str, path: str
    ) -> tuple[int, bool]:
        kind = fault.kind
        if kind in ERRORS:
            code, hits = ERRORS[kind]
            if hits and name not in hits:
                return 0, False
            self.injected.append(InjectedFault(fault, number, process.name, name, path))
            if kind in ("ENOSPC", "EDQUOT"):
                self._full_until = number + fault.amount
            return code, kind.endswith("after")
        self.injected.append(InjectedFault(fault, number, process.name, name, path))
        if kind == "kill":
            self.kill(process)
        elif kind == "kill host":
            for other in self.processes:
                if other.host is process.host:
                    self.kill(other)
            process.host.shm = Disk(local=True)
        elif kind in ("kill all", "power"):
            for other in self.processes:
                self.kill(other)
            if kind == "power":
                lose_power(self.disks, fault.amount)
                for host in self.hosts:
                    host.shm = Disk(local=True)
        elif kind == "slow":
            self.scheduler.block(fault.amount, "waits for the disk")
        elif kind == "pause":
            process.paused_until = self.scheduler.now + fault.amount
            self.scheduler.block(0.0)
        elif kind == "term":
            self.terminate(process)
        elif kind == OWN_SIGNAL:
            process.hangs = bool(fault.amount)
            self.terminate(process, own=True)
        elif kind == "term all":
            for other in self.processes:
                self.terminate(other)
        elif kind == OUTAGE:
            self._out_until = number + fault.amount
        elif kind == "clock":
            process.host.offset += fault.amount
        elif kind in (QUOTA, QUOTA_OF_HOST):
            self._quotas[_rank_name(process) if kind == QUOTA else process.host.name] = (
                number + fault.amount
            )
        elif kind == MEMORY:
            process.host.memory = fault.amount
        elif kind in (UNREADABLE_FILE, UNREADABLE_DISK):
            self._unreadable["" if kind == UNREADABLE_FILE else process.host.name] = (
                number + fault.amount
            )
        elif kind == KILL_LAUNCHER:
            for other in self.processes:
                if other.name == f"{process.name.partition('.')[0]}.launcher":
                    self.kill(other)
        elif kind == UNREADABLE:
            for disk in self.disks.values():
                disk.make_unreadable(fault.amount)
        elif kind in OF_A_NETWORK:
            self.on_network.append(fault)
        elif kind == ROT:
            self.rots += rot(list(self.disks.values()), fault.amount)
        elif kind == ROT_IN_MEMORY:
            self.rots += rot([process.host.shm], fault.amount)
        if process.dead:
            raise Killed
        return 0, False

    def renamed(self, process: Process, old: str, new: str) -> None:
        if self.on_rename is not None:
            self.on_rename(process, old, new)

    # ---- time and names --------------------------------------------------------------------------

    def server_time(self) -> float:
        """Returns the seconds since 1970 by the clock of the file server."""
        return EPOCH + self.scheduler.now

    def token(self, count: int) -> str:
        """Returns a unique name of 2 x ``count`` hexadecimal digits. It depends only on the history
        of the process: disks stay equal when independent processes run in another order."""
        process, number = self.current_process, self._tokens
        if process is not None:
            process.tokens += 1
            number += process.tokens + (process.pid << 20)
        else:
            self._tokens += 1
        return f"{number * 2654435761 % (1 << 8 * count):0{2 * count}x}"

    @property
    def current_process(self) -> Process | None:
        task = self.scheduler.current
        return task.process if task is not None else None


active_clusters: list[Cluster] = []  # the last one runs; those below wait until it has ended


def current_cluster() -> Cluster:
    """Returns the cluster that runs now."""
    return active_clusters[-1]


def current_process() -> Process:
    """Returns the simulated process whose task runs now. RuntimeError outside of a task."""
    process = current_cluster().current_process
    if process is None:
        raise RuntimeError("no process of the cluster is running")
    return process


def _rank_name(process: Process) -> str:
    """Returns the name of the rank that ``process`` is, or for which it writes."""
    return process.name.removesuffix(".writer")


def lose_power(disks: Mapping[str, Disk], seed: int) -> None:
    """Applies a power loss to ``disks``. ``seed`` 0: nothing unflushed is left; otherwise any part
    of it, where the rest of a torn file may be zeros."""
    rng = random.Random(seed)

    def torn(data: bytes) -> bytes:
        left = data[: rng.randrange(len(data) + 1)]
        return left + bytes(len(data) - len(left)) if rng.random() < 0.5 else left

    for disk in disks.values():
        if seed:
            disk.lose_power(lambda: rng.random() < 0.5, torn)
        else:
            disk.lose_power(lambda: False)
