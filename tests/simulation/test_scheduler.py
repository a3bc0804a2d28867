"""The order of tasks, and that a killed task has no further effect."""

import gc
from types import SimpleNamespace

import pytest

from mindresume.fault_injection.faults import Killed
from sim.schedule import Schedule
from sim.scheduler import TICK, Deadlock, OperationLimit, Scheduler


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


def test_each_task_runs_as_far_as_it_can_without_switches():
    events, scheduler = [], made()
    run_works(scheduler, counting(scheduler, events, "a"), counting(scheduler, events, "b"))
    assert events == [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("b", 6)]


def test_a_switch_runs_another_task_first_and_the_operation_keeps_its_number():
    events, scheduler = [], made(switches=((2, 1),))
    run_works(scheduler, counting(scheduler, events, "a"), counting(scheduler, events, "b"))
    assert events == [("a", 1), ("b", 3), ("b", 4), ("b", 5), ("a", 2), ("a", 6)]


@pytest.mark.parametrize(("further", "first"), [(1, "b"), (2, "c"), (3, "b"), (4, "c")])
def test_a_switch_is_an_offset_in_the_task_list(further, first):
    events, scheduler = [], made(switches=((1, further),))
    run_works(scheduler, *(counting(scheduler, events, name, 1) for name in "abc"))
    assert events[0][0] == first


def test_a_switch_without_another_ready_task_changes_nothing():
    events, scheduler = [], made(switches=((1, 1), (2, 3)))
    run_works(scheduler, counting(scheduler, events, "a"))
    assert events == [("a", 1), ("a", 2), ("a", 3)]


def test_a_pick_lets_another_than_the_next_begin():
    events, scheduler = [], made(picks=((1, 2),))
    run_works(scheduler, *(counting(scheduler, events, name, 1) for name in "abc"))
    assert [name for name, _ in events] == ["c", "a", "b"]


def test_the_next_task_runs_when_one_waits():
    events, scheduler = [], made()

    def work(name):
        for _ in range(2):
            events.append(name)
            scheduler.sleep(0.0)

    run_works(scheduler, *(lambda name=name: work(name) for name in "abc"))
    assert "".join(events) == "abcabc"


def test_an_operation_takes_a_tick():
    events, scheduler = [], made()
    run_works(scheduler, counting(scheduler, events, "a"))
    assert scheduler.now == pytest.approx(3 * TICK) and scheduler.operations == 3


def test_a_task_that_raises_ends_and_the_others_continue():
    events, scheduler = [], made()
    ended = []
    scheduler.ended.append(lambda task: ended.append((task.name, type(task.error))))

    def bad():
        raise ValueError("x")

    run_works(scheduler, bad, counting(scheduler, events, "b", 1))
    assert ended == [("t0", ValueError), ("t1", type(None))] and events == [("b", 1)]


# ---- time ----------------------------------------------------------------------------------------


def test_sleepers_wake_in_the_order_of_their_moments():
    events, scheduler = [], made()

    def work(seconds):
        scheduler.sleep(seconds)
        events.append((seconds, scheduler.now))

    run_works(scheduler, *(lambda seconds=seconds: work(seconds) for seconds in (30.0, 10.0, 20.0)))
    assert events == [(10.0, 10.0), (20.0, 20.0), (30.0, 30.0)]


@pytest.mark.parametrize(
    ("timeout", "woken", "moment"), [(None, True, 5.0), (9.0, True, 5.0), (3.0, False, 3.0)]
)
def test_a_blocked_task_is_woken_or_times_out(timeout, woken, moment):
    events, scheduler = [], made()

    def waits():
        events.append((scheduler.block(timeout), scheduler.now))

    def wakes():
        scheduler.sleep(5.0)
        scheduler.wake(waiting)

    waiting = scheduler.start(process(), waits, "waits")
    scheduler.start(process(), wakes, "wakes")
    scheduler.run()
    assert events == [(woken, moment)]


def test_waking_a_task_that_does_not_wait_has_no_effect():
    events, scheduler = [], made()

    def work():
        scheduler.wake(scheduler.current)
        events.append(scheduler.block(1.0))

    run_works(scheduler, work)
    assert events == [False]


def test_tasks_that_wait_for_each_other_are_deadlocked():
    scheduler = made()
    with pytest.raises(Deadlock, match="t0 for b; t1 for a"):
        run_works(
            scheduler,
            lambda: scheduler.block(None, "for b"),
            lambda: scheduler.block(None, "for a"),
        )


def test_a_wait_with_a_limit_is_not_a_deadlock():
    scheduler = made()
    with pytest.raises(Deadlock, match="^t0 $"):
        run_works(scheduler, lambda: scheduler.block(None), lambda: scheduler.block(7.0))
    assert scheduler.now == 7.0


def test_a_paused_process_is_not_woken_before_it_continues():
    events, scheduler = [], made()
    one = process()

    def sleeper():
        scheduler.sleep(1.0)
        events.append(("sleeper", scheduler.now))

    def pauses():
        one.paused_until = 50.0

    scheduler.start(one, sleeper, "sleeper")
    scheduler.start(process(), pauses, "pauses")
    scheduler.run()
    assert events == [("sleeper", 50.0)]


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


def test_the_maximum_number_of_operations_is_not_too_long():
    events, scheduler = [], made(most=3)
    run_works(scheduler, counting(scheduler, events, "a"))
    assert len(events) == 3


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


def test_the_stack_of_a_killed_task_is_unwound_at_once_not_when_python_collects_it():
    scheduler, moments = made(), []
    killed, gone = process(), []

    def waits():
        try:
            scheduler.block(None)
        finally:
            moments.append(scheduler.now)

    def kills():
        scheduler.sleep(1.0)
        killed.dead = True
        scheduler.sleep(1.0)
        gone.append(list(moments))

    task = scheduler.start(killed, waits, "killed")
    scheduler.start(process(), kills, "kills")
    scheduler.run()
    assert gone == [[1.0]] and isinstance(task.error, Killed) and task.done


def test_a_task_that_was_killed_before_it_began_never_begins():
    scheduler, events = made(), []
    one = process()
    one.dead = True
    scheduler.start(one, lambda: events.append("begun"), "one")
    scheduler.run()
    assert events == []


def test_a_task_that_kills_its_process_ends_at_its_next_operation():
    scheduler, events, one = made(), [], process()

    def work():
        try:
            one.dead = True
            scheduler.operation()
        finally:
            events.append("finally")
            with pytest.raises(Killed):
                scheduler.operation()
            with pytest.raises(Killed):
                scheduler.sleep(1.0)

    scheduler.start(one, work, "one")
    scheduler.run()
    assert events == ["finally"] and scheduler.operations == 0


def test_a_kill_among_many_does_not_disturb_the_others():
    events, scheduler = [], made()
    killed = process()

    def sleeper(name, seconds):
        for _ in range(3):
            scheduler.sleep(seconds)
            events.append((name, scheduler.now))

    def kills():
        scheduler.sleep(2.5)
        killed.dead = True

    for name in ("one", "two"):
        scheduler.start(killed, lambda name=name: sleeper(name, 1.0), name)
    scheduler.start(process(), lambda: sleeper("other", 2.0), "other")
    scheduler.start(process(), kills, "kills")
    scheduler.run()
    assert [row for row in events if row[0] == "other"] == [
        ("other", 2.0),
        ("other", 4.0),
        ("other", 6.0),
    ]
    assert max(moment for name, moment in events if name != "other") == 2.0


def test_remaining_tasks_have_no_effect_at_the_end():
    scheduler = made()
    effects = Effects(scheduler)
    one = process()
    scheduler.start(one, lambda: effects.work(lambda: scheduler.block(None)), "one")
    with pytest.raises(Deadlock):
        scheduler.run()
    scheduler.end()
    assert effects.done == ["begin"] and "finally" in effects.started_runs and one.dead
    gc.collect()
    assert effects.started_runs.count("finally") == 1 and scheduler.tasks == []


def test_a_run_ends_at_its_condition_and_can_continue():
    events, scheduler = [], made()

    def work():
        for _ in range(4):
            scheduler.sleep(1.0)
            events.append(scheduler.now)

    scheduler.start(process(), work, "one")
    scheduler.run(until=lambda: len(events) >= 2)
    assert events == [1.0, 2.0]
    scheduler.run()
    assert events == [1.0, 2.0, 3.0, 4.0]
