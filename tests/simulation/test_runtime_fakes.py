"""Simulated threads, locks, queues and time behave as the real ones, in every module of the product."""
import atexit
import gc
import importlib
import inspect
import os
import pkgutil
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import suppress

import pytest

from mindresume.coordination import host_memory, lease
from mindresume.events import ERROR
from mindresume.saving import async_saver, background_writer
from mindresume.saving.crash_loop import LoadAttempt
from mindresume.simulation import runtime_fakes
from mindresume.simulation.cluster import EPOCH, Cluster, current_cluster, current_process
from mindresume.simulation.runtime_fakes import patched_product, use_cluster
from mindresume.simulation.schedule import Schedule
from mindresume.simulation.scheduler import Deadlock
from mindresume.storage import mounts

REAL = types.SimpleNamespace(time=time, threading=threading, queue=queue)
SIMULATED = types.SimpleNamespace(**{module.__name__: runtime_fakes._MODULES[module] for module in (time, threading, queue)})


def simulated(work, **schedule):
    """Runs ``work()`` as a process. Returns (its result, the cluster)."""
    cluster, found = Cluster(Schedule(**schedule)), []
    with use_cluster(cluster):
        process = cluster.process(cluster.host("node-7"), "one", lambda: found.append(work()))
        cluster.scheduler.run()
    if process.error is not None:
        raise process.error
    return found[0], cluster


# ---- as the real ones --------------------------------------------------------------------------------------------------------

def attempt(function, *values, **named):
    try:
        return function(*values, **named)
    except Exception as error:
        return type(error).__name__


def event(at):
    one, results = at.threading.Event(), []
    results.append(one.wait(0.01))

    def sets():
        at.time.sleep(0.02)
        one.set()
    thread = at.threading.Thread(target=sets, daemon=True)
    thread.start()
    results += [one.wait(5.0), one.is_set(), one.wait(0), one.wait()]
    one.clear()
    thread.join()
    return [*results, one.is_set(), one.wait(0)]


def lock(at):
    one, results = at.threading.Lock(), []
    results += [one.acquire(), one.locked(), one.acquire(False), one.acquire(timeout=0.01), one.acquire(blocking=False)]

    def waits():
        results.append(one.acquire(timeout=0.01))
        with one:
            results.append("has it")
    thread = at.threading.Thread(target=waits, daemon=True)
    thread.start()
    while len(results) < 6:                                 # it has waited in vain
        at.time.sleep(0.01)
    one.release()
    thread.join(5.0)
    return [*results, one.locked(), attempt(one.release)]


def lock_released_by_another(at):
    one = at.threading.Lock()
    one.acquire()
    thread = at.threading.Thread(target=one.release, daemon=True)
    thread.start()
    thread.join(5.0)
    return one.locked()


def lock_of_a_thread_that_ended(at):
    one = at.threading.Lock()
    thread = at.threading.Thread(target=one.acquire, daemon=True)
    thread.start()
    thread.join(5.0)
    return one.locked(), one.acquire(timeout=0.01)


def lock_taken_again(at):
    one, results = at.threading.RLock(), []
    with one, one:
        results += [one.acquire(False)]
        one.release()
        other = at.threading.Thread(target=lambda: results.extend([one.acquire(False), attempt(one.release)]), daemon=True)
        other.start()
        other.join(5.0)
    after = at.threading.Thread(target=lambda: results.append(one.acquire(False)), daemon=True)
    after.start()
    after.join(5.0)
    return [*results, attempt(at.threading.RLock().release)]


def condition(at):
    one, results = at.threading.Condition(), []
    results += [attempt(one.wait, 0.01), attempt(one.notify), attempt(one.notify_all)]

    def waits(name):
        with one, one:                                  # taken twice: a wait gives up both
            results.append((name, one.wait(5.0)))
    threads = [at.threading.Thread(target=waits, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
        at.time.sleep(0.01)
    with one:
        one.notify()
        results.append("notified")
        at.time.sleep(0.01)
        results.append("gives it up")
    at.time.sleep(0.02)
    with one:
        one.notify_all()
    for thread in threads:
        thread.join(5.0)
    with one:
        results += [one.wait(0.01), one.wait_for(lambda: False, 0.01), one.wait_for(lambda: 7, 0.01)]
    return [*results, one.acquire(), one.release()]


def condition_of_a_lock(at):
    inner = at.threading.Lock()
    one, results = at.threading.Condition(inner), []
    with one:
        results += [inner.locked(), one.wait(0.01), inner.locked()]
    return [*results, inner.locked(), attempt(one.wait, 0.01)]


def simple_queue(at):
    one, results = at.queue.SimpleQueue(), []
    results += [one.empty(), one.qsize(), attempt(one.get_nowait), attempt(one.get, timeout=0.01), attempt(one.get, False)]
    for item in (1, None, 2):
        one.put(item)
    results += [one.qsize(), one.get(), one.get_nowait(), one.get(timeout=1.0), one.empty()]

    def puts():
        at.time.sleep(0.01)
        one.put("late")
    thread = at.threading.Thread(target=puts, daemon=True)
    thread.start()
    results.append(one.get(timeout=5.0))
    thread.join()
    return results


def thread_states(at):
    results = []
    one = at.threading.Thread(target=lambda *values, **named: results.append((values, named)), args=(1,), kwargs={"b": 2},
                              name="named", daemon=True)
    results += [one.is_alive(), attempt(one.join), one.name, one.daemon]
    one.start()
    one.join()
    results += [one.is_alive(), attempt(one.start)]
    done = at.threading.Event()
    slow = at.threading.Thread(target=done.wait, daemon=True)
    slow.start()
    results += [slow.join(0.01), slow.is_alive()]
    done.set()
    slow.join()
    nothing = at.threading.Thread(daemon=True)
    nothing.start()
    nothing.join()
    return [*results, slow.is_alive(), nothing.is_alive()]


def thread_of_a_subclass(at):
    results = []

    class Own(at.threading.Thread):
        def run(self):
            results.append("run")
    one = Own(daemon=True)
    one.start()
    one.join()
    return results


def thread_that_exits(at):
    def work():
        raise SystemExit(3)
    one = at.threading.Thread(target=work, daemon=True)
    one.start()
    one.join(5.0)
    return one.is_alive()


def thread_that_joins_itself(at):
    results = []
    one = at.threading.Thread(target=lambda: results.append(attempt(one.join)), daemon=True)
    one.start()
    one.join(5.0)
    return results


def main_thread(at):
    results = [at.threading.current_thread() is at.threading.main_thread()]
    one = at.threading.Thread(target=lambda: results.append(at.threading.current_thread() is at.threading.main_thread()))
    one.daemon = True
    one.start()
    one.join()
    return results


def clocks(at):
    began = at.time.monotonic(), at.time.perf_counter(), at.time.time(), at.time.monotonic_ns(), at.time.time_ns()
    at.time.sleep(0.01)
    ended = at.time.monotonic(), at.time.perf_counter(), at.time.time(), at.time.monotonic_ns(), at.time.time_ns()
    return [[type(value).__name__, later > value] for value, later in zip(began, ended, strict=True)] + [
        at.time.strftime("%Y") == str(at.time.localtime().tm_year), at.time.gmtime(0).tm_year, attempt(at.time.sleep, 0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("scenario", [
    event, lock, lock_released_by_another, lock_of_a_thread_that_ended, lock_taken_again, condition, condition_of_a_lock,
    simple_queue, thread_states, thread_of_a_subclass, thread_that_exits, thread_that_joins_itself, main_thread, clocks],
    ids=lambda scenario: scenario.__name__)
def test_fakes_behave_like_the_real_primitives(scenario):
    assert simulated(lambda: scenario(SIMULATED))[0] == scenario(REAL)


def test_acquiring_a_lock_twice_in_one_thread_waits_forever():
    def work():
        one = SIMULATED.threading.Lock()
        one.acquire()
        one.acquire()
    with pytest.raises(Deadlock, match="waits for a lock"):
        simulated(work)


def test_an_error_ends_a_thread_and_not_the_process():
    def work():
        def bad():
            raise ValueError("x")
        one = SIMULATED.threading.Thread(target=bad, name="t")
        one.start()
        one.join()
        return current_process()
    process, _ = simulated(work)
    assert [event.level for _, event in process.events] == [ERROR] and process.exit == 0


def test_a_killed_process_releases_its_locks_and_its_threads_end():
    cluster, results = Cluster(Schedule()), []
    lock, done = runtime_fakes.Lock(), runtime_fakes.Event()

    def killed():
        thread = runtime_fakes.Thread(target=done.wait)
        thread.start()
        results.append(thread)
        with lock:
            current_cluster().scheduler.sleep(100.0)

    def other():
        current_cluster().scheduler.sleep(1.0)
        cluster.kill(cluster.processes[0])
        results.append(lock.acquire(timeout=1.0))
        done.set()                                                      # wakes no thread
        results.append(results[0].is_alive())
    with use_cluster(cluster):
        host = cluster.host()
        for work in (killed, other):
            cluster.process(host, work.__name__, work)
        cluster.scheduler.run()
    assert results[1:] == [True, False] and [process.exit for process in cluster.processes] == [-9, 0]


def test_time_is_that_of_the_host_and_passes_at_once():
    def work():
        SIMULATED.time.sleep(86400.0)
        return SIMULATED.time.time(), SIMULATED.time.monotonic(), current_cluster().server_time()
    began = time.monotonic()
    found, _ = simulated(work, clocks=(-7200.0,))
    assert found == (EPOCH + 86400.0 - 7200.0, 86400.0, EPOCH + 86400.0) and time.monotonic() - began < 3600.0


# ---- names, signals, the end of a process ------------------------------------------------------------------------------------

def test_tokens_are_unique_and_depend_on_the_history_only():
    def work():
        return [runtime_fakes._MODULES[secrets].token_hex(4) for _ in range(500)]
    one, two = simulated(work)[0], simulated(work)[0]
    assert one == two and len(set(one)) == 500 and {len(name) for name in one} == {8}


def test_a_process_is_identified_by_its_host_and_number():
    def work():
        one = lease.holder_of_this_process("training", 2, ["a"])
        assert lease.is_alive(one)
        return one, runtime_fakes._MODULES[socket].gethostname()
    (owner, host), cluster = simulated(work)
    assert (owner.host, owner.pid, owner.world_size, owner.holds, host) == ("node-7", 101, 2, ("a",), "node-7")
    assert cluster.processes[0].dead


@pytest.mark.parametrize(("real", "fake"), [
    (lease.holder_of_this_process, runtime_fakes._holder_of_this_process), (lease.is_alive, runtime_fakes._is_alive),
                                                (host_memory.levels, runtime_fakes._memory_levels),
    (mounts.is_local, runtime_fakes._is_local), (LoadAttempt._capture_signals, runtime_fakes._capture_signals),
                                                (async_saver.Staging, runtime_fakes._Staging)])
def test_fakes_have_the_signatures_of_the_real_functions(real, fake):
    def shape(function):
        return [(one.kind, one.default) for one in inspect.signature(function).parameters.values()]
    assert shape(real) == shape(fake)


def test_a_signal_runs_the_handler_and_the_one_before_can_be_put_back():
    module, results = runtime_fakes._MODULES[signal], []

    def fault():
        current_cluster().terminate(current_process())

    def work():
        before = module.signal(signal.SIGTERM, lambda number, frame: results.append((number, frame)))
        fault()
        inner = module.signal(signal.SIGTERM, lambda *_: results.append("inner"))
        fault()
        module.signal(signal.SIGTERM, inner)
        fault()
        module.signal(signal.SIGTERM, signal.SIG_IGN)
        fault()
        results.append(attempt(module.signal, signal.SIGTERM, None))
        thread = runtime_fakes.Thread(target=lambda: results.append(attempt(module.signal, signal.SIGTERM, signal.SIG_DFL)))
        thread.start()
        thread.join()
        assert module.signal(signal.SIGTERM, before) == signal.SIG_IGN and before == signal.SIG_DFL
        fault()
    _, cluster = simulated(work)
    assert results == [(15, None), "inner", (15, None), "TypeError", "ValueError"]
    assert cluster.processes[0].exit == -15                          # the restored default handler ends the process


def test_exit_handlers_run_in_reverse_order():
    module, results = runtime_fakes._MODULES[atexit], []

    def work():
        module.register(results.append, 1)
        module.register(lambda: current_cluster().scheduler.sleep(5.0))
        module.register(results.append, 2)
        module.register(results.append, 3)
        module.unregister(results.clear)
        results.append(0)
    _, cluster = simulated(work)
    assert results[0] == 0 and results[1:] == [3, 2, 1] and cluster.scheduler.now == 5.0


def test_an_unregistered_exit_handler_is_not_called():
    module, results = runtime_fakes._MODULES[atexit], []

    def gone():
        results.append("gone")

    def work():
        module.register(gone)
        module.unregister(gone)
    simulated(work)
    assert results == []


@pytest.mark.parametrize(("module", "name"), [
    (module, name) for module, table in runtime_fakes._REPLACED.items() for name, value in table.items()
    if getattr(value, "__name__", "") == "refuse"])
def test_a_function_without_a_fake_is_refused(module, name):
    with pytest.raises(NotImplementedError, match=f"{module.__name__}.{name}"):
        getattr(runtime_fakes._MODULES[module], name)()


# ---- nothing escapes, and everything is put back ------------------------------------------------------------------------------

WATCHED = [getattr(module, name) for module, table in runtime_fakes._REPLACED.items() for name in table]
ROOMS = ("mindresume.storage", "mindresume.coordination", "mindresume.saving", "mindresume.resume", "mindresume.formats",
         "mindresume.tensor_files", "mindresume.events")


def modules():
    for name in ROOMS:
        room = importlib.import_module(name)
        yield room
        for found in pkgutil.iter_modules(getattr(room, "__path__", ())):
            yield importlib.import_module(f"{name}.{found.name}")


def _of_the_product(one):
    name = one.__dict__.get("__module__") if type(one) is type else getattr(type(one), "__module__", None)
    return isinstance(name, str) and name.startswith("mindresume.")


def escaped(known):
    """Returns (kind, module) of everything in the product, except tests and tools, that refers to one of ``known``."""
    identities, found = set(map(id, known)), set()

    def look(kind, owner, values):
        name = owner if isinstance(owner, str) else getattr(owner, "__module__", None)
        if isinstance(name, str) and (name + ".").startswith(ROOMS) and any(id(value) in identities for value in values):
            found.add((kind, name))
    for one in gc.get_objects():
        if type(one) is types.ModuleType:
            look("global", one.__name__, list(vars(one).values()))
        elif type(one) is types.FunctionType:
            look("default", one, [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()])
            look("cell", one, map(runtime_fakes._content, one.__closure__ or ()))
        elif _of_the_product(one):                      # of others even a look at an attribute can import something
            values = list(getattr(one, "__dict__", {}).values())
            look("field", one, [inspect.getattr_static(value, "__func__", value) for value in values])
    return sorted(found)


def nothing_real_is_held():
    known = [*runtime_fakes._REPLACED, *WATCHED]
    list(modules())
    before = escaped(known)
    assert ("global", "mindresume.coordination.lease") in before and ("default",
                                                                      "mindresume.coordination.storage_topology") in before
    assert ("field", "mindresume.coordination.collectives") in before
    with patched_product():
        assert escaped(known) == []
    assert escaped(known) == before


def test_no_module_of_the_product_keeps_a_real_function():
    """Runs in its own process: objects of other tests may hold real clocks."""
    done = subprocess.run([sys.executable, "-c", f"import {__name__}; {__name__}.nothing_real_is_held()"],
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def state_of_modules():
    """Returns every global, default, field and closure value of the product's modules, by identity."""
    found = {}

    def inside(name, value):
        if isinstance(value, types.FunctionType):
            found[name, "defaults"] = [id(one) for one in (value.__defaults__ or (), *(value.__kwdefaults__ or {}).values())]
            found[name, "cells"] = [id(runtime_fakes._content(cell)) for cell in value.__closure__ or ()]
        elif isinstance(value, type):
            for key, inner in vars(value).items():
                if key not in ("__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl"):
                    found[name, key] = id(inner)
                    if isinstance(inner, types.FunctionType):
                        inside(f"{name}.{key}", inner)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("mindresume"):
            for key, value in vars(module).items():
                found[module.__name__, key] = id(value)
                if getattr(value, "__module__", None) == module.__name__:
                    inside(f"{module.__name__}.{key}", value)
    found["writers"] = dict(background_writer.WRITERS)
    return found


def test_everything_is_put_back():
    with patched_product():                                         # imports what it needs
        pass
    before = state_of_modules()
    with patched_product():
        during = state_of_modules()
        with patched_product():
            assert state_of_modules() == during
        assert state_of_modules() == during
    assert state_of_modules() == before and during != before


def test_everything_is_put_back_after_an_error_in_the_middle():
    before = state_of_modules()
    with pytest.raises(KeyError), use_cluster(Cluster(Schedule())):
        raise KeyError
    assert state_of_modules() == before and not runtime_fakes.active_clusters


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Returns a module that uses time and threads in every possible way."""
    (tmp_path / "zz_written.py").write_text('''
import functools
import time as clock_module
from dataclasses import dataclass, field
from queue import SimpleQueue
from secrets import token_hex
from socket import gethostname
from threading import Condition, Event, Lock, RLock, Thread, current_thread
from time import monotonic, sleep as rest
from typing import Any, Callable

def defaults(a, clock=monotonic, *, pause=rest):
    return clock, pause

@functools.lru_cache
def decorated(clock=monotonic):
    return clock

@dataclass
class Fields:
    clock: Callable = monotonic
    lock: Any = field(default_factory=Lock)
    class Inner:
        pause = staticmethod(rest)
    @property
    def moment(self, clock=monotonic):
        return clock
''')
    package = importlib.import_module("mindresume.saving")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    yield importlib.import_module("mindresume.saving.zz_written")
    sys.modules.pop("mindresume.saving.zz_written")
    del package.zz_written


def test_a_function_is_replaced_however_it_was_imported(written):
    before = vars(written).copy()
    with patched_product():
        assert written.clock_module is runtime_fakes._MODULES[time]
        for name, expected in (("SimpleQueue", runtime_fakes.SimpleQueue), ("Condition", runtime_fakes.Condition),
                               ("Lock", runtime_fakes.Lock),
                               ("Event", runtime_fakes.Event), ("RLock", runtime_fakes.RLock), ("Thread", runtime_fakes.Thread),
                               ("rest", runtime_fakes._sleep), ("monotonic", runtime_fakes._monotonic)):
            assert getattr(written, name) is expected
        for name in ("token_hex", "gethostname", "current_thread"):
            assert getattr(written, name) is not before[name]
        assert written.defaults(1) == (runtime_fakes._monotonic, runtime_fakes._sleep)
        assert written.decorated.__wrapped__() is runtime_fakes._monotonic and written.Fields().moment is runtime_fakes._monotonic
        assert written.Fields().clock is runtime_fakes._monotonic and isinstance(written.Fields().lock, runtime_fakes.Lock)
        assert written.Fields.Inner.pause is runtime_fakes._sleep
    assert vars(written) == before and written.defaults(1) == (time.monotonic, time.sleep)
    assert written.Fields.Inner.pause is time.sleep and isinstance(written.Fields().lock, type(threading.Lock()))


@pytest.mark.parametrize("place", ["global", "field", "default", "named default"])
def test_a_change_of_the_product_between_two_clusters_is_seen(written, place):
    """What was found for one cluster is used for the next only if nothing has changed."""
    with patched_product():
        pass
    if place == "global":
        written.later = time.sleep
    elif place == "field":
        written.Fields.later = staticmethod(time.sleep)
    elif place == "default":
        written.defaults.__defaults__ = (time.sleep,)
    else:
        written.defaults.__kwdefaults__ = {"pause": time.monotonic}
    with patched_product():
        if place == "global":
            assert written.later is runtime_fakes._sleep
        elif place == "field":
            assert written.Fields.later is runtime_fakes._sleep
        elif place == "default":
            assert written.defaults.__defaults__ == (runtime_fakes._sleep,)
        else:
            assert written.defaults.__kwdefaults__ == {"pause": runtime_fakes._monotonic}


def test_a_module_of_the_product_that_is_imported_meanwhile_is_reported(tmp_path, monkeypatch):
    (tmp_path / "zz_late.py").write_text("import time\n")
    package = importlib.import_module("mindresume.saving")
    try:
        with pytest.raises(RuntimeError, match="mindresume.saving.zz_late"), patched_product():
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
            importlib.import_module("mindresume.saving.zz_late")
        assert async_saver.time is time
    finally:
        sys.modules.pop("mindresume.saving.zz_late", None)


def test_no_memory_and_no_file_of_a_killed_process_is_left_open():
    def open_files():
        """Returns the open files of staging buffers only: the process may have others."""
        gc.collect()
        found = []
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):                     # the listing itself
                if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:mindresume"):
                    found.append(name)
        return sorted(found)

    def work():
        async_saver.AsyncSaver.__init__.__globals__["Staging"](shared=True)
        current_cluster().scheduler.sleep(10.0)
    before = open_files()
    cluster = Cluster(Schedule())
    with use_cluster(cluster):
        host = cluster.host()
        killed = cluster.process(host, "killed", work)
        cluster.process(host, "kills", lambda: (current_cluster().scheduler.sleep(1.0), cluster.kill(killed)))
        cluster.scheduler.run()
    assert open_files() == before


def test_a_fake_that_a_test_changes_is_used(monkeypatch):
    real = host_memory.levels
    with runtime_fakes.patched_product():
        assert host_memory.levels is runtime_fakes._memory_levels
    monkeypatch.setattr(runtime_fakes, "_memory_levels", lambda root="/": [])
    with runtime_fakes.patched_product():
        assert host_memory.levels is runtime_fakes._memory_levels
    assert host_memory.levels is real
