"""The machine that a process of a simulated cluster sees: simulated time, tasks for threads, names without chance.

    with use_cluster(cluster):
        cluster.scheduler.run()             # runtime.sleep in mindresume waits in simulated time, runtime.Thread is a task

``ANSWERS`` has a row for each function that the product marks with ``runtime.asks_machine``; a test compares them.
"""
from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindresume import runtime
from mindresume.coordination import host_memory, lease
from mindresume.coordination.signal_sender import OTHER, OWN, SignalSenders
from mindresume.resume import background_scrub
from mindresume.saving import background_writer, crash_loop, staging
from mindresume.saving.staging import Staging
from mindresume.storage import mounts
from sim import memory_disk
from sim.cluster import Cluster, active_clusters, current_cluster, current_process
from sim.scheduler import Killed
from sim.threads import Condition, Event, Lock, RLock, SimpleQueue, Thread
from sim.writer_process import WriterProcess

# ---- time, threads, signals ----------------------------------------------------------------------------------------

def _monotonic() -> float:
    return current_cluster().scheduler.now


def _time() -> float:
    process = current_cluster().current_process
    return current_cluster().server_time() + (process.host.offset if process is not None else 0.0)


def _timestamp() -> float:
    """Returns the time for records that only people read, exact to the hour: disks that differ in nothing else are equal."""
    return _time() // 3600 * 3600


def _sleep(seconds: float) -> None:
    current_cluster().scheduler.sleep(seconds)


def _localtime(seconds: float | None = None) -> time.struct_time:
    return time.localtime(_time() if seconds is None else seconds)


def _gmtime(seconds: float | None = None) -> time.struct_time:
    return time.gmtime(_time() if seconds is None else seconds)


def _at_exit(function: Callable[..., Any], *values: Any, **named: Any) -> Callable[..., Any]:
    current_process().at_exit.append((function, values, named))
    return function


def _not_at_exit(function: Callable[..., Any]) -> None:
    process = current_process()
    process.at_exit = [row for row in process.at_exit if row[0] != function]


class _Handler:
    """A SIGTERM handler; it runs at the operation where the signal arrives."""

    def __init__(self, number: int, handler: Any):
        self.number, self.handler = number, handler

    def __call__(self) -> None:
        if self.handler is not signal.SIG_IGN:
            self.handler(self.number, None)


def _signal(number: int, handler: Any) -> Any:
    """Replaces ``signal.signal``. Only SIGTERM is delivered in a cluster."""
    process = current_process()
    if current_cluster().scheduler.current is not process.main:
        raise ValueError("signal only works in main thread of the main interpreter")
    if not callable(handler) and handler not in (signal.SIG_DFL, signal.SIG_IGN):
        raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
    if number != signal.SIGTERM:
        return signal.SIG_DFL
    before = process.sigterm_handler.handler if isinstance(process.sigterm_handler, _Handler) else signal.SIG_DFL
    process.sigterm_handler = None if handler == signal.SIG_DFL else _Handler(number, handler)
    return before


def _watch_signals(senders: Any) -> None:
    process = current_process()
    process.own_signals.clear()
    process.on_signal = lambda: senders.on_own() if senders.look() == OWN else None


def _watch_no_signals(senders: Any) -> None:
    current_process().on_signal = None


def _sender(senders: Any) -> str:
    return OWN if all(current_process().own_signals) else OTHER


# ---- processes and memory ------------------------------------------------------------------------------------------

def _holder_of_this_process(purpose: str, world_size: int = 1, holds: Any = ()) -> Any:
    process = current_process()
    return lease.LeaseHolder(purpose, "", process.host.name, process.host.name, process.pid, process.pid, _timestamp(),
                             world_size, tuple(holds))


def _is_alive(holder: Any) -> bool | None:
    me, cluster = current_process(), current_cluster()
    if not holder.machine or (holder.machine != me.host.name and not cluster.shared_pid_namespace):
        return None
    if me.host.hides_processes and me.pid != holder.pid:
        return None
    runs = any(other.pid == holder.pid and not other.dead for other in cluster.processes)
    return None if runs and holder.is_copy else runs


def _memory_levels(root: str = "/") -> Any:
    host = current_process().host
    return [host_memory.Level(f"host {host.name}", host.memory)]


class _Staging(Staging):
    """A staging buffer whose memory is freed when the cluster ends, since a killed process does not free it. A process that takes
    more than its host has left is killed, as by the kernel."""

    def __init__(self, shared: bool = False):
        super().__init__(shared)
        current_cluster().cleanups.append(self.close)

    def _grow(self, size: int) -> None:
        process = current_process()
        if size - self.size > process.host.memory:
            current_cluster().kill(process)
            raise Killed
        super()._grow(size)


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing: it would be a file of the real disk, or the priority of a real thread."""


ANSWERS: dict[Any, Callable[..., Any]] = {
    runtime.monotonic: _monotonic, runtime.process_time: _monotonic, runtime.time: _time, runtime.timestamp: _timestamp,
    runtime.sleep: _sleep, runtime.localtime: _localtime, runtime.gmtime: _gmtime,
    runtime.Thread: Thread, runtime.Event: Event, runtime.Lock: Lock, runtime.RLock: RLock, runtime.Condition: Condition,
    runtime.SimpleQueue: SimpleQueue,
    runtime.current_thread: lambda: current_cluster().scheduler.current, runtime.main_thread: lambda: current_process().main,
    runtime.token_hex: lambda count=32: current_cluster().token(count), runtime.gethostname: lambda: current_process().host.name,
    runtime.at_exit: _at_exit, runtime.not_at_exit: _not_at_exit,
    runtime.signal: _signal, runtime.set_wakeup_fd: lambda *_, **__: -1,
    SignalSenders.begin: _watch_signals, SignalSenders.close: _watch_no_signals, SignalSenders.look: _sender,
    crash_loop.LoadAttempt._capture_signals: _nothing, background_scrub.lower_priority: _nothing,
    lease.holder_of_this_process: _holder_of_this_process, lease.is_alive: _is_alive,
    host_memory.levels: _memory_levels, mounts.is_local: lambda path, mounted=None: current_process().host.disk.local,
    staging.staging_buffer: _Staging, background_writer.WRITERS["process"]: WriterProcess,
    **memory_disk.ANSWERS,
}


@contextmanager
def use_cluster(cluster: Cluster) -> Iterator[None]:
    """Makes the product see ``cluster``. One cluster runs at a time."""
    active_clusters.append(cluster)
    try:
        with runtime.answers(ANSWERS):
            try:
                yield
            finally:
                cluster.scheduler.end()
                while cluster.cleanups:
                    cluster.cleanups.pop()()
    finally:
        active_clusters.pop()
