"""The classes of ``threading`` and ``queue`` for tasks of a simulated cluster.

They behave as the real ones where the product uses them, errors of wrong use included; waiting is
that of the scheduler.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from mindresume.events import ERROR, Notice
from mindresume.fault_injection.faults import Killed
from sim.cluster import current_cluster, current_process
from sim.scheduler import Task


class WaitQueue:
    """Tasks that wait for one condition."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def wait(self, timeout: float | None, where: str) -> bool:
        scheduler = current_cluster().scheduler
        task = scheduler.current
        if task is None:
            raise RuntimeError(f"only a task of the cluster can wait ({where})")
        self._tasks.append(task)
        try:
            return scheduler.block(timeout, where)
        finally:
            if task in self._tasks:
                self._tasks.remove(task)

    def wake(self, count: int = 1 << 30) -> None:
        for task in [task for task in self._tasks if not task.process.dead][:count]:
            self._tasks.remove(task)
            current_cluster().scheduler.wake(task)


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiters = WaitQueue()

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
    """A lock. A task that acquires it twice blocks. A lock of a killed process is free."""

    again = False

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiters = WaitQueue()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = current_cluster().scheduler
        me = scheduler.current
        until = None if timeout < 0 else scheduler.now + timeout
        while self.locked() and not (self.again and self._owner is me):
            left = None if until is None else until - scheduler.now
            if not blocking or (left is not None and left <= 0):
                return False
            self._waiters.wait(left, "waits for a lock")
        self._depth = self._depth + 1 if self.locked() else 1
        self._owner = me
        return True

    def release(self) -> None:
        if not self._depth:
            raise RuntimeError("release unlocked lock")
        if self.again and self._owner is not current_cluster().scheduler.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._free()

    def _free(self) -> tuple[Task | None, int]:
        """Releases the lock entirely and returns the state that ``_take`` needs to restore it."""
        had = self._owner, self._depth
        self._owner, self._depth = None, 0
        self._waiters.wake(1)
        return had

    def _take(self, had: tuple[Task | None, int]) -> None:
        me = current_cluster().scheduler.current
        if me is None or not me.process.dead:
            self.acquire()
        self._owner, self._depth = had

    def locked(self) -> bool:
        return self._depth > 0 and not (self._owner is not None and self._owner.process.dead)

    def owned(self) -> bool:
        """Returns whether the running task holds the lock. A lock that another task may release
        counts as held by any task."""
        return self.locked() and (
            not self.again or self._owner is current_cluster().scheduler.current
        )

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """A lock that its holder may acquire again."""

    again = True


class Condition:
    def __init__(self, lock: Lock | None = None):
        self._lock = lock or RLock()
        self._waiters = WaitQueue()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._lock.owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        had = self._lock._free()
        try:
            return self._waiters.wait(timeout, "waits for a condition")
        finally:
            self._lock._take(had)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = current_cluster().scheduler
        until = None if timeout is None else scheduler.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - scheduler.now
            if left is not None and left <= 0:
                return result
            self.wait(left)
        return result

    def notify(self, count: int = 1) -> None:
        if not self._lock.owned():
            raise RuntimeError("cannot notify on un-acquired lock")
        self._waiters.wake(count)

    def notify_all(self) -> None:
        self.notify(1 << 30)


class Thread:
    """A task of the process that starts it. It ends with the process, as a daemon thread does."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str = "thread",
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ):
        self._target = target
        self._values = args
        self._named = kwargs or {}
        self.name, self.daemon = name, daemon
        self._task: Task | None = None
        self._ended = Event()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._values, **self._named)

    def start(self) -> None:
        process = current_process()
        if self._task is not None:
            raise RuntimeError("threads can only be started once")

        def run() -> None:
            try:
                self.run()
            except Killed:  # with its process: no message
                raise
            except SystemExit:
                pass
            except BaseException as error:  # noqa: B036  as Python: a message, and the thread is gone
                process.emit(
                    Notice(f"error in thread {self.name}: {type(error).__name__}: {error}", ERROR)
                )
            self._ended.set()

        self._task = current_cluster().scheduler.start(process, run, f"{process.name}/{self.name}")

    def join(self, timeout: float | None = None) -> None:
        if self._task is None:
            raise RuntimeError("cannot join thread before it is started")
        if self._task is current_cluster().scheduler.current:
            raise RuntimeError("cannot join current thread")
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return (
            self._task is not None
            and not self._ended.is_set()
            and not self._task.done
            and not self._task.process.dead
        )


class SimpleQueue:
    def __init__(self) -> None:
        self._items: list[Any] = []
        self._waiters = WaitQueue()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        current_cluster().scheduler.check()  # a dead process sends no message to another one
        self._items.append(item)
        self._waiters.wake(1)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler = current_cluster().scheduler
        until = None if timeout is None else scheduler.now + timeout
        while not self._items:
            left = None if until is None else until - scheduler.now
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            self._waiters.wait(left, "waits for a message")
        return self._items.pop(0)

    def wait(self, timeout: float) -> None:
        """Blocks until there may be a message."""
        if not self._items:
            self._waiters.wait(timeout, "waits for a message")

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)
