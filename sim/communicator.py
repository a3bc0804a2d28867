"""The collectives of a simulated job: a ``mindresume.coordination.collectives.Group`` whose ranks
are tasks.

All ranks must make the same calls in the same order. A call fails after ``LIMIT`` seconds, as
HCCL's timeout does: when it waits for a rank that has died, or for one that is alive but does not
call, which no correct program does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.cluster import Host, Process, current_cluster
from sim.threads import WaitQueue

LIMIT = 600.0  # seconds; HCCL_EXEC_TIMEOUT is 1836 by default


class ExchangeError(RuntimeError):
    """A collective failed: another rank has died, or did not call in time."""


class MismatchError(AssertionError):
    """Two ranks make different calls: on a device they would hang, or mix up their messages."""


@dataclass
class _Round:
    kind: str
    messages: dict[int, bytes] = field(default_factory=dict)
    left: int = 0


class Communicator:
    """The shared state of a job's ranks.

    Args:
        size: number of ranks.
        limit: seconds after which a call fails.

    ``longest_wait``: the longest time in seconds that a rank waited for ranks that were alive or
    had ended well, without the operations of hosts that run other jobs: those take simulated time
    one after the other.
    """

    def __init__(self, size: int, limit: float = LIMIT):
        self.size, self.limit = size, limit
        self.processes: dict[int, Process] = {}
        self.rounds: dict[int, _Round] = {}
        self.waiters = WaitQueue()
        self.longest_wait = 0.0
        self.mismatch = ""

    def waited(self, since: float, before: dict[Host, int]) -> float:
        """Returns the seconds since ``since``, less the operations of hosts on which this job does
        not run. ``before``: the number of operations of each host at ``since``."""
        cluster, own = current_cluster(), {process.host for process in self.processes.values()}
        elsewhere = sum(
            host.operations - before.get(host, 0) for host in cluster.hosts if host not in own
        )
        return cluster.scheduler.now - since - cluster.scheduler.tick * elsewhere

    def member(self, rank: int, process: Process) -> RankGroup:
        """Returns the group of ``rank``, which ``process`` runs."""
        self.processes[rank] = process
        return RankGroup(self, rank)


class RankGroup:
    """The ``Group`` of one rank."""

    def __init__(self, communicator: Communicator, rank: int):
        self._shared = communicator
        self.rank = rank
        self.size = communicator.size
        self._number = 0

    def broadcast(self, message: bytes) -> bytes:
        return self._call("broadcast", message)[0]

    def gather(self, message: bytes) -> list[bytes]:
        found = self._call("gather", message)
        return [found[rank] for rank in range(self.size)]

    def _call(self, kind: str, message: bytes) -> dict[int, bytes]:
        shared, scheduler = self._shared, current_cluster().scheduler
        scheduler.check()
        self._number += 1
        current = shared.rounds.setdefault(self._number, _Round(kind))
        if current.kind != kind:
            shared.mismatch = (
                f"call {self._number}: rank {self.rank} calls {kind}, others {current.kind}"
            )
            raise MismatchError(shared.mismatch)
        current.messages[self.rank] = message
        began, before = scheduler.now, {host: host.operations for host in current_cluster().hosts}
        until = began + shared.limit
        if len(current.messages) == self.size:
            shared.waiters.wake()
        while len(current.messages) < self.size:
            if scheduler.now >= until:
                missing = [rank for rank in range(self.size) if rank not in current.messages]
                gone = [
                    process
                    for rank in missing
                    if (process := shared.processes.get(rank)) is not None and process.dead
                ]
                if all(process.exit == 0 for process in gone):
                    shared.longest_wait = max(shared.longest_wait, scheduler.now - began)
                raise ExchangeError(
                    f"rank {self.rank}: {kind}: rank {missing} did not call within "
                    f"{shared.limit:.0f} s"
                )
            shared.waiters.wait(until - scheduler.now, f"in {kind} {self._number}")
        # all alive, or ended well
        if not any(process.dead and process.exit for process in shared.processes.values()):
            shared.longest_wait = max(shared.longest_wait, shared.waited(began, before))
        current.left += 1
        found = current.messages
        if current.left == self.size:
            del shared.rounds[self._number]
        return found
