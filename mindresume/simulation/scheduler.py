"""Tasks that take turns in one thread, in simulated time.

    scheduler = Scheduler(Script({17: 1}))
    task = scheduler.start(process, work)
    scheduler.run()                             # until nobody can go on

A task runs until it blocks (``sleep``, ``wait``) or calls ``operation``, where a ``Chooser`` may let another task go on. Nothing
takes real time: when every task waits, the clock jumps to the first moment at which one of them need not wait any longer.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from greenlet import getcurrent, greenlet

TICK = 0.001                    # simulated seconds that an operation takes
NEVER = float("inf")


class Chooser(Protocol):
    """Decides who goes on."""

    def wants(self, number: int) -> bool:
        """Whether another task than the running one may go on before operation ``number``."""

    def choose(self, number: int, current: Task | None, ready: Sequence[Task]) -> Task:
        """Returns one of ``ready`` (by number of the task, ascending), before operation ``number`` of ``current``; None: the
        one that ran until now cannot go on."""


class Killed(BaseException):
    """The process is gone. No except clause of the product can make it come back, as none can catch SIGKILL."""


class Stuck(Exception):
    """Tasks wait for each other, and no time limit will end that."""


class TooLong(Exception):
    """More operations than a schedule may have: tasks that wait for something in a loop without an end."""


class Task:
    """``process``: whatever owns it; it must have ``dead`` and ``paused_until``. ``wakes``: the moment at which it goes on by
    itself; None: it is ready."""
    __slots__ = ("number", "process", "name", "glet", "wakes", "done", "error", "woken", "where")

    def __init__(self, number: int, process: Any, name: str, work: Callable[[], Any], hub: greenlet):
        self.number, self.process, self.name = number, process, name
        self.wakes: float | None = None
        self.woken = False
        self.done = False
        self.error: BaseException | None = None
        self.where = ""                             # what it waits for, for people
        self.glet = greenlet(lambda: self._run(work), hub)

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:              # noqa: B036  the end of a process is a result
            self.error = error
        self.done = True

    def __repr__(self) -> str:
        return f"{self.name}"


class Scheduler:
    """``operations``: how many there were. ``most``: TooLong after so many. ``tick``: seconds that one takes."""

    def __init__(self, chooser: Chooser, most: int = 20_000, tick: float = TICK):
        self.chooser, self.most, self.tick = chooser, most, tick
        self.now = 0.0
        self.operations = 0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.ended: list[Callable[[Task], None]] = []       # told whenever a task has ended
        self._hub = getcurrent()
        self._numbers = 0

    def start(self, process: Any, work: Callable[[], Any], name: str) -> Task:
        task = Task(self._numbers, process, name, work, self._hub)
        self._numbers += 1
        self.tasks.append(task)
        return task

    # ---- called by tasks -------------------------------------------------------------------------------------------

    def operation(self) -> int:
        """A moment at which others may go on first. Returns the number of the operation, from 1."""
        number, me = self.operations + 1, self._me()
        self.operations = number
        self.now += self.tick
        if me is None:                                      # the hub itself looks: nobody else runs
            return number
        if number > self.most:
            self._hub.switch()                              # the product could take an error here for one of its own
            raise Killed
        if self.chooser.wants(number):
            other = self.chooser.choose(number, me, self._ready())
            if other is not me:
                self._next = other
                self._hub.switch()
                self.check()
        return number

    def sleep(self, seconds: float) -> None:
        self.block(max(seconds, 0.0), "sleeps")

    def block(self, seconds: float | None, where: str = "") -> bool:
        """Waits until somebody wakes this task, at most ``seconds`` (None: for ever). Returns whether it was woken."""
        me = self._me()
        if me is None:                                      # the hub: its own time passes
            self.now += seconds or 0.0
            return False
        me.wakes, me.woken, me.where = (NEVER if seconds is None else self.now + seconds), False, where
        self._hub.switch()
        self.check()
        return me.woken

    def wake(self, task: Task) -> None:
        if task.wakes is not None:
            task.wakes, task.woken, task.where = None, True, ""

    def _me(self) -> Task | None:
        """The running task. Killed in a task of a process that is gone: Python unwinds its stack when nobody refers to it any
        more, and what its except clauses do then must not happen."""
        me = self.current
        if me is not None and (me.process.dead or getcurrent() is not me.glet):
            raise Killed
        if me is None and getcurrent() is not self._hub:
            raise Killed
        return me

    def check(self) -> None:
        """Killed if the process of the running task is gone."""
        if self.current is not None and self.current.process.dead:
            raise Killed

    # ---- called by whoever owns the scheduler ----------------------------------------------------------------------

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until every task has ended or ``until()``. Stuck if those that are left wait without an end."""
        self._hub = getcurrent()
        self._next: Task | None = None
        last: Task | None = None
        while not until():
            self._bury(task for task in self.tasks if task.process.dead)
            self.tasks = [task for task in self.tasks if not task.done and not task.process.dead]
            if not self.tasks:
                return
            task, self._next = self._next, None
            if task is None or task.done or task.process.dead:
                ready = self._ready()
                if not ready:
                    self._jump()
                    continue
                task = self.chooser.choose(0, None, _after(ready, last))
            task.wakes = None
            last = self.current = task
            task.glet.parent = self._hub
            task.glet.switch()
            self.current = None
            if self.operations > self.most:
                raise TooLong(f"{self.operations} operations")
            if task.done:
                for tell in self.ended:
                    tell(task)

    def end(self) -> None:
        """Nobody goes on any more."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task.process.dead = True
        self._bury(tasks)

    def _bury(self, tasks: Iterable[Task]) -> None:
        """Unwinds the stacks of killed tasks, of which every operation fails. Python would do that when nobody refers to them any
        more, at a moment that nobody knows, perhaps in the middle of another cluster."""
        for task in tasks:
            while task.glet and not task.done:              # begun, and not at its end
                self.current = task
                task.glet.parent = getcurrent()
                task.glet.throw(Killed)
            task.done, self.current = True, None

    def _ready(self) -> list[Task]:
        now = self.now
        return [task for task in self.tasks if not task.done and not task.process.dead
                and (task.wakes is None or task.wakes <= now) and task.process.paused_until <= now]

    def _jump(self) -> None:
        """To the first moment at which a task can go on."""
        moments = [max(task.wakes or 0.0, task.process.paused_until) for task in self.tasks]
        moment = min(moments)
        if moment == NEVER:
            raise Stuck("; ".join(f"{task.name} {task.where}" for task in self.tasks))
        self.now = max(self.now, moment)


def _after(ready: list[Task], last: Task | None) -> list[Task]:
    """In turn: those behind the one that ran last go first."""
    if last is None:
        return ready
    return [task for task in ready if task.number > last.number] + [task for task in ready if task.number <= last.number]
