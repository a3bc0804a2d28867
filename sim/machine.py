"""The machine that a process of a simulated cluster sees: simulated time, tasks for threads, names
without chance.

    with use_cluster(cluster):
        # runtime.sleep in mindresume waits in simulated time, runtime.Thread is a task
        cluster.scheduler.run()

``ANSWERS`` has a row for each function that the product marks with ``runtime.asks_machine``; a test
compares them.
"""

from __future__ import annotations

import errno
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from mindresume import runtime
from mindresume.coordination import channel, host_memory, lease
from mindresume.coordination.preemption import OTHER, OWN, SignalSenders
from mindresume.fault_injection.faults import Killed
from mindresume.saving import async_saver, crash_loop, staging
from mindresume.saving.async_saver import serve
from mindresume.saving.memory_tier import directory, slots
from mindresume.saving.retention import Policy
from mindresume.saving.shard_writer import SaveTarget
from mindresume.saving.staging import Staging
from mindresume.storage import posix
from sim.cluster import Cluster, active_clusters, current_cluster, current_process
from sim.disk import Disk, Folder, fail
from sim.mount import Mount
from sim.network import SimulatedListener, connect
from sim.threads import Condition, Event, Lock, RLock, SimpleQueue, Thread

# ---- time, threads, signals ----------------------------------------------------------------------


def _monotonic() -> float:
    return current_cluster().scheduler.now


def _time() -> float:
    process = current_cluster().current_process
    return current_cluster().server_time() + (process.host.offset if process is not None else 0.0)


def _timestamp() -> float:
    """Returns the time for records that only people read, exact to the hour: disks that differ in
    nothing else are equal."""
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
        raise TypeError(
            "signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object"
        )
    if number != signal.SIGTERM:
        return signal.SIG_DFL
    before = (
        process.sigterm_handler.handler
        if isinstance(process.sigterm_handler, _Handler)
        else signal.SIG_DFL
    )
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


# ---- processes and memory ------------------------------------------------------------------------


def _holder_of_this_process(purpose: str, world_size: int = 1, holds: Any = ()) -> Any:
    process = current_process()
    return lease.LeaseHolder(
        purpose,
        "",
        process.host.name,
        process.host.name,
        process.pid,
        process.pid,
        _timestamp(),
        world_size,
        tuple(holds),
    )


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
    """A staging buffer whose memory is freed when the cluster ends, since a killed process does not
    free it. A process that takes more than its host has left is killed, as by the kernel."""

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


# ---- the writer of async_save: process -----------------------------------------------------------

_CHECK = 1.0  # seconds between checks of the training


class _Training:
    """The training's process, for the writer."""

    def __init__(self, process: Any, inbox: SimpleQueue, outbox: SimpleQueue):
        self._process = process
        self._inbox = inbox
        self._outbox = outbox

    def receive(self) -> Any:
        while self._inbox.empty():
            if self._process.dead:
                return None
            self._inbox.wait(_CHECK)
        return self._inbox.get()

    def send(self, message: Any) -> None:
        self._outbox.put(_pickled(message))


class WriterProcess:
    """The training's end of the writer of ``async_save: process``, which is a process of the
    cluster.

    It keeps the contract of ``mindresume.saving.async_saver.WriterProcess``: it shares only
    messages and the staging buffer with the training, ignores SIGTERM, finishes what it has begun
    when the training has died, and then waits for other ranks no longer than a living training
    would.
    """

    def __init__(self, target: SaveTarget, policy: Policy | None, staging: Staging, timeout: float):
        self._inbox, self._outbox = SimpleQueue(), SimpleQueue()
        training, cluster = current_process(), current_cluster()
        self._process = cluster.process(training.host, f"{training.name}.writer", lambda: None)
        self._process.sigterm_handler = lambda: None
        (target, policy) = _pickled((replace(target, storage=None), policy))
        memory = Staging(fd=os.dup(staging.fd))
        mine = replace(target, storage=Mount(cluster, self._process))
        cluster.cleanups.append(memory.close)
        cluster.scheduler.start(
            self._process,
            _deadline_task(training, self._process, timeout),
            f"{training.name}.writer/bound",
        )
        self._process.main = cluster.scheduler.start(
            self._process,
            lambda: serve(mine, policy, memory, _Training(training, self._inbox, self._outbox)),
            self._process.name,
        )

    def send(self, message: Any) -> None:
        if self._process.dead:
            raise BrokenPipeError("the writer process has ended")
        self._inbox.put(_pickled(message))

    def receive(self, timeout: float) -> Any:
        if self._outbox.empty() and timeout:
            self._outbox.wait(timeout)
        return None if self._outbox.empty() else self._outbox.get()

    def alive(self) -> bool:
        return not self._process.dead

    def close(self) -> None:
        self.send(None)

    def join(self) -> None:
        while self.alive():
            current_cluster().scheduler.sleep(_CHECK)

    def end(self) -> str:
        return f"exit status {self._process.exit}"


def _pickled(message: Any) -> Any:
    """Returns ``message`` as it arrives at the other end of a pipe."""
    return pickle.loads(pickle.dumps(message))


def _deadline_task(training: Any, process: Any, timeout: float) -> Callable[[], None]:
    """Returns a task that kills the writer ``timeout`` seconds after the death of its training."""

    def work() -> None:
        scheduler = current_cluster().scheduler
        while not training.dead:
            scheduler.sleep(_CHECK)
        scheduler.sleep(timeout)
        current_cluster().kill(process)

    return work


# ---- memory of the host --------------------------------------------------------------------------
# It survives the death of processes, and is lost with the host. Paths below ``SHM`` lead there
# (``Host.disk_of``).


class MappedFile:
    """A file whose bytes are overwritten in two operations: a process that dies between them leaves
    half of each."""

    def __init__(self, path: str, size: int):
        self.path, self.size = path, size
        self._disk = self._operate("create")
        if self._disk.find(path) is not None:
            fail(errno.EEXIST, path)
        self._file = self._disk.create(path, bytes(size), whole=True)
        self._content = bytearray(size)

    def resize(self, size: int) -> None:
        self._operate("resize")
        half = bytearray(b"\7" * (size // 2)) + self._content[size // 2 : size]
        self._content, self.size = half + bytes(size - len(half)), size
        self._disk.fill(self._file, bytes(self._content), True, self.path)
        self._operate("copy")

    @property
    def data(self) -> np.ndarray:
        # what was copied since the last call
        self._disk.fill(self._file, bytes(self._content), True, self.path)
        return np.frombuffer(self._content, np.uint8)

    def close(self) -> None:
        pass

    def _operate(self, name: str) -> Disk:
        code, _ = current_cluster().operate(current_process(), name, self.path)
        if code:
            fail(code, self.path)
        return current_process().host.disk_of(self.path)


def _is_simulated() -> bool:
    """Returns whether this process works on simulated disks. Tests run ranks as processes of a
    cluster on the real disk."""
    return bool(current_process().host.disk.root.entries)


def _mapped_file(path: str, size: int) -> Any:
    return MappedFile(path, size) if _is_simulated() else slots.MappedFile(path, size)


def _make_tier(path: str) -> None:
    if not _is_simulated():
        directory.make_tier.__wrapped__(path)
        return
    disk, folder = current_process().host.disk_of(path), ""
    for name in filter(None, path.split("/")):
        folder += f"/{name}"
        if not isinstance(disk.find(folder), Folder):
            disk.make_folder(folder)


def _foreign_folder(path: str) -> str:
    return "" if _is_simulated() else directory.foreign_folder.__wrapped__(path)


def _memory_identity(tier: str) -> str:
    return (
        current_process().host.name
        if _is_simulated()
        else directory.memory_identity.__wrapped__(tier)
    )


ANSWERS: dict[Any, Callable[..., Any]] = {
    runtime.monotonic: _monotonic,
    runtime.process_time: _monotonic,
    runtime.time: _time,
    runtime.timestamp: _timestamp,
    runtime.sleep: _sleep,
    runtime.localtime: _localtime,
    runtime.gmtime: _gmtime,
    runtime.Thread: Thread,
    runtime.Event: Event,
    runtime.Lock: Lock,
    runtime.RLock: RLock,
    runtime.Condition: Condition,
    runtime.SimpleQueue: SimpleQueue,
    runtime.current_thread: lambda: current_cluster().scheduler.current,
    runtime.main_thread: lambda: current_process().main,
    runtime.token_hex: lambda count=32: current_cluster().token(count),
    runtime.gethostname: lambda: current_process().host.name,
    runtime.at_exit: _at_exit,
    runtime.not_at_exit: _not_at_exit,
    runtime.signal: _signal,
    runtime.set_wakeup_fd: lambda *_, **__: -1,
    SignalSenders.begin: _watch_signals,
    SignalSenders.close: _watch_no_signals,
    SignalSenders.look: _sender,
    crash_loop.LoadAttempt._capture_signals: _nothing,
    lease.holder_of_this_process: _holder_of_this_process,
    lease.is_alive: _is_alive,
    host_memory.levels: _memory_levels,
    posix.is_local: lambda path: current_process().host.disk.local,
    staging.staging_buffer: _Staging,
    async_saver.WRITERS["process"]: WriterProcess,
    slots.mapped_file: _mapped_file,
    channel.listen: SimulatedListener,
    channel.connect: connect,
    directory.make_tier: _make_tier,
    directory.foreign_folder: _foreign_folder,
    directory.memory_identity: _memory_identity,
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
