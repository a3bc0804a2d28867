"""A cooperative scheduler: tasks in one thread, in simulated time.

    scheduler = Scheduler(Schedule(switches=((17, 1),)).chooser())
    task = scheduler.start(process, work)
    scheduler.run()                             # until every task has ended

A task runs until it blocks (``sleep``, ``block``) or calls ``operation``, where a ``Chooser`` may
switch to another task. Nothing takes real time: when every task waits, the clock jumps to the first
moment at which one of them is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from greenlet import getcurrent, greenlet

from mindresume.fault_injection.faults import Killed

TICK = 0.001  # simulated seconds that an operation takes
NEVER = float("inf")


class Chooser(Protocol):
    """Decides which task continues."""

    def may_switch(self, number: int) -> bool:
        """Returns whether another task than the running one may continue before operation
        ``number``."""

    def choose(self, number: int, current: Task | None, ready: Sequence[Task]) -> Task:
        """Returns one of ``ready`` (ascending by task number), before operation ``number`` of
        ``current``. ``current`` None: the task that ran until now has blocked."""


class Deadlock(Exception):
    """Tasks wait for each other without a time limit."""


class OperationLimit(Exception):
    """The run has more operations than allowed: a task probably polls in an endless loop."""


class Task:
    """A greenlet of a simulated process.

    Args:
        process: its owner, which has ``dead`` and ``paused_until``.

    ``wake_time``: the moment at which it becomes ready; None while it is ready. ``where``: what it
    waits for, for messages.
    """

    __slots__ = (
        "number",
        "process",
        "name",
        "greenlet_task",
        "wake_time",
        "done",
        "error",
        "woken",
        "where",
    )

    def __init__(
        self, number: int, process: Any, name: str, work: Callable[[], Any], hub: greenlet
    ):
        self.number = number
        self.process = process
        self.name = name
        self.wake_time: float | None = None
        self.woken = False
        self.done = False
        self.error: BaseException | None = None
        self.where = ""  # what it waits for, for messages
        self.greenlet_task = greenlet(lambda: self._run(work), hub)

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: B036  the end of a process is a result
            self.error = error
        self.done = True

    def __repr__(self) -> str:
        return f"{self.name}"


class Scheduler:
    """Runs tasks. ``operations``: how many there were. ``most``: raises OperationLimit after so
    many. ``tick``: seconds of each."""

    def __init__(self, chooser: Chooser, most: int = 20_000, tick: float = TICK):
        self.chooser = chooser
        self.most = most
        self.tick = tick
        self.now = 0.0
        self.operations = 0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.ended: list[Callable[[Task], None]] = []  # called when a task has ended
        self._hub = getcurrent()
        self._numbers = 0

    def start(self, process: Any, work: Callable[[], Any], name: str) -> Task:
        task = Task(self._numbers, process, name, work, self._hub)
        self._numbers += 1
        self.tasks.append(task)
        return task

    # ---- called by tasks -------------------------------------------------------------------------

    def operation(self) -> int:
        """Counts an operation, before which another task may continue. Returns its number, from
        1."""
        number, me = self.operations + 1, self._me()
        self.operations = number
        self.now += self.tick
        # called outside of tasks: no other task runs
        if me is None:
            return number
        if number > self.most:
            # an exception here could be handled by the product
            self._hub.switch()
            raise Killed
        if self.chooser.may_switch(number):
            other = self.chooser.choose(number, me, self._ready())
            if other is not me:
                self._next = other
                self._hub.switch()
                self.check()
        return number

    def sleep(self, seconds: float) -> None:
        """Blocks the running task for ``seconds``."""
        self.block(max(seconds, 0.0), "sleeps")

    def block(self, seconds: float | None, where: str = "") -> bool:
        """Blocks the running task until it is woken, at most ``seconds`` (None: no limit). Returns
        whether it was woken."""
        me = self._me()
        # called outside of tasks: only time passes
        if me is None:
            self.now += seconds or 0.0
            return False
        me.wake_time = NEVER if seconds is None else self.now + seconds
        me.woken = False
        me.where = where
        self._hub.switch()
        self.check()
        return me.woken

    def wake(self, task: Task) -> None:
        """Makes a blocked task ready."""
        if task.wake_time is not None:
            task.wake_time = None
            task.woken = True
            task.where = ""

    def _me(self) -> Task | None:
        """Returns the running task. Raises Killed if its process is gone: when Python unwinds the
        stack of a task to which nothing refers any more, the except clauses of the product must
        have no effect."""
        me = self.current
        if me is not None and (me.process.dead or getcurrent() is not me.greenlet_task):
            raise Killed
        if me is None and getcurrent() is not self._hub:
            raise Killed
        return me

    def check(self) -> None:
        """Raises Killed if the process of the running task is gone."""
        if self.current is not None and self.current.process.dead:
            raise Killed

    # ---- called by the owner of the scheduler ----------------------------------------------------

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Runs until every task has ended or ``until()``. Raises Deadlock if the tasks that are
        left wait without a limit."""
        self._hub = getcurrent()
        self._next: Task | None = None
        last: Task | None = None
        while not until():
            self._unwind(task for task in self.tasks if task.process.dead)
            self.tasks = [task for task in self.tasks if not task.done and not task.process.dead]
            if not self.tasks:
                return
            task, self._next = self._next, None
            if task is None or task.done or task.process.dead:
                ready = self._ready()
                if not ready:
                    self._advance_clock()
                    continue
                task = self.chooser.choose(0, None, _round_robin(ready, last))
            task.wake_time = None
            last = self.current = task
            task.greenlet_task.parent = self._hub
            task.greenlet_task.switch()
            self.current = None
            if self.operations > self.most:
                raise OperationLimit(f"{self.operations} operations")
            if task.done:
                for tell in self.ended:
                    tell(task)

    def end(self) -> None:
        """Ends all tasks."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task.process.dead = True
        self._unwind(tasks)

    def _unwind(self, tasks: Iterable[Task]) -> None:
        """Unwinds the stacks of killed tasks; each of their operations fails. Otherwise Python
        would do so when the last reference goes, at an unpredictable moment, perhaps while another
        cluster runs."""
        for task in tasks:
            while task.greenlet_task and not task.done:  # started and not ended
                self.current = task
                task.greenlet_task.parent = getcurrent()
                task.greenlet_task.throw(Killed)
            task.done, self.current = True, None

    def _ready(self) -> list[Task]:
        now = self.now
        return [
            task
            for task in self.tasks
            if not task.done
            and not task.process.dead
            and (task.wake_time is None or task.wake_time <= now)
            and task.process.paused_until <= now
        ]

    def _advance_clock(self) -> None:
        """Advances the clock to the first moment at which a task is ready."""
        moments = [max(task.wake_time or 0.0, task.process.paused_until) for task in self.tasks]
        moment = min(moments)
        if moment == NEVER:
            raise Deadlock("; ".join(f"{task.name} {task.where}" for task in self.tasks))
        self.now = max(self.now, moment)


def _round_robin(ready: list[Task], last: Task | None) -> list[Task]:
    """Returns ``ready`` in round-robin order: tasks after the one that ran last come first."""
    if last is None:
        return ready
    return [task for task in ready if task.number > last.number] + [
        task for task in ready if task.number <= last.number
    ]
