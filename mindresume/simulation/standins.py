"""Time, threads, queues and names for the product's modules, in a simulated cluster.

    with standing_in(lambda: cluster):
        cluster.scheduler.run()             # time.sleep in mindresume.* waits in simulated time, threading.Thread is a task

Every module of mindresume that has imported ``time``, ``threading``, ``queue``, ``secrets``, ``socket``, ``signal`` or ``atexit``
sees a stand-in instead; so do parameters whose default is one of their functions. Nothing else of the product is replaced, but
what the kernel tells otherwise: who a process is (``holder_of_this_process``), whether one lives (``is_alive``), what memory is
left (``levels``), whether a folder is on a disk of this host alone (``is_local``), and which signals came
(``LoadAttempt._listen``). What has no stand-in and would let real time or chance in (a Timer, ``secrets.choice``) is refused when
it is used.
"""
from __future__ import annotations

import atexit
import importlib
import pkgutil
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

from mindresume.saving.staging import Staging
from mindresume.simulation.cluster import Cluster
from mindresume.simulation.scheduler import Killed
from mindresume.simulation.threads import Condition, Event, Lock, RLock, SimpleQueue, Thread, _cluster, _Waiters, here, running

_SPARED = ("mindresume.simulation.", "mindresume.fault_injection.", "mindresume.cli.")  # whose time is real
_ROOMS = ("storage", "coordination", "saving", "resume", "formats", "tensor_files", "events")  # what a cluster can run


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


class _Handler:
    """Runs where the signal strikes: at an operation."""

    def __init__(self, number: int, handler: Any):
        self.number, self.handler = number, handler

    def __call__(self) -> None:
        if self.handler is not signal.SIG_IGN:
            self.handler(self.number, None)


def _signal(number: int, handler: Any) -> Any:
    """Other signals than SIGTERM strike nobody."""
    process = running()
    if here().scheduler.current is not process.main:
        raise ValueError("signal only works in main thread of the main interpreter")
    if not callable(handler) and handler not in (signal.SIG_DFL, signal.SIG_IGN):
        raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
    if number != signal.SIGTERM:
        return signal.SIG_DFL
    before = process.on_term.handler if isinstance(process.on_term, _Handler) else signal.SIG_DFL
    process.on_term = None if handler == signal.SIG_DFL else _Handler(number, handler)
    return before


def _local(seconds: float | None = None) -> time.struct_time:
    return time.localtime(_wall() if seconds is None else seconds)


def _utc(seconds: float | None = None) -> time.struct_time:
    return time.gmtime(_wall() if seconds is None else seconds)


def _nanoseconds(clock: Callable[[], float]) -> Callable[[], int]:
    return lambda: round(clock() * 10**9)


# Module -> what of it is replaced. ``None``: nobody uses it yet, and it would let real time, real threads or chance in.
_REPLACED: dict[types.ModuleType, dict[str, Any]] = {
    time: {"monotonic": _monotonic, "perf_counter": _monotonic, "process_time": _monotonic, "thread_time": _monotonic,
           "monotonic_ns": _nanoseconds(_monotonic), "perf_counter_ns": _nanoseconds(_monotonic), "time": _wall,
           "time_ns": _nanoseconds(_wall), "sleep": _sleep, "localtime": _local, "gmtime": _utc,
           "strftime": lambda text, moment=None: time.strftime(text, moment or _local()),
           "ctime": lambda seconds=None: time.asctime(_local(seconds)),
           "asctime": lambda moment=None: time.asctime(moment or _local()), "clock_gettime": None, "clock_gettime_ns": None},
    threading: {"Thread": Thread, "Event": Event, "Lock": Lock, "RLock": RLock, "Condition": Condition,
                "current_thread": lambda: here().scheduler.current, "main_thread": lambda: running().main,
                "get_ident": lambda: here().scheduler.current.number, "get_native_id": None, "Timer": None, "Semaphore": None,
                "BoundedSemaphore": None, "Barrier": None, "local": None, "enumerate": None, "active_count": None},
    queue: {"SimpleQueue": SimpleQueue, "Queue": None, "LifoQueue": None, "PriorityQueue": None},
    secrets: {"token_hex": lambda count=32: here().token(count), "token_bytes": None, "token_urlsafe": None, "choice": None,
              "randbelow": None, "randbits": None, "SystemRandom": None},
    socket: {"gethostname": lambda: running().host.name, "getfqdn": None, "socket": None, "create_connection": None},
    signal: {"signal": _signal, "set_wakeup_fd": lambda *_, **__: -1, "getsignal": None, "raise_signal": None, "alarm": None,
             "setitimer": None, "pause": None},
    atexit: {"register": _register, "unregister": _unregister},
}


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} has no stand-in in a simulated cluster")
    return refuse


def _stand_in(module: types.ModuleType, replaced: dict[str, Any]) -> types.SimpleNamespace:
    kept = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return types.SimpleNamespace(**{**kept, **replaced})


for _module, _table in _REPLACED.items():
    for _name in [_name for _name, _value in _table.items() if _value is None]:
        _table[_name] = _refused(f"{_module.__name__}.{_name}")
_MODULES = {_module: _stand_in(_module, _table) for _module, _table in _REPLACED.items()}
_FUNCTIONS: dict[Any, Any] = {getattr(_module, _name): _value for _module, _table in _REPLACED.items()
                              for _name, _value in _table.items()}
_FUNCTIONS[threading.Condition.wait] = Condition.wait           # a default of a parameter


def _said() -> float:
    """The time that is written down for people alone: exact to the hour, so that disks are equal which differ in nothing else."""
    return _wall() // 3600 * 3600


def _owner(purpose: str, world_size: int = 1, holds: Any = ()) -> Any:
    from mindresume.coordination.lease import LeaseHolder
    process = running()
    return LeaseHolder(purpose, "", process.host.name, process.host.name, process.pid, process.pid, _said(), world_size,
                       tuple(holds))


def _lives(holder: Any) -> bool | None:
    me, cluster = running(), here()
    if not holder.machine or (holder.machine != me.host.name and not cluster.one_machine):
        return None
    return any(other.pid == holder.pid and not other.dead for other in cluster.processes)


def _levels(root: str = "/") -> Any:
    from mindresume.coordination.host_memory import Level
    host = running().host
    return [Level(f"host {host.name}", host.memory)]


def _is_local(path: str, mounted: Any = None) -> bool:
    return running().host.disk.local


def _listen(load_attempt: Any) -> None:
    """Signals are not written into a file: it would be one of the real disk."""


class _Staging(Staging):
    """Its memory is given back when the cluster ends; a process that is killed does not. Who takes more than its host has left is
    killed by the kernel."""

    def __init__(self, shared: bool = False, fd: int = -1):
        super().__init__(shared, fd)
        here().at_end.append(self.close)

    def _grow(self, size: int) -> None:
        process = running()
        if size - self.size > process.host.memory:
            here().kill(process)
            raise Killed
        super()._grow(size)


def _product() -> list[types.ModuleType]:
    """The product's modules. Those that a cluster can run are imported first: what is imported later would escape."""
    import mindresume
    for room in _ROOMS:
        package = importlib.import_module(f"{mindresume.__name__}.{room}")
        for found in pkgutil.iter_modules(getattr(package, "__path__", ())):
            importlib.import_module(f"{package.__name__}.{found.name}")
    return [module for name, module in list(sys.modules.items()) if module is not None
            and (name + ".").startswith("mindresume.") and not (name + ".").startswith(_SPARED)]


class _Places:
    """Every name, default and field of the product's modules that is to be replaced, with both values."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, str, Any, Any]] = []         # (holder, name, the product's, the stand-in)
        modules = _product()
        self.modules = {module.__name__ for module in modules}
        from mindresume.coordination import host_memory, lease
        from mindresume.saving import crash_loop, shard_writer
        from mindresume.storage import mounts
        self._functions = {**_FUNCTIONS, lease.holder_of_this_process: _owner, lease.is_alive: _lives,
                           host_memory.levels: _levels,
                           mounts.is_local: _is_local, crash_loop.LoadAttempt._listen: _listen, Staging: _Staging}
        self._known: set[int] = set()
        for module in modules:
            for key, value in list(vars(module).items()):
                if isinstance(value, types.ModuleType) and value in _MODULES:
                    self.rows.append((module, key, value, _MODULES[value]))
                elif self._is_replaced(value):
                    self.rows.append((module, key, value, self._functions[value]))
                elif getattr(value, "__module__", None) == module.__name__:
                    self._inside(value)
        defaults = shard_writer.write_shard.__defaults__        # its clock tells when a record was written
        self.rows.append((shard_writer.write_shard, "__defaults__", defaults,
                          tuple(_said if value is time.time else value for value in defaults)))

    def _is_replaced(self, value: Any) -> bool:
        return _hashable(value) and value in self._functions

    def _inside(self, value: Any) -> None:
        """Of classes their fields, of functions their defaults and what they enclose; also below decorators."""
        if id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, type):
            for key, inner in list(vars(value).items()):
                bare = inner.__func__ if isinstance(inner, staticmethod) else inner
                if self._is_replaced(bare):
                    new = self._functions[bare]
                    self.rows.append((value, key, inner, staticmethod(new) if isinstance(inner, staticmethod) else new))
                elif isinstance(inner, property):
                    for function in filter(None, (inner.fget, inner.fset, inner.fdel)):
                        self._inside(function)
                elif not isinstance(inner, type) or inner.__module__ == value.__module__:
                    self._inside(getattr(inner, "__func__", inner))
        elif isinstance(value, types.FunctionType):
            defaults, named = value.__defaults__ or (), value.__kwdefaults__ or {}
            if any(map(self._is_replaced, defaults)):
                self.rows.append((value, "__defaults__", defaults, tuple(map(self._new, defaults))))
            if any(map(self._is_replaced, named.values())):
                self.rows.append((value, "__kwdefaults__", named, {key: self._new(one) for key, one in named.items()}))
            for cell in value.__closure__ or ():
                content = _content(cell)
                if self._is_replaced(content):
                    self.rows.append((cell, "cell_contents", content, self._functions[content]))
        if hasattr(value, "__wrapped__"):
            self._inside(value.__wrapped__)

    def _new(self, value: Any) -> Any:
        return self._functions[value] if self._is_replaced(value) else value

    def put_back(self) -> None:
        for holder, name, value, _ in reversed(self.rows):
            setattr(holder, name, value)
        late = {module.__name__ for module in _product()} - self.modules
        if late:
            raise RuntimeError(f"imported while a cluster ran, so they saw real time or keep what was simulated: {sorted(late)}")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:                                          # empty
        return None


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
                while cluster.at_end:
                    cluster.at_end.pop()()
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
            _writers(False)
            _places.pop().put_back()


def _writers(simulated: bool) -> None:
    from mindresume.saving import async_saver
    from mindresume.simulation.writer import Writer
    async_saver._WRITERS["process"] = Writer if simulated else async_saver._Process


__all__ = ["Condition", "Event", "Lock", "RLock", "SimpleQueue", "Thread", "_Waiters", "here", "replaced", "running",
           "standing_in"]
