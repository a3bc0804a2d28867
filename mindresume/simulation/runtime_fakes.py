"""Replaces time, threads, queues and names in the product's modules by those of a simulated cluster.

    with use_cluster(cluster):
        cluster.scheduler.run()             # time.sleep in mindresume.* waits in simulated time, threading.Thread is a task

Every module of mindresume that has imported ``time``, ``threading``, ``queue``, ``secrets``, ``socket``, ``signal`` or ``atexit``
sees a fake module; parameters whose default is one of their functions get the fake function. Of the product, only what asks the
kernel is replaced: who a process is (``holder_of_this_process``), whether one is alive (``is_alive``), how much memory is free
(``levels``), whether a folder is on a local disk (``is_local``), which signals came (``LoadAttempt._capture_signals``) and from
whom (``SignalSenders``). A function without a fake that would let in real time or chance (a Timer, ``secrets.choice``) raises
NotImplementedError.
"""
from __future__ import annotations

import atexit
import importlib
import operator
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
from functools import cache
from typing import Any

from mindresume.coordination import host_memory, lease
from mindresume.coordination.signal_sender import OTHER, OWN, SignalSenders
from mindresume.resume import background_scrub
from mindresume.saving import background_writer, crash_loop, shard_writer
from mindresume.saving.staging import Staging
from mindresume.simulation import memory_disk
from mindresume.simulation.cluster import Cluster, active_clusters, current_cluster, current_process
from mindresume.simulation.scheduler import Killed
from mindresume.simulation.threads import Condition, Event, Lock, RLock, SimpleQueue, Thread
from mindresume.simulation.writer_process import WriterProcess
from mindresume.storage import mounts

_NOT_SIMULATED = ("mindresume.simulation.", "mindresume.fault_injection.", "mindresume.cli.")  # packages that see the real time
_PACKAGES = ("storage", "coordination", "saving", "resume", "formats", "tensor_files", "events", "supervisor")  # a cluster runs


# ---- modules -------------------------------------------------------------------------------------------------------

def _monotonic() -> float:
    return current_cluster().scheduler.now


def _wall() -> float:
    process = current_cluster().current_process
    return current_cluster().server_time() + (process.host.offset if process is not None else 0.0)


def _sleep(seconds: float) -> None:
    current_cluster().scheduler.sleep(seconds)


def _register(function: Callable[..., Any], *values: Any, **named: Any) -> Callable[..., Any]:
    current_process().at_exit.append((function, values, named))
    return function


def _unregister(function: Callable[..., Any]) -> None:
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


def _local(seconds: float | None = None) -> time.struct_time:
    return time.localtime(_wall() if seconds is None else seconds)


def _utc(seconds: float | None = None) -> time.struct_time:
    return time.gmtime(_wall() if seconds is None else seconds)


def _nanoseconds(clock: Callable[[], float]) -> Callable[[], int]:
    return lambda: round(clock() * 10**9)


# Module -> fakes. ``None``: the product does not use it yet, and it would let in real time, real threads or chance.
_REPLACED: dict[types.ModuleType, dict[str, Any]] = {
    time: {"monotonic": _monotonic, "perf_counter": _monotonic, "process_time": _monotonic, "thread_time": _monotonic,
           "monotonic_ns": _nanoseconds(_monotonic), "perf_counter_ns": _nanoseconds(_monotonic), "time": _wall,
           "time_ns": _nanoseconds(_wall), "sleep": _sleep, "localtime": _local, "gmtime": _utc,
           "strftime": lambda text, moment=None: time.strftime(text, moment or _local()),
           "ctime": lambda seconds=None: time.asctime(_local(seconds)),
           "asctime": lambda moment=None: time.asctime(moment or _local()), "clock_gettime": None, "clock_gettime_ns": None},
    threading: {"Thread": Thread, "Event": Event, "Lock": Lock, "RLock": RLock, "Condition": Condition,
                "current_thread": lambda: current_cluster().scheduler.current, "main_thread": lambda: current_process().main,
                "get_ident": lambda: current_cluster().scheduler.current.number, "get_native_id": None, "Timer": None,
                "Semaphore": None,
                "BoundedSemaphore": None, "Barrier": None, "local": None, "enumerate": None, "active_count": None},
    queue: {"SimpleQueue": SimpleQueue, "Queue": None, "LifoQueue": None, "PriorityQueue": None},
    secrets: {"token_hex": lambda count=32: current_cluster().token(count), "token_bytes": None, "token_urlsafe": None,
              "choice": None, "randbelow": None, "randbits": None, "SystemRandom": None},
    socket: {"gethostname": lambda: current_process().host.name, "getfqdn": None, "socket": None, "create_connection": None},
    signal: {"signal": _signal, "set_wakeup_fd": lambda *_, **__: -1, "getsignal": None, "raise_signal": None, "alarm": None,
             "setitimer": None, "pause": None},
    atexit: {"register": _register, "unregister": _unregister},
}


def _unsupported(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} has no fake for a simulated cluster")
    return refuse


def _fake_module(module: types.ModuleType, patched_product: dict[str, Any]) -> types.SimpleNamespace:
    kept = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return types.SimpleNamespace(**{**kept, **patched_product})


for _module, _table in _REPLACED.items():
    for _name in [_name for _name, _value in _table.items() if _value is None]:
        _table[_name] = _unsupported(f"{_module.__name__}.{_name}")
_MODULES = {_module: _fake_module(_module, _table) for _module, _table in _REPLACED.items()}
_FUNCTIONS: dict[Any, Any] = {getattr(_module, _name): _value for _module, _table in _REPLACED.items()
                              for _name, _value in _table.items()}
_FUNCTIONS[threading.Condition.wait] = Condition.wait           # the default of a parameter


def _coarse_time() -> float:
    """Returns the time for records that only users read, exact to the hour: disks that differ in nothing else are equal."""
    return _wall() // 3600 * 3600


def _holder_of_this_process(purpose: str, world_size: int = 1, holds: Any = ()) -> Any:
    process = current_process()
    return lease.LeaseHolder(purpose, "", process.host.name, process.host.name, process.pid, process.pid, _coarse_time(),
                             world_size,
                       tuple(holds))


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


def _is_local(path: str, mounted: Any = None) -> bool:
    return current_process().host.disk.local


def _capture_signals(load_attempt: Any) -> None:
    """Does nothing: the signal file would be one of the real disk."""


def _watch_signals(senders: Any) -> None:
    process = current_process()
    process.own_signals.clear()
    process.on_signal = lambda: senders.on_own() if senders.look() == OWN else None


def _watch_no_signals(senders: Any) -> None:
    current_process().on_signal = None


def _sender(senders: Any) -> str:
    return OWN if all(current_process().own_signals) else OTHER


def _keep_priority() -> None:
    """Does nothing: it would be the priority of a real thread."""


class _Staging(Staging):
    """A staging buffer whose memory is freed when the cluster ends, since a killed process does not free it. A process that takes
    more than its host has left is killed, as by the kernel."""

    def __init__(self, shared: bool = False, fd: int = -1):
        super().__init__(shared, fd)
        current_cluster().cleanups.append(self.close)

    def _grow(self, size: int) -> None:
        process = current_process()
        if size - self.size > process.host.memory:
            current_cluster().kill(process)
            raise Killed
        super()._grow(size)


@cache
def _simulated_modules() -> list[str]:
    """Returns the names of the modules that a cluster can run."""
    packages = [importlib.import_module(f"mindresume.{room}") for room in _PACKAGES]
    return [f"{package.__name__}.{found.name}" for package in packages for found in pkgutil.iter_modules(package.__path__)]


def _product_modules() -> list[types.ModuleType]:
    """Returns the product's modules. Imports those that a cluster can run first: a later import would escape the fakes."""
    for name in _simulated_modules():
        if name not in sys.modules:
            importlib.import_module(name)
    return [module for name, module in list(sys.modules.items()) if module is not None
            and (name + ".").startswith("mindresume.") and not (name + ".").startswith(_NOT_SIMULATED)]


def _fakes() -> dict[Any, Any]:
    """Returns {function or class of the product or of Python: its fake}."""
    return {**_FUNCTIONS, lease.holder_of_this_process: _holder_of_this_process, lease.is_alive: _is_alive,
            host_memory.levels: _memory_levels, mounts.is_local: _is_local,
            crash_loop.LoadAttempt._capture_signals: _capture_signals, SignalSenders.begin: _watch_signals,
            SignalSenders.close: _watch_no_signals, SignalSenders.look: _sender, Staging: _Staging,
            background_scrub.lower_priority: _keep_priority, **memory_disk.FAKES}


class _Patches:
    """Every name, default and field of the product's modules that is replaced, with both values."""

    def __init__(self, modules: list[types.ModuleType]) -> None:
        self.rows: list[tuple[Any, str, Any, Any]] = []         # (holder, name, real value, fake)
        self.modules = {module.__name__ for module in modules}
        self._functions = _fakes()
        self._known: set[int] = set()
        self._classes: list[type] = []
        self._defined: list[types.FunctionType] = []
        for module in modules:
            for key, value in list(vars(module).items()):
                if isinstance(value, types.ModuleType) and value in _MODULES:
                    self.rows.append((module, key, value, _MODULES[value]))
                elif self._is_replaced(value):
                    self.rows.append((module, key, value, self._functions[value]))
                elif getattr(value, "__module__", None) == module.__name__:
                    self._search(value)
        defaults = shard_writer.write_shard.__defaults__        # its clock gives the time in records
        self.rows.append((shard_writer.write_shard, "__defaults__", defaults,
                          tuple(_coarse_time if value is time.time else value for value in defaults)))
        self._values = self._current_values(modules)

    def is_current(self, modules: list[types.ModuleType]) -> bool:
        """Returns whether a new search would find the same: nothing was changed since, by a test for instance. The search takes
        longer than many a simulation."""
        values = self._current_values(modules)
        return self._functions == _fakes() and len(values) == len(self._values) and all(map(operator.is_, values, self._values))

    def _current_values(self, modules: list[types.ModuleType]) -> list[Any]:
        """Returns everything that the search looks at."""
        values: list[Any] = []
        for holder in (*modules, *self._classes):
            values += vars(holder).values()
        for function in self._defined:
            values += function.__defaults__ or ()
            values += (function.__kwdefaults__ or {}).values()
            values += map(_content, function.__closure__ or ())
        return values

    def _is_replaced(self, value: Any) -> bool:
        return _hashable(value) and value in self._functions

    def _search(self, value: Any) -> None:
        """Finds what to replace inside a class (fields) or function (defaults, closures), below decorators too."""
        if id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, type):
            self._classes.append(value)
            for key, inner in list(vars(value).items()):
                bare = inner.__func__ if isinstance(inner, staticmethod) else inner
                if self._is_replaced(bare):
                    new = self._functions[bare]
                    self.rows.append((value, key, inner, staticmethod(new) if isinstance(inner, staticmethod) else new))
                elif isinstance(inner, property):
                    for function in filter(None, (inner.fget, inner.fset, inner.fdel)):
                        self._search(function)
                elif not isinstance(inner, type) or inner.__module__ == value.__module__:
                    self._search(getattr(inner, "__func__", inner))
        elif isinstance(value, types.FunctionType):
            self._defined.append(value)
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
            self._search(value.__wrapped__)

    def _new(self, value: Any) -> Any:
        return self._functions[value] if self._is_replaced(value) else value

    def apply(self) -> None:
        for holder, name, _, value in self.rows:
            setattr(holder, name, value)

    def undo(self) -> None:
        for holder, name, value, _ in reversed(self.rows):
            setattr(holder, name, value)
        late = {module.__name__ for module in _product_modules()} - self.modules
        if late:
            raise RuntimeError(f"imported while a cluster ran, so they see real time or keep fakes: {sorted(late)}")


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
def use_cluster(cluster: Cluster) -> Iterator[None]:
    """Makes the product see ``cluster``. One cluster runs at a time; the outermost call patches the product."""
    active_clusters.append(cluster)
    try:
        with patched_product():
            try:
                yield
            finally:
                cluster.scheduler.end()
                while cluster.cleanups:
                    cluster.cleanups.pop()()
    finally:
        active_clusters.pop()


_depth = [0]
_patches: list[_Patches] = []       # the last ones


@contextmanager
def patched_product() -> Iterator[None]:
    """Patches the product once for many clusters: ``use_cluster`` inside it costs nothing."""
    if not _depth[0]:
        modules = _product_modules()
        if not _patches or not _patches[0].is_current(modules):
            _patches[:] = [_Patches(modules)]
        _patches[0].apply()
        _select_writer(True)
    _depth[0] += 1
    try:
        yield
    finally:
        _depth[0] -= 1
        if not _depth[0]:
            _select_writer(False)
            _patches[0].undo()


def _select_writer(simulated: bool) -> None:
    background_writer.WRITERS["process"] = WriterProcess if simulated else background_writer.WriterProcess
