"""Time, threads, signals, random names and the host: everything that the package asks of the
machine, beside its files.

    from mindresume import runtime

    runtime.sleep(1)
    def watch(clock: Callable[[], float] = runtime.monotonic): ...

No other module of the package imports ``time``, ``threading``, ``queue``, ``secrets``, ``socket``
or ``atexit``, or calls ``signal.signal`` (ruff, TID251). A function elsewhere that asks the kernel,
such as whether a process lives, is marked with ``asks_machine``. A simulated cluster answers all of
them in the place of the machine:

    with runtime.answers({runtime.monotonic: clock_of_the_cluster, lease.is_alive:
    process_table_of_the_cluster, ...}):
"""

from __future__ import annotations

import atexit
import functools
import queue
import secrets
import signal as _signal
import socket
import threading
import time as _time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
# all that ``asks_machine`` has returned
questions: list[Callable[..., Any]] = []
# of the innermost call of ``answers``
_answers: list[Mapping[Any, Callable[..., Any]]] = [{}]


def asks_machine(real: F) -> F:
    """Returns ``real`` as a function that ``answers`` can replace, also where it is a default or
    was imported by its name."""

    @functools.wraps(real, updated=())
    def ask(*values: Any, **named: Any) -> Any:
        return _answers[-1].get(ask, real)(*values, **named)

    questions.append(ask)
    return cast(F, ask)


@contextmanager
def answers(table: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Lets ``table``, {function marked with ``asks_machine``: its replacement}, answer in this
    process. One table at a time."""
    _answers.append(table)
    try:
        yield
    finally:
        _answers.remove(table)


# ---- time ----------------------------------------------------------------------------------------

monotonic = asks_machine(_time.monotonic)
process_time = asks_machine(_time.process_time)
time = asks_machine(_time.time)
sleep = asks_machine(_time.sleep)
localtime = asks_machine(_time.localtime)
gmtime = asks_machine(_time.gmtime)
strftime = _time.strftime
strptime = _time.strptime
mktime = _time.mktime
# for records that only people read: a cluster may give one that is less exact
timestamp = asks_machine(_time.time)


# ---- threads -------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from queue import SimpleQueue as SimpleQueue
    from threading import Condition as Condition
    from threading import Event as Event
    from threading import Lock as Lock
    from threading import RLock as RLock
    from threading import Thread as Thread
else:
    Condition, Event, Lock, RLock, Thread, SimpleQueue = map(
        asks_machine,
        (
            threading.Condition,
            threading.Event,
            threading.Lock,
            threading.RLock,
            threading.Thread,
            queue.SimpleQueue,
        ),
    )
current_thread = asks_machine(threading.current_thread)
main_thread = asks_machine(threading.main_thread)
ThreadLocal, Empty = threading.local, queue.Empty

# ---- this process and its host -------------------------------------------------------------------

token_hex = asks_machine(secrets.token_hex)
gethostname = asks_machine(socket.gethostname)
gethostbyname = socket.gethostbyname
at_exit = asks_machine(atexit.register)
not_at_exit = asks_machine(atexit.unregister)
signal = asks_machine(_signal.signal)
set_wakeup_fd = asks_machine(_signal.set_wakeup_fd)


@contextmanager
def interrupts_to(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Lets ``handler`` receive Ctrl-C and SIGTERM until the end of the block."""
    before = {number: signal(number, handler) for number in (_signal.SIGINT, _signal.SIGTERM)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal(number, former)
