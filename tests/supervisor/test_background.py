"""The one who watches waits for nobody: a pipe whose reader stopped, a disk that hangs, the limit
of threads."""

import threading
from types import SimpleNamespace

from mindresume import runtime
from mindresume.events import Emitter, Notice
from mindresume.storage import call_within
from mindresume.supervisor.evidence import KEPT, BackgroundHandler


class Recorder:
    """Handles events; ``gate``: not before it is open."""

    def __init__(self):
        self.gate, self.seen, self.closed = threading.Event(), [], threading.Event()

    def handle(self, event, time_s):
        self.gate.wait()
        self.seen.append(event.text)

    def close(self):
        self.closed.set()


def test_a_handler_that_hangs_holds_nobody_up_and_the_newest_events_are_kept():
    inner = Recorder()
    emit = Emitter(BackgroundHandler(inner, patience=0.01))
    for number in range(KEPT + 500):
        emit(Notice(str(number)))  # returns
    emit.close()  # returns, too
    inner.gate.set()
    assert inner.closed.wait(60)
    assert inner.seen[-KEPT:] == [str(number) for number in range(500, KEPT + 500)]


def test_without_a_thread_the_events_wait_for_one(monkeypatch):
    inner = Recorder()
    inner.gate.set()
    handler = BackgroundHandler(inner)

    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "Thread", NoThread)
        handler.handle(Notice("1"), 0.0)
        assert (
            call_within(60, "none", str, hurry=SimpleNamespace(is_hurried=lambda: False)) == "none"
        )
    handler.handle(Notice("2"), 0.0)
    handler.close()
    assert inner.seen == ["1", "2"]


def test_a_handler_that_fails_gets_no_more_events():
    errors, calls = [], []

    class Broken:
        def handle(self, event, time_s):
            calls.append(event)
            raise BrokenPipeError

        def close(self):
            """Does nothing."""

    handler = BackgroundHandler(Broken(), errors.append)
    handler.handle(Notice("1"), 0.0)
    handler.close()
    handler.handle(Notice("2"), 0.0)
    assert len(calls) == 1 and [error.level for error in errors] == ["warning"]


def test_work_that_hangs_is_left_in_a_hurry():
    hangs, answers = threading.Event(), iter([False, False, True, False])
    hurry = SimpleNamespace(is_hurried=lambda: next(answers))
    assert call_within(600, "gave up", hangs.wait, hurry=hurry) == "gave up"
    hangs.set()
    assert call_within(600, "gave up", hangs.wait, hurry=hurry) is True
