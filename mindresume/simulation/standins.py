"""Time, threads, queues and names for the product's modules, in a simulated cluster.

    with standing_in(lambda: cluster):
        cluster.scheduler.run()             # time.sleep in mindresume.* waits in simulated time, threading.Thread is a task

Every module of mindresume that has imported ``time``, ``threading``, ``queue``, ``secrets``, ``socket``, ``signal`` or ``atexit``
sees a stand-in instead; so do parameters whose default is one of their functions. Nothing else of the product is replaced, but
what the kernel tells otherwise: who a process is (``owner_of_this_process``), whether one lives (``lives``), what memory is left
(``levels``), and whether a folder is on a disk of this host alone (``is_local``).
"""
from __future__ import annotations

import atexit
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindresume.simulation.cluster import Cluster, Process
from mindresume.simulation.scheduler import Task

_SPARED = ("mindresume.simulation", "mindresume.drill")
_cluster: list[Cluster] = []


def here() -> Cluster:
    """The cluster that runs."""
    return _cluster[-1]


def running() -> Process:
    process = here().running
    if process is None:
        raise RuntimeError("no process of the cluster is running")
    return process


# ---- threads -------------------------------------------------------------------------------------------------------

class _Waiters:
    """Tasks that wait for something."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def wait(self, timeout: float | None, where: str) -> bool:
        scheduler = here().scheduler
        task = scheduler.current
        if task is None:
            raise RuntimeError(f"nobody can wait here ({where})")
        self._tasks.append(task)
        try:
            return scheduler.block(timeout, where)
        finally:
            if task in self._tasks:
                self._tasks.remove(task)

    def wake(self, count: int = 1 << 30) -> None:
        for task in [task for task in self._tasks if not task.process.dead][:count]:
            self._tasks.remove(task)
            here().scheduler.wake(task)


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiters = _Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiters.wait(timeout, "waits for an event")
        return self._set


class Lock:
    """Also an RLock: who has it may take it again."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiters = _Waiters()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = here().scheduler
        me = scheduler.current
        until = None if timeout < 0 else scheduler.now + timeout
        while self._owner is not None and self._owner is not me and not self._owner.done and not self._owner.process.dead:
            left = None if until is None else until - scheduler.now
            if not blocking or (left is not None and left <= 0):
                return False
            self._waiters.wait(left, "waits for a lock")
        self._owner, self._depth = me, self._depth + 1 if self._owner is me else 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner = None
            self._waiters.wake(1)

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition:
    def __init__(self, lock: Lock | None = None):
        self._lock = lock or Lock()
        self._waiters = _Waiters()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def acquire(self, *arguments: Any) -> bool:
        return self._lock.acquire(*arguments)

    def release(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth, self._lock._depth = self._lock._depth, 1
        self._lock.release()
        try:
            return self._waiters.wait(timeout, "waits for a condition")
        finally:
            if not here().scheduler.current or not here().scheduler.current.process.dead:
                self._lock.acquire()
                self._lock._depth = depth

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = here().scheduler
        until = None if timeout is None else scheduler.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - scheduler.now
            if left is not None and left <= 0:
                return result
            self.wait(left)
        return result

    def notify(self, count: int = 1) -> None:
        self._waiters.wake(count)

    def notify_all(self) -> None:
        self._waiters.wake()


class Thread:
    """A task of the process that starts it; it ends with the process, as a daemon does."""

    def __init__(self, group: None = None, target: Callable[..., Any] | None = None, name: str = "thread", args: tuple = (),
                 kwargs: dict[str, Any] | None = None, daemon: bool | None = None):
        self._work, self.name, self.daemon = (lambda: target(*args, **(kwargs or {}))), name, daemon
        self._task: Task | None = None
        self._ended = Event()

    def start(self) -> None:
        process = running()

        def run() -> None:
            try:
                self._work()
            except Exception as error:                  # as Python: a line on stderr, the thread is gone
                process.log.append(f"error in thread {self.name}: {type(error).__name__}: {error}")
            finally:
                self._ended._set = True
            self._ended.set()
        self._task = here().scheduler.start(process, run, f"{process.name}/{self.name}")

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._ended.is_set() and not self._task.done and not self._task.process.dead


class SimpleQueue:
    def __init__(self, maxsize: int = 0) -> None:
        self._items: list[Any] = []
        self._waiters = _Waiters()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        here().scheduler.check()                    # the other end may be another process, which hears nothing of the dead
        self._items.append(item)
        self._waiters.wake(1)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler = here().scheduler
        until = None if timeout is None else scheduler.now + timeout
        while not self._items:
            left = None if until is None else until - scheduler.now
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            self._waiters.wait(left, "waits for a message")
        return self._items.pop(0)

    def wait(self, timeout: float) -> None:
        """Until there may be a message."""
        if not self._items:
            self._waiters.wait(timeout, "waits for a message")

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


# ---- modules -------------------------------------------------------------------------------------------------------

def _monotonic() -> float:
    return here().scheduler.now


def _wall() -> float:
    process = here().running
    return here().server_time() + (process.host.offset if process is not None else 0.0)


def _sleep(seconds: float) -> None:
    here().scheduler.sleep(seconds)


def _register(function: Callable[..., Any], *values: Any, **named: Any) -> Callable[..., Any]:
    running().at_exit.append((function, values, named))
    return function


def _unregister(function: Callable[..., Any]) -> None:
    process = running()
    process.at_exit = [row for row in process.at_exit if row[0] != function]


def _signal(number: int, handler: Any) -> Any:
    """The handler runs where the signal strikes: at an operation."""
    process, before = running(), None
    if number == signal.SIGTERM:
        before, process.on_term = process.on_term, None if handler in (None, signal.SIG_DFL) else lambda: handler(number, None)
    return before


def _stand_in(module: types.ModuleType, **replaced: Any) -> types.SimpleNamespace:
    kept = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return types.SimpleNamespace(**{**kept, **replaced})


_MODULES = {
    time: _stand_in(time, monotonic=_monotonic, perf_counter=_monotonic, time=_wall, sleep=_sleep),
    threading: _stand_in(threading, Thread=Thread, Event=Event, Lock=Lock, RLock=Lock, Condition=Condition,
                         current_thread=lambda: here().scheduler.current, main_thread=lambda: running().main),
    queue: _stand_in(queue, SimpleQueue=SimpleQueue, Queue=SimpleQueue),
    secrets: _stand_in(secrets, token_hex=lambda count=4: here().token(count)),
    socket: _stand_in(socket, gethostname=lambda: running().host.name),
    signal: _stand_in(signal, signal=_signal, set_wakeup_fd=lambda *_, **__: -1),
    atexit: _stand_in(atexit, register=_register, unregister=_unregister),
}
_FUNCTIONS: dict[Any, Any] = {time.monotonic: _monotonic, time.perf_counter: _monotonic, time.time: _wall, time.sleep: _sleep,
                              threading.Condition.wait: Condition.wait, threading.Lock: Lock, threading.Condition: Condition,
                              threading.Event: Event, threading.Thread: Thread}


def _owner(purpose: str, world_size: int = 1, holds: Any = ()) -> Any:
    from mindresume.store.claim import Owner
    process = running()
    return Owner(purpose, "", process.host.name, process.host.name, process.pid, process.pid, _wall(), world_size, tuple(holds))


def _lives(owner: Any) -> bool | None:
    me, cluster = running(), here()
    if not owner.machine or (owner.machine != me.host.name and not cluster.one_machine):
        return None
    return any(other.pid == owner.pid and not other.dead for other in cluster.processes)


def _levels(root: str = "/") -> Any:
    from mindresume.host_memory import Level
    host = running().host
    return [Level(f"host {host.name}", host.memory)]


def _is_local(path: str) -> bool:
    return running().host.disk.local


class _Places:
    """Every name, default and field of the product's modules that is to be replaced, with both values."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, str, Any, Any]] = []         # (holder, name, the product's, the stand-in)
        from mindresume import host_memory
        from mindresume.store import claim, shared
        functions = {**_FUNCTIONS, claim.owner_of_this_process: _owner, claim.lives: _lives, host_memory.levels: _levels,
                     shared.is_local: _is_local}
        known: set[int] = set()
        for name, module in list(sys.modules.items()):
            if module is None or not (name + ".").startswith("mindresume.") or name.startswith(_SPARED):
                continue
            for key, value in list(vars(module).items()):
                if isinstance(value, types.ModuleType) and value in _MODULES:
                    self.rows.append((module, key, value, _MODULES[value]))
                elif _hashable(value) and value in functions:
                    self.rows.append((module, key, value, functions[value]))
                elif getattr(value, "__module__", None) == name:
                    self._inside(value, functions, known)

    def _inside(self, value: Any, functions: dict[Any, Any], known: set[int]) -> None:
        if id(value) in known:
            return
        known.add(id(value))
        if isinstance(value, type):
            for key, inner in list(vars(value).items()):
                inner = getattr(inner, "__func__", inner)
                if _hashable(inner) and inner in functions and not isinstance(vars(value)[key], staticmethod):
                    self.rows.append((value, key, inner, functions[inner]))
                elif isinstance(inner, types.FunctionType):
                    self._inside(inner, functions, known)
        elif isinstance(value, types.FunctionType):
            defaults = value.__defaults__ or ()
            if any(_hashable(one) and one in functions for one in defaults):
                self.rows.append((value, "__defaults__", defaults, tuple(
                    functions[one] if _hashable(one) and one in functions else one for one in defaults)))
            named = value.__kwdefaults__ or {}
            if any(_hashable(one) and one in functions for one in named.values()):
                self.rows.append((value, "__kwdefaults__", named, {
                    key: functions[one] if _hashable(one) and one in functions else one for key, one in named.items()}))


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@contextmanager
def standing_in(cluster: Cluster) -> Iterator[None]:
    """The product sees ``cluster``. One at a time; the places are replaced once, by the outermost."""
    _cluster.append(cluster)
    try:
        with replaced():
            try:
                yield
            finally:
                cluster.scheduler.end()
    finally:
        _cluster.pop()


_depth = [0]
_places: list[_Places] = []


@contextmanager
def replaced() -> Iterator[None]:
    """For many clusters one after the other: ``standing_in`` inside costs nothing then."""
    if not _depth[0]:
        _places[:] = [_Places()]
        for holder, name, _, value in _places[0].rows:
            setattr(holder, name, value)
        _writers(True)
    _depth[0] += 1
    try:
        yield
    finally:
        _depth[0] -= 1
        if not _depth[0]:
            for holder, name, value, _ in reversed(_places[0].rows):
                setattr(holder, name, value)
            _places.clear()
            _writers(False)


def _writers(simulated: bool) -> None:
    from mindresume.simulation.writer import Writer
    from mindresume.store import background
    background._WRITERS["process"] = Writer if simulated else background._Process


__all__ = ["Condition", "Event", "Lock", "SimpleQueue", "Thread", "here", "replaced", "running", "standing_in"]
