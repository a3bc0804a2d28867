"""The network of a simulated cluster: it answers ``mindresume.coordination.channel``.

A connection is a pair of queues. It breaks with either process. Who listens serves in tasks of its
own process; each message is an operation, at which a fault can strike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindresume.coordination.channel import DEADLINE, Endpoint
from sim.cluster import Process, current_cluster, current_process
from sim.schedule import CUT
from sim.threads import SimpleQueue

_TICK = 0.5  # seconds between two looks whether the other end lives


class SimulatedChannel:
    """One end of a connection. ``is_open``: shared by both."""

    def __init__(self, other: Process, own: SimpleQueue, others: SimpleQueue, is_open: list[bool]):
        self._other, self._own, self._others, self._is_open = other, own, others, is_open
        self._arrived = bytearray()

    def send(self, data: bytes | memoryview) -> None:
        operate("send")
        faults, current_cluster().on_network = current_cluster().on_network, []
        for fault in faults:
            if fault.kind == CUT:
                self.close()
            elif len(data):
                data = bytearray(data)
                data[fault.amount % len(data)] ^= 1 << fault.amount % 8
        if self._other.dead or not self._is_open[0]:
            raise ConnectionResetError("the other end is gone")
        self._others.put(bytes(data))

    def receive(self, count: int) -> memoryview:
        until = current_cluster().scheduler.now + DEADLINE
        while len(self._arrived) < count:
            if self._own.empty():
                if self._other.dead or not self._is_open[0]:
                    raise ConnectionResetError("the other end has closed the connection")
                if current_cluster().scheduler.now > until:
                    raise TimeoutError("timed out")
                self._own.wait(_TICK)
            else:
                self._arrived += self._own.get()
        found, self._arrived = self._arrived[:count], self._arrived[count:]
        return memoryview(bytes(found))

    def close(self) -> None:
        self._is_open[0] = False


class SimulatedListener:
    """A process that listens."""

    def __init__(self, serve: Callable[[Any], None], port: int = 0):
        cluster = current_cluster()
        self.process, self.serve = current_process(), serve
        self.endpoint = Endpoint(self.process.host.name, self.process.pid, cluster.token(32))
        cluster.listeners = [*getattr(cluster, "listeners", ()), self]

    def close(self) -> None:
        cluster = current_cluster()
        cluster.listeners = [listener for listener in cluster.listeners if listener is not self]


def operate(name: str) -> None:
    """Counts one operation of the running process."""
    code, _ = current_cluster().operate(current_process(), name, "network")
    if code:
        raise OSError(code, "network")


def connect(endpoint: Endpoint) -> SimulatedChannel:
    """Connects to a listener of the cluster."""
    cluster, me = current_cluster(), current_process()
    operate("connect")
    listener = next(
        (
            listener
            for listener in getattr(cluster, "listeners", ())
            if listener.endpoint[:2] == endpoint[:2]
        ),
        None,
    )
    if listener is None or listener.process.dead:
        raise ConnectionRefusedError("nobody listens there")
    if listener.endpoint.secret != endpoint.secret:
        raise PermissionError("the other end does not know the secret of this job")
    one, two, is_open = SimpleQueue(), SimpleQueue(), [True]

    def work() -> None:
        channel = SimulatedChannel(me, two, one, is_open)
        try:
            listener.serve(channel)
        except OSError:
            pass
        finally:
            channel.close()

    cluster.scheduler.start(listener.process, work, f"{listener.process.name}/channel")
    return SimulatedChannel(listener.process, one, two, is_open)
