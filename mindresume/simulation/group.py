"""The collectives of a simulated job: a ``mindresume.coordination.collectives.Group`` whose ranks are tasks.

All ranks must make the same calls in the same order. A rank that waits for one that is gone gets an error after ``LIMIT``
seconds, as HCCL gives up; so does one that waits as long for ranks that are alive, which no correct program lets happen.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from mindresume.simulation.cluster import Host, Process
from mindresume.simulation.standins import _Waiters, here

LIMIT = 600.0                   # seconds; HCCL_EXEC_TIMEOUT is 1836 by default


class ExchangeError(RuntimeError):
    """A collective failed: another rank is gone, or did not come."""


class MismatchError(AssertionError):
    """Two ranks make different calls: on a device they would hang, or take one message for another."""


@dataclass
class _Round:
    kind: str
    messages: dict[int, bytes] = field(default_factory=dict)
    left: int = 0


class Communicator:
    """What the ranks of one job share. ``limit``: seconds after which a call fails. ``longest``: that a rank waited in a call for
    ranks that were alive, or had ended as if all were well; without the operations of other hosts, which in the simulation take
    their time one after the other."""

    def __init__(self, size: int, limit: float = LIMIT):
        self.size, self.limit = size, limit
        self.processes: dict[int, Process] = {}
        self.rounds: dict[int, _Round] = {}
        self.waiters = _Waiters()
        self.longest = 0.0
        self.mismatch = ""

    def waited(self, since: float, before: dict[Host, int]) -> float:
        """Seconds ``since`` a moment, less those of operations of hosts on which this job does not run. ``before``: operations of
        each host at that moment."""
        cluster, own = here(), {process.host for process in self.processes.values()}
        elsewhere = sum(host.operations - before.get(host, 0) for host in cluster.hosts if host not in own)
        return cluster.scheduler.now - since - cluster.scheduler.tick * elsewhere

    def member(self, rank: int, process: Process) -> Member:
        self.processes[rank] = process
        return Member(self, rank)


class Member:
    """One rank's end."""

    def __init__(self, communicator: Communicator, rank: int):
        self._shared, self.rank, self.size = communicator, rank, communicator.size
        self._number = 0

    def broadcast(self, message: bytes) -> bytes:
        return self._call("broadcast", message)[0]

    def gather(self, message: bytes) -> list[bytes]:
        found = self._call("gather", message)
        return [found[rank] for rank in range(self.size)]

    def _call(self, kind: str, message: bytes) -> dict[int, bytes]:
        shared, scheduler = self._shared, here().scheduler
        scheduler.check()
        self._number += 1
        current = shared.rounds.setdefault(self._number, _Round(kind))
        if current.kind != kind:
            shared.mismatch = f"call {self._number}: rank {self.rank} calls {kind}, others {current.kind}"
            raise MismatchError(shared.mismatch)
        current.messages[self.rank] = message
        began, before = scheduler.now, {host: host.operations for host in here().hosts}
        until = began + shared.limit
        if len(current.messages) == self.size:
            shared.waiters.wake()
        while len(current.messages) < self.size:
            if scheduler.now >= until:
                absent = [rank for rank in range(self.size) if rank not in current.messages]
                gone = [process for rank in absent if (process := shared.processes.get(rank)) is not None and process.dead]
                if all(process.exit == 0 for process in gone):
                    shared.longest = max(shared.longest, scheduler.now - began)
                raise ExchangeError(f"rank {self.rank}: {kind}: rank {absent} did not come within {shared.limit:.0f} s")
            shared.waiters.wait(until - scheduler.now, f"in {kind} {self._number}")
        if not any(process.dead and process.exit for process in shared.processes.values()):         # all live, or ended well
            shared.longest = max(shared.longest, shared.waited(began, before))
        current.left += 1
        found = current.messages
        if current.left == self.size:
            del shared.rounds[self._number]
        return found
