"""The order of tasks, and that a killed task has no further effect."""

import gc
from types import SimpleNamespace

import pytest

from sim.schedule import Schedule
from sim.scheduler import Deadlock, OperationLimit, Scheduler


def made(most=1000, **schedule):
    return Scheduler(Schedule(**schedule).chooser(), most)


def process():
    return SimpleNamespace(dead=False, paused_until=0.0)


def run_works(scheduler, *works):
    """Runs each work in its own process. Returns the tasks."""
    tasks = [scheduler.start(process(), work, f"t{number}") for number, work in enumerate(works)]
    scheduler.run()
    return tasks


def counting(scheduler, events, name, count=3):
    def work():
        for _ in range(count):
            events.append((name, scheduler.operation()))

    return work


# ---- turns ---------------------------------------------------------------------------------------


def test_a_switch_runs_another_task_first_and_the_operation_keeps_its_number():
    events, scheduler = [], made(switches=((2, 1),))
    run_works(scheduler, counting(scheduler, events, "a"), counting(scheduler, events, "b"))
    assert events == [("a", 1), ("b", 3), ("b", 4), ("b", 5), ("a", 2), ("a", 6)]


# ---- too long ------------------------------------------------------------------------------------


def test_an_endless_loop_is_too_long_whatever_it_catches():
    """Product code with a broad except clause would handle an error that is raised in the task."""
    scheduler, caught = made(most=50), []

    def work():
        while True:
            try:
                scheduler.operation()
            except Exception as error:
                # as a rank that reports it to the others
                caught.append(error)
                return

    with pytest.raises(OperationLimit):
        run_works(scheduler, work)
    assert caught == []
    scheduler.end()
    assert caught == []


# ---- death ---------------------------------------------------------------------------------------


class Effects:
    """Records what a task does, and tries to do when it is killed."""

    def __init__(self, scheduler):
        self.scheduler, self.done, self.started_runs = scheduler, [], []

    def operation(self, name):
        self.started_runs.append(name)
        self.scheduler.operation()
        self.done.append(name)

    def work(self, wait):
        try:
            self.operation("begin")
            wait()
            self.operation("end")
        except Exception:
            self.operation("except Exception")
        except BaseException:
            self.operation("except BaseException")
            raise
        finally:
            try:
                self.operation("finally")
            finally:
                self.scheduler.sleep(3.0)
                self.done.append("slept")


@pytest.mark.parametrize("how", ["sleeps", "waits", "is about to operate"])
def test_a_killed_task_has_no_effect_any_more(how):
    """The position of the fault does not matter."""
    scheduler = made(switches=((2, 1),) if how == "is about to operate" else ())
    effects = Effects(scheduler)
    wait = {
        "sleeps": lambda: scheduler.sleep(5.0),
        "waits": lambda: scheduler.block(None),
        "is about to operate": lambda: None,
    }[how]

    def kills():
        killed.dead = True
        scheduler.sleep(10.0)

    killed = process()
    scheduler.start(killed, lambda: effects.work(wait), "killed")
    scheduler.start(process(), kills, "kills")
    scheduler.run()
    assert effects.done == ["begin"] and "finally" in effects.started_runs
    assert scheduler.operations == (2 if how == "is about to operate" else 1)


def test_remaining_tasks_have_no_effect_at_the_end():
    scheduler = made()
    effects = Effects(scheduler)
    one = process()
    scheduler.start(one, lambda: effects.work(lambda: scheduler.block(None)), "one")
    with pytest.raises(Deadlock, match="one"):
        scheduler.run()
    scheduler.end()
    assert effects.done == ["begin"] and "finally" in effects.started_runs and one.dead
    gc.collect()
    assert effects.started_runs.count("finally") == 1 and scheduler.tasks == []
