"""Simulated threads, locks, queues and time behave as the real ones; whatever the product asks of
the machine has an answer."""

import inspect
import signal

import pytest

from mindresume import runtime
from mindresume.coordination import host_memory, lease
from mindresume.saving import staging
from mindresume.saving.memory_tier import directory, slots
from mindresume.storage import posix
from sim import machine
from sim.cluster import Cluster, current_cluster, current_process
from sim.machine import use_cluster
from sim.schedule import Schedule
from sim.threads import Event, Lock


def simulated(work, **schedule):
    """Runs ``work()`` as a process. Returns (its result, the cluster)."""
    cluster, found = Cluster(Schedule(**schedule)), []
    with use_cluster(cluster):
        process = cluster.process(cluster.host("node-7"), "one", lambda: found.append(work()))
        cluster.scheduler.run()
    if process.error is not None:
        raise process.error
    return found[0], cluster


# ---- as the real ones ----------------------------------------------------------------------------


def attempt(function, *values, **named):
    try:
        return function(*values, **named)
    except Exception as error:
        return type(error).__name__


def event():
    one, results = runtime.Event(), []
    results.append(one.wait(0.01))

    def sets():
        runtime.sleep(0.02)
        one.set()

    thread = runtime.Thread(target=sets, daemon=True)
    thread.start()
    results += [one.wait(5.0), one.is_set(), one.wait(0), one.wait()]
    one.clear()
    thread.join()
    return [*results, one.is_set(), one.wait(0)]


def lock():
    one, results = runtime.Lock(), []
    results += [
        one.acquire(),
        one.locked(),
        one.acquire(False),
        one.acquire(timeout=0.01),
        one.acquire(blocking=False),
    ]

    def waits():
        results.append(one.acquire(timeout=0.01))
        with one:
            results.append("has it")

    thread = runtime.Thread(target=waits, daemon=True)
    thread.start()
    while len(results) < 6:  # it has waited in vain
        runtime.sleep(0.01)
    one.release()
    thread.join(5.0)
    return [*results, one.locked(), attempt(one.release)]


def lock_taken_again():
    one, results = runtime.RLock(), []
    with one, one:
        results += [one.acquire(False)]
        one.release()
        other = runtime.Thread(
            target=lambda: results.extend([one.acquire(False), attempt(one.release)]), daemon=True
        )
        other.start()
        other.join(5.0)
    after = runtime.Thread(target=lambda: results.append(one.acquire(False)), daemon=True)
    after.start()
    after.join(5.0)
    return [*results, attempt(runtime.RLock().release)]


def condition():
    one, results = runtime.Condition(), []
    results += [attempt(one.wait, 0.01), attempt(one.notify), attempt(one.notify_all)]

    def waits(name):
        with one, one:  # taken twice: a wait gives up both
            results.append((name, one.wait(5.0)))

    threads = [runtime.Thread(target=waits, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
        runtime.sleep(0.01)
    with one:
        one.notify()
        results.append("notified")
        runtime.sleep(0.01)
        results.append("gives it up")
    runtime.sleep(0.02)
    with one:
        one.notify_all()
    for thread in threads:
        thread.join(5.0)
    with one:
        results += [
            one.wait(0.01),
            one.wait_for(lambda: False, 0.01),
            one.wait_for(lambda: 7, 0.01),
        ]
    return [*results, one.acquire(), one.release()]


def simple_queue():
    one, results = runtime.SimpleQueue(), []
    results += [
        one.empty(),
        one.qsize(),
        attempt(one.get_nowait),
        attempt(one.get, timeout=0.01),
        attempt(one.get, False),
    ]
    for item in (1, None, 2):
        one.put(item)
    results += [one.qsize(), one.get(), one.get_nowait(), one.get(timeout=1.0), one.empty()]

    def puts():
        runtime.sleep(0.01)
        one.put("late")

    thread = runtime.Thread(target=puts, daemon=True)
    thread.start()
    results.append(one.get(timeout=5.0))
    thread.join()
    return results


def thread_states():
    results = []
    one = runtime.Thread(
        target=lambda *values, **named: results.append((values, named)),
        args=(1,),
        kwargs={"b": 2},
        name="named",
        daemon=True,
    )
    results += [one.is_alive(), attempt(one.join), one.name, one.daemon]
    one.start()
    one.join()
    results += [one.is_alive(), attempt(one.start)]
    done = runtime.Event()
    slow = runtime.Thread(target=done.wait, daemon=True)
    slow.start()
    results += [slow.join(0.01), slow.is_alive()]
    done.set()
    slow.join()
    nothing = runtime.Thread(daemon=True)
    nothing.start()
    nothing.join()
    return [*results, slow.is_alive(), nothing.is_alive()]


def clocks():
    began = runtime.monotonic(), runtime.time()
    runtime.sleep(0.01)
    ended = runtime.monotonic(), runtime.time()
    return [
        [type(value).__name__, later > value] for value, later in zip(began, ended, strict=True)
    ] + [runtime.localtime().tm_year >= 1970, runtime.gmtime(0).tm_year, attempt(runtime.sleep, 0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "scenario",
    [
        event,
        lock,
        lock_taken_again,
        condition,
        simple_queue,
        thread_states,
        clocks,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_fakes_behave_like_the_real_primitives(scenario):
    assert simulated(scenario)[0] == scenario()


def test_a_killed_process_releases_its_locks_and_its_threads_end():
    cluster, results = Cluster(Schedule()), []
    lock, done = Lock(), Event()

    def killed():
        thread = runtime.Thread(target=done.wait)
        thread.start()
        results.append(thread)
        with lock:
            current_cluster().scheduler.sleep(100.0)

    def other():
        current_cluster().scheduler.sleep(1.0)
        cluster.kill(cluster.processes[0])
        results.append(lock.acquire(timeout=1.0))
        done.set()  # wakes no thread
        results.append(results[0].is_alive())

    with use_cluster(cluster):
        host = cluster.host()
        for work in (killed, other):
            cluster.process(host, work.__name__, work)
        cluster.scheduler.run()
    assert results[1:] == [True, False] and [process.exit for process in cluster.processes] == [
        -9,
        0,
    ]


# ---- names, signals, the end of a process --------------------------------------------------------


def test_a_cluster_answers_whatever_the_product_asks():
    assert [question for question in runtime.questions if question not in machine.ANSWERS] == []


@pytest.mark.parametrize(
    "question",
    [
        lease.holder_of_this_process,
        lease.is_alive,
        host_memory.levels,
        posix.is_local,
        staging.staging_buffer,
        slots.mapped_file,
        directory.make_tier,
        directory.foreign_folder,
        directory.memory_identity,
    ],
    ids=lambda question: question.__name__,
)
def test_an_answer_has_the_signature_of_the_question(question):
    def shape(function):
        return [
            (one.name, one.kind, one.default)
            for one in inspect.signature(function).parameters.values()
        ]

    assert shape(question) == shape(machine.ANSWERS[question])


def test_a_signal_runs_the_handler_and_the_one_before_can_be_put_back():
    results = []

    def fault():
        current_cluster().terminate(current_process())

    def work():
        before = runtime.signal(
            signal.SIGTERM, lambda number, frame: results.append((number, frame))
        )
        fault()
        inner = runtime.signal(signal.SIGTERM, lambda *_: results.append("inner"))
        fault()
        runtime.signal(signal.SIGTERM, inner)
        fault()
        runtime.signal(signal.SIGTERM, signal.SIG_IGN)
        fault()
        results.append(attempt(runtime.signal, signal.SIGTERM, None))
        thread = runtime.Thread(
            target=lambda: results.append(attempt(runtime.signal, signal.SIGTERM, signal.SIG_DFL))
        )
        thread.start()
        thread.join()
        assert runtime.signal(signal.SIGTERM, before) == signal.SIG_IGN and before == signal.SIG_DFL
        fault()

    _, cluster = simulated(work)
    assert results == [(15, None), "inner", (15, None), "TypeError", "ValueError"]
    # the restored default handler ends the process
    assert cluster.processes[0].exit == -15


def test_exit_handlers_run_in_reverse_order():
    results = []

    def work():
        runtime.at_exit(results.append, 1)
        runtime.at_exit(lambda: current_cluster().scheduler.sleep(5.0))
        runtime.at_exit(results.append, 2)
        runtime.at_exit(results.append, 3)
        runtime.not_at_exit(results.clear)
        results.append(0)

    _, cluster = simulated(work)
    assert results[0] == 0 and results[1:] == [3, 2, 1] and cluster.scheduler.now == 5.0
